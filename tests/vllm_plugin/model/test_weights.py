"""Other weights are another namespace, down to the last byte; equal weights are the same one, wherever they lie."""

import copy
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import LoadConfig

from tests.support.toy.fixtures import MakeConfig
from vllm_plugin import BEGAN_AT
from vllm_plugin.model import weights as weights_module
from vllm_plugin.model.weights import LOCK_TIMEOUT_S, Weights, describe_weights

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(BEGAN_AT, str(1 << 62))
    return tmp_path / "cache" / "kvpool" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(os.urandom(SIZE))
    return directory


@pytest.fixture
def describe(vllm_config: MakeConfig) -> Callable[..., Weights]:
    """`describe(path or name, revision=None, **LoadConfig's fields)`."""
    config = copy.copy(vllm_config().model_config)
    config.hf_config = copy.copy(config.hf_config)

    def make(
        model: Any, revision: str | None = None, uri: str = "", commit: str = "", settings: Any = None, **load: Any
    ) -> Weights:
        config.model, config.revision, config.model_weights = str(model), revision, uri
        config.hf_config_path = settings and str(settings)
        config.hf_config._commit_hash = commit or None
        return describe_weights(config, LoadConfig(**load))

    return make


@pytest.fixture
def digest(describe: Callable[..., Weights]) -> Callable[..., str]:
    return lambda *args, **options: describe(*args, **options).digest


