"""Refuses to serve strangers: what listens beyond this host has to ask who calls."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.errors import ConfigError
from kvpool_server.addresses import is_local

WAY_OUT = "--insecure-network where all on the network are trusted"


def check_exposure(secured: Mapping[str, str], plain: Mapping[str, str], *, has_tls: bool, mooncake: str) -> None:
    """Raises ConfigError if other hosts can reach a port that asks nobody who he is.

    Args:
        secured: by flag, HOST:PORT of the ports that speak TLS where `has_tls`; empty: none.
        plain: likewise, of those that never do.
        mooncake: protocol of the Transfer Engine, which listens on all addresses; "off": none.
    """
    for flag, address in {**plain, **({} if has_tls else secured)}.items():
        if not address or is_local(address):
            continue
        stranger = f"{flag} {address}: other hosts can reach this port, and nobody there has to prove who he is"
        if flag in secured:
            raise ConfigError(
                f"{stranger}; make certificates with `kvpool certs init` and give --tls-cert, --tls-key and "
                f"--tls-client-ca, or give {WAY_OUT}"
            )
        raise ConfigError(f"{stranger}, nor is anything encrypted; give an address of this host, or {WAY_OUT}")
    if mooncake != "off":
        raise ConfigError(
            f"--mooncake {mooncake}: the Transfer Engine listens on all addresses and asks nobody who he is; give "
            f"{WAY_OUT}"
        )
