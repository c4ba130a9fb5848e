from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.security.test_access import Deployment
from tests.support.processes import ServerProcess

Deploy = Callable[..., Deployment]


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploy]:
    """Starts deployments: `deploy("--audit-log", ...)`."""
    started: list[ServerProcess] = []

    def deployed(*more: str) -> Deployment:
        def start(*flags: str, **fields: object) -> ServerProcess:
            server = ServerProcess(tmp_path_factory.mktemp("server"), *flags, *more, **fields)  # type: ignore[arg-type]
            started.append(server)
            return server

        return Deployment(tmp_path_factory.mktemp("certificates") / "pki", start)

    try:
        yield deployed
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="module")
def deployment(deploy: Deploy) -> Deployment:
    return deploy()
