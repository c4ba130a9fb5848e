"""Runs engines and judges each pair of them: equal namespaces must mean equal KV.

KV is compared where the oracle can read it, which is in any engine whose worker shares the driving process; else the
answer's tokens and logprobs stand for the KV. Settings of sampling change answers and no KV.
"""

from __future__ import annotations

import enum
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from testbed.engine import Engine, EngineError, EngineSpec, kvpool_transfer_config
from testbed.tiny_llama import Shape, write
from tests.identity.variants import BASE, CHANGED, Variant

SHAPE = Shape(layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=2048, max_tokens=4096)
PROMPT = [10 + (7919 * nth * nth) % 2000 for nth in range(150)]
"""Four whole blocks and a rest."""
UNREACHABLE = "127.0.0.1:9"
"""The engine computes by itself: nothing listens at this endpoint."""
TOLERANCE = 1e-4
"""Of logprobs, and of KV by its largest number: float32 differs by the order of sums."""
ANSWERS_DIFFER = "answers differ"
REASON = re.compile(r"^.*?\b(\w*(?:Error|Exception)\b.*)$")


class Verdict(enum.Enum):
    """Of two engines."""

    APART = "apart"
    SAME = "same"
    REFUSED = "refused"
    FAILURE = "FAILURE"


@dataclass(frozen=True, slots=True)
class Observation:
    """What one engine did.

    Args:
        refusal: why the engine does not start or answer; then all else is empty.
        without: fingerprints by rule that was taken out of the namespace.
        kv: of the prompt's whole blocks in every layer, as one row; None if another process has it.
    """

    variant: Variant
    refusal: str = ""
    fingerprint: str = ""
    without: dict[str, str] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    kv: np.ndarray | None = None


def write_base(directory: Path) -> Path:
    """The model of the base engine."""
    return write(directory, SHAPE)


def write_variant(base: Path, variant: Variant, directory: Path) -> Path:
    """The model of a variant: the base's own directory, or a copy with the variant's files."""
    if not variant.files:
        return base
    shutil.copytree(base, directory)
    for name, content in variant.files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, int):
            write_weights(path, content)
        elif content == CHANGED and path.exists():
            path.write_text(path.read_text() + "\n")
        else:
            path.write_text(content)
    return directory


def write_weights(path: Path, seed: int) -> None:
    """Writes the base's shape with other weights, in the format of the file's suffix."""
    with tempfile.TemporaryDirectory() as folder:
        written = write(Path(folder), replace(SHAPE, seed=seed)) / "model.safetensors"
        if path.suffix == ".safetensors":
            shutil.copy(written, path)
        else:
            torch.save(load_file(written), path)


def observe(
    model: Path, variant: Variant, scratch: Path, without: Sequence[str] = (), start_timeout_s: float = 480.0
) -> Observation:
    """Starts an engine of one variant, asks it the prompt and stops it.

    Args:
        model: of the base.
        scratch: an empty directory, for the copy of the model, the log and the KV.
        without: rules of the namespace to take out, as `inside.broken` knows them.
    """
    spec = EngineSpec(
        write_variant(model, variant, scratch / "model"),
        kvpool_transfer_config(UNREACHABLE),
        {**BASE, **variant.options},
        dict(variant.environment),
        in_process=True,
    )
    log, kv = scratch / "engine.log", scratch / "kv.npy"
    try:
        with Engine(spec, log, start_timeout_s) as engine:
            found: dict[str, Any] = engine.call("tests.identity.inside:observe", PROMPT, str(kv), list(without))
    except EngineError as error:
        return Observation(variant, refusal=_reason(log.read_text(errors="replace"), error))
    if found["in_doubt"]:  # Would be apart from any engine, whatever else its namespace has.
        return Observation(variant, refusal="the engine doubts which weights it has loaded")
    return Observation(
        variant,
        "",
        found["fingerprint"],
        found["without"],
        found["tokens"],
        found["logprobs"],
        np.load(kv) if found["has_kv"] else None,
    )


def judge(one: Observation, other: Observation, without: str = "") -> tuple[Verdict, str]:
    """The verdict on two engines, and why.

    Args:
        without: judge by the namespace without this rule.
    """
    for each in (one, other):
        if each.refusal:
            return Verdict.REFUSED, each.refusal
    names = [each.without[without] if without else each.fingerprint for each in (one, other)]
    if names[0] != names[1]:
        return Verdict.APART, ""
    logprobs = _difference(one.logprobs, other.logprobs)
    answers = (
        "" if one.tokens == other.tokens and logprobs <= TOLERANCE else f"{ANSWERS_DIFFER} (logprobs by {logprobs:.2g})"
    )
    if one.kv is None or other.kv is None:
        return (Verdict.FAILURE, answers) if answers else (Verdict.SAME, "by answers")
    if one.kv.shape != other.kv.shape:
        return Verdict.FAILURE, f"KV has shapes {one.kv.shape} and {other.kv.shape}"
    kv = _difference(one.kv, other.kv) / float(np.abs(one.kv).max())
    if not kv <= TOLERANCE:  # Nor is NaN.
        return Verdict.FAILURE, f"KV differs by {kv:.2g} of its largest number; {answers or 'answers agree'}"
    return Verdict.SAME, answers


def pairs(observations: Sequence[Observation]) -> Iterator[tuple[Observation, Observation, Verdict, str]]:
    """Each pair of engines with its verdict, in the order of the engines.

    A pair is left out that has neither KV nor answers to judge by: the oracle cannot read the KV of one engine, and a
    setting of sampling gives the other one answers of its own.
    """
    first = observations[0]
    own_answers = {id(each) for each in observations if judge(first, each)[1].startswith(ANSWERS_DIFFER)}
    for nth, one in enumerate(observations):
        for other in observations[nth + 1 :]:
            with_kv = [each for each in (one, other) if each.kv is not None]
            if len(with_kv) != 1 or id(with_kv[0]) not in own_answers:
                yield one, other, *judge(one, other)


def _difference(one: Any, other: Any) -> float:
    if len(one) != len(other):
        return float("inf")
    return float(np.abs(np.asarray(one) - np.asarray(other)).max(initial=0))


def _reason(log: str, error: EngineError) -> str:
    """The last error that an engine has logged."""
    lines = log.splitlines()
    found = [nth for nth, line in enumerate(lines) if REASON.search(line) and "EngineCore" not in line]
    if not found:
        return str(error).splitlines()[0]
    message = REASON.sub(r"\1", lines[found[-1]])
    if "validation error" in message:  # Of Pydantic: the next lines say which.
        message += " ".join(lines[found[-1] + 1 : found[-1] + 3])
    return " ".join(message.split())[:200]
