"""The identity of a model's weights: a digest of the files that vLLM reads from this disk.

Every byte counts: a fine-tune may change one layer, or a few rows. So does every file beside the weights, unless it is
known to change no KV: the index of the shards, the preprocessor's settings and code of the checkpoint do. A digest does
not depend on where the files lie or on the model's name. Files are read once on a host (they are in the page cache: the
engine loads them, too) and remembered by inode, size and times. So are those of the hub's cache: their names tell the
content until somebody writes through a snapshot's link.

The files are read after vLLM has loaded them. So no file, link or directory on the way may be newer than the engine:
otherwise other files may have been loaded, and the weights have no name. Weights without a name are named by what is in
memory (`worker/loaded_weights.py`).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_plugin import BEGAN_AT

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

logger = init_logger("vllm.kvpool.weights")

MAX_THREADS = 16
PIECE_BYTES = 16 << 20
"""Digests depend on it. Beside a busy engine a thread waits some 5 ms for the interpreter before each read."""
LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.05
LOG_AFTER_S = 5.0
KEPT_BYTES = 1 << 20
"""Digests of files from this size on are kept on disk."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_BY_FIELD = "named by the namespace field by field"
_TRAINING = "left behind by training"
_NO_KV: Mapping[str, tuple[str, ...]] = {
    _BY_FIELD: ("config.json", "generation_config.json"),
    "how text becomes tokens; block hashes name the tokens": (
        *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
        *("*.tiktoken", "spiece.model", "sentencepiece*"),
    ),
    "read by people": ("*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*LICENSE*", "NOTICE*"),
    "formats of other engines": ("*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.tflite", "*.mlmodel"),
    _TRAINING: (
        *("training_args.bin", "trainer_state.json", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
        *("rng_state*", "*tfevents*"),
    ),
}
"""Patterns of files that change no KV, by reason. Hidden files and Meta's own format (`original/`) do not, either."""
_SAFETENSORS_FIRST = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral")
_OTHER_FORMATS = ("pt", "npcache", "gguf", "bitsandbytes", "sharded_state", "runai_streamer_sharded")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HOW_ONLY = (
    "enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit", "num_readers",
    "stream_kwargs", "verify_hash", "encryption_keyfile", "s3_access_key_id", "s3_secret_access_key",
)  # fmt: skip
"""Keys of `model_loader_extra_config` that say how weights are read, not which weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights, for a namespace.

    Args:
        model: a label where there is a digest, else the full name: a hub name, a path or a URI.
        revision: the commit, if known.
        digest: SHA-256 over the files' names and contents; empty where vLLM reads them from elsewhere.
        settings: of the loader, that decide what is read.
    """

    model: str
    revision: str
    digest: str
    settings: tuple[tuple[str, str], ...] = ()


def describe_weights(model: ModelConfig, load: LoadConfig) -> Weights:
    """What identifies the weights of a model, or of a draft model. Reads files that were never read before."""
    name = getattr(model, "model_weights", "") or model.model
    load_format = str(load.load_format)
    loader_options = _loader_options(load.model_loader_extra_config)
    settings: dict[str, str] = {}
    place = model_directory(model, load.download_dir)
    files: list[Path] = []
    if load_format == "tensorizer":
        files = _tensorized(loader_options)
        settings["load_format"] = load_format
    elif load_format in (*_SAFETENSORS_FIRST, *_OTHER_FORMATS) and name == model.model:
        files = _weight_files(place, load_format)
        if len(set(map(_kind, files))) > 1 or load_format in _OTHER_FORMATS:
            settings["load_format"] = load_format  # It chooses among these files, or how they are read.
    # vLLM puts the weights alone into its download directory, and reads all else from the hub's own cache.
    places = place, model_directory(model)
    by_name = {_name(file, places): file for each in places for file in _counting(each, weights=False)}
    beside = [by_name[name] for name in sorted(by_name, key=Path)]
    digest = _digest([*files, *beside], *places) if files else ""
    if digest:
        loader_options.pop("tensorizer_uri", None)
        loader_options.pop("tensorizer_dir", None)
    else:
        settings["load_format"] = load_format
        if beside:
            settings["beside_weights"] = _digest(beside, *places)
        logger.info("kvpool cannot read the weights of %s from this disk and names them by what is in memory", name)
    if place is not None and (why := _why_in_doubt(place, [*files, *beside], model)):
        settings["in_doubt"] = why
        logger.warning(
            "kvpool: the engine shares KV with no other: %s, so that the files of %s may not be the ones that it has "
            "loaded; start it again, in a process of its own",
            why,
            name,
        )
    if loader_options:
        settings["model_loader_extra_config"] = json.dumps(loader_options, sort_keys=True, default=str)
    label = os.path.basename(os.path.normpath(name)) if digest and os.path.exists(name) else name
    return Weights(label, _commit(model), digest, tuple(settings.items()))


def _why_in_doubt(place: Path, files: Iterable[Path], model: ModelConfig) -> str:
    """Why files may not be those that the engine has loaded; empty if they are."""
    places = (place, model.hf_config_path, model.generation_config)
    files = [*files, *(Path(each, name) for each in places if each for name in _NO_KV[_BY_FIELD])]
    if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
        # The hub's cache, to which the engine may just have added them: a commit's files stay, a name's commit may not.
        ref = place.parent.parent / "refs" / (str(model.revision or "") or "main")
        with suppress(OSError):
            if (current := ref.read_text().strip()) != place.name:
                return f"{ref.name} was commit {place.name} and is {current}"
        files = [file for file in files if not file.is_relative_to(place)]
    began_at = int(os.environ.get(BEGAN_AT, time.time_ns()))
    for path, ctime_ns, _ in states(files):
        if ctime_ns > began_at:
            return f"{os.path.basename(path)} has changed since the engine's start"
    return ""


def states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """(path, ctime in ns, bytes) of files, and of what leads to them: it changes whenever what is read does.

    Links lead to files, and directories that may have been renamed: with something new in one, its mtime is new, too.
    """
    found = []
    leading = {path for file in files for path in (*_links(file), file.resolve())}
    for part in sorted({each for path in leading for each in (path, *path.parents)}):
        with suppress(FileNotFoundError, NotADirectoryError):
            state = part.lstat()
            is_directory = stat.S_ISDIR(state.st_mode)
            if not is_directory or state.st_ctime_ns > state.st_mtime_ns:
                found.append((str(part), state.st_ctime_ns, 0 if is_directory else state.st_size))
    return found


def _links(path: Path) -> Iterator[Path]:
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from _links(part.parent / part.readlink())


def adapter_directory(path: str) -> Path:
    """Where vLLM finds an adapter: a directory, or a hub name in the local cache. Raises FileNotFoundError."""
    place = _directory(os.path.expanduser(path), None, None)
    if place is None or not place.is_dir():
        raise FileNotFoundError(f"{path} is no directory on this disk and not in the Hugging Face cache")
    return place


def asks_the_hub(path: str) -> bool:
    """Whether vLLM asks the hub for the newest commit of an adapter, each time that it loads the adapter."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and not Path(path).expanduser().exists()


def content_digest(place: Path) -> str:
    """SHA-256 over the names and contents of all files below a directory, in hexadecimal."""
    return _digest(sorted(_below(place)), place)


def tokenizer_digest(name: str, revision: str | None) -> str:
    """The digest of a tokenizer's directory, or of its snapshot in the hub's cache, without weights that lie there too;
    the name itself of what is not on this disk."""
    place = _directory(name, revision, None)
    if place is None or not place.is_dir():
        return name
    return _digest(sorted(file for file in _below(place) if not _matches(file, _WEIGHTS)), place)


def _below(place: Path) -> Iterator[Path]:
    """The files below a directory and below directories that are linked there, but for links that lead back up."""
    for folder, folders, names in os.walk(place, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not here.resolve().is_relative_to((here / name).resolve())]
        yield from (file for name in names if (file := here / name).is_file())


def model_directory(model: ModelConfig, download_dir: str | None = None) -> Path | None:
    """Where the files of a model lie, at the commit that vLLM has loaded; None if they are not on this disk."""
    return _directory(model.model, _commit(model) or None, download_dir)


def _directory(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the files of a model lie: its directory or its file; None if it is not on this disk."""
    path = Path(model)
    if path.exists():
        return path
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None  # The hub's cache may hold another model of the same name.
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:
        return None  # Not a hub model, or not on this disk.


def _commit(model: ModelConfig) -> str:
    """The commit that vLLM resolved the revision to; the revision itself where it could not."""
    resolved = getattr(model.revision, "resolved", None) or getattr(model.hf_config, "_commit_hash", None)
    return str(resolved or model.revision or "")


def _weight_files(place: Path | None, load_format: str) -> list[Path]:
    files = _counting(place, weights=True)
    if place is not None and load_format in _SAFETENSORS_FIRST and any(place.glob("*.safetensors")):
        # Beside safetensors vLLM reads none of these; a copy of the model may well lack them.
        return [file for file in files if not fnmatch(file.relative_to(place).as_posix(), "pytorch_model*")]
    return files


def _counting(place: Path | None, *, weights: bool) -> list[Path]:
    """The weights at any depth, or the other files, sorted, without those that change no KV."""
    if place is None:
        return []
    if place.is_file():
        return _parts(place) if weights else []
    return sorted(
        file
        for file in _below(place)
        if _matches(file, _WEIGHTS) == weights
        and not _matches(file, _ignored(file, file.parent == place))
        and file.relative_to(place).parts[0] != "original"
        and not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(place).parts)
    )


