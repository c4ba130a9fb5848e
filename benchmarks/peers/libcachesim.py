"""Published eviction policies beside ours: libCacheSim's, replayed over the same blocks with the same rule for hits.

Optional: measured where `libcachesim` is installed. It has wheels for x86-64 Linux with glibc 2.34 or later alone, and
is under the GPL, so set-up does not install it: `pip install libcachesim==0.3.5`.

These policies choose among single blocks and know no prefixes: a block that stays after the blocks before it in its
prompt were evicted occupies a slot and cannot be hit.

Source: github.com/1a1a11a/libCacheSim; each policy with the library's default parameters.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from collections.abc import Mapping, Sequence

from benchmarks.replay.request import Request

INSTALL = "pip install libcachesim==0.3.5"
POLICIES: Mapping[str, str] = {
    "ARC": "ARC",
    "Cacheus": "Cacheus",
    "CLOCK": "Clock",
    "Clock2Q+": "Clock2QPlus",
    "GDSF": "GDSF",
    "Hyperbolic": "Hyperbolic",
    "LeCaR": "LeCaR",
    "LFU-DA": "LFUDA",
    "LHD": "LHD",
    "LIRS": "LIRS",
    "LRU": "LRU",
    "LRU-2": "LRUK",
    "MQ": "MQ",
    "S3-FIFO": "S3FIFO",
    "SIEVE": "Sieve",
    "SLRU": "SLRU",
    "2Q": "TwoQ",
    "W-TinyLFU": "WTinyLFU",
}
"""Name in papers -> class of libcachesim. Left out: CLOCK-Pro, which fills half of its capacity in 0.3.5; policies that
learn from objects' sizes, all alike here; and those that need further libraries."""
HASH_POWER = 18
"""Log2 of the first size of a policy's hash table, which grows."""


def missing() -> str:
    """Why there is nothing to measure; empty if there is."""
    return "" if importlib.util.find_spec("libcachesim") else f"libcachesim is not installed; run `{INSTALL}`"


def version() -> str:
    """The library and its version."""
    return f"libcachesim {importlib.metadata.version('libcachesim')}"


def replay(requests: Sequence[Request], capacity: int, policy: str) -> int:
    """Hits of a policy with `capacity` blocks: a block hits if it and all blocks before it in its prompt are there.

    Args:
        policy: a name in `POLICIES`.
    """
    import libcachesim

    cache = getattr(libcachesim, POLICIES[policy])(capacity, hashpower=HASH_POWER)
    access = libcachesim.Request()
    access.obj_size = 1
    hits = 0
    for request in requests:
        access.clock_time = int(request.at_s)
        found = []
        for block in request.ids:
            access.obj_id = block
            found.append(cache.get(access))  # Stores the block if it misses.
        hits += sum(1 for _ in itertools.takewhile(bool, found))
    return hits
