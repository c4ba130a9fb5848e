"""The buckets of a histogram of prometheus_client."""

from __future__ import annotations

from prometheus_client import Histogram


def cumulative_buckets(histogram: Histogram) -> dict[str, float]:
    """By upper bound, as text: how many observations were not above it."""
    (metric,) = histogram.collect()
    return {sample.labels["le"]: sample.value for sample in metric.samples if sample.name.endswith("_bucket")}
