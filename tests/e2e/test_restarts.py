"""Two engines go on over kills of their server, whose memory the next one has: all answers are right, and hit again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import BlockRun
from testbed.engine import Engine, kvpool_transfer_config
from tests.e2e.conftest import StartEngines, assert_same, hit_tokens, prompt
from tests.support.effort import effort
from tests.support.kept_server import KeptServer
from tests.support.processes import wait_for
from tests.support.real_engines import drain
from tests.support.values import block_hash, group_spec, namespace_spec

pytestmark = pytest.mark.vllm

LENGTHS = (100, 700, 33, 1500)
HITS = [hit_tokens(length) for length in LENGTHS]
KILLS, CLIENTS = effort(5), 8
CHUNK, BLOCKS = 16_384, 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptServer]:
    flags = ("--memory", "128MiB", "--max-ttl-ms", "1000", "--grace-ms", "200")
    with closing(KeptServer(tmp_path_factory.mktemp("kept"), *flags)) as server:
        server.connect().close()
        yield server


@pytest.fixture(scope="module")
def engines(start_engines: StartEngines, server: KeptServer) -> list[Engine]:
    timeouts = {"lookup_timeout_ms": 300, "load_timeout_ms": 1_500, "store_timeout_ms": 1_500}
    config = kvpool_transfer_config(server.endpoint, decline_slow_loads=False, **timeouts)
    return start_engines(config, config)


class Clients:
    """Threads that store blocks, each with bytes that follow from its name, and compare what they load."""

    def __init__(self, endpoint: str):
        self._ended, self.num_loads = threading.Event(), 0
        self.wrong: list[str] = []
        self.refused: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(endpoint, nth)) for nth in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, endpoint: str, nth: int) -> None:
        spec = namespace_spec(group_spec(chunk_bytes=CHUNK), salt="clients")
        turn = 0
        while not self._ended.is_set():
            try:
                with Client(ClientConfig(endpoint, timeout_ms=2_000)) as client:
                    namespace = client.open_namespace(spec)
                    while not self._ended.is_set():
                        turn += 1
                        first = (nth * 100 + turn % 4) * BLOCKS
                        run = BlockRun(0, [block_hash(each) for each in range(first, first + BLOCKS)])
                        found = client.lookup(namespace, [run])
                        if found.hits[0].num_leading:
                            self._compare(client.get_blocks(namespace, found.lease_id, run), first)
                            client.release([found.lease_id])
                        client.put_blocks(namespace, run, [_payload(first + each) for each in range(BLOCKS)])
            except KVPoolError as error:
                self.refused[type(error).__name__] += 1
                self._ended.wait(0.02)

    def _compare(self, blocks: list[object], first: int) -> None:
        for each, block in enumerate(blocks):
            if block is not None:
                self.num_loads += 1
                if bytes(block) != _payload(first + each):  # type: ignore[call-overload]
                    self.wrong.append(f"block {first + each}")

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive(), "a client is stuck"


def _payload(name: int) -> bytes:
    return name.to_bytes(4, "big") * (CHUNK // 4)


@pytest.mark.more
def test_two_engines_and_clients_over_many_kills(
    server: KeptServer, engines: list[Engine], plain_engine: Engine
) -> None:
    prompts = [prompt(length, f"kept {length}") for length in LENGTHS]
    expected = plain_engine.generate(prompts)
    assert_same(engines[0].generate(prompts), expected)
    drain(engines[0])
    with closing(Clients(server.endpoint)) as clients:
        for kill in range(KILLS):
            before = clients.num_loads
            wait_for(lambda: clients.num_loads > before + 100, "loads")  # noqa: B023
            killing = threading.Thread(target=server.kill_server)
            killing.start()
            new = [prompt(length, f"kept {kill} {length}") for length in LENGTHS]
            for engine in engines:  # One of them is under way when the server dies.
                assert_same(engine.generate([*prompts, *new]), [*expected, *plain_engine.generate(new)])
            killing.join()
        assert not clients.wrong
        assert clients.refused, "no client has met a kill"
    _wait_until_all_hit(engines[1], prompts, expected)


def test_what_one_engine_stored_before_a_kill_another_loads_after_it(
    server: KeptServer, engines: list[Engine], plain_engine: Engine
) -> None:
    prompts = [prompt(length, f"before the kill {length}") for length in LENGTHS]
    expected = plain_engine.generate(prompts)
    _wait_until_connected(engines[0], server)
    assert_same(engines[0].generate(prompts), expected)
    drain(engines[0])
    before = _entries(server)
    server.kill_server()
    assert _entries(server) == before
    _wait_until_connected(engines[1], server)
    answers = engines[1].generate(prompts)
    assert_same(answers, expected)
    assert [answer.cached_tokens for answer in answers] == HITS


def _entries(server: KeptServer) -> int:
    with server.connect() as client:
        return int(client.admin.stats().num_entries)


def _wait_until_connected(engine: Engine, server: KeptServer) -> None:
    """Asks small things until one more is in the pool."""
    before = _entries(server)

    def stored() -> bool:
        engine.generate([prompt(40, f"is it there? {before} {len(asked)}")], max_tokens=1)
        asked.append(1)
        return _entries(server) > before

    asked: list[int] = []
    wait_for(stored, "the engine to find the pool", 60)
    drain(engine)


def _wait_until_all_hit(engine: Engine, prompts: list[list[int]], expected: list[object]) -> None:
    def all_hit() -> bool:
        answers = engine.generate(prompts)
        assert_same(answers, expected)  # type: ignore[arg-type]
        drain(engine)
        return [answer.cached_tokens for answer in answers] == HITS

    wait_for(all_hit, "every prompt to hit", 60)
