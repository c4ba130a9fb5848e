"""Other weights are another namespace, down to the last byte; equal weights are the same one, wherever they lie."""

import json
import os
import shutil
from pathlib import Path

import pytest

from vllm_plugin.weights import weights_digest

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvpool" / "weights.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(os.urandom(SIZE))
    return directory


@pytest.mark.parametrize("offset", [0, 1, SIZE // 3, SIZE - 1])
def test_any_byte_counts(model: Path, offset: int) -> None:
    before = weights_digest(str(model), None)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert weights_digest(str(model), None) != before


def test_code_and_single_files_count_too(model: Path, tmp_path: Path) -> None:
    before = weights_digest(str(model), None)
    (model / "modeling.py").write_text("x = 1")
    assert weights_digest(str(model), None) != before
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    first = weights_digest(str(gguf), None)
    gguf.write_bytes(b"two")
    assert first and weights_digest(str(gguf), None) != first


def test_it_does_not_matter_where_they_lie(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    assert weights_digest(str(tmp_path / "elsewhere"), None) == weights_digest(str(model), None)


def test_a_file_is_read_once(model: Path, cache: Path) -> None:
    digest = weights_digest(str(model), None)
    known = json.loads(cache.read_text())
    assert len(known) == 1
    cache.write_text(json.dumps(dict.fromkeys(known, "remembered")))
    assert weights_digest(str(model), None) != digest


def test_a_broken_or_unwritable_cache_costs_time_only(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = weights_digest(str(model), None)
    cache.write_text("{")
    assert weights_digest(str(model), None) == digest
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_digest(str(model), None) == digest


def test_the_hubs_blobs_are_named_by_content_already(model: Path, tmp_path: Path, cache: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "abc123").write_bytes(b"weights")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blobs / "abc123")
    before = weights_digest(str(model), None)
    assert not cache.exists()
    (blobs / "abc123").rename(blobs / "def456")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blobs / "def456")
    assert weights_digest(str(model), None) != before
