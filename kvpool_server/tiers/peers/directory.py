"""Which servers say that they have which blocks: soft state in Redis or Valkey, which no answer relies on.

A block is announced if its hash says so, about one in `EVERY_TOKENS` tokens of a prefix: both sides need only the hash.
Its name in the directory is a keyed hash, so that readers of the directory learn no prompts; the value is the set of
servers with the time of their word, each a random number of its boot. What a number stands for is an entry of its own,
with the endpoint and its tag under the servers' key: a stranger who writes to the directory names no server. Each
server renews its entry; those of a server that has ended expire. Announcements are pipelined, and dropped when there
are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from kvpool.client.config import check_endpoint
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.namespace import GroupSpec
from kvpool_server.tiers.calls import Health

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

log = structlog.get_logger()

EVERY_TOKENS = 512
ANSWER_S = 0.25
"""Deadline of a command."""
BEAT_S, SERVER_S = 5.0, 20
"""How often a server renews its entry, and how long the entry lasts."""
RENEW_S, BLOCK_S = 300.0, 900
"""How often a server announces its blocks again, and how long an announcement lasts."""
PART = 50
"""Announcements of one round trip: redis-py makes them on the event loop."""
AT_ONCE = 16
"""Commands, and so connections."""
MAX_QUEUED = 1 << 16
MAX_ASKED = 32
"""Announced blocks of a run that a question spans."""
KNOWN_S = 5.0
"""How long the endpoint of a server is remembered."""
TAG_BYTES, MAX_SERVERS, MAX_OWNERS = 16, 4_096, 16
_BLOCK, _SERVER, _SERVERS, _PRINT = b"kvpool:block:", b"kvpool:server:", b"kvpool:servers", b"kvpool key print"


def is_announced(block_hash: bytes, block_tokens: int) -> bool:
    """Whether servers that have a block say so."""
    return int.from_bytes(block_hash[-8:]) % max(1, EVERY_TOKENS // block_tokens) == 0


def questioned(announced: Iterable[bytes], *, needs_prefix: bool) -> list[bytes]:
    """Those of a run's announced blocks that the directory is asked for, in their order.

    Of a group whose hits need the whole prefix the first, second, fourth, eighth, …, and the last: a server has such a
    prefix from its beginning, so these tell how far. Of others, servers have any blocks.
    """
    names = list(itertools.islice(announced, MAX_ASKED))
    if not needs_prefix:
        return names
    return [name for nth, name in enumerate(names, 1) if not nth & (nth - 1) or nth == len(names)]


class Directory:
    """The part of one server. Belongs to the event loop; no call raises, and none lasts longer than `ANSWER_S`.

    Args:
        url: redis://[USER:PASSWORD@]HOST:PORT/DB; with TLS rediss://…?ssl_ca_certs=FILE.
        key: the servers'.
        endpoint: HOST:PORT by which others reach this server; empty as long as it is not known.

    Attributes:
        name: "directory HOST:PORT", as in the URL.
        health: whether it is asked now, and has answered last.
        key_fingerprint: tells apart servers with different keys; says nothing of the key.
        num_dropped: announcements dropped because there were too many, or the directory was away.

    Raises ConfigError if the client library is not installed, or refuses the URL.
    """

    def __init__(self, url: str, key: bytes, endpoint: Callable[[], str]):
        try:
            from redis.asyncio import Redis
        except ImportError:
            raise ConfigError("a directory of peers needs Redis' client: pip install 'redis>=5.0'") from None
        try:
            self._redis: Redis = Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
        except ValueError:
            raise ConfigError("directory: no URL of a Redis; give redis://[USER:PASSWORD@]HOST:PORT/DB") from None
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.name = f"directory {urlsplit(url).netloc.rpartition('@')[2]}"
        self._key = key
        self.key_fingerprint = hashlib.blake2b(key=key, person=_PRINT, digest_size=4).hexdigest()
        self._endpoint = endpoint
        self._id = secrets.token_bytes(8)
        self.health = Health("directory of peers")
        self._held: dict[bytes, None] = {}  # Announced blocks that this server has.
        self._queue: dict[bytes, bool] = {}  # Whether each is there, or has left.
        self._work = asyncio.Event()
        self._servers: dict[bytes, tuple[str, float]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._lacks_some = self._has_warned = False
        self.num_dropped = 0

    def open(self) -> None:
        self._tasks = [asyncio.create_task(run()) for run in (self._beat, self._renew, self._announce)]

    async def close(self) -> None:
        """Tells others that this server has ended, if the directory answers. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await self._call(lambda: self._redis.delete(_SERVER + self._id))
            await self._call(lambda: self._redis.zrem(_SERVERS, self._id))
        with contextlib.suppress(Exception):
            await self._redis.aclose()

    def hold(self, fingerprint: bytes, group_idx: int, block_hash: bytes, *, is_there: bool) -> None:
        """A block that is announced lies in this server's memory, or does no longer."""
        name = self._name(fingerprint, group_idx, block_hash)
        if is_there:
            self._held[name] = None
        elif self._held.pop(name, self) is not None:
            return
        self._enqueue(name, is_there)

    def _enqueue(self, name: bytes, is_there: bool) -> None:
        if name not in self._queue and len(self._queue) >= MAX_QUEUED:
            self.num_dropped += 1
            self._lacks_some = True
            return
        self._queue[name] = is_there
        self._work.set()

    async def owners(
        self, fingerprint: bytes, group_idx: int, block_hashes: Sequence[bytes], spec: GroupSpec
    ) -> list[str]:
        """Endpoints of other servers that may have blocks of a run, those first that say so of the last ones."""
        announced = (name for name in block_hashes if is_announced(name, spec.block_tokens))
        asked = questioned(announced, needs_prefix=spec.needs_prefix)
        names = [self._name(fingerprint, group_idx, each) for each in asked]
        if not names:
            return []

        async def ask() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            for name in names:
                pipeline.zrevrange(name, 0, MAX_OWNERS - 1)
            return await _executed(pipeline)

        last = {owner: nth for nth, owners in enumerate(await self._call(ask) or ()) for owner in owners or ()}
        found = sorted(last, key=lambda owner: (-last[owner], random.random()))  # Equals take turns.
        return await self._others(found)

    async def servers(self) -> list[str]:
        """Endpoints of other servers, MAX_OWNERS at most, those that have renewed their entry last first."""

        async def ask() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.zrevrangebyscore(_SERVERS, time.time() + 2 * BLOCK_S, "-inf", 0, 2 * MAX_OWNERS)  # Clocks differ.
            return await _executed(pipeline)

        (found,) = await self._call(ask) or (None,)
        return await self._others(found or [])

    async def _others(self, servers: Sequence[bytes]) -> list[str]:
        endpoints = await self._endpoints([each for each in servers if each != self._id])
        return [endpoint for endpoint in endpoints if endpoint and endpoint != self._endpoint()][:MAX_OWNERS]

    async def _endpoints(self, servers: Sequence[bytes]) -> list[str]:
        """Of each server; empty where it has ended, or a stranger names it."""
        now = time.monotonic()
        unknown = [each for each in servers if self._servers.get(each, ("", 0.0))[1] <= now]
        if unknown:
            values = await self._call(lambda: self._redis.mget([_SERVER + each for each in unknown]))
            for server, value in zip(unknown, values or [None] * len(unknown), strict=True):
                self._servers[server] = self._opened(server, value), now + KNOWN_S
            while len(self._servers) > MAX_SERVERS:
                del self._servers[next(iter(self._servers))]
        return [self._servers.get(each, ("", 0.0))[0] for each in servers]

    async def _beat(self) -> None:
        while True:
            if endpoint := self._endpoint():
                was_there = await self._call(functools.partial(self._renew_server, self._sealed(endpoint.encode())))
                if was_there is False or (was_there and self._lacks_some):  # It is new, or has lost what it had.
                    self._lacks_some = False
                    await self._announce_all()
            await asyncio.sleep(BEAT_S if endpoint else 0.1)

    async def _renew_server(self, value: bytes) -> bool:
        """Whether the directory still had the entry of this server."""
        was_there = await self._redis.set(_SERVER + self._id, value, ex=SERVER_S, get=True) is not None
        pipeline, now = self._redis.pipeline(transaction=False), time.time()
        pipeline.zadd(_SERVERS, {self._id: now})
        pipeline.zremrangebyscore(_SERVERS, "-inf", now - 2 * BLOCK_S)
        pipeline.zremrangebyscore(_SERVERS, now + 2 * BLOCK_S, "inf")
        pipeline.expire(_SERVERS, BLOCK_S)
        await _executed(pipeline)
        return was_there

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._announce_all()

    async def _announce_all(self) -> None:
        names = list(self._held)
        for at in range(0, len(names), PART):
            while len(self._queue) > MAX_QUEUED // 2:
                await asyncio.sleep(BEAT_S / 100)
            for name in names[at : at + PART]:
                if name in self._held:
                    self._enqueue(name, True)
            await asyncio.sleep(0)

    async def _announce(self) -> None:
        while True:
            await self._work.wait()
            if not self._queue:
                self._work.clear()
                continue
            part = dict(itertools.islice(self._queue.items(), PART))
            for name in part:
                del self._queue[name]
            if await self._call(functools.partial(self._send, part)) is None:
                self.num_dropped += len(part)
                self._lacks_some = True

    async def _send(self, part: dict[bytes, bool]) -> bool:
        pipeline = self._redis.pipeline(transaction=False)
        now = time.time()
        for name, is_there in part.items():
            if is_there:
                pipeline.zadd(name, {self._id: now})
                pipeline.zremrangebyscore(name, "-inf", now - 2 * BLOCK_S)  # Of servers that have ended; clocks differ.
                pipeline.expire(name, BLOCK_S)
            else:
                pipeline.zrem(name, self._id)
        await _executed(pipeline)
        return True

    async def _call(self, call: Callable[[], Any]) -> Any:
        """What the directory answers; None if it does not, or is not to be asked now."""
        if not self.health.is_available:
            return None
        try:
            with self.health.call():
                async with asyncio.timeout(ANSWER_S), self._turns:
                    return await call()
        except Exception:  # `Health` has logged it.
            return None

    def _name(self, fingerprint: bytes, group_idx: int, block_hash: bytes) -> bytes:
        text = fingerprint + group_idx.to_bytes(4) + block_hash
        return _BLOCK + hashlib.blake2b(text, key=self._key, digest_size=TAG_BYTES).digest()

    def _sealed(self, endpoint: bytes) -> bytes:
        return hashlib.blake2b(self._id + endpoint, key=self._key, digest_size=TAG_BYTES).digest() + endpoint

    def _opened(self, server: bytes, value: bytes | None) -> str:
        if value is None:
            return ""
        endpoint = value[TAG_BYTES:]
        tag = hashlib.blake2b(server + endpoint, key=self._key, digest_size=TAG_BYTES).digest()
        if not hmac.compare_digest(tag, value[:TAG_BYTES]):
            if not self._has_warned:
                log.warning("the directory of peers names a server without the servers' key")
            self._has_warned = True
            return ""
        with contextlib.suppress(ConfigError, UnicodeDecodeError):
            check_endpoint(text := endpoint.decode())
            return text
        return ""


async def _executed(pipeline: Pipeline) -> list[Any]:
    """The answers; None for a key that a stranger has written. Raises what a command has failed with otherwise."""
    answers = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
            raise answer
    return [None if isinstance(answer, Exception) else answer for answer in answers]
