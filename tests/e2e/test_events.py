"""The engine's own publisher and the server name the same blocks by the same names, and take back what is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.events import Subscriber
from testbed.engine import BLOCK_TOKENS, Engine, EngineSpec, kvpool_transfer_config
from testbed.ports import free_endpoint
from testbed.tiny_models import write
from tests.conftest import StartServer
from tests.e2e.conftest import FLOAT32, MORE, PATIENT, prompt, running
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

Event = dict[str, Any]


class EngineEvents:
    """What an engine publishes about blocks outside of its own memory."""

    def __init__(self, endpoint: str):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe("")
        self.heard: list[Event] = []

    def listen(self) -> list[Event]:
        """All heard so far."""
        while self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            events = msgspec.msgpack.decode(payload)[1]
            self.heard += [event for event in events if event.get("medium") == "CPU"]
        return self.heard

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(params=[pytest.param("llama", marks=MORE), "gemma3"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(pool_server: StartServer) -> tuple[ServerProcess, str, str]:
    """With where it publishes, and where it is asked for a replay."""
    publish, replay = (f"tcp://{free_endpoint()}" for _ in range(2))
    flags = ("--memory", "64MiB", "--grace-ms", "100", "--kv-events", publish, "--kv-events-replay", replay)
    return pool_server(*flags), publish, replay


@pytest.fixture
def heard(
    shape: str, server: tuple[ServerProcess, str, str], tmp_path: Path, shapes_dir: Path
) -> Iterator[tuple[Engine, EngineEvents]]:
    host, port = free_endpoint().split(":")
    options = {
        **FLOAT32,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"},
    }
    transfer = kvpool_transfer_config(server[0].endpoint, **PATIENT)
    spec = EngineSpec(write(shape, shapes_dir), transfer, options, in_process=True)
    with running(tmp_path, spec) as (engine,):
        events = EngineEvents(f"tcp://{host}:{port}")
        time.sleep(0.5)  # A subscription takes a moment, and nothing says when it is there.
        yield engine, events
        events.close()


def names(events: list[Event], kind: str) -> list[tuple[int, int]]:
    """(group, hash) of every block, in order."""
    return [(event["group_idx"], each) for event in events if event["type"] == kind for each in event["block_hashes"]]


def test_what_is_stored_and_what_is_found_missing(
    shape: str, server: tuple[ServerProcess, str, str], heard: tuple[Engine, EngineEvents]
) -> None:
    (process, publish, replay), (engine, events) = server, heard
    text = prompt(200, shape)
    with Subscriber(publish, replay) as subscriber:
        engine.generate([text])
        drain(engine)

        of_server: list[Event] = []

        def both_heard() -> bool:
            of_server.extend(event for message in subscriber.receive(200) for event in message.events)
            groups = {group for group, _ in names(events.listen(), "BlockStored")}
            return len(groups) == (6 if shape == "gemma3" else 1) and bool(names(of_server, "BlockStored"))

        wait_for(both_heard, "events of the engine and of the server", 20)
    stored = [event for event in events.heard if event["type"] == "BlockStored"]
    for event in stored:
        assert event["block_size"] == BLOCK_TOKENS
        first = text.index(event["token_ids"][0]) // BLOCK_TOKENS * BLOCK_TOKENS
        assert event["token_ids"] == text[first : first + BLOCK_TOKENS * len(event["block_hashes"])]
        assert (event["parent_block_hash"] is None) == (first == 0)
        assert event["locality"] == "REMOTE"
    # The pool has one group for the five that follow one rule; the engine names its own.
    hashes = {each for _, each in names(events.heard, "BlockStored")}
    assert hashes == {each for _, each in names(of_server, "BlockStored")}
    whole = [event for event in stored if event["kv_cache_spec_kind"] == "full_attention"]
    assert sum(len(event["block_hashes"]) for event in whole) == 200 // BLOCK_TOKENS
    if shape == "gemma3":
        windows = {event["group_idx"] for event in stored if event.get("kv_cache_spec_sliding_window") == 100}
        assert len(windows) == 5 and whole[0]["group_idx"] not in windows

    with Client(ClientConfig(process.endpoint, timeout_ms=60_000)) as client:
        client.admin.clear()
    announced = set(names(events.heard, "BlockStored"))
    events.heard.clear()
    engine.generate([text])  # Looks up, finds nothing, and stores all of it again.
    drain(engine)

    def taken_back() -> bool:
        events.listen()
        return bool(names(events.heard, "BlockRemoved")) and bool(names(events.heard, "BlockStored"))

    wait_for(taken_back, "blocks to be taken back and announced again", 20)
    asked = set(names(events.heard, "BlockRemoved"))
    # The last whole block of a prompt is asked for only if a token follows it.
    assert asked <= announced and len(asked) >= len(announced) // 2
    assert set(names(events.heard, "BlockStored")) == announced
