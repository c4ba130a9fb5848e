"""Settings of the server, resolved once: flag > environment (KVPOOL_*) > TOML file > default. Unknown keys fail."""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.principal import ABOUT_DOMAINS, ALL_TENANTS, DEFAULT_DOMAIN, Principal, Role
from kvpool.quotas import parse_quota, parse_size
from kvpool.unix_socket import check_path
from kvpool_server.addresses import split_address
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.events.streams import StreamEndpoints
from kvpool_server.instead import instead_of
from kvpool_server.tiers.registry import parse

ENV_PREFIX = "KVPOOL_"
_SEE_HELP = "see kvpool-server --help"
_CLIENT_VARIABLES = {"KVPOOL_CONFIG", "KVPOOL_ENDPOINT", "KVPOOL_TLS", "KVPOOL_TOKEN_FILE"}

# The names and values of service links, behind the Service's own name; see `service_links`.
_HOST = "_SERVICE_HOST"
_URL = re.compile(r"(tcp|udp|sctp)://(\[[0-9a-fA-F:.]+\]|[0-9.]+|[0-9a-fA-F:]+):\d{1,5}")
_NUMBER = re.compile(r"\d{1,5}")
_SHAPES = (
    (re.compile(r"_SERVICE_PORT(_[A-Z0-9_]+)?"), _NUMBER),
    (re.compile(r"_PORT(_\d{1,5}_(TCP|UDP|SCTP))?"), _URL),
    (re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_PROTO"), re.compile("tcp|udp|sctp")),
    (re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_PORT"), _NUMBER),
)
_ADDRESS = re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_ADDR")


class ServerConfig(BaseModel):
    """Each description says what the setting means, its unit, and when to change it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field("127.0.0.1:50051", description="HOST:PORT for gRPC; port 0 takes any free port.")
    http_listen: str = Field(
        "127.0.0.1:50052",
        description="HOST:PORT for /metrics and /healthz; port 0 takes any free port. Empty: no HTTP.",
    )
    unix_listen: str = Field(
        "",
        description="Path of a Unix socket for gRPC, beside --listen; PATH.memory hands out the arena's memory. "
        "Engines in other containers that mount its directory share memory (endpoint unix:PATH); with TLS they do not: "
        "give them HOST:PORT. Empty: none.",
    )
    unix_mode: str = Field(
        "0600",
        description="With --unix-listen: permissions of both Unix sockets, in octal. 0660 for a common group, 0666 for "
        "everybody who sees the path. Whoever may connect may read and write the pool; with TLS, whoever may connect "
        "also needs a certificate or token.",
    )
    data_listen: str = Field(
        "127.0.0.1:50053",
        description="HOST:PORT of the data port, where worker processes move bytes over TCP for other hosts' clients; "
        "port 0 takes any free port. Empty: those bytes go through gRPC, which is slower.",
    )
    data_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Worker processes of the data port. 0: one for every four cores, at least one and at most four.",
    )
    tls_cert: str = Field(
        "",
        description="The server's certificate, PEM. With --tls-key and --tls-client-ca, gRPC speaks TLS only.",
    )
    tls_key: str = Field("", description="The key of --tls-cert, PEM, which nobody else may read.")
    tls_client_ca: str = Field(
        "",
        description="Authorities whose certificates clients must have, PEM. A certificate's SPIFFE ID says which "
        "tenant's it is, and what it may; see docs/explanation/security.md.",
    )
    trust_domain: str = Field(
        DEFAULT_DOMAIN,
        description=f"{ABOUT_DOMAINS} With --tls-client-ca, certificates of other domains are refused; tokens are not "
        "restricted to a domain.",
    )
    tokens: str = Field(
        "",
        description="Instead of --tls-client-ca: file of bearer tokens, which `kvpool token create` makes; callers "
        "need one, and no certificate.",
    )
    oidc_issuer: str = Field(
        "",
        description="Instead of --tokens: URL of an OpenID Connect issuer, whose JWTs callers need as bearer tokens. "
        "Needs pip install 'pyjwt[crypto]'.",
    )
    oidc_audience: str = Field("", description="What the audience (aud) of these JWTs has to be.")
    oidc_jwks: str = Field(
        "", description="File with the issuer's keys (JWKS), read again when it changes. Empty: the issuer is asked."
    )
    oidc_tenant_claim: str = Field("kvpool_tenant", description="Claim with the caller's tenant.")
    oidc_role_claim: str = Field("kvpool_role", description="Claim with the caller's role, such as engine-write.")
    deny: str = Field(
        "",
        description="File of tenants (tenant:NAME), SPIFFE IDs, and SHA-256 digests of certificates and tokens, a line "
        "each, that are refused although they are good. A change ends calls under way within 10 seconds. Empty: none.",
    )
    otel: bool = Field(
        False,
        description="Make spans of calls and of tiers' transfers for OpenTelemetry, as the OTEL_* variables of the "
        "environment say; needs the extra otel.",
    )
    audit_log: str = Field(
        "",
        description="File to which the server appends a line of JSON for each call that it refuses, and for those that "
        "remove blocks, set quotas or open namespaces, and for credentials that it reads. Empty: none.",
    )
    ledger: str = Field(
        "",
        description="File, SQLite, in which the server keeps for 40 days what each tenant has saved, held and moved by "
        "the hour (`kvpool ledger`); one file a server. Empty: the figures are in memory, since the server's start.",
    )
    limit: tuple[str, ...] = Field(
        (),
        description="What an identity may have at once (leases, leased_blocks, tickets, streams, connections), where "
        "callers are authenticated, e.g. spiffe://kvpool.local/kvpool/acme/engine-write,leases=16000; without an "
        "identity, e.g. leases=2000, of all. Repeat the flag for several; in the environment, separate them with ;.",
    )
    insecure_network: bool = Field(
        False,
        description="Serve other hosts without authentication or encryption, so that they can read and change the "
        "pool: for a network where all are trusted.",
    )
    memory: ByteSize = Field(
        ByteSize(1 << 30), description="Size of the arena, e.g. 64GiB. Give it what the host can spare."
    )
    policy: str = Field(
        DEFAULT_POLICY,
        description="Which blocks to evict: "
        + "; ".join(f"{name}, {policy.summary}" for name, policy in POLICIES.items())
        + ". `kvpool bench replay` compares policies on a trace.",
    )
    tier: tuple[str, ...] = Field(
        (),
        description="A tier under the arena, e.g. file:/mnt/kv,size=200GiB or mooncake:master=HOST:PORT. Repeat the "
        "flag for several tiers, which are searched in this order; in the environment, separate them with ;.",
    )
    quota: tuple[str, ...] = Field(
        (),
        description="Upper bound on what a tenant or namespace holds of the arena: tenant:NAME=SIZE, or "
        "namespace:PREFIX=SIZE with the first characters of a fingerprint. Repeat the flag for several quotas; in the "
        "environment, separate them with commas.",
    )
    pin_budget: str = Field(
        "10%",
        description="How much of the arena each tenant may pin (`kvpool pin`): a percentage, or a size such as 20GiB. "
        "Pinned blocks are evicted last, so that more of them leave less room for what is not pinned.",
    )
    mooncake: Literal["off", "tcp", "rdma"] = Field(
        "off", description="Whether clients may also move bytes through Mooncake's Transfer Engine: off, tcp or rdma."
    )
    mooncake_device: str = Field(
        "", description="RDMA devices of the Transfer Engine, e.g. mlx5_0 or mlx5_0,mlx5_1. Empty: all devices."
    )
    mooncake_host: str = Field(
        "", description="Host name or address at which clients reach the Transfer Engine. Empty: the host of --listen."
    )
    mooncake_trusted_network: bool = Field(
        False,
        description="Use Mooncake (--mooncake, or a tier of it) although its ports do not authenticate callers: where "
        "only trusted hosts reach them.",
    )
    max_ttl_ms: int = Field(
        120_000, ge=100, le=3_600_000, description="Longest lease or ticket that a client may hold, in milliseconds."
    )
    grace_ms: int = Field(
        30_000, ge=0, le=3_600_000,
        description="How long slots stay in quarantine after their writer's ticket has expired, in milliseconds: a "
        "stalled writer may still write there.",
    )  # fmt: skip
    drain_ms: int = Field(
        5_000,
        ge=0,
        le=600_000,
        description="How long the server finishes calls, and writes to tiers, after SIGTERM, and how long a drain may "
        "take (SIGUSR2, `kvpool drain`), in milliseconds.",
    )
    kv_events: str = Field(
        "",
        description="Where routers subscribe to KV events: tcp://HOST:PORT (port 0 takes any free port) or ipc://PATH. "
        "Empty: no events.",
    )
    kv_events_replay: str = Field(
        "",
        description="Where subscribers request missed events or a snapshot: tcp:// or ipc://. Empty: nowhere.",
    )
    kv_events_tenant: tuple[str, ...] = Field(
        (),
        description="A stream of KV events about one tenant's blocks: TENANT=ENDPOINT,REPLAY_ENDPOINT. Repeat the flag "
        "for several tenants; in the environment, separate them with ;.",
    )
    kv_events_key: str = Field(
        "",
        description="The server's CURVE key pair (NAME.key_secret of `kvpool certs events-key`): KV events are "
        "encrypted, and for listed subscribers alone.",
    )
    kv_events_subscribers: str = Field(
        "",
        description="With --kv-events-key: list of subscribers' public keys and their tenants, read again when it "
        "changes.",
    )
    kv_events_topic: str = Field("kv", description="First part of every KV event topic: TOPIC@FINGERPRINT@MODEL.")
    kv_events_medium: str = Field(
        "CPU", min_length=1,
        description="Storage medium that KV events name; change it if your router expects another word.",
    )  # fmt: skip
    kv_events_hashes: Literal["int", "bytes"] = Field(
        "int",
        description="How KV events name blocks: int (the low 64 bits of the hash) or bytes (the whole hash).",
    )
    kv_events_buffer: int = Field(
        10_000, ge=1_000, le=1_000_000, description="KV event messages kept for subscribers that missed some."
    )
    value_sample: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Blocks sampled to simulate each other arena size, for `kvpool value`: more blocks are more exact, "
        "and take more CPU time and memory; 640 is a good number. 0: no simulation.",
    )
    record: str = Field(
        "",
        description="File that records lookups and puts for `kvpool bench replay`: salted hashes, "
        "times, sizes and hits, no tokens; see docs/how-to/value.md. Empty: none.",
    )
    record_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="With --record: size of the file at which recording stops."
    )
    record_names: bool = Field(False, description="With --record: also record the names of models and tenants.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged: debug, info, warning or error."
    )
    log_format: Literal["console", "json"] = Field("console", description="Format of log lines: console or json.")

    @field_validator("listen", "http_listen", "data_listen")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name == "listen":
            split_address(value)
        return value

    @field_validator("unix_listen")
    @classmethod
    def _check_unix_listen(cls, value: str) -> str:
        return check_path(value) if value else value

    @field_validator("trust_domain")
    @classmethod
    def _check_trust_domain(cls, value: str) -> str:
        try:
            Principal(ALL_TENANTS, Role.OPERATOR, value)
        except InvalidRequestError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("unix_mode")
    @classmethod
    def _check_unix_mode(cls, value: str) -> str:
        if not re.fullmatch("0?[0-7]{3}", value):
            raise ValueError("not permissions; give octal digits for owner, group and others, such as 0660")
        return value

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise PydanticCustomError("literal_error", "unknown policy", {"expected": " or ".join(POLICIES)})
        return value

    @field_validator("tier", "limit", "kv_events_tenant", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("tier")
    @classmethod
    def _check_tier(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            specs = list(map(parse, value))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        for nth, spec in enumerate(specs):
            if any(spec.tier_name == other.tier_name for other in specs[:nth]):
                raise ValueError(f"{spec.tier_name} is given twice; give each place once")
        return value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _check_event_endpoint(cls, value: str) -> str:
        return _check_endpoint(value) if value else value

    @field_validator("kv_events_tenant")
    @classmethod
    def _check_tenants(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        tenants = [_parse_stream(text).tenant for text in value]
        if len(set(tenants)) < len(tenants):
            raise ValueError("a tenant is given twice; give each tenant once")
        return value

    @field_validator("kv_events_topic")
    @classmethod
    def _check_topic(cls, value: str) -> str:
        if "@" in value:
            raise ValueError("contains @, which separates the parts of a topic; leave it out")
        return value

    @field_validator("quota", mode="before")
    @classmethod
    def _split_quotas(cls, value: object) -> object:
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("quota")
    @classmethod
    def _check_quotas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            subjects = [quota.subject for quota in map(parse_quota, value) if quota.limit_bytes]
        except InvalidRequestError as error:
            raise ValueError(str(error)) from None
        for part in value:
            if not parse_quota(part).limit_bytes:
                raise ValueError(f"{part} gives a size of 0; leave it out: a subject without a quota has no bound")
        for subject in subjects:
            if subjects.count(subject) > 1:
                raise ValueError(f"{subject} has two quotas; give one")
        return value

    @field_validator("pin_budget")
    @classmethod
    def _check_pin_budget(cls, value: str) -> str:
        _pin_share(value, 1)
        return value

    @field_validator("memory", "record_bytes")
    @classmethod
    def _check_memory(cls, value: int) -> int:
        if value < 1 << 20:
            raise ValueError("give at least 1MiB")
        return value

    @property
    def unix_mode_bits(self) -> int:
        return int(self.unix_mode, 8)

    @property
    def pin_share(self) -> float:
        """The share of the arena that each tenant may pin."""
        return _pin_share(self.pin_budget, self.memory)

    @property
    def event_streams(self) -> list[StreamEndpoints]:
        """The streams of KV events: all tenants' first."""
        everybodys = [StreamEndpoints(ALL_TENANTS, self.kv_events, self.kv_events_replay)] if self.kv_events else []
        return everybodys + list(map(_parse_stream, self.kv_events_tenant))

    @property
    def uses_mooncake(self) -> list[str]:
        """The flags that have this server use Mooncake."""
        tiers = [f"--tier {text}" for text in self.tier if text.startswith("mooncake:")]
        return [*([] if self.mooncake == "off" else [f"--mooncake {self.mooncake}"]), *tiers]


def _pin_share(text: str, memory: int) -> float:
    """The share of the memory that a percentage or a size is, 1 at most. Raises ValueError."""
    wrong = "not a budget; give a percentage up to 100%, or a size such as 512MiB or 20GiB"
    number, percent, rest = text.strip().partition("%")
    if percent:
        try:
            share = float(number) / 100
        except ValueError:
            share = math.nan
        if rest or not 0 <= share <= 1:
            raise ValueError(wrong)
        return share
    try:
        nbytes = parse_size(text.strip())
    except InvalidRequestError:
        raise ValueError(wrong) from None
    if nbytes and text.strip()[-1].isdigit():
        raise ValueError("a number without a unit; give a percentage such as 20%, or a size such as 20GiB")
    return min(1.0, nbytes / memory)


def load(flags: dict[str, Any], config_file: Path | None, environ: dict[str, str] | None = None) -> ServerConfig:
    """The settings, each from the source that has precedence; by default the environment is that of the process.

    Raises ConfigError, which names the source, the key, the value and the fault.
    """
    environ = dict(os.environ) if environ is None else environ
    from_environment = _from_environment(environ)
    values = {**_from_file(config_file), **from_environment, **flags}
    try:
        return ServerConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        source = f"config file {config_file}"
        if key in flags:
            source = f"--{key.replace('_', '-')}"
        elif key in from_environment:
            source = ENV_PREFIX + key.upper()
        if first["type"] == "literal_error":
            choices = first["ctx"]["expected"].replace("'", "")
            raise ConfigError(f"unknown {key} {first['input']!r} ({source}); choose {choices}") from None
        wrong = first["msg"].removeprefix("Value error, ")
        if first["type"].startswith("byte_size"):
            wrong = "not a size; give bytes, or 512MiB, 20GiB, 1.5TiB"
        elif fix := instead_of(first):
            wrong = f"not possible; give {fix}"
        raise ConfigError(f"setting {key} = {first['input']!r} ({source}): {wrong}; {_SEE_HELP}") from None


def _check_endpoint(text: str) -> str:
    """The same text. Raises ValueError unless ZeroMQ can bind it."""
    scheme, _, place = text.partition("://")
    if scheme == "tcp":
        split_address(place)
    elif scheme != "ipc" or not place:
        raise ValueError("not an endpoint; give tcp://HOST:PORT or ipc://PATH")
    return text


def _parse_stream(text: str) -> StreamEndpoints:
    """From TENANT=ENDPOINT or TENANT=ENDPOINT,REPLAY_ENDPOINT. Raises ValueError."""
    tenant, equals, rest = text.partition("=")
    endpoints = rest.split(",")
    if not equals or len(endpoints) > 2:
        raise ValueError("not a tenant's stream; give TENANT=ENDPOINT,REPLAY_ENDPOINT")
    try:
        Principal(tenant, Role.ENGINE_READ)
    except InvalidRequestError as error:
        raise ValueError(str(error)) from None
    return StreamEndpoints(tenant, *map(_check_endpoint, endpoints))


def _from_file(config_file: Path | None) -> dict[str, Any]:
    if config_file is None:
        return {}
    try:
        values = tomllib.loads(config_file.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {config_file}: {error.strerror}; give --config a TOML file"
        ) from None
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"config file {config_file} is not TOML: {error}") from None
    _refuse_unknown(values, f"config file {config_file}")
    return values


def _from_environment(environ: dict[str, str]) -> dict[str, Any]:
    ignored = _CLIENT_VARIABLES | service_links(environ)
    values: dict[str, Any] = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in ignored
    }
    for several in ("tier", "limit", "kv_events_tenant"):
        if several in values:
            values[several] = [text for text in values[several].split(";") if text]
    _refuse_unknown(values, "environment", ENV_PREFIX)
    return values


