"""What differs between the releases of vLLM that the connector works with; no other module asks which release runs.

A difference is found by what vLLM has, not by its version: builds from source have versions of their own. A vLLM whose
connector contract lacks what the connector needs is refused at start, by the name of what it lacks (`check_contract`);
until then every module of the plugin can be imported with it.

Source: vLLM's `distributed/kv_transfer/kv_connector/v1/base.py` and `v1/core/sched/output.py` of 0.30 to 0.33, and of
0.28 and 0.29, which are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput

from kvpool.protocol.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED = ((0, 30), (0, 33))
"""First and last release of vLLM that the connector is tested with, as docs/reference/compatibility.md says."""

ExtraKeys = Sequence[tuple[Any, ...] | None]


def hash_block_tokens(kv_cache_config: KVCacheConfig) -> int | None:
    """Tokens that one block hash covers, where vLLM keeps it with the KV cache's groups, as it does from 0.32 on."""
    return getattr(kv_cache_config, "hash_block_size", None)


def event_extra_keys(extra_keys: ExtraKeys) -> ExtraKeys | None:
    """Extra keys of blocks as KV events have them. Before vLLM 0.31 hashes and events have the same keys."""
    convert = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys or None)
    published: ExtraKeys | None = convert(extra_keys)
    return published


def check_contract() -> None:
    """Raises ConfigError if vLLM's connector contract cannot do what the connector needs."""
    lacks = []
    if "kv_connector_block_state" not in SchedulerOutput.__dataclass_fields__:
        lacks.append(
            "does not tell a connector where the blocks of a running request are "
            "(SchedulerOutput.kv_connector_block_state)"
        )
    if not hasattr(base, "KVConnectorTransferResults"):
        lacks.append("cannot compute a request whose load has failed, of every model (KVConnectorTransferResults)")
    if lacks:
        raise ConfigError(
            f"KVPoolConnector needs vLLM {TESTED[0][0]}.{TESTED[0][1]} or later: vLLM {vllm.__version__} "
            f"{' and '.join(lacks)}; upgrade vLLM, or serve without --kv-transfer-config"
        )