def test_a_file_is_the_order_of_its_pieces(
    model: Path, digest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by several threads."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", SIZE // 5)  # And a rest.
    file = model / "model.safetensors"
    content = file.read_bytes()
    pieces = [content[start : start + SIZE // 5] for start in range(0, SIZE, SIZE // 5)]
    contents = [content, content[:-1], b"".join([pieces[1], pieces[0], *pieces[2:]]), b"".join(pieces[:-1])]
    digests = []
    for each in contents:
        file.write_bytes(each)
        digests.append(digest(model))
    assert len(set(digests)) == len(contents)
    file.write_bytes(content)
    assert digest(model) == digests[0]


@pytest.mark.parametrize("offset", [0, 1, SIZE // 3, SIZE - 1])
def test_any_byte_counts(model: Path, offset: int, digest: Callable[..., str]) -> None:
    before = digest(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert digest(model) != before


def test_code_and_single_files_count_too(model: Path, tmp_path: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    (model / "modeling.py").write_text("x = 1")
    assert digest(model) != before
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    first = digest(gguf)
    gguf.write_bytes(b"two")
    assert first and digest(gguf) != first


def test_a_file_is_read_once(model: Path, cache: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    (kept,) = cache.iterdir()
    kept.write_text("1" * 64)
    assert digest(model) != before


def test_a_file_that_was_written_again_with_its_old_time_is_read_again(model: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    file = model / "model.safetensors"
    times = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"other weights")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(model) != before


@pytest.mark.parametrize(("fraction_ns", "is_kept"), [(0, False), (5, True)])
def test_a_file_with_the_times_of_an_image_is_read_each_time(
    fraction_ns: int, is_kept: bool, model: Path, digest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another image may be mounted there later: the same inodes, sizes and times, and other weights."""
    time_ns, seen = 1_700_000_000 * 10**9 + fraction_ns, weights_module._state
    monkeypatch.setattr(weights_module, "_state", lambda file: (*seen(file)[:3], time_ns, time_ns))
    before = digest(model)
    with (model / "model.safetensors").open("r+b") as opened:
        opened.write(b"other weights")
    assert (digest(model) == before) == is_kept


def test_a_configuration_of_a_part_of_the_model_counts(model: Path, digest: Callable[..., str]) -> None:
    found = []
    for content in ("{}", '{"heads": 2}'):
        for place in (model, model / "encoder"):
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(content)
            found.append(digest(model))
    assert found[1] == found[2] and len(set(found)) == 3  # At the top its fields count, one by one.


def test_a_broken_or_unwritable_cache_costs_time_only(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: Callable[..., str]
) -> None:
    before = digest(model)
    (kept,) = cache.iterdir()
    for broken in (b"", b"null", b"\xff\xfe", b"1" * 63, b"1" * 4096):
        kept.write_bytes(broken)
        assert digest(model) == before
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest(model) == before


def test_a_small_model_does_not_wait_for_a_large_one(
    model: Path, tmp_path: Path, cache: Path, digest: Callable[..., str]
) -> None:
    digest(model)
    (kept,) = cache.iterdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(os.urandom(SIZE))
    with kept.open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)  # Another engine reads the first model.
        started = time.monotonic()
        assert digest(other)
        assert time.monotonic() - started < LOCK_TIMEOUT_S / 10


@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "preprocessor_config.json", "tekken.json", "scheduler.bin", "anything.else"],
)
def test_a_file_beside_the_weights_counts_unless_it_is_known_to_change_no_kv(
    name: str, model: Path, digest: Callable[..., str]
) -> None:
    before = digest(model)
    (model / name).write_text("{}")
    first = digest(model)
    (model / name).write_text('{"other": 1}')
    assert len({before, first, digest(model)}) == 3
    (model / name).unlink()
    for unread in (
        "README.md",
        "tokenizer.json",
        ".gitattributes",
        ".cache/x/y.lock",
        "trainer_state.json",
    ):
        (model / unread).parent.mkdir(parents=True, exist_ok=True)
        (model / unread).write_text("not KV")
    assert digest(model) == before


@pytest.mark.parametrize("name", ["tokenizer.safetensors", "optimizer.safetensors", "xLICENSE.safetensors", "a.bin"])
def test_weights_of_any_name_count(name: str, model: Path, digest: Callable[..., str]) -> None:
    """vLLM loads every file of weights, the last one over the others."""
    before = digest(model)
    (model / name).write_bytes(b"other weights")
    assert digest(model) != before


# Files that change while the engine loads them


def link_flips(model: Path, latest: Path) -> None:
    latest.unlink()
    latest.symlink_to(model.parent / "newer")


def link_above_flips(model: Path, latest: Path) -> None:
    (model.parent.parent / "link").unlink()
    (model.parent.parent / "link").symlink_to(model.parent)


def file_is_written_again(model: Path, latest: Path) -> None:
    (model / "model.safetensors").write_bytes(b"newer")


def configuration_is_written_again(model: Path, latest: Path) -> None:
    (model / "config.json").write_text("{}")


def directories_change_places(model: Path, latest: Path) -> None:
    model.rename(model.parent / "oldest")
    (model.parent / "newer").rename(model)


def directories_above_change_places(model: Path, latest: Path) -> None:
    model.parent.rename(model.parent.parent / "before")
    (model.parent.parent / "other").rename(model.parent)


@pytest.mark.parametrize(
    "happens",
    [
        link_flips,
        link_above_flips,
        file_is_written_again,
        configuration_is_written_again,
        directories_change_places,
        directories_above_change_places,
    ],
)
@pytest.mark.parametrize("folder", ["models", "snapshots"])
def test_what_changes_after_the_engines_start_leaves_the_weights_in_doubt(
    happens: Callable[[Path, Path], None],
    folder: str,
    tmp_path: Path,
    describe: Callable[..., Weights],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tmp_path / folder / "older"
    for each in (model, model.parent / "newer"):
        each.mkdir(parents=True)
        (each / "model.safetensors").write_bytes(os.urandom(SIZE))
    (tmp_path / "link").symlink_to(model.parent)
    latest = model.parent / "latest"
    latest.symlink_to(model)
    shutil.copytree(model.parent, tmp_path / "other", symlinks=True)
    path = tmp_path / "link" / "latest"
    time.sleep(0.05)  # File times have the resolution of the kernel's clock.
    monkeypatch.setenv(BEGAN_AT, str(time.time_ns()))
    assert "in_doubt" not in dict(describe(path).settings)
    time.sleep(0.05)
    happens(model, latest)
    assert "has changed since the engine's start" in dict(describe(path).settings)["in_doubt"]
    assert "the engine shares KV with no other" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_that_change_elsewhere_leave_the_weights_in_doubt(
    name: str, model: Path, tmp_path: Path, describe: Callable[..., Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "settings"
    elsewhere.mkdir()
    time.sleep(0.05)
    monkeypatch.setenv(BEGAN_AT, str(time.time_ns()))
    assert "in_doubt" not in dict(describe(model, settings=elsewhere).settings)
    time.sleep(0.05)
    (elsewhere / name).touch()
    assert f"{name} has changed" in dict(describe(model, settings=elsewhere).settings)["in_doubt"]


def test_a_branch_that_moves_while_the_engine_loads_leaves_the_weights_in_doubt(
    tmp_path: Path, describe: Callable[..., Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(tmp_path, b"weights")
    monkeypatch.setenv(BEGAN_AT, "0")  # The engine has downloaded the files itself.
    assert "in_doubt" not in dict(describe("org/model", "main", download_dir=str(tmp_path)).settings)
    commit = "c" * 40
    snapshot(tmp_path, b"newer weights", commit="d" * 40)
    found = describe("org/model", "main", commit=commit, download_dir=str(tmp_path))
    assert "is " + "d" * 40 in dict(found.settings)["in_doubt"]


def test_a_file_that_is_replaced_while_its_lock_is_waited_for_gives_no_other_its_digest(
    model: Path, digest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a digest outlives the engine: whoever has the first file back would have the second one's name."""
    newer = model.parent / "newer"
    newer.mkdir()
    (newer / "model.safetensors").write_bytes(os.urandom(SIZE))

    def swap(name: str, to: str) -> None:
        (model.parent / name).rename(model.parent / to)

    def lock(record: object) -> None:
        swap("model", "older")
        swap("newer", "model")

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "_lock", lock)
        digest(model)
    swap("model", "newer")
    swap("older", "model")
    shutil.copytree(model, model.parent / "copy")
    assert digest(model) == digest(model.parent / "copy") != digest(newer)


def test_files_below_subdirectories_count(model: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    (model / "encoder").mkdir()
    (model / "encoder" / "model.safetensors").write_bytes(b"more")
    first = digest(model)
    (model / "encoder").rename(model / "decoder")
    assert len({before, first, digest(model)}) == 3


def test_what_vllm_does_not_read_beside_safetensors_does_not_count(model: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    (model / "original").mkdir()
    for name in (
        "pytorch_model-00001-of-00002.bin",
        "optimizer.pt",
        "training_args.bin",
        "original/consolidated.00.pth",
    ):
        (model / name).write_bytes(b"not read")
    assert digest(model) == before


def test_where_files_of_two_formats_lie_the_loader_that_chooses_counts(
    model: Path, describe: Callable[..., Weights]
) -> None:
    assert (
        describe(model) == describe(model, load_format="safetensors") == describe(model, load_format="runai_streamer")
    )
    (model / "consolidated.safetensors").write_bytes(b"another copy")
    assert describe(model).settings != describe(model, load_format="safetensors").settings
    assert describe(model, load_format="dummy").settings == (("load_format", "dummy"),)


def test_all_parts_of_a_split_model_count(tmp_path: Path, digest: Callable[..., str]) -> None:
    parts = [tmp_path / f"m-0000{idx}-of-00002.gguf" for idx in (1, 2)]
    for part in parts:
        part.write_bytes(b"part")
    before = digest(parts[0], load_format="gguf")
    parts[1].write_bytes(b"trap")
    assert digest(parts[0], load_format="gguf") != before


# The hub's cache


def snapshot(root: Path, content: bytes, commit: str = "c" * 40) -> None:
    """The cache of one model, `org/model`, at one commit of its branch `main`."""
    repo = root / "models--org--model"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repo / folder).mkdir(parents=True, exist_ok=True)
    blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "model.safetensors").symlink_to(blob)


def test_the_hubs_cache_is_found_where_download_dir_says(tmp_path: Path, describe: Callable[..., Weights]) -> None:
    snapshot(tmp_path / "downloads", b"weights")
    assert describe("org/model").digest == ""
    found = describe("org/model", download_dir=str(tmp_path / "downloads"))
    assert found.digest and found.model == "org/model"
    (file,) = tmp_path.rglob("snapshots/*/model.safetensors")
    file.write_bytes(b"written through the link, into the blob")
    assert describe("org/model", download_dir=str(tmp_path / "downloads")).digest != found.digest


def test_a_copy_of_the_hubs_files_is_the_same_model(tmp_path: Path, digest: Callable[..., str]) -> None:
    snapshot(tmp_path / "downloads", b"weights")
    copied = tmp_path / "copy"
    copied.mkdir()
    (copied / "model.safetensors").write_bytes(b"weights")
    assert digest("org/model", download_dir=str(tmp_path / "downloads")) == digest(copied)


def test_a_directory_that_is_linked_below_a_model_counts(
    model: Path, tmp_path: Path, digest: Callable[..., str]
) -> None:
    (tmp_path / "vision").mkdir()
    (model / "vision").symlink_to(tmp_path / "vision")
    (tmp_path / "vision" / "back").symlink_to(model)
    found = []
    for content in ("1", "2"):
        (tmp_path / "vision" / "scales.json").write_text(content)
        found.append(digest(model))
    assert found[0] != found[1]


def test_files_beside_weights_count_where_download_dir_has_the_weights_alone(
    tmp_path: Path, digest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads them from the hub's own cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    found = []
    for commit in ("c" * 40, "d" * 40):
        snapshot(tmp_path / "downloads", b"weights", commit)
        snapshot(tmp_path / "cache", b"weights", commit)
        (tmp_path / f"cache/models--org--model/snapshots/{commit}/preprocessor_config.json").write_text(commit)
        found.append(digest("org/model", download_dir=str(tmp_path / "downloads"), commit=commit))
        assert digest("org/model", commit=commit) == found[-1], "the same files, all in one cache"
    assert found[0] != found[1]


def test_a_branch_that_moved_is_another_model(tmp_path: Path, digest: Callable[..., str]) -> None:
    snapshot(tmp_path, b"weights")
    before = digest("org/model", download_dir=str(tmp_path))
    snapshot(tmp_path, b"newer weights", commit="d" * 40)
    assert digest("org/model", download_dir=str(tmp_path)) != before


# Weights that are elsewhere


def test_without_files_the_weights_have_no_name_and_the_log_says_so(
    describe: Callable[..., Weights], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = describe("nobody/has-this-model", "a" * 40)
    assert found == Weights("nobody/has-this-model", "a" * 40, "", (("load_format", "auto"),))
    assert "nobody/has-this-model" in caplog.text and "names them by what is in memory" in caplog.text


def test_two_models_of_one_last_name_in_a_bucket_are_two(model: Path, describe: Callable[..., Weights]) -> None:
    """vLLM pulls the configuration and the code of such a model, and leaves the weights where they are."""
    (model / "model.safetensors").unlink()
    (model / "modeling.py").write_text("x = 1")
    ours, theirs = (
        describe(model, uri=f"s3://bucket/{team}/model", load_format="runai_streamer") for team in ("ours", "theirs")
    )
    assert (ours.model, ours.digest) == ("s3://bucket/ours/model", "")
    assert ours != theirs
    (model / "modeling.py").write_text("x = 2")
    assert describe(model, uri="s3://bucket/ours/model", load_format="runai_streamer") != ours


def test_tensorized_weights_are_read_where_they_lie(
    model: Path, tmp_path: Path, describe: Callable[..., Weights]
) -> None:
    def options(uri: object) -> dict[str, Any]:
        return {
            "load_format": "tensorizer",
            "model_loader_extra_config": {"tensorizer_config": {"tensorizer_uri": uri}},
        }

    for rank in range(2):
        (tmp_path / f"model-{rank:03d}.tensors").write_bytes(b"rank")
    pattern = str(tmp_path / "model-%03d.tensors")
    before = describe(model, **options(pattern))
    assert before.digest and "tensorizer_uri" not in str(before.settings)
    (tmp_path / "model-001.tensors").write_bytes(b"new!")
    assert describe(model, **options(pattern)).digest != before.digest
    far = describe(model, **options("s3://bucket/one.tensors"))
    assert far.digest == "" and far != describe(model, **options("s3://bucket/two.tensors"))


def test_credentials_are_no_part_of_the_identity(model: Path, describe: Callable[..., Weights]) -> None:
    config = {"tensorizer_uri": "s3://bucket/one.tensors", "s3_secret_access_key": "hush", "num_readers": 3}
    found = describe(model, load_format="tensorizer", model_loader_extra_config={"tensorizer_config": config})
    assert "hush" not in str(found) and "num_readers" not in str(found)


def test_a_loader_that_is_not_known_does_not_vouch_for_the_files_here(
    model: Path, describe: Callable[..., Weights]
) -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    register_model_loader("from-somewhere")(DummyModelLoader)
    found = describe(model, load_format="from-somewhere", model_loader_extra_config={"place": "x"})
    assert (found.model, found.digest) == (str(model), "")
    assert dict(found.settings) == {"load_format": "from-somewhere", "model_loader_extra_config": '{"place": "x"}'}
