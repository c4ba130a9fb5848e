"""Measures how fast bytes travel from here, in a few short rounds."""

from __future__ import annotations

from kvpool.client.client import Client
from kvpool.report.bandwidth import check_permission, measure, usual_block
from kvpool.report.bandwidth_report import GB
from kvpool.report.finding import Finding, ok, warning

ROUND_BYTES = 64 << 20
SLOW_BYTES_PER_S = 1e9
"""Slower loads hardly pay: with 128 KiB a token they bring 7,600 tokens a second, and a GPU computes more."""


def bandwidth(client: Client) -> list[Finding]:
    """The rates of puts and gets. Raises PermissionDeniedError unless the caller is an operator."""
    check_permission(client)
    found = measure(client, ROUND_BYTES, usual_block(client))
    text = f"{found.transport}: put {found.put.median / GB:.3g} GB/s, get {found.get.median / GB:.3g} GB/s"
    if found.get.median < SLOW_BYTES_PER_S:
        fix = "measure a hit against computing with `kvpool ping --bandwidth --namespace`"
        return [warning("bandwidth", text, fix)]
    return [ok("bandwidth", text)]
