"""A client that takes a ticket, writes half of its bytes, says so, and waits to be killed.

Arguments: ENDPOINT SALT TICKET_TTL_MS
"""

import signal
import sys

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.types import ShardRange
from kvpool.transport.base import Buffers, Local, Transfer
from tests.support.values import group_spec, namespace_spec, run_of

CHUNK_BYTES = 4_096


def main() -> None:
    endpoint, salt, ticket_ttl_ms = sys.argv[1:]
    client = Client(
        ClientConfig(endpoint=endpoint, transport="shm", timeout_ms=10_000, ticket_ttl_ms=int(ticket_ttl_ms))
    )
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=CHUNK_BYTES), salt=salt))
    grant = client.rpc.put_start(namespace, [run_of("a", "b")], ShardRange(0, 1))

    def half(first: int, buffers: Buffers) -> None:
        buffers[0][: CHUNK_BYTES // 2] = 0xEE

    namespace.transport.write(Transfer(grant.ticket_id, grant.offsets[:1], CHUNK_BYTES, timeout_s=10.0), Local(half))
    print(grant.ticket_id, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
