"""The table of settings is whole, and its list of architectures holds for the vLLM that is installed."""

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
import vllm
import vllm.config
from vllm.model_executor.models.registry import ModelRegistry

from tests.support.vllm_objects import CONFIG_CLASSES
from vllm_plugin.model.kv_fields import FIELDS, INDEPENDENT, VARIABLES, Effect, effect

ADDED_IN_0_33: dict[str, set[str]] = {
    "cache_config": {"simple_cpu_offload_num_blocks"},
    "attention_config": {"indexer_tp_shard_min_rows", "minimax_m3_indexer_cp", "trtllm_ragged_backend"},
    "speculative_config": {
        "disable_lookahead_block_hashes",
        "draft_lm_head_quantization",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
        "fly_window_size",
        "xpress_topc",
    },
    "vllm_config": {"watchdog_config"},
}
ROOT = Path(vllm.__file__).parent.parent
DOCS = Path(__file__).parents[3] / "docs" / "reference"
SETTINGS = re.compile(r"max_model_len|generation_config|trust_remote_code|model_config\.seed")
"""Words by which a model reads a setting that counts by architecture."""
TOKENIZERS = re.compile(r"tokenizer_from_config|get_tokenizer\(|model_config\.tokenizer")
"""Words by which a model computes with its tokenizer."""
READERS: dict[str, set[str]] = {
    "deepseek_v2": {
        "self.max_model_len = vllm_config.model_config.max_model_len",
        "self.max_model_len,",
    },
    **{
        model: {"seq_len=self.model_config.max_model_len,", "self.model_config.max_model_len,"}
        for model in ("gemma3_mm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    },
}
"""Lines that were read, and that change no KV; see the reasons in `INDEPENDENT`."""
BESIDE_MODELS = ("registry", "config", "adapters", "interfaces", "interfaces_base", "utils")


@pytest.mark.parametrize("section", CONFIG_CLASSES)
def test_every_field_of_vllms_configuration_stands_in_the_table_once(section: str) -> None:
    listed = [name for fields in FIELDS[section].values() for name in fields]
    assert len(set(listed)) == len(listed)
    installed = {field.name for field in dataclasses.fields(CONFIG_CLASSES[section])}
    assert installed <= set(listed)
    if vllm.__version__.startswith("0.32."):
        assert set(listed) - installed == ADDED_IN_0_33.get(section, set())


def test_a_field_that_the_table_does_not_know_counts() -> None:
    assert effect("model_config", "added_by_a_later_vllm") == (Effect.VALUE, "not known to kvpool")


@pytest.mark.parametrize("architecture", INDEPENDENT)
def test_an_architecture_on_the_list_reads_no_setting(architecture: str) -> None:
    """Of the model's module and all that it is built from, no line names a setting that counts by architecture."""
    for module in _closure(ModelRegistry.models[architecture].module_name):
        # With media the tokenizer counts; Qwen 3.5's modules have classes with and without.
        if architecture.endswith("ForCausalLM") and not architecture.startswith("Qwen3_5"):
            assert not _lines(module, TOKENIZERS)
        read = _lines(module) - READERS.get(module.rpartition(".")[2], set())
        assert not read, f"{module} reads settings that its KV may depend on: {read}"


def test_the_check_of_the_list_finds_what_it_looks_for() -> None:
    modules = _closure(ModelRegistry.models["Llama4ForConditionalGeneration"].module_name)
    assert any("try_get_generation_config" in line for module in modules for line in _lines(module))


def table() -> str:
    """The fields as a table in Markdown."""
    rows = [
        f"| `{section}` | {', '.join(f'`{name}`' for name in fields)} | {kind.value} | {reason} |"
        for section, parts in FIELDS.items()
        for (kind, reason), fields in parts.items()
    ]
    rows += [
        f"| environment | {', '.join(f'`{name}`' for name in patterns)} | {kind.value} | {reason} |"
        for (kind, reason), patterns in VARIABLES.items()
    ]
    return "\n".join(["| section | fields | part of the identity | because |", "|---|---|---|---|", *rows])


def test_the_docs_show_the_table() -> None:
    assert table() in (DOCS / "identity.md").read_text(), (
        "print it by `python -m tests.vllm_plugin.model.test_kv_fields`"
    )


@cache
def _closure(module: str) -> frozenset[str]:
    """A module and those of vLLM's models that it imports, directly or not."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and _source(name) is not None:
            found.add(name)
            waiting += _imports(name)
    return frozenset(found)


@cache
def _source(module: str) -> Path | None:
    parent, _, last = module.rpartition(".")
    if not module.startswith(("vllm.model_executor.models.", "vllm.models.")) or (
        parent == "vllm.model_executor.models" and last in BESIDE_MODELS
    ):
        return None
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _imports(module: str) -> tuple[str, ...]:
    source = _source(module)
    assert source is not None
    package = module if source.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module or "") if part)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(names)


@cache
def _lines(module: str, words: re.Pattern[str] = SETTINGS) -> frozenset[str]:
    """Lines of code that name a setting."""
    source = _source(module)
    assert source is not None
    lines = (line.strip() for line in source.read_text().splitlines())
    return frozenset(line for line in lines if words.search(line) and not line.startswith("#"))


if __name__ == "__main__":
    print(table())
