"""The contract between vLLM and a connector: one small named checker a rule, over a recording.

A checker yields what it found wrong, and nothing if the rule was kept. A rule of an object at rest (its constructor,
its types) is in `tests.conformance.statics`.

Source: the docstrings of vllm/distributed/kv_transfer/kv_connector/v1/base.py, and what v1/core/sched/scheduler.py does
with the answers.
"""

from __future__ import annotations

from tests.conformance.rules import anytime, blocks, driver, ends, loads, matches, wire
from tests.conformance.rules.registry import RULES, Violation, violations

__all__ = ["RULES", "Violation", "anytime", "blocks", "driver", "ends", "loads", "matches", "violations", "wire"]
