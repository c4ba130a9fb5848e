"""What tests have an engine's own process do: `engine.call("tests.e2e.inside:beam_search", ...)`.

Every function gets the engine's `LLM` first, and takes and returns what JSON can carry.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.e2e.async_engine import answer_of, logprobs_of

Answers = list[dict[str, Any]]


def sample(llm: LLM, prompts: Sequence[list[int]], count: int, max_tokens: int) -> Answers:
    """`count` seeded samples of each prompt: {"cached": tokens, "samples": [[tokens, logprobs], ...]}."""
    sampling = SamplingParams(
        n=count, temperature=1.0, seed=7, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    return [
        {
            "cached": output.num_cached_tokens,
            "samples": [[list(each.token_ids), logprobs_of(each)] for each in output.outputs],
        }
        for output in outputs
    ]


def beam_search(llm: LLM, prompts: Sequence[list[int]], width: int, max_tokens: int) -> list[list[Any]]:
    """The beams of each prompt, best first: [[tokens, cumulative logprob], ...]."""
    search = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": each} for each in prompts], search)
    return [[[beam.tokens, beam.cum_logprob] for beam in output.sequences] for output in outputs]


def structured(llm: LLM, prompts: Sequence[list[int]], regex: str, max_tokens: int) -> Answers:
    """Greedy answers that match `regex`: {"cached", "tokens", "logprobs"}."""
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=0,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(regex=regex),
    )
    return [answer_of(each) for each in llm.generate([{"prompt_token_ids": each} for each in prompts], sampling)]


def prioritised(llm: LLM, prompts: Sequence[list[int]], priorities: Sequence[int], max_tokens: int) -> Answers:
    """Greedy answers to prompts of which every third begins some steps before the next third; lower goes first."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True)
    done: dict[str, Any] = {}

    def step() -> None:
        done.update((output.request_id, output) for output in engine.step() if output.finished)

    for nth, (tokens, priority) in enumerate(zip(prompts, priorities, strict=True)):
        engine.add_request(f"{nth}", {"prompt_token_ids": tokens}, sampling, priority=priority)
        if nth % 3 == 2:
            for _ in range(5):
                step()
    while engine.has_unfinished_requests():
        step()
    return [answer_of(done[f"{nth}"]) for nth in range(len(prompts))]


def embed(llm: LLM, prompts: Sequence[list[int]]) -> Answers:
    """{"cached", "embedding"} of each prompt."""
    outputs = llm.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
    return [{"cached": each.num_cached_tokens, "embedding": each.outputs.embedding} for each in outputs]


def adapted(llm: LLM, prompt: list[int], directory: str, reload: bool) -> dict[str, Any]:
    """A greedy answer of the adapter "adapter", which is read again from `directory` if `reload`."""
    adapter = LoRARequest("adapter", 1, directory, load_inplace=reload)
    if reload:
        llm.llm_engine.add_lora(adapter)
        adapter = LoRARequest("adapter", 1, directory)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, lora_request=adapter, use_tqdm=False)
    return answer_of(output)


def load_weights(llm: LLM, directory: str) -> None:
    """Puts the weights in `directory` in the place of those that the engine has."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})


_broken: list[tuple[Any, pytest.MonkeyPatch]] = []


def break_places(llm: LLM, places: Sequence[Sequence[str]], error: str, is_late: bool) -> None:
    """Has functions of the connector raise, until `mend_places`; see `tests.support.saboteur`.

    Args:
        places: [class, method] each, by name.
    """
    from tests.support.saboteur import PLACES, Sabotage

    owners = {owner.__name__: owner for owner in PLACES}
    sabotage = Sabotage(
        tuple((owners[owner], name) for owner, name in places), getattr(builtins, error), 1.0, is_late, 0
    )
    patch = pytest.MonkeyPatch()
    patch.setattr("vllm_plugin.session.MAX_FLAP_WAIT_S", 0.25)  # The next test need not wait for a minute.
    sabotage.apply(patch)
    _broken.append((sabotage, patch))


def alignment(llm: LLM) -> int:
    """Hits end at multiples of so many tokens, in an engine in this process."""
    tokens: int = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side.geometry.alignment
    return tokens


def num_raised(llm: LLM) -> int:
    """How often something was raised since `break_places`."""
    return int(_broken[-1][0].raised.total())


def mend_places(llm: LLM) -> None:
    """Undoes it."""
    _, patch = _broken.pop()
    patch.undo()


def with_images(
    llm: LLM, prompt: list[int], images: Sequence[str], is_upload: bool, uuids: Sequence[str], salt: str
) -> dict[str, Any]:
    """A greedy answer to a prompt with images.

    Args:
        prompt: token ids, with one image token per image.
        images: paths of files.
        is_upload: True gives vLLM a file's bytes with the image, as `vllm serve` does; False gives an object of PIL.
        uuids: names of the images that a client chooses; may be empty.
        salt: the `cache_salt`; may be empty.
    """
    load: Callable[[Path], Any] = ImageMediaIO().load_file if is_upload else Image.open
    request: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "multi_modal_data": {"image": [load(Path(each)) for each in images]},
        **({"multi_modal_uuids": {"image": list(uuids)}} if uuids else {}),
        **({"cache_salt": salt} if salt else {}),
    }
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([request], sampling, use_tqdm=False)
    return answer_of(output)
