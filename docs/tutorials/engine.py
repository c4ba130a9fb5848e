"""Stands for an engine in the tutorials: asks the pool for a prompt's KV blocks, and stores those that it lacks.

The bytes are made up; calls, hashes, checksums and transports are those that vLLM's connector uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

from kvpool import BlockRun, Client, ClientConfig, GroupSpec, KVPoolError, NamespaceSpec, TlsFiles, block_hashes

BLOCK_TOKENS = 16
CHUNK_BYTES = 64 * 1024
"""Of one block: layers x tokens x heads x (key and value) x bytes of an element, for a model of four small layers."""

PATIENCE_S = 10.0
"""How long to wait for blocks on their way up from a tier."""


def serve(client: Client, model: str, tenant: str, tokens: list[int]) -> str:
    """Loads the blocks of a prompt that the pool has, stores the others, and says how many of each there were."""
    group = GroupSpec("full_attention", BLOCK_TOKENS, 4, 64, 64, num_shards=1, chunk_bytes=CHUNK_BYTES)
    namespace = client.open_namespace(NamespaceSpec(model, (group,), tenant=tenant))
    run = BlockRun(0, block_hashes(tokens, block_tokens=BLOCK_TOKENS))
    ends_at = time.monotonic() + PATIENCE_S
    while (found := client.lookup(namespace, [run])).retry_after_ms and time.monotonic() < ends_at:
        client.release([found.lease_id])
        time.sleep(found.retry_after_ms / 1000)
    num_hit = found.hits[0].num_leading
    if num_hit:
        hit = BlockRun(0, run.block_hashes[:num_hit])
        loaded = client.get_blocks(namespace, found.lease_id, hit)
        assert all(np.array_equal(a, b) for a, b in zip(loaded, _computed(num_hit), strict=True))
    client.release([found.lease_id])
    result = client.put_blocks(namespace, run, _computed(len(run)))
    return (
        f"by {namespace.transport.name}: {num_hit} of {len(run)} blocks loaded, "
        f"{result.receipt.num_complete} computed and stored"
    )


def _computed(num_blocks: int) -> list[np.ndarray]:
    """What a model would compute: equal for equal prompts."""
    return [np.random.default_rng(nth).integers(0, 256, CHUNK_BYTES, dtype=np.uint8) for nth in range(num_blocks)]


def main() -> None:
    """Serves one prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default=os.environ.get("KVPOOL_ENDPOINT", "127.0.0.1:50051"))
    parser.add_argument("--tls", type=Path, help="directory with ca.crt, tls.crt and tls.key")
    parser.add_argument("--model", default="tutorial")
    parser.add_argument("--tenant", default="", help="with --tls the certificate's")
    parser.add_argument("--tokens", type=int, default=1_000, help="length of the prompt")
    asked = parser.parse_args()
    config = ClientConfig(asked.endpoint, tls=TlsFiles.in_directory(asked.tls) if asked.tls else None)
    try:
        with Client(config) as client:
            print(serve(client, asked.model, asked.tenant, list(range(asked.tokens))))
    except KVPoolError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
