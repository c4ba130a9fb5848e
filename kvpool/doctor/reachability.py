"""Checks of the ways to a server: gRPC, HTTP, TLS, and the transport of bytes."""

from __future__ import annotations

import datetime as dt
import http.client
import ssl
import time
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig, is_loopback, split_address
from kvpool.client.transport_choice import choose
from kvpool.protocol import replies
from kvpool.protocol.namespace import OWN, Release
from kvpool.protocol.text import duration_text, printable
from kvpool.report.bandwidth import measure, usual_block
from kvpool.report.judgements import certificate_end
from kvpool.report.output import Finding, error, ok, warning
from kvpool.security.files import read_pem
from kvpool.security.tls import TlsFiles
from kvpool.transport.unix_socket import socket_path

CONNECT_S = 3.0
MAX_SKEW_S = 5.0
MAX_BODY_BYTES = 1_024
ROUND_BYTES = 64 << 20
"""Of a measurement of bandwidth."""
SLOW_GB_PER_S = 1.0
"""Slower loads hardly pay: with 128 KiB a token they bring 7,600 tokens a second, and a GPU computes more."""


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
    if get < SLOW_GB_PER_S:
        fix = "measure a hit against computing with `kvpool ping --bandwidth --namespace`"
        return [warning("bandwidth", text, fix)]
    return [ok("bandwidth", text)]


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
        connection = http.client.HTTPSConnection(*split_address(address), timeout=CONNECT_S, context=_tls_context(tls))
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, printable(answer.read(MAX_BODY_BYTES).decode(errors="replace").strip())
    finally:
        connection.close()


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


def _tls_context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context
