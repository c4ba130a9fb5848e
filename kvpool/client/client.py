"""The synchronous, thread-safe client of a kvpool server.

    with Client(ClientConfig("127.0.0.1:50051")) as client:
        namespace = client.open_namespace(spec)
        client.put_blocks(namespace, run, payloads)
        found = client.lookup(namespace, [run])
        blocks = client.get_blocks(namespace, found.lease_id, run)
        client.release([found.lease_id])

Every call has a deadline. A wrong checksum, an expired lease or a restarted server is an error or a miss, never bytes.

Beside the client: `client.admin` has operators' calls, `client.chunks` puts and gets without regions, `client.rpc` the
single steps of a put and get, and calls that do not wait; `client.attachment` has the transport in use.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.admin import Admin, Hints, InlineChunks
from kvpool.client.block_io import BlockMover, DrainBlocks, FillBlocks, InPlace
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace, PoolRpc
from kvpool.client.transport_choice import Attachment, Choose, choose
from kvpool.protocol import replies
from kvpool.protocol.errors import ChecksumError, InvalidRequestError, KVPoolError, LeaseExpiredError
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import (
    BlockRun,
    Existence,
    LeasedSlots,
    Located,
    Lookup,
    PutReceipt,
    PutStatus,
    ShardRange,
    in_parts,
    join_located,
)
from kvpool.transport.base import BATCH_BYTES, Transfer


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a put: one status a block, in the order of the runs, and the payload bytes that were written."""

    statuses: tuple[PutStatus, ...]
    receipt: PutReceipt
    nbytes: int


