"""The connection: nobody waits for it, and it heals itself."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.errors import (
    ChecksumError,
    KVPoolError,
    LeaseExpiredError,
    OutOfSpaceError,
    PoolTimeoutError,
    UnavailableError,
    UnknownNamespaceError,
)
from tests.conftest import StartServer
from tests.support.processes import ServerProcess, wait_for
from tests.support.values import namespace_spec, run_of
from tests.vllm_plugin.faults import free_endpoint, stopped
from vllm_plugin.session import OPEN_TIMEOUT_MS, TIMEOUTS_TO_DOWN, Session

Open = Callable[..., Session]
AT_ONCE_S = 0.5
TIMEOUT_MS = 300
HEALED_S = 15.0


@pytest.fixture
def open_session() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(endpoint: str, **config: Any) -> Session:
            session = Session(ClientConfig(endpoint, **config), namespace_spec(), f"test {random.random()}")
            stack.callback(session.close)
            return session

        yield make


def is_open(session: Session) -> bool:
    return session.namespace is not None


def wait_until_open(session: Session) -> None:
    wait_for(lambda: is_open(session), "the session to be open", HEALED_S)


def test_a_session_opens_by_itself(open_session: Open, shared_server: ServerProcess) -> None:
    session = open_session(shared_server.endpoint)
    wait_until_open(session)
    assert session.client.lookup(session.namespace, [run_of("nothing")]).hits[0].num_leading == 0


def test_an_absent_server_holds_nobody_up_and_is_found_when_it_comes(
    open_session: Open, pool_server: StartServer
) -> None:
    endpoint = free_endpoint()
    started = time.monotonic()
    session = open_session(endpoint)
    assert session.namespace is None
    assert time.monotonic() - started < AT_ONCE_S
    time.sleep(0.6)  # Two attempts have failed by now.
    assert session.namespace is None
    pool_server("--listen", endpoint)
    wait_until_open(session)


def test_a_restarted_server_is_opened_again(open_session: Open, pool_server: StartServer) -> None:
    server = pool_server()
    session = open_session(server.endpoint)
    wait_until_open(session)
    before = session.namespace
    server.kill()
    pool_server("--listen", server.endpoint)

    def call_fails() -> bool:
        try:
            session.client.lookup(before, [run_of("nothing")])
        except KVPoolError as error:
            session.report(error)
            return isinstance(error, UnknownNamespaceError)
        return False

    wait_for(call_fails, "the new server to refuse the old namespace", HEALED_S)
    wait_until_open(session)
    assert session.namespace.boot_token != before.boot_token
    assert session.client.lookup(session.namespace, [run_of("nothing")]).hits[0].num_leading == 0


@pytest.mark.parametrize("error", [UnavailableError("gone"), UnknownNamespaceError("restarted")])
def test_an_error_that_means_the_pool_is_gone_ends_the_namespace_at_once(
    error: KVPoolError, open_session: Open, pool_server: StartServer
) -> None:
    server = pool_server()
    session = open_session(server.endpoint)
    wait_until_open(session)
    server.kill()
    session.report(error)
    assert session.namespace is None


@pytest.mark.parametrize("error", [OutOfSpaceError("full"), LeaseExpiredError("late"), ChecksumError("bad")])
def test_an_error_of_one_call_does_not(error: KVPoolError, open_session: Open, shared_server: ServerProcess) -> None:
    session = open_session(shared_server.endpoint)
    wait_until_open(session)
    for _ in range(2 * TIMEOUTS_TO_DOWN):
        session.report(error)
    assert is_open(session)


def test_timeouts_in_a_row_end_the_namespace_and_a_success_between_them_does_not(
    open_session: Open, pool_server: StartServer
) -> None:
    server = pool_server()
    session = open_session(server.endpoint)
    wait_until_open(session)
    late = PoolTimeoutError("late")
    for _ in range(TIMEOUTS_TO_DOWN - 1):
        session.report(late)
    session.report(None)
    with stopped(server):  # So that it is not open again before it is looked at.
        for _ in range(TIMEOUTS_TO_DOWN - 1):
            session.report(late)
        assert is_open(session)
        session.report(late)
        assert not is_open(session)
    wait_until_open(session)


def test_closing_ends_the_thread(open_session: Open, shared_server: ServerProcess) -> None:
    session = open_session(shared_server.endpoint)
    wait_until_open(session)
    session.close()
    assert not session._thread.is_alive()
    assert session.namespace is None
    session.close()


@pytest.mark.parametrize("server_is", ["absent", "stopped"])
def test_closing_is_quick_whatever_the_server_does(
    server_is: str, open_session: Open, pool_server: StartServer
) -> None:
    server = pool_server()
    with stopped(server):
        session = open_session(server.endpoint if server_is == "stopped" else free_endpoint())
        time.sleep(0.3)
        started = time.monotonic()
        session.close()
        assert time.monotonic() - started < OPEN_TIMEOUT_MS / 1000 + 0.5
        assert not session._thread.is_alive()


def test_closing_while_the_answer_arrives_leaves_no_thread_waiting(
    open_session: Open, shared_server: ServerProcess
) -> None:
    """The thread has its answer, `close` runs, then the thread says that the namespace is open."""
    session = open_session(shared_server.endpoint)
    wait_until_open(session)
    answered, closing = threading.Event(), threading.Event()
    opens = session.client.open_namespace

    def slow(*args: Any, **kwargs: Any) -> Any:
        namespace = opens(*args, **kwargs)
        answered.set()
        assert closing.wait(5)
        return namespace

    session.client.open_namespace = slow  # type: ignore[method-assign]
    session.report(UnavailableError("gone"))
    assert answered.wait(5)
    closer = threading.Thread(target=session.close)
    closer.start()
    wait_for(session._closed.is_set, "close to have begun")
    closing.set()
    session._thread.join(1)
    assert not session._thread.is_alive()
    assert session.namespace is None
    closer.join(5)
    assert not closer.is_alive()


def _mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def test_an_idle_session_notices_a_restart_and_lets_go_of_the_old_memory(
    open_session: Open, pool_server: StartServer
) -> None:
    """Nobody calls: a successor may be waiting for the memory that the dead server's engines still map."""
    server = pool_server()
    session = open_session(server.endpoint, transport="shm", timeout_ms=TIMEOUT_MS)
    wait_until_open(session)
    before = session.namespace
    path = session.client._transport._segment.path
    assert _mapped(path)
    server.kill()
    wait_for(lambda: session.namespace is None and not _mapped(path), "the old memory to be let go", HEALED_S)
    pool_server("--listen", server.endpoint)
    wait_for(lambda: is_open(session) and session.namespace is not before, "the new server to be found", HEALED_S)


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
