"""What the scheduler's side of a connector keeps for requests."""

from __future__ import annotations

from typing import Any

from vllm_plugin.scheduler.load_policy import PrefillQueue


def num_queued(queue: PrefillQueue) -> int:
    """Requests before their first token."""
    return sum(map(len, queue._left.values()))


def held_by(side: Any) -> dict[str, int]:
    """How much is kept, by name; nothing is left once all requests have ended."""
    return {
        "jobs": len(side.jobs),
        "pinned blocks": side.jobs.num_blocks,
        "requests": len(side.stores.tracked),
        "requests with KV of other connectors": len(side._peer_loads._first),
        "lookups": len(side.admission.candidates),
        "requests that wait for a lookup": len(side.admission.asking),
        "prompts that are counted": len(side.computed._prompts) + len(side.computed._why),
        "loads": len(side.loads.loading),
        "requests before their first token": num_queued(side.queue),
        "failed requests": len(side._failed),
        "new loads": len(side.loads.new),
        "requests with hints": len(side.hints._hinted),
    }
