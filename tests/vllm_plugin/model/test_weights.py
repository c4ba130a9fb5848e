"""Other weights are another namespace, down to the last byte; equal weights are the same one, wherever they lie."""

import copy
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
from vllm_plugin.model.weights import Weights, describe_weights

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


def test_any_byte_counts_and_the_order_of_pieces(
    model: Path, digest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by several threads."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", SIZE // 5)  # And a rest.
    file = model / "model.safetensors"
    content = file.read_bytes()
    pieces = [content[start : start + SIZE // 5] for start in range(0, SIZE, SIZE // 5)]
    contents = [content, content[:-1], b"".join([pieces[1], pieces[0], *pieces[2:]]), b"".join(pieces[:-1])]
    for offset in (0, SIZE // 3, SIZE - 1):
        contents.append(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    digests = []
    for each in contents:
        file.write_bytes(each)
        digests.append(digest(model))
    assert len(set(digests)) == len(contents)
    file.write_bytes(content)
    assert digest(model) == digests[0]


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


def test_a_file_is_read_once_until_it_is_written_again_even_with_its_old_time(
    model: Path, cache: Path, digest: Callable[..., str]
) -> None:
    before = digest(model)
    file = model / "model.safetensors"
    times = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"other weights")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = digest(model)
    assert again != before
    for kept in cache.iterdir():
        kept.write_text("1" * 64)
    assert digest(model) not in (before, again), "the file was read again"


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


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors.index.json", "preprocessor_config.json", "tekken.json", "scheduler.bin", "anything.else"),
        # vLLM loads every file of weights, the last one over the others.
        *("tokenizer.safetensors", "optimizer.safetensors", "xLICENSE.safetensors", "a.bin"),
        # Of a part of the model; at the top the fields of a configuration count, one by one.
        *("modeling.py", "encoder/model.safetensors", "encoder/config.json"),
    ],
)
def test_a_file_counts_by_its_name_and_its_content(name: str, model: Path, digest: Callable[..., str]) -> None:
    found = [digest(model)]
    for file, content in ((name, "{}"), (name, '{"other": 1}'), (f"other-{name}", '{"other": 1}')):
        (model / name).unlink(missing_ok=True)
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text(content)
        found.append(digest(model))
    assert len(set(found)) == len(found)


def test_files_that_are_known_to_change_no_kv_do_not_count(model: Path, digest: Callable[..., str]) -> None:
    before = digest(model)
    for name in (
        *("README.md", "tokenizer.json", ".gitattributes", ".cache/x/y.lock", "trainer_state.json", "config.json"),
        # Beside safetensors vLLM does not read these.
        *("pytorch_model-00001-of-00002.bin", "optimizer.pt", "training_args.bin", "original/consolidated.00.pth"),
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text("not KV")
    assert digest(model) == before


def test_all_parts_of_a_split_model_count(tmp_path: Path, digest: Callable[..., str]) -> None:
    parts = [tmp_path / f"m-0000{idx}-of-00002.gguf" for idx in (1, 2)]
    found = []
    for contents in ((b"part", b"part"), (b"trap", b"part"), (b"part", b"trap")):
        for part, content in zip(parts, contents, strict=True):
            part.write_bytes(content)
        found.append(digest(parts[0], load_format="gguf"))
    assert all(found) and len(set(found)) == 3


# Files that change while the engine loads them


def relink(link: Path, target: Path) -> None:
    link.unlink()
    link.symlink_to(target)


def replace_directory(place: Path, by: Path) -> None:
    place.rename(place.with_name("before"))
    by.rename(place)


CHANGES: dict[str, Callable[[Path], object]] = {
    "link": lambda models: relink(models / "latest", models / "newer"),
    "link above": lambda models: relink(models.parent / "link", models),
    "file": lambda models: (models / "older" / "model.safetensors").write_bytes(b"newer"),
    "configuration": lambda models: (models / "older" / "config.json").write_text("{}"),
    "directory": lambda models: replace_directory(models / "older", models / "newer"),
    "directory above": lambda models: replace_directory(models, models.parent / "other"),
    "configuration elsewhere": lambda models: (models.parent / "settings" / "config.json").touch(),
    "settings elsewhere": lambda models: (models.parent / "settings" / "generation_config.json").touch(),
}
"""What may happen to a directory of models, of which the engine serves `link/latest`, now a link to `older`."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("folder", ["models", "snapshots"])
def test_what_changes_after_the_engines_start_leaves_the_weights_in_doubt(
    change: str,
    folder: str,
    tmp_path: Path,
    describe: Callable[..., Weights],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, elsewhere = tmp_path / folder, tmp_path / "settings"
    elsewhere.mkdir()
    for name in ("older", "newer"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").write_bytes(os.urandom(SIZE))
    (tmp_path / "link").symlink_to(models)
    (models / "latest").symlink_to(models / "older")
    shutil.copytree(models, tmp_path / "other", symlinks=True)
    path = tmp_path / "link" / "latest"
    time.sleep(0.05)  # File times have the resolution of the kernel's clock.
    monkeypatch.setenv(BEGAN_AT, str(time.time_ns()))
    assert "in_doubt" not in dict(describe(path, settings=elsewhere).settings)
    time.sleep(0.05)
    CHANGES[change](models)
    assert "has changed since the engine's start" in dict(describe(path, settings=elsewhere).settings)["in_doubt"]
    assert "the engine shares KV with no other" in caplog.text


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


def test_where_files_of_two_formats_lie_the_loader_that_chooses_counts(
    model: Path, describe: Callable[..., Weights]
) -> None:
    assert (
        describe(model) == describe(model, load_format="safetensors") == describe(model, load_format="runai_streamer")
    )
    (model / "consolidated.safetensors").write_bytes(b"another copy")
    assert describe(model).settings != describe(model, load_format="safetensors").settings
    assert describe(model, load_format="dummy").settings == (("load_format", "dummy"),)


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


def test_the_hubs_cache_is_found_where_download_dir_says_and_counts_by_content(
    tmp_path: Path, describe: Callable[..., Weights]
) -> None:
    downloads, copied = tmp_path / "downloads", tmp_path / "copy"
    snapshot(downloads, b"weights")
    assert describe("org/model").digest == ""
    found = [describe("org/model", download_dir=str(downloads))]
    assert found[0].digest and found[0].model == "org/model"
    copied.mkdir()
    (copied / "model.safetensors").write_bytes(b"weights")
    assert describe(copied).digest == found[0].digest
    snapshot(downloads, b"newer weights", commit="d" * 40)  # The branch has moved.
    found.append(describe("org/model", download_dir=str(downloads)))
    for file in downloads.rglob("snapshots/*/model.safetensors"):
        file.write_bytes(b"written through the link, into the blob")
    found.append(describe("org/model", download_dir=str(downloads)))
    assert len({each.digest for each in found}) == 3


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
