"""Which releases of vLLM the connector is tested with."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger

logger = init_logger("vllm.kvpool.versions")

FIRST, LAST = (0, 32), (0, 33)
"""As docs/compatibility.md says."""


def warn_if_untested(version: str) -> bool:
    """Warns of a vLLM release that kvpool is not tested with; returns whether it did."""
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = ()
    if FIRST <= release <= LAST:
        return False
    logger.warning(
        "kvpool is tested with vLLM %d.%d to %d.%d, and this is vLLM %s, whose connector interface may differ; see "
        "docs/compatibility.md",
        *FIRST,
        *LAST,
        version,
    )
    return True
