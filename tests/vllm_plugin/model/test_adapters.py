"""An adapter is shared by its content, and only where the engine must have loaded what was read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from tests.support.held import held_by
from tests.support.processes import wait_for
from tests.support.toy.fixtures import BLOCK_TOKENS, MakeConfig
from tests.support.values import block_hash
from tests.support.vllm_objects import make_request, tokens
from tests.vllm_plugin.core import MakeCore, fill
from vllm_plugin.metadata import StoreJob
from vllm_plugin.model.adapters import CLOCK_STEP_S, NO_ADAPTER, BlockNames, named

Make = Callable[..., BlockNames]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make(vllm_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`make(share="unchanged", age_s=3600, nnodes=1)`: adapters of an engine that started after the files' times."""
    made: list[BlockNames] = []

    def start(share: str = "unchanged", ahead_s: float = 60.0, nnodes: int = 1) -> BlockNames:
        config = vllm_config()
        config.parallel_config.nnodes = nnodes
        now = time.time
        with monkeypatch.context() as patch:
            patch.setattr("vllm_plugin.model.adapters.time.time", lambda: now() + ahead_s)
            adapters = BlockNames(BLOCK_TOKENS, config, share)
        made.append(adapters)
        return adapters

    yield start
    for adapters in made:
        adapters.close()


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes(b"weights")
    return LoRARequest("name", 1, str(place))


def asking(lora: LoRARequest | None, num_tokens: int = 1, name: str = "r", **options: Any) -> Request:
    request = make_request(name, tokens(num_tokens), **options)
    request.lora_request = lora
    return request


def digest(adapters: BlockNames, lora: LoRARequest | None) -> bytes | None:
    return adapters.adapter(request) if adapters.are_known(request := asking(lora)) else None


def read(adapters: BlockNames, lora: LoRARequest) -> bytes | None:
    """What is known once the files have been read."""

    def has_ended() -> bool:
        is_known = adapters.are_known(asking(lora))
        adapters.new_step()
        return is_known or not adapters.are_coming(asking(lora))

    wait_for(has_ended, "the adapter to be read")
    return digest(adapters, lora)


