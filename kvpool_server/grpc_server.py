"""The gRPC server: the pool's service, health checks and reflection on one port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpool.wire import MAX_MESSAGE_BYTES
from kvpool_server.addresses import cannot_listen, why_not_listening
from kvpool_server.metrics import RpcMetrics
from kvpool_server.rpc_interceptor import RpcInterceptor
from kvpool_server.service import SERVICE_NAME, PoolService, add_service


class GrpcServer:
    """Listens once it is made, serves from `start` to `stop`.

    Args:
        listen: HOST:PORT.

    Attributes:
        port: as bound.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, listen: str, service: PoolService, metrics: RpcMetrics):
        self._service = service
        self._server = grpc.aio.server(
            interceptors=[RpcInterceptor(SERVICE_NAME, metrics)],
            options=[
                ("grpc.so_reuseport", 0),  # Two servers on one port are an error: clients would reach either.
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        add_service(service, self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            self.port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise cannot_listen(listen, "gRPC", "--listen", why_not_listening(listen)) from None

    async def start(self) -> None:
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more calls, and cancels those that have not ended after `grace_s`. Idempotent."""
        await self._health.enter_graceful_shutdown()
        self._service.end_streams()
        await self._server.stop(grace_s)
