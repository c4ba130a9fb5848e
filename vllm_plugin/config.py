"""Settings of the connector, in `kv_connector_extra_config`. Unknown keys are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from kvpool.client.config import DEFAULT_ENDPOINT, ClientConfig
from kvpool.protocol.errors import ConfigError
from kvpool.security.name_key import NameKey
from kvpool.security.principal import Role
from kvpool.security.tls import TlsFiles, read_identity

ENGINE_ROLES = (Role.ENGINE_WRITE, Role.ENGINE_READ)
MAX_TIMEOUT_MS = 300_000
_Timeout = Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class ConnectorConfig:
    """The keys of `kv_connector_extra_config`.

    Args:
        endpoint: HOST:PORT of the kvpool-server, or unix:PATH of its Unix socket.
        transport: "auto", "shm", "tcp", "grpc", "mooncake" or "network"; see `ClientConfig`.
        lookup_timeout_ms: a lookup that takes longer is a miss, and a load without progress for so long fails.
        promotion_wait_ms: the longest time that a request waits for blocks on their way up from a tier of the pool;
            never longer than computing them would take. 0: only blocks that are ready are loaded. Raise it for slow
            tiers and slow models.
        load_timeout_ms: a load that takes longer is recomputed. Raise it for long prompts over slow networks.
        store_timeout_ms: a store that takes longer is dropped.
        stream_connections: most connections over which one load or store of a rank goes over TCP; see `ClientConfig`.
        store_decoded: also store blocks that were filled by decoding; the next turn of a conversation hits them.
        window_interval_tokens: blocks of layers with a sliding window are stored where a prompt ends, where a prompt
            parts from the prompts in the pool, and at multiples of this many tokens. Smaller: more hits for the first
            prompts that part, more bytes.
        max_pinned_fraction: no store begins while requests that have ended leave so large a share of the engine's
            blocks pinned by stores. Where the engine lacks blocks, stores that alone pin some are dropped.
        num_shards: chunks that a block is cut into; 0: one for each KV head, 16 at most. Engines share blocks only if
            the number is equal.
        weights_epoch: free text; engines share blocks only if it is equal.
        decline_slow_loads: compute a hit where loading it would take longer, as measured so far.
        share_adapters: which requests with a LoRA adapter share blocks, by the adapter's content. "unchanged": those
            whose adapter's files are unchanged since before the engine started. "always": all, by the files' content at
            the adapter's first request; right only where adapters are never written again or reloaded in place.
            "never": none.
        tenant, salt: engines share blocks only if both are equal. With `tls` the tenant is the certificate's.
        tls: {"ca": PATH, "cert": PATH, "key": PATH}: the authority of the server's certificate, the engine's own
            certificate, and its key. The files are read again when they change.
        token_file: a file with a bearer token, for servers that know engines by tokens; then `tls` needs only "ca", and
            `tenant` has to be given.
        otel: make spans of lookups, loads and stores for OpenTelemetry, as the OTEL_* variables of the environment say;
            needs the extra `otel`.
        name_key_file: a file with the key that names blocks on the wire, so that neither the server nor other tenants
            can test guesses of prompts; engines share blocks only if it is the same. It is read at the engine's start.
        insecure_network: allow plaintext to another host, on a network where all are trusted.
    """

    endpoint: str = DEFAULT_ENDPOINT
    transport: str = "auto"
    lookup_timeout_ms: _Timeout = 200
    promotion_wait_ms: Annotated[int, Field(ge=0, le=MAX_TIMEOUT_MS)] = 1_000
    load_timeout_ms: _Timeout = 5_000
    store_timeout_ms: _Timeout = 5_000
    stream_connections: int = 0
    store_decoded: bool = True
    window_interval_tokens: Annotated[int, Field(ge=1)] = 4096
    max_pinned_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.25
    num_shards: Annotated[int, Field(ge=0, le=64)] = 0
    weights_epoch: str = ""
    decline_slow_loads: bool = True
    share_adapters: Literal["unchanged", "always", "never"] = "unchanged"
    tenant: str = ""
    salt: str = ""
    tls: Annotated[TlsFiles | None, BeforeValidator(lambda value: None if value is None else TlsFiles.of(value))] = None
    token_file: str = ""
    name_key_file: str = ""
    otel: bool = False
    insecure_network: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Reads `kv_connector_extra_config`. Raises ConfigError for an unknown key or a bad value."""
        try:
            config = cls(**extra)
        except ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {_why(error.errors()[0])}") from None
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
        if config.tls is not None:
            config = replace(config, tenant=_tenant(config.tls, config.tenant, config.token_file))
        config.client_config()
        config.name_key()
        return config

    def name_key(self) -> NameKey | None:
        """The key of `name_key_file`; None without one. Raises ConfigError."""
        return NameKey.read(Path(self.name_key_file)) if self.name_key_file else None

    def client_config(self, local_clients: int = 1) -> ClientConfig:
        """Settings of a client, one of `local_clients` on its host."""
        # A lease must outlive the slowest load, and the time until the worker begins the load.
        return ClientConfig(
            endpoint=self.endpoint,
            transport=self.transport,
            timeout_ms=self.lookup_timeout_ms,
            data_timeout_ms=max(self.load_timeout_ms, self.store_timeout_ms),
            stall_timeout_ms=self.lookup_timeout_ms,
            stream_connections=self.stream_connections,
            lease_ttl_ms=2 * self.load_timeout_ms,
            ticket_ttl_ms=self.store_timeout_ms,
            local_clients=local_clients,
            tls=self.tls,
            token_file=self.token_file,
            name_key_file=self.name_key_file,
            otel=self.otel,
            insecure_network=self.insecure_network,
        )


def _tenant(tls: TlsFiles, tenant: str, token_file: str) -> str:
    """The engine's tenant: that of its certificate. Raises ConfigError if a server would refuse what the engine has."""
    principal = read_identity(tls).principal
    if token_file:  # The server alone knows whose it is.
        return tenant or (principal.tenant if principal is not None else "")
    if not tls.cert:
        raise ConfigError(
            f"kv_connector_extra_config: tls has ca = {tls.ca!r} alone, so the engine proves to no server who it is; "
            "give cert and key, too, or token_file"
        )
    if principal is None:
        raise ConfigError(
            f"kv_connector_extra_config: tls.cert = {tls.cert!r} names no principal, such as "
            "spiffe://kvpool.local/kvpool/TENANT/engine-write; give an engine's certificate"
        )
    if principal.role not in ENGINE_ROLES:
        raise ConfigError(
            f"kv_connector_extra_config: tls.cert = {tls.cert!r} is of role {principal.role}; give one of role "
            f"{' or '.join(ENGINE_ROLES)}"
        )
    if tenant not in ("", principal.tenant):
        raise ConfigError(
            f"kv_connector_extra_config: tenant = {tenant!r}, and tls.cert = {tls.cert!r} is of tenant "
            f"{principal.tenant!r}; leave tenant out, or give a certificate of {tenant!r}"
        )
    return principal.tenant


def _why(error: ErrorDetails) -> str:
    """What pydantic refuses, in a sentence that names the key, its value and what to give."""
    name = str(error["loc"][0])
    if error["type"] != "unexpected_keyword_argument":
        return f"{name} = {error['input']!r}: {error['msg']}"
    keys = [field.name for field in fields(ConnectorConfig)]
    close = difflib.get_close_matches(name, keys, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(keys)}"
    return f"unknown key {name!r}; {hint}"
