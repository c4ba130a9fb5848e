"""A server's clients, in small: prompts of a few models and tenants, which share prefixes as chats do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.client import Client
from kvpool.client.rpc import Namespace
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.reports import REPORTER_BYTES, ReportRequest
from kvpool.protocol.types import BlockRun
from tests.support.values import group_spec, namespace_spec, payload, run_of

BLOCK_TOKENS = 16
SAVED_S = 1e-4
"""Compute time of a token that is loaded, as reported."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one driver has counted: it must be what the server counts."""

    looked_up_tokens: int
    hit_tokens: int
    stored_blocks: int


class Driver:
    """Engines of one model and tenant: each turn looks a chat's prompt up, loads what is there, stores the rest.

    Args:
        num_chats: that go on in turns; few chats hit more.
        salt: of the namespace; two drivers with one salt share it.
    """

    def __init__(
        self, client: Client, model: str, tenant: str = "", *, num_chats: int = 8, chunk_bytes: int = 4_096,
        seed: int = 1, salt: str | None = None,
    ):  # fmt: skip
        fields = {} if salt is None else {"salt": salt}
        spec: NamespaceSpec = namespace_spec(
            group_spec(chunk_bytes=chunk_bytes, block_tokens=BLOCK_TOKENS), model=model, tenant=tenant, **fields
        )
        self._client = client
        self._namespace: Namespace = client.open_namespace(spec)
        self._chunk_bytes = chunk_bytes
        self._random = random.Random(seed)
        self._num_chats = num_chats
        self._num_blocks: dict[int, int] = {}
        self._begun = 0
        self.served = Served(0, 0, 0)
        self._computed: Counter[str] = Counter()
        self._loaded = self._num_reports = 0

    def report(self, engine: str, *, breaker_open: bool = False) -> None:
        """Reports what has become of the tokens since the last report, as an engine of this name does."""
        self._num_reports += 1
        report = ReportRequest(
            reporter=engine.encode().ljust(REPORTER_BYTES)[:REPORTER_BYTES],
            sequence=self._num_reports,
            engine=engine,
            version="0.1.0",
            vllm_version="0.33.0",
            transport="shm",
            breaker_open=breaker_open,
            namespaces=(self._namespace.fingerprint,),
            computed_tokens=dict(self._computed),
            loaded_tokens=self._loaded,
            saved_seconds=self._loaded * SAVED_S,
            lost_seconds=self._loaded * SAVED_S / 50,
            num_requests=1,
        )
        assert self._client.rpc.report(report, timeout_ms=10_000)
        self._computed.clear()
        self._loaded = 0

    def turn(self) -> None:
        """One request: a chat that goes on, or a new one."""
        if len(self._num_blocks) < self._num_chats:
            self._begun += 1
            chat = self._begun
        else:
            chat = self._random.choice(list(self._num_blocks))
        length = self._num_blocks.get(chat, 0) + self._random.randint(2, 8)
        self._ask([f"{chat}/{nth}" for nth in range(length)])
        self._num_blocks[chat] = length
        if length > 60:
            del self._num_blocks[chat]

    def _ask(self, names: Sequence[str]) -> None:
        run: BlockRun = run_of(*names)
        found = self._client.lookup(self._namespace, [run], explain=True)
        num_hits = found.hits[0].num_leading
        for miss in found.hits[0].missing:
            self._computed[miss.cause.name.lower()] += miss.count * BLOCK_TOKENS
        self._loaded += num_hits * BLOCK_TOKENS
        if found.lease_id:
            self._client.get_blocks(self._namespace, found.lease_id, run_of(*names[:num_hits]))
            self._client.release([found.lease_id])
        if rest := names[num_hits:]:
            parent = names[num_hits - 1] if num_hits else None
            blocks = [payload(name, self._chunk_bytes) for name in rest]
            self._client.put_blocks(self._namespace, run_of(*rest, parent=parent), blocks)
        served = self.served
        self.served = Served(
            served.looked_up_tokens + len(names) * BLOCK_TOKENS,
            served.hit_tokens + num_hits * BLOCK_TOKENS,
            served.stored_blocks + len(rest),
        )
