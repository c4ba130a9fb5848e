"""Warnings that are repeated while their reason lasts."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping, Sequence

import structlog

from kvpool.security.tls import TlsIdentity

log = structlog.get_logger()

HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S
SOON = dt.timedelta(days=30)
"""How long before its end a certificate is warned of."""


async def repeat(warn: Callable[[], None], every_s: float) -> None:
    """Calls a function now, and again and again, until cancelled."""
    while True:
        warn()
        await asyncio.sleep(every_s)


def ends_of(identity: TlsIdentity) -> Mapping[str, dt.datetime]:
    """When a server's certificates end: its own (`server`), and its clients' first authority (`client_ca`)."""
    ends = {"server": identity.ends_at, "client_ca": identity.ca_ends_at}
    return {name: ends_at for name, ends_at in ends.items() if ends_at is not None}


def warn_of_ends(identity: TlsIdentity, now: dt.datetime) -> None:
    """Logs a warning for each certificate that ends within `SOON`."""
    for name, ends_at in ends_of(identity).items():
        if ends_at - now <= SOON:
            log.warning(
                "a certificate ends soon: replace its file, which needs no restart",
                certificate=name,
                ends_at=ends_at.isoformat(),
                days_left=max(0, (ends_at - now).days),
            )


def warn_of_plaintext(ports: Sequence[str]) -> None:
    """Logs what --insecure-network means for a server's plaintext ports."""
    log.warning(
        "--insecure-network: any host that reaches these ports can read and change what they serve; give --tls-cert, "
        "--tls-key and --tls-client-ca (or --tokens) instead, or close the ports to all hosts but your engines",
        ports=ports,
    )
