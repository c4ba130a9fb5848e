from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_NEVER_STORED: _ClassVar[MissCause]
    MISS_CAUSE_BEING_WRITTEN: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_REMOVED: _ClassVar[MissCause]
    MISS_CAUSE_CORRUPT: _ClassVar[MissCause]
    MISS_CAUSE_PUT_FAILED: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_NAMESPACE: _ClassVar[MissCause]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_COMPLETE: _ClassVar[BlockState]
    BLOCK_STATE_IN_TIER: _ClassVar[BlockState]
    BLOCK_STATE_MISSING: _ClassVar[BlockState]

class PutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_STATUS_GRANTED: _ClassVar[PutStatus]
    PUT_STATUS_PRESENT: _ClassVar[PutStatus]
    PUT_STATUS_BUSY: _ClassVar[PutStatus]

class HintKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_KIND_UNSPECIFIED: _ClassVar[HintKind]
    HINT_KIND_PIN: _ClassVar[HintKind]
    HINT_KIND_EXPIRE: _ClassVar[HintKind]
    HINT_KIND_PREFETCH: _ClassVar[HintKind]
MISS_CAUSE_NEVER_STORED: MissCause
MISS_CAUSE_BEING_WRITTEN: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_REMOVED: MissCause
MISS_CAUSE_CORRUPT: MissCause
MISS_CAUSE_PUT_FAILED: MissCause
MISS_CAUSE_OTHER_NAMESPACE: MissCause
BLOCK_STATE_COMPLETE: BlockState
BLOCK_STATE_IN_TIER: BlockState
BLOCK_STATE_MISSING: BlockState
PUT_STATUS_GRANTED: PutStatus
PUT_STATUS_PRESENT: PutStatus
PUT_STATUS_BUSY: PutStatus
HINT_KIND_UNSPECIFIED: HintKind
HINT_KIND_PIN: HintKind
HINT_KIND_EXPIRE: HintKind
HINT_KIND_PREFETCH: HintKind

