"""Engines under load: workloads, the stores beside the engines, runs, and what is reported of them."""
