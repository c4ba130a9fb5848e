import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol import errors, wire
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.types import (
    HASH_BYTES,
    BlockRun,
    Chunk,
    Located,
    Lookup,
    PoolKey,
    PutGrant,
    PutStatus,
    RunHits,
    ShardRange,
    Slots,
)
from kvpool.v1 import pool_pb2 as pb

SPEC_FIELDS = [field for field in dataclasses.fields(NamespaceSpec) if field.name not in ("groups", "extra")]
u32, u64, ids = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)
hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
texts = st.text(max_size=12)
runs = st.builds(BlockRun, u32, st.lists(hashes, min_size=1, max_size=4), st.one_of(st.just(b""), hashes))
keys = st.builds(PoolKey, hashes, u32, hashes, u32)
groups = st.builds(
    GroupSpec, texts, u32, u32, u32, u32, u32, u64, st.lists(texts, max_size=3).map(tuple), window_tokens=u32
)
specs = st.builds(
    NamespaceSpec,
    groups=st.lists(groups, max_size=3).map(tuple),
    extra=st.dictionaries(texts, texts, max_size=3).map(lambda extra: tuple(extra.items())),
    **{field.name: texts if field.type == "str" else u32 for field in SPEC_FIELDS},
)
many = st.lists(u64, max_size=5).map(tuple)
statuses = st.lists(st.sampled_from(PutStatus), max_size=5).map(tuple)
VALUES: dict[Any, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    ShardRange: (st.builds(ShardRange, u32, u32), wire.encode_shards, wire.decode_shards),
    NamespaceSpec: (specs, wire.encode_spec, wire.decode_spec),
    PutGrant: (st.builds(PutGrant, ids, u32, statuses, many), lambda v: wire.encode_grant(v, 7), wire.decode_grant),
    Located: (
        st.builds(Located, u32, st.lists(st.booleans(), max_size=5).map(tuple), many, many),
        lambda value: wire.encode_located(value, 7),
        wire.decode_located,
    ),
    PoolKey: (keys, lambda key: wire.message_of(key, pb.PoolKey), wire.decode_key),
    Chunk: (
        st.builds(Chunk, keys, st.binary(max_size=40), u64, st.one_of(st.just(b""), hashes)),
        wire.encode_chunk,
        wire.decode_chunk,
    ),
}


def _through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("kind", VALUES)
@given(st.data())
def test_values_cross_the_wire(kind: Any, data: st.DataObject) -> None:
    values, encode, decode = VALUES[kind]
    value = data.draw(values)
    message = _through_bytes(encode(value))
    assert decode(message) == value
    assert getattr(message, "boot_token", 7) == 7


@given(st.lists(runs, min_size=1, max_size=3))
def test_runs(value: list[BlockRun]) -> None:
    assert wire.decode_runs(list(map(_through_bytes, wire.encode_runs(value))), 1_000) == value


@pytest.mark.parametrize("count", [wire.PACKED_FROM - 1, wire.PACKED_FROM])
def test_long_runs_read_as_lists_of_hashes(count: int) -> None:
    names = [nth.to_bytes(32, "big") for nth in range(count)]
    (run,) = wire.decode_runs(wire.encode_runs([BlockRun(0, names)]), count)
    hashes = run.block_hashes
    assert isinstance(hashes, list) == (count < wire.PACKED_FROM)
    assert (len(hashes), list(hashes), hashes[-1], hashes[7]) == (count, names, names[-1], names[7])
    assert list(hashes[5:900]) == names[5:900] and hashes[2:4][1] == names[3] and names[9] in hashes
    assert all(type(each) is bytes for each in hashes[:3])


@given(st.lists(st.tuples(runs, st.data()), max_size=3), ids, u32, ids)
def test_lookups(drawn: list[Any], lease_id: int, ttl_ms: int, boot_token: int) -> None:
    asked = [run for run, _ in drawn]
    hits = tuple(RunHits(d.draw(u32), d.draw(st.integers(0, 2 ** len(run) - 1))) for run, d in drawn)
    slots = tuple(Slots(d.draw(st.binary(min_size=8)), d.draw(st.binary()), d.draw(st.binary())) for _, d in drawn)
    value = Lookup(hits, lease_id, ttl_ms, 0, slots, b"f" * 32, boot_token, 7.0 + ttl_ms / 1000)
    message = _through_bytes(wire.encode_lookup(value, asked, boot_token))
    assert message.boot_token == boot_token
    assert wire.decode_lookup(message, b"f" * 32, 7.0) == value


