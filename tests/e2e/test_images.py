"""Prompts with images: engines share blocks, those of image tokens too, where vLLM gives the images equal names.

vLLM names an object of PIL by its pixels and `--model`, a file that a client uploads by its bytes and `--model`, and an
image with a `uuid` by the `uuid` alone.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testbed.engine import Answer, Engine, EngineSpec, kvpool_transfer_config
from testbed.tiny_models import IMAGE_TOKEN, IMAGE_TOKENS, write
from tests.e2e.conftest import FLOAT32, PATIENT, assert_same, hit_tokens, prompt, running
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain

pytestmark = pytest.mark.vllm

FIRST, REST = 40, 100
"""Tokens before and after the image of `text`."""
BEFORE = hit_tokens(FIRST)
FULL = hit_tokens(FIRST + IMAGE_TOKENS + REST)

Engines = dict[str, Engine]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images, each in three files with the same pixels."""
    target = tmp_path_factory.mktemp("images")
    for seed, name in enumerate(("cat", "dog")):
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        image.save(target / f"{name}.png")
        image.save(target / f"{name}.bmp")
        image.save(target / f"{name}-again.png", compress_level=0)
    return target


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, shapes_dir: Path, e2e_server: ServerProcess) -> Iterator[Engines]:
    """An engine that stores, two that lack one of the caches for which vLLM hashes images, and one at another path."""
    model = write("idefics3", shapes_dir)
    copied = Path(shutil.copytree(model, tmp_path_factory.mktemp("copies") / "by-another-name"))
    transfer = kvpool_transfer_config(e2e_server.endpoint, salt="images", **PATIENT)
    options = {**FLOAT32, "skip_tokenizer_init": False}
    specs = {
        "writer": EngineSpec(model, transfer, options, in_process=True),
        "no processor cache": EngineSpec(model, transfer, {**options, "mm_processor_cache_gb": 0}, in_process=True),
        "no prefix cache": EngineSpec(model, transfer, {**options, "enable_prefix_caching": False}, in_process=True),
        "another path": EngineSpec(copied, transfer, options, in_process=True),
    }
    with running(tmp_path_factory.mktemp("engines"), *specs.values()) as started:
        yield dict(zip(specs, started, strict=True))


def text(seed: str, rest: int = REST) -> list[int]:
    """A prompt with one image."""
    return [*prompt(FIRST, seed), IMAGE_TOKEN, *prompt(rest, f"rest of {seed}")]


def ask(
    engine: Engine,
    tokens: list[int],
    *images: Path,
    uuids: Sequence[str] = (),
    salt: str = "",
    is_upload: bool = False,
) -> Answer:
    """An answer, after which the engine's blocks are in the pool and not in its own prefix cache."""
    paths = [str(image) for image in images]
    answer = engine.call("tests.e2e.inside:with_images", tokens, paths, is_upload, list(uuids), salt)
    drain(engine)
    return Answer(answer["tokens"], answer["logprobs"], 0.0, answer["cached"])


def computed(engine: Engine, tokens: list[int], *images: Path) -> Answer:
    """The same engine's answer without the pool, and without anything that it has kept of these images."""
    number = next(_numbers)
    uuids = [f"computed {number}, {nth}" for nth in range(len(images))]
    answer = ask(engine, tokens, *images, uuids=uuids, salt=f"computed {number}")
    assert answer.cached_tokens == 0
    return answer


@pytest.mark.parametrize("reader", ["no processor cache", "no prefix cache"])
def test_equal_pixels_hit_from_any_file_and_with_either_cache_off(engines: Engines, images: Path, reader: str) -> None:
    tokens = text(reader)
    stored = ask(engines["writer"], tokens, images / "cat.png")
    loaded = ask(engines[reader], tokens, images / "cat.bmp")
    assert (stored.cached_tokens, loaded.cached_tokens) == (0, FULL)
    assert_same([loaded, loaded], [stored, computed(engines[reader], tokens, images / "cat.png")])


