"""An engine calls nothing that its role may not: real refusals would drown among those lines of the audit log."""

from __future__ import annotations

import pytest

from kvpool.client.client import Client
from kvpool.security.principal import Role
from tests.security.conftest import Deployment
from tests.support.processes import wait_for
from tests.support.values import namespace_spec
from vllm_plugin.session import MAY_NOT_LIST, Session


def test_an_engine_with_a_certificate_does_not_list_namespaces(
    deployment: Deployment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_plugin.session.PING_EVERY_S", 0.05)
    monkeypatch.setattr("vllm_plugin.session.EXPLAIN_EVERY_S", 0.0)
    caplog.set_level("INFO")
    spec = namespace_spec(tenant="acme", kv_cache_dtype="fp8")
    session = Session(deployment.config(**deployment.identity(Role.ENGINE_WRITE)), spec, "scheduler", explains=True)
    try:
        wait_for(lambda: session.namespace is not None and MAY_NOT_LIST in caplog.text, "the session to be open")
        with deployment.client(Role.OPERATOR) as operator:
            pings = _calls(operator)["Ping", "OK"]
            wait_for(lambda: _calls(operator)["Ping", "OK"] > pings + 5, "more pings")
            assert {status for _, status in _calls(operator)} == {"OK"}
        assert caplog.text.count(MAY_NOT_LIST) == 1
    finally:
        session.close()


def _calls(operator: Client) -> dict[tuple[str, str], int]:
    """Answers so far, by method and status."""
    return {(rpc.method, rpc.status): sum(rpc.buckets) for rpc in operator.admin.stats().server.rpcs}
