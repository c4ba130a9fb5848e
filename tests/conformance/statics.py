"""Rules of a connector at rest: its import, its constructor, its types, its end. Each answers with what is wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.support.toy.engine import as_rank

Check = Callable[[VllmConfig, KVCacheConfig], Iterator[str]]
STATIC_RULES: dict[str, Check] = {}
LAYOUTS = (None, "HND", "NHD", "LBHNC", "LBNHC")
THREADS_END_WITHIN_S = 3.0

_IMPORT = """
import os, sys, threading, torch
import vllm.distributed.kv_transfer.kv_connector.v1.base
import vllm.v1.core.sched.scheduler

def seen():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # The listing's own.
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        processes = len(children.read().split())
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sockets": sum(link.startswith("socket:") for link in links),
        "child processes": processes,
        "CUDA": torch.cuda.is_initialized(),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
    }

for module in sys.argv[1:]:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            print(f"FOUND {module} cannot be imported")
        continue
    before = seen()
    __import__(module)
    for name, value in seen().items():
        if value != before[name]:
            print(f"FOUND {module} {name}: {before[name]} before, {value} after")
    sys.stdout.flush()
    os._exit(0)
"""


def import_side_effects(modules: Sequence[str]) -> list[str]:
    """What importing each module does beside defining things: rule `import-has-no-side-effects`.

    A connector's module is imported in every process, before and after forks. One process pays for vLLM itself, and
    each module is imported in a fork of it.
    """
    command = [sys.executable, "-c", _IMPORT, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]


def _static(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        STATIC_RULES[name] = check
        return check

    return add


def connector_class(config: VllmConfig) -> type[KVConnectorBase_V1]:
    found: type[KVConnectorBase_V1] = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return found


def make(config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> KVConnectorBase_V1:
    with as_rank(0, 1):
        connector: KVConnectorBase_V1 = KVConnectorFactory.create_connector(config, role, kv_cache_config)
    return connector


@_static("constructor-needs-no-kv-cache")
def constructor_needs_no_kv_cache(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Both sides are made, and can be shut down, before there is a KV cache."""
    for role in KVConnectorRole:
        try:
            make(config, role, kv_cache_config).shutdown()
        except Exception as error:
            yield f"{role.name}: {type(error).__name__}: {error}"


@_static("shutdown-ends-threads")
def shutdown_ends_threads(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    before = set(threading.enumerate())
    for role in KVConnectorRole:
        make(config, role, kv_cache_config).shutdown()
    ends_at = time.monotonic() + THREADS_END_WITHIN_S
    for thread in (left := set(threading.enumerate()) - before):
        thread.join(max(0.0, ends_at - time.monotonic()))
    yield from sorted(thread.name for thread in left if thread.is_alive())


@_static("requires-kv-delivery-is-a-bool")
def requires_kv_delivery_is_a_bool(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    connector = make(config, KVConnectorRole.SCHEDULER, kv_cache_config)
    if type(connector.requires_kv_delivery) is not bool:
        yield f"{connector.requires_kv_delivery!r}"
    connector.shutdown()


@_static("required-layout-is-known")
def required_layout_is_known(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    layout = connector_class(config).get_required_kvcache_layout(config)
    if layout not in LAYOUTS:
        yield f"{layout!r}"


@_static("role-is-kept")
def role_is_kept(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    for role in KVConnectorRole:
        connector = make(config, role, kv_cache_config)
        if connector.role is not role:
            yield f"{connector.role} instead of {role}"
        connector.shutdown()


def static_violations(config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, list[str]]:
    """Rule -> what is wrong; rules that are kept are left out."""
    found = {name: list(check(config, kv_cache_config)) for name, check in STATIC_RULES.items()}
    return {name: wrong for name, wrong in found.items() if wrong}
