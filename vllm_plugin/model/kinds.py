"""The kinds of KV-cache groups that can be shared, and the longest hit: what every group needs of it is in the pool.

A kind knows four things of its layers: the rule (which blocks a hit needs), retention (which blocks are worth storing),
the cut (how a layer's page is divided over tensor-parallel ranks), and the format (what the bytes are). To serve
another kind of layer, write its class here and add it to `KINDS`.

A boundary is a number of tokens: a hit at boundary L means that the engine computes from token L on. Each boundary is
judged by itself, and each group by itself: it needs a run of blocks that ends at L.

Source: vLLM, v1/core/single_type_kv_cache_manager.py, `find_longest_cache_hit` and `get_num_skipped_tokens`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1 import kv_cache_interface as vllm_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Ints = npt.NDArray[np.int64]
Num = TypeVar("Num", int, Ints)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer's page is divided over the ranks.

    Args:
        heads: KV heads of the whole model; 0: each rank's page is opaque and its own, of `head_bytes`.
    """

    heads: int
    head_bytes: int


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """A kind of KV-cache group, with the sizes of one group.

    Args:
        name: vLLM's name for the kind, for `GroupSpec` and KV events.
        proves: a hit needs one block more, whose tokens are computed again: a draft model (EAGLE, MTP) writes the last
            slot of a block from the token after it.
        reach_tokens: tokens before its own that a token may depend on: a window, or a chunk; 0 for other kinds.
        window_tokens: size of the sliding window, for `GroupSpec` and KV events; 0 for other kinds.
    """

    block_tokens: int
    name: str = ""
    reach_tokens: int = 0
    proves: bool = False
    is_replicated: bool = False
    window_tokens: int = 0

    needs_prefix: ClassVar[bool] = False
    """A hit needs every block before its boundary."""
    specs: ClassVar[tuple[type[vllm_specs.KVCacheSpec], ...]] = ()
    """vLLM's specs of layers of the kind; a subclass of a spec may be of another."""
    is_positional: ClassVar[bool] = True
    """Block i of the request's block table holds tokens [i * block_tokens, (i + 1) * block_tokens)."""

    @classmethod
    def why_not_shared(cls, spec: Any) -> str | None:
        """Why layers of the kind cannot be shared with these settings; None if they can."""
        if getattr(spec, "non_causal", False):
            return "looks ahead (non-causal attention): its KV depends on more than the prefix; serve it without kvpool"
        return None

    @classmethod
    def of(cls, spec: Any, **sizes: Any) -> Kind:
        """The kind with the sizes of one layer's spec."""
        name = str(vllm_specs.get_kv_cache_spec_kind(spec).value)
        return cls(block_tokens=spec.block_size, name=name, is_replicated=is_replicated(spec), **sizes)

    @abstractmethod
    def first(self, boundary: Num) -> Num:
        """Index of the first block that a hit at `boundary` needs; elementwise for an array of boundaries."""

    def end(self, boundary: Num) -> Num:
        """Index after the last block that a hit at `boundary` needs; elementwise for an array of boundaries."""
        return boundary // self.block_tokens + self.proves

    def most_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        """The most tokens of a request whose blocks are allocated at once, with steps of `step_tokens` at most."""
        return min(num_tokens, self.reach_tokens + step_tokens + self.block_tokens)

    def worth_storing(self, start: int, stop: int, boundaries: Iterable[int], decoded: int) -> list[int]:
        """Those of blocks [start, stop) that are worth storing, in order.

        Args:
            boundaries: where a later request may resume.
            decoded: index of the first block with decoded tokens: the next turn of a conversation ends anywhere there.
        """
        wanted = set(range(max(start, decoded), stop))
        for boundary in boundaries:
            wanted.update(range(max(start, self.first(boundary)), min(stop, self.end(boundary))))
        return sorted(wanted)

    @classmethod
    def cut(cls, spec: Any, vllm_config: VllmConfig) -> Cut:
        """How the page of one layer of a rank is divided over the ranks."""
        head_bytes = spec.num_states * spec.state_content_size_bytes
        if is_replicated(spec):
            return Cut(1, spec.num_heads * head_bytes)
        if spec.num_head_slots is not None:
            # The attention backend packs pages in its own way; equal counts would not make its slots heads.
            return Cut(0, spec.num_heads * head_bytes)
        if spec.num_kv_heads == 1:
            return Cut(most_kv_heads(vllm_config), head_bytes)
        return Cut(spec.num_kv_heads * vllm_config.parallel_config.tensor_parallel_size, head_bytes)

    @classmethod
    def format(cls, spec: Any, cut: Cut) -> str:
        """What one layer's bytes are, in words that are equal for equal bytes."""
        cache_dtype = getattr(spec, "cache_dtype_str", None) or ""
        chunk = f" in chunks of {spec.attention_chunk_size}" if getattr(spec, "attention_chunk_size", None) else ""
        return (
            f"{cut.heads}x{spec.head_size}+{spec.head_size_v}:{spec.dtype} {spec.kv_quant_mode.name} {cache_dtype} "
            f"{cut.head_bytes}B/{spec.tokens_per_state} {spec.num_head_slots} {spec.state_content_bytes}{chunk}"
        )


