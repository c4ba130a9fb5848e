"""Engines that differ from one base engine in one setting, variable or file, found in vLLM and in kvpool's own tables.

What the namespace leaves out is varied (`Effect.NONE`, `Effect.ARCHITECTURE`, variables that vLLM keeps out of
`compile_factors`, files of `weights._NO_KV`), and some of what it names. Settings without a value
that follows from their type are listed by `unvaried`.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import zip_longest
from typing import Any

import vllm.config
import vllm.envs
from vllm.engine.arg_utils import EngineArgs

from tests.support.vllm_objects import CONFIG_CLASSES
from vllm_plugin.model import weights
from vllm_plugin.model.kv_fields import Effect, default_of, effect

BASE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_tokenizer_init": True,
}
"""Options of the base engine; a number among them is doubled and halved."""
COMPILES = {"TORCHDYNAMO_DISABLE": "0"}
"""For engines that are to run compiled code: others save the time."""
ENABLERS: Mapping[str, dict[str, Any]] = {
    "lora_config": {"enable_lora": True},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
}
"""What has an engine make the section of a field at all."""
ARGUMENTS = {each.name for each in dataclasses.fields(EngineArgs)}
OTHER_WEIGHTS = 1
"""Seed of the weights of a file that is put beside the checkpoint."""
CHANGED = "changed"
COUNTED_FILES = ("model.safetensors.index.json", "preprocessor_config.json")
COUNTED_VARIABLES = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)
"""What namespaces once left out, and must not."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One difference from the base engine.

    Args:
        what: the field by dotted name, the variable as "environment.NAME", or the file as "file NAME".
        value: of `what`, as a report prints it.
        files: name to text, or to the seed of the weights that the file holds.
    """

    what: str
    value: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.what}={self.value}"


BASE_VARIANT = Variant("base", "")


def variants() -> list[Variant]:
    """All of them, in an order that is the same in every process: first one of each field, variable and file."""
    numbers: Counter[str] = Counter()

    def nth(variant: Variant) -> int:
        numbers[variant.what] += 1
        return numbers[variant.what]

    kinds = zip_longest(*(sorted(kind, key=nth) for kind in (_of_fields(), _of_variables(), _of_files())))
    numbers.clear()
    return [
        BASE_VARIANT,
        Variant("lora_config", "enabled", ENABLERS["lora_config"]),
        Variant("speculative_config", "ngram", {"speculative_config": ENABLERS["speculative_config"]}),
        *sorted((each for one_of_each in kinds for each in one_of_each if each is not None), key=nth),
    ]


def varied_fields() -> Iterator[tuple[str, Any]]:
    """(section, field) of vLLM's configuration that the namespace leaves out.

    A field of `VllmConfig` that is a section stands for that section's fields.
    """
    for section, described in CONFIG_CLASSES.items():
        for each in dataclasses.fields(described):  # type: ignore[arg-type]
            if effect(section, each.name)[0] not in (Effect.NONE, Effect.ARCHITECTURE, Effect.QUANTISED):
                continue
            nested = next((kind for kind in _alternatives(each.type) if dataclasses.is_dataclass(kind)), None)
            if section == "vllm_config" and nested is not None:
                if each.name != "kv_transfer_config":  # Names the connector, which is the same in all engines.
                    yield from ((each.name, inner) for inner in dataclasses.fields(nested))
            else:
                yield section, each


def unvaried() -> list[str]:
    """Fields that no argument sets, or for which no other value follows from the type."""
    return [f"{section}.{each.name}" for section, each in varied_fields() if not list(_of_field(section, each))]


def varied_variables() -> list[str]:
    """Environment variables of vLLM that the namespace leaves out."""
    factors = vllm.envs.compile_factors()
    return [
        name
        for name in vllm.envs.environment_variables
        if name not in factors or effect("environment", name)[0] is Effect.NONE
    ]


def _of_fields() -> Iterator[Variant]:
    for section, each in varied_fields():
        yield from _of_field(section, each)


def _of_field(section: str, each: Any) -> Iterator[Variant]:
    default = BASE.get(each.name, default_of(each)) if section not in ENABLERS else default_of(each)
    for value in dict.fromkeys(_values(each.type, default)):
        options = _options(section, each.name, value)
        if options is None:
            return
        compiles = section in ("compilation_config", "kernel_config") or each.name in (
            "enforce_eager",
            "optimization_level",
        )
        if section == "compilation_config":
            options["enforce_eager"] = False
        yield Variant(f"{section}.{each.name}", str(value), options, COMPILES if compiles else {})


def _options(section: str, name: str, value: Any) -> dict[str, Any] | None:
    """Arguments of `vllm.LLM` that set one field; None if there are none."""
    if section == "speculative_config":
        return {section: {**ENABLERS[section], name: value}}
    if name in ARGUMENTS:
        return {**ENABLERS.get(section, {}), name: value}
    if section in ARGUMENTS:
        return {section: {name: value}}
    return None


def _values(kind: Any, default: Any) -> Iterator[Any]:
    """Other values of a type, which JSON can carry."""
    kinds = _alternatives(kind)
    for each in kinds:
        if typing.get_origin(each) is typing.Literal:
            yield from (value for value in typing.get_args(each) if value != default)
        elif isinstance(each, type) and issubclass(each, enum.Enum):
            yield from (
                member.value if isinstance(member.value, int) else member.name
                for member in each
                if default not in (member, member.value)
            )
        elif each is bool:
            yield from (value for value in (True, False) if value is not default)
    if isinstance(default, bool):
        return
    if int in kinds or float in kinds:
        if isinstance(default, (int, float)):
            yield default * 2 if default else 1
            yield type(default)(default / 2) if default not in (0, 1) else 2
        elif default is None:
            yield 64 if int in kinds else 0.5
    elif str in kinds:
        yield f"{default}x" if isinstance(default, str) and default else "kvpool"


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, and what is annotated."""
    if typing.get_origin(kind) is typing.Annotated:
        return _alternatives(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [inner for each in typing.get_args(kind) for inner in _alternatives(each)]
    return [kind]


def _of_variables() -> Iterator[Variant]:
    for name in (*varied_variables(), *COUNTED_VARIABLES):
        for value in dict.fromkeys(_variable_values(name)):
            yield Variant(f"environment.{name}", value, environment={name: value})


def _variable_values(name: str) -> Iterator[str]:
    read = vllm.envs.environment_variables[name]
    for cell in getattr(read, "__closure__", None) or ():
        choices = cell.cell_contents
        if isinstance(choices, list):
            yield from (str(choice) for choice in choices if choice != read())
            return
    try:
        default = read()
    except Exception:
        default = None
    if isinstance(default, bool):
        yield str(int(not default))
    elif isinstance(default, (int, float)):
        yield str(default * 2 or 1)
    elif default:
        yield f"{default}x"
    else:
        yield "1"  # Is a number, a string and true.


def _of_files() -> Iterator[Variant]:
    """Files beside a checkpoint that the namespace leaves out, and those that it must not leave out."""
    yield Variant("file config.json", CHANGED, files={"config.json": CHANGED})
    for pattern in dict.fromkeys(pattern for patterns in weights._NO_KV.values() for pattern in patterns):
        if pattern != "config.json":
            yield from _of_pattern(pattern)
    for name in ("original/params.json", ".hidden.json", "__pycache__/code.json"):
        yield Variant(f"file {name}", "written", files={name: "{}"})
    for name in ("pytorch_model.bin", "original/consolidated.00.safetensors"):
        yield Variant(f"file {name}", "other weights", files={name: OTHER_WEIGHTS})
    for name in COUNTED_FILES:
        yield Variant(f"file {name}", "written", files={name: '{"weight_map": {}}'})


def _of_pattern(pattern: str) -> Iterator[Variant]:
    name = pattern.replace("*", "x")
    for suffix in (".safetensors", ".bin", ".pt"):
        candidates = (name, name + suffix, f"{pattern.rstrip('*')}{suffix}")
        if fits := next((each for each in candidates if each.endswith(suffix) and fnmatch(each, pattern)), ""):
            yield Variant(f"file {pattern}", f"{fits} of other weights", files={fits: OTHER_WEIGHTS})
    name = name if "." in name else f"{name}.json"
    if os.path.splitext(name)[1] not in (".bin", ".pt", ".pth", ".safetensors"):
        for text in ("{}", '{"kvpool": 1}'):
            yield Variant(f"file {pattern}", f"{name}: {text}", files={name: text})
