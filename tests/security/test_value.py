"""What `Value` tells of other tenants: nothing."""

from __future__ import annotations

import pytest

from kvpool.client.client import Client
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from tests.security.conftest import Deployment
from tests.support.processes import wait_for
from tests.support.values import namespace_spec, payload, run_of

BLOCK_TOKENS = 16
LOOKUPS = {"acme": 2, "umbra": 5}


def looked_up_tokens(report: pb.ValueResponse) -> float:
    return sum(curve.lookup_tokens for curve in report.curves if not curve.is_total)


@pytest.fixture(scope="module")
def driven(deployment: Deployment) -> Deployment:
    """A server on which tenants have looked up a block, umbra more often than acme."""
    with deployment.client(Role.OPERATOR) as operator:
        before = looked_up_tokens(operator.admin.value())
        for tenant, count in LOOKUPS.items():
            with deployment.client(Role.ENGINE_WRITE, tenant) as client:
                look_up(client, tenant, count)
        expected = before + BLOCK_TOKENS * sum(LOOKUPS.values())
        wait_for(lambda: looked_up_tokens(operator.admin.value()) == expected, "the lookups to be counted")
    return deployment


def look_up(client: Client, tenant: str, count: int) -> None:
    namespace = client.open_namespace(namespace_spec(tenant=tenant, model="valued"))
    run = run_of((tenant, "valued"))
    client.put_blocks(namespace, run, [payload(tenant, 256)])
    for _ in range(count):
        client.release([client.lookup(namespace, [run]).lease_id])


@pytest.mark.parametrize("tenant", LOOKUPS)
def test_a_tenant_sees_its_own_curve_only(driven: Deployment, tenant: str) -> None:
    with driven.client(Role.OPERATOR) as client:
        (expected,) = [each for each in client.admin.value().curves if each.tenant == tenant and not each.is_total]
    with driven.client(Role.TENANT_OPERATOR, tenant) as client:
        (curve,) = client.admin.value().curves
    assert curve.tenant == tenant and not curve.is_total
    assert curve.lookup_tokens == pytest.approx(expected.lookup_tokens, rel=0.01)
    assert curve.lookup_tokens >= 0.99 * BLOCK_TOKENS * LOOKUPS[tenant]
    assert len(curve.estimates) == len(expected.estimates) > 0


def test_the_operator_of_all_sees_all_tenants_together_and_each(driven: Deployment) -> None:
    with driven.client(Role.OPERATOR) as client:
        total, *others = client.admin.value().curves
    assert total.is_total and {curve.tenant for curve in others} >= {"acme", "umbra"}
    assert total.lookup_tokens == pytest.approx(sum(curve.lookup_tokens for curve in others), rel=0.01)
