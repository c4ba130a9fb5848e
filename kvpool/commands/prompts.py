"""`kvpool pin`, `expire` and `prefetch`, and prompts as the pool knows them: tokens, and the names of their blocks.

The three commands tell the server what an operator knows of a prompt better than any policy.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import SLOW_TIMEOUT_MS, AsJson, Endpoint, find_namespaces, within
from kvpool.protocol.errors import ConfigError, InvalidRequestError
from kvpool.protocol.hashing import ALGORITHM, DEFAULT_SEED, block_hashes
from kvpool.protocol.namespace import DIGEST_CHARS, NamespaceSpec
from kvpool.protocol.text import escaped, size_text
from kvpool.protocol.types import BlockRun, HintKind
from kvpool.protocol.wire import decode_spec
from kvpool.report.output import say
from kvpool.security.name_key import NameKey, check_key
from kvpool.v1 import pool_pb2 as pb

LOOK_EVERY_S = 0.25
DAY_S = 86_400
SEND_IT = "Send the prompt to an engine once and repeat the command, or ask `kvpool explain` what is missing."
MAX_FILE_BYTES = 64 << 20
MAX_TOKEN = 1 << 31
MAX_ERROR_CHARS = 200
"""Of a tokenizer's name, and of why it cannot be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The options that name a prompt."""

    prompt: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="The prompt: token ids as a JSON list or with white space between them, or text with --tokenizer; - "
            "reads the standard input.",
        ),
    ]
    namespace: Annotated[
        str, typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it.")
    ]
    tokenizer: Annotated[
        str, typer.Option(metavar="DIR|NAME", help="Tokenizer of a text; needs transformers or tokenizers.")
    ] = ""
    cache_salt: Annotated[str, typer.Option(help="The request's cache_salt.")] = ""
    hash_seed: Annotated[
        str | None, typer.Option(envvar="KVPOOL_HASH_SEED", help="PYTHONHASHSEED of the namespace's engines.")
    ] = None
    name_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The engines' name_key_file, if they have one.")
    ] = None
    endpoint: Endpoint = DEFAULT_ENDPOINT
    as_json: AsJson = False


def about_a_prompt(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that name a prompt, and them as its first argument."""
    options = inspect.signature(PromptOptions, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(PromptOptions(**{name: values.pop(name) for name in options}), **values)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*options.values(), *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@about_a_prompt
def pin(
    options: PromptOptions,
    seconds: Annotated[
        int,
        typer.Option(
            callback=within(1, DAY_S, "or --end, which ends pins"), help="How long; a pin that ends later stays."
        ),
    ] = 3_600,
    end: Annotated[bool, typer.Option("--end", help="End the prompt's pins instead.")] = False,
) -> None:
    """Have a prompt's stored blocks evicted last, for a while and within the tenant's budget (--pin-budget).

    Pins last as long as the server's memory. Other prompts' blocks are pinned when they are named.
    """
    with common.client_of(options.endpoint) as client:
        named = NamedPrompt.read(client, options)
        result = named.hint(client, HintKind.PIN, 0 if end else seconds)
        budgets = [each for each in client.admin.pin_budgets() if each.tenant == named.spec.tenant]
    if options.as_json:
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


@about_a_prompt
def expire(options: PromptOptions) -> None:
    """Have a prompt's blocks evicted before all others, until they are used again.

    Blocks that other stored prompts begin with, and pinned ones, are left alone.
    """
    with common.client_of(options.endpoint) as client:
        named = NamedPrompt.read(client, options)
        result = named.hint(client, HintKind.EXPIRE)
    if options.as_json:
        _print_json(result)
        return
    say(f"{result.num_blocks:,} of {named} will be evicted before others.")
    if result.num_blocks < named.num_blocks:
        say("Pinned blocks, and those that other stored prompts continue, stay as they are: name the longest prompt.")


@about_a_prompt
def prefetch(
    options: PromptOptions,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=within(0, 600), help="How long to wait until the blocks are up."),
    ] = 0.0,
) -> None:
    """Bring a prompt's blocks up from the server's tiers, before a request comes."""
    with common.client_of(options.endpoint) as client:
        named = NamedPrompt.read(client, options)
        ends_at = time.monotonic() + wait
        while True:
            result = named.hint(client, HintKind.PREFETCH)
            if not result.num_pending or time.monotonic() >= ends_at:
                break
            time.sleep(LOOK_EVERY_S)
    if options.as_json:
        _print_json(result)
        return
    if not result.num_blocks and not result.num_pending:
        say(f"None of {named} is in memory, or on its way up from a tier. {SEND_IT}")
        return
    pending = f", and {result.num_pending:,} or more are on their way up" if result.num_pending else ""
    say(f"{result.num_blocks:,} of {named} are in memory{pending}.")


def _print_json(result: pb.HintResponse) -> None:
    common.print_json({name: getattr(result, name) for name in ("num_blocks", "num_refused", "num_pending")})


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt in a namespace; `runs` are its blocks under their names on the wire, one run per group."""

    info: pb.NamespaceInfo
    spec: NamespaceSpec
    num_tokens: int
    runs: list[BlockRun]

    def __str__(self) -> str:
        return f"the prompt's {self.num_blocks:,} blocks"

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.runs))

    @classmethod
    def read(cls, client: Client, options: PromptOptions) -> NamedPrompt:
        """Reads the prompt, and names its blocks as the namespace's engines do.

        Raises ConfigError, and InvalidRequestError if there is no such namespace or the prompt has no whole block.
        """
        tokens = read_tokens(options.prompt, options.tokenizer)
        (info,) = find_namespaces(client, options.namespace)
        spec = decode_spec(info.spec)
        key = NameKey.read(options.name_key_file) if options.name_key_file else None
        seed = hash_seed(spec, options.hash_seed)
        runs = prompt_runs(spec, tokens, seed=seed, cache_salt=options.cache_salt, key=key)
        if not runs:
            smallest = min(group.block_tokens for group in spec.groups)
            raise InvalidRequestError(
                f"the prompt has {len(tokens):,} tokens, less than a block of {smallest:,}: nothing of it is stored"
            )
        return cls(info, spec, len(tokens), runs)

    def hint(self, client: Client, kind: HintKind, pin_s: int = 0) -> pb.HintResponse:
        """Gives the server a hint about the prompt's blocks."""
        return client.admin.hint(self.info.fingerprint, self.runs, kind, pin_seconds=pin_s, timeout_ms=SLOW_TIMEOUT_MS)


