"""What each call tells of other tenants and of secrets: nothing; and nothing is done to others' namespaces."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.client.client import Client, Namespace
from kvpool.commands import common
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
from kvpool_server.cache.limits import Limits
from tests.security.conftest import Deploy, Deployment
from tests.support.calls import BYTES_BY_ID, METHODS, Target, outcome
from tests.support.processes import wait_for
from tests.support.values import group_spec, namespace_spec, payload, replaced, run_of

TENANTS = ("acme", "umbra")

SECRETS = ("salt", "hash_seed")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _spec(tenant: str) -> NamespaceSpec:
    """A spec whose every text tells whose it is."""
    names = ("model", "revision", "weights_epoch", "page_format", "salt", "hash_seed")
    texts = {name: f"{tenant}'s {name}" for name in names}
    group = group_spec(layer_names=(f"{tenant}'s layer",))
    return namespace_spec(group, tenant=tenant, extra=((f"{tenant}'s key", f"{tenant}'s value"),), **texts)


@dataclass(frozen=True)
class Opened:
    """A namespace of each tenant, of which one has a block, and a quota of each."""

    deployment: Deployment
    specs: dict[str, NamespaceSpec]

    def told(self, role: Role, tenant: str) -> str:
        """Everything that a caller of a tenant gets from all calls, about namespaces of both tenants."""
        texts = []
        with self.deployment.client(role, tenant) as client:
            for whose in self.specs.values():
                for method in (*METHODS, *BYTES_BY_ID):
                    if method == "Clear":
                        continue
                    target = Target(whose.fingerprint(), spec=self.specs[tenant], leased="nothing")
                    found = outcome(client, method, target)
                    texts += [found.text, *(reply.decode(errors="replace") for reply in found.replies)]
        return "\n".join(texts)


@pytest.fixture(scope="module")
def opened(deployment: Deployment) -> Opened:
    specs = {tenant: _spec(tenant) for tenant in TENANTS}
    for tenant, spec in specs.items():
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            client.put_blocks(client.open_namespace(spec), run_of("block"), [payload(tenant, 256)])
    return Opened(deployment, specs)


@pytest.mark.parametrize("role", list(Role))
def test_no_reply_and_no_error_has_a_secret(opened: Opened, role: Role) -> None:
    told = opened.told(role, "acme")
    assert "kvpool" in told
    for spec in opened.specs.values():
        for name in SECRETS:
            assert getattr(spec, name) not in told
    if role in (Role.TENANT_OPERATOR, Role.OPERATOR):
        assert "acme's model" in told and _digest("acme's salt") in told and _digest("acme's hash_seed") in told


@pytest.mark.parametrize("role", [role for role in Role if role.has_tenant])
def test_no_reply_and_no_error_tells_of_another_tenant(opened: Opened, role: Role) -> None:
    told = opened.told(role, "acme")
    assert "acme" in told
    assert "umbra" not in told and _digest("umbra's salt") not in told


def test_an_error_names_the_secrets_that_differ_and_does_not_show_them(opened: Opened) -> None:
    spec = opened.specs["acme"]
    other = replace(spec, salt="my other salt", hash_seed="my other seed", page_format="another")
    with opened.deployment.client(Role.ENGINE_WRITE) as client, pytest.raises(IncompatibleNamespaceError) as raised:
        client.open_namespace(other, spec.fingerprint())
    text = str(raised.value)
    assert "page_format: 'another' here" in text and "salt differs" in text and "hash_seed differs" in text
    for each in (spec, other):
        assert each.salt not in text and each.hash_seed not in text


def test_people_compare_digests(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvpool namespaces`, of an operator of the tenant."""
    spec = opened.specs["acme"]
    other = replace(spec, salt="my other salt")
    with opened.deployment.client(Role.ENGINE_WRITE) as client:
        client.open_namespace(other)
    monkeypatch.setattr(common, "client_of", lambda *_: opened.deployment.client(Role.TENANT_OPERATOR))
    runner = CliRunner()
    listing = runner.invoke(cli.app, ["namespaces", "--json"])
    rows = {row["fingerprint"]: row for row in json.loads(listing.output)}
    assert rows[spec.fingerprint().hex()]["salt"] == _digest(spec.salt)
    assert rows[spec.fingerprint().hex()]["hash_seed"] == _digest(spec.hash_seed)
    names = [each.fingerprint().hex() for each in (spec, other)]
    compared = runner.invoke(cli.app, ["namespaces", "--json", "--diff", *names])
    assert json.loads(compared.output) == [{"field": "salt", "a": _digest(spec.salt), "b": _digest("my other salt")}]


