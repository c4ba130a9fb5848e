import hashlib
import json
import math
import re
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client.client import Namespace
from kvpool.protocol.errors import OutOfSpaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.text import size_text
from kvpool.report import judgements
from kvpool.version import __version__
from tests.conftest import Connect, StartServer
from tests.kvpool.conftest import Cli, CliAt
from tests.support.processes import ServerProcess, run_command, wait_for
from tests.support.values import group_spec, namespace_spec, payload, run_of

KVPOOL = str(Path(sys.executable).with_name("kvpool"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    server = ServerProcess(tmp_path_factory.mktemp("cli"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _late_loops_are_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests make the machine busy, of which `kvpool stats` would warn."""
    monkeypatch.setattr(judgements, "SLOW_LAG_S", math.inf)
    monkeypatch.setattr(judgements, "LATE_S", (math.inf, math.inf))


@pytest.fixture
def stored(server: ServerProcess, connect: Connect) -> tuple[Namespace, Namespace]:
    """Two namespaces of two blocks each, and nothing else on the server."""
    client = connect(server)
    client.admin.clear()

    def store(spec: NamespaceSpec) -> Namespace:
        namespace = client.open_namespace(spec)
        client.put_blocks(namespace, run_of("a", "b"), [payload(name, 1_000) for name in "ab"])
        return namespace

    first, second = (
        store(namespace_spec(group_spec(chunk_bytes=1_000), model=f"model-{salt}", salt=salt)) for salt in "xy"
    )
    return first, second


def _left(cli: Cli) -> dict[str, int]:
    return {row["model"]: row["entries"] for row in json.loads(cli("namespaces", "--json"))}


def test_the_command_is_installed(server: ServerProcess) -> None:
    assert run_command(KVPOOL, "--version").stdout.strip() == f"kvpool {__version__}"
    done = run_command(KVPOOL, "ping", KVPOOL_ENDPOINT=server.endpoint)
    assert done.returncode == 0 and server.endpoint in done.stdout


def test_ping_tries_the_transport_that_it_is_told(cli: Cli) -> None:
    first, second = cli("ping").splitlines()
    assert first.startswith(f"kvpool-server {__version__} at {cli.server.endpoint}, up for ")
    assert second == "bytes would travel by shm: client and server share memory"
    told = cli("ping", "--transport", "tcp").splitlines()[1]
    assert re.fullmatch(r"bytes would travel by tcp over the data port \S+, \d+ connections?: transport=tcp", told)
    found = json.loads(cli("ping", "--json", "--transport", "tcp"))
    assert (found["version"], found["endpoint"]) == (__version__, cli.server.endpoint)
    assert (found["transport"], found["why"]) == ("tcp", "transport=tcp") and "data port" in found["route"]
    assert "put_gb_per_s" not in found


def test_ping_measures_what_a_hit_costs_and_saves(pool_server: StartServer, connect: Connect, cli_at: CliAt) -> None:
    cli = cli_at(pool_server())
    name = connect(cli.server).open_namespace(namespace_spec(group_spec(chunk_bytes=1_000))).fingerprint.hex()
    narrow = ("ping", "--bandwidth", "--mib", "1", "--namespace", name[:12])
    found = json.loads(cli(*narrow, "--prefill", "1000", "--json"))
    assert found["put_gb_per_s"]["median"] > 0 and found["get_gb_per_s"]["median"] > 0
    hit = found["hit"]
    assert (hit["namespace"], hit["tokens"], hit["bytes"]) == (name, 1_000, 1_000 * 1_000 // 16)
    assert hit["pays_below_tokens_per_s"] == pytest.approx(1_000 / (hit["load_ms"] / 1_000))
    assert (hit["compute_ms"], hit["saved_ms"]) == pytest.approx((1_000, 1_000 - hit["load_ms"]))
    assert _left(cli) == {"test/model": 0, "kvpool ping --bandwidth": 0}
    lines = cli(*narrow).splitlines()
    assert any(re.fullmatch(r"get +\S+ GB/s \(\S+ to \S+\), 5 rounds of \S+ KiB", line) for line in lines)
    assert re.search(rf"1,000 tokens of {name[:12]} loads 61 KiB a rank in \S+ (s|ms|µs)\.$", lines[-2])
    assert lines[-1].startswith("It pays where prefill is slower than ")


def test_stats_tell_all_counters_and_latencies(cli: Cli, stored: object) -> None:
    found = json.loads(cli("stats", "--json"))
    assert (found["arena_bytes"], found["entries"]) == (8 << 20, 4)
    assert found["counters"]["put_completed_blocks"] >= 4 and re.fullmatch("[0-9a-f]{16}", found["boot"])
    server = found["server"]
    assert server["version"] == __version__ and server["uptime_seconds"] > 0
    (puts,) = (rpc for rpc in server["rpcs"] if (rpc["method"], rpc["status"]) == ("PutStart", "OK"))
    assert puts["count"] == sum(puts["buckets"]) >= 2 and 0 < puts["p50_seconds"] <= puts["p99_seconds"]
    lines = cli("stats", "--all").splitlines()
    numbers = {name: value for name, value in found.items() if isinstance(value, int) and not name.endswith("_tokens")}
    assert {"arena_bytes", "free_bytes", "entries", "leases"} <= set(numbers)
    for name, value in {**numbers, **found["counters"]}.items():
        shown = size_text(value) if name.endswith("_bytes") else f"{value:,}"
        assert any(name in line and shown in line for line in lines), name
    assert max(map(len, lines)) <= 80 and not any("--all" in line for line in lines)
    few = cli("stats").splitlines()
    assert any(re.search(r"PutStart +│ OK ", line) for line in few)
    assert any(re.fullmatch(r"engines     could load \S+ \w*B, stored [1-9]\S* \w*B", line) for line in few)
    counted = {**{name: value for name, value in found.items() if isinstance(value, int)}, **found["counters"]}
    num_zeros = sum(counted[name] == 0 for name in counted if any(f"│ {name} " in line for line in lines))
    assert num_zeros and f"pool: {num_zeros} more metrics are 0; --all shows them" in few


def test_stats_begin_with_what_is_wrong(pool_server: StartServer, connect: Connect, cli_at: CliAt) -> None:
    cli = cli_at(pool_server("--quota", "tenant:acme=1MiB"))
    first, second, *_ = cli("stats").splitlines()
    assert first.startswith(f"kvpool-server {__version__} at {cli.server.endpoint}, up for ")
    assert second == "ok      nothing is wrong with the pool"
    client = connect(cli.server)
    namespace = client.open_namespace(namespace_spec(group_spec(chunk_bytes=1_000_000), tenant="acme"))
    client.put_blocks(namespace, run_of("a"), [payload("a", 1_000_000)])
    client.lookup(namespace, [run_of("a")])
    with pytest.raises(OutOfSpaceError):
        client.put_blocks(namespace, run_of("b"), [payload("b", 1_000_000)])
    _, problem, fix, *_ = cli("stats").splitlines()
    assert problem == "warning quotas: 1 puts were refused since the server's start, because of a quota"
    assert fix.startswith("        fix: look at `kvpool quota`")
    found = json.loads(cli("stats", "--json"))
    assert found["quotas"] == [{"subject": "tenant:acme", "limit_bytes": 1 << 20, "used_bytes": 1_000_000}]
    (told,) = found["problems"]
    assert (told["check"], told["level"]) == ("quotas", "warning") and told["fix"]


def test_two_namespaces_are_compared_field_by_field(pool_server: StartServer, connect: Connect, cli_at: CliAt) -> None:
    cli = cli_at(pool_server())
    client = connect(cli.server)
    specs = [
        namespace_spec(group_spec(chunk_bytes=1_000, block_tokens=tokens), model="of two", salt=salt, tenant=tenant)
        for tokens, salt, tenant in ((64, "my salt", "me"), (32, "your salt", "you"))
    ]
    a, b = (client.open_namespace(replace(spec, page_format=f"[{spec.tenant}]")).fingerprint.hex() for spec in specs)
    table = cli("namespaces", "--diff", a[:10], b[:10])
    (row,) = (line for line in table.splitlines() if "groups[0].block_tokens" in line)
    assert row.split("│")[2:4] != ["", ""] and [cell.strip() for cell in row.split("│")[2:4]] == ["64", "32"]
    assert "[me]" in table and "[you]" in table
    assert a[:12] in table and b[:12] in table and f"opened by {socket.gethostname()}" in table
    rows = json.loads(cli("namespaces", "--json", "--diff", b, a))
    assert {"field": "groups[0].block_tokens", "a": 32, "b": 64} in rows
    assert {row["field"] for row in rows} == {"groups[0].block_tokens", "page_format", "salt", "tenant"}
    assert {"field": "tenant", "a": "you", "b": "me"} in rows
    # Salts are their tenants' business: digests tell them apart.
    digests = [hashlib.sha256(spec.salt.encode()).hexdigest()[:12] for spec in specs]
    for text in (table, json.dumps(rows)):
        assert "my salt" not in text and "your salt" not in text
        assert all(digest in text for digest in digests)
    listing = cli("namespaces", "--json")
    assert "my salt" not in listing and digests[0] in listing
    assert "no namespace begins with 'no such'" in cli.fails("namespaces", "--diff", a, "no such", status=2)[1]
    assert "differ in no field" in cli("namespaces", "--diff", a, a)


def test_namespaces_say_what_they_hold_and_how_they_are_used(cli: Cli, stored: tuple[Namespace, Namespace]) -> None:
    subject = f"namespace:{stored[0].fingerprint.hex()[:12]}"
    cli("quota", f"{subject}=1.5MiB")
    rows = json.loads(cli("namespaces", "--json"))
    assert {(row["fingerprint"], row["model"], row["entries"], row["bytes"]) for row in rows} == {
        (namespace.fingerprint.hex(), namespace.spec.model, 2, 2_000) for namespace in stored
    }
    row = next(row for row in rows if row["model"] == "model-x")
    assert row["quotas"] == [{"subject": subject, "limit_bytes": 3 << 19, "used_bytes": 2_000}]
    assert (row["lookup_hits"], row["hit_ratio"], row["superseded"], row["tiers"]) == (0, None, False, [])
    assert row["age_seconds"] >= row["idle_seconds"] >= 0
    lines = cli("namespaces").splitlines()
    assert max(map(len, lines)) <= 80
    assert all(f"{each.fingerprint.hex()[:12]}  {each.spec.model}" in lines for each in stored)
    nth = lines.index(f"{stored[0].fingerprint.hex()[:12]}  model-x")
    assert lines[nth + 1].strip().startswith("2 blocks, 1.95 KiB of 1.5 MiB")
    assert lines[nth + 2].strip().startswith(f"opened by {socket.gethostname()}, ")
    cli("quota", f"{subject}=0")


def test_quotas_are_set_listed_and_taken_away(cli: Cli) -> None:
    set_two = cli("quota", "tenant:acme=3MiB", "tenant:other=5MB")
    assert cli("quota") == set_two and "`kvpool namespaces` counts stored blocks alone" in set_two
    assert "tenant:acme" in set_two and "3 MiB" in set_two
    assert json.loads(cli("quota", "tenant:other=0", "--json")) == [
        {"subject": "tenant:acme", "limit_bytes": 3 << 20, "used_bytes": 0}
    ]
    assert json.loads(cli("quota", "tenant:acme=0", "--json")) == []
    assert cli("quota").startswith(f"no quotas at {cli.server.endpoint}: ")


def test_quotas_beyond_the_memory_are_warned_of(pool_server: StartServer, cli_at: CliAt) -> None:
    warning = "the quotas of tenants add up to 9 MiB, and the pool's memory is 8 MiB: a tenant below its quota may lose"
    cli = cli_at(pool_server("--quota", "tenant:a=4MiB", "--quota", "tenant:b=5MiB"))
    assert warning in cli.server.stderr
    for more in ([], ["--json"]):
        out, err = cli.fails("quota", *more, status=0)
        assert "tenant:a" in out and err.startswith(f"warning: {warning}")
    cli("quota", "tenant:b=4MiB", "namespace:01234567=8MiB")
    assert cli.server.stderr.count("the quotas of ") == 1
    _, err = cli.fails("quota", "namespace:89abcdef=1MiB", status=0)
    wait_for(lambda: "the quotas of namespaces add up to 9 MiB" in cli.server.stderr, "the warning in the log")
    assert "the quotas of namespaces add up to 9 MiB" in err


def test_clear_drops_one_namespace_by_the_start_of_its_fingerprint_or_all(
    cli: Cli, stored: tuple[Namespace, Namespace]
) -> None:
    first, second = stored
    name = first.fingerprint.hex()[:12]
    assert cli("clear", "--namespace", name.upper()).startswith(f"dropped 2 blocks of namespace {name} at ")
    assert _left(cli) == {first.spec.model: 0, second.spec.model: 2}
    assert cli("clear", "--all").startswith("dropped 2 blocks of all namespaces at ")
    assert set(_left(cli).values()) == {0}


MEASUREMENT = "--mib and --namespace are about a measurement; give --bandwidth, too"
ALL_OR_ONE = "give either --namespace, or --all to drop the blocks of every model"


@pytest.mark.parametrize(
    ("line", "says", "status"),
    [
        ("ping --namespace 0123", MEASUREMENT, 2),
        ("ping --mib 4", MEASUREMENT, 2),
        ("ping --bandwidth --prefill 9", "--prefill and --tensor-parallel are about a namespace's hits", 2),
        ("ping --bandwidth --namespace zzz", "no namespace begins with 'zzz'", 2),
        ("ping --bandwidth --namespace ''", "2 namespaces begin with ''", 2),
        ("clear 08fa", "'08fa' names nothing to drop; give --namespace 08fa, or --all", 2),
        # As a script with a variable that is not set would ask.
        ("clear --namespace ''", "--namespace is empty; give a fingerprint, or --all for every namespace", 2),
        ("clear --namespace zzz", "no namespace begins with 'zzz'; `kvpool namespaces` lists them", 2),
        (f"clear --namespace {'0' * 64}", f"namespace {'0' * 64} is not open on this server; open it first", 1),
        ("clear", ALL_OR_ONE, 2),
        ("clear --namespace abc --all", ALL_OR_ONE, 2),
        (
            "quota tenant:good=1GiB tenant:acme=100",
            "quota 'tenant:acme=100' has no unit; give tenant:acme=100GiB, or tenant:acme=100B if you",
            2,
        ),
        ("quota tenant:good=1GiB tenant:acme=lots", "quota 'tenant:acme=lots': 'lots' is not a size", 2),
        ("quota tenant:good=1GiB tenant:nobody=0", "there is no quota tenant:nobody to delete", 2),
    ],
)
def test_what_is_refused_changes_nothing_and_is_one_sentence(
    cli: Cli, stored: object, line: str, says: str, status: int
) -> None:
    out, err = cli.fails(*shlex.split(line), status=status)
    assert says in err and err.startswith("kvpool: ") and err.count("\n") == 1
    assert not out or line.startswith("ping")
    assert set(_left(cli).values()) == {2} and json.loads(cli("quota", "--json")) == []


NO_SERVER = "cannot reach kvpool-server at 127.0.0.1:1.*check that the server runs, and that the endpoint is right"
NO_ENDPOINT = "endpoint 'nowhere' is not HOST:PORT, for example '127.0.0.1:50051'"
NO_AUTHORITY = "--tls /no has no ca.crt; give a directory that `kvpool certs` has made"
NO_TRANSPORT = "'pigeon' is not one of auto, shm, tcp, grpc, mooncake, network"


@pytest.mark.parametrize(
    ("line", "endpoint", "says", "status"),
    [
        *((line, "127.0.0.1:1", NO_SERVER, 1) for line in ("ping", "stats", "namespaces", "clear --all", "top --once")),
        *((line, "nowhere", NO_ENDPOINT, 2) for line in ("ping", "top", "top --once")),
        *((line, "", NO_AUTHORITY, 2) for line in ("--tls /no ping", "ping --tls /no", "ping --tls=/no")),
        ("ping --transport pigeon", "127.0.0.1:1", NO_TRANSPORT, 2),
        ("top", "127.0.0.1:1", "kvpool top draws on a terminal; give --once to print one frame", 2),
        ("ping --tls", "", "Option '--tls' requires an argument", 2),
        ("--tls ping", "", "Missing command", 2),
        ("ping --mib 0", "127.0.0.1:1", "'--mib': 0 is out of bounds; give 1 to 65,536", 2),
        ("ping --prefill 0.5", "127.0.0.1:1", "'--prefill': 0.5 is out of bounds; give 1 or more", 2),
        (
            "pin --prompt - --namespace ab --seconds 0",
            "127.0.0.1:1",
            "'--seconds': 0 is out of bounds; give 1 to 86,400, or --end, which ends pins",
            2,
        ),
    ],
)
def test_an_error_is_said_without_a_server(cli: Cli, line: str, endpoint: str, says: str, status: int) -> None:
    out, err = cli.fails(*shlex.split(line), endpoint=endpoint, status=status)
    assert out == "" and re.search(says, " ".join(err.replace("│", " ").split()))
    if says in (NO_SERVER, NO_ENDPOINT, NO_AUTHORITY):
        assert err.startswith("kvpool: ") and err.count("\n") == 1


def test_a_shell_completes_commands_of_all_packages() -> None:
    completes = {"_KVPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "kvpool t", "COMP_CWORD": "1"}
    assert {"top", "token", "tier"} <= {*run_command(KVPOOL, **completes).stdout.split()}


def test_other_packages_add_commands_and_are_loaded_only_for_those() -> None:
    assert "gc" in run_command(KVPOOL, "tier", "--help").stdout
    assert "tier" in run_command(KVPOOL, "--help").stdout
    script = """
import sys
sys.argv[1:] = ["--version"]
try:
    main()
finally:
    print(any(name.startswith("kvpool_server") for name in sys.modules))
"""
    assert run_command(sys.executable, "-c", script).stdout.splitlines()[-1] == "False"
