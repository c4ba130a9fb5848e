"""The open namespaces, and the groups that a request names in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from kvpool.protocol.errors import (
    IncompatibleNamespaceError,
    InvalidRequestError,
    OutOfSpaceError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.protocol.namespace import NamespaceSpec, differences
from kvpool.protocol.types import BlockRun
from kvpool_server.cache.entry import Entry, Group
from kvpool_server.sharing import Limits, Shares


class PoolNamespace:
    """An open namespace and its groups.

    Attributes:
        spec_without_weights, family: equal for namespaces of one model that differ in their weights only.
        opened_at, used_at: the pool's clock, when it was opened and when an engine last used it.
        superseded: a namespace with newer weights was opened after it, and no engine has used it since.
        lookup_blocks, lookup_hits: blocks that lookups asked for, and the complete ones of them.
        lookup_tokens, hit_tokens: as in `Found`.
        stored_bytes: bytes that clients wrote, of blocks that are readable or lack another rank's shard.
        loaded_bytes: bytes that lookups or gets told clients the place of.
        opened_by: host of the client that opened it; empty if unknown.
        last_use: the number of its last use, among those of all namespaces.
        tenant: whose extents its blocks are in; "" where the arena has one tenant.
        labels: its model and tenant as labels of metrics, once they have been made.
    """

    def __init__(
        self, spec: NamespaceSpec, fingerprint: bytes, now: float = 0.0, opened_by: str = "", tenant: str = ""
    ):
        self.last_use = 0
        self.spec_without_weights = dataclasses.replace(spec, revision="", weights_epoch="", weights_digest="")
        self.family = hash(self.spec_without_weights)  # Tells almost all others apart, in no time.
        self.opened_at = self.used_at = now
        self.opened_by = opened_by
        self.superseded = False
        self.lookup_blocks = self.lookup_hits = 0
        self.lookup_tokens = self.hit_tokens = 0
        self.stored_bytes = self.loaded_bytes = 0
        self.spec = spec
        self.is_measurement = spec.is_measurement
        self.tenant = tenant
        self.labels: tuple[str, str] | None = None
        self.fingerprint = fingerprint
        label = f"{fingerprint.hex()}@{spec.model}"
        self.groups = [
            Group(group, idx, label, fingerprint, tenant, spec.tenant, self.is_measurement, spec)
            for idx, group in enumerate(spec.groups)
        ]

    def group(self, group_idx: int) -> Group:
        """Raises InvalidRequestError if there is none."""
        if group_idx >= len(self.groups):
            last = len(self.groups) - 1
            raise InvalidRequestError(f"group_idx {group_idx}: the namespace has groups 0 to {last}; name one of them")
        return self.groups[group_idx]

    def entries(self) -> list[Entry]:
        """All live entries; takes long where they are many."""
        return [entry for group in self.groups for held in (group.index, group.leaving) for entry in held.values()]

    @property
    def is_empty(self) -> bool:
        return not any(group.num_live for group in self.groups)

    @property
    def held_bytes(self) -> int:
        """Bytes of slots of its entries, also of those that are being written or are not free yet."""
        return sum([group.num_slots * group.slot_class[1] for group in self.groups])

    @property
    def held_blocks(self) -> int:
        """How many of its entries are complete."""
        return sum([group.num_complete for group in self.groups])

    @property
    def complete_bytes(self) -> int:
        return sum(group.num_complete * group.spec.slot_bytes for group in self.groups)


class Namespaces:
    """Namespaces by fingerprint.

    Args:
        has_tenants: each namespace belongs to the tenant of its specification, not all of them to one tenant.
    """

    def __init__(self, limits: Limits, max_block_bytes: int, has_tenants: bool):
        self._limits = limits
        self._has_tenants = has_tenants
        self._max_block_bytes = max_block_bytes
        self._open: dict[bytes, PoolNamespace] = {}
        self._uses = itertools.count(1)
        self._num_open, self._specs_bytes = Shares(), Shares()  # Of tenants.
        self._num_opened: Counter[str] = Counter()
        self.closing: dict[bytes, PoolNamespace] = {}  # Closed ones, whose entries are being dropped.

    def values(self) -> list[PoolNamespace]:
        return list(self._open.values())

    def num_opened(self, tenant: str | None = None) -> int:
        return self._num_opened.total() if tenant is None else self._num_opened[tenant]

    def open(
        self, spec: NamespaceSpec, expected_fingerprint: bytes, now: float, opener: str = ""
    ) -> tuple[PoolNamespace, bool]:
        """The namespace of a spec, and whether this call opened it. Raises as `Pool.open_namespace`."""
        spec.check()
        fingerprint = spec.fingerprint()
        if expected_fingerprint and fingerprint != expected_fingerprint:
            raise IncompatibleNamespaceError(self._explain(spec, expected_fingerprint))
        if (namespace := self._open.get(fingerprint)) is not None:
            namespace.opened_by = namespace.opened_by or opener  # A tier may have opened it before any client.
            return namespace, False
        if fingerprint in self.closing:
            raise UnavailableError(f"namespace {fingerprint.hex()[:12]} is being closed; open it again in a moment")
        for idx, group in enumerate(spec.groups):
            if group.slot_bytes > self._max_block_bytes:
                raise InvalidRequestError(
                    f"groups[{idx}]: a block of {group.slot_bytes} bytes is larger than an extent of the arena "
                    f"({self._max_block_bytes} bytes); start kvpool-server with more --memory"
                )
        tenant = spec.tenant if self._has_tenants else ""
        self._make_room(spec.nbytes, now, tenant)
        namespace = self._open[fingerprint] = PoolNamespace(spec, fingerprint, now, opener, tenant)
        self._count(namespace, 1)
        self._num_opened[tenant] += 1
        namespace.last_use = next(self._uses)
        return namespace, True

    def use(self, namespace: PoolNamespace, now: float) -> None:
        """Records that an engine uses the namespace: it is not superseded, whatever was opened after it."""
        namespace.used_at, namespace.superseded = now, False

    def supersede_older(self, newest: PoolNamespace) -> None:
        """Marks as superseded the namespaces opened before `newest` that differ from it in their weights only."""
        for older in itertools.takewhile(lambda namespace: namespace is not newest, self._open.values()):
            if older.family == newest.family and older.spec_without_weights == newest.spec_without_weights:
                older.superseded = True

    def _count(self, namespace: PoolNamespace, count: int) -> None:
        self._num_open.add(namespace.tenant, count)
        self._specs_bytes.add(namespace.tenant, count * namespace.spec.nbytes)

    def _make_room(self, spec_bytes: int, now: float, tenant: str) -> None:
        """Closes unused namespaces so that a tenant may open another one. Raises OutOfSpaceError if there are too few.

        They are the tenant's own or, if it does not have too many, of the tenants with most of what is short.
        """
        limits = self._limits
        while True:
            has_too_many = self._has_tenants and self._num_open.of(tenant) >= limits.max_tenant_namespaces
            short = self._num_open
            if not has_too_many and short.has_room(tenant, 1, limits.max_namespaces):
                short = self._specs_bytes
                if short.has_room(tenant, spec_bytes, limits.max_specs_bytes):
                    return
            unused = [
                namespace
                for namespace in self._open.values()
                if (namespace.tenant == tenant or (not has_too_many and short.of(namespace.tenant) > short.of(tenant)))
                and now - namespace.used_at >= limits.namespace_idle_ms / 1000
                and (namespace.superseded or namespace.is_empty)
            ]
            if not unused:
                raise OutOfSpaceError(self._too_many(tenant))
            oldest = min(unused, key=lambda each: (-short.of(each.tenant), not each.is_empty, each.last_use))
            del self._open[oldest.fingerprint]
            self._count(oldest, -1)
            self.closing[oldest.fingerprint] = oldest

    def _too_many(self, tenant: str) -> str:
        """Why a tenant can open no further namespace."""
        limits, specs_bytes, whose = self._limits, self._specs_bytes, ""
        if self._has_tenants:
            whose = (
                f"tenant {tenant!r} has {self._num_open.of(tenant)} of them, with {specs_bytes.of(tenant)} bytes, and "
                f"may have {limits.max_tenant_namespaces}, and no more than are left; "
            )
        return (
            f"{len(self._open)} namespaces are open, whose specifications have {specs_bytes.total} bytes; the limits "
            f"are {limits.max_namespaces} and {limits.max_specs_bytes}; {whose}each of them has blocks or was used "
            f"within {limits.namespace_idle_ms / 1000:g} s; clear one that is no longer needed (`kvpool clear`), and "
            "try again later"
        )

    def find(self, fingerprint: bytes) -> PoolNamespace | None:
        """An open namespace; does not count as a use of it."""
        return self._open.get(fingerprint)

    def get(self, fingerprint: bytes) -> PoolNamespace:
        namespace = self._open.get(fingerprint)
        if namespace is None:
            raise unknown_namespace(fingerprint)
        namespace.last_use = next(self._uses)
        return namespace

    def groups(self, fingerprint: bytes, runs: Sequence[BlockRun], most: int = 0) -> tuple[PoolNamespace, list[Group]]:
        """The namespace, and the group of each run.

        Raises InvalidRequestError for no block, or for more than `most`; 0: as many as a lookup may name.
        """
        most = most or self._limits.max_lookup_blocks
        namespace = self.get(fingerprint)
        found = [namespace.group(run.group_idx) for run in runs]
        total = sum(map(len, runs))
        if not 1 <= total <= most:
            raise InvalidRequestError(f"a batch of {total} blocks; give 1 to {most}, and split larger ones")
        return namespace, found

    def one_group(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> tuple[PoolNamespace, Group]:
        """The namespace, and the one group of all runs. Raises InvalidRequestError for runs of several groups."""
        namespace, found = self.groups(fingerprint, runs, self._limits.max_batch_blocks)
        if any(group is not found[0] for group in found):
            raise InvalidRequestError("blocks of several groups; give the blocks of one group a request")
        return namespace, found[0]

    def _explain(self, spec: NamespaceSpec, expected_fingerprint: bytes) -> str:
        expected = self._open.get(expected_fingerprint)
        if expected is None:
            return f"the spec's fingerprint is {spec.fingerprint().hex()}, not {expected_fingerprint.hex()}"
        fields = "; ".join(map(str, differences(spec, expected.spec)))
        return f"the spec is not that of namespace {expected_fingerprint.hex()[:12]}: {fields}"


def unknown_namespace(fingerprint: bytes) -> UnknownNamespaceError:
    """The error for a namespace that is not open, or that the caller must not know of."""
    return UnknownNamespaceError(f"namespace {fingerprint.hex()} is not open on this server; open it first")
