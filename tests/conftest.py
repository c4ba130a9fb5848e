"""Real servers and clients for every test that talks over gRPC."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, settings

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.messages import PiecedChannel
from kvpool.v1.pool_pb2_grpc import PoolStub
from tests.support.effort import EFFORT
from tests.support.processes import ServerProcess
from vllm_plugin import BEGAN_AT

# `make test` tries the same inputs each time: a change is judged by what it changes. More effort tries new ones.
settings.register_profile(
    "kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=EFFORT == 1
)
settings.load_profile("kvpool")

os.environ[BEGAN_AT] = str(1 << 62)  # Tests make models and, in the same process, engines.
os.umask(0o022)  # Servers refuse files that a group can write, as some users' default has it.

LONG_FILES = (
    "tests/e2e/",
    "tests/identity/",
    "tests/kvpool_server/tiers/mooncake/",
    "tests/security/test_loop.py",
    "tests/simulation/test_adoption_machine.py",
    "tests/simulation/test_connector_machine.py",
    "tests/vllm_plugin/scheduler/test_peer_loads.py",
    "tests/vllm_plugin/test_storms.py",
    "tests/conformance/test_connectors.py",
    "tests/security/test_rotation.py",
    "tests/security/test_hooks.py",
    "tests/security/test_intruder_machine.py",
    "tests/kvpool_server/tiering/test_servers.py",
    "tests/routers/",
    "tests/security/",
    "tests/kvpool_server/",
)
"""Files, or folders of files, that take long, the longest first."""

MORE = (
    "tests/benchmarks/test_soak.py",
    "tests/conformance/",
    "tests/deploy/test_dashboard.py",
    "tests/deploy/test_images.py",
    "tests/deploy/test_rules.py",
    "tests/deploy/test_systemd.py",
    "tests/docsite/",
    "tests/e2e/",
    "tests/examples/",
    "tests/identity/test_oracle.py",
    "tests/kvpool_server/page/test_browser.py",
    "tests/kvpool_server/tiers/mooncake/test_servers.py",
    "tests/kvpool_server/tiers/mooncake/test_tier.py",
    "tests/kvpool_server/test_fairness.py",
    "tests/package/",
    "tests/routers/",
    "tests/security/test_floods.py",
    "tests/security/test_loop.py",
    "tests/skew/test_rolling_restart.py",
    "tests/skew/test_skew.py",
    "tests/testbed/",
)
"""Files, or folders of files, that only `make test-all` runs, but for CLAIMS: each needs minutes, many processes, a
browser, Prometheus, another environment or the previous release."""

CLAIMS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "events", "faults", "features", "images", "parallel", "refusals", "reset", "serve", "shapes", "share", "storm",
        "tiers",
    )
)  # fmt: skip
"""The tests with real vLLM that `make test` runs, one or two for each claim of the README
(docs/explanation/testing.md)."""

PRINTED = "printed"
"""The property under which a test records a line for the end of the run: `record_property(PRINTED, line)`."""

StartServer = Callable[..., ServerProcess]
Connect = Callable[..., Client]


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out. Long files come first: a worker that began one at the end would work alone."""

    def rank(item: pytest.Item) -> int:
        return next((nth for nth, path in enumerate(LONG_FILES) if item.nodeid.startswith(path)), len(LONG_FILES))

    items.sort(key=rank)
    for item in items:
        if item.nodeid.startswith(MORE) and not item.nodeid.startswith(CLAIMS):
            item.add_marker(pytest.mark.more)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many cases of the intruder suite ran, and how many code blocks of the documents."""
    reports = [report for those in terminalreporter.stats.values() for report in those]
    called = [report.nodeid for report in reports if getattr(report, "when", "") == "call"]
    if num_cases := sum(nodeid.startswith("tests/security/") for nodeid in called):
        terminalreporter.write_line(f"security: {num_cases} cases")
    lines = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == PRINTED]
    for line in dict.fromkeys(lines):  # A report of each phase has them.
        terminalreporter.write_line(str(line))
    counted: Counter[str] = Counter()
    for report in reports:
        if getattr(report, "when", "") == "call":
            counted.update({what: count for what, count in report.user_properties if what.startswith("blocks ")})
    if counted:
        told = ", ".join(f"{count} {what.removeprefix('blocks ')}" for what, count in sorted(counted.items()))
        terminalreporter.write_line(f"code blocks of documents: {told}")


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for Unix sockets, whose paths must be short. Other users may enter it, too."""
    with tempfile.TemporaryDirectory(prefix="kvpool-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


class _SharedServer:
    """One server for many tests, each of which finds it empty."""

    def __init__(self, log_dir: Path):
        self._log_dir = log_dir
        self._start()

    def _start(self) -> None:
        self._server = ServerProcess(self._log_dir, "--memory", "64MiB", "--grace-ms", "100")
        self._client = Client(ClientConfig(endpoint=self._server.endpoint, timeout_ms=60_000))

    def stop(self) -> None:
        self._client.close()
        self._server.stop()

    def emptied(self) -> ServerProcess:
        """The server, or a new one where a test has left leases: its arena has four extents, and blocks of one size
        take one at least, so that a few leased blocks leave none for another size.
        """
        self._client.admin.clear()
        stats = self._client.admin.stats()
        if stats.free_bytes < stats.arena_bytes:
            self.stop()
            self._start()
        return self._server


@pytest.fixture(scope="session")
def _shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_SharedServer]:
    shared = _SharedServer(tmp_path_factory.mktemp("shared"))
    yield shared
    shared.stop()


@pytest.fixture
def shared_server(_shared_server: _SharedServer) -> ServerProcess:
    """One server for all tests that neither kill it nor fill it, which each finds empty."""
    return _shared_server.emptied()


@pytest.fixture
def pool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers of the test's own: `pool_server("--grace-ms", "100")`."""
    log_dir = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        def start(*flags: str, environment: Mapping[str, str] = {}, **client: Any) -> ServerProcess:
            server = ServerProcess(log_dir, *flags, environment=environment, **client)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients of a server: `connect(server, transport="shm", ticket_ttl_ms=100)`."""
    with ExitStack() as stack:

        def make(server: ServerProcess, **config: object) -> Client:
            # On a busy machine a process that is alive may say nothing for seconds.
            defaults = {"timeout_ms": 10_000, "data_timeout_ms": 10_000, "stall_timeout_ms": 5_000}
            return stack.enter_context(Client(ClientConfig(endpoint=server.endpoint, **{**defaults, **config})))

        yield make


@pytest.fixture
def shm_client(shared_server: ServerProcess, connect: Connect) -> Client:
    return connect(shared_server, transport="shm")


@pytest.fixture(params=["shm", "tcp"])
def client(request: pytest.FixtureRequest, shared_server: ServerProcess, connect: Connect) -> Client:
    """A client of the shared server, once for each transport."""
    return connect(shared_server, transport=request.param)


@pytest.fixture
def stub(shared_server: ServerProcess) -> Iterator[PoolStub]:
    """The bare gRPC stub, for requests that `Client` would not send."""
    with grpc.insecure_channel(shared_server.endpoint) as channel:
        yield PoolStub(PiecedChannel(channel))  # type: ignore[no-untyped-call]
