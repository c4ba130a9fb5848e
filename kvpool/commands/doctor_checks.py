"""The checks of `kvpool doctor`: of the ways to a server, of its namespaces, and of this host.

Namespaces are checked for why two of them share nothing, and for blocks that do not fit the arena.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import mmap
import re
import resource
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from cryptography import x509

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig, is_loopback, split_address
from kvpool.client.transport_choice import choose
from kvpool.protocol import replies
from kvpool.protocol.namespace import MEASUREMENT_MODEL, OWN, Difference, Release, differences
from kvpool.protocol.text import duration_text, escaped, opened_text, printable, size_text
from kvpool.protocol.wire import decode_spec
from kvpool.report.bandwidth import measure, usual_block
from kvpool.report.judgements import Finding, certificate_end, error, ok, warning
from kvpool.security.files import read_pem
from kvpool.security.tls import TlsFiles
from kvpool.transport.shm import ShmTransport
from kvpool.transport.unix_socket import socket_path
from kvpool.v1 import pool_pb2 as pb

CONNECT_S = 3.0
MAX_SKEW_S = 5.0
MAX_BODY_BYTES = 1_024
ROUND_BYTES = 64 << 20
"""Of a measurement of bandwidth."""
SLOW_GB_PER_S = 1.0
"""Slower loads hardly pay: with 128 KiB a token they bring 7,600 tokens a second, and a GPU computes more."""
MAX_COMPARED = 64
"""Namespaces that are compared with each other, the last used ones."""
MAX_FINDINGS = 8
MAX_VALUE_CHARS = 60
MIN_TOKENS = 8_192
"""An arena that holds fewer tokens of a model does not even hold one long prompt."""
_MEANT = ("tenant", "salt")
"""Fields that are set to keep namespaces apart."""
_DERIVED = ("chunk_bytes", "layer_formats", "hash_block_tokens")
_OPTIONS = {"block_tokens": "--block-size", "hash_seed": "PYTHONHASHSEED", "kv_cache_dtype": "--kv-cache-dtype"}
"""What sets a field, where its name does not say so."""
_CAUSES = ("block_tokens", "num_shards", "model_dtype", "kv_cache_dtype", "num_kv_heads", "head_size_k", "head_size_v")
"""Fields that others follow from: a difference in one of them brings differences in `_DERIVED`."""
MEMINFO, NUMA_MAPS, SYS = Path("/proc/meminfo"), Path("/proc/self/numa_maps"), Path("/sys")
HUGE_PAGES = SYS / "kernel/mm/transparent_hugepage/shmem_enabled"
LEAST_AVAILABLE_SHARE = 0.05
LEAST_FILES = 4_096
LEAST_LOCKED_BYTES = 1 << 30
SAMPLED_PAGES = 64
"""Of the arena, whose NUMA nodes are looked up."""
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def _ok_if(is_ok: bool, check: str, text: str, fix: str) -> Finding:
    """A finding that is ok, or a warning with its fix."""
    return ok(check, text) if is_ok else warning(check, text, fix)


def grpc_port(client: Client) -> list[Finding]:
    """Whether the server answers, and its release. Raises UnavailableError and PoolTimeoutError if it does not."""
    started = time.monotonic()
    pong = client.admin.ping()
    server = Release(pong.version, pong.protocol)
    took_ms = (time.monotonic() - started) * 1e3
    where = f"kvpool-server at {client.rpc.config.endpoint}"
    found = [ok("gRPC", f"{where} answers within {took_ms:.1f} ms, and is up for {duration_text(pong.uptime_seconds)}")]
    if pong.draining:
        text = f"{where} drains: it takes no new lookups and puts, and stops soon"
        found.append(error("drain", text, "start its successor"))
    if server == OWN:
        return [*found, ok("versions", f"kvpool {OWN.version} on both sides")]
    text = f"the server is kvpool {server}, and this is kvpool {OWN}"
    if OWN.works_with(server):
        return [*found, ok("versions", f"{text}: they work together")]
    fix = "upgrade the older one: protocols may differ by one"
    return [*found, error("versions", f"{text}, which do not work together", fix)]


def transports(client: Client) -> list[Finding]:
    """By which transport bytes would travel, and why; where they would through shared memory, over the network, too."""
    config, offer, found = client.rpc.config, replies.offer(client.rpc.ping()), list[Finding]()
    is_here = bool(socket_path(config.endpoint)) or is_loopback(split_address(config.endpoint)[0])
    for check, setting in (("transport", config.transport), ("network", "network")):
        choice = choose(replace(config, transport=setting), offer, client.rpc.channel)
        choice.transport.close()
        name, text = choice.transport.name, f"bytes would travel by {choice.route}: {choice.why}"
        if choice.is_fallback:
            text = f"bytes would travel by {name}, which is slow: {choice.why}"
            fix = "make one of the faster transports work: the reasons name what is missing; see --data-listen"
            found.append(warning(check, text, fix))
        elif is_here and setting == "auto" and offer.HasField("segment") and name != "shm":
            fix = "run engines as the server's user in its network namespace, or give the server --unix-listen"
            found.append(warning(check, text, fix))
        else:
            found.append(ok(check, text))
        if name != "shm" or socket_path(config.endpoint):
            break
    return found


def bandwidth(client: Client) -> list[Finding]:
    """The rates of puts and gets. Raises PermissionDeniedError unless the caller is an operator."""
    found = measure(client, ROUND_BYTES, usual_block(client))
    put, get = (found[name]["median"] for name in ("put_gb_per_s", "get_gb_per_s"))
    text = f"{found['transport']}: put {put:.3g} GB/s, get {get:.3g} GB/s"
    fix = "measure a hit against computing with `kvpool ping --bandwidth --namespace`"
    return [_ok_if(get >= SLOW_GB_PER_S, "bandwidth", text, fix)]


def http_port(address: str, config: ClientConfig, *, was_given: bool) -> list[Finding]:
    """Whether /healthz says that the server serves.

    Args:
        address: HOST:PORT.
        was_given: False if the host of `address` is a guess: what does not answer there may be at another one.
    """
    try:
        status, body = _healthz(address, config.tls)
    except (OSError, http.client.HTTPException) as failed:
        level = error if was_given else warning
        text = f"http://{address}/healthz cannot be reached: {failed}"
        fix = "give its HOST:PORT as --http; by default --http-listen serves the server's own host alone"
        return [level("HTTP", text, fix)]
    if status == 200:
        return [ok("HTTP", f"{address}/healthz says {body!r}")]
    return [error("HTTP", f"{address}/healthz says {status}: {body!r}", "see the server's log")]


def _healthz(address: str, tls: TlsFiles | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*split_address(address), timeout=CONNECT_S)
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(*split_address(address), timeout=CONNECT_S, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, printable(answer.read(MAX_BODY_BYTES).decode(errors="replace").strip())


def own_certificates(config: ClientConfig) -> list[Finding]:
    """When the certificates in this side's files end."""
    found = []
    for path in (config.tls.ca, config.tls.cert) if config.tls else ():
        if path:
            ends_at = x509.load_pem_x509_certificates(read_pem(Path(path)))[0].not_valid_after_utc
            left_s = (ends_at - dt.datetime.now(dt.UTC)).total_seconds()
            found.append(certificate_end(f"certificate {path}", left_s, "make a new one with `kvpool certs issue`"))
    return found


