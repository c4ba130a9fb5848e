"""Batches of published prefixes, in vLLM's wire format: as one engine would tell of its only KV-cache group."""

from __future__ import annotations

import numpy as np

from kvpool_server.events.encoder import BlockHash, BlockRemoved, BlockStored, Encoder
from kvpool_server.events.ledger import Change, ChangeBatch


class PrefixEncoder(Encoder):
    """Encodes batches of one stream, all under one topic.

    Args:
        name, model: second and third part of the topic; llm-d reads them as pod and model.
        topic, medium, full_hashes: as `Encoder` takes them.
    """

    def __init__(self, name: str, model: str, topic: str = "kv", medium: str = "CPU", full_hashes: bool = False):
        super().__init__(topic, medium, full_hashes)
        self._place = f"{name}@{model}"

    def _about(self, batch: ChangeBatch) -> str:
        return self._place

    def _stored(self, change: Change, name: BlockHash) -> BlockStored:
        tokens = _ids(change)
        return BlockStored(
            block_hashes=[name],
            parent_block_hash=self._name(change.parent_hash) if change.parent_hash else None,
            token_ids=tokens,
            block_size=len(tokens),
            lora_id=None,
            medium=self._medium,
            lora_name=None,
        )

    def _removed(self, change: Change, name: BlockHash) -> BlockRemoved:
        return BlockRemoved([name], self._medium)

    def _add(self, event: BlockStored | BlockRemoved, change: Change, name: BlockHash) -> None:
        super()._add(event, change, name)
        if isinstance(event, BlockStored):
            event.token_ids += _ids(change)


def _ids(change: Change) -> list[int]:
    ids: list[int] = np.frombuffer(change.tokens, "<u4").tolist()
    return ids
