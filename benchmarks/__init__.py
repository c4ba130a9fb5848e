"""Benchmarks: one question a module, run as `python -m benchmarks.<name>`; results with their machine in results/."""
