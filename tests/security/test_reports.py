"""Reports and the ledger with credentials: each tenant writes and reads its own figures alone."""

from __future__ import annotations

import pytest

from kvpool.protocol.errors import InvalidRequestError, UnknownNamespaceError
from kvpool.protocol.reports import ReportRequest
from kvpool.security.principal import Role
from kvpool_server.cache.limits import Limits
from tests.security.conftest import Deployment
from tests.support.values import namespace_spec, replaced


def report_of(fingerprint: bytes, sequence: int = 1, requests: int = 1) -> ReportRequest:
    return ReportRequest(
        reporter=b"reporter".ljust(16),
        sequence=sequence,
        engine="host:1",
        namespaces=(fingerprint,),
        num_requests=requests,
    )


@pytest.fixture(scope="module")
def fingerprints(deployment: Deployment) -> dict[str, bytes]:
    found = {}
    for tenant in ("acme", "umbra"):
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            found[tenant] = client.open_namespace(namespace_spec(tenant=tenant, salt="reports")).fingerprint
    return found


def test_an_engine_reports_for_its_own_tenant_alone(deployment: Deployment, fingerprints: dict[str, bytes]) -> None:
    with deployment.client(Role.ENGINE_READ, "acme") as client:
        assert client.rpc.report(report_of(fingerprints["acme"]), 5_000)
        for stolen in (fingerprints["umbra"], bytes(32)):
            with pytest.raises(UnknownNamespaceError):
                client.rpc.report(report_of(stolen), 5_000)
        stages = ReportRequest(
            reporter=b"reporter".ljust(16), sequence=2, namespaces=(fingerprints["acme"], fingerprints["umbra"])
        )
        with pytest.raises(UnknownNamespaceError):
            client.rpc.report(stages, 5_000)


def test_a_reporters_number_is_its_tenants(deployment: Deployment, fingerprints: dict[str, bytes]) -> None:
    """Nobody keeps another tenant's reports from counting, by its reporter's id and a high number."""
    with deployment.client(Role.ENGINE_READ, "umbra") as client:
        client.rpc.report(report_of(fingerprints["umbra"], 1 << 60), 5_000)
    with deployment.client(Role.ENGINE_READ, "acme") as client:
        client.rpc.report(report_of(fingerprints["acme"], 5, requests=7), 5_000)
    with deployment.client(Role.TENANT_OPERATOR, "acme") as client:
        rows = client.admin.ledger(0).rows
        assert {row.tenant for row in rows} == {"acme"}
        assert sum(row.num_requests for row in rows) >= 7
    with deployment.client(Role.OPERATOR) as client:
        assert {row.tenant for row in client.admin.ledger(0).rows} >= {"acme", "umbra"}
        assert {state.tenant for state in client.admin.stats().engines} >= {"acme", "umbra"}


def test_a_large_report_is_refused(deployment: Deployment, fingerprints: dict[str, bytes]) -> None:
    large = replaced(report_of(fingerprints["acme"], 1 << 30), engine="x" * Limits().max_spec_bytes)
    with (
        deployment.client(Role.ENGINE_READ, "acme") as client,
        pytest.raises(InvalidRequestError, match="the limit is 64 KiB"),
    ):
        client.rpc.report(large, 5_000)