class Client:
    """A connection to one server.

    Args:
        rpc: the connection; by default a new one to `config.endpoint`. The client closes it.
        choose: attaches to what a server offers.

    Raises (every method): UnavailableError, PoolTimeoutError, InvalidReplyError, and what its docstring names.
    """

    def __init__(self, config: ClientConfig | None = None, rpc: PoolRpc | None = None, choose: Choose = choose):
        self.config = config or ClientConfig()
        self.rpc = rpc or PoolRpc.connect(self.config)
        self.admin = Admin(self.rpc)
        self.chunks = InlineChunks(self.rpc)
        self.hints = Hints(self.rpc)
        self.attachment = Attachment(lambda offer: choose(self.config, offer, self.rpc.channel))

    def __repr__(self) -> str:
        return f"Client({self.config.endpoint})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; calls in flight fail. Idempotent."""
        self.rpc.close()
        self.attachment.detach()

    def open_namespace(
        self, spec: NamespaceSpec, expected_fingerprint: bytes = b"", *, timeout_ms: int | None = None
    ) -> Namespace:
        """Declares a namespace, and attaches to the server's arena.

        Args:
            spec: where it names no tenant, the tenant is that of the client's certificate, if it has one.
            expected_fingerprint: if not empty, the fingerprint that the spec must have; with `name_key_file`, the spec
                with the key's digest.

        Raises:
            InvalidRequestError: the spec cannot name a namespace, or one whose blocks another key names.
            IncompatibleNamespaceError: `expected_fingerprint` is another namespace's; the message names the fields.
            IncompatibleReleaseError: the server is of a release that this client does not work with; both are named.
            TransferError, ConfigError: the configured transport does not work here.
        """
        principal = getattr(self.rpc.channel, "principal", None)  # Plaintext channels have none.
        if not spec.tenant and principal is not None and principal.role.has_tenant:
            spec = replace(spec, tenant=principal.tenant)
        spec = self.rpc.named(spec)
        opened = self.rpc.open_namespace(spec, expected_fingerprint, timeout_ms)
        transport, arena_bytes = self.attachment.attach(opened), replies.arena_bytes(opened)
        return Namespace(spec, opened.fingerprint, opened.boot_token, transport, opened.max_batch_blocks, arena_bytes)

    def lookup(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        *,
        prefix_only: bool = True,
        lease: bool = True,
        locate: bool = False,
        explain: bool = False,
    ) -> Lookup:
        """Which blocks are complete, with a lease on them.

        Args:
            prefix_only: True: only the leading complete blocks of each run are found and leased. False: all complete
                blocks, as a bitmap.
            lease: False: asks only; nothing is leased or renewed.
            locate: the answer also says where the leased blocks lie (`Lookup.leased`), so that `get` makes no call.
            explain: the answer also says why blocks are missing (`RunHits.missing`).
        """
        return self.rpc.lookup(namespace, runs, prefix_only=prefix_only, lease=lease, locate=locate, explain=explain)

    def exists(self, fingerprint: bytes, runs: Sequence[BlockRun], *, timeout_ms: int | None = None) -> Existence:
        """For routers: what an engine would find, without a lease, a use, or a count as a lookup.

        Args:
            fingerprint: of a namespace, as `admin.namespaces` lists it.
            runs: the blocks of one prompt from its first token on, one run a group.

        Raises UnknownNamespaceError, InvalidRequestError.
        """
        return self.rpc.exists(fingerprint, runs, timeout_ms)

    def put(
        self,
        namespace: Namespace,
        runs: Sequence[BlockRun],
        fill: FillBlocks | InPlace,
        *,
        shards: ShardRange | None = None,
        batch_bytes: int = BATCH_BYTES,
        fill_sums: bool = False,
        out_of_process: bool = False,
    ) -> PutResult:
        """Stores blocks. Blocks that are present, or that another caller is writing, cost no bytes.

        Args:
            runs: the blocks, all of one group.
            fill: writes blocks into the transport's buffers, called only for blocks that were granted; or the arrays
                that the blocks lie in.
            shards: which shards of each block; all of them by default.
            batch_bytes: most bytes passed to one call of `fill`; at least one block.
            fill_sums: `fill` returns the checksums of what it writes; else the transport computes them.
            out_of_process: as in `get`.

        Raises:
            InvalidRequestError: the arrays are not the blocks of `runs`.
            OutOfSpaceError: no room; nothing changed.
            LeaseExpiredError: the ticket expired before all bytes had been written; nothing became readable.
        """
        group = _one_group(namespace, runs)
        shards = shards or ShardRange(0, group.num_shards)
        region_bytes = shards.count * group.chunk_bytes
        if isinstance(fill, InPlace):
            fill.check(sum(map(len, runs)), region_bytes)
        asked_at = time.monotonic()
        grant = self.rpc.put_start(namespace, runs, shards)
        if not grant.ticket_id:
            return PutResult(grant.statuses, PutReceipt(0, 0), 0)
        granted = [idx for idx, status in enumerate(grant.statuses) if status is PutStatus.GRANTED]
        ticket_s = grant.ticket_ttl_ms / 1000 - (time.monotonic() - asked_at)  # The answer may be seen long after.
        timeout_s = max(0.0, min(self.config.data_timeout_ms / 1000, ticket_s))
        transfer = Transfer(
            grant.ticket_id, grant.offsets, region_bytes, timeout_s, batch_bytes, grant.permit, out_of_process
        )
        mover = BlockMover(namespace.transport, fill, fill_sums, region_bytes, group.chunk_bytes, is_write=True)
        try:
            mover.move(transfer, granted)
            receipt = self.rpc.put_end(grant.ticket_id, mover.checksums())
        except BaseException as error:
            mover.wait()  # Once the ticket is revoked, the regions may belong to another ticket.
            # A failed one-sided write may go on: its ticket must expire, so that its slots wait in quarantine. Only
            # if `fill` failed is nothing in flight any more.
            if not namespace.transport.one_sided or error is mover.callback_error:
                self.rpc.revoke_quietly(grant.ticket_id)
            raise
        return PutResult(grant.statuses, receipt, len(granted) * region_bytes)

    def put_blocks(
        self, namespace: Namespace, run: BlockRun, payloads: Sequence[Any], *, shards: ShardRange | None = None
    ) -> PutResult:
        """Stores blocks from existing bytes: one payload a block of `run`, bytes or uint8 arrays of exactly
        shards.count * chunk_bytes.

        Raises InvalidRequestError if a payload has another size or type; otherwise as `put`.
        """
        group = namespace.group(run.group_idx)
        expected = (shards.count if shards else group.num_shards) * group.chunk_bytes
        if len(payloads) != len(run):
            raise InvalidRequestError(f"{len(payloads)} payloads for {len(run)} blocks; give one a block")
        blocks = [_bytes_of(each) for each in payloads]
        for idx, block in enumerate(blocks):
            if block.nbytes != expected or block.dtype != np.uint8:
                found = f"{block.nbytes} bytes of {block.dtype}"
                raise InvalidRequestError(f"payload {idx} has {found}; the group's blocks have {expected} of uint8")
        return self.put(namespace, [run], InPlace(blocks), shards=shards)

    def get(
        self,
        namespace: Namespace,
        lease_id: int,
        runs: Sequence[BlockRun],
        drain: DrainBlocks | InPlace,
        *,
        shards: ShardRange | None = None,
        ends_at: float = math.inf,
        batch_bytes: int = BATCH_BYTES,
        drain_sums: bool = False,
        leased: LeasedSlots | None = None,
        out_of_process: bool = False,
    ) -> Located:
        """Reads leased blocks, verified.

        Args:
            runs: the blocks, all of one group.
            drain: copies blocks from the transport's buffers; or arrays that receive the blocks. Use what is there
                only after `get` has returned.
            shards: which shards of each block; all of them by default.
            ends_at: monotonic seconds; an earlier deadline of the bytes than `data_timeout_ms`.
            batch_bytes: most bytes passed to one call of `drain`; at least one block.
            drain_sums: `drain` returns the checksums of what it copies; else the transport computes them.
            leased: where all blocks of `runs` lie, from the lookup's answer: then there is no call. None: the server
                is asked.
            out_of_process: with `tcp`, another process moves the bytes of callbacks: this one's threads are busy.

        Returns:
            Where the blocks lay. A block that is gone is not `present`, and `drain` was not called for it.

        Raises:
            InvalidRequestError: the arrays, or the leased slots, are not those of the blocks of `runs`.
            LeaseExpiredError: the lease was not live, or expired before all bytes had been read.
            ChecksumError: bytes differ from their checksums; the server was told to drop the blocks.
        """
        group = _one_group(namespace, runs)
        shards = shards or ShardRange(0, group.num_shards)
        region_bytes = shards.count * group.chunk_bytes
        if isinstance(drain, InPlace):
            drain.check(sum(map(len, runs)), region_bytes, is_get=True)
        mover = BlockMover(namespace.transport, drain, drain_sums, region_bytes, group.chunk_bytes, is_write=False)
        asked_at = time.monotonic()
        ends_at = min(ends_at, asked_at + self.config.data_timeout_ms / 1000)
        parts: list[Located] = []

        def move(found: Located, indices: Sequence[int], **permitted: Any) -> None:
            timeout_s = max(0.0, min(ends_at - time.monotonic(), found.lease_remaining_ms / 1000))
            transfer = Transfer(
                lease_id, found.offsets, region_bytes, timeout_s, batch_bytes, found.permit, out_of_process, **permitted
            )
            mover.move(transfer, indices)

        if leased is not None:
            parts.append(_located(namespace, lease_id, leased, sum(map(len, runs)), group, shards))
            move(
                parts[0],
                range(len(leased)),
                skip_bytes=shards.start * group.chunk_bytes,
                permitted_bytes=group.slot_bytes,
                permitted_offsets=leased.permitted_offsets,
                first_permitted=leased.start,
            )
        else:
            first, split = 0, list(in_parts(runs, namespace.max_blocks(shards)))
            with closing(self.rpc.locate(namespace, lease_id, split, shards)) as answers:
                for located in answers:
                    parts.append(located)
                    if indices := [first + idx for idx, present in enumerate(located.present) if present]:
                        move(located, indices)
                    first += len(located.present)
        checksums = mover.checksums()
        whole = join_located(parts)
        if time.monotonic() > asked_at + whole.lease_remaining_ms / 1000:
            raise LeaseExpiredError(f"lease {lease_id:#x} expired while its blocks were read; raise lease_ttl_ms")
        if checksums != list(whole.checksums):
            self._raise_corrupt(namespace, runs, whole, checksums)
        return whole

    def _raise_corrupt(
        self, namespace: Namespace, runs: Sequence[BlockRun], located: Located, checksums: Sequence[int]
    ) -> None:
        """Tells the server which blocks differ from their checksums, and raises ChecksumError."""
        hashes = [block_hash for run in runs for block_hash in run.block_hashes]
        present = list(itertools.compress(hashes, located.present))
        num_shards = len(checksums) // len(present)
        differs = [one != other for one, other in zip(checksums, located.checksums, strict=True)]
        bad = [name for nth, name in enumerate(present) if any(differs[nth * num_shards :][:num_shards])]
        with suppress(KVPoolError):
            for part in in_parts([BlockRun(runs[0].group_idx, bad)], namespace.max_batch_blocks):
                self.admin.verify(namespace, part)
        raise ChecksumError(f"{len(bad)} blocks differ from their checksums, the first is {bad[0].hex()}")

    def get_blocks(
        self, namespace: Namespace, lease_id: int, run: BlockRun, *, shards: ShardRange | None = None
    ) -> list[npt.NDArray[np.uint8] | None]:
        """As `get`, into new arrays: uint8 [shards.count * chunk_bytes] each; None for blocks that are gone."""
        group = namespace.group(run.group_idx)
        nbytes = (shards.count if shards else group.num_shards) * group.chunk_bytes
        blocks = [np.empty(nbytes, np.uint8) for _ in run.block_hashes]
        located = self.get(namespace, lease_id, [run], InPlace(blocks), shards=shards)
        return [block if present else None for block, present in zip(blocks, located.present, strict=True)]

    def release(self, lease_ids: Sequence[int]) -> int:
        """Ends leases; returns how many of them were live."""
        return self.rpc.release(lease_ids)


