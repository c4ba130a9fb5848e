"""Settings of the server: flag > environment (KVPOOL_*) > TOML file > default. Unknown keys fail.

Each type of a setting takes a text, checks it, and says in its error what to give instead.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvpool.client.config import split_address
from kvpool.protocol.errors import ConfigError, InvalidRequestError, KVPoolError
from kvpool.protocol.text import parse_quota, parse_size, size_text
from kvpool.security.principal import ABOUT_DOMAINS, ALL_TENANTS, DEFAULT_DOMAIN, Principal, Role
from kvpool.transport.unix_socket import check_path
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.events.publisher import StreamEndpoints
from kvpool_server.tiers.registry import parse

ENV_PREFIX = "KVPOOL_"
SEE_HELP = "see kvpool-server --help"


def _check_endpoint(text: str) -> str:
    scheme, _, place = text.partition("://")
    if scheme == "tcp":
        split_address(place)
    elif scheme != "ipc" or not place:
        raise ValueError("not an endpoint; give tcp://HOST:PORT or ipc://PATH")
    return text


def parse_stream(text: str) -> StreamEndpoints:
    """From TENANT=ENDPOINT or TENANT=ENDPOINT,REPLAY_ENDPOINT. Raises ValueError or KVPoolError."""
    tenant, equals, rest = text.partition("=")
    endpoints = rest.split(",")
    if not equals or len(endpoints) > 2:
        raise ValueError("not a tenant's stream; give TENANT=ENDPOINT,REPLAY_ENDPOINT")
    Principal(tenant, Role.ENGINE_READ)
    return StreamEndpoints(tenant, *map(_check_endpoint, endpoints))


def pin_share(text: str, memory: int) -> float:
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


def _check_policy(text: str) -> None:
    if text not in POLICIES:
        raise PydanticCustomError("literal_error", "unknown policy", {"expected": " or ".join(POLICIES)})


def _check_tiers(texts: tuple[str, ...]) -> None:
    names = [parse(text).tier_name for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; give each place once")


def _check_streams(texts: tuple[str, ...]) -> None:
    if len({parse_stream(text).tenant for text in texts}) < len(texts):
        raise ValueError("a tenant is given twice; give each tenant once")


def _check_quotas(texts: tuple[str, ...]) -> None:
    quotas = list(map(parse_quota, texts))
    subjects = [quota.subject for quota in quotas]
    for text, quota in zip(texts, quotas, strict=True):
        if not quota.limit_bytes:
            raise ValueError(f"{text} gives a size of 0; leave it out: a subject without a quota has no bound")
        if subjects.count(quota.subject) > 1:
            raise ValueError(f"{quota.subject} has two quotas; give one")


def _checked(check: Callable[[Any], object], or_empty: bool = False) -> AfterValidator:
    """A validator that returns the value unchanged; errors of kvpool become pydantic's."""

    def validate(value: Any) -> Any:
        try:
            if value or not or_empty:
                check(value)
        except KVPoolError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def _separated_by(separator: str) -> BeforeValidator:
    """A validator that splits a text of the environment; lists of flags and of the file stay."""
    return BeforeValidator(
        lambda value: [part for part in value.split(separator) if part.strip()] if isinstance(value, str) else value
    )


Address = Annotated[str, _checked(split_address)]
AddressOrEmpty = Annotated[str, _checked(split_address, or_empty=True)]
SocketPath = Annotated[str, _checked(check_path, or_empty=True)]
SocketMode = Annotated[
    str, Field(pattern="^0?[0-7]{3}$", title="octal digits for owner, group and others, such as 0660")
]
TrustDomain = Annotated[str, _checked(lambda text: Principal(ALL_TENANTS, Role.OPERATOR, text))]
PolicyName = Annotated[str, _checked(_check_policy)]
PinBudget = Annotated[str, _checked(lambda text: pin_share(text, 1))]
Topic = Annotated[str, Field(pattern="^[^@]*$", title="a text without @, which separates the parts of a topic")]
EventEndpoint = Annotated[str, _checked(_check_endpoint, or_empty=True)]
Texts = Annotated[tuple[str, ...], _separated_by(";")]
Tiers = Annotated[Texts, _checked(_check_tiers)]
EventStreams = Annotated[Texts, _checked(_check_streams)]
Quotas = Annotated[tuple[str, ...], _separated_by(","), _checked(_check_quotas)]