@dataclass(frozen=True, kw_only=True)
class FullAttention(Kind):
    """Attention to all tokens before, MLA among it: a hit needs every block, and every block is worth storing."""

    specs = (vllm_specs.FullAttentionSpec, vllm_specs.MLAAttentionSpec)
    needs_prefix = True

    def first(self, boundary: Num) -> Num:
        return boundary * 0

    def most_live_tokens(self, num_tokens: int, step_tokens: int) -> int:
        return num_tokens

    def worth_storing(self, start: int, stop: int, boundaries: Iterable[int], decoded: int) -> list[int]:
        return list(range(start, stop))


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Kind):
    """Attention to the last tokens: a hit needs the blocks of the window before its boundary."""

    specs = (vllm_specs.SlidingWindowSpec, vllm_specs.SlidingWindowMLASpec)

    @classmethod
    def of(cls, spec: Any, **sizes: Any) -> Kind:
        reach_tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
        return super().of(spec, reach_tokens=reach_tokens, window_tokens=spec.sliding_window, **sizes)

    def first(self, boundary: Num) -> Num:
        return (boundary - self.reach_tokens) * (boundary > self.reach_tokens) // self.block_tokens


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal(Kind):
    """Attention inside chunks of tokens: a hit needs the blocks from the start of its boundary's chunk on."""

    specs = (vllm_specs.ChunkedLocalAttentionSpec,)

    @classmethod
    def of(cls, spec: Any, **sizes: Any) -> Kind:
        return super().of(spec, reach_tokens=spec.attention_chunk_size, **sizes)

    def first(self, boundary: Num) -> Num:
        return boundary // self.reach_tokens * self.reach_tokens // self.block_tokens