def test_an_adapter_that_ranks_may_download_again_is_not_shared(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--org--adapter" / "snapshots" / ("a" * 40)
    place.mkdir(parents=True)
    (place / "adapter_model.safetensors").write_bytes(b"weights")
    (refs := place.parents[1] / "refs").mkdir()
    (refs / "main").write_text(place.name)
    lora = LoRARequest("name", 1, "org/adapter")
    assert read(make(), lora) is not None  # Offline, as all tests are.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert read(make(), lora) is None
    assert read(make("always"), lora) is not None


def test_names_are_told_apart_by_the_digest_and_back(make: Make, lora: LoRARequest) -> None:
    adapters, hashes = make(), [block_hash(n) for n in range(3)]
    name = read(adapters, lora)
    assert name is not None and len(name) == 32
    assert set(named(hashes, name)).isdisjoint(hashes)
    assert named(named(hashes, name), name) == hashes
    assert named([], name) == []
    assert digest(adapters, None) == NO_ADAPTER and named(hashes, NO_ADAPTER) == hashes


def test_one_content_at_two_places_is_one_adapter(make: Make, lora: LoRARequest, tmp_path: Path) -> None:
    shutil.copytree(lora.lora_path, tmp_path / "copy")
    adapters = make()
    assert read(adapters, LoRARequest("other name", 2, str(tmp_path / "copy"))) == read(adapters, lora)
    (tmp_path / "copy" / "adapter_model.safetensors").write_bytes(b"Weights")
    assert read(make(), LoRARequest("other name", 2, str(tmp_path / "copy"))) != read(adapters, lora)


def test_files_that_are_newer_than_the_engine_are_not_shared(
    make: Make, lora: LoRARequest, caplog: pytest.LogCaptureFixture
) -> None:
    os.utime(Path(lora.lora_path) / "adapter_model.safetensors", (0, 0))  # Its ctime tells all the same.
    assert read(make(ahead_s=-5.0), lora) is None
    assert "newer than the engine" in caplog.text
    assert read(make("always", ahead_s=-5.0), lora) is not None


@pytest.mark.parametrize("how", ["written", "replaced", "added", "removed"])
def test_files_that_change_later_end_the_sharing_before_a_request_that_comes_then(
    how: str, make: Make, lora: LoRARequest, tmp_path: Path
) -> None:
    adapters = make()
    assert read(adapters, lora) is not None
    weights = Path(lora.lora_path) / "adapter_model.safetensors"
    if how == "written":
        weights.write_bytes(b"WEIGHTS")
    elif how == "replaced":
        (tmp_path / "new").write_bytes(b"weights")
        (tmp_path / "new").rename(weights)
    elif how == "added":
        (weights.parent / "more.safetensors").write_bytes(b"")
    else:
        shutil.rmtree(weights.parent)

    arrived_at = time.time()

    def is_checked() -> bool:
        adapters.new_step()
        return adapters.are_checked(asking(lora), arrived_at)

    assert not adapters.are_checked(asking(lora), arrived_at)
    wait_for(is_checked, "a look at the files")
    assert digest(adapters, lora) is None


def test_a_link_that_was_rolled_back_names_what_the_ranks_may_not_have(
    make: Make, lora: LoRARequest, tmp_path: Path
) -> None:
    """The files are old, and the link is newer than the engine."""
    time.sleep(CLOCK_STEP_S + 0.2)
    adapters = make(ahead_s=0.0)
    (tmp_path / "latest").symlink_to(lora.lora_path)
    assert read(adapters, LoRARequest("by link", 2, str(tmp_path / "latest"))) is None
    assert read(adapters, lora) is not None


@pytest.mark.parametrize(("other", "load_inplace"), [("copy", False), ("copy", True), ("adapter", True)])
def test_two_adapters_of_one_number_are_not_told_apart_by_the_ranks(
    other: str, load_inplace: bool, make: Make, lora: LoRARequest, tmp_path: Path
) -> None:
    shutil.copytree(lora.lora_path, tmp_path / "copy")
    adapters = make()
    assert read(adapters, lora) is not None
    name = lora.lora_name if other == "adapter" else other
    loaded = LoRARequest(name, lora.lora_int_id, str(tmp_path / other), load_inplace=load_inplace)
    assert digest(adapters, loaded) is None and digest(adapters, lora) is None


def test_an_adapter_that_is_not_here_is_not_shared(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert read(make(), LoRARequest("name", 1, "nobody/has-this-adapter")) is None
    assert "nobody/has-this-adapter is no directory on this disk" in caplog.text


def test_ranks_that_read_files_of_their_own_do_not_share(
    make: Make, lora: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest(make(nnodes=2), lora) is None
    assert digest(make("never"), lora) is None
    assert read(make("always", nnodes=2), lora) is not None
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert digest(make(), lora) is None


# Requests


def test_the_names_of_a_streaming_session_outlast_its_hashes(core: MakeCore) -> None:
    """vLLM cuts the hashes of a session that goes on, and a thread may still send the names."""
    geometry, request = core().side.geometry, make_request("r", tokens(160), resumable=True)
    names = geometry.names.run(request, 0, geometry.groups[0].kind, 0, 6).block_hashes
    before = list(request.block_hashes)
    del request.block_hashes[2:]
    assert list(names) == before[:6]


def test_a_request_with_an_adapter_shares_by_the_adapters_content(core: MakeCore, lora: LoRARequest) -> None:
    os.utime(lora.lora_path)
    time.sleep(CLOCK_STEP_S)  # The engine starts later than the files were written.
    one = core().connected()
    request = asking(lora, 100)
    wait_for(lambda: one.ask(request) is not None, "the adapter to be read")
    digest = one.side.geometry.names.adapter(request)
    assert one.ask(request) == 0
    fill(one, request.block_hashes)  # As requests without an adapter name them.
    assert one.ask(request) == 0
    one.allocate(request, 0)
    # Not before the ranks must have loaded the adapter, and its files were looked at after that.
    assert one.step((request, 100)).stores == []
    assert one.step((request, 0)).stores == []

    def stored() -> list[StoreJob]:
        one.side.stats()  # A step has ended.
        return one.step((request, 0)).stores

    jobs = wait_for(stored, "a look at the files")
    assert list(jobs[0].groups[0].runs[0].block_hashes) == named(request.block_hashes[:6], digest)
    fill(one, named(request.block_hashes, digest))
    other = asking(lora, 100, "s")
    assert one.ask(other) == 96
    Path(lora.lora_path, "adapter_model.safetensors").write_bytes(b"WEIGHTS")

    def is_noticed() -> bool:
        one.side.geometry.names.are_checked(other, time.time())
        one.step()
        return not one.side.geometry.names.are_known(other)

    wait_for(is_noticed, "the change to be noticed")
    one.allocate(other, 96)
    (load,) = one.step().loads
    assert (load.groups, load.lease_ids) == ([], (0,)), "what another adapter may have computed is loaded"


@pytest.mark.parametrize("changes", [False, True])
def test_an_answer_that_ends_before_the_adapters_files_are_checked_is_stored_after_that(
    core: MakeCore, lora: LoRARequest, changes: bool
) -> None:
    time.sleep(CLOCK_STEP_S)
    one = core().connected()
    request = asking(lora, 100)
    wait_for(lambda: one.ask(request) is not None, "the adapter to be read")
    one.allocate(request, 0)
    assert one.step((request, 100)).stores == []
    if changes:
        Path(lora.lora_path, "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    one.finish(request)
    kept = held_by(one.side)
    assert kept["jobs"] == 1 and kept["requests"] == 0
    stored: list[StoreJob] = []

    def has_ended() -> bool:
        one.side.stats()
        stored.extend(one.step().stores)
        return bool(stored) or held_by(one.side)["jobs"] == 0

    wait_for(has_ended, "a look at the files")
    assert len(stored) == (0 if changes else 1)


def test_a_request_whose_adapter_is_not_shared_is_computed_and_not_stored(core: MakeCore, lora: LoRARequest) -> None:
    one, request = core(share_adapters="never").connected(), asking(lora, 100)
    fill(one, request.block_hashes)
    assert one.ask(request) == 0
    one.allocate(request, 0)
    assert one.step((request, 100)).stores == []
    one.finish(request)
    assert one.step().stores == []
