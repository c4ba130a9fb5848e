"""Engines of two tenants on one server with TLS: each hits its own tenant's blocks, and knows of no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from testbed.engine import EngineSpec, kvpool_transfer_config
from tests.e2e.conftest import FLOAT32, PATIENT, assert_shared, prompt, running
from tests.support.certificates import files_in, server_flags
from tests.support.processes import ServerProcess
from tests.support.real_engines import drain, one_by_one

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(length, f"tenant {length}") for length in (33, 500, 1_000)]


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_tenants_share_a_server_and_nothing_else(
    pool_server: Callable[..., ServerProcess], model: Path, tmp_path: Path, transport: str
) -> None:
    authority = Authority.create(tmp_path / "pki")
    operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
    server = pool_server("--memory", "256MiB", *server_flags(authority.issue_server([])), tls=operator)

    def spec(tenant: str, role: Role, **transfer: Any) -> EngineSpec:
        files = files_in(authority.issue_principal(Principal(tenant, role)))
        extra = {"transport": transport, "tls": dataclasses.asdict(files), **PATIENT}
        config = kvpool_transfer_config(server.endpoint, **extra) | transfer
        return EngineSpec(model, config, FLOAT32, in_process=True)

    specs = [
        spec("acme", Role.ENGINE_WRITE),
        spec("acme", Role.ENGINE_READ, kv_role="kv_consumer"),
        spec("umbra", Role.ENGINE_WRITE),
    ]
    with running(tmp_path, *specs) as (writer, reader, stranger):
        assert_shared(writer, reader, PROMPTS)
        strange = one_by_one(stranger, PROMPTS)
        assert [answer.cached_tokens for answer in strange] == [0] * len(PROMPTS)
        drain(stranger)
    with Client(ClientConfig(server.endpoint, tls=operator, timeout_ms=60_000)) as client:
        held = {info.spec.tenant: info.num_entries for info in client.admin.namespaces()}
    assert held["acme"] == held["umbra"] > 0
