"""Writes the tables of docs/reference/metrics.md from names and HELP texts: `python -m tests.support.metrics_page`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvpool.protocol.reports import Cause
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.app.monitoring import LoopLag
from kvpool_server.observability import metrics
from kvpool_server.reports.engines import report_families

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

Row = tuple[str, str, str]
"""Series, type, HELP."""


def server_rows() -> list[Row]:
    """What a server exports, but for the metrics of Python and of the process."""
    registry = CollectorRegistry()
    families = [
        *metrics.pool_families(pb.StatsResponse()),
        *metrics.usage_families(()),
        *metrics.quota_families(()),
        *metrics.pin_families(()),
        *report_families({}),
        *metrics.value_families(pb.ValueResponse(), None),
        *metrics.memory_families("RssAnon: 0 kB"),
        *metrics.certificate_families({}),
        *metrics.refused_file_families({}),
    ]
    LoopLag(registry)
    metrics.RpcMetrics(registry)
    families += registry.collect()
    return [_row(family.name, family.type, family.documentation) for family in families]


def engine_rows() -> list[Row]:
    """What the connector adds to vLLM's metrics. Imports vLLM."""
    from vllm_plugin.metrics import COMPUTED_TOKENS, COUNTERS, GAUGES, HISTOGRAMS

    kinds = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}
    rows = [_row(f"vllm:kvpool_{name}", kind, text) for kind, texts in kinds.items() for name, text in texts.items()]
    rows.append(("vllm:kvpool_computed_tokens_total", "counter", COMPUTED_TOKENS))
    return rows + [(f'… with `cause="{cause.label}"`', "", cause.gloss) for cause in Cause]


def _row(name: str, kind: str, text: str) -> Row:
    return f"{name}_total" if kind == "counter" else name, kind, text


def refreshed(page: str, section: str, rows: Iterable[Row]) -> str:
    """The page with the table between the section's two marks, which must be there, replaced."""
    table = [
        "| series | type | help |",
        "|---|---|---|",
        *(f"| {name if kind == '' else f'`{name}`'} | {kind} | {text} |" for name, kind, text in rows),
    ]
    marked = re.compile(rf"(<!-- {section}: [^>]*-->\n).*?(<!-- end of {section} -->)", re.DOTALL)
    page, count = marked.subn(lambda match: match[1] + "\n".join(table) + "\n" + match[2], page)
    assert count == 1, f"{PAGE.name} has {count} tables of {section}"
    return page


if __name__ == "__main__":
    written = refreshed(PAGE.read_text(), "server metrics", server_rows())
    PAGE.write_text(refreshed(written, "engine metrics", engine_rows()))
