"""Streamed lookups against a server that answers well, late, wrongly or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvpool.client import lookup_stream
from kvpool.client.lookup_stream import LookupStream
from kvpool.v1 import pool_pb2 as pb
from kvpool.v1.pool_pb2_grpc import PoolServicer, add_PoolServicer_to_server
from tests.support.processes import wait_for

TIMEOUT_S = 30.0
END, FAIL, SAY_MORE, WAIT, REFUSE, END_ONCE, WAIT_AND_END_ONCE = 1, 2, 3, 4, 5, 6, 7
"""What a server does when a lookup asks for a lease of so many ms; else it answers with that TTL."""


@dataclass(frozen=True)
class Asking:
    """A lookup that asks for a lease of so many ms."""

    ttl_ms: int
    max_reply_bytes: int = 1_000
    padding_bytes: int = 0

    def __call__(self) -> pb.LookupRequest:
        return pb.LookupRequest(lease_ttl_ms=self.ttl_ms, namespace=bytes(self.padding_bytes))


class Whim(PoolServicer):
    """Does as each lookup asks."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ends_after_release = False
        self.num_streams = 0
        self.messages: list[tuple[int, list[int]]] = []
        """Of each message the TTL that it asks for, and the leases that it releases."""

    def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return pb.LookupResponse(boot_token=7, lease_ttl_ms=request.lease_ttl_ms)

    def LookupStream(self, requests: Iterator[pb.LookupRequest], context: Any) -> Iterator[Any]:
        self.num_streams += 1
        for request in requests:
            wish = request.lease_ttl_ms
            self.messages.append((wish, list(request.release)))
            if not wish:  # It only releases.
                if self.ends_after_release:
                    return
                continue
            if wish == END or (wish == END_ONCE and self.num_streams == 1):
                return
            if wish == FAIL:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
            if wish == WAIT_AND_END_ONCE and self.num_streams == 1:
                self.go_on.wait(TIMEOUT_S)
                return
            if wish == WAIT:
                self.go_on.wait(TIMEOUT_S)
            if wish == REFUSE:
                yield pb.LookupReply(error=pb.CallError(code=5, message="not open"))
                continue
            reply = pb.LookupReply(found=self.Lookup(request, context))
            yield reply
            if wish == SAY_MORE:
                yield reply


class Served:
    """A server, and a stream of a channel to it."""

    def __init__(self) -> None:
        self.whim = Whim()
        self.server = grpc.server(ThreadPoolExecutor(8))
        add_PoolServicer_to_server(self.whim, self.server)  # type: ignore[no-untyped-call]
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.lookups = LookupStream(self.channel)

    def ask(self, wish: int, timeout: float = TIMEOUT_S) -> int:
        return int(self.lookups.future(Asking(wish), timeout).result().lease_ttl_ms)

    def code_of(self, wish: int, timeout: float = TIMEOUT_S) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as raised:
            self.ask(wish, timeout)
        code: grpc.StatusCode = raised.value.code()
        return code


def wait_for_readers() -> None:
    wait_for(
        lambda: not any(thread.name == "kvpool-lookups" for thread in threading.enumerate()), "readers that have ended"
    )


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.whim.go_on.set()
    made.lookups.close()
    made.channel.close()
    made.server.stop(None).wait()
    wait_for_readers()


def test_many_threads_get_their_own_answers_over_one_call(served: Served) -> None:
    with ThreadPoolExecutor(16) as threads:
        asked = list(range(100, 1_100))
        assert list(threads.map(served.ask, asked)) == asked
    assert served.whim.num_streams == 1


def test_what_is_sent_before_any_answer_is_answered_in_order(served: Served) -> None:
    pending = [served.lookups.future(Asking(ttl), TIMEOUT_S) for ttl in range(100, 400)]
    assert [each.result().lease_ttl_ms for each in pending] == list(range(100, 400))


def test_a_lookup_that_is_refused_does_not_end_the_stream(served: Served) -> None:
    assert served.code_of(REFUSE) is grpc.StatusCode.NOT_FOUND
    assert served.ask(100) == 100
    assert served.whim.num_streams == 1


