"""`kvpool explain`: why a prompt was computed instead of loaded."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.commands.prompts import CacheSalt, HashSeed, NamedPrompt, NameKeyFile, Namespace, Prompt, Tokenizer
from kvpool.report.explanation_report import PromptReport
from kvpool.report.output import say

TIMEOUT_MS = 20_000
"""The server may ask tiers."""


def explain(
    prompt: Prompt,
    namespace: Namespace,
    tokenizer: Tokenizer = "",
    cache_salt: CacheSalt = "",
    hash_seed: HashSeed = None,
    name_key_file: NameKeyFile = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Say why a prompt is computed instead of loaded: which of its blocks are stored, and when and why others left.

    Tokens do not give the block names of requests with a LoRA adapter, images or prompt embeddings.
    """
    with common.client_of(endpoint) as client:
        named = NamedPrompt.read(client, prompt, namespace, tokenizer, cache_salt, hash_seed, name_key_file)
        found = client.admin.explain(named.info.fingerprint, named.runs, timeout_ms=TIMEOUT_MS)
        report = PromptReport(named.spec, named.num_tokens, found)
        if report.is_unknown:
            listed = {each.fingerprint: each for each in client.admin.namespaces()}
            counted = listed.get(named.info.fingerprint, named.info)
            report.has_other_blocks = bool(counted.num_entries or any(tier.num_entries for tier in counted.tiers))
    if as_json:
        common.print_json(report.as_json())
        return
    for sentence in report.sentences():
        say(sentence)
    if rows := report.rows():
        table = Table(*(Column(name, overflow="fold") for name in ("tokens", "group", "where", "why", "when")))
        for row in rows:
            table.add_row(*map(escape, row))
        typer.echo("")
        Console().print(table)
