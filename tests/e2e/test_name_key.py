"""Engines that share a name key share blocks; one without the key has no hit, computes the same, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.security.name_key import NameKey
from testbed.engine import kvpool_transfer_config
from tests.e2e.conftest import PATIENT, StartEngines, assert_same, assert_shared, prompt
from tests.support.processes import ServerProcess, wait_for
from tests.support.real_engines import one_by_one

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(length, f"name key {length}") for length in (33, 500, 1_000)]


def test_engines_with_one_key_share_blocks(
    start_engines: StartEngines, e2e_server: ServerProcess, tmp_path: Path
) -> None:
    NameKey.create(tmp_path / "name.key")
    settings = {**PATIENT, "salt": "name key", "transport": "shm"}
    keyed = kvpool_transfer_config(e2e_server.endpoint, name_key_file=str(tmp_path / "name.key"), **settings)
    plain = kvpool_transfer_config(e2e_server.endpoint, **settings)
    writer, reader, stranger = start_engines(keyed, keyed, plain)
    own_cache = assert_shared(writer, reader, PROMPTS)
    computed = one_by_one(stranger, PROMPTS)
    assert [answer.cached_tokens for answer in computed] == [0] * len(PROMPTS)
    assert_same(computed, own_cache)
    wait_for(lambda: "extra['name_key']: " in stranger.log(), "the stranger's log to name the key", 30)
