"""The connection: nobody waits for it, and it heals itself."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import transport_choice as choice
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.rpc import Namespace
from kvpool.protocol.errors import (
    DrainingError,
    KVPoolError,
    PoolTimeoutError,
    UnavailableError,
)
from kvpool.protocol.types import ShardRange
from kvpool.transport.shm import ShmTransport
from testbed.ports import free_endpoint
from tests.conftest import StartServer
from tests.support.faults import stopped
from tests.support.kept_server import KeptServer
from tests.support.memory_files import mapped_bytes
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, payload, run_of
from tests.support.workers import workers_stopped
from vllm_plugin import session as session_module
from vllm_plugin.metrics import Recorder
from vllm_plugin.session import FAILURES_TO_OPEN, OPEN_TIMEOUT_MS, Session, State

Open = Callable[..., Session]
AT_ONCE_S = 5.0
"""On a busy machine, too."""
TIMEOUT_MS = 300
HEALED_S = 60.0
STOPPED_S = 3.0
"""What a call with a deadline of `TIMEOUT_MS` takes at most on a busy machine."""


@pytest.fixture
def open_session() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(endpoint: str, **config: Any) -> Session:
            recorder = config.pop("recorder", None)
            config = {"timeout_ms": 5_000, **config}  # A busy machine may be slow to answer.
            session = Session(ClientConfig(endpoint, **config), namespace_spec(), f"test {random.random()}", recorder)
            stack.callback(session.close)
            return session

        yield make


def session_threads() -> list[threading.Thread]:
    """Threads of the sessions that tests have opened and that are not closed."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvpool-session-test")]


def is_open(session: Session) -> bool:
    return session.namespace is not None


def arena_inode(session: Session) -> int:
    """Of the memory that an open session shares with its server."""
    choice = session.client.attachment.choice
    assert choice is not None and isinstance(choice.transport, ShmTransport)
    return os.fstat(choice.transport.segment.fd).st_ino


def wait_until_open(session: Session) -> None:
    wait_for(lambda: is_open(session), "the session to be open", HEALED_S)