def test_another_image_shares_the_blocks_before_it(engines: Engines, images: Path) -> None:
    tokens, reader = text("another image"), engines["no processor cache"]
    stored = ask(engines["writer"], tokens, images / "cat.png")
    other = ask(reader, tokens, images / "dog.png")
    right = computed(reader, tokens, images / "dog.png")
    assert right.logprobs != stored.logprobs, "images that make no difference show nothing"
    assert_same([other], [right])
    assert other.cached_tokens == BEFORE


def test_of_several_images_those_before_the_first_difference_are_shared(engines: Engines, images: Path) -> None:
    tokens = [*text("several", FIRST), IMAGE_TOKEN, *prompt(REST, "end")]
    cat, dog = images / "cat.png", images / "dog.png"
    reader = engines["no processor cache"]
    stored = ask(engines["writer"], tokens, cat, dog)
    answers = {others: ask(reader, tokens, *others) for others in ((cat, dog), (dog, cat), (cat, cat))}
    assert [answer.cached_tokens for answer in answers.values()] == [
        hit_tokens(2 * (FIRST + IMAGE_TOKENS) + REST),
        BEFORE,
        hit_tokens(FIRST + IMAGE_TOKENS + FIRST),
    ]
    assert_same([answers[cat, dog]], [stored])
    for others, answer in answers.items():
        assert_same([answer], [computed(reader, tokens, *others)])


def test_a_hit_may_end_inside_an_image(engines: Engines, images: Path) -> None:
    tokens, reader = text("inside", rest=5), engines["no processor cache"]
    ask(engines["writer"], tokens, images / "cat.png")
    loaded = ask(reader, tokens, images / "cat.png")
    assert FIRST < loaded.cached_tokens == hit_tokens(FIRST + IMAGE_TOKENS + 5) < FIRST + IMAGE_TOKENS
    assert_same([loaded], [computed(reader, tokens, images / "cat.png")])


def test_an_uploaded_file_hits_where_its_bytes_are_equal(engines: Engines, images: Path) -> None:
    tokens, reader = text("uploaded"), engines["no processor cache"]
    stored = ask(engines["writer"], tokens, images / "cat.png", is_upload=True)
    same_bytes = ask(reader, tokens, images / "cat.png", is_upload=True)
    same_pixels = [
        ask(reader, tokens, images / "cat-again.png", is_upload=True),
        ask(reader, tokens, images / "cat.png"),
    ]
    assert same_bytes.cached_tokens == FULL
    assert [answer.cached_tokens for answer in same_pixels] == [BEFORE, BEFORE]
    assert_same([same_bytes, *same_pixels], [stored] * 3)


def test_at_another_path_an_image_hits_by_its_uuid_alone(engines: Engines, images: Path) -> None:
    by_content, by_uuid, cat = text("content"), text("uuid"), images / "cat.png"
    reader = engines["another path"]
    stored = ask(engines["writer"], by_content, cat), ask(engines["writer"], by_uuid, cat, uuids=["a cat"])
    loaded = ask(reader, by_content, cat), ask(reader, by_uuid, cat, uuids=["a cat"])
    assert [answer.cached_tokens for answer in loaded] == [BEFORE, FULL]
    assert_same(loaded, stored)
    assert_same(loaded, [computed(reader, by_content, cat), computed(reader, by_uuid, cat)])


def test_a_uuid_of_two_images_gets_the_wrong_one_and_a_salt_does_not_help(engines: Engines, images: Path) -> None:
    """vLLM trusts a `uuid`. Its cache of encoded images leaves `cache_salt` out."""
    tokens, reader = text("lie"), engines["no processor cache"]
    stored = ask(engines["writer"], tokens, images / "cat.png", uuids=["mine"])
    lie = ask(reader, tokens, images / "dog.png", uuids=["mine"])
    assert lie.cached_tokens == FULL
    salted = ask(engines["writer"], tokens, images / "dog.png", uuids=["mine"], salt="another client")
    assert salted.cached_tokens == 0
    assert_same([lie, salted], [stored, stored])