def _located(
    namespace: Namespace, lease_id: int, leased: LeasedSlots, count: int, group: GroupSpec, shards: ShardRange
) -> Located:
    """Where shards of `count` leased slots lie. Raises InvalidRequestError and LeaseExpiredError as `Client.get`."""
    if len(leased) != count:
        raise InvalidRequestError(f"{len(leased)} leased slots for {count} blocks; give one a block")
    if leased.fingerprint != namespace.fingerprint:
        raise InvalidRequestError(
            f"the leased slots are of namespace {leased.fingerprint.hex()[:12]}, and are to be read as blocks of "
            f"{namespace.fingerprint.hex()[:12]}; look them up in the namespace that you read them in"
        )
    shards.check(group.num_shards)
    located = leased.located(shards)
    if leased.boot_token != namespace.boot_token or not located.lease_remaining_ms:
        raise LeaseExpiredError(f"lease {lease_id:#x} expired, or is of another boot, before its blocks were read")
    return located


def _one_group(namespace: Namespace, runs: Sequence[BlockRun]) -> GroupSpec:
    groups = {run.group_idx for run in runs}
    if len(groups) != 1:
        raise InvalidRequestError(f"the runs are of groups {sorted(groups)}; a put or get moves blocks of one group")
    return namespace.group(runs[0].group_idx)


def _bytes_of(payload: Any) -> npt.NDArray[np.uint8]:
    """Bytes or an array as a contiguous array with one axis; without a copy if it is one already."""
    array = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    return np.ascontiguousarray(array).reshape(-1)
