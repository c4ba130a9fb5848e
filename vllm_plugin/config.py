"""Settings of the connector: `kv_connector_extra_config`. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.config import DEFAULT_ENDPOINT, ClientConfig
from kvpool.errors import ConfigError

MAX_TIMEOUT_MS = 300_000


ON_RESET = ("leave", "connector", "keep")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a user may set.

    Args:
        endpoint: HOST:PORT of the kvpool-server.
        transport: "auto", "shm", "tcp", "grpc", "mooncake" or "stream"; see `ClientConfig`.
        lookup_timeout_ms: a lookup that takes longer is a miss, and a load that stands still for so long is given up.
        promotion_wait_ms: how long a request waits for blocks on their way up from a tier of the pool, at most: never
            longer than computing them would take. 0: it takes what is ready. Raise it for slow tiers and slow models.
        load_timeout_ms: a load that takes longer is recomputed. Raise it for long prompts over slow networks.
        store_timeout_ms: a store that takes longer is dropped.
        store_decoded: also store blocks that were filled by decoding; the next turn of a conversation hits them.
        window_interval_tokens: layers with a sliding window are stored where a prompt ends, where it parts from what
            the pool knows, and at multiples of this many tokens. Smaller: more hits for the first prompts that part,
            more bytes.
        max_pinned_fraction: share of the engine's blocks that may be kept from reuse while they are being stored.
            Where the engine lacks blocks, queued stores of requests that have ended are dropped.
        num_shards: chunks a block is cut into; 0: one a KV head, 16 at most. Engines share blocks only if it is equal.
        weights_epoch: change it when the weights change under the same name; no old block is read again.
        decline_slow_loads: compute a hit where loading it would take longer, by what both have taken so far.
        weights_epoch_file: read after each reset: the name of the weights that the engine has then, so that engines
            with equal ones share again; see `resets.named_epoch`.
        on_reset: what a reset of the engine's prefix cache means; vLLM also resets it when an engine goes to sleep.
            "leave": the engine reads none of the blocks there are, nor do others read its new ones: its weights may
            have changed. "connector": the same, but only for resets that name the connector, so that
            `reset_prefix_cache()` alone empties the engine's own cache and no more. "keep": nothing. The last two are
            right only where weights never change in a running engine, or not without such a reset.
        share_adapters: which requests with a LoRA adapter share blocks, by the adapter's content. "unchanged": where
            its files are as they were before the engine started. "always": by what they are at its first request; right
            only where they are never written again and adapters never reloaded in place. "never": none.
        tenant, salt: engines share blocks only if both are equal.
    """

    endpoint: str = DEFAULT_ENDPOINT
    transport: str = "auto"
    lookup_timeout_ms: int = 200
    promotion_wait_ms: int = 1_000
    load_timeout_ms: int = 5_000
    store_timeout_ms: int = 5_000
    store_decoded: bool = True
    window_interval_tokens: int = 4096
    max_pinned_fraction: float = 0.25
    num_shards: int = 0
    weights_epoch: str = ""
    decline_slow_loads: bool = True
    weights_epoch_file: str = ""
    on_reset: str = "leave"
    share_adapters: str = "unchanged"
    tenant: str = ""
    salt: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Reads `kv_connector_extra_config`.

        Raises:
            ConfigError: an unknown key, a value of a wrong type, or one out of bounds.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key, value in extra.items():
            if key not in fields:
                close = difflib.get_close_matches(key, fields, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(fields)}"
                raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; {hint}")
            wanted = type(fields[key].default)
            if not (isinstance(value, wanted) or (wanted is float and isinstance(value, int))) or (
                isinstance(value, bool) and wanted is not bool
            ):
                raise ConfigError(f"kv_connector_extra_config: {key} = {value!r} is not a {wanted.__name__}")
        config = cls(**extra)
        for name in ("lookup_timeout_ms", "load_timeout_ms", "store_timeout_ms"):
            if not 1 <= getattr(config, name) <= MAX_TIMEOUT_MS:
                raise ConfigError(
                    f"kv_connector_extra_config: {name} = {getattr(config, name)} is not in 1 to {MAX_TIMEOUT_MS}"
                )
        if not 0 <= config.promotion_wait_ms <= MAX_TIMEOUT_MS:
            raise ConfigError(
                f"kv_connector_extra_config: promotion_wait_ms = {config.promotion_wait_ms} is not in 0 to "
                f"{MAX_TIMEOUT_MS}; 0 never waits"
            )
        config.client_config()
        if config.on_reset not in ON_RESET:
            raise ConfigError(
                f"kv_connector_extra_config: on_reset = {config.on_reset!r} is not one of {', '.join(ON_RESET)}"
            )
        if config.share_adapters not in ("unchanged", "always", "never"):
            raise ConfigError(
                f"kv_connector_extra_config: share_adapters = {config.share_adapters!r} is not 'unchanged', 'always' "
                "or 'never'"
            )
        if config.window_interval_tokens < 1:
            raise ConfigError(
                f"kv_connector_extra_config: window_interval_tokens = {config.window_interval_tokens} is not positive; "
                "1 stores every window"
            )
        if not 0 < config.max_pinned_fraction <= 1:
            raise ConfigError(
                f"kv_connector_extra_config: max_pinned_fraction = {config.max_pinned_fraction} is not in (0, 1]"
            )
        if not 0 <= config.num_shards <= 64:
            raise ConfigError(f"kv_connector_extra_config: num_shards = {config.num_shards} is not in 0 to 64")
        return config

    def client_config(self) -> ClientConfig:
        # A lease outlives the slowest load, however long the request waits for the worker to begin it.
        return ClientConfig(
            endpoint=self.endpoint,
            transport=self.transport,
            timeout_ms=self.lookup_timeout_ms,
            data_timeout_ms=max(self.load_timeout_ms, self.store_timeout_ms),
            stall_timeout_ms=self.lookup_timeout_ms,
            lease_ttl_ms=2 * self.load_timeout_ms,
            ticket_ttl_ms=self.store_timeout_ms,
        )