@pytest.mark.parametrize(
    ("wish", "code"),
    [(END, grpc.StatusCode.UNAVAILABLE), (FAIL, grpc.StatusCode.RESOURCE_EXHAUSTED)],
    ids=["ended", "failed"],
)
def test_a_stream_that_ends_fails_what_waits_and_the_next_lookup_opens_another(
    served: Served, wish: int, code: grpc.StatusCode
) -> None:
    assert served.ask(100) == 100
    assert served.code_of(wish) is code
    assert served.ask(101) == 101
    assert served.whim.num_streams == (3 if wish == END else 2)


def test_what_a_server_leaves_unanswered_is_asked_once_more(served: Served) -> None:
    pending = [served.lookups.future(Asking(wish), TIMEOUT_S) for wish in (100, END_ONCE, 101)]
    assert [each.result().lease_ttl_ms for each in pending] == [100, END_ONCE, 101]
    assert served.whim.num_streams == 2
    assert served.code_of(END) is grpc.StatusCode.UNAVAILABLE
    assert served.whim.num_streams == 3, "the server left it unanswered twice"


def test_an_old_stream_is_renewed_and_still_answers_what_was_sent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_stream, "RENEW_S", 0.0)
    pending = served.lookups.future(Asking(WAIT), TIMEOUT_S)
    assert served.ask(100) == 100
    assert served.whim.num_streams == 2
    served.whim.go_on.set()
    assert pending.result().lease_ttl_ms == WAIT
    wait_for(lambda: sum(thread.name == "kvpool-lookups" for thread in threading.enumerate()) == 1, "the old one's end")


def test_a_lookup_ends_at_its_deadline_and_a_late_answer_is_nobody_elses(served: Served) -> None:
    assert served.code_of(WAIT, 0.05) is grpc.StatusCode.DEADLINE_EXCEEDED
    served.whim.go_on.set()
    assert served.ask(100) == 100


def test_an_answer_that_nobody_asked_for_ends_the_stream(served: Served) -> None:
    served.ask(SAY_MORE)
    wait_for_readers()
    assert served.ask(100) == 100
    assert served.whim.num_streams == 2


def test_leases_travel_with_the_next_lookup_or_alone_and_once(served: Served) -> None:
    served.lookups.release([1, 2])
    served.lookups.release([3])
    assert served.ask(100) == 100
    assert served.whim.messages == [(100, [1, 2, 3])]
    for lease_id in (4, 5):
        served.lookups.release([lease_id])
        wait_for(lambda lease_id=lease_id: served.whim.messages[-1] == (0, [lease_id]), "the release")  # type: ignore[misc]
    assert served.ask(101) == 101
    assert served.whim.messages[-1] == (101, []) and served.whim.num_streams == 1


def test_leases_whose_release_a_stream_has_not_read_are_released_over_the_next(served: Served) -> None:
    pending = served.lookups.future(Asking(WAIT_AND_END_ONCE), TIMEOUT_S)
    wait_for(lambda: served.whim.messages, "the lookup")
    served.lookups.release([1])
    wait_for(lambda: not served.lookups._stream._released, "the message with the release")  # type: ignore[union-attr]
    served.lookups.release([2])
    served.whim.go_on.set()
    assert pending.result().lease_ttl_ms == WAIT_AND_END_ONCE
    wait_for(lambda: {each for _, ids in served.whim.messages for each in ids} == {1, 2}, "the releases")


def test_a_stream_that_ends_after_a_release_of_its_own_is_not_opened_again_by_itself(served: Served) -> None:
    """A server ends idle streams to make room: streams that replaced each other would never end."""
    served.whim.ends_after_release = True
    assert served.ask(100) == 100
    served.lookups.release([1])
    wait_for(lambda: served.whim.messages[-1] == (0, [1]), "the release")
    wait_for_readers()
    assert served.whim.num_streams == 1
    assert served.ask(101) == 101


def test_closing_releases_leases_that_wait_for_a_lookup(served: Served) -> None:
    assert served.ask(100) == 100
    served.lookups.release([1])
    served.lookups.close()
    wait_for(lambda: served.whim.messages == [(100, []), (0, [1])], "the release")


def test_closing_fails_what_waits_and_a_closed_channel_is_said(served: Served) -> None:
    pending = served.lookups.future(Asking(WAIT), TIMEOUT_S)
    served.lookups.close()
    with pytest.raises(grpc.RpcError) as raised:
        pending.result()
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    served.channel.close()
    with pytest.raises(ValueError, match="closed"):
        served.ask(100)
