"""`kvpool pin`, `kvpool expire` and `kvpool prefetch`: what an operator knows of a prompt better than any policy."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.commands.option_bounds import within
from kvpool.commands.prompts import CacheSalt, HashSeed, NamedPrompt, NameKeyFile, Namespace, Prompt, Tokenizer
from kvpool.protocol.types import HintKind
from kvpool.report.output import say
from kvpool.report.quotas import size_text
from kvpool.v1 import pool_pb2 as pb

TIMEOUT_MS = 20_000
"""A long prompt's names are computed and sent at once."""
LOOK_EVERY_S = 0.25
DAY_S = 86_400
SEND_IT = "Send the prompt to an engine once and repeat the command, or ask `kvpool explain` what is missing."


def pin(
    prompt: Prompt,
    namespace: Namespace,
    seconds: Annotated[
        int,
        typer.Option(
            callback=within(1, DAY_S, "or --end, which ends pins"), help="How long; a pin that ends later stays."
        ),
    ] = 3_600,
    end: Annotated[bool, typer.Option("--end", help="End the prompt's pins instead.")] = False,
    tokenizer: Tokenizer = "",
    cache_salt: CacheSalt = "",
    hash_seed: HashSeed = None,
    name_key_file: NameKeyFile = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Have a prompt's stored blocks evicted last, for a while and within the tenant's budget (--pin-budget).

    Nothing is pinned after a restart of the server. Other prompts' blocks are pinned when they are named.
    """
    with common.client_of(endpoint) as client:
        named = NamedPrompt.read(client, prompt, namespace, tokenizer, cache_salt, hash_seed, name_key_file)
        result = client.admin.hint(
            named.info.fingerprint, named.runs, HintKind.PIN, pin_seconds=0 if end else seconds, timeout_ms=TIMEOUT_MS
        )
        budgets = [each for each in client.admin.pin_budgets() if each.tenant == named.spec.tenant]
    if as_json:
        _print_json(result)
        return
    if end:
        say(f"{result.num_blocks:,} of {named} are pinned no longer.")
        if result.num_blocks < named.num_blocks:
            sentence = "Blocks that other stored prompts continue stay as they are"
            say(f"{sentence}: name the longest prompt to end their pins.")
        return
    if not result.num_blocks and not result.num_refused:
        say(f"Nothing is pinned: none of {named} is in memory. {SEND_IT}")
        return
    say(f"{result.num_blocks:,} of {named} are pinned for {seconds:,} s.")
    if result.num_refused:
        say(f"{result.num_refused:,} stored blocks are not pinned: the budget has no room for them.")
    for budget in budgets:
        say(f"The tenant has pinned {size_text(budget.used_bytes)} of {size_text(budget.limit_bytes)}.")


def expire(
    prompt: Prompt,
    namespace: Namespace,
    tokenizer: Tokenizer = "",
    cache_salt: CacheSalt = "",
    hash_seed: HashSeed = None,
    name_key_file: NameKeyFile = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Have a prompt's blocks evicted before all others, until they are used again.

    Blocks that other stored prompts begin with, and pinned ones, are left alone.
    """
    with common.client_of(endpoint) as client:
        named = NamedPrompt.read(client, prompt, namespace, tokenizer, cache_salt, hash_seed, name_key_file)
        result = client.admin.hint(named.info.fingerprint, named.runs, HintKind.EXPIRE, timeout_ms=TIMEOUT_MS)
    if as_json:
        _print_json(result)
        return
    say(f"{result.num_blocks:,} of {named} will be evicted before others.")
    if result.num_blocks < named.num_blocks:
        say("Pinned blocks, and those that other stored prompts continue, stay as they are: name the longest prompt.")


def prefetch(
    prompt: Prompt,
    namespace: Namespace,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=within(0, 600), help="How long to wait until the blocks are up."),
    ] = 0.0,
    tokenizer: Tokenizer = "",
    cache_salt: CacheSalt = "",
    hash_seed: HashSeed = None,
    name_key_file: NameKeyFile = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Bring a prompt's blocks up from the server's tiers, before a request comes."""
    with common.client_of(endpoint) as client:
        named = NamedPrompt.read(client, prompt, namespace, tokenizer, cache_salt, hash_seed, name_key_file)
        ends_at = time.monotonic() + wait
        while True:
            result = client.admin.hint(named.info.fingerprint, named.runs, HintKind.PREFETCH, timeout_ms=TIMEOUT_MS)
            if not result.num_pending or time.monotonic() >= ends_at:
                break
            time.sleep(LOOK_EVERY_S)
    if as_json:
        _print_json(result)
        return
    if not result.num_blocks and not result.num_pending:
        say(f"None of {named} is in memory, or on its way up from a tier. {SEND_IT}")
        return
    pending = f", and {result.num_pending:,} or more are on their way up" if result.num_pending else ""
    say(f"{result.num_blocks:,} of {named} are in memory{pending}.")


def _print_json(result: pb.HintResponse) -> None:
    common.print_json({name: getattr(result, name) for name in ("num_blocks", "num_refused", "num_pending")})