def test_bit_i_of_a_lookup_is_bit_i_modulo_8_of_byte_i_div_8() -> None:
    run = BlockRun(0, [bytes(HASH_BYTES)] * 10)
    message = wire.encode_lookup(Lookup((RunHits(0, 1 << 9 | 1 << 1),)), [run], 1)
    assert message.hits[0].complete == bytes([0b10, 0b10])


def test_statuses_have_the_numbers_of_the_contract() -> None:
    assert {f"PUT_STATUS_{status.name}": status.value for status in PutStatus} == dict(pb.PutStatus.items())


def test_malformed_runs_and_keys_are_refused() -> None:
    short = pb.BlockRun(block_hashes=bytes(32), parent_hash=b"\x07")
    sizes = {each: pb.BlockRun(block_hashes=bytes(each)) for each in (0, 31, 33)}
    for messages, names in (
        ([], "names no blocks"),
        *(([run], f"block_hashes has {size} bytes") for size, run in sizes.items()),
        ([short], "parent_hash has 1 bytes.*'07'"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=names):
            wire.decode_runs(messages, 1_000)
    for field in ("namespace", "block_hash"):
        key = pb.PoolKey(**{"namespace": bytes(32), "block_hash": bytes(32), field: bytes(5)})
        with pytest.raises(errors.InvalidRequestError, match=f"{field} has 5 bytes, not 32"):
            wire.decode_key(key)
        with pytest.raises(errors.InvalidRequestError, match=f"{field} has 5 bytes, not 32"):
            wire.decode_chunk(pb.Chunk(key=key))


class _Failed(grpc.RpcError):
    """What a failed call raises, without a call."""

    def __init__(self, code: grpc.StatusCode, details: str | None, name: str = ""):
        self.code, self.details = lambda: code, lambda: details
        self.trailing_metadata = lambda: (("other", "x"), (wire.NAME_KEY, name)) if name else None


STATUSES = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownNamespaceError: grpc.StatusCode.NOT_FOUND,
    errors.IncompatibleNamespaceError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LeaseExpiredError: grpc.StatusCode.ABORTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.PoolTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TransferError: grpc.StatusCode.INTERNAL,
    errors.ChecksumError: grpc.StatusCode.DATA_LOSS,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
}


def test_every_error_has_a_status() -> None:
    never_sent, named = {errors.InvalidReplyError}, {errors.IncompatibleReleaseError}
    assert {*errors.KVPoolError.__subclasses__()} == {*STATUSES, errors.ConfigError} | never_sent | named
    assert wire.status_of(errors.ConfigError("x")) is grpc.StatusCode.INVALID_ARGUMENT
    for status in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED):
        received = wire.error_of(_Failed(status, None), "host:1")
        assert type(received) is errors.TransferError, "a status that no error has"
        assert str(received) == f"{status.name} from kvpool-server at host:1"


@pytest.mark.parametrize(("error", "status"), STATUSES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_errors_cross_the_wire_and_keep_class_and_message(
    error: type[errors.KVPoolError], status: grpc.StatusCode
) -> None:
    assert wire.status_of(error("the thing, the value, the fix")) is status
    received = wire.error_of(_Failed(status, "the thing, the value, the fix"), "host:1")
    assert type(received) is error
    assert "the thing, the value, the fix" in str(received)
    is_of_the_network = status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert not is_of_the_network or "host:1" in str(received)


@pytest.mark.parametrize("error", wire._NAMED.values())
def test_errors_that_share_a_status_cross_the_wire_by_name(error: type[errors.KVPoolError]) -> None:
    status, named = wire.status_of(error("")), dict(wire.metadata_of(error("")))
    received = wire.error_of(_Failed(status, "why", named[wire.NAME_KEY]), "host:1")
    assert (type(received), str(received)) == (error, "kvpool-server at host:1: why")
    # A name with another error's status is a server's mistake: the status counts.
    assert type(wire.error_of(_Failed(grpc.StatusCode.ABORTED, "why", error.__name__), "")) is errors.LeaseExpiredError
    assert type(wire.error_of(_Failed(status, "why", "NoError"), "")) is wire._ERROR_OF[status]
    assert wire.encode_lookup_error(error("")).error.name == error.__name__


@pytest.mark.parametrize("nbytes", [1, 127, 128, 300, 16_383, 16_384, 1 << 20])
def test_a_payload_that_is_appended_is_what_protobuf_would_write(nbytes: int) -> None:
    """At the edges of a varint, which the payload's length is."""
    payload = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    for message in (pb.PutChunksRequest(ticket_id=1, offset=2), pb.GetChunksResponse(boot_token=3, offset=4)):
        packed = wire.with_payload(message, message.PAYLOAD_FIELD_NUMBER, memoryview(payload))
        message.payload = payload
        assert packed == message.SerializeToString()
