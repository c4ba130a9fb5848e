"""What each call tells of other tenants and of secrets: nothing; and nothing is done to others' namespaces."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client.client import Client, Namespace
from kvpool.protocol.errors import (
    IncompatibleNamespaceError,
    InvalidRequestError,
    OutOfSpaceError,
    UnknownNamespaceError,
)
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.protocol.reports import ReportRequest
from kvpool.protocol.types import BlockRun
from kvpool.security.principal import Role
from kvpool.v1 import pool_pb2 as pb
from kvpool_server.sharing import Limits
from tests.security.conftest import Deploy, Deployment
from tests.support.calls import BYTES_BY_ID, METHODS, Target, outcome
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec, payload, replaced, run_of

TENANTS = ("acme", "umbra")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _spec(tenant: str) -> NamespaceSpec:
    """A spec whose every text tells whose it is."""
    names = ("model", "revision", "weights_epoch", "page_format", "salt", "hash_seed")
    texts = {name: f"{tenant}'s {name}" for name in names}
    group = group_spec(layer_names=(f"{tenant}'s layer",))
    return namespace_spec(group, tenant=tenant, extra=((f"{tenant}'s key", f"{tenant}'s value"),), **texts)


@pytest.mark.parametrize("role", [Role.ROUTER, Role.METRICS, Role.OPERATOR, Role.PEER])
def test_no_reply_and_no_error_has_a_secret(deployment: Deployment, role: Role) -> None:
    """Of engines and operators of tenants: `test_intruder_machine.py`."""
    specs, told = [_spec(tenant) for tenant in TENANTS], ""
    for spec in specs:
        with deployment.client(Role.ENGINE_WRITE, spec.tenant) as client:
            client.open_namespace(spec)
    with deployment.client(role) as client:
        for spec in specs:
            target = Target(spec.fingerprint(), spec=spec, leased="nothing")
            for method in (*METHODS, *BYTES_BY_ID):
                if method != "Clear":
                    found = outcome(client, method, target)
                    told += found.text + b"\n".join(found.replies).decode(errors="replace")
    assert "kvpool" in told and "'s salt" not in told and "'s hash_seed" not in told
    if role is Role.OPERATOR:
        assert _digest("acme's salt") in told and _digest("acme's hash_seed") in told
    if role.has_tenant:
        assert "umbra" not in told and _digest("umbra's salt") not in told


def test_an_error_names_the_secrets_that_differ_and_does_not_show_them(deployment: Deployment) -> None:
    spec = _spec("acme")
    other = replace(spec, salt="my other salt", hash_seed="my other seed", page_format="another")
    with deployment.client(Role.ENGINE_WRITE) as client:
        client.open_namespace(spec)
        with pytest.raises(IncompatibleNamespaceError) as raised:
            client.open_namespace(other, spec.fingerprint())
    text = str(raised.value)
    assert "page_format: 'another' here" in text and "salt differs" in text and "hash_seed differs" in text
    for each in (spec, other):
        assert each.salt not in text and each.hash_seed not in text


# Values

BLOCK_TOKENS = 16
LOOKUPS = {"acme": 2, "umbra": 5}


def looked_up_tokens(report: pb.ValueResponse) -> float:
    return sum(curve.lookup_tokens for curve in report.curves if not curve.is_total)


def test_a_tenant_sees_its_own_curve_only_and_the_operator_each_and_all_together(deployment: Deployment) -> None:
    def look_up(tenant: str, count: int) -> None:
        run = run_of((tenant, "valued"))
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            namespace = client.open_namespace(namespace_spec(tenant=tenant, model="valued"))
            client.put_blocks(namespace, run, [payload(tenant, 256)])
            for _ in range(count):
                client.release([client.lookup(namespace, [run]).lease_id])

    with deployment.client(Role.OPERATOR) as operator:
        before = looked_up_tokens(operator.admin.value())
        for tenant, count in LOOKUPS.items():
            look_up(tenant, count)
        expected = before + BLOCK_TOKENS * sum(LOOKUPS.values())
        wait_for(lambda: looked_up_tokens(operator.admin.value()) == expected, "the lookups to be counted")
        total, *others = operator.admin.value().curves
    assert total.is_total and {curve.tenant for curve in others} >= {"acme", "umbra"}
    assert total.lookup_tokens == pytest.approx(sum(curve.lookup_tokens for curve in others), rel=0.01)
    for tenant, count in LOOKUPS.items():
        (whole,) = [each for each in others if each.tenant == tenant]
        with deployment.client(Role.TENANT_OPERATOR, tenant) as client:
            (curve,) = client.admin.value().curves
        assert curve.tenant == tenant and not curve.is_total
        assert curve.lookup_tokens == pytest.approx(whole.lookup_tokens, rel=0.01)
        assert curve.lookup_tokens >= 0.99 * BLOCK_TOKENS * count
        assert len(curve.estimates) == len(whole.estimates) > 0


# Explanations

BLOCK_BYTES = 1 << 20
NAMES = list(range(10))


def stored(client: Client, namespace: Namespace, run: BlockRun, block: Any) -> bool:
    """Stores a block; False if there is no room yet: an extent of another tenant is being drained."""
    try:
        client.put_blocks(namespace, run, [block])
    except OutOfSpaceError:
        return False
    return True


def test_a_tenant_is_told_that_another_took_the_room_and_not_which(deploy: Deploy) -> None:
    deployment, fingerprints = deploy(), {}
    for tenant, count in (("acme", 10), ("umbra", 6)):
        spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant=tenant, model=f"{tenant}/model")
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            namespace = client.open_namespace(spec)
            for name in NAMES[:count]:
                run, block = run_of(name, parent=name - 1 if name else None), payload((tenant, name), BLOCK_BYTES)
                wait_for(lambda: stored(client, namespace, run, block), "room")  # noqa: B023
            fingerprints[tenant] = namespace.fingerprint

    def evicted_for(role: Role, tenant: str) -> set[tuple[str, str, bool]]:
        with deployment.client(role, tenant) as client:
            (run,) = client.admin.explain(fingerprints["acme"], [run_of(*NAMES)]).runs
        causes = [part.evicted_for for part in run.ranges if part.state == pb.BLOCK_STATE_MISSING]
        return {(cause.tenant, cause.model, cause.is_hidden) for cause in causes}

    told = evicted_for(Role.TENANT_OPERATOR, "acme")
    assert ("", "", True) in told <= {("", "", True), ("acme", "acme/model", False), ("", "", False)}
    assert ("umbra", "umbra/model", False) in evicted_for(Role.OPERATOR, "acme")
    with pytest.raises(UnknownNamespaceError):
        evicted_for(Role.TENANT_OPERATOR, "umbra")


# Reports and the ledger


def report_of(*fingerprints: bytes, sequence: int = 1, requests: int = 1) -> ReportRequest:
    return ReportRequest(
        reporter=b"reporter".ljust(16),
        sequence=sequence,
        engine="host:1",
        namespaces=fingerprints,
        num_requests=requests,
    )


def test_an_engine_reports_for_its_own_tenant_alone(deployment: Deployment) -> None:
    """Nobody keeps another tenant's reports from counting, by its reporter's id and a high number."""
    fingerprints = {}
    for tenant in TENANTS:
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            fingerprints[tenant] = client.open_namespace(namespace_spec(tenant=tenant, salt="reports")).fingerprint
    own = fingerprints["acme"]
    with deployment.client(Role.ENGINE_READ, "umbra") as client:
        client.rpc.report(report_of(fingerprints["umbra"], sequence=1 << 60), 5_000)
    with deployment.client(Role.ENGINE_READ, "acme") as client:
        for stolen in ((fingerprints["umbra"],), (bytes(32),), (own, fingerprints["umbra"])):
            with pytest.raises(UnknownNamespaceError):
                client.rpc.report(report_of(*stolen), 5_000)
        large = replaced(report_of(own), engine="x" * Limits().max_spec_bytes)
        with pytest.raises(InvalidRequestError, match="the limit is 64 KiB"):
            client.rpc.report(large, 5_000)
        assert client.rpc.report(report_of(own, requests=7), 5_000)
    with deployment.client(Role.TENANT_OPERATOR, "acme") as client:
        rows = client.admin.ledger(0).rows
        assert {row.tenant for row in rows} == {"acme"}
        assert sum(row.num_requests for row in rows) >= 7
    with deployment.client(Role.OPERATOR) as client:
        assert {row.tenant for row in client.admin.ledger(0).rows} >= {"acme", "umbra"}
        assert {state.tenant for state in client.admin.stats().engines} >= {"acme", "umbra"}
