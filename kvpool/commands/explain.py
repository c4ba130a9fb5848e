"""`kvpool explain`: why a prompt was computed instead of loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvpool.client import Client
from kvpool.commands import common
from kvpool.commands.common import AsJson, Endpoint
from kvpool.commands.named_prompt import CacheSalt, HashSeed, NamedPrompt, NameKeyFile, Tokenizer
from kvpool.commands.output import say
from kvpool.config import DEFAULT_ENDPOINT
from kvpool.errors import InvalidRequestError
from kvpool.explanation_report import PromptReport, trace_sentences

TIMEOUT_MS = 20_000
"""The server may ask tiers."""


def explain(
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt: token ids as a JSON list or with white space between them, or text with --tokenizer; - "
            "reads the standard input.",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Instead of a prompt: a request of an engine with explain_requests, by vLLM's id or how it begins.",
        ),
    ] = None,
    tokenizer: Tokenizer = "",
    cache_salt: CacheSalt = "",
    hash_seed: HashSeed = None,
    name_key_file: NameKeyFile = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
) -> None:
    """Say why a prompt is computed instead of loaded: which of its blocks are stored, and when and why others left.

    Tokens do not give the block names of requests with a LoRA adapter, images or prompt embeddings: use --request.
    """
    if (prompt is None) == (request is None):
        raise InvalidRequestError("give either --prompt FILE with --namespace, or --request ID")
    if prompt is not None and namespace is None:
        raise InvalidRequestError("--prompt needs --namespace; `kvpool namespaces` lists them")
    with common.client_of(endpoint) as client:
        if request is not None:
            _explain_request(client, request, as_json)
            return
        assert prompt is not None and namespace is not None
        named = NamedPrompt.read(client, prompt, namespace, tokenizer, cache_salt, hash_seed, name_key_file)
        report = _report(client, named)
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


def _report(client: Client, named: NamedPrompt) -> PromptReport:
    info = named.info
    found = client.admin.explain(info.fingerprint, named.runs, timeout_ms=TIMEOUT_MS)
    report = PromptReport(info.spec, named.num_tokens, found)
    if report.is_unknown:
        counted = {each.fingerprint: each for each in client.admin.namespaces()}.get(info.fingerprint, info)
        report.has_other_blocks = bool(counted.num_entries or any(tier.num_entries for tier in counted.tiers))
    return report


def _explain_request(client: Client, request_id: str, as_json: bool) -> None:
    found = client.admin.explain_request(request_id, timeout_ms=TIMEOUT_MS)
    if as_json:
        common.print_json([asdict(trace) for trace in found])
        return
    if not found:
        raise InvalidRequestError(
            f"no engine has told of request {request_id!r}: set explain_requests in its kv_connector_extra_config; an "
            "engine tells of a request within 10 s after its first token, and of its last 1,000"
        )
    for sentence in trace_sentences(found):
        say(sentence)
