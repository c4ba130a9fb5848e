"""KV events: what the pool holds, told to routers in vLLM's wire format. docs/kv-events.md is the contract."""
