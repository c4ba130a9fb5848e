"""No change of the proto breaks clients or servers of the previous release: `buf breaking` compares the two.

A field or RPC without which the previous release works may go: the proto reserves the field's number and name, and
`REMOVED` has what buf says of the removal, until the previous release lacks the field, too. Any other field or RPC
stays, marked as deprecated, until no supported release uses it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skew.releases import ROOT, unpack
from tests.support.effort import some

BUF = "buf-bin==1.75.0"
PROTO = Path("kvpool/v1/pool.proto")

REMOVED = {
    'Previously present RPC "Read" on service "Pool" was deleted.',
    'Previously present RPC "Write" on service "Pool" was deleted.',
    'Previously present message "ReadRequest" was deleted from file.',
    'Previously present message "ReadResponse" was deleted from file.',
    'Previously present message "WriteRequest" was deleted from file.',
    'Previously present message "WriteResponse" was deleted from file.',
    'Previously present message "Agreement" was deleted from file.',
    'Previously present message "FirstTokenTimes" was deleted from file.',
    'Previously present message "MeasuredSaving" was deleted from file.',
    'Previously present message "RequestTrace" was deleted from file.',
    'Previously present message "RequestTrace.ComputedTokensEntry" was deleted from file.',
    'Previously present field "16" with name "first_token_times" on message "ReportRequest" was deleted.',
    'Previously present field "17" with name "agreement" on message "ReportRequest" was deleted.',
    'Previously present field "20" with name "requests" on message "ReportRequest" was deleted.',
    'Previously present field "3" with name "request_id" on message "ExplainRequest" was deleted.',
    'Previously present field "7" with name "requests" on message "ExplainResponse" was deleted.',
    'Previously present field "3" with name "measured" on message "LedgerResponse" was deleted.',
    'Previously present field "6" with name "extent_bytes" on message "Segment" was deleted.',
    'Previously present field "5" with name "simulated_hit_ratio" on message "ValueCurve" was deleted.',
    'Previously present field "4" with name "uncertainty" on message "ValueEstimate" was deleted.',
}

# Text of the contract -> what takes its place, and what buf has to say of that.
BREAKING = {
    "a field is renamed": (
        "  bytes offsets = 4;", "  bytes places = 4;",
        'Field "4" on message "RunHits" changed name from "offsets" to "places".',
    ),
    "an RPC is streamed": (
        "rpc Get(GetRequest) returns (GetResponse);", "rpc Get(GetRequest) returns (stream GetResponse);",
        'RPC "Get" on service "Pool" changed from server unary to server streaming.',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(["proto"], tmp_path_factory.mktemp("previous")) / "proto"


def _breaking(proto: Path, previous: Path) -> set[str]:
    """What breaks the previous release, in buf's words."""
    uv = [str(Path(sys.executable).with_name("uv")), "tool", "run", "--quiet", "--from", BUF]
    command = [*uv, "buf", "breaking", str(proto), "--against", str(previous), "--config", str(proto / "buf.yaml")]
    done = subprocess.run(command, cwd=proto, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == (100 if done.stdout else 0), done.stdout + done.stderr
    return {line.split(":", 3)[3] for line in done.stdout.splitlines()}


def test_the_contract_breaks_nobody_of_the_previous_release(previous: Path) -> None:
    assert _breaking(ROOT / "proto", previous) == REMOVED


@pytest.mark.parametrize("change", some(1, BREAKING))
def test_a_breaking_change_is_found_and_named(previous: Path, tmp_path: Path, change: str) -> None:
    old, new, says = BREAKING[change]
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    changed = tmp_path / "proto" / PROTO
    text = changed.read_text()
    assert text.count(old) == 1, f"{old!r} is not in the contract once"
    changed.write_text(text.replace(old, new))
    found = _breaking(tmp_path / "proto", previous) - REMOVED
    assert any(says in each for each in found), found
