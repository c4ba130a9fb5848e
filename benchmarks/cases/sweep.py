"""How does the size of a chunk change the rate? Every transport, the peers and the limits, over one range of sizes.

One client thread moves 64 MiB, one chunk a block, in alternation with all others. A get is measured without its lookup:
the others have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from benchmarks.harness.measuring import Series, alternate, gb_per_s, timed
from benchmarks.harness.traffic import Bytes, Traffic, copy_and_sum
from benchmarks.peers import valkey
from benchmarks.peers.bare_socket import BareSocket, bare_socket
from benchmarks.peers.bare_stream import bare_stream
from benchmarks.peers.mooncake_store import Store
from benchmarks.peers.valkey import Valkey

CHUNK_KIB = (16, 64, 256, 1024, 4096)
ROUNDS = 9
LIMITS = ("memcpy", "memcpy + xxh3", "bare TCP socket", "bare gRPC stream")
PUT, GET = "put", "get"

Measures = dict[tuple[str, str], Callable[[], float]]
"""What takes its own time, by (name, direction)."""


def sweep(endpoint: str, store: Store, source: Bytes, sink: Bytes) -> list[Series]:
    """Rates of puts and gets by the size of a chunk.

    Args:
        store: has both buffers registered.
        source, sink: uint8 [batch_bytes], warm.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_socket(max(CHUNK_KIB) << 10))
        if without := valkey.missing():
            print(f"Valkey is left out: {without}", flush=True)
        plain = None if without else stack.enter_context(valkey.valkey())
        for chunk_kib in CHUNK_KIB:
            froms, intos = source.reshape(-1, chunk_kib << 10), sink.reshape(-1, chunk_kib << 10)
            for key, taken in _measure(endpoint, store, bare, plain, froms, intos).items():
                rates.setdefault(key, []).append(gb_per_s(source.nbytes, taken).figure)
    return [
        Series(direction, name, "KiB", CHUNK_KIB, "GB/s", rate, limit=name in LIMITS)
        for (name, direction), rate in rates.items()
    ]


def _measure(
    endpoint: str, store: Store, bare: BareSocket, plain: Valkey | None, source: Bytes, sink: Bytes
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round of moving uint8 [num_blocks, chunk_bytes]."""
    num_blocks, chunk_bytes = source.shape
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(bare_stream(chunk_bytes))
        store_put, store_get = store.measures(source, sink)
        measures: Measures = {
            ("memcpy", PUT): lambda: timed(lambda: _copy(source, sink)),
            ("memcpy + xxh3", PUT): lambda: timed(lambda: copy_and_sum(source, sink, chunk_bytes)),
            ("bare TCP socket", PUT): lambda: timed(lambda: bare.put(source)),
            ("bare TCP socket", GET): lambda: timed(lambda: bare.get(sink)),
            ("bare gRPC stream", PUT): lambda: timed(lambda: stream.put(num_blocks)),
            ("bare gRPC stream", GET): lambda: timed(lambda: stream.get(num_blocks)),
            ("Mooncake Store, TCP", PUT): store_put,
            ("Mooncake Store, TCP", GET): store_get,
            **(_valkey(plain, source, sink) if plain else {}),
        }
        for transport in ("shm", "tcp"):
            traffic = Traffic(endpoint, transport, source, sink, num_shards=1)
            stack.callback(traffic.close)
            traffic.check()
            measures[f"kvpool {transport}", PUT] = traffic.put
            measures[f"kvpool {transport}", GET] = traffic.get_without_lookup
        taken = alternate(measures, ROUNDS, what=f"chunks of {chunk_bytes >> 10} KiB")
    # A copy has no direction.
    return {**taken, **{(name, GET): taken[name, PUT] for name in ("memcpy", "memcpy + xxh3")}}


def _valkey(plain: Valkey, source: Bytes, sink: Bytes) -> Measures:
    def put() -> float:
        plain.clear()
        return timed(lambda: plain.put(source))

    return {
        ("Valkey or Redis", PUT): put,
        ("Valkey or Redis", GET): lambda: timed(lambda: plain.get(sink)),
    }


def _copy(source: Bytes, sink: Bytes) -> None:
    for there, here in zip(source, sink, strict=True):
        here[:] = there
