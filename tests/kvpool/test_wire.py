from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.protocol import errors, wire
from kvpool.protocol.namespace import GroupSpec, NamespaceSpec
from kvpool.protocol.offers import MooncakeInfo, Offer, SegmentInfo
from kvpool.protocol.types import (
    HASH_BYTES,
    BlockRun,
    Chunk,
    Located,
    Lookup,
    PoolKey,
    PutGrant,
    PutReceipt,
    PutStatus,
    RunHits,
    ShardRange,
    Slots,
)
from kvpool.v1 import pool_pb2 as pb

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
    texts,
    st.lists(groups, max_size=3).map(tuple),
    **dict.fromkeys(
        ["revision", "weights_digest", "weights_epoch", "model_dtype", "kv_cache_dtype", "page_format"], texts
    ),
    hash_algorithm=texts,
    hash_seed=texts,
    hash_block_tokens=u32,
    num_pipeline_stages=u32,
    extra=st.dictionaries(texts, texts, max_size=3).map(lambda extra: tuple(extra.items())),
    tenant=texts,
    salt=texts,
    format_version=u32,
)
mooncakes = st.one_of(st.none(), st.builds(MooncakeInfo, texts, texts, u64, u64, st.binary(max_size=16), u64))
segments = st.one_of(st.none(), st.builds(SegmentInfo, u64, st.binary(max_size=16), u64, st.binary(max_size=16)))
offers = st.builds(Offer, u64, segments, mooncakes)


def _through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(st.lists(runs, min_size=1, max_size=3))
def test_runs(value: list[BlockRun]) -> None:
    assert wire.decode_runs(list(map(_through_bytes, wire.encode_runs(value))), 1_000) == value


@given(u32, u32)
def test_shards(start: int, count: int) -> None:
    value = ShardRange(start, count)
    assert wire.decode_shards(_through_bytes(wire.encode_shards(value))) == value


@given(specs)
def test_specs(value: NamespaceSpec) -> None:
    received = wire.decode_spec(_through_bytes(wire.encode_spec(value)))
    assert received == value
    assert received.fingerprint() == value.fingerprint()


@given(offers)
def test_offers(value: Offer) -> None:
    assert wire.decode_offer(_through_bytes(pb.PingResponse(**wire.encode_offer(value)))) == value


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


@given(st.lists(st.sampled_from(PutStatus), max_size=5), st.lists(u64, max_size=5), ids, u32, ids)
def test_grants(statuses: list[PutStatus], offsets: list[int], ticket_id: int, ttl_ms: int, boot_token: int) -> None:
    value = PutGrant(ticket_id, ttl_ms, tuple(statuses), tuple(offsets))
    message = _through_bytes(wire.encode_grant(value, boot_token))
    assert message.boot_token == boot_token
    assert wire.decode_grant(message) == value


def test_statuses_have_the_numbers_of_the_contract() -> None:
    assert {f"PUT_STATUS_{status.name}": status.value for status in PutStatus} == dict(pb.PutStatus.items())


@given(st.builds(PutReceipt, u32, u32), ids)
def test_receipts(value: PutReceipt, boot_token: int) -> None:
    message = _through_bytes(wire.encode_receipt(value, boot_token))
    assert message.boot_token == boot_token
    assert wire.decode_receipt(message) == value


@given(u32, st.lists(st.booleans(), max_size=5), st.lists(u64, max_size=5), st.lists(u64, max_size=5), ids)
def test_located(
    remaining_ms: int, present: list[bool], offsets: list[int], checksums: list[int], boot_token: int
) -> None:
    value = Located(remaining_ms, tuple(present), tuple(offsets), tuple(checksums))
    message = _through_bytes(wire.encode_located(value, boot_token))
    assert message.boot_token == boot_token
    assert wire.decode_located(message) == value


@given(keys)
def test_keys(value: PoolKey) -> None:
    assert wire.decode_key(_through_bytes(wire.encode_key(value))) == value


@given(st.builds(Chunk, keys, st.binary(max_size=40), u64, st.one_of(st.just(b""), hashes)))
def test_chunks(value: Chunk) -> None:
    assert wire.decode_chunk(_through_bytes(wire.encode_chunk(value))) == value


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (pb.BlockRun(block_hashes=bytes(31)), "block_hashes has 31 bytes"),
        (pb.BlockRun(block_hashes=bytes(33)), "block_hashes has 33 bytes"),
        (pb.BlockRun(block_hashes=b""), "block_hashes has 0 bytes"),
        (pb.BlockRun(block_hashes=bytes(32), parent_hash=b"\x07"), "parent_hash has 1 bytes.*'07'"),
    ],
)
def test_malformed_runs_are_refused(message: pb.BlockRun, names: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=names):
        wire.decode_runs([message], 1_000)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match="names no blocks"):
        wire.decode_runs([], 1_000)


