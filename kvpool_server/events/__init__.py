"""KV events: changes of the pool's blocks, published to routers in vLLM's wire format (docs/reference/kv-events.md)."""
