"""Fills a server that pages describe: `python -m tests.support.pool_traffic` at KVPOOL_ENDPOINT.

Two namespaces, which differ in one field, get the blocks of one prompt, whose tokens are written to prompt.json. The
program prints the first characters of the two fingerprints.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from kvpool import BlockRun, Client, ClientConfig, GroupSpec, NamespaceSpec, TlsFiles, block_hashes

TOKENS = list(range(1_000))
BLOCK_TOKENS = 16


def main() -> None:
    """Stores the prompt and looks it up, twice."""
    run = BlockRun(group_idx=0, block_hashes=block_hashes(TOKENS, block_tokens=BLOCK_TOKENS))
    blocks = [np.full(4_096, nth, dtype=np.uint8) for nth in range(len(run))]
    Path("prompt.json").write_text(json.dumps(TOKENS))
    group = GroupSpec("full_attention", BLOCK_TOKENS, 1, 64, 64, num_shards=1, chunk_bytes=4_096)
    tls = os.environ.get("KVPOOL_TLS")
    tenant = {} if tls else {"tenant": "acme"}
    names = []
    endpoint = os.environ["KVPOOL_ENDPOINT"]
    with Client(ClientConfig(endpoint, tls=TlsFiles.in_directory(tls) if tls else None)) as client:
        for dtype in ("auto", "fp8"):
            spec = NamespaceSpec("meta-llama/Llama-3.1-8B-Instruct", (group,), kv_cache_dtype=dtype, **tenant)
            namespace = client.open_namespace(spec)
            client.put_blocks(namespace, run, blocks)
            found = client.lookup(namespace, [run])
            client.release([found.lease_id])
            names.append(namespace.fingerprint.hex()[:12])
    print(*names)


if __name__ == "__main__":
    main()
