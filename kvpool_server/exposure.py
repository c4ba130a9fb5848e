"""Refuses to serve strangers: what listens beyond this host has to ask who calls."""

from __future__ import annotations

from kvpool.errors import ConfigError
from kvpool.tls import TlsFiles
from kvpool_server.addresses import is_local
from kvpool_server.config import ServerConfig

_WAY_OUT = "--insecure-network where all on the network are trusted"


def tls_files(config: ServerConfig) -> TlsFiles | None:
    """The files of TLS; None: plaintext. Raises ConfigError unless callers then have to prove who they are."""
    if not (config.tls_cert or config.tls_key or config.tls_client_ca or config.tokens):
        return None
    if not (config.tls_cert and config.tls_key):
        raise ConfigError("TLS needs --tls-cert and --tls-key; give both, or neither with --tls-client-ca or --tokens")
    if bool(config.tls_client_ca) == bool(config.tokens):
        raise ConfigError(
            "with TLS callers prove who they are: give either --tls-client-ca, for certificates, or --tokens"
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


def check_exposure(config: ServerConfig) -> None:
    """Raises ConfigError if other hosts can reach a port that asks nobody who he is."""
    has_event_keys = event_keys(config) is not None
    if config.insecure_network:
        return
    has_tls = tls_files(config) is not None
    for flag, address in (("--listen", config.listen), ("--data-listen", config.data_listen)):
        if has_tls or not address or is_local(address):
            continue
        raise ConfigError(
            f"{_open(flag, address)}; make certificates with `kvpool certs init` and give --tls-cert, "
            f"--tls-key and --tls-client-ca (or --tokens), or give {_WAY_OUT}"
        )
    if config.http_listen and not is_local(config.http_listen):
        raise ConfigError(
            f"{_open('--http-listen', config.http_listen)}, nor is anything encrypted; give an address of this host, "
            f"or {_WAY_OUT}"
        )
    if not has_event_keys:
        _check_plain_events(config, has_tls)
    if config.uses_mooncake and not config.mooncake_trusted_network:
        raise ConfigError(
            f"{config.uses_mooncake[0]}: Mooncake listens on all addresses, and asks nobody who he is; give "
            f"--mooncake-trusted-network where only trusted hosts reach its ports, or {_WAY_OUT}"
        )


def _check_plain_events(config: ServerConfig, has_tls: bool) -> None:
    """Raises ConfigError for an endpoint of KV events that needs keys.

    With TLS that is every TCP port: other users of this host have to prove who they are, too.
    """
    endpoints = [each for stream in config.event_streams for each in (stream.endpoint, stream.replay_endpoint)]
    for endpoint in endpoints:
        if not endpoint.startswith("tcp://"):
            continue  # A file of this host, with permissions.
        if not is_local(endpoint.removeprefix("tcp://")):
            told = _open("KV events at", endpoint)
        elif has_tls:
            told = f"KV events at {endpoint}: nobody has to prove who he is at this port, as all callers do with TLS"
        else:
            continue
        raise ConfigError(
            f"{told}; make keys with `kvpool certs events-key` and give --kv-events-key and --kv-events-subscribers, "
            f"or give {'ipc://PATH' if has_tls else 'an address of this host'}, or {_WAY_OUT}"
        )


def _open(flag: str, address: str) -> str:
    return f"{flag} {address}: other hosts can reach this port, and nobody there has to prove who he is"
