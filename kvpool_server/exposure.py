"""Refuses to serve strangers: what listens beyond this host has to ask who calls."""

from __future__ import annotations

from kvpool.errors import ConfigError
from kvpool.tls import TlsFiles
from kvpool_server.addresses import is_local
from kvpool_server.config import ServerConfig

_WAY_OUT = "--insecure-network where all on the network are trusted"


def tls_files(config: ServerConfig) -> TlsFiles | None:
    """The files of TLS; None: plaintext. Raises ConfigError unless callers then have to prove who they are."""
    proofs = [each for each in (config.tls_client_ca, config.tokens, config.oidc_issuer) if each]
    if not (config.tls_cert or config.tls_key or proofs):
        if config.deny:
            raise ConfigError(f"--deny {config.deny} denies nobody where callers prove nothing; give --tls-cert, too")
        if config.memory_tenant:
            raise ConfigError(
                f"--memory-tenant {config.memory_tenant}: without TLS callers have no tenant, and whoever may connect "
                "gets the memory; leave it out, or give --tls-cert, too"
            )
        return None
    if not (config.tls_cert and config.tls_key):
        raise ConfigError("TLS needs --tls-cert and --tls-key; give both, or neither without")
    if len(proofs) != 1:
        raise ConfigError(
            "with TLS callers prove who they are: give either --tls-client-ca, for certificates, or --tokens, or "
            "--oidc-issuer"
        )
    if config.oidc_issuer and not config.oidc_audience:
        raise ConfigError("--oidc-issuer without --oidc-audience would take the issuer's tokens for others; give both")
    if config.oidc_issuer and not (config.oidc_jwks or config.oidc_issuer.startswith("https://")):
        raise ConfigError(
            f"--oidc-issuer {config.oidc_issuer} is not https://; give --oidc-jwks with a file of its keys"
        )
    if config.memory_tenant and not config.unix_listen:
        raise ConfigError(
            f"--memory-tenant {config.memory_tenant} gets no memory without a Unix socket; give --unix-listen, too"
        )
    return TlsFiles(config.tls_client_ca, config.tls_cert, config.tls_key)


def check_exposure(config: ServerConfig) -> None:
    """Raises ConfigError if other hosts can reach a port that asks nobody who he is."""
    if config.insecure_network:
        return
    has_tls = tls_files(config) is not None
    asking = {"--listen": config.listen, "--http-listen": config.http_listen, "--data-listen": config.data_listen}
    for flag, address in asking.items():
        if has_tls or not address or is_local(address):
            continue
        raise ConfigError(
            f"{_open(flag, address)}; make certificates with `kvpool certs init` and give --tls-cert, "
            f"--tls-key and --tls-client-ca (or --tokens), or give {_WAY_OUT}"
        )
    plain = {
        "--kv-events": _tcp_address(config.kv_events),
        "--kv-events-replay": _tcp_address(config.kv_events_replay),
    }
    for flag, address in plain.items():
        if address and not is_local(address):
            raise ConfigError(
                f"{_open(flag, address)}, nor is anything encrypted; give an address of this host, or {_WAY_OUT}"
            )
    if config.mooncake != "off":
        raise ConfigError(
            f"--mooncake {config.mooncake}: the Transfer Engine listens on all addresses and asks nobody who he is; "
            f"give {_WAY_OUT}"
        )


def _open(flag: str, address: str) -> str:
    return f"{flag} {address}: other hosts can reach this port, and nobody there has to prove who he is"


def _tcp_address(endpoint: str) -> str:
    """HOST:PORT of a tcp:// endpoint; empty for others, which are files of this host."""
    return endpoint.removeprefix("tcp://") if endpoint.startswith("tcp://") else ""
