"""Namespaces: everything that must be equal for two engines' KV bytes to be interchangeable.

A namespace is named by its fingerprint, the SHA-256 of a canonical encoding of its spec. Two engines whose specs
differ in any field therefore never share a byte, and `differences` says which field it was. The one exception: a digest
of the weights replaces the model's name and revision, so that the same weights share blocks by whatever name or path
they are served.

A client tells its release when it opens a namespace, and the server's answer tells the server's. Each side checks the
other, since either may be the newer one: releases whose protocols differ by more than `MAX_SKEW` are refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from kvpool.protocol.errors import IncompatibleReleaseError, InvalidRequestError
from kvpool.version import PROTOCOL, __version__

MEASUREMENT_MODEL = "kvpool ping --bandwidth"
"""The model that namespaces of measurements name. No engine has it."""

FORMAT_VERSION = 1
"""Order of the bytes in a chunk: layer, then KV head, then token, then K before V; no padding."""

_LABELS = ("model", "revision")
_SECRETS = ("salt", "hash_seed")
"""Who knows them, and the rest of a spec, can compute the hashes of guessed prompts."""
DIGEST_CHARS = 12
_TEXT_BYTES = 64
"""What an empty text takes in a list."""

MAX_SKEW = 1
MAX_RELEASE_CHARS = 64

MAX_SHARDS = 64
MAX_GROUPS = 64
_KIND = re.compile(r"[a-z0-9_]{1,64}")
"""Names that vLLM gives its kinds of layers; they are printed as they are."""
_LAST_BLOCKS = ("mamba", "chunked_local_attention")
"""Kinds of groups without a window whose hits need only the last blocks: vLLM's names."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV-cache group.

    Args:
        kind: "full_attention", "sliding_window", "mamba", ...; 1 to 64 of a-z, 0-9 and _.
        block_tokens: tokens in a block.
        num_kv_heads: of the whole model, not of one rank; 0: not sharded by heads, each rank has blocks of its own.
        head_size_k: elements of a key, of the first layer; 0 for states.
        head_size_v: elements of a value, likewise.
        num_shards: chunks in a block, 1 to `MAX_SHARDS`.
        chunk_bytes: bytes of one chunk.
        layer_names: in the order their bytes have in a chunk.
        layer_formats: what the bytes of each layer are: heads, sizes, types, state shapes.
        window_tokens: 0 for none.
    """

    kind: str
    block_tokens: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    num_shards: int
    chunk_bytes: int
    layer_names: tuple[str, ...] = ()
    layer_formats: tuple[str, ...] = ()
    window_tokens: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.num_shards * self.chunk_bytes

    @property
    def needs_prefix(self) -> bool:
        """Whether a hit needs all blocks of its prefix, not only the last ones."""
        return not self.window_tokens and self.kind not in _LAST_BLOCKS

    @property
    def hit_blocks(self) -> int:
        """Blocks just before its end that a hit needs; 0: all blocks of its prefix, also where a kind is not known."""
        if self.window_tokens:
            return max(1, -(-(self.window_tokens - 1) // self.block_tokens))
        return 1 if self.kind == "mamba" else 0


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What names a namespace. Every field is part of its identity.

    Args:
        model: name or path as served. A label only where `weights_digest` is set.
        revision: the model's commit. A label only where `weights_digest` is set.
        groups: in the engine's order; `group_idx` counts them from 0.
        weights_epoch: free text; change it and no block stored before is read again.
        page_format: how one KV head's page is packed, where a platform packs its own.
        pipeline_stage: whose layers the groups have; each stage has a namespace of its own.
        hash_algorithm: how block hashes are made, such as "sha256_cbor".
        hash_seed: first link of every chain of hashes.
        hash_block_tokens: tokens that one block hash covers.
        extra: anything else that changes KV values, sorted by key.
    """

    model: str
    groups: tuple[GroupSpec, ...]
    revision: str = ""
    weights_digest: str = ""
    weights_epoch: str = ""
    model_dtype: str = ""
    kv_cache_dtype: str = ""
    page_format: str = ""
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = ""
    hash_block_tokens: int = 0
    num_pipeline_stages: int = 1
    pipeline_stage: int = 0
    extra: tuple[tuple[str, str], ...] = field(default=())
    tenant: str = ""
    salt: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", tuple(sorted(self.extra)))

    @property
    def is_measurement(self) -> bool:
        """True for blocks of `kvpool ping --bandwidth`: they are no engine's, and are removed after seconds."""
        return self.model == MEASUREMENT_MODEL

    @property
    def nbytes(self) -> int:
        """About how many bytes its texts take in memory; a bound of it also bounds how many texts there are."""
        fields = [*_fields_of(self).values(), *(each for group in self.groups for each in _fields_of(group).values())]
        texts = [value for value in fields if isinstance(value, str)]
        texts += [text for pair in self.extra for text in pair]
        texts += [text for group in self.groups for text in (*group.layer_names, *group.layer_formats)]
        return sum(_TEXT_BYTES + len(text.encode()) for text in texts)

    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical JSON encoding, 32 bytes."""
        fields = _fields_of(self)
        if self.weights_digest:
            for label in _LABELS:
                del fields[label]
        text = json.dumps(fields, default=_fields_of, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()

    def listed(self) -> NamespaceSpec:
        """The spec as servers list it, to be compared: each secret is replaced by the first digits of its SHA-256.

        Its fingerprint is another.
        """
        return dataclasses.replace(self, salt=_digest_of(self.salt), hash_seed=_digest_of(self.hash_seed))

    def check(self) -> None:
        """Raises InvalidRequestError, which names the field, if the spec is invalid."""
        if not self.model:
            raise InvalidRequestError("namespace spec: model is empty; give the model's name or path")
        if self.format_version != FORMAT_VERSION:
            raise InvalidRequestError(
                f"namespace spec: format_version {self.format_version} is not {FORMAT_VERSION}; "
                "client and server are of different releases"
            )
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InvalidRequestError(f"namespace spec: {len(self.groups)} groups, not 1 to {MAX_GROUPS}")
        if len(dict(self.extra)) != len(self.extra):
            raise InvalidRequestError(f"namespace spec: extra has a key twice: {self.extra}; give each key once")
        for idx, group in enumerate(self.groups):
            where = f"namespace spec: groups[{idx}]"
            if not _KIND.fullmatch(group.kind):
                raise InvalidRequestError(
                    f"{where}.kind {group.kind[:64]!a} is no name of a kind; give 1 to 64 of a-z, 0-9 and _"
                )
            if not 1 <= group.num_shards <= MAX_SHARDS:
                raise InvalidRequestError(f"{where}.num_shards {group.num_shards} is not within 1 to {MAX_SHARDS}")
            if group.chunk_bytes < 1:
                raise InvalidRequestError(f"{where}.chunk_bytes {group.chunk_bytes} is not positive")
            if group.block_tokens < 1:
                raise InvalidRequestError(f"{where}.block_tokens {group.block_tokens} is not positive")


def _fields_of(spec: NamespaceSpec | GroupSpec) -> dict[str, Any]:
    """Like `dataclasses.asdict`, which takes 10 ms to copy the names of the layers of the largest spec."""
    return {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}


def _digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:DIGEST_CHARS] if secret else ""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two specs differ."""

    field: str
    ours: Any
    theirs: Any

    @property
    def is_private(self) -> bool:
        """Whether the values belong to their tenants alone: report that they differ, not how."""
        return self.field in ("tenant", *_SECRETS)

    def __str__(self) -> str:
        if self.is_private:
            return f"{self.field} differs"
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"