def test_a_session_leaves_grpc_once_the_data_port_answers_and_logs_both_ways(
    open_session: Open, pool_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(session_module, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(choice, "RETRY_S", (0.05, 0.05))
    monkeypatch.setattr(choice, "PROVE_S", 0.5)
    server, recorder = pool_server(), Recorder()
    told: list[str] = []
    with workers_stopped(server):
        session = open_session(server.endpoint, transport="network", stall_timeout_ms=5_000, recorder=recorder)
        wait_until_open(session)
        session.when_open(lambda opened: told.extend([] if opened is None else [opened.transport.name]))
        slow = session.namespace
        assert slow is not None and slow.transport.name == "grpc"
    wait_for(lambda: told == ["grpc", "tcp"], "the data port to be used")
    fast = session.namespace
    assert fast is not None and (fast.transport.name, fast.boot_token) == ("tcp", slow.boot_token)
    for namespace in (slow, fast):  # Callers may still be at work with the slow one.
        run = run_of(namespace.transport.name)
        session.client.put_blocks(namespace, run, [payload(1, 256)])
        lease_id = session.client.lookup(namespace, [run]).lease_id
        assert session.client.get_blocks(namespace, lease_id, run)[0] is not None
    taken = recorder.take()
    assert taken is not None and taken.data["connected_grpc"] == taken.data["connected_tcp"] == 1

    def logged() -> list[logging.LogRecord]:
        return [each for each in caplog.records if f"kvpool at {server.endpoint}, " in each.getMessage()]

    wait_for(lambda: len(logged()) == 2, "the log of the second transport")
    said = logged()
    assert [each.levelname for each in said] == ["WARNING", "INFO"]
    assert "transport grpc (slow: " in said[0].getMessage()
    assert "transport tcp over the data port 127.0.0.1:" in said[1].getMessage()


def count_attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The endpoints that sessions try to open from now on."""
    attempts: list[str] = []
    opening = Client.open_namespace

    def count_and_open(self: Client, *args: Any, **kwargs: Any) -> Any:
        attempts.append(self.config.endpoint)
        return opening(self, *args, **kwargs)

    monkeypatch.setattr(Client, "open_namespace", count_and_open)
    return attempts


def test_a_server_that_drains_is_left_with_one_line_of_log_and_its_successor_found(
    open_session: Open,
    pool_server: StartServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "MAX_RETRY_S", 0.25)
    endpoint = free_endpoint()
    server = pool_server("--listen", endpoint, "--drain-ms", "60000")
    session, run = open_session(endpoint), run_of("a")
    wait_until_open(session)
    namespace = session.namespace
    session.client.put_blocks(namespace, run, [payload("a", namespace.group(0).slot_bytes)])
    lease_id = session.client.lookup(namespace, [run]).lease_id
    session.client.admin.drain()
    with pytest.raises(DrainingError) as refused:
        session.client.rpc.put_start(namespace, [run_of("b")], ShardRange(0, 1))
    session.report(refused.value, "store")
    assert session.namespace is namespace
    (block,) = session.client.get_blocks(namespace, lease_id, run)
    assert block is not None, "a load that was granted is lost"
    with pytest.raises(DrainingError) as refused:
        session.client.lookup(namespace, [run])
    session.report(refused.value, "lookup")
    assert session.namespace is None
    attempts = count_attempts(monkeypatch)
    wait_for(lambda: len(attempts) >= 4, "four probes that are refused")
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1 and "the server is draining" in warnings[0], warnings
    session.client.release([lease_id])
    assert server.wait(30) == 0
    pool_server("--listen", endpoint)
    wait_for(lambda: is_open(session), "the session to find the new server", HEALED_S)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) <= 3, warnings  # It drains, it cannot be reached, and perhaps a call was broken off.


def test_a_stopped_server_costs_each_request_its_budget_at_most_and_soon_nothing(
    open_session: Open, pool_server: StartServer
) -> None:
    server = pool_server()
    session = open_session(server.endpoint, timeout_ms=TIMEOUT_MS)
    wait_until_open(session)
    costs_s, num_calls = [], 0
    with stopped(server):
        ends_at = time.monotonic() + STOPPED_S
        while time.monotonic() < ends_at:
            started = time.monotonic()
            if (namespace := session.namespace) is not None:
                num_calls += 1
                with pytest.raises(KVPoolError) as raised:
                    session.client.lookup(namespace, [run_of("nothing")])
                session.report(raised.value, "lookup")
            costs_s.append(time.monotonic() - started)
            time.sleep(0.01)
        assert session._breaker.state is not State.CLOSED
    assert 1 <= num_calls <= FAILURES_TO_OPEN
    # A lookup without a deadline would wait until the server goes on. (The median: a busy machine pauses now and then.)
    assert max(costs_s) < STOPPED_S - 1
    assert statistics.median(costs_s) < TIMEOUT_MS / 10_000

    def is_answered() -> bool:
        if (namespace := session.namespace) is None:
            return False
        with suppress(KVPoolError):
            return session.client.lookup(namespace, [run_of("nothing")]).hits[0].num_leading == 0
        return False

    wait_for(is_answered, "an answer of the server that goes on", HEALED_S)


def test_probes_that_are_answered_late_do_not_close_it(
    open_session: Open, pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The namespace opens, for that may take long; a lookup would not have its answer in time."""
    server = pool_server()
    opened, stops = threading.Semaphore(0), iter(range(2))
    opening = Client.open_namespace

    def open_then_stop(self: Client, *args: Any, **kwargs: Any) -> Any:
        namespace = opening(self, *args, **kwargs)
        if next(stops, None) is not None:
            os.kill(server.pid, signal.SIGSTOP)
            opened.release()
        return namespace

    monkeypatch.setattr(Client, "open_namespace", open_then_stop)
    session = open_session(server.endpoint, timeout_ms=TIMEOUT_MS)
    for _ in range(2):
        assert opened.acquire(timeout=HEALED_S)
        try:
            wait_for(lambda: session._breaker.state is not State.HALF_OPEN, "the end of the probe")
            assert session._breaker.state is State.OPEN and not is_open(session)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    wait_until_open(session)


def test_each_opening_is_counted_and_calls_the_listener(open_session: Open, pool_server: StartServer) -> None:
    endpoint, recorder = free_endpoint(), Recorder()
    session = open_session(endpoint, recorder=recorder)
    told: list[Namespace] = []
    session.when_open(lambda opened: told.extend([] if opened is None else [opened]))

    def counted() -> dict[str, int]:
        taken = recorder.take()
        return {} if taken is None else taken.data

    assert told == [] and counted() == {"breaker_open": 1}
    server = pool_server("--listen", endpoint)
    wait_for(lambda: told, "the first opening")
    assert counted() == {"breaker_open": 0, "connected_shm": 1} and counted() == {}
    server.kill()
    session.report(UnavailableError("gone"), "store")
    session.report(UnavailableError("gone"), "load")
    assert counted() == {"breaker_open": 1, "breaker_openings": 1} and counted() == {"breaker_open": 1}
    pool_server("--listen", endpoint)
    wait_for(lambda: len(told) == 2, "the second opening")
    assert told[0].boot_token != told[1].boot_token
    assert counted() == {"breaker_open": 0, "connected_shm": 1}
    late: list[Namespace | None] = []
    session.when_open(late.append)
    assert late == [told[1]]


@pytest.mark.parametrize("server_is", ["absent", "stopped"])
def test_closing_is_quick_whatever_the_server_does(
    server_is: str, open_session: Open, pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pool_server()
    with stopped(server):
        attempts = count_attempts(monkeypatch)
        session = open_session(server.endpoint if server_is == "stopped" else free_endpoint())
        wait_for(lambda: attempts, "an attempt to open the namespace")
        started = time.monotonic()
        session.close()
        assert time.monotonic() - started < OPEN_TIMEOUT_MS / 1000 + AT_ONCE_S
        assert not session_threads()


def test_an_idle_session_notices_a_restart_and_lets_go_of_the_old_memory(
    open_session: Open, pool_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No job comes: a successor may be waiting for the memory, which the listener (as a copier does) maps, too."""
    monkeypatch.setattr(session_module, "PING_EVERY_S", 0.1)
    held: list[object] = []

    def hold(opened: Namespace | None) -> None:
        held[:] = [] if opened is None else [opened.transport.memory]

    server = pool_server()
    session = open_session(server.endpoint, transport="shm", timeout_ms=TIMEOUT_MS)
    session.when_open(hold)
    wait_until_open(session)
    before, inode = session.namespace, arena_inode(session)
    wait_for(lambda: held and mapped_bytes(inode), "the listener to hold the memory")
    server.kill()
    wait_for(lambda: session.namespace is None and not mapped_bytes(inode), "the old memory to be let go", HEALED_S)
    pool_server("--listen", server.endpoint)
    wait_for(lambda: is_open(session) and session.namespace is not before, "the new server to be found", HEALED_S)
    wait_for(lambda: held, "the listener to hold the new memory")
    inode = arena_inode(session)
    held.clear()
    session.close()
    wait_for(lambda: not mapped_bytes(inode), "a closed session to let go of the memory")


def test_kept_memory_is_let_go_however_long_the_breaker_waits(
    open_session: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "FIRST_WAIT_S", session_module.MAX_FLAP_WAIT_S)
    for module in (choice, session_module):
        monkeypatch.setattr(module, "KEPT_S", 0.2)
    with closing(KeptServer(tmp_path)) as server:
        server.connect().close()
        session = open_session(server.endpoint, transport="shm")
        wait_until_open(session)
        inode = arena_inode(session)
        assert mapped_bytes(inode)
        for _ in range(FAILURES_TO_OPEN):
            session.report(PoolTimeoutError("too slow"), "load")
        wait_for(lambda: not mapped_bytes(inode), "the kept memory to be let go", session_module.MAX_FLAP_WAIT_S / 4)
        assert session._breaker.state is State.OPEN


def test_whatever_goes_wrong_the_session_goes_on_trying(
    open_session: Open, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = Client.open_namespace
    failures = iter([RuntimeError("can't start new thread"), OSError(12, "Cannot allocate memory")])

    def fail_twice(self: Client, *args: Any, **kwargs: Any) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return opening(self, *args, **kwargs)

    monkeypatch.setattr(Client, "open_namespace", fail_twice)
    wait_until_open(open_session(shared_server.endpoint))


def _reasons(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [
        record for record in caplog.records if record.message.startswith(f"{name}: ") and "because" in record.message
    ]


def test_engines_learn_why_the_blocks_of_another_namespace_are_not_read(
    pool_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was there first, too; it is warned while it has no hits."""
    monkeypatch.setattr(session_module, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(session_module, "EXPLAIN_EVERY_S", 0.0)
    salt = "nobody else's business"
    endpoint, spec = pool_server().endpoint, namespace_spec(model="akin", salt=salt, kv_cache_dtype="auto")
    caplog.set_level("INFO")
    with ExitStack() as stack:

        def start(name: str, **fields: Any) -> Session:
            config = ClientConfig(endpoint, timeout_ms=5_000)
            session = Session(config, replace(spec, **fields), name, explains=not name.startswith("worker"))
            stack.callback(session.close)
            wait_until_open(session)
            return session

        first = start("first")
        start("worker of the first")
        start("second", kv_cache_dtype="fp8", salt="mine", revision="r" * 300)
        wait_for(lambda: _reasons(caplog, "first"), "the first engine to hear of the second")
        (warning,) = _reasons(caplog, "first")
        assert warning.levelname == "WARNING"
        wait_for(lambda: _reasons(caplog, "second"), "the second engine to hear of the first")
        (said,) = _reasons(caplog, "second")
        host = re.escape(socket.gethostname())
        assert re.search(
            rf"because revision differs in {first.namespace.fingerprint.hex()[:12]} \(opened by {host}, \d+ s ago\); "
            r"kv_cache_dtype: 'fp8' here, 'auto' in it; salt differs in it$",
            said.message,
        )
        # One that has hits is only told, and of what it has been told it is told no more.
        first.client.put_blocks(first.namespace, run_of("a"), [bytes(first.namespace.spec.groups[0].slot_bytes)])
        first.client.lookup(first.namespace, [run_of("a")])
        start("third", kv_cache_dtype="fp8_e5m2", salt="mine", revision="r")
        start("fourth", model_dtype="float16")
        wait_for(lambda: len(_reasons(caplog, "first")) == 2, "the first engine to hear of the fourth")
        told = _reasons(caplog, "first")[1]
        assert told.levelname == "INFO" and "model_dtype: '' here, 'float16' in " in told.message
        assert not _reasons(caplog, "worker of the first")
        assert salt not in caplog.text


def test_closing_while_the_answer_arrives_leaves_no_thread_waiting(
    open_session: Open, shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has its answer, `close` runs, then the thread says that the namespace is open."""
    monkeypatch.setattr(session_module, "PING_EVERY_S", 600.0)  # So long a thread would wait that has missed its end.
    session = open_session(shared_server.endpoint)
    wait_until_open(session)
    answered, closing = threading.Event(), threading.Event()
    opens = session.client.open_namespace

    def slow(*args: Any, **kwargs: Any) -> Any:
        namespace = opens(*args, **kwargs)
        answered.set()
        assert closing.wait(HEALED_S)
        return namespace

    session.client.open_namespace = slow  # type: ignore[method-assign]
    session.report(UnavailableError("gone"))
    assert answered.wait(HEALED_S)
    close, began = session.client.close, threading.Event()

    def begin_to_close() -> None:
        began.set()
        close()

    session.client.close = begin_to_close  # type: ignore[method-assign]
    closer = threading.Thread(target=session.close)
    closer.start()
    assert began.wait(HEALED_S)
    closing.set()
    wait_for(lambda: not session_threads(), "the thread to end")
    assert session.namespace is None
    closer.join(HEALED_S)
    assert not closer.is_alive()
