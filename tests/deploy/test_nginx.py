"""nginx before a server, with the configuration that is shipped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from kvpool.client.client import Client
from kvpool.protocol.errors import UnavailableError
from kvpool.protocol.wire import RETRY_KEY
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolStub
from tests.conftest import StartServer
from tests.support.certificates import files_in
from tests.support.nginx import SHIPPED, Nginx
from tests.support.secured_server import SecuredServer
from tests.support.values import group_spec, namespace_spec, payload, run_of

MOST_CALLS = int(SHIPPED.read_text().partition("limit_conn kvpool_caller_calls ")[2].partition(";")[0])


class Field(NamedTuple):
    secured: SecuredServer
    nginx: Nginx


@pytest.fixture
def field(tmp_path: Path, pool_server: StartServer) -> Iterator[Field]:
    secured = SecuredServer(tmp_path, pool_server, proof="tokens")
    files = files_in(Path(secured.ca).parent)
    with contextlib.closing(Nginx(tmp_path, secured.server.endpoint, files)) as nginx:
        yield Field(secured, nginx)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_an_engine_reaches_its_server_through_nginx(field: Field, transport: str) -> None:
    config = field.secured.config(
        field.nginx.endpoint, **field.secured.identity(Role.ENGINE_WRITE), transport=transport
    )
    with Client(config) as client:
        namespace = client.open_namespace(namespace_spec(group_spec(), tenant="acme"))
        run, blocks = run_of("a", "b"), [payload(name, group_spec().slot_bytes) for name in ("a", "b")]
        client.put_blocks(namespace, run, blocks)
        found = client.lookup(namespace, [run])
        loaded = client.get_blocks(namespace, found.lease_id, run)
        assert all(np.array_equal(*pair) for pair in zip(loaded, blocks, strict=True))


def test_a_server_that_is_gone_is_one_sentence(field: Field) -> None:
    identity = field.secured.identity(Role.OPERATOR)
    field.secured.server.kill()
    with (
        Client(field.secured.config(field.nginx.endpoint, **identity)) as client,
        pytest.raises(UnavailableError, match="nginx cannot reach the server"),
    ):
        client.admin.ping()


def test_a_caller_beyond_its_calls_is_refused_and_another_is_not(field: Field) -> None:
    credentials = grpc.ssl_channel_credentials(Path(field.secured.ca).read_bytes())
    engine, reader = (
        (("authorization", f"Bearer {field.secured.tokens[role]}"),) for role in (Role.ENGINE_WRITE, Role.ENGINE_READ)
    )

    async def call() -> grpc.RpcError:
        """The refusal."""
        async with AsyncExitStack() as stack:

            async def pool() -> PoolStub:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = grpc.aio.secure_channel(field.nginx.endpoint, credentials, options)
                return PoolStub(await stack.enter_async_context(channel))

            one, streams, refused = await pool(), list[Any](), None
            async with asyncio.timeout(20):
                while refused is None:
                    streams.append((await pool()).LookupStream(timeout=60, metadata=engine))
                    try:
                        await one.Ping(pb.PingRequest(), metadata=engine)
                    except grpc.RpcError as error:
                        refused = error
                await one.Ping(pb.PingRequest(), metadata=reader)
            # nginx counts a call that has ended for a moment.
            assert len(streams) > MOST_CALLS / 2 and not any(stream.done() for stream in streams[: MOST_CALLS // 2])
            return refused

    refused = asyncio.run(call())
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "too many calls of this caller" in refused.details()
    assert dict(refused.trailing_metadata())[RETRY_KEY] == "500"
