import json
import sys

import pytest

from tests.support.processes import run_command


def _loaded_after(statement: str) -> set[str]:
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = run_command(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


HEAVY = {"mooncake", "torch", "vllm", "vllm_plugin"}
NETWORK = {"grpc", "google"}


@pytest.mark.parametrize(
    ("statement", "not_loaded"),
    [
        ("import kvpool, kvpool.cli", HEAVY | {"kvpool_server"}),
        ("import kvpool.client.client", HEAVY | {"kvpool_server"}),
        ("import kvpool_server.app.command", HEAVY | NETWORK),  # The server's help.
        ("import kvpool_server.app.server", HEAVY),
        # A keeper loads the standard library alone.
        ("import kvpool_server.__main__", NETWORK | {"numpy", "pydantic", "structlog", "typer", "asyncio"}),
        ("import kvpool_server.data_plane.worker", HEAVY | NETWORK | {"asyncio", "pydantic", "structlog", "typer"}),
    ],
)
def test_what_a_process_does_not_need_is_not_imported(statement: str, not_loaded: set[str]) -> None:
    loaded = _loaded_after(statement)
    assert statement.split()[1].partition(".")[0].strip(",") in loaded
    assert not loaded & not_loaded
