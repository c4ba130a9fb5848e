"""What stands beside the engines: each arm starts its store, and says how an engine is connected to it.

All arms have the same memory for blocks beside the engines' own caches: a shared store has all of it, private ones
have equal parts. An arm that cannot run raises `UnavailableError` with the reason.

vLLM's p2p tier is no arm: each request must name the engine to load from, which only a router of its own could know.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring as harness
from benchmarks.peers import mooncake_store
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from testbed.engine import EngineSpec, kvpool_transfer_config

TIER_SHARE = 0.6
"""Of the memory under tiered offloading; the rest are the engines' private parts, through which all blocks go."""
SHARED_MEMORY = Path("/dev/shm")
SWEEP_S = 0.5
SERVER_START_S = 300.0
ONLY_GPU = "vLLM's offloading runs on GPUs only (CPUOffloadingSpec.get_worker)"


class UnavailableError(RuntimeError):
    """The arm cannot run here."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms have in common.

    Args:
        folder: for files of the arm's processes.
        engines: number of engines.
        memory_bytes: for blocks, beside the engines' own caches.
        options: further arguments of vLLM.
        kvpool: further settings of kvpool's connector.
        has_gpu: the engines run on a GPU.
    """

    model: Path
    folder: Path
    engines: int
    memory_bytes: int
    options: dict[str, Any]
    kvpool: dict[str, Any]
    has_gpu: bool


@dataclass(frozen=True, slots=True)
class Store:
    """A store that runs.

    Args:
        engine: how each engine is started.
        servers: processes whose CPU time is the store's; their children count, too.
        used_bytes: what the store holds; None: not known from outside.
        clear: called after each run, for a store without a bound.
    """

    engine: EngineSpec
    servers: tuple[int, ...] = ()
    used_bytes: Callable[[], int | None] = field(default=lambda: None)
    clear: Callable[[], object] = field(default=lambda: None)


def none(stack: ExitStack, setup: Setup) -> Store:
    """Engines without connector."""
    return Store(EngineSpec(setup.model, None, setup.options))


def offloading(stack: ExitStack, setup: Setup) -> Store:
    """vLLM's OffloadingConnector: private memory of each engine."""
    return Store(_offloading(setup, setup.memory_bytes // setup.engines))


def tiered(stack: ExitStack, setup: Setup) -> Store:
    """vLLM's tiered offloading through files in a tmpfs that the engines share; nothing bounds the files' size."""
    return _tiered(stack, setup)


def tiered_bounded(stack: ExitStack, setup: Setup) -> Store:
    """The same; a thread deletes the oldest files while they exceed their share of the memory."""
    store = _tiered(stack, setup)
    root = Path(store.engine.transfer["kv_connector_extra_config"]["secondary_tiers"][0]["root_dir"])  # type: ignore[index]
    stack.enter_context(_bounded(root, round(setup.memory_bytes * TIER_SHARE)))
    return store


def mooncake(stack: ExitStack, setup: Setup) -> Store:
    """vLLM's MooncakeStoreConnector over TCP; each engine gives an equal part of the memory to the store."""
    if importlib.util.find_spec("mooncake") is None:
        raise UnavailableError("Mooncake is not installed")
    master = stack.enter_context(mooncake_store.master())
    segment_bytes = setup.memory_bytes // setup.engines
    return Store(mooncake_store.engine(setup.model, master, setup.folder, segment_bytes, setup.options))


def lmcache(stack: ExitStack, setup: Setup) -> Store:
    """LMCache in private CPU memory of each engine."""
    if importlib.util.find_spec("lmcache") is None:
        raise UnavailableError("LMCache is not installed")
    environment = {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(setup.memory_bytes / setup.engines / 2**30),
        "LMCACHE_CHUNK_SIZE": "256",
        "PYTHONHASHSEED": "0",
    }
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    return Store(EngineSpec(setup.model, transfer, setup.options, environment))


def kvpool_shm(stack: ExitStack, setup: Setup) -> Store:
    """kvpool through shared memory."""
    return _kvpool(stack, setup, "shm")


def kvpool_tcp(stack: ExitStack, setup: Setup) -> Store:
    """kvpool over TCP, as if the pool were on another host."""
    return _kvpool(stack, setup, "tcp")


def kvpool_tls(stack: ExitStack, setup: Setup) -> Store:
    """kvpool over TCP with certificates and encryption."""
    authority = Authority.create(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    operator = TlsFiles.in_directory(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
    engine = TlsFiles.in_directory(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE)))
    server = TlsFiles.in_directory(authority.issue_server([]))
    flags = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", server.ca]
    return _kvpool(stack, setup, "tcp", *flags, tls=operator, engine_tls=asdict(engine))


ARMS: Mapping[str, Callable[[ExitStack, Setup], Store]] = {
    "none": none,
    "offloading": offloading,
    "tiered": tiered,
    "tiered bounded": tiered_bounded,
    "mooncake": mooncake,
    "lmcache": lmcache,
    "kvpool shm": kvpool_shm,
    "kvpool tcp": kvpool_tcp,
    "kvpool tcp+tls": kvpool_tls,
}
BASELINE = "none"


def _offloading(setup: Setup, private_bytes: int, **extra: Any) -> EngineSpec:
    if not setup.has_gpu:
        raise UnavailableError(ONLY_GPU)
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": private_bytes, **extra},
    }
    return EngineSpec(setup.model, transfer, setup.options)


def _tiered(stack: ExitStack, setup: Setup) -> Store:
    private_bytes = round(setup.memory_bytes * (1 - TIER_SHARE)) // setup.engines
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-serving-", dir=SHARED_MEMORY)))
    tiers = [{"type": "fs", "root_dir": str(root)}]
    engine = _offloading(setup, private_bytes, spec_name="TieringOffloadingSpec", secondary_tiers=tiers)

    def used_bytes() -> int:
        return sum(size for _, size, _ in _files(root))

    def clear() -> None:
        for _, _, path in _files(root):
            path.unlink(missing_ok=True)

    return Store(engine, (), used_bytes, clear)


def _kvpool(
    stack: ExitStack,
    setup: Setup,
    transport: str,
    *flags: str,
    tls: TlsFiles | None = None,
    engine_tls: dict[str, str] | None = None,
) -> Store:
    memory = f"{setup.memory_bytes >> 20}MiB"
    endpoint, pid = stack.enter_context(harness.server_process(memory, *flags, tls=tls, start_timeout_s=SERVER_START_S))
    settings = {"transport": transport, **({"tls": engine_tls} if engine_tls else {}), **setup.kvpool}
    return Store(EngineSpec(setup.model, kvpool_transfer_config(endpoint, **settings), setup.options), (pid,))


@contextmanager
def _bounded(root: Path, max_bytes: int) -> Iterator[None]:
    """Keeps the files under a folder within a size: the oldest are deleted, as vLLM deletes none."""
    ending = threading.Event()

    def sweep() -> None:
        while not ending.wait(SWEEP_S):
            files = sorted(_files(root))
            excess = sum(size for _, size, _ in files) - max_bytes
            for _, size, path in files:
                if excess <= 0:
                    break
                path.unlink(missing_ok=True)
                excess -= size

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _files(root: Path) -> list[tuple[float, int, Path]]:
    """Time of last change, size and path of each block's file."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                told = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == ".bin":
                found.append((told.st_mtime, told.st_size, path))
    return found
