"""The open namespaces, and what a request's blocks mean in them."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import (
    IncompatibleNamespaceError,
    InvalidRequestError,
    OutOfSpaceError,
    UnknownNamespaceError,
)
from kvpool.namespace import NamespaceSpec, differences
from kvpool.types import BlockRun
from kvpool_server.storage.entry import Group
from kvpool_server.storage.limits import Limits


class Namespace:
    """An open namespace and its groups."""

    __slots__ = ("fingerprint", "groups", "spec")

    def __init__(self, spec: NamespaceSpec, fingerprint: bytes):
        self.spec = spec
        self.fingerprint = fingerprint
        self.groups = [Group(group) for group in spec.groups]

    @property
    def is_empty(self) -> bool:
        return not any(group.index for group in self.groups)


class Catalog:
    """Namespaces by fingerprint.

    Args:
        max_block_bytes: the largest block the arena can hold.
    """

    def __init__(self, limits: Limits, max_block_bytes: int):
        self._limits = limits
        self._max_block_bytes = max_block_bytes
        self._open: dict[bytes, Namespace] = {}

    def values(self) -> list[Namespace]:
        return list(self._open.values())

    def open(self, spec: NamespaceSpec, expected_fingerprint: bytes) -> tuple[Namespace, bool]:
        """The namespace of a spec, and whether it is new here. See `Pool.open_namespace` for what it raises."""
        spec.check()
        fingerprint = spec.fingerprint()
        if expected_fingerprint and fingerprint != expected_fingerprint:
            raise IncompatibleNamespaceError(self._explain(spec, expected_fingerprint))
        if (namespace := self._open.get(fingerprint)) is not None:
            return namespace, False
        for idx, group in enumerate(spec.groups):
            if group.slot_bytes > self._max_block_bytes:
                raise InvalidRequestError(
                    f"groups[{idx}]: a block of {group.slot_bytes} bytes is larger than an extent of the arena "
                    f"({self._max_block_bytes} bytes); start kvpool-server with more --memory"
                )
        if len(self._open) >= self._limits.max_namespaces:
            self._forget_empty()
        namespace = self._open[fingerprint] = Namespace(spec, fingerprint)
        return namespace, True

    def get(self, fingerprint: bytes) -> Namespace:
        namespace = self._open.get(fingerprint)
        if namespace is None:
            raise UnknownNamespaceError(f"namespace {fingerprint.hex()} is not open on this server; open it first")
        return namespace

    def group(self, fingerprint: bytes, group_idx: int) -> Group:
        namespace = self.get(fingerprint)
        if group_idx >= len(namespace.groups):
            last = len(namespace.groups) - 1
            raise InvalidRequestError(f"group_idx {group_idx}: the namespace has groups 0 to {last}; name one of them")
        return namespace.groups[group_idx]

    def groups(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> list[Group]:
        """The group of each run. Raises InvalidRequestError for a batch that is empty or too large."""
        found = [self.group(fingerprint, run.group_idx) for run in runs]
        total, most = sum(map(len, runs)), self._limits.max_batch_blocks
        if not 1 <= total <= most:
            raise InvalidRequestError(f"a batch of {total} blocks; give 1 to {most}, and split larger ones")
        return found

    def one_group(self, fingerprint: bytes, runs: Sequence[BlockRun]) -> Group:
        """The group of all runs."""
        found = self.groups(fingerprint, runs)
        if any(group is not found[0] for group in found):
            raise InvalidRequestError("blocks of several groups; give the blocks of one group a request")
        return found[0]

    def _forget_empty(self) -> None:
        """Makes room for one more. Whoever still uses the one that goes is told to open it again."""
        for fingerprint, namespace in self._open.items():
            if namespace.is_empty:
                del self._open[fingerprint]
                return
        raise OutOfSpaceError(f"{len(self._open)} namespaces hold blocks, which is the limit; clear one")

    def _explain(self, spec: NamespaceSpec, expected_fingerprint: bytes) -> str:
        expected = self._open.get(expected_fingerprint)
        if expected is None:
            return f"the spec's fingerprint is {spec.fingerprint().hex()}, not {expected_fingerprint.hex()}"
        fields = "; ".join(map(str, differences(spec, expected.spec)))
        return f"the spec is not that of namespace {expected_fingerprint.hex()[:12]}: {fields}"