@dataclass(frozen=True, kw_only=True)
class MambaState(Kind):
    """A recurrent state: a hit needs the one state that was saved exactly at its boundary.

    vLLM hands over states at boundaries of its choice; the request's block table does not tell them. Draft models have
    no states, so that a state never needs a block more to prove it.
    """

    specs = (vllm_specs.MambaSpec,)
    is_positional = False

    @classmethod
    def why_not_shared(cls, spec: Any) -> str | None:
        if spec.mamba_cache_mode == "align":
            return None
        return (
            f"keeps states with mamba_cache_mode = {spec.mamba_cache_mode!r}; start vLLM with --enable-prefix-caching "
            "--mamba-cache-mode align"
        )

    def first(self, boundary: Num) -> Num:
        return boundary // self.block_tokens - 1

    @classmethod
    def cut(cls, spec: Any, vllm_config: VllmConfig) -> Cut:
        # A state is cut in ways of its own; ranks of another tensor-parallel size cannot put it together.
        return Cut(1 if spec.tp_replicated else 0, spec.state_content_size_bytes)

    @classmethod
    def format(cls, spec: Any, cut: Cut) -> str:
        states = ",".join(
            f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return f"{spec.mamba_type} {states}"


KINDS: tuple[type[Kind], ...] = (FullAttention, SlidingWindow, ChunkedLocal, MambaState)


def kind_of(spec: Any) -> type[Kind] | None:
    """The kind that serves layers with this vLLM `KVCacheSpec`; None if there is none."""
    return next((kind for kind in KINDS if type(spec) in kind.specs), None)


def is_replicated(spec: Any) -> bool:
    """Whether every tensor-parallel rank holds the same bytes of a layer."""
    return getattr(spec, "max_tp_shards", None) == 1 or getattr(spec, "tp_replicated", False)


_HEAD_COUNTS = re.compile(
    r'"(?![^"]*(?:dim|size|mamba|linear))[^"]*(?:head|(?:query|attention)_group)[^"]*": (\d+|\[[^]]*)'
)
"""Counts in a configuration that may be of KV heads; also query heads, which some models use for KV (MiniCPM 3)."""


def most_kv_heads(vllm_config: VllmConfig) -> int:
    """KV heads of the whole model in a layer that has one per rank, or a multiple of their number.

    A layer can have more heads than its model names. Rank r of R holds head r * H // R of a layer's H: R / M neighbours
    hold the same head if M is a multiple of each H that the configuration names; with M = R each rank has its own.
    """
    tp_size: int = vllm_config.parallel_config.tensor_parallel_size
    models = [vllm_config.model_config, getattr(vllm_config.speculative_config, "draft_model_config", None)]
    models = [model for model in models if model is not None]
    text = json.dumps([model.hf_text_config.to_dict() for model in models], default=str)
    totals = [model.get_total_num_kv_heads() for model in models]
    counts = [*totals, *map(int, re.findall(r"\d+", " ".join(_HEAD_COUNTS.findall(text))))]
    common = math.lcm(*(count for count in counts if 0 < count <= tp_size))
    # DeciLM's blocks name quotients of heads.
    is_named = 0 < totals[0] <= tp_size and '"block_configs"' not in text
    return common if is_named and tp_size % common == 0 else tp_size


class Found:
    """Which blocks of one group are there, of the `length` blocks from `first` on that were asked for.

    Args:
        complete: bitmap from `first` on.

    Attributes:
        leading: index after the first blocks without a gap.
    """

    def __init__(self, first: int, complete: int, length: int):
        self.first = first
        self.leading = first + (~complete & (complete + 1)).bit_length() - 1
        self._complete = complete
        self._length = max(length, complete.bit_length())

    def has(self, start: int, stop: int) -> bool:
        """Whether blocks [start, stop) are all there; `start` >= `first`."""
        if stop <= max(start, self.leading):
            return True
        last = stop - 1 - self.first
        return last < self._length and int(self._runs[last]) >= stop - start

    def have(self, start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
        """The same for each pair of two arrays."""
        if not self._length:
            return stop <= start
        last = stop - 1 - self.first
        runs = self._runs[np.clip(last, 0, self._length - 1)]
        return (stop <= start) | ((last < self._length) & (runs >= stop - start))

    def missing(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """The names of blocks that are not there; `names` are those of all `length` blocks."""
        if not self._complete & (self._complete + 1):  # A prefix, or nothing, or everything.
            return names[self.leading - self.first :]
        return list(itertools.compress(names, self._runs == 0))

    @functools.cached_property
    def _runs(self) -> Ints:
        """How many blocks without a gap end at each one."""
        packed = np.frombuffer(self._complete.to_bytes(-(-self._length // 8), "little"), np.uint8)
        bits = np.unpackbits(packed, count=self._length, bitorder="little")
        nth = np.arange(1, self._length + 1)
        return nth - np.maximum.accumulate(np.where(bits, 0, nth))


def longest(kinds: Sequence[Kind], found: Sequence[Found], local: int, limit: int, alignment: int) -> int:
    """The longest boundary at which every group has what a hit needs.

    Args:
        local: tokens that the engine has itself; the answer is not less.
        limit: tokens that the answer may not exceed.
        alignment: of boundaries, in tokens; `local` is one.
    """
    for kind, blocks in zip(kinds, found, strict=True):
        if kind.needs_prefix:
            limit = min(limit, (blocks.leading - kind.proves) * kind.block_tokens)
    limit = limit // alignment * alignment
    if limit <= local or all(
        blocks.has(max(kind.first(limit), local // kind.block_tokens), kind.end(limit))
        for kind, blocks in zip(kinds, found, strict=True)
    ):
        return max(limit, local)
    boundaries = np.arange(limit, local, -alignment)
    are_usable = np.ones(len(boundaries), np.bool_)
    for kind, blocks in zip(kinds, found, strict=True):
        start = np.maximum(kind.first(boundaries), local // kind.block_tokens)
        are_usable &= blocks.have(start, kind.end(boundaries))
    nth = int(are_usable.argmax())
    return int(boundaries[nth]) if are_usable[nth] else local
