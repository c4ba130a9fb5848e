import json
import sys

import pytest

from tests.support.processes import run_command

FORBIDDEN = ("mooncake", "torch", "vllm", "vllm_plugin")


def _loaded_after(statement: str) -> set[str]:
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = run_command(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "package", ["kvpool.client.client", "kvpool.cli", "kvpool_server.app.command", "kvpool_server.app.server"]
)
def test_neither_mooncake_nor_torch_nor_vllm_is_imported(package: str) -> None:
    loaded = _loaded_after(f"import {package}")
    assert package.partition(".")[0] in loaded
    assert not loaded & {*FORBIDDEN}


def test_the_client_library_does_not_import_the_server() -> None:
    assert "kvpool_server" not in _loaded_after("import kvpool, kvpool.cli")


def test_import_kvpool_is_quick() -> None:
    def seconds() -> float:
        # Of the processor, interpreter included: an import waits for nothing, and this machine may be busy.
        done = run_command(sys.executable, "-c", "import kvpool, time; print(time.process_time())")
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert min(seconds() for _ in range(5)) < 0.3


def test_the_servers_help_loads_neither_grpc_nor_the_pool() -> None:
    loaded = _loaded_after("import kvpool_server.app.command")
    assert "pydantic_settings" in loaded and not loaded & {"grpc", "google"}


def test_a_keeper_loads_the_standard_library_alone() -> None:
    loaded = _loaded_after("import kvpool_server.__main__")
    assert "kvpool_server" in loaded
    assert not loaded & {"grpc", "google", "numpy", "pydantic", "structlog", "typer", "asyncio"}


def test_a_data_worker_starts_without_what_it_does_not_need() -> None:
    loaded = _loaded_after("import kvpool_server.data_plane.worker")
    assert "kvpool_server" in loaded
    assert not loaded & {*FORBIDDEN, "grpc", "google", "asyncio", "pydantic", "structlog", "typer"}


def test_every_public_name_is_there() -> None:
    import kvpool

    assert all(hasattr(kvpool, name) for name in kvpool.__all__)
    assert {*kvpool.__all__} <= {*dir(kvpool)}
    assert not hasattr(kvpool, "nothing_of_this_name")