def read_tokens(path: str, tokenizer: str) -> list[int]:
    """The token ids of --prompt and --tokenizer. Raises ConfigError and InvalidRequestError."""
    text = _read(path)
    tokens = _encode(text, tokenizer) if tokenizer else _parse(text, path)
    if not tokens:
        raise InvalidRequestError(f"{path} has no token; give a prompt")
    return tokens


def _read(path: str) -> str:
    try:
        if path == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the prompt {path}: {error.strerror}; give --prompt a file") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the prompt {path} has more than {MAX_FILE_BYTES >> 20} MiB; give a shorter one")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the prompt {path} is no UTF-8 text; give token ids or text") from None


def _parse(text: str, path: str) -> list[int]:
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError:
        values = None
    if values is None or not all(type(value) is int and 0 <= value < MAX_TOKEN for value in values):
        raise InvalidRequestError(
            f"{path} has no token ids, as a JSON list or with white space between them; give --tokenizer DIR for text"
        )
    return list(values)


def _encode(text: str, tokenizer: str) -> list[int]:
    """Tokens of a text, with those that the tokenizer adds to each prompt. No code beside a tokenizer is run."""
    directory = Path(tokenizer)
    # The name of a tokenizer is NAME or ORGANIZATION/NAME.
    is_path = tokenizer.startswith((".", "~", "/")) or tokenizer.endswith("/") or tokenizer.count("/") > 1
    if is_path and not directory.exists():
        raise ConfigError(
            f"--tokenizer {escaped(tokenizer, MAX_ERROR_CHARS)} is neither a directory nor a file; give the directory "
            "of a tokenizer, or its name as ORGANIZATION/NAME"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        pass
    else:
        if not directory.is_file():
            try:
                loaded = AutoTokenizer.from_pretrained(
                    tokenizer, trust_remote_code=False, local_files_only=directory.is_dir()
                )
                return list(loaded.encode(text))
            except Exception as error:  # The package raises whatever the tokenizer's files lead it to.
                raise _cannot_load(tokenizer, error) from None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the package transformers or tokenizers; install one (`pip install tokenizers`), or give "
            "token ids"
        ) from None
    file = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        return list(Tokenizer.from_file(str(file)).encode(text).ids)
    except Exception as error:  # The package raises nothing more precise.
        raise _cannot_load(str(file), error) from None


def _cannot_load(tokenizer: str, error: Exception) -> InvalidRequestError:
    reason = escaped(f"{type(error).__name__}: {error}", MAX_ERROR_CHARS)
    return InvalidRequestError(f"cannot load the tokenizer {escaped(tokenizer, MAX_ERROR_CHARS)}: {reason}")


def hash_seed(spec: NamespaceSpec, given: str | None = None) -> str:
    """The seed of a listed namespace's hashes, of which the server tells a digest: `given`, or one that is usual here.

    Raises InvalidRequestError if it is another one.
    """
    if not spec.hash_seed:  # It does not say how its blocks are named.
        return DEFAULT_SEED if given is None else given
    candidates = [DEFAULT_SEED, os.environ.get("PYTHONHASHSEED", "")] if given is None else [given]
    for seed in candidates:
        if spec.hash_seed in (seed, hashlib.sha256(seed.encode()).hexdigest()[:DIGEST_CHARS]):
            return seed
    raise InvalidRequestError(
        "the namespace's block hashes begin with another seed than the usual one; set --hash-seed to the "
        "PYTHONHASHSEED of its engines"
    )


def prompt_runs(
    spec: NamespaceSpec, tokens: Sequence[int], *, seed: str, cache_salt: str = "", key: NameKey | None = None
) -> list[BlockRun]:
    """The blocks of a prompt under their names on the wire, one run for each group that has a whole block.

    Raises InvalidRequestError if the names cannot be computed from tokens.
    """
    if spec.hash_algorithm != ALGORITHM:
        raise InvalidRequestError(f"the namespace's hashes are of algorithm {spec.hash_algorithm!r}, not {ALGORITHM}")
    check_key(spec, key)
    hash_tokens = spec.hash_block_tokens or min(group.block_tokens for group in spec.groups)
    extra = [(("cache_salt", cache_salt),)] if cache_salt else []
    hashes = block_hashes(tokens, hash_tokens, seed=seed, extra_keys=extra)
    runs = []
    for idx, group in enumerate(spec.groups):
        ratio = group.block_tokens // hash_tokens
        if names := hashes[ratio - 1 :: ratio] if ratio else []:
            run = BlockRun(idx, names)
            runs.append(key.run(run) if key else run)
    return runs