def callers(config: ClientConfig) -> list[Finding]:
    """Who can call a server without TLS; nothing at a Unix socket."""
    if config.tls is not None or socket_path(config.endpoint):
        return []
    if is_loopback(split_address(config.endpoint)[0]):
        return [ok("callers", "there is no TLS: every user of the server's host can read and write the pool")]
    text = f"there is no TLS: whoever reaches {config.endpoint} can read and write the pool"
    return [warning("callers", text, "secure the pool with `kvpool certs` and --tls-cert")]


def clock(unix_seconds: float) -> list[Finding]:
    """Whether the clocks of both sides agree: certificates and tokens end by them."""
    skew_s = abs(time.time() - unix_seconds)
    if skew_s <= MAX_SKEW_S:
        return [ok("clock", f"the clocks of both sides agree within {MAX_SKEW_S:g} s")]
    text = f"the server's clock differs by {duration_text(skew_s)} from this host's"
    return [warning("clock", text, "let NTP set both clocks: certificates and tokens end by them")]


def namespaces(infos: Sequence[pb.NamespaceInfo], arena_bytes: int) -> list[Finding]:
    """All checks of engines' namespaces. Those of measurements have no engine."""
    infos = [info for info in infos if info.spec.model != MEASUREMENT_MODEL]
    return [*separate(infos), *block_sizes(infos, arena_bytes)]