def test_newer_weights_of_one_tenant_supersede_its_own_namespace_alone(opened: Opened) -> None:
    """The specs of two tenants are equal but for the tenant; so are those that both open later."""
    deployment, spec = opened.deployment, namespace_spec(salt="the same", weights_epoch="1", tenant="acme")
    for tenant, epoch in (("acme", "1"), ("umbra", "1"), ("umbra", "2")):
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            client.open_namespace(replace(spec, tenant=tenant, weights_epoch=epoch))
    with deployment.client(Role.OPERATOR) as client:
        superseded = {
            (info.spec.tenant, info.spec.weights_epoch): info.superseded
            for info in client.admin.namespaces()
            if info.spec.salt == _digest("the same")
        }
    assert superseded == {("acme", "1"): False, ("umbra", "1"): True, ("umbra", "2"): False}


# Values

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


@pytest.fixture(scope="module")
def evicted(deploy: Deploy) -> tuple[Deployment, bytes]:
    """A server, and the namespace of acme, whose blocks have in part made room for umbra's."""
    deployment, fingerprints = deploy(), {}
    for tenant, count in (("acme", 10), ("umbra", 6)):
        spec = namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), tenant=tenant, model=f"{tenant}/model")
        with deployment.client(Role.ENGINE_WRITE, tenant) as client:
            namespace = client.open_namespace(spec)
            for name in NAMES[:count]:
                parent = name - 1 if name else None
                block = payload((tenant, name), BLOCK_BYTES)
                wait_for(lambda: stored(client, namespace, run_of(name, parent=parent), block), "room")  # noqa: B023
            fingerprints[tenant] = namespace.fingerprint
    return deployment, fingerprints["acme"]


def missing(evicted: tuple[Deployment, bytes], role: Role, tenant: str) -> list[pb.BlockRange]:
    deployment, fingerprint = evicted
    with deployment.client(role, tenant) as client:
        (run,) = client.admin.explain(fingerprint, [run_of(*NAMES)]).runs
    return [part for part in run.ranges if part.state == pb.BLOCK_STATE_MISSING]


def test_a_tenant_is_told_that_another_took_the_room_and_not_which(evicted: tuple[Deployment, bytes]) -> None:
    told = missing(evicted, Role.TENANT_OPERATOR, "acme")
    assert told
    whose = {(part.evicted_for.tenant, part.evicted_for.model, part.evicted_for.is_hidden) for part in told}
    assert ("", "", True) in whose
    assert whose <= {("", "", True), ("acme", "acme/model", False), ("", "", False)}


def test_the_operator_of_all_is_told_which(evicted: tuple[Deployment, bytes]) -> None:
    told = missing(evicted, Role.OPERATOR, "acme")
    assert "umbra/model" in {part.evicted_for.model for part in told if part.evicted_for.tenant == "umbra"}


def test_of_another_tenants_namespace_nothing_is_told(evicted: tuple[Deployment, bytes]) -> None:
    with pytest.raises(UnknownNamespaceError):
        missing(evicted, Role.TENANT_OPERATOR, "umbra")


# Reports and the ledger


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
    for tenant in TENANTS:
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
