from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvpool.security.principal import Role
from tests.support.processes import ServerProcess
from tests.support.secured_server import SecuredServer
from tests.support.values import namespace_spec, payload, run_of


class Deployment(SecuredServer):
    """A server that asks for certificates, and a namespace with a block of each of two tenants."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, stack: ExitStack, *flags: str):
        def start(*flags: str, **fields: object) -> ServerProcess:
            server = ServerProcess(tmp_path_factory.mktemp("server"), *flags, **fields)  # type: ignore[arg-type]
            stack.callback(server.stop)
            return server

        super().__init__(tmp_path_factory.mktemp("certificates"), start, "--memory", "16MiB", *flags)
        self.fingerprints = {tenant: self.store(tenant) for tenant in ("acme", "umbra")}

    def store(self, tenant: str) -> bytes:
        with self.client(Role.ENGINE_WRITE, tenant) as client:
            namespace = client.open_namespace(namespace_spec(tenant=tenant))
            client.put_blocks(namespace, run_of("block"), [payload(tenant, 256)])
            return namespace.fingerprint


Deploy = Callable[..., Deployment]


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploy]:
    """Starts deployments: `deploy("--limit", ...)`."""
    with ExitStack() as stack:
        yield lambda *flags: Deployment(tmp_path_factory, stack, *flags)


@pytest.fixture(scope="module")
def deployment(deploy: Deploy) -> Deployment:
    return deploy()