def differences(ours: NamespaceSpec, theirs: NamespaceSpec) -> list[Difference]:
    """Every field of their identities in which two specs differ, by dotted path (`groups[0].chunk_bytes`)."""
    found: list[Difference] = []
    are_labels = bool(ours.weights_digest and theirs.weights_digest)
    for name, a in _fields_of(ours).items():
        b = getattr(theirs, name)
        if are_labels and name in _LABELS:
            continue
        if name == "groups" and len(a) == len(b):
            pairs = [
                (f"groups[{idx}].{key}", value, getattr(other, key))
                for idx, (one, other) in enumerate(zip(a, b, strict=True))
                for key, value in _fields_of(one).items()
            ]
        elif name == "extra":
            mine, yours = dict(a), dict(b)
            pairs = [(f"extra[{key!r}]", mine.get(key), yours.get(key)) for key in sorted(mine.keys() | yours.keys())]
        else:
            pairs = [(name, a, b)]
        found += [Difference(path, x, y) for path, x, y in pairs if x != y]
    return found


@dataclass(frozen=True, slots=True)
class Release:
    """A release of kvpool as it speaks to others.

    Args:
        version: for people; empty: unknown.
        protocol: 0: from before protocols were exchanged.
    """

    version: str
    protocol: int

    def __str__(self) -> str:
        return f"{self.version or 'of an unknown release'} (protocol {self.protocol})"

    def works_with(self, other: Release) -> bool:
        """Whether a client of one release and a server of the other understand each other."""
        return abs(self.protocol - other.protocol) <= MAX_SKEW


OWN = Release(__version__, PROTOCOL)


def check_skew(client: Release, server: Release, endpoint: str = "") -> None:
    """Raises IncompatibleReleaseError, which names the server's `endpoint`, unless client and server work together."""
    if client.works_with(server):
        return
    older, least = ("client", server.protocol) if client.protocol < server.protocol else ("server", client.protocol)
    where = f" at {endpoint}" if endpoint else ""
    raise IncompatibleReleaseError(
        f"the client is kvpool {client}, and kvpool-server{where} is kvpool {server}: they work together only if their "
        f"protocols differ by {MAX_SKEW} at most; upgrade the {older} to protocol {least - MAX_SKEW} or later"
    )
