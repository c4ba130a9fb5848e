"""The gRPC service: each of its RPCs is served by one of the groups in `kvpool_server/services`."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.v1.pool_pb2_grpc import PoolServicer
from kvpool_server.cache.limits import Limits
from kvpool_server.lookup_streams import LookupStreams
from kvpool_server.method_handlers import METHODS


class PoolService(PoolServicer):
    """Serves one pool.

    A handler is its group's bound method, not a method that calls it: a call costs no more than it would in one class.

    Args:
        limits: of the pool.
        streams: the LookupStream calls under way.
        groups: objects with methods that are named as RPCs are. Each RPC is in exactly one of them.
    """

    def __init__(self, limits: Limits, streams: LookupStreams, groups: Iterable[object]):
        self.max_spec_bytes = limits.max_spec_bytes
        """The largest request of a method that sets what the server keeps."""
        self._streams = streams
        for group in groups:
            for name in METHODS.intersection(dir(group)):
                assert name not in vars(self), f"two groups serve {name}"
                setattr(self, name, getattr(group, name))
        assert vars(self).keys() >= METHODS, f"no group serves {sorted(METHODS - vars(self).keys())}"

    def end_streams(self) -> None:
        """Ends the LookupStream calls, which would otherwise last as long as their clients."""
        self._streams.stop()