def _refuse_unknown(values: dict[str, Any], source: str, prefix: str = "") -> None:
    for key in values:
        if key not in ServerConfig.model_fields:
            shown = prefix + (key.upper() if prefix else key)
            known = [prefix + (name.upper() if prefix else name) for name in ServerConfig.model_fields]
            nearest = difflib.get_close_matches(shown, known, 1)
            meant = f"did you mean {nearest[0]}? " if nearest else ""
            raise ConfigError(f"{source}: unknown key {shown}; {meant}{_SEE_HELP}")


def service_links(environ: Mapping[str, str]) -> frozenset[str]:
    """Environment variables that Kubernetes sets for each Service, and that look like settings if one is named kvpool.

    A Service `kvpool-server` with port 50051 named `grpc` gives KVPOOL_SERVER_SERVICE_HOST, KVPOOL_SERVER_SERVICE_PORT,
    KVPOOL_SERVER_SERVICE_PORT_GRPC, KVPOOL_SERVER_PORT, and KVPOOL_SERVER_PORT_50051_TCP with _PROTO, _PORT and _ADDR.
    `enableServiceLinks: false` in the pod's specification turns these service links off.

    A name alone does not make a service link: a user who sets KVPOOL_PORT=50051 must be told that there is no such
    setting. A link belongs to a Service whose host and port are also set, and its value has the form that Kubernetes
    writes.

    Source: kubernetes `pkg/kubelet/envvars/envvars.go`.
    """
    services = [
        name.removesuffix(_HOST)
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name.endswith(_HOST) and _is_address(value)
    ]
    services = [each for each in services if _NUMBER.fullmatch(environ.get(f"{each}_SERVICE_PORT", ""))]
    return frozenset(
        name
        for name, value in environ.items()
        if any(name.startswith(f"{each}_") and _is_link(name.removeprefix(each), value) for each in services)
    )


def _is_link(rest: str, value: str) -> bool:
    if rest == _HOST or _ADDRESS.fullmatch(rest):
        return _is_address(value)
    return any(shape.fullmatch(rest) and wanted.fullmatch(value) for shape, wanted in _SHAPES)


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True
