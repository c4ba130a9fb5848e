"""What a server tells of namespaces: nobody's secrets, nothing of other tenants, and nothing done to theirs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.commands import common
from kvpool.protocol.errors import IncompatibleNamespaceError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.principal import Role
from tests.security.conftest import Deployment
from tests.support.calls import BYTES_BY_ID, METHODS, Target, outcome
from tests.support.values import group_spec, namespace_spec, payload, run_of

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
    specs = {tenant: _spec(tenant) for tenant in ("acme", "umbra")}
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
