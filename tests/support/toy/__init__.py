"""The toy engine: vLLM's real scheduler and both sides of a connector around a model whose KV is known.

`engine` drives one engine, step by step, for the tests of the plugin. `tests.conformance` adds a judge of the
connector's calls, `tests.simulation` a schedule that controls threads, time and network.
"""
