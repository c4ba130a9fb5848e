"""What operators see: names that spoil a terminal, and messages of KV events that are none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq
from typer.testing import CliRunner

from kvpool import cli
from kvpool.client import events
from kvpool.client.config import ClientConfig
from kvpool.commands import common
from kvpool.protocol.errors import InvalidReplyError
from kvpool.protocol.types import Quota
from tests.support.lying_pool import LyingPool
from tests.support.processes import wait_for
from tests.support.values import namespace_spec


def test_markup_in_names_breaks_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = LyingPool()
    for nth in range(2):
        spec = namespace_spec(
            model="[/bold]\n\x1b[2Jmodel [red]", tenant="[/tenant]", salt=f"{nth}", extra=(("[/k]", f"[/{nth}]"),)
        )
        pool.pool.open_namespace(spec, b"", "[/host]")
    pool.pool.set_quotas([Quota("tenant:[/tenant]", 1 << 20)])
    monkeypatch.setattr(common, "client_of", lambda *_: pool.client(ClientConfig()))
    names = [each.fingerprint.hex() for each in pool.pool.open_namespaces()]
    runner = CliRunner()
    for command in (["namespaces"], ["namespaces", "--diff", *names], ["quota"], ["stats"]):
        result = runner.invoke(cli.app, command)
        assert result.exit_code == 0, f"{command}: {result.output} {result.exception!r}"
        assert "\x1b[2J" not in result.output
        if command != ["stats"]:
            assert "[/" in result.output


def frames(payload: bytes, topic: bytes = b"t@f@m", seq: bytes = bytes(8)) -> list[bytes]:
    return [topic, seq, payload]


BATCH = msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0])


@pytest.mark.parametrize(
    "message",
    [
        [], frames(BATCH)[:2], [*frames(BATCH), b""], frames(BATCH, seq=bytes(7)), frames(BATCH, topic=b"\xff"),
        frames(BATCH, topic=bytes(1_025)), frames(b"\x91" * 100_000), frames(b"\xdd\xff\xff\xff\xff"),
        frames(msgspec.msgpack.encode([1.0, [1]])), frames(msgspec.msgpack.encode(["now", []])),
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_no_message_of_events_is_an_error(message: list[bytes]) -> None:
    with pytest.raises(InvalidReplyError):
        events._decode(message)
    sound = events._decode(frames(BATCH))
    assert (sound.topic, sound.seq, sound.events) == ("t@f@m", 0, [{"type": "BlockStored"}])


def test_a_frame_that_is_too_large_is_the_last_of_its_server() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with events.Subscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            assert wait_for(lambda: _heard(publisher, subscriber, frames(BATCH)), "a message")
            publisher.send_multipart(frames(bytes(events.MAX_FRAME_BYTES + 1), seq=b"\0" * 7 + b"\1"))
            assert not _heard(publisher, subscriber, frames(BATCH, seq=b"\0" * 7 + b"\2"))


def _heard(publisher: Any, subscriber: events.Subscriber, message: list[bytes]) -> list[events.EventMessage]:
    publisher.send_multipart(message)
    return subscriber.receive(timeout_ms=200)


def test_a_replay_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REPLAY_BYTES", 1_000)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with (
            ThreadPoolExecutor(1) as thread,
            events.Subscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}") as subscriber,
        ):
            replayed = thread.submit(subscriber.replay, 0)
            client = router.recv_multipart()[0]
            for _ in range(100):
                router.send_multipart([client, b"", *frames(BATCH)])
            with pytest.raises(InvalidReplyError, match="more than 1000 bytes"):
                replayed.result(timeout=10)
