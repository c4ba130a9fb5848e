"""`kvpool doctor`: finds what makes a pool slow or useless. No check can hang the command or hide another one."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import typer

from kvpool.client.client import Client
from kvpool.client.config import DEFAULT_ENDPOINT, ClientConfig
from kvpool.commands import common, doctor_checks
from kvpool.commands.common import AsJson, Endpoint, ExitStatus
from kvpool.protocol.errors import InvalidRequestError, KVPoolError, PermissionDeniedError
from kvpool.report.bandwidth import TIMEOUTS
from kvpool.report.judgements import Finding, Level, error, info, judge_twice, warning
from kvpool.report.output import print_findings
from kvpool.transport.unix_socket import socket_path

DEADLINE_S = 10.0
"""Of one check. A call of a client ends before."""
BANDWIDTH_DEADLINE_S = 90.0
MAX_TEXT_CHARS = 1_000

Check = Callable[[], Iterable[Finding]]
"""A check returns its findings, and may raise a KVPoolError, which becomes one."""


def doctor(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The server's --http-listen. Default: the port that the server tells, at the endpoint's host.",
        ),
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure puts and gets, with blocks that are removed afterwards.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything that makes a pool slow or useless, and say how to mend it. Ends with 1 if there is an error."""
    if http is not None and not http.rpartition(":")[2].isdigit():
        raise InvalidRequestError(f"--http {http!r} is not HOST:PORT, for example '127.0.0.1:50052'")
    findings = _of_server(endpoint, common.config_of(endpoint), http, bandwidth=bandwidth)
    findings += examine(
        {
            "memory of the host": doctor_checks.memory,
            "huge pages": doctor_checks.huge_pages,
            "open files": doctor_checks.open_files,
        }
    )
    counts = Counter(finding.level for finding in findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        told = {"endpoint": endpoint, "errors": counts[Level.ERROR], "warnings": counts[Level.WARNING]}
        common.print_json(told | {"findings": rows})
    else:
        print_findings(findings)
        nouns = {Level.ERROR: "error", Level.WARNING: "warning"} | ({Level.INFO: "note"} if counts[Level.INFO] else {})
        parts = [f"{counts[level]} {noun}{'' if counts[level] == 1 else 's'}" for level, noun in nouns.items()]
        typer.echo(", ".join([*parts, f"{counts[Level.OK]} ok"]))
    if counts[Level.ERROR]:
        raise typer.Exit(ExitStatus.PROBLEM)


def _of_server(endpoint: str, config: ClientConfig, http: str | None, *, bandwidth: bool) -> list[Finding]:
    """The findings about a server; one of them says why if the server cannot be reached."""
    checks: dict[str, Check] = {
        "certificates": lambda: doctor_checks.own_certificates(config),
        "callers": lambda: doctor_checks.callers(config),
    }
    with common.client_of(endpoint) as client:
        try:
            found = doctor_checks.grpc_port(client)
        except KVPoolError as away:
            text, _, fix = str(away).partition("; ")
            checks |= {"memlock": doctor_checks.memlock, "NUMA": lambda: doctor_checks.numa(None)}
            return [error("gRPC", text, fix or "see the message"), *examine(checks)]
        checks |= {
            "transport": lambda: doctor_checks.transports(client),
            "HTTP": lambda: _of_http(client, http, config),
            "pool": lambda: _of_stats(client),
            "namespaces": lambda: doctor_checks.namespaces(
                client.admin.namespaces(holdings=False), client.admin.stats().arena_bytes
            ),
            "NUMA": lambda: doctor_checks.numa(client),
            "memlock": lambda: doctor_checks.memlock(uses_rdma=client.rpc.ping().mooncake.protocol == "rdma"),
        }
        found += examine(checks)
    if bandwidth:
        with Client(common.config_of(endpoint, "auto", **TIMEOUTS)) as client:
            found += examine({"bandwidth": lambda: doctor_checks.bandwidth(client)}, BANDWIDTH_DEADLINE_S)
    return found


def _of_http(client: Client, http: str | None, config: ClientConfig) -> list[Finding]:
    if http is not None:
        return doctor_checks.http_port(http, config, was_given=True)
    server = client.admin.stats().server
    if not server.http_port:
        fix = "start it with --http-listen for /metrics, /healthz and the dashboard"
        return [info("HTTP", "the server tells no HTTP port: its HTTP is off", fix)]
    host_name = "127.0.0.1" if socket_path(config.endpoint) else config.endpoint.rpartition(":")[0]
    return doctor_checks.http_port(f"{host_name}:{server.http_port}", config, was_given=False)


def _of_stats(client: Client) -> list[Finding]:
    stats, found = judge_twice(client.admin.stats)
    return [*found, *doctor_checks.clock(stats.server.unix_seconds)]


def examine(checks: Mapping[str, Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """The findings in the order of the checks, after `deadline_s` at most.

    Checks run at once, each in a thread of its own, which is left behind if the check hangs.
    """
    found: dict[str, list[Finding]] = {}

    def run(name: str, check: Check) -> None:
        found[name] = _findings(name, check)

    threads = {}
    for name, check in checks.items():
        threads[name] = threading.Thread(target=run, args=(name, check), name=f"kvpool-doctor {name}", daemon=True)
        threads[name].start()
    ends_at = time.monotonic() + deadline_s
    findings: list[Finding] = []
    for name, thread in threads.items():
        thread.join(max(0.0, ends_at - time.monotonic()))
        text = f"the check did not end within {deadline_s:g} s"
        late = warning(name, text, "run it again; look at the load of both hosts and the network")
        findings += found.get(name, [late])
    return findings


def _findings(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except PermissionDeniedError as refused:
        fix = "give an operator's certificate or token (--tls, --token-file) to check this, too"
        return [warning(name, str(refused)[:MAX_TEXT_CHARS], fix)]
    except KVPoolError as failed:
        return [error(name, str(failed)[:MAX_TEXT_CHARS], "see the message")]
    except Exception as failed:
        text = f"the check failed: {failed!r}"[:MAX_TEXT_CHARS]
        return [warning(name, text, "the other checks do not depend on it")]
