"""What engines report to the server."""

from __future__ import annotations

from kvpool.v1.pool_pb2 import ReportRequest as ReportRequest

REPORTER_BYTES = 16
MAX_ENGINE_CHARS = 64
"""Of an engine's name, its versions, and its transport; longer ones are cut."""
MAX_STAGES = 16
"""Namespaces of one engine that a report names."""
MAX_CAUSES = 64
"""Causes that one report names, those of later releases included."""
MAX_AMOUNT = 1e15
"""Largest sum of seconds, or of GiB hours, that a server tells of: sums stop there."""
