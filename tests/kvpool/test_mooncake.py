"""Starting Mooncake's engine, and the sentences of those who cannot."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest

from kvpool.protocol.errors import TransferError
from kvpool.transport.mooncake_engine import RDMA_DEVICES, address_towards
from tests.support.processes import run_command, server_command

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
START = "from kvpool.transport.mooncake_engine import Engine; Engine('127.0.0.1', 'tcp')"


def _start_with(package: Path, source: str) -> str:
    """What is said where `mooncake.engine` is `source`."""
    (package / "mooncake").mkdir()
    (package / "mooncake" / "__init__.py").touch()
    (package / "mooncake" / "engine.py").write_text(source)
    root = Path(__file__).parents[2]
    done = run_command(sys.executable, "-c", START, PYTHONPATH=f"{package}{os.pathsep}{root}")
    assert done.returncode == 1
    return done.stderr


def test_a_package_that_is_not_there_is_a_sentence_with_the_fix(tmp_path: Path) -> None:
    said = _start_with(tmp_path, "raise ModuleNotFoundError(\"No module named 'mooncake'\")")
    assert "ConfigError: transport mooncake needs a package that is not installed" in said
    (requirement,) = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["mooncake"]
    assert f"pip install '{requirement}'" in said
    assert f"'{requirement.replace('engine', 'engine-non-cuda')}' where there is no CUDA" in said


def test_a_library_that_is_not_there_is_a_sentence_with_the_fix(tmp_path: Path) -> None:
    said = _start_with(tmp_path, "raise ImportError('libibverbs.so.1: cannot open shared object file')")
    assert "ConfigError: mooncake-transfer-engine lacks a system library (libibverbs.so.1: cannot open" in said
    assert "apt-get install libibverbs1" in said


@pytest.mark.skipif(RDMA_DEVICES.is_dir(), reason="this machine has RDMA")
def test_a_server_without_an_rdma_device_says_so_and_does_not_fall_back_to_tcp() -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    nowhere = ("--listen", "127.0.0.1:0", "--http-listen", "", "--data-listen", "")
    rdma = server_command(*nowhere, "--mooncake", "rdma", "--mooncake-trusted-network")
    done = run_command(*rdma)
    assert done.returncode == 2
    assert f"kvpool-server: no RDMA device in {RDMA_DEVICES}" in done.stderr
    done = run_command(*rdma, "--mooncake-device", "mlx5_7")
    assert "no RDMA device 'mlx5_7'" in done.stderr and "there are: none" in done.stderr


def test_a_host_that_is_nowhere_is_an_error() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(TransferError, match=r"no route to 'nowhere\.invalid'"):
        address_towards("nowhere.invalid")
