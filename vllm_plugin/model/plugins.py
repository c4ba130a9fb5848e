"""Code beside vLLM's own that an engine runs: plugins' distributions, and the classes that they put in vLLM's place."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from vllm_plugin.model.weights import model_directory

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_KNOWN = ("vllm", "vllm_plugin")
"""Packages whose releases count by themselves, or change no KV."""
_FOREIGN_CODE = re.compile(r'"([\w.-]+/[\w.-]+)--[\w.]+"')
"""A class in another repository of the hub, as in `auto_map`."""


def plugins(vllm_config: VllmConfig) -> dict[str, str]:
    """What identifies the code of plugins, by name: entry points of vLLM's groups, and classes.

    A class may also be registered by a script without entry points.
    """
    found = {}
    for distribution in metadata.distributions():
        for point in distribution.entry_points:
            is_loaded = envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS
            if point.group.startswith("vllm.") and is_loaded and point.module.partition(".")[0] not in _KNOWN:
                digests = [code(module) for module in sorted({point.module, *_modules(distribution)})]
                found[f"plugin.{point.group}.{point.name}"] = ":".join([point.value, *digests])
    found |= {f"class.{name}": f"{place}:{code(place.partition(':')[0])}" for name, place in own_classes(vllm_config)}
    return found


def _modules(distribution: metadata.Distribution) -> list[str]:
    """The outermost modules and packages that a distribution has installed."""
    if told := distribution.read_text("top_level.txt"):
        return told.split()
    names = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix == ".py"}
    return [name for name in names if name.isidentifier()]


def own_classes(vllm_config: VllmConfig) -> list[tuple[str, str]]:
    """(what it is, MODULE:CLASS) of architectures, quantisations, attention backends, workers and schedulers that are
    registered or chosen, and not vLLM's own.

    All architectures count: a model may be built of others, and have a draft.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    found: dict[str, Any] = dict(model.registry.models)
    for each in (model, getattr(speculative, "draft_model_config", None)):
        if name := getattr(each, "quantization", None):
            found[f"quantization {name}"] = get_quantization_config(name)
    for backend in (*AttentionBackendEnum, *MambaAttentionBackendEnum):
        if backend.is_overridden():
            found[f"attention {backend.name}"] = backend.get_path()
    found["worker"] = vllm_config.parallel_config.worker_cls
    found["worker extension"] = vllm_config.parallel_config.worker_extension_cls
    found["scheduler"] = vllm_config.scheduler_config.scheduler_cls
    places = []
    for name, registered in sorted(found.items()):
        place = getattr(registered, "model_cls", registered)
        if isinstance(place, str):
            module, _, class_name = place.rpartition(".")
        else:
            module = str(getattr(place, "module_name", None) or getattr(place, "__module__", ""))
            class_name = str(getattr(place, "class_name", None) or getattr(place, "__qualname__", ""))
        if class_name and module and module.partition(".")[0] != "vllm":
            places.append((name, f"{module}:{class_name}"))
    return places


def foreign_code(model: ModelConfig) -> str:
    """A repository beside the model's own whose newest code an engine that trusts remote code runs; empty for none."""
    place = model_directory(model)
    for file in sorted(place.glob("*config.json")) if place is not None else ():
        if found := _FOREIGN_CODE.search(file.read_text(errors="replace")):
            return found[1]
    return ""


def code(module: str) -> str:
    """SHA-256 of the files of a module's outermost package, or of its only file or archive; empty without any.

    A namespace package has several directories. Compiled kernels count as sources do.
    """
    outermost = module.partition(".")[0]
    running = sys.modules.get(outermost)
    spec = None if running is not None else util.find_spec(outermost)
    places = getattr(running, "__path__", None) or getattr(spec, "submodule_search_locations", None)
    places = places or filter(None, [getattr(running, "__file__", None) or getattr(spec, "origin", None)])
    found = [(os.path.relpath(file, root), _sha256(file)) for root in map(Path, places) for file in _files(root)]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(place: Path) -> list[Path]:
    """The files of a directory without bytecode; a file by itself; the archive that holds the place."""
    if place.is_dir():
        return [file for file in place.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return [each for each in (place, *place.parents) if each.is_file()][:1]
