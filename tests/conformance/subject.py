"""What the suite runs: a connector class, how it is configured, and how its world is disturbed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.conformance.reference import ReferenceConnector


@dataclass(frozen=True)
class Subject:
    """One connector under test, whose second engine finds what a first one has stored.

    Args:
        connector: name of the class; of a registered one if `module` is "".
        module: where the class is.
        extra: `kv_connector_extra_config`.
        stall: while entered, its storage does not answer.
        spoil: from its call on, loads of what is stored fail.
        hook_limit_s: how long a hook may take.
        drain_limit_s: how long requests may take to end.
        specs: of the KV-cache groups of the model that it is used with; one full-attention group by default.
    """

    connector: str
    module: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    stall: Callable[[], AbstractContextManager[Any]] = nullcontext
    spoil: Callable[[], None] = lambda: None
    hook_limit_s: float = 5.0
    drain_limit_s: float = 30.0
    specs: Sequence[KVCacheSpec] = ()

    def configure(self, config: VllmConfig) -> VllmConfig:
        """The same configuration with this connector in it."""
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=self.connector,
            kv_connector_module_path=self.module or None,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=dict(self.extra),
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        return config


_stores = itertools.count()


def reference(connector: str = "ReferenceConnector", module: str = ReferenceConnector.__module__) -> Subject:
    """The reference connector, or a broken one, with a store of its own."""
    store = f"store {next(_stores)}"

    def spoil() -> None:
        ReferenceConnector.stores_by_name[store].loads_fail = True

    return Subject(connector, module, {"store": store}, spoil=spoil)
