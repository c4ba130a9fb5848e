"""A suite that any vLLM connector can be put through.

`Subject` names a connector class and its configuration; `scenarios.run` drives it through vLLM's real scheduler on a
toy model, with `checked` between the two, `ownership` watching the KV blocks, and the rules in `contract`.
"""
