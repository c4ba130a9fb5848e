"""Loads the server's settings, and refuses those with which the server must not start: unknown keys, wrong values, and
ports that other hosts can reach and that do not authenticate callers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvpool.protocol.errors import ConfigError
from kvpool.protocol.text import without_passwords
from kvpool.security.principal import DEFAULT_DOMAIN
from kvpool.security.tls import TlsFiles
from kvpool_server.process.addresses import is_local
from kvpool_server.settings.config import ENV_PREFIX, SEE_HELP, ServerConfig, unknown_key
from kvpool_server.tiers.registry import instead_of

_CLIENT_VARIABLES = {"KVPOOL_ENDPOINT", "KVPOOL_HASH_SEED", "KVPOOL_TLS", "KVPOOL_TOKEN_FILE"}
_TCP = "tcp://"
_WAY_OUT = "--insecure-network where all on the network are trusted"


def load(flags: Mapping[str, Any]) -> ServerConfig:
    """The settings, each from the source that has precedence.

    Raises ConfigError, which names the source, the key, the value and the fault.
    """
    known = {*map(_variable, ServerConfig.model_fields), *_CLIENT_VARIABLES, *service_links(os.environ)}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.upper() not in known:
            raise unknown_key("environment", name.removeprefix(ENV_PREFIX).lower(), _variable)
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


def _config_error(error: ErrorDetails, flags: Mapping[str, Any]) -> ConfigError:
    setting, given = str(error["loc"][0]), error["input"]
    source = f"config file {flags.get('config') or os.environ.get(_variable('config'))}"
    if setting in flags:
        source = f"--{setting.replace('_', '-')}"
    elif _variable(setting) in os.environ:
        source = _variable(setting)
    if error["type"] == "extra_forbidden":
        return unknown_key(source, setting)
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
    return ConfigError(without_passwords(f"setting {key} = {given!r} ({source}): {wrong}; {SEE_HELP}"))


def _variable(setting: str) -> str:
    return ENV_PREFIX + setting.upper()


def tls_files(config: ServerConfig) -> TlsFiles | None:
    """The files of TLS; None: plaintext. Raises ConfigError unless callers are authenticated then."""
    ways = {"--tls-client-ca": config.tls_client_ca, "--tokens": config.tokens, "--oidc-issuer": config.oidc_issuer}
    proofs = [flag for flag, value in ways.items() if value]
    if not (config.tls_cert or config.tls_key or proofs):
        domain = "" if config.trust_domain == DEFAULT_DOMAIN else config.trust_domain
        given = {"--deny": config.deny, "--limit": " --limit ".join(config.limit), "--trust-domain": domain}
        for flag, value in given.items():
            if value:
                raise ConfigError(
                    f"{flag} {value} has no effect without TLS, because callers are not authenticated; give "
                    "--tls-cert, too"
                )
        return None
    if not (config.tls_cert and config.tls_key):
        raise ConfigError("TLS needs --tls-cert and --tls-key; give both, or neither")
    if len(proofs) != 1:
        raise ConfigError(
            "TLS needs one way to authenticate callers: give either --tls-client-ca, for certificates, or --tokens, or "
            f"--oidc-issuer; given: {', '.join(proofs) or 'none'}"
        )
    if config.trust_domain != DEFAULT_DOMAIN and not config.tls_client_ca:
        raise ConfigError(
            f"--trust-domain {config.trust_domain} restricts certificates alone, and callers of this server have "
            "tokens; leave it out"
        )
    if config.oidc_issuer and not config.oidc_audience:
        raise ConfigError("--oidc-issuer without --oidc-audience would take the issuer's tokens for others; give both")
    if config.oidc_issuer and not (config.oidc_jwks or config.oidc_issuer.startswith("https://")):
        raise ConfigError(
            f"--oidc-issuer {config.oidc_issuer} is not https://; give --oidc-jwks with a file of its keys"
        )
    return TlsFiles(config.tls_client_ca, config.tls_cert, config.tls_key)


def event_keys(config: ServerConfig) -> tuple[str, str] | None:
    """The files of KV events' keys: the server's pair, and the list of subscribers; None: no keys.

    Raises ConfigError unless both are given, or neither.
    """
    if not (config.kv_events_key or config.kv_events_subscribers):
        return None
    if not (config.kv_events_key and config.kv_events_subscribers):
        raise ConfigError("keys of KV events need --kv-events-key and --kv-events-subscribers; give both, or neither")
    if not config.event_streams:
        raise ConfigError("--kv-events-key protects nothing without events; give --kv-events or --kv-events-tenant")
    return config.kv_events_key, config.kv_events_subscribers


def plaintext_ports(config: ServerConfig) -> list[str]:
    """The ports that other hosts can reach and that do not authenticate callers: flag and address of each."""
    ports = []
    if tls_files(config) is None:
        given = {"--listen": config.listen, "--http-listen": config.http_listen, "--data-listen": config.data_listen}
        ports = [f"{flag} {address}" for flag, address in given.items() if address and not is_local(address)]
    if event_keys(config) is None:
        ports += [f"KV events at {each}" for each in _tcp_events(config) if not is_local(each.removeprefix(_TCP))]
    return ports


def check_exposure(config: ServerConfig) -> None:
    """Raises ConfigError if other hosts can reach a port that does not authenticate callers."""
    has_event_keys, has_tls = event_keys(config) is not None, tls_files(config) is not None
    if config.insecure_network:
        return
    for port in plaintext_ports(config):
        told = f"{port}: other hosts can reach this port, which does not authenticate callers"
        if port.startswith("--"):
            raise ConfigError(
                f"{told}; make certificates with `kvpool certs init` and give --tls-cert, --tls-key and "
                f"--tls-client-ca (or --tokens), or give {_WAY_OUT}"
            )
        raise ConfigError(f"{told}; {_event_ways(has_tls)}")
    if has_tls and not has_event_keys and (endpoints := _tcp_events(config)):
        # Other users of this host must be authenticated, too.
        raise ConfigError(
            f"KV events at {endpoints[0]}: this port does not authenticate callers, as all ports with TLS do; "
            f"{_event_ways(has_tls)}"
        )
    if config.uses_mooncake and not config.mooncake_trusted_network:
        raise ConfigError(
            f"{config.uses_mooncake[0]}: Mooncake listens on all addresses, and does not authenticate callers; give "
            f"--mooncake-trusted-network where only trusted hosts reach its ports, or {_WAY_OUT}"
        )


def _tcp_events(config: ServerConfig) -> list[str]:
    """The endpoints of KV events that are ports; others are files of this host, with permissions."""
    endpoints = [each for stream in config.event_streams for each in (stream.endpoint, stream.replay_endpoint)]
    return [each for each in endpoints if each.startswith(_TCP)]


def _event_ways(has_tls: bool) -> str:
    return (
        "make keys with `kvpool certs events-key` and give --kv-events-key and --kv-events-subscribers, or give "
        f"{'ipc://PATH' if has_tls else 'an address of this host'}, or {_WAY_OUT}"
    )
