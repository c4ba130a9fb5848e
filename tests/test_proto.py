"""The contract: generated code is what the proto says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_generated_code_is_not_stale(tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--isolated", "--python", "3.11"]
    uv += ["--with", "grpcio-tools==1.71.2", "--with", "setuptools<80"]
    protoc = ["python", "-m", "grpc_tools.protoc", "-Iproto", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    protoc += [f"--grpc_python_out={tmp_path}", "kvpool/v1/pool.proto"]
    done = subprocess.run([*uv, *protoc], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("pool_pb2.py", "pool_pb2.pyi", "pool_pb2_grpc.py"):
        fresh = (tmp_path / "kvpool/v1" / name).read_text()
        assert (ROOT / "kvpool/v1" / name).read_text() == fresh, "run `make proto`"
