"""What routers are told of blocks comes from callers that may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.errors import PermissionDeniedError
from kvpool.hashing import block_hashes
from kvpool.principal import Role
from kvpool.types import BlockRun
from tests.security.conftest import Deploy
from tests.support.processes import wait_for
from tests.support.routers import WireRouter
from tests.support.values import namespace_spec, payload


def test_who_only_reads_tells_routers_nothing(deploy: Deploy, tmp_path: Path) -> None:
    publish, replay = (f"ipc://{tmp_path / name}" for name in ("publish", "replay"))
    deployment = deploy("--kv-events-router", f"pool=test/routed,{publish},{replay},acme")
    spec = namespace_spec(tenant="acme", model="test/routed")
    right, wrong = list(range(32)), [7] * 32
    run, router = BlockRun(0, block_hashes(right, 16)), WireRouter()
    router.follow(0, publish, replay)
    try:
        with deployment.client(Role.ENGINE_WRITE) as writer, deployment.client(Role.ENGINE_READ) as reader:
            written = writer.open_namespace(spec)
            read = reader.open_namespace(spec)
            assert (written.wants_tokens, read.wants_tokens) == (True, False)
            writer.put_blocks(written, run, [payload(nth, 256) for nth in range(2)])
            with pytest.raises(PermissionDeniedError, match="the call needs engine-write or operator"):
                reader.rpc.announce(read, run, wrong)
            writer.rpc.announce(written, run, right)
            wait_for(lambda: router.promised(right) == {0: 32}, "the router's knowledge of the prompt")
            with pytest.raises(PermissionDeniedError):
                reader.rpc.announce(read, run, wrong)
            last = [8] * 16
            writer.put_blocks(written, BlockRun(0, block_hashes(last, 16)), [payload("last", 256)])
            writer.rpc.announce(written, BlockRun(0, block_hashes(last, 16)), last)
            wait_for(lambda: router.promised(last) == {0: 16}, "the router's knowledge of the last block")
            assert (router.promised(right), router.promised(wrong)) == ({0: 32}, {})
    finally:
        router.close()
