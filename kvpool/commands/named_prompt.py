"""The options with which commands name a prompt, and the blocks that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvpool.client.client import Client
from kvpool.commands.fingerprints import find_namespace
from kvpool.commands.prompts import hash_seed, prompt_runs, read_tokens
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.types import BlockRun
from kvpool.protocol.wire import decode_spec
from kvpool.security.name_key import NameKey
from kvpool.v1 import pool_pb2 as pb

Prompt = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="The prompt: token ids as a JSON list or with white space between them, or text with --tokenizer; - "
        "reads the standard input.",
    ),
]
Namespace = Annotated[str, typer.Option(help="Fingerprint, or its first characters, as `kvpool namespaces` shows it.")]
Tokenizer = Annotated[
    str,
    typer.Option(metavar="DIR|NAME", help="Tokenizer of a text; needs transformers or tokenizers."),
]
CacheSalt = Annotated[str, typer.Option(help="The request's cache_salt.")]
HashSeed = Annotated[
    str | None,
    typer.Option("--hash-seed", envvar="KVPOOL_HASH_SEED", help="PYTHONHASHSEED of the namespace's engines."),
]
NameKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The engines' name_key_file, if they have one."),
]


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt in a namespace.

    Args:
        runs: its blocks under their names on the wire, one run a group.
    """

    info: pb.NamespaceInfo
    spec: NamespaceSpec
    num_tokens: int
    runs: list[BlockRun]

    @classmethod
    def read(
        cls,
        client: Client,
        prompt: str,
        namespace: str,
        tokenizer: str = "",
        cache_salt: str = "",
        seed: str | None = None,
        name_key_file: Path | None = None,
    ) -> NamedPrompt:
        """Reads the prompt, and names its blocks as the namespace's engines do.

        Raises ConfigError, and InvalidRequestError if there is no such namespace or the prompt has no whole block.
        """
        tokens = read_tokens(prompt, tokenizer)
        info = find_namespace(client, namespace)
        spec = decode_spec(info.spec)
        key = NameKey.read(name_key_file) if name_key_file else None
        runs = prompt_runs(spec, tokens, seed=hash_seed(spec, seed), cache_salt=cache_salt, key=key)
        if not runs:
            smallest = min(group.block_tokens for group in spec.groups)
            raise InvalidRequestError(
                f"the prompt has {len(tokens):,} tokens, less than a block of {smallest:,}: nothing of it is stored"
            )
        return cls(info, spec, len(tokens), runs)
