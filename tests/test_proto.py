"""The contract: generated code is what the proto says, and the proto says what everything is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]
PROTO = "kvpool/v1/pool.proto"
GENERATED = ("pool_pb2.py", "pool_pb2.pyi", "pool_pb2_grpc.py")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make proto` would write, and the descriptors with their comments."""
    out = tmp_path_factory.mktemp("proto")
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--isolated", "--python", "3.11"]
    uv += ["--with", "grpcio-tools==1.71.2", "--with", "setuptools<80"]
    protoc = ["python", "-m", "grpc_tools.protoc", "-Iproto", f"--python_out={out}", f"--pyi_out={out}"]
    protoc += [f"--grpc_python_out={out}", f"--descriptor_set_out={out}/pool.binpb", "--include_source_info", PROTO]
    done = subprocess.run([*uv, *protoc], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def described(regenerated: Path) -> FileDescriptorProto:
    (file,) = FileDescriptorSet.FromString((regenerated / "pool.binpb").read_bytes()).file
    return file


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_is_not_stale(regenerated: Path, name: str) -> None:
    fresh = (regenerated / "kvpool/v1" / name).read_text()
    assert (ROOT / "kvpool/v1" / name).read_text() == fresh, "run `make proto`"


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        tuple(location.path): (location.leading_comments + location.trailing_comments).strip()
        for location in file.source_code_info.location
    }


_MESSAGE, _ENUM, _SERVICE, _FIELD, _VALUE, _METHOD = 4, 5, 6, 2, 2, 2
"""Field numbers in FileDescriptorProto, DescriptorProto, EnumDescriptorProto and ServiceDescriptorProto."""


def _named(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path and name of every message, field, enum, value, service and method."""

    def in_message(message: DescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        yield path, message.name
        for idx, field in enumerate(message.field):
            yield (*path, _FIELD, idx), f"{message.name}.{field.name}"

    for idx, message in enumerate(file.message_type):
        yield from in_message(message, (_MESSAGE, idx))
    for idx, enum in enumerate(file.enum_type):
        yield (_ENUM, idx), enum.name
        for nth, value in enumerate(enum.value):
            yield (_ENUM, idx, _VALUE, nth), value.name
    for idx, service in enumerate(file.service):
        for nth, method in enumerate(service.method):
            yield (_SERVICE, idx, _METHOD, nth), f"{service.name}.{method.name}"


def test_everything_in_the_contract_has_a_comment(described: FileDescriptorProto) -> None:
    comments = _comments(described)
    named = list(_named(described))
    assert len(named) > 150
    # `map` entries are messages that protoc makes up; they have no line of their own.
    silent = [name for path, name in named if path in comments and not comments[path]]
    assert silent == []