def separate(infos: Sequence[pb.NamespaceInfo]) -> list[Finding]:
    """Names the field if two namespaces of one model differ in one only: the usual reason for zero hits.

    Not the tenant or the salt: who sets one wants to share nothing.
    """
    recent = sorted((info for info in infos if not info.superseded), key=lambda info: info.idle_seconds)
    compared = [(info, decode_spec(info.spec)) for info in recent[:MAX_COMPARED]]
    found = []
    for (one, ours), (other, theirs) in combinations(compared, 2):
        if not _same_model(one.spec, other.spec) or one.spec.pipeline_stage != other.spec.pipeline_stage:
            continue
        causes = _causes(differences(ours, theirs))
        if len(causes) == 1 and causes[0].field not in _MEANT:
            found.append(_separated(one, other, causes[0]))
        if len(found) >= MAX_FINDINGS:
            break
    if found:
        return found
    text = f"{len(compared)} of {len(infos)} namespaces compared: no two of a model differ in one field only"
    return [ok("namespaces", text)]


def _same_model(a: pb.NamespaceSpec, b: pb.NamespaceSpec) -> bool:
    return a.model == b.model or bool(a.weights_digest and a.weights_digest == b.weights_digest)


def _causes(found: Sequence[Difference]) -> list[Difference]:
    """One difference for each setting: groups that differ alike count once, and what follows from others not at all."""
    by_field = {difference.field.rpartition(".")[2]: difference for difference in found}
    if not by_field.keys().isdisjoint(_CAUSES):
        by_field = {field: difference for field, difference in by_field.items() if field not in _DERIVED}
    return list(by_field.values())


def _separated(one: pb.NamespaceInfo, other: pb.NamespaceInfo, difference: Difference) -> Finding:
    a, b = (info.fingerprint.hex()[:12] for info in (one, other))
    both = (escaped(repr(value), MAX_VALUE_CHARS) for value in (difference.ours, difference.theirs))
    values = "" if difference.is_private else f": {' and '.join(both)}"
    ours, theirs = (opened_text(info.opened_by, info.age_seconds) for info in (one, other))
    text = (
        f"namespaces {a} ({ours}) and {b} ({theirs}) of {escaped(one.spec.model, MAX_VALUE_CHARS)} "
        f"share nothing, because of {escaped(difference.field, MAX_VALUE_CHARS)} alone{values}"
    )
    name = difference.field.rpartition(".")[2]
    setting = _OPTIONS.get(name, escaped(name, MAX_VALUE_CHARS))
    fix = f"if they should share, start their engines with the same {setting}"
    return warning("namespaces", text, f"{fix}; `kvpool namespaces --diff {a} {b}`")


def block_sizes(infos: Sequence[pb.NamespaceInfo], arena_bytes: int) -> list[Finding]:
    """Whether the arena holds enough blocks of each model."""
    found = []
    for info in infos:
        groups, name = info.spec.groups, escaped(info.spec.model, MAX_VALUE_CHARS)
        slots = [group.num_shards * group.chunk_bytes for group in groups]
        largest = size_text(max(slots))
        tokens = int(arena_bytes / sum(size / group.block_tokens for size, group in zip(slots, groups, strict=True)))
        if max(slots) > arena_bytes:
            text = f"a block of {name} has {largest}, and the arena {size_text(arena_bytes)}"
            fix = "give the server more --memory, or the engines a smaller --block-size"
            found.append(error("block size", text, fix))
        elif tokens < MIN_TOKENS:
            text = f"the arena holds {tokens:,} tokens of {name} at most, with blocks of {largest}"
            found.append(warning("block size", text, "give the server more --memory"))
    if found or not infos:
        return found[:MAX_FINDINGS]
    return [ok("block size", "the arena holds long prompts of every model")]


