"""What one client does with one server, run by the client's own release; prints what came of it as JSON.

Knows nothing of this repository but `kvpool`, so that any release can run it. Arguments, as one JSON object:

    endpoint, tls: of the server; tls: a directory with the client's certificate, or null.
    transports: by which it stores and loads.
    name: of the blocks that it stores; theirs: names of blocks that others have stored.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np

import kvpool
from kvpool import (
    BlockRun,
    Chunk,
    Client,
    ClientConfig,
    GroupSpec,
    InPlace,
    KVPoolError,
    NamespaceSpec,
    PoolKey,
    TlsFiles,
    checksum,
)

CHUNK_BYTES = 4_096
NUM_SHARDS = 2
PROMOTION_S = 20.0
SPEC = NamespaceSpec(
    model="skew",
    groups=(GroupSpec("full_attention", 16, 8, 64, 64, NUM_SHARDS, CHUNK_BYTES, ("layers.0", "layers.1")),),
    tenant="acme",
)


def _run(name: str) -> BlockRun:
    return BlockRun(0, [hashlib.sha256(f"{name} {nth}".encode()).digest() for nth in range(3)])


def _blocks(name: str) -> list[np.ndarray]:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, NUM_SHARDS * CHUNK_BYTES, dtype=np.uint8) for _ in range(3)]


def _load(client: Client, namespace: object, name: str, locate: bool) -> str:
    """Empty if the blocks were loaded and are right; else what is wrong."""
    run = _run(name)
    found = client.lookup(namespace, [run], locate=locate, explain=True)
    ends_at = time.monotonic() + PROMOTION_S
    while found.retry_after_ms and time.monotonic() < ends_at:  # Blocks are on their way up from a tier.
        time.sleep(found.retry_after_ms / 1000)
        client.release([found.lease_id])
        found = client.lookup(namespace, [run], locate=locate, explain=True)
    if found.hits[0].num_leading != 3:
        return f"{found.hits[0].num_leading} of 3 blocks of {name!r} were found"
    received = [np.empty(NUM_SHARDS * CHUNK_BYTES, np.uint8) for _ in range(3)]
    leased = found.leased(0, 0, 3) if locate else None
    client.get(namespace, found.lease_id, [run], InPlace(received), leased=leased)
    client.release([found.lease_id])
    right = all((one == other).all() for one, other in zip(received, _blocks(name), strict=True))
    return "" if right else f"bytes of {name!r} differ"


def _inline(client: Client, namespace: object, name: str) -> str:
    """Empty if a chunk travelled inside the messages, there and back."""
    payload = _blocks(name)[0][:CHUNK_BYTES].tobytes()
    keys = [PoolKey(namespace.fingerprint, 0, _run(f"inline {name}").block_hashes[0], shard) for shard in (0, 1)]
    client.chunks.put([Chunk(key, payload, checksum(payload)) for key in keys])
    chunks = list(client.chunks.get(keys))
    return "" if [chunk and chunk.payload for chunk in chunks] == [payload, payload] else f"inline chunks: {chunks}"


def _use(asked: dict, transport: str) -> list[str]:
    """What went wrong over one transport."""
    tls = TlsFiles.in_directory(asked["tls"]) if asked["tls"] else None
    config = ClientConfig(asked["endpoint"], transport=transport, timeout_ms=20_000, data_timeout_ms=20_000, tls=tls)
    with Client(config) as client:
        namespace = client.open_namespace(SPEC)
        if namespace.transport.name != transport:
            return [f"the transport is {namespace.transport.name}"]
        name = f"{asked['name']} {transport}"
        client.put_blocks(namespace, _run(name), _blocks(name))
        wrong = [_load(client, namespace, name, locate) for locate in (True, False)]
        wrong += [_load(client, namespace, theirs, True) for theirs in asked["theirs"]]
        wrong.append(_inline(client, namespace, name))
        wrong.append("" if client.rpc.ping().version else "the server tells no version")
        return [each for each in wrong if each]


def main() -> None:
    asked = json.loads(sys.argv[1])
    said: dict[str, object] = {"file": kvpool.__file__, "wrong": [], "error": "", "text": ""}
    try:
        for transport in asked["transports"]:
            said["wrong"] += [f"{transport}: {each}" for each in _use(asked, transport)]
    except KVPoolError as error:
        said |= {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(said))


main()