class ServerConfig(BaseSettings):
    """Each description says what the setting means, its unit, and when to change it."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, enable_decoding=False, use_attribute_docstrings=True
    )

    config: str = ""
    """TOML file with any of these settings. Empty: none."""
    listen: Address = "127.0.0.1:50051"
    """HOST:PORT for gRPC; port 0 takes any free port."""
    http_listen: AddressOrEmpty = "127.0.0.1:50052"
    """HOST:PORT for /metrics and /healthz; port 0 takes any free port. Empty: no HTTP."""
    unix_listen: SocketPath = ""
    """Path of a Unix socket for gRPC, beside --listen; PATH.memory hands out the arena's memory. Engines in other
    containers that mount its directory share memory (endpoint unix:PATH); with TLS they do not: give them HOST:PORT.
    Empty: none."""
    unix_mode: SocketMode = "0600"
    """With --unix-listen: permissions of both Unix sockets, in octal. 0660 for a common group, 0666 for everybody who
    sees the path. Whoever may connect may read and write the pool; with TLS, whoever may connect also needs a
    certificate or token."""
    data_listen: AddressOrEmpty = "127.0.0.1:50053"
    """HOST:PORT of the data port, where worker processes move bytes over TCP for other hosts' clients; port 0 takes any
    free port. Empty: those bytes go through gRPC, which is slower."""
    data_workers: int = Field(0, ge=0, le=64)
    """Worker processes of the data port. 0: one for every four cores, at least one and at most four."""
    tls_cert: str = ""
    """The server's certificate, PEM. With --tls-key and --tls-client-ca, gRPC speaks TLS only."""
    tls_key: str = ""
    """The key of --tls-cert, PEM, which nobody else may read."""
    tls_client_ca: str = ""
    """Authorities whose certificates clients must have, PEM. A certificate's SPIFFE ID says which tenant's it is, and
    what it may; see docs/explanation/security.md."""
    trust_domain: TrustDomain = Field(
        DEFAULT_DOMAIN,
        description=f"{ABOUT_DOMAINS} With --tls-client-ca, certificates of other domains are refused; tokens are not "
        "restricted to a domain.",
    )
    tokens: str = ""
    """Instead of --tls-client-ca: file of bearer tokens, which `kvpool token create` makes; callers need one, and no
    certificate."""
    oidc_issuer: str = ""
    """Instead of --tokens: URL of an OpenID Connect issuer, whose JWTs callers need as bearer tokens. Needs pip install
    'pyjwt[crypto]'."""
    oidc_audience: str = ""
    """What the audience (aud) of these JWTs has to be."""
    oidc_jwks: str = ""
    """File with the issuer's keys (JWKS), read again when it changes. Empty: the issuer is asked."""
    oidc_tenant_claim: str = "kvpool_tenant"
    """Claim with the caller's tenant."""
    oidc_role_claim: str = "kvpool_role"
    """Claim with the caller's role, such as engine-write."""
    deny: str = ""
    """File of tenants (tenant:NAME), SPIFFE IDs, and SHA-256 digests of certificates and tokens, a line each, that are
    refused although they are good. A change ends calls under way within 10 seconds. Empty: none."""
    otel: bool = False
    """Make spans of calls and of tiers' transfers for OpenTelemetry, as the OTEL_* variables of the environment say;
    needs the extra otel."""
    audit_log: str = ""
    """File to which the server appends a line of JSON for each call that it refuses, and for those that remove blocks,
    set quotas or open namespaces, and for credentials that it reads. Empty: none."""
    ledger: str = ""
    """File, SQLite, in which the server keeps for 40 days what each tenant has saved, held and moved by the hour
    (`kvpool ledger`); one file a server. Empty: the figures are in memory, since the server's start."""
    limit: Texts = ()
    """What an identity may have at once (leases, leased_blocks, tickets, streams, connections), where callers are
    authenticated, e.g. spiffe://kvpool.local/kvpool/acme/engine-write,leases=16000; without an identity, e.g.
    leases=2000, of all. Repeat the flag for several; in the environment, separate them with ;."""
    insecure_network: bool = False
    """Serve other hosts without authentication or encryption, so that they can read and change the pool: for a network
    where all are trusted."""
    memory: ByteSize = Field(ByteSize(1 << 30), ge=1 << 20)
    """Size of the arena, e.g. 64GiB. Give it what the host can spare."""
    keep: Literal["yes", "no"] = "yes"
    """Whether memory outlives the server's process, so that after a kill, a crash or an upgrade the next one has its
    blocks: yes or no. systemd keeps it where the unit has FileDescriptorStoreMax=, else a parent process, which starts
    the server again; see docs/how-to/operations.md."""
    policy: PolicyName = Field(
        DEFAULT_POLICY,
        description="Which blocks to evict: "
        + "; ".join(f"{name}, {policy.summary}" for name, policy in POLICIES.items())
        + ".",
    )
    tier: Tiers = ()
    """A tier under the arena, e.g. file:/mnt/kv,size=200GiB, mooncake:master=HOST:PORT or peers:peer=HOST:PORT. Repeat
    the flag for several tiers, which are searched in this order; in the environment, separate them with ;."""
    quota: Quotas = ()
    """Upper bound on what a tenant or namespace holds of the arena: tenant:NAME=SIZE, or namespace:PREFIX=SIZE with the
    first characters of a fingerprint. Repeat the flag for several quotas; in the environment, separate them with
    commas."""
    pin_budget: PinBudget = "10%"
    """How much of the arena each tenant may pin (`kvpool pin`): a percentage, or a size such as 20GiB. Pinned blocks
    are evicted last, so that more of them leave less room for what is not pinned."""
    mooncake: Literal["off", "tcp", "rdma"] = "off"
    """Whether clients may also move bytes through Mooncake's Transfer Engine: off, tcp or rdma."""
    mooncake_device: str = ""
    """RDMA devices of the Transfer Engine, e.g. mlx5_0 or mlx5_0,mlx5_1. Empty: all devices."""
    mooncake_host: str = ""
    """Host name or address at which clients reach the Transfer Engine. Empty: the host of --listen."""
    mooncake_trusted_network: bool = False
    """Use Mooncake (--mooncake, or a tier of it) although its ports do not authenticate callers: where only trusted
    hosts reach them."""
    max_ttl_ms: int = Field(120_000, ge=100, le=3_600_000)
    """Longest lease or ticket that a client may hold, in milliseconds."""
    grace_ms: int = Field(30_000, ge=0, le=3_600_000)
    """How long slots stay in quarantine after their writer's ticket has expired, in milliseconds: a stalled writer may
    still write there."""
    drain_ms: int = Field(5_000, ge=0, le=600_000)
    """How long the server finishes calls, and writes to tiers, after SIGTERM, and how long a drain may take (SIGUSR2,
    `kvpool drain`), in milliseconds."""
    kv_events: EventEndpoint = ""
    """Where routers subscribe to KV events: tcp://HOST:PORT (port 0 takes any free port) or ipc://PATH. Empty: no
    events."""
    kv_events_replay: EventEndpoint = ""
    """Where subscribers request missed events or a snapshot: tcp:// or ipc://. Empty: nowhere."""
    kv_events_tenant: EventStreams = ()
    """A stream of KV events about one tenant's blocks: TENANT=ENDPOINT,REPLAY_ENDPOINT. Repeat the flag for several
    tenants; in the environment, separate them with ;."""
    kv_events_key: str = ""
    """The server's CURVE key pair (NAME.key_secret of `kvpool certs events-key`): KV events are encrypted, and for
    listed subscribers alone."""
    kv_events_subscribers: str = ""
    """With --kv-events-key: list of subscribers' public keys and their tenants, read again when it changes."""
    kv_events_topic: Topic = "kv"
    """First part of every KV event topic: TOPIC@FINGERPRINT@MODEL."""
    kv_events_medium: str = Field("CPU", min_length=1)
    """Storage medium that KV events name; change it if your router expects another word."""
    kv_events_hashes: Literal["int", "bytes"] = "int"
    """How KV events name blocks: int (the low 64 bits of the hash) or bytes (the whole hash)."""
    kv_events_buffer: int = Field(10_000, ge=1_000, le=1_000_000)
    """KV event messages kept for subscribers that missed some."""
    value_sample: int = Field(8_192, ge=0, le=65_536)
    """Most blocks sampled to estimate the hits of other arena sizes, for `kvpool value`: more are more exact, and take
    more memory. 0: no estimates."""
    record: str = ""
    """File that records lookups and puts: salted hashes, times, sizes and hits, no tokens; see docs/how-to/size.md.
    Empty: none."""
    record_bytes: ByteSize = Field(ByteSize(256 << 20), ge=1 << 20)
    """With --record: size of the file at which recording stops."""
    record_names: bool = False
    """With --record: also record the names of models and tenants."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    log_format: Literal["console", "json"] = "console"
    """Format of log lines: console or json."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of settings, the one that has precedence first."""
        file = {**env_settings(), **init_settings()}.get("config")
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_toml(file))

    @property
    def unix_mode_bits(self) -> int:
        return int(self.unix_mode, 8)

    @property
    def pin_share(self) -> float:
        """The share of the arena that each tenant may pin."""
        return pin_share(self.pin_budget, self.memory)

    @property
    def event_streams(self) -> list[StreamEndpoints]:
        """The streams of KV events: all tenants' first."""
        everybodys = [StreamEndpoints(ALL_TENANTS, self.kv_events, self.kv_events_replay)] if self.kv_events else []
        return everybodys + list(map(parse_stream, self.kv_events_tenant))

    @property
    def uses_mooncake(self) -> list[str]:
        """The flags that have this server use Mooncake."""
        tiers = [f"--tier {text}" for text in self.tier if text.startswith("mooncake:")]
        return [*([] if self.mooncake == "off" else [f"--mooncake {self.mooncake}"]), *tiers]


def describe(name: str) -> tuple[str, str]:
    """What a setting means, and its default as the documents show it; empty: none."""
    field = ServerConfig.model_fields[name]
    default = size_text(field.default).replace(" ", "") if field.annotation is ByteSize else str(field.default)
    return " ".join((field.description or "").split()), "" if default == "()" else default


def _read_toml(file: object) -> dict[str, Any]:
    if not (file and isinstance(file, str)):
        return {}
    try:
        values = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {file}: {error.strerror}; give --config a TOML file") from None
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"config file {file} is not TOML: {error}") from None
    if "config" in values:
        raise unknown_key(f"config file {file}", "config")
    return values


def unknown_key(source: str, key: str, shown: Callable[[str], str] = str) -> ConfigError:
    """The error of a key of a source, with the setting that was probably meant."""
    nearest = difflib.get_close_matches(key, ServerConfig.model_fields.keys() - {key}, 1)
    meant = f"did you mean {shown(nearest[0])}? " if nearest else ""
    return ConfigError(f"{source}: unknown key {shown(key)}; {meant}{SEE_HELP}")