def memory() -> list[Finding]:
    """Whether the host has memory left."""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    text = f"{size_text(available)} of this host's {size_text(total)} are available"
    is_enough = available >= LEAST_AVAILABLE_SHARE * total
    return [_ok_if(is_enough, "memory of the host", text, "end what takes it, or lower the server's --memory")]


def huge_pages() -> list[Finding]:
    """Whether the arena gets huge pages on this host."""
    try:
        chosen = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        return [ok("huge pages", "this kernel has no transparent huge pages for shared memory")]
    if chosen and chosen[0] in ("always", "advise", "within_size", "force"):
        return [ok("huge pages", f"shared memory gets them ({chosen[0]})")]
    text = f"shared memory gets none on this host ({HUGE_PAGES} says {chosen[0] if chosen else 'nothing'})"
    return [warning("huge pages", text, f"write advise to {HUGE_PAGES} on the server's host, and restart the server")]


def open_files() -> list[Finding]:
    """Whether a process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = limit == resource.RLIM_INFINITY
    text = f"a process started from here may open {'any number of' if is_unlimited else f'{limit:,}'} files"
    fix = f"raise the limit to {LEAST_FILES:,} or more (ulimit -n)"
    return [_ok_if(is_unlimited or limit >= LEAST_FILES, "open files", text, fix)]


def memlock(*, uses_rdma: bool = False) -> list[Finding]:
    """Whether a process may lock enough memory; RDMA locks the memory that it moves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = limit == resource.RLIM_INFINITY
    text = f"a process started from here may lock {'all memory' if is_unlimited else size_text(limit)}"
    is_enough = is_unlimited or not uses_rdma or limit >= LEAST_LOCKED_BYTES
    return [_ok_if(is_enough, "memlock", text, "RDMA locks the memory that it moves: set the limit to unlimited")]


def numa(client: Client | None) -> list[Finding]:
    """On which NUMA nodes the GPUs and the arena are. Distances between them cost bandwidth."""
    if len(list(SYS.glob("devices/system/node/node[0-9]*"))) <= 1:
        return [ok("NUMA", "this host has one node")]
    gpus = _gpu_nodes()
    arena = set() if client is None else _arena_nodes(client)
    told = [f"GPUs on {_nodes(gpus)}" if gpus else "no NVIDIA GPU is visible"]
    told.append(f"the arena on {_nodes(arena)}" if arena else "the arena cannot be seen from here")
    fix = "start the server with `numactl --membind` of the GPUs' node, or --interleave over all nodes"
    return [_ok_if(not (gpus and arena) or bool(arena & gpus), "NUMA", "; ".join(told), fix)]


def _gpu_nodes() -> set[int]:
    """The NUMA nodes of the NVIDIA GPUs of this host."""
    nodes = set()
    for device in SYS.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                nodes.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return {node for node in nodes if node >= 0}


def _arena_nodes(client: Client) -> set[int]:
    """Where the arena's pages lie, by a sample of them; empty if this process cannot map the arena."""
    with contextlib.closing(client.admin.try_transport().transport) as transport:
        if not isinstance(transport, ShmTransport):
            return set()
        arena = transport.memory
        # The kernel tells the nodes of those pages alone that this process has touched.
        int(arena[:: max(mmap.PAGESIZE, arena.size // SAMPLED_PAGES)].sum())
        lines = [line for line in NUMA_MAPS.read_text().splitlines() if "kvpool-" in line]
        return {int(node) for line in lines for node in re.findall(r" N(\d+)=\d+", line)}


def _nodes(nodes: set[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"
