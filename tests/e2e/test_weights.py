"""Weights that change in a running engine: KV of old ones is never read with new ones, nor the other way round."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from testbed.engine import Engine, EngineSpec, Prompt, kvpool_transfer_config
from testbed.tiny_models import write
from tests.e2e.conftest import (
    FLOAT32,
    PATIENT,
    assert_same,
    example_connector,
    hit_tokens,
    multi,
    prompt,
    running,
)
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import drain, wait_until_connected

pytestmark = pytest.mark.vllm

LENGTH = 300
FULL = hit_tokens(LENGTH)


@pytest.fixture(scope="module")
def trained(shapes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama shape with other weights."""
    target = tmp_path_factory.mktemp("trained") / "llama"
    shutil.copytree(write("llama", shapes_dir), target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            tensor += 0.03 * torch.randn(tensor.shape, generator=generator)
        weights[name] = tensor.contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def adapters(shapes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for an adapter that changes."""
    target = tmp_path_factory.mktemp("adapters") / "adapter"
    shutil.copytree(write("lora_a", shapes_dir), target)
    return target


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory,
    shapes_dir: Path,
    trained: Path,
    adapters: Path,
    e2e_server: ServerProcess,
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """One whose weights change, one that keeps the old ones, and one that has had the new ones from the start.

    The adapters are older than the engines: others would not be shared.
    """
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="weights", **PATIENT)
    options: dict[str, Any] = {**FLOAT32, "enable_lora": True, "max_lora_rank": 8}
    old, new = (
        EngineSpec(model, transfer, options, in_process=True) for model in (write("llama", shapes_dir), trained)
    )
    with running(tmp_path_factory.mktemp("weights"), old, old, new) as (changing, keeping, started):
        yield changing, keeping, started


def adapted(engine: Engine, text: list[int], directory: Path, reload: bool = False) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call("tests.e2e.inside:adapted", text, str(directory), reload)
    return answer


def test_an_adapter_that_is_loaded_again_in_place_has_kv_of_its_own(
    engines: tuple[Engine, Engine, Engine], adapters: Path, shapes_dir: Path
) -> None:
    changing, keeping, _ = engines
    text = prompt(LENGTH, "in place")
    before = adapted(changing, text, adapters)
    drain(changing)
    second = write("lora_b", shapes_dir)
    (right,) = keeping.generate([Prompt(text, lora=str(second))])
    drain(keeping)
    shutil.rmtree(adapters)
    shutil.copytree(second, adapters)
    assert right.logprobs != before["logprobs"], "adapters that are equal show nothing"
    # Under the same name and path: by whom it was loaded again, and by whom for the first time.
    for engine, reload in ((changing, True), (keeping, False)):
        after = adapted(engine, text, adapters, reload)
        drain(engine)
        assert after["tokens"] == right.tokens
        assert after["logprobs"] == pytest.approx(right.logprobs, abs=1e-4)


def test_an_engine_that_gets_new_weights_reads_no_kv_of_the_old_ones(
    engines: tuple[Engine, Engine, Engine], trained: Path, shapes_dir: Path
) -> None:
    """A reset that leaves the connector out: `test_reset.py`."""
    changing, keeping, started = engines
    texts = [prompt(LENGTH, f"new weights {nth}") for nth in range(2)]
    old = changing.generate(texts[:1])
    assert_same(keeping.generate(texts[:1]), old)
    drain(changing)
    drain(keeping)
    changing.call("tests.e2e.inside:load_weights", str(trained))
    try:
        assert changing.reset_prefix_cache(external=True)
        right = started.generate(texts)
        drain(started)
        assert right[0].logprobs != old[0].logprobs, "weights that are equal show nothing"
        assert_same(changing.generate(texts), right)
        drain(changing)
        # Nor does anybody with the old weights read what was computed with the new ones.
        (kept,) = keeping.generate(texts[:1])
        assert kept.cached_tokens == FULL
        assert_same([kept], old)
        (computed,) = keeping.generate(texts[1:])
        assert computed.cached_tokens == 0
        drain(keeping)
        # Its namespace is opened in the background. Then it shares with itself.
        wait_for(lambda: _hits(changing, texts[1]), "the engine to share again", 30)
    finally:
        changing.call("tests.e2e.inside:load_weights", str(write("llama", shapes_dir)))
        assert changing.reset_prefix_cache(external=True)
    # The weights of the start have their namespace back.
    wait_for(lambda: _hits(changing, texts[0]), "the engine to share as before", 30)
    assert_same(changing.generate(texts[:1]), old)


def test_engines_without_weight_files_share_where_their_memory_is_equal(
    tmp_path: Path, shapes_dir: Path, e2e_server: ServerProcess
) -> None:
    """Dummy weights: no file names them."""
    model, transfer = write("llama", shapes_dir), kvpool_transfer_config(e2e_server.endpoint, salt="dummy", **PATIENT)
    dummy = EngineSpec(model, transfer, {**FLOAT32, "load_format": "dummy"}, in_process=True)
    text = prompt(LENGTH, "dummy")
    with running(tmp_path, dummy, dummy) as (first, second):
        wait_for(lambda: _hits(first, text), "the engine to share with itself", 30)
        wait_for(lambda: second.generate([prompt(50, "opens")]) and _hits(second, text), "its twin to share", 30)
        drain(second)
        (loaded,) = second.generate([text])
        assert loaded.cached_tokens == FULL
        (computed,) = first.generate([text])
        assert_same([loaded], [computed])


def test_a_link_that_flips_while_an_engine_starts_names_no_kv_wrongly(
    tmp_path: Path, shapes_dir: Path, trained: Path, e2e_server: ServerProcess
) -> None:
    """The link leads to other weights once the engine has loaded the first ones, and before kvpool reads any file."""
    latest, flipped, log = tmp_path / "latest", tmp_path / "flipped", tmp_path / "first.log"
    latest.symlink_to(write("llama", shapes_dir))
    flipped.symlink_to(trained)
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="flips", **PATIENT)
    spec = EngineSpec(latest, transfer, FLOAT32, in_process=True)
    text = prompt(LENGTH, "flips")
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        starting = threads.submit(Engine, spec, log)
        wait_for(lambda: log.exists() and "Loading weights took" in log.read_text(), "the engine's weights", 120)
        flipped.rename(latest)
        first = stack.enter_context(starting.result())
        second = stack.enter_context(Engine(spec, tmp_path / "second.log"))
        for engine in (first, second):
            wait_until_connected(engine, transfer)
        (old,) = first.generate([text])
        drain(first)
        (new,) = second.generate([text])
        assert new.cached_tokens == 0, "it read KV of weights that it has not loaded"
        assert new.logprobs != old.logprobs, "weights that are equal show nothing"
        alone = "the engine shares KV with no other: latest has changed since the engine's start"
        assert alone in first.log()
        assert alone not in second.log()


def _hits(engine: Engine, text: list[int]) -> bool:
    engine.generate([text])
    drain(engine)
    return engine.generate([text])[0].cached_tokens == FULL


def test_kv_of_old_weights_that_another_connector_has_kept_does_not_reach_the_pool(
    e2e_server: ServerProcess, shapes_dir: Path, trained: Path, tmp_path: Path
) -> None:
    """Nor what is computed from it: the longer prompt finds it in the engine's own cache."""
    kept, kvpool = (
        example_connector(tmp_path / "files"),
        kvpool_transfer_config(e2e_server.endpoint, salt="kept", **PATIENT),
    )
    text = prompt(LENGTH, "kept by another")
    longer = text + prompt(100, "longer")
    old = EngineSpec(write("llama", shapes_dir), kept, FLOAT32, in_process=True)
    with running(tmp_path / "old", old) as (engine,):
        engine.generate([text])
    beside, alone = (EngineSpec(trained, each, FLOAT32, in_process=True) for each in (multi(kept, kvpool), kvpool))
    with running(tmp_path / "new", beside, alone) as (engine, reader):
        wrong = [engine.generate([each])[0] for each in (text, longer)]
        assert [each.cached_tokens for each in wrong] == [FULL, FULL], "the other connector has loaded nothing"
        drain(engine)
        right = [reader.generate([each])[0] for each in (text, longer)]
        assert not reader.metrics()["vllm:kvpool_hit_tokens"]
        assert all(each.logprobs != other.logprobs for each, other in zip(wrong, right, strict=True))
        own = prompt(LENGTH, "of its own")
        engine.generate([own])
        drain(engine)
        reader.generate([own])
        assert reader.metrics()["vllm:kvpool_hit_tokens"] == FULL, "the engine has stored nothing at all"
