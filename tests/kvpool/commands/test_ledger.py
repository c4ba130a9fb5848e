"""`kvpool ledger`: what engines have reported and the pool has seen, as a table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.commands.savings import ledger_table, moment
from kvpool.protocol.errors import InvalidRequestError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.reports import Cause, ReportRequest
from kvpool.v1 import pool_pb2 as pb
from tests.conftest import StartServer
from tests.kvpool.conftest import Cli
from tests.support.processes import ServerProcess
from tests.support.values import group_spec, namespace_spec, run_of

BLOCK_BYTES = 256 << 10
EVICTED = Cause.EVICTED.label


def spec_of(tenant: str, model: str = "llama") -> NamespaceSpec:
    return namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant=tenant, model=model)


def report(client: Client, tenant: str, **fields: object) -> None:
    namespace = client.open_namespace(spec_of(tenant, "=cmd()" if tenant == "umbra" else "llama"))
    told = ReportRequest(
        reporter=tenant.encode().ljust(16), sequence=1, engine="host:1", namespaces=(namespace.fingerprint,), **fields
    )  # type: ignore[arg-type]
    assert client.rpc.report(told, 5_000)


@pytest.fixture
def server(pool_server: StartServer, tmp_path: Path) -> ServerProcess:
    server = pool_server("--ledger", str(tmp_path / "ledger.sqlite"))
    with Client(ClientConfig(server.endpoint)) as client:
        report(
            client,
            "acme",
            saved_seconds=90.0,
            num_devices=2,
            loaded_tokens=3_000,
            num_requests=5,
            computed_tokens={EVICTED: 1_000},
        )
        report(client, "umbra", lost_seconds=7.0, computed_tokens={"never_stored": 10})
    return server


def test_a_table_csv_and_json(cli: Cli) -> None:
    printed = cli("ledger")
    assert all(len(line) <= 80 for line in printed.partition("saved: ")[0].splitlines())
    assert "No engine reports" not in printed and "by others" not in printed, "columns without a number are left out"
    assert "acme" in printed and "180 s" in printed and "75.0%" in printed and "umbra" in printed and "7 s" in printed
    assert "The ledger is kept since " in printed and "saved: " in printed
    first, second = csv.DictReader(io.StringIO(cli("ledger", "--csv")))
    assert (first["tenant"], first["saved_gpu_seconds"], first["loaded_tokens"]) == ("acme", "180.0", "3000")
    assert (first["computed_evicted_tokens"], second["computed_never_stored_tokens"]) == ("1000", "10")
    assert {f"computed_{cause.label}_tokens" for cause in Cause} <= set(first)
    told = json.loads(cli("ledger", "--json", "--by", "all"))
    assert told["is_persistent"] and abs(told["begins"] - time.time()) < 600
    assert [(row["tenant"], row["model"]) for row in told["rows"]] == [("acme", "llama"), ("umbra", "=cmd()")]
    assert told["rows"][0]["computed_tokens"] == {EVICTED: 1_000} and told["rows"][0]["hour"].endswith(":00Z")
    assert "\n'=cmd()," in cli("ledger", "--csv", "--by", "model"), "no spreadsheet takes the name for a formula"
    assert "no rows of that time" in cli("ledger", "--until", "2020-01-01")
    assert cli("ledger", "--csv", "--until", "2020-01-01").count("\n") == 1
    assert "'soon' is no time; give one such as 90m" in cli.fails("ledger", "--since", "soon", status=2)[1]
    assert "exclude each other" in cli.fails("ledger", "--csv", "--json", status=2)[1]


def drawn(rows: list[pb.LedgerRow], by: str, width: int = 80) -> tuple[str, str]:
    """The table and the sentences under it."""
    console = Console(width=width, file=io.StringIO())
    table, sentences = ledger_table(rows, by.split(), "ledger", console)
    with console.capture() as printed:
        console.print(table)
    return printed.get(), " ".join(sentences)


def test_without_engines_reports_the_server_tells_what_it_counts() -> None:
    counted = pb.LedgerRow(hour=0, tenant="acme", model="", gib_hours=0.0125, hit_tokens=40_000, stored_bytes=1 << 20)
    table, said = drawn([counted], "tenant")
    assert "40,000" in table and "12.8 MiB-h" in table and "evicted" not in table
    assert "No engine reports to this server: saved, lost, hit ratio, evicted are unknown." in said
    reported = pb.LedgerRow(
        hour=0, tenant="umbra", model="", loaded_tokens=3, num_requests=1, computed_tokens={EVICTED: 1}
    )
    table, said = drawn([counted, reported], "tenant")
    acme, umbra = (line.split() for line in table.splitlines() if "acme" in line or "umbra" in line)
    assert acme[-2:] == ["-", "-"] and umbra[-2:] == ["75.0%", "1"]
    assert "-: no engine has reported." in said


def test_moments() -> None:
    now = 1_800_000_000.0
    assert moment("90m", now) == 1_800_000_000 - 5_400
    assert moment("4w", now) == 1_800_000_000 - 28 * 86_400
    assert moment("2026-03-01", now) == moment("2026-03-01T01:00+01:00", now) == 1_772_323_200
    assert moment("999999w", now) == 0
    for wrong in ("", "30", "30 d", "-1d", "d"):
        with pytest.raises(InvalidRequestError):
            moment(wrong, now)


def test_what_one_tenants_blocks_cost_another(pool_server: StartServer) -> None:
    """8 MiB hold 32 blocks less overhead: 40 of one tenant's push out another's."""
    with Client(ClientConfig(pool_server().endpoint)) as client:
        acme, umbra = (client.open_namespace(spec_of(tenant)) for tenant in ("acme", "umbra"))
        payloads = [bytes(BLOCK_BYTES)]
        for nth in range(4):
            client.put_blocks(acme, run_of(("acme", nth)), payloads)
        for nth in range(40):
            client.put_blocks(umbra, run_of(("umbra", nth)), payloads)
        tokens = acme.spec.groups[0].block_tokens
        lookup = client.lookup(acme, [run_of(("acme", 0))], explain=True)
        assert [miss.cause.name for miss in lookup.hits[0].missing] == ["EVICTED"]
        client.lookup(umbra, [run_of(("umbra", 0))], explain=True)  # Its own blocks: nobody's loss.
        rows = {row.tenant: row for row in client.admin.ledger(0).rows}
    assert rows["acme"].evicted_by_others_tokens == rows["umbra"].evicted_of_others_tokens == tokens
    assert rows["umbra"].evicted_by_others_tokens == rows["acme"].evicted_of_others_tokens == 0


def test_rows_of_all_are_read_at_80_columns_and_wider_ones_have_more() -> None:
    tokens = {"loaded_tokens": 3_000_000, "hit_tokens": 4_000_000, "evicted_by_others_tokens": 1_000_000}
    amounts = {"saved_gpu_seconds": 7_200_000.0, "lost_gpu_seconds": 40.0, "gib_hours": 1_234.5, "num_requests": 50}
    full = pb.LedgerRow(
        hour=1_800_000_000,
        tenant="a-tenant-with-a-name",
        model="meta-llama/Llama-3.1-70B-Instruct",
        stored_bytes=1 << 43,
        evicted_of_others_tokens=5,
        computed_tokens={EVICTED: 1_000_000},
        **tokens,
        **amounts,
    )
    table, said = drawn([full], "hour tenant model")
    assert all(len(line) <= 80 for line in table.splitlines()) and "…" not in table
    assert "01-15 08:00" in table and "a-tenant-with-a-" in table and "2,000.0 h" in table and "75.0%" in table
    assert "Too wide for the terminal: lost" in said and "--csv has all columns" in said
    table, said = drawn([full], "hour tenant model", 200)
    assert "Too wide" not in said and "meta-llama/Llama-3.1-70B-Instruct" in table and "1.21 TiB-h" in table