@pytest.mark.parametrize("field", ["namespace", "block_hash"])
def test_malformed_keys_are_refused(field: str) -> None:
    parts = {"namespace": bytes(32), "block_hash": bytes(32), field: bytes(5)}
    with pytest.raises(errors.InvalidRequestError, match=f"{field} has 5 bytes, not 32"):
        wire.decode_key(pb.PoolKey(**parts))
    with pytest.raises(errors.InvalidRequestError, match=f"{field} has 5 bytes, not 32"):
        wire.decode_chunk(pb.Chunk(key=pb.PoolKey(**parts)))


class _Failed(grpc.RpcError):
    """What a failed call raises, without a call."""

    def __init__(self, code: grpc.StatusCode, details: str | None):
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


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


@pytest.mark.parametrize(("error", "status"), STATUSES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_errors_cross_the_wire_and_keep_class_and_message(
    error: type[errors.KVPoolError], status: grpc.StatusCode
) -> None:
    assert wire.status_of(error("the thing, the value, the fix")) is status
    received = wire.error_of(_Failed(status, "the thing, the value, the fix"), "host:1")
    assert type(received) is error
    assert "the thing, the value, the fix" in str(received)


class _FailedByName(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, name: str):
        self.code, self.details = lambda: status, lambda: "why"
        self.trailing_metadata = lambda: (("other", "x"), (wire.NAME_KEY, name))


@pytest.mark.parametrize("error", wire._NAMED.values())
def test_errors_that_share_a_status_cross_the_wire_by_name(error: type[errors.KVPoolError]) -> None:
    status, named = wire.status_of(error("")), dict(wire.metadata_of(error("")))
    received = wire.error_of(_FailedByName(status, named[wire.NAME_KEY]), "host:1")
    assert (type(received), str(received)) == (error, "kvpool-server at host:1: why")
    # A name with another error's status is a server's mistake: the status counts.
    assert type(wire.error_of(_FailedByName(grpc.StatusCode.ABORTED, error.__name__), "")) is errors.LeaseExpiredError
    assert type(wire.error_of(_FailedByName(status, "NoError"), "")) is wire._ERROR_OF[status]
    assert wire.encode_lookup_error(error("")).error.name == error.__name__


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_errors_of_the_network_name_the_endpoint(status: grpc.StatusCode) -> None:
    assert "host:1" in str(wire.error_of(_Failed(status, "no route"), "host:1"))


@pytest.mark.parametrize("status", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
def test_a_status_that_means_nothing_here_is_a_transfer_error_that_names_it(status: grpc.StatusCode) -> None:
    received = wire.error_of(_Failed(status, None), "host:1")
    assert type(received) is errors.TransferError
    assert str(received) == f"{status.name} from kvpool-server at host:1"


@given(u64, u64, st.binary(min_size=1, max_size=300))
def test_a_payload_that_is_appended_is_what_protobuf_would_write(token: int, offset: int, payload: bytes) -> None:
    put = pb.PutChunksRequest(ticket_id=token, offset=offset)
    packed = wire.with_payload(put, put.PAYLOAD_FIELD_NUMBER, memoryview(payload))
    assert packed == pb.PutChunksRequest(ticket_id=token, offset=offset, payload=payload).SerializeToString()
    got = pb.GetChunksResponse(boot_token=token, offset=offset)
    packed = wire.with_payload(got, got.PAYLOAD_FIELD_NUMBER, memoryview(payload))
    assert packed == pb.GetChunksResponse(boot_token=token, offset=offset, payload=payload).SerializeToString()


@pytest.mark.parametrize("nbytes", [1, 127, 128, 16_383, 16_384, 1 << 20])
def test_payloads_whose_lengths_are_at_the_edges_of_a_varint(nbytes: int) -> None:
    payload = bytes(range(256)) * (nbytes // 256 + 1)
    put = pb.PutChunksRequest(ticket_id=1, offset=2)
    packed = wire.with_payload(put, put.PAYLOAD_FIELD_NUMBER, memoryview(payload)[:nbytes])
    assert pb.PutChunksRequest.FromString(packed).payload == payload[:nbytes]
