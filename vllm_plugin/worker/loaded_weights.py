"""The weights as they lie in a rank's memory, and their digest.

The digest tells whether weights have changed, and names weights whose files nobody can read. It covers every parameter
and persistent buffer of the modules that the attention layers belong to, the draft model among them. vLLM hands a
connector no model, so the modules are found from the layers upwards, among the objects that Python's garbage collector
knows: before vLLM freezes them, that is in the constructor.

vLLM's CPU kernels pack the weights of linear layers out of sight. They are read back through the layer: the product of
its weights and the identity is the weights, exactly.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvpool.loaded_weights")

PIECE_BYTES = 256 << 20
"""Bytes that a GPU hashes at a time; the hash needs a sixteenth of them."""
CHUNK_BYTES = 256 << 10
"""Bytes behind one checksum on a GPU: many of them are computed at once."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes that a GPU keeps to be fetched at once."""
MAX_READ_BACK_FLOP = 1 << 40
"""Products of more operations than this (tens of seconds on two cores) are not worth knowing packed weights."""
READ_BACK_ROWS = 512


class LoadedWeights:
    """One rank's. Only the thread that runs the model may call it.

    Args:
        vllm_config: of the rank; its attention layers have been built.
    """

    def __init__(self, vllm_config: VllmConfig):
        layers = list(vllm_config.compilation_config.static_forward_context.values())
        self._roots = [weakref.ref(root) for root in _roots(layers)]  # vLLM may free the model before the connector.

    def digest(self) -> bytes:
        """SHA-256 over the names, shapes and checksums (xxh3) of all weights; empty if some weights cannot be read."""
        try:
            return self._digest()
        except Exception as error:  # A tensor type or a layer that torch cannot show as bytes.
            logger.warning("kvpool cannot read the weights in memory (%s): a reset ends sharing with others", error)
            return b""

    def _digest(self) -> bytes:
        digest = _Digest()
        flop = 0
        roots = [root for ref in self._roots if (root := ref()) is not None]
        if not roots:
            raise ValueError("vLLM shows no attention layer")
        for root in roots:
            for name, tensor in sorted(root.state_dict().items()):
                if isinstance(tensor, torch.Tensor):
                    digest.add_tensor(f"{type(root).__name__}.{name}", tensor)
            for name, layer in root.named_modules():
                weight = getattr(layer, "weight", None)
                if not isinstance(weight, torch.Tensor) or weight.numel() or weight.device.type != "cpu":
                    if _hides_weights(layer):
                        raise ValueError(f"{name} keeps them where kvpool does not find them")
                    continue
                flop += 2 * _num_inputs(layer) ** 2 * getattr(layer, "output_size_per_partition", layer.output_size)
                if flop > MAX_READ_BACK_FLOP:
                    raise ValueError("the CPU's kernels have packed more of them than can be read back in short time")
                for nth, rows in enumerate(_read_back(layer)):
                    digest.add_tensor(f"{name}.{nth}", rows)
        return digest.digest()


def _roots(layers: list[Any]) -> list[torch.nn.Module]:
    """The outermost modules that the layers are part of."""
    parents: dict[int, torch.nn.Module] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.Module):  # `isinstance` would ask proxies for their class.
            parents.update((id(child), found) for child in found.children())
    roots: dict[int, torch.nn.Module] = {}
    for layer in layers:
        root = layer
        while (parent := parents.get(id(root))) is not None:
            root = parent
        roots[id(root)] = root
    return list(roots.values())


def _hides_weights(layer: torch.nn.Module) -> bool:
    """Whether a kernel has put the weights of a layer elsewhere than into its parameters."""
    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, BaseKVCacheMethod):
        return False
    # A layer that wraps another, as for adapters, has the weights of that one.
    found = layer.named_parameters()
    return not any("weight" in name and "scale" not in name and weight.numel() for name, weight in found)


def _num_inputs(layer: Any) -> int:
    """Of one rank's part of a linear layer; a replicated layer has no parts."""
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _read_back(layer: Any) -> Iterator[torch.Tensor]:
    """The weights of a linear layer that its kernel has packed: [rows of inputs, outputs] each, plus the bias."""
    num_inputs = _num_inputs(layer)
    for first in range(0, num_inputs, READ_BACK_ROWS):
        rows = torch.arange(min(READ_BACK_ROWS, num_inputs - first))
        probe = torch.zeros(len(rows), num_inputs, dtype=layer.params_dtype)
        probe[rows, first + rows] = 1
        yield layer.quant_method.apply(layer, probe)


class _Digest:
    """SHA-256 over bytes, of which those on a GPU are fetched many at a time: each fetch waits for what the GPU was
    given before, and for the processes that share it.
    """

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None  # Of the GPU, once something lies there; see `xxh3.secret_table`.
        self._sha = hashlib.sha256()
        self._parts: list[tuple[bytes | torch.Tensor, bool]] = []
        self._pending_bytes = 0

    def add(self, part: bytes | torch.Tensor, *, by_checksum: bool = False) -> None:
        """Adds bytes, or a tensor's (uint8, one dimension), or their checksum (xxh3)."""
        self._parts.append((part, by_checksum))
        self._pending_bytes += part.numel() if isinstance(part, torch.Tensor) else 0
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._fetch()

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor's name, shape, type and checksums."""
        self.add(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        # Some kernels transpose weights in place: in the order of memory they are contiguous.
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
        flat = tensor.detach().permute(order).contiguous().reshape(-1).view(torch.uint8)
        if tensor.device.type == "cpu":
            self.add(xxhash.xxh3_64_digest(flat.numpy()))
        else:
            self._add_device_sums(flat)

    def _add_device_sums(self, flat: torch.Tensor) -> None:
        """Checksums of a tensor (uint8, one dimension) where it lies; what fills no chunk is hashed on the host."""
        from vllm_plugin.worker.copy import xxh3

        table = self._table = xxh3.secret_table(flat.device) if self._table is None else self._table
        end = flat.numel() // CHUNK_BYTES * CHUNK_BYTES
        for first in range(0, end, PIECE_BYTES):
            chunks = flat[first : min(end, first + PIECE_BYTES)].view(-1, CHUNK_BYTES)
            chunks = chunks.clone() if chunks.data_ptr() % xxh3.WORD_BYTES else chunks
            room = torch.empty(xxh3.room_words(len(chunks), CHUNK_BYTES), dtype=torch.int64, device=flat.device)
            hashing = xxh3.Hashing(table, chunks, room)
            hashing.start()
            self.add(hashing.accumulators.clone().view(-1).view(torch.uint8))
        self.add(flat[end:].clone(), by_checksum=True)

    def digest(self) -> bytes:
        self._fetch()
        return self._sha.digest()

    def _fetch(self) -> None:
        tensors = [part for part, _ in self._parts if isinstance(part, torch.Tensor)]
        fetched = torch.cat(tensors).cpu().numpy() if tensors else np.empty(0, np.uint8)
        at = 0
        for part, by_checksum in self._parts:
            if isinstance(part, torch.Tensor):
                at, part = at + part.numel(), fetched[at : at + part.numel()].tobytes()
            self._sha.update(xxhash.xxh3_64_digest(part) if by_checksum else part)
        self._parts, self._pending_bytes = [], 0
