"""Settings of the server: flag > environment (KVPOOL_*) > TOML file > default. Unknown keys fail."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.text import without_passwords
from kvpool.report.quotas import size_text
from kvpool.security.principal import ABOUT_DOMAINS, ALL_TENANTS, DEFAULT_DOMAIN
from kvpool_server.cache.eviction import DEFAULT_POLICY, POLICIES
from kvpool_server.events.publisher import StreamEndpoints
from kvpool_server.settings import setting_types as types
from kvpool_server.tiers.registry import instead_of

ENV_PREFIX = "KVPOOL_"
_SEE_HELP = "see kvpool-server --help"
_CLIENT_VARIABLES = {"KVPOOL_ENDPOINT", "KVPOOL_HASH_SEED", "KVPOOL_TLS", "KVPOOL_TOKEN_FILE"}


class ServerConfig(BaseSettings):
    """Each description says what the setting means, its unit, and when to change it."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, enable_decoding=False, use_attribute_docstrings=True
    )

    config: str = ""
    """TOML file with any of these settings. Empty: none."""
    listen: types.Address = "127.0.0.1:50051"
    """HOST:PORT for gRPC; port 0 takes any free port."""
    http_listen: types.AddressOrEmpty = "127.0.0.1:50052"
    """HOST:PORT for /metrics and /healthz; port 0 takes any free port. Empty: no HTTP."""
    unix_listen: types.SocketPath = ""
    """Path of a Unix socket for gRPC, beside --listen; PATH.memory hands out the arena's memory. Engines in other
    containers that mount its directory share memory (endpoint unix:PATH); with TLS they do not: give them HOST:PORT.
    Empty: none."""
    unix_mode: types.SocketMode = "0600"
    """With --unix-listen: permissions of both Unix sockets, in octal. 0660 for a common group, 0666 for everybody who
    sees the path. Whoever may connect may read and write the pool; with TLS, whoever may connect also needs a
    certificate or token."""
    data_listen: types.AddressOrEmpty = "127.0.0.1:50053"
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
    trust_domain: types.TrustDomain = Field(
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
    limit: types.Texts = ()
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
    policy: types.PolicyName = Field(
        DEFAULT_POLICY,
        description="Which blocks to evict: "
        + "; ".join(f"{name}, {policy.summary}" for name, policy in POLICIES.items())
        + ".",
    )
    tier: types.Tiers = ()
    """A tier under the arena, e.g. file:/mnt/kv,size=200GiB, mooncake:master=HOST:PORT or peers:peer=HOST:PORT. Repeat
    the flag for several tiers, which are searched in this order; in the environment, separate them with ;."""
    quota: types.Quotas = ()
    """Upper bound on what a tenant or namespace holds of the arena: tenant:NAME=SIZE, or namespace:PREFIX=SIZE with the
    first characters of a fingerprint. Repeat the flag for several quotas; in the environment, separate them with
    commas."""
    pin_budget: types.PinBudget = "10%"
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
    kv_events: types.EventEndpoint = ""
    """Where routers subscribe to KV events: tcp://HOST:PORT (port 0 takes any free port) or ipc://PATH. Empty: no
    events."""
    kv_events_replay: types.EventEndpoint = ""
    """Where subscribers request missed events or a snapshot: tcp:// or ipc://. Empty: nowhere."""
    kv_events_tenant: types.EventStreams = ()
    """A stream of KV events about one tenant's blocks: TENANT=ENDPOINT,REPLAY_ENDPOINT. Repeat the flag for several
    tenants; in the environment, separate them with ;."""
    kv_events_key: str = ""
    """The server's CURVE key pair (NAME.key_secret of `kvpool certs events-key`): KV events are encrypted, and for
    listed subscribers alone."""
    kv_events_subscribers: str = ""
    """With --kv-events-key: list of subscribers' public keys and their tenants, read again when it changes."""
    kv_events_topic: types.Topic = "kv"
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
        return types.pin_share(self.pin_budget, self.memory)

    @property
    def event_streams(self) -> list[StreamEndpoints]:
        """The streams of KV events: all tenants' first."""
        everybodys = [StreamEndpoints(ALL_TENANTS, self.kv_events, self.kv_events_replay)] if self.kv_events else []
        return everybodys + list(map(types.parse_stream, self.kv_events_tenant))

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


def load(flags: Mapping[str, Any]) -> ServerConfig:
    """The settings, each from the source that has precedence.

    Raises ConfigError, which names the source, the key, the value and the fault.
    """
    known = {*map(_variable, ServerConfig.model_fields), *_CLIENT_VARIABLES, *service_links(os.environ)}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.upper() not in known:
            raise _unknown_key("environment", name.removeprefix(ENV_PREFIX).lower(), _variable)
    try:
        return ServerConfig(**flags)
    except ValidationError as error:
        raise _config_error(error.errors()[0], flags) from None


def service_links(environ: Mapping[str, str]) -> set[str]:
    """Names of the variables that Kubernetes sets for each Service whose name begins with kvpool.

    A Service `kvpool-server` gives KVPOOL_SERVER_SERVICE_HOST, which proves that it exists, KVPOOL_SERVER_SERVICE_PORT,
    KVPOOL_SERVER_PORT, and longer names that begin with the last two, such as KVPOOL_SERVER_PORT_50051_TCP_ADDR.
    """
    ends = ("SERVICE_HOST", "SERVICE_PORT", "PORT")
    services = [
        name.removesuffix(ends[0]) for name in environ if name.startswith(ENV_PREFIX) and name.endswith(f"_{ends[0]}")
    ]
    begins = tuple(f"{service}{end}_" for service in services for end in ends)
    return {name for name in environ if f"{name}_".startswith(begins)}


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
        raise _unknown_key(f"config file {file}", "config")
    return values


def _config_error(error: ErrorDetails, flags: Mapping[str, Any]) -> ConfigError:
    setting, given = str(error["loc"][0]), error["input"]
    source = f"config file {flags.get('config') or os.environ.get(_variable('config'))}"
    if setting in flags:
        source = f"--{setting.replace('_', '-')}"
    elif _variable(setting) in os.environ:
        source = _variable(setting)
    if error["type"] == "extra_forbidden":
        return _unknown_key(source, setting)
    if error["type"] == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "")
        return ConfigError(f"unknown {setting} {given!r} ({source}); choose {choices}")
    wrong = error["msg"].removeprefix("Value error, ")
    if error["type"].startswith("byte_size"):
        wrong = "not a size; give bytes, or 512MiB, 20GiB, 1.5TiB"
    elif fix := instead_of(error, ServerConfig):
        unit = "a number of bytes, as it has no unit: " if setting == "memory" and str(given).isdigit() else ""
        wrong = f"{unit}not possible; give {fix}"
    key = ".".join(map(str, error["loc"]))
    return ConfigError(without_passwords(f"setting {key} = {given!r} ({source}): {wrong}; {_SEE_HELP}"))


def _unknown_key(source: str, key: str, shown: Callable[[str], str] = str) -> ConfigError:
    nearest = difflib.get_close_matches(key, ServerConfig.model_fields.keys() - {key}, 1)
    meant = f"did you mean {shown(nearest[0])}? " if nearest else ""
    return ConfigError(f"{source}: unknown key {shown(key)}; {meant}{_SEE_HELP}")


def _variable(setting: str) -> str:
    return ENV_PREFIX + setting.upper()