class PoolKey(_message.Message):
    __slots__ = ("namespace", "group_idx", "block_hash", "shard")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    group_idx: int
    block_hash: bytes
    shard: int
    def __init__(self, namespace: _Optional[bytes] = ..., group_idx: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("group_idx", "parent_hash", "block_hashes")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    parent_hash: bytes
    block_hashes: bytes
    def __init__(self, group_idx: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class ShardRange(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("kind", "block_tokens", "window_tokens", "num_kv_heads", "head_size_k", "head_size_v", "num_shards", "chunk_bytes", "layer_names", "layer_formats")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_K_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_V_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    LAYER_FORMATS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    block_tokens: int
    window_tokens: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    num_shards: int
    chunk_bytes: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    layer_formats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., block_tokens: _Optional[int] = ..., window_tokens: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size_k: _Optional[int] = ..., head_size_v: _Optional[int] = ..., num_shards: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ..., layer_formats: _Optional[_Iterable[str]] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("format_version", "model", "revision", "weights_digest", "weights_epoch", "model_dtype", "kv_cache_dtype", "page_format", "hash_algorithm", "hash_seed", "hash_block_tokens", "num_pipeline_stages", "pipeline_stage", "groups", "extra", "tenant", "salt")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PIPELINE_STAGES_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STAGE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    model: str
    revision: str
    weights_digest: str
    weights_epoch: str
    model_dtype: str
    kv_cache_dtype: str
    page_format: str
    hash_algorithm: str
    hash_seed: str
    hash_block_tokens: int
    num_pipeline_stages: int
    pipeline_stage: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupSpec]
    extra: _containers.ScalarMap[str, str]
    tenant: str
    salt: str
    def __init__(self, format_version: _Optional[int] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., weights_digest: _Optional[str] = ..., weights_epoch: _Optional[str] = ..., model_dtype: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., page_format: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_seed: _Optional[str] = ..., hash_block_tokens: _Optional[int] = ..., num_pipeline_stages: _Optional[int] = ..., pipeline_stage: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupSpec, _Mapping]]] = ..., extra: _Optional[_Mapping[str, str]] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("spec", "expected_fingerprint", "opener", "protocol", "release")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OPENER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    spec: NamespaceSpec
    expected_fingerprint: bytes
    opener: str
    protocol: int
    release: str
    def __init__(self, spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ..., expected_fingerprint: _Optional[bytes] = ..., opener: _Optional[str] = ..., protocol: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("nbytes", "nonce", "nonce_offset", "token", "kept")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    nonce: bytes
    nonce_offset: int
    token: bytes
    kept: bool
    def __init__(self, nbytes: _Optional[int] = ..., nonce: _Optional[bytes] = ..., nonce_offset: _Optional[int] = ..., token: _Optional[bytes] = ..., kept: bool = ...) -> None: ...

class MooncakeEngine(_message.Message):
    __slots__ = ("session", "protocol", "base_address", "nbytes", "nonce", "nonce_offset")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    session: str
    protocol: str
    base_address: int
    nbytes: int
    nonce: bytes
    nonce_offset: int
    def __init__(self, session: _Optional[str] = ..., protocol: _Optional[str] = ..., base_address: _Optional[int] = ..., nbytes: _Optional[int] = ..., nonce: _Optional[bytes] = ..., nonce_offset: _Optional[int] = ...) -> None: ...

class DataPort(_message.Message):
    __slots__ = ("host", "port", "nonce", "sealed")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    nonce: bytes
    sealed: bool
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., nonce: _Optional[bytes] = ..., sealed: bool = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("boot_token", "fingerprint", "segment", "created", "piece_bytes", "max_batch_blocks", "mooncake", "data_port", "protocol", "release")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    fingerprint: bytes
    segment: Segment
    created: bool
    piece_bytes: int
    max_batch_blocks: int
    mooncake: MooncakeEngine
    data_port: DataPort
    protocol: int
    release: str
    def __init__(self, boot_token: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., created: bool = ..., piece_bytes: _Optional[int] = ..., max_batch_blocks: _Optional[int] = ..., mooncake: _Optional[_Union[MooncakeEngine, _Mapping]] = ..., data_port: _Optional[_Union[DataPort, _Mapping]] = ..., protocol: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "runs", "prefix_only", "lease_ttl_ms", "release", "locate", "wait_ms", "explain", "traceparent", "here", "bring_up")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ONLY_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    LOCATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    BRING_UP_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    prefix_only: bool
    lease_ttl_ms: int
    release: _containers.RepeatedScalarFieldContainer[int]
    locate: bool
    wait_ms: int
    explain: bool
    traceparent: str
    here: bool
    bring_up: bool
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., prefix_only: bool = ..., lease_ttl_ms: _Optional[int] = ..., release: _Optional[_Iterable[int]] = ..., locate: bool = ..., wait_ms: _Optional[int] = ..., explain: bool = ..., traceparent: _Optional[str] = ..., here: bool = ..., bring_up: bool = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("boot_token", "hits", "lease_id", "lease_ttl_ms", "retry_after_ms")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    hits: _containers.RepeatedCompositeFieldContainer[RunHits]
    lease_id: int
    lease_ttl_ms: int
    retry_after_ms: int
    def __init__(self, boot_token: _Optional[int] = ..., hits: _Optional[_Iterable[_Union[RunHits, _Mapping]]] = ..., lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("found", "error")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    found: LookupResponse
    error: CallError
    def __init__(self, found: _Optional[_Union[LookupResponse, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "message", "name")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    name: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RunHits(_message.Message):
    __slots__ = ("num_leading", "complete", "num_pending", "offsets", "checksums", "permit", "missing")
    NUM_LEADING_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    num_leading: int
    complete: bytes
    num_pending: int
    offsets: bytes
    checksums: bytes
    permit: bytes
    missing: _containers.RepeatedCompositeFieldContainer[Miss]
    def __init__(self, num_leading: _Optional[int] = ..., complete: _Optional[bytes] = ..., num_pending: _Optional[int] = ..., offsets: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., permit: _Optional[bytes] = ..., missing: _Optional[_Iterable[_Union[Miss, _Mapping]]] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("cause", "count")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    cause: MissCause
    count: int
    def __init__(self, cause: _Optional[_Union[MissCause, str]] = ..., count: _Optional[int] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("namespace", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("boot_token", "hits", "usable_tokens", "load_seconds")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    hits: _containers.RepeatedCompositeFieldContainer[RunHits]
    usable_tokens: int
    load_seconds: float
    def __init__(self, boot_token: _Optional[int] = ..., hits: _Optional[_Iterable[_Union[RunHits, _Mapping]]] = ..., usable_tokens: _Optional[int] = ..., load_seconds: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("boot_token", "runs", "elsewhere", "remembered_seconds", "half_remembered_seconds", "tiers_away", "servers_away")
    class ServersAwayEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HALF_REMEMBERED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_AWAY_FIELD_NUMBER: _ClassVar[int]
    SERVERS_AWAY_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    runs: _containers.RepeatedCompositeFieldContainer[RunExplanation]
    elsewhere: _containers.RepeatedCompositeFieldContainer[NamespaceMatch]
    remembered_seconds: float
    half_remembered_seconds: float
    tiers_away: _containers.RepeatedScalarFieldContainer[str]
    servers_away: _containers.ScalarMap[str, str]
    def __init__(self, boot_token: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[RunExplanation, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[_Union[NamespaceMatch, _Mapping]]] = ..., remembered_seconds: _Optional[float] = ..., half_remembered_seconds: _Optional[float] = ..., tiers_away: _Optional[_Iterable[str]] = ..., servers_away: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunExplanation(_message.Message):
    __slots__ = ("group_idx", "ranges", "other_children")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    OTHER_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    ranges: _containers.RepeatedCompositeFieldContainer[BlockRange]
    other_children: int
    def __init__(self, group_idx: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ..., other_children: _Optional[int] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("first", "count", "state", "cause", "tier", "newest_left_seconds", "oldest_left_seconds", "unused_seconds", "evicted_for", "server")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FOR_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    state: BlockState
    cause: MissCause
    tier: str
    newest_left_seconds: float
    oldest_left_seconds: float
    unused_seconds: float
    evicted_for: EvictedFor
    server: str
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., cause: _Optional[_Union[MissCause, str]] = ..., tier: _Optional[str] = ..., newest_left_seconds: _Optional[float] = ..., oldest_left_seconds: _Optional[float] = ..., unused_seconds: _Optional[float] = ..., evicted_for: _Optional[_Union[EvictedFor, _Mapping]] = ..., server: _Optional[str] = ...) -> None: ...

class EvictedFor(_message.Message):
    __slots__ = ("is_hidden", "tenant", "model")
    IS_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    is_hidden: bool
    tenant: str
    model: str
    def __init__(self, is_hidden: bool = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class NamespaceMatch(_message.Message):
    __slots__ = ("fingerprint", "count", "differences")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    count: int
    differences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[bytes] = ..., count: _Optional[int] = ..., differences: _Optional[_Iterable[str]] = ...) -> None: ...

class PutStartRequest(_message.Message):
    __slots__ = ("namespace", "runs", "shards", "ticket_ttl_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    shards: ShardRange
    ticket_ttl_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., shards: _Optional[_Union[ShardRange, _Mapping]] = ..., ticket_ttl_ms: _Optional[int] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("boot_token", "ticket_id", "ticket_ttl_ms", "statuses", "offsets", "permit")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    ticket_id: int
    ticket_ttl_ms: int
    statuses: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    permit: bytes
    def __init__(self, boot_token: _Optional[int] = ..., ticket_id: _Optional[int] = ..., ticket_ttl_ms: _Optional[int] = ..., statuses: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ..., permit: _Optional[bytes] = ...) -> None: ...

class PutEndRequest(_message.Message):
    __slots__ = ("ticket_id", "checksums")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket_id: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PutEndResponse(_message.Message):
    __slots__ = ("boot_token", "num_committed", "num_complete")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_committed: int
    num_complete: int
    def __init__(self, boot_token: _Optional[int] = ..., num_committed: _Optional[int] = ..., num_complete: _Optional[int] = ...) -> None: ...

class PutRevokeRequest(_message.Message):
    __slots__ = ("ticket_id",)
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ticket_id: int
    def __init__(self, ticket_id: _Optional[int] = ...) -> None: ...

class PutRevokeResponse(_message.Message):
    __slots__ = ("boot_token", "revoked")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    revoked: bool
    def __init__(self, boot_token: _Optional[int] = ..., revoked: bool = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("lease_id", "namespace", "runs", "shards")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    shards: ShardRange
    def __init__(self, lease_id: _Optional[int] = ..., namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., shards: _Optional[_Union[ShardRange, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("boot_token", "lease_remaining_ms", "present", "offsets", "checksums", "permit")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    lease_remaining_ms: int
    present: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    permit: bytes
    def __init__(self, boot_token: _Optional[int] = ..., lease_remaining_ms: _Optional[int] = ..., present: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., permit: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("boot_token", "num_released")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_released: int
    def __init__(self, boot_token: _Optional[int] = ..., num_released: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("key", "parent_hash", "payload", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: PoolKey
    parent_hash: bytes
    payload: bytes
    checksum: int
    def __init__(self, key: _Optional[_Union[PoolKey, _Mapping]] = ..., parent_hash: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutChunksRequest(_message.Message):
    __slots__ = ("chunks", "ticket_id", "offset", "payload")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    ticket_id: int
    offset: int
    payload: bytes
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., ticket_id: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutChunksResponse(_message.Message):
    __slots__ = ("boot_token", "statuses", "nbytes")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    statuses: bytes
    nbytes: int
    def __init__(self, boot_token: _Optional[int] = ..., statuses: _Optional[bytes] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GetChunksRequest(_message.Message):
    __slots__ = ("keys", "lease_id", "offsets", "region_bytes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[PoolKey]
    lease_id: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    region_bytes: int
    def __init__(self, keys: _Optional[_Iterable[_Union[PoolKey, _Mapping]]] = ..., lease_id: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., region_bytes: _Optional[int] = ...) -> None: ...

class GetChunksResponse(_message.Message):
    __slots__ = ("boot_token", "index", "found", "chunk", "offset", "payload")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    index: int
    found: bool
    chunk: Chunk
    offset: int
    payload: bytes
    def __init__(self, boot_token: _Optional[int] = ..., index: _Optional[int] = ..., found: bool = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("boot_token", "num_checked", "num_dropped")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_checked: int
    num_dropped: int
    def __init__(self, boot_token: _Optional[int] = ..., num_checked: _Optional[int] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("namespace", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("boot_token", "num_removed")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOVED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_removed: int
    def __init__(self, boot_token: _Optional[int] = ..., num_removed: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("namespace", "runs", "kind", "pin_seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    kind: HintKind
    pin_seconds: int
    def __init__(self, namespace: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., kind: _Optional[_Union[HintKind, str]] = ..., pin_seconds: _Optional[int] = ...) -> None: ...

class HintResponse(_message.Message):
    __slots__ = ("boot_token", "num_blocks", "num_refused", "num_pending", "pin_seconds")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_blocks: int
    num_refused: int
    num_pending: int
    pin_seconds: int
    def __init__(self, boot_token: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_pending: _Optional[int] = ..., pin_seconds: _Optional[int] = ...) -> None: ...

class PinBudget(_message.Message):
    __slots__ = ("tenant", "limit_bytes", "used_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit_bytes: int
    used_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("boot_token", "num_removed")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOVED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_removed: int
    def __init__(self, boot_token: _Optional[int] = ..., num_removed: _Optional[int] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("boot_token", "version", "uptime_seconds", "segment", "mooncake", "piece_bytes", "data_port", "namespaces_opened", "draining", "protocol")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    version: str
    uptime_seconds: float
    segment: Segment
    mooncake: MooncakeEngine
    piece_bytes: int
    data_port: DataPort
    namespaces_opened: int
    draining: bool
    protocol: int
    def __init__(self, boot_token: _Optional[int] = ..., version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., mooncake: _Optional[_Union[MooncakeEngine, _Mapping]] = ..., piece_bytes: _Optional[int] = ..., data_port: _Optional[_Union[DataPort, _Mapping]] = ..., namespaces_opened: _Optional[int] = ..., draining: bool = ..., protocol: _Optional[int] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("boot_token", "principal", "methods", "ends_at")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    principal: str
    methods: _containers.RepeatedScalarFieldContainer[str]
    ends_at: int
    def __init__(self, boot_token: _Optional[int] = ..., principal: _Optional[str] = ..., methods: _Optional[_Iterable[str]] = ..., ends_at: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("boot_token", "arena_bytes", "free_bytes", "prefaulted_bytes", "num_entries", "num_incomplete", "num_quarantined", "num_leases", "num_tickets", "counters", "tiers", "server", "engines", "quotas", "pinned_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_TICKETS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    arena_bytes: int
    free_bytes: int
    prefaulted_bytes: int
    num_entries: int
    num_incomplete: int
    num_quarantined: int
    num_leases: int
    num_tickets: int
    counters: _containers.ScalarMap[str, int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    server: ServerStats
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    pinned_bytes: int
    def __init__(self, boot_token: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., num_entries: _Optional[int] = ..., num_incomplete: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_tickets: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., server: _Optional[_Union[ServerStats, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class ServerStats(_message.Message):
    __slots__ = ("version", "uptime_seconds", "unix_seconds", "loop_lag_p50_seconds", "loop_lag_max_seconds", "rpc_seconds_bounds", "rpcs", "transfers", "usage", "http_port", "loop_lag_p99_seconds", "certificate_ends", "refused_files")
    class CertificateEndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RPC_SECONDS_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    RPCS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FILES_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    unix_seconds: float
    loop_lag_p50_seconds: float
    loop_lag_max_seconds: float
    rpc_seconds_bounds: _containers.RepeatedScalarFieldContainer[float]
    rpcs: _containers.RepeatedCompositeFieldContainer[RpcStats]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferStats]
    usage: _containers.RepeatedCompositeFieldContainer[UsageStats]
    http_port: int
    loop_lag_p99_seconds: float
    certificate_ends: _containers.ScalarMap[str, float]
    refused_files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., unix_seconds: _Optional[float] = ..., loop_lag_p50_seconds: _Optional[float] = ..., loop_lag_max_seconds: _Optional[float] = ..., rpc_seconds_bounds: _Optional[_Iterable[float]] = ..., rpcs: _Optional[_Iterable[_Union[RpcStats, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[TransferStats, _Mapping]]] = ..., usage: _Optional[_Iterable[_Union[UsageStats, _Mapping]]] = ..., http_port: _Optional[int] = ..., loop_lag_p99_seconds: _Optional[float] = ..., certificate_ends: _Optional[_Mapping[str, float]] = ..., refused_files: _Optional[_Iterable[str]] = ...) -> None: ...

class RpcStats(_message.Message):
    __slots__ = ("method", "status", "sum_seconds", "buckets")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    method: str
    status: str
    sum_seconds: float
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, method: _Optional[str] = ..., status: _Optional[str] = ..., sum_seconds: _Optional[float] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("transport", "direction", "nbytes")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    transport: str
    direction: str
    nbytes: int
    def __init__(self, transport: _Optional[str] = ..., direction: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class UsageStats(_message.Message):
    __slots__ = ("tenant", "model", "lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "held_bytes", "held_blocks", "saved_seconds", "lost_seconds", "computed_tokens")
    class ComputedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    lookup_tokens: int
    hit_tokens: int
    stored_bytes: int
    loaded_bytes: int
    held_bytes: int
    held_blocks: int
    saved_seconds: float
    lost_seconds: float
    computed_tokens: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., lookup_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., held_blocks: _Optional[int] = ..., saved_seconds: _Optional[float] = ..., lost_seconds: _Optional[float] = ..., computed_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "up", "size_bytes", "used_bytes", "num_entries", "counters", "servers")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    up: bool
    size_bytes: int
    used_bytes: int
    num_entries: int
    counters: _containers.ScalarMap[str, int]
    servers: _containers.RepeatedCompositeFieldContainer[TierServer]
    def __init__(self, name: _Optional[str] = ..., up: bool = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_entries: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., servers: _Optional[_Iterable[_Union[TierServer, _Mapping]]] = ...) -> None: ...

class TierServer(_message.Message):
    __slots__ = ("name", "up", "read_bytes", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    up: bool
    read_bytes: int
    key: str
    def __init__(self, name: _Optional[str] = ..., up: bool = ..., read_bytes: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("without_holdings",)
    WITHOUT_HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    without_holdings: bool
    def __init__(self, without_holdings: bool = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("fingerprint", "spec", "num_entries", "nbytes", "lookup_blocks", "lookup_hits", "age_seconds", "idle_seconds", "superseded", "tiers", "opened_by", "computed_tokens", "saved_seconds", "lost_seconds", "pinned_bytes")
    class ComputedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    OPENED_BY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    spec: NamespaceSpec
    num_entries: int
    nbytes: int
    lookup_blocks: int
    lookup_hits: int
    age_seconds: float
    idle_seconds: float
    superseded: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierHoldings]
    opened_by: str
    computed_tokens: _containers.ScalarMap[str, int]
    saved_seconds: float
    lost_seconds: float
    pinned_bytes: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ..., num_entries: _Optional[int] = ..., nbytes: _Optional[int] = ..., lookup_blocks: _Optional[int] = ..., lookup_hits: _Optional[int] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., superseded: bool = ..., tiers: _Optional[_Iterable[_Union[TierHoldings, _Mapping]]] = ..., opened_by: _Optional[str] = ..., computed_tokens: _Optional[_Mapping[str, int]] = ..., saved_seconds: _Optional[float] = ..., lost_seconds: _Optional[float] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class TierHoldings(_message.Message):
    __slots__ = ("tier", "num_entries", "nbytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_entries: int
    nbytes: int
    def __init__(self, tier: _Optional[str] = ..., num_entries: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("boot_token", "namespaces")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, boot_token: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("subject", "limit_bytes", "used_bytes")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    subject: str
    limit_bytes: int
    used_bytes: int
    def __init__(self, subject: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuotasResponse(_message.Message):
    __slots__ = ("boot_token", "quotas", "pin_budgets")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    PIN_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    pin_budgets: _containers.RepeatedCompositeFieldContainer[PinBudget]
    def __init__(self, boot_token: _Optional[int] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ..., pin_budgets: _Optional[_Iterable[_Union[PinBudget, _Mapping]]] = ...) -> None: ...

class SetQuotasRequest(_message.Message):
    __slots__ = ("quotas",)
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class SetQuotasResponse(_message.Message):
    __slots__ = ("boot_token", "quotas")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, boot_token: _Optional[int] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("reporter", "sequence", "engine", "version", "vllm_version", "transport", "breaker_open", "namespaces", "computed_tokens", "loaded_tokens", "load_seconds", "saved_seconds", "lost_seconds", "num_requests", "last", "num_devices")
    class ComputedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    reporter: bytes
    sequence: int
    engine: str
    version: str
    vllm_version: str
    transport: str
    breaker_open: bool
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    computed_tokens: _containers.ScalarMap[str, int]
    loaded_tokens: int
    load_seconds: float
    saved_seconds: float
    lost_seconds: float
    num_requests: int
    last: bool
    num_devices: int
    def __init__(self, reporter: _Optional[bytes] = ..., sequence: _Optional[int] = ..., engine: _Optional[str] = ..., version: _Optional[str] = ..., vllm_version: _Optional[str] = ..., transport: _Optional[str] = ..., breaker_open: bool = ..., namespaces: _Optional[_Iterable[bytes]] = ..., computed_tokens: _Optional[_Mapping[str, int]] = ..., loaded_tokens: _Optional[int] = ..., load_seconds: _Optional[float] = ..., saved_seconds: _Optional[float] = ..., lost_seconds: _Optional[float] = ..., num_requests: _Optional[int] = ..., last: bool = ..., num_devices: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("boot_token", "counted")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    counted: bool
    def __init__(self, boot_token: _Optional[int] = ..., counted: bool = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("engine", "version", "vllm_version", "transport", "breaker_open", "age_seconds", "namespaces", "tenant", "model")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    engine: str
    version: str
    vllm_version: str
    transport: str
    breaker_open: bool
    age_seconds: float
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    tenant: str
    model: str
    def __init__(self, engine: _Optional[str] = ..., version: _Optional[str] = ..., vllm_version: _Optional[str] = ..., transport: _Optional[str] = ..., breaker_open: bool = ..., age_seconds: _Optional[float] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("since", "until")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    since: int
    until: int
    def __init__(self, since: _Optional[int] = ..., until: _Optional[int] = ...) -> None: ...

class LedgerRow(_message.Message):
    __slots__ = ("hour", "tenant", "model", "saved_gpu_seconds", "lost_gpu_seconds", "gib_hours", "stored_bytes", "loaded_bytes", "loaded_tokens", "computed_tokens", "num_requests", "evicted_by_others_tokens", "evicted_of_others_tokens", "hit_tokens")
    class ComputedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HOUR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAVED_GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GIB_HOURS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BY_OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_OF_OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hour: int
    tenant: str
    model: str
    saved_gpu_seconds: float
    lost_gpu_seconds: float
    gib_hours: float
    stored_bytes: int
    loaded_bytes: int
    loaded_tokens: int
    computed_tokens: _containers.ScalarMap[str, int]
    num_requests: int
    evicted_by_others_tokens: int
    evicted_of_others_tokens: int
    hit_tokens: int
    def __init__(self, hour: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., saved_gpu_seconds: _Optional[float] = ..., lost_gpu_seconds: _Optional[float] = ..., gib_hours: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., computed_tokens: _Optional[_Mapping[str, int]] = ..., num_requests: _Optional[int] = ..., evicted_by_others_tokens: _Optional[int] = ..., evicted_of_others_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("boot_token", "rows", "is_persistent", "begins", "next_since")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SINCE_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    rows: _containers.RepeatedCompositeFieldContainer[LedgerRow]
    is_persistent: bool
    begins: int
    next_since: int
    def __init__(self, boot_token: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[LedgerRow, _Mapping]]] = ..., is_persistent: bool = ..., begins: _Optional[int] = ..., next_since: _Optional[int] = ...) -> None: ...

class ValueRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ValueResponse(_message.Message):
    __slots__ = ("boot_token", "enabled", "arena_bytes", "policy", "seconds", "left_out", "sampled_blocks", "cpu_seconds", "has_tiers", "curves")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TIERS_FIELD_NUMBER: _ClassVar[int]
    CURVES_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    enabled: bool
    arena_bytes: int
    policy: str
    seconds: float
    left_out: int
    sampled_blocks: int
    cpu_seconds: float
    has_tiers: bool
    curves: _containers.RepeatedCompositeFieldContainer[ValueCurve]
    def __init__(self, boot_token: _Optional[int] = ..., enabled: bool = ..., arena_bytes: _Optional[int] = ..., policy: _Optional[str] = ..., seconds: _Optional[float] = ..., left_out: _Optional[int] = ..., sampled_blocks: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., has_tiers: bool = ..., curves: _Optional[_Iterable[_Union[ValueCurve, _Mapping]]] = ...) -> None: ...

class ValueCurve(_message.Message):
    __slots__ = ("is_total", "tenant", "lookup_tokens", "hit_tokens", "estimates")
    IS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    is_total: bool
    tenant: str
    lookup_tokens: float
    hit_tokens: float
    estimates: _containers.RepeatedCompositeFieldContainer[ValueEstimate]
    def __init__(self, is_total: bool = ..., tenant: _Optional[str] = ..., lookup_tokens: _Optional[float] = ..., hit_tokens: _Optional[float] = ..., estimates: _Optional[_Iterable[_Union[ValueEstimate, _Mapping]]] = ...) -> None: ...

class ValueEstimate(_message.Message):
    __slots__ = ("size", "hit_ratio", "hit_ratio_with_tiers")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_WITH_TIERS_FIELD_NUMBER: _ClassVar[int]
    size: float
    hit_ratio: float
    hit_ratio_with_tiers: float
    def __init__(self, size: _Optional[float] = ..., hit_ratio: _Optional[float] = ..., hit_ratio_with_tiers: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms", "boot_token")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    boot_token: int
    def __init__(self, deadline_ms: _Optional[int] = ..., boot_token: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("boot_token", "num_leases", "num_tickets", "num_queued_blocks", "remaining_ms")
    BOOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_TICKETS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    boot_token: int
    num_leases: int
    num_tickets: int
    num_queued_blocks: int
    remaining_ms: int
    def __init__(self, boot_token: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_tickets: _Optional[int] = ..., num_queued_blocks: _Optional[int] = ..., remaining_ms: _Optional[int] = ...) -> None: ...
