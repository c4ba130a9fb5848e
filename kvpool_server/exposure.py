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


def plaintext_ports(config: ServerConfig) -> dict[str, str]:
    """The ports that other hosts can reach and that ask nobody who he is: their flags, and what was given there."""
    found = {}
    if tls_files(config) is None:
        found = {"--listen": config.listen, "--http-listen": config.http_listen, "--data-listen": config.data_listen}
    found |= {each: _tcp_address(value) for each, value in _events(config).items()}
    found = {flag: address for flag, address in found.items() if address and not is_local(address)}
    return found if config.mooncake == "off" else {**found, "--mooncake": config.mooncake}


def check_exposure(config: ServerConfig) -> None:
    """Raises ConfigError if other hosts can reach a port that asks nobody who he is."""
    if config.insecure_network:
        return
    for flag, value in plaintext_ports(config).items():
        if flag == "--mooncake":
            raise ConfigError(
                f"--mooncake {value}: the Transfer Engine listens on all addresses and asks nobody who he is; "
                f"give {_WAY_OUT}"
            )
        if flag in _events(config):
            raise ConfigError(
                f"{_open(flag, value)}, nor is anything encrypted; give an address of this host, or {_WAY_OUT}"
            )
        raise ConfigError(
            f"{_open(flag, value)}; make certificates with `kvpool certs init` and give --tls-cert, "
            f"--tls-key and --tls-client-ca (or --tokens), or give {_WAY_OUT}"
        )


def _events(config: ServerConfig) -> dict[str, str]:
    """The endpoints of KV events, by flag."""
    return {"--kv-events": config.kv_events, "--kv-events-replay": config.kv_events_replay}


def _open(flag: str, address: str) -> str:
    return f"{flag} {address}: other hosts can reach this port, and nobody there has to prove who he is"


def _tcp_address(endpoint: str) -> str:
    """HOST:PORT of a tcp:// endpoint; empty for others, which are files of this host."""
    return endpoint.removeprefix("tcp://") if endpoint.startswith("tcp://") else ""