def _matches(file: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def _ignored(file: Path, is_outermost: bool) -> Iterator[str]:
    """Patterns that a file is ignored by. vLLM loads weights by any name but those that training leaves behind."""
    if file.suffix == ".safetensors":
        return
    if _matches(file, _WEIGHTS):
        yield from _NO_KV[_TRAINING]
        return
    for reason, patterns in _NO_KV.items():
        if is_outermost or reason != _BY_FIELD:  # Below, they belong to a part of the model.
            yield from patterns


def _parts(file: Path) -> list[Path]:
    """The parts of a model in one file, or in several that their first one stands for (`name-00001-of-00003.gguf`)."""
    return sorted(file.parent.glob(re.sub(r"-\d{5}-of-", "-?????-of-", file.name)))


def _tensorized(options: Mapping[str, Any]) -> list[Path]:
    """Local files of Tensorizer; none if they are elsewhere."""
    uri = str(options.get("tensorizer_uri") or "")
    if not uri and options.get("tensorizer_dir"):
        uri = f"{options['tensorizer_dir']}/model.tensors"
    path = Path(re.sub(r"%0\dd", "*", uri))
    return sorted(path.parent.glob(path.name)) if uri and path.parent.is_dir() else []


def _loader_options(extra: Any) -> dict[str, Any]:
    """Options of a loader that decide what it reads."""
    options = dict(extra or {})
    options.update(dict(options.pop("tensorizer_config", None) or {}))
    return {key: value for key, value in options.items() if value is not None and key not in _HOW_ONLY}


def _kind(file: Path) -> str:
    """Files of one kind are read together, or not at all."""
    return "consolidated" if fnmatch(file.name, "consolidated*.safetensors") else file.suffix


def _digest(files: Sequence[Path], *places: Path | None) -> str:
    digest = hashlib.sha256()
    for file, content in zip(files, _contents(files), strict=True):
        digest.update(f"{_name(file, places)}:{content};".encode())
    return digest.hexdigest()


def _name(file: Path, places: Iterable[Path | None]) -> str:
    """A file's path below the model's directory; of a single file, or one elsewhere, its name."""
    above = (place for place in places if place is not None and place != file and file.is_relative_to(place))
    return next((file.relative_to(place).as_posix() for place in above), file.name)


def _contents(files: Sequence[Path]) -> list[str]:
    """The digest of each file's content."""
    started = time.monotonic()
    most = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(most) as readers, ThreadPoolExecutor(most) as threads:
        contents = list(threads.map(functools.partial(_content, readers), files))
    if time.monotonic() - started > LOG_AFTER_S:
        logger.info("kvpool read %d files in %.0f s to name the weights", len(files), time.monotonic() - started)
    return contents


def _content(readers: Executor, file: Path) -> str:
    """The digest of a file's content. One of a host's processes reads it under a lock, and the others wait for that."""
    with file.open("rb", buffering=0) as opened:
        state = _state(opened)
        digest = ""
        kept = _cache() / hashlib.sha256(f"{file.resolve()}:{state}:{PIECE_BYTES}".encode()).hexdigest()
        with suppress(OSError, UnicodeError):
            _, _, size, _, ctime_ns = state
            # Whole seconds are set by who builds an image, and another image may come with the same ones.
            if size >= KEPT_BYTES and ctime_ns % 10**9:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with kept.open("a+") as record:
                    _lock(record)
                    record.seek(0)
                    if _SHA256.fullmatch(found := record.read(1024)):
                        return found
                    digest = _digest_of(readers, opened)
                    if _state(opened) == state:
                        record.truncate(0)
                        record.write(digest)
        return digest or _digest_of(readers, opened)


def _state(file: IO[bytes]) -> tuple[int, int, int, int, int]:
    """What changes with the content of an open file: where and when it was written."""
    state = os.fstat(file.fileno())
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvpool" / "weights"


def _lock(file: IO[str]) -> None:
    """Waits for the lock; without it a file is read twice, which is slow, not wrong."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_POLL_S)


def _digest_of(readers: Executor, file: FileIO) -> str:
    """SHA-256 over the SHA-256 of each piece: a large file is read by many threads."""
    starts = range(0, os.fstat(file.fileno()).st_size, PIECE_BYTES)
    return hashlib.sha256(b"".join(readers.map(functools.partial(_piece, file.fileno()), starts))).hexdigest()


def _piece(fd: int, start: int) -> bytes:
    hasher, at = hashlib.sha256(), start
    while data := os.pread(fd, start + PIECE_BYTES - at, at):
        hasher.update(data)
        at += len(data)
    return hasher.digest()
