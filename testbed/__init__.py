"""Real vLLM engines, small models and Mooncake clusters on this machine: what tests, benchmarks and the demo start."""
