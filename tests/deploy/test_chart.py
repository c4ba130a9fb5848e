"""The Helm chart and the manifests for Kustomize: rendered, validated, and each command started with its files."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ByteSize, TypeAdapter

from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool_server.app.composition import HANDOVER_S
from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.loading import check_exposure, load
from kvpool_server.tiers.peers.options import PeersOptions
from kvpool_server.tiers.registry import parse
from testbed.engine import kvpool_transfer_config
from tests.support.certificates import files_in
from tests.support.chart import (
    CHART,
    KUSTOMIZE,
    MODES,
    ROOT,
    SCHEMA,
    check_object,
    containers,
    helm,
    kustomized,
    manifests,
    objects,
    pod_specs,
    refused,
    settings_schema,
)
from tests.support.processes import ServerProcess
from tests.support.prometheus import DASHBOARD, MONITORING, RULES, promtool
from vllm_plugin.config import ConnectorConfig

VERSIONS = ("1.35", "1.36", "1.37")
SMALL = "memory=64MiB"
ISSUER = ["network=tls", "tls.issuer.name=ca", 'tls.clients=[{"tenant": "acme", "role": "engine-write"}]']
PEERS = "peers.secretName=kvpool-peers"
MONITORED = ["serviceMonitor.enabled=true", "prometheusRule.enabled=true", "dashboard.enabled=true"]
CASES: dict[str, list[str]] = {
    "node": [*MODES["node"], SMALL],
    "node, plaintext": [*MODES["node"], SMALL, "network=insecure", *MONITORED],
    "node, TLS": [*MODES["node"], SMALL, *ISSUER, *MONITORED],
    "node, tier": [*MODES["node"], SMALL, "tier.size=64MiB", "tier.hostPath=/mnt/nvme/kv"],
    "sidecar": [*MODES["sidecar"], SMALL, 'settings={"value_sample": 64, "quota": ["tenant:acme=32MiB"]}'],
    "memory, TLS": [*MODES["memory"], SMALL],
    "node, plaintext, tier, peers": [
        *MODES["node"], SMALL, "network=insecure", "tier.size=64MiB", "tier.hostPath=/mnt/nvme/kv", PEERS
    ],
    "sidecar, TLS, peers": [*MODES["sidecar"], SMALL, *ISSUER, PEERS],
    "memory, TLS, peers": [*MODES["memory"], SMALL, PEERS, "peers.tlsSecretName=kvpool-peer"],
    "memory, plaintext, tier": ["mode=memory", SMALL, "network=insecure", "tier.size=64MiB", *MONITORED],
}  # fmt: skip
CRDS = ("ServiceMonitor", "PrometheusRule", "Certificate")


@pytest.fixture(params=CASES, scope="module")
def rendered(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return objects(CASES[request.param])


def _one(rendered: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(each for each in rendered if each["kind"] == kind)


def test_helm_finds_no_fault() -> None:
    linted = helm("lint", str(CHART), "--strict")
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_older_kubernetes_gets_only_what_it_has() -> None:
    def render(mode: str, version: str) -> subprocess.CompletedProcess[str]:
        given = [part for value in MODES[mode] for part in ("--set", value)]
        return helm("template", "kvpool", str(CHART), "--kube-version", version, *given)

    assert all(render(mode, "1.27").returncode == 0 for mode in ("node", "memory"))
    assert "mode: sidecar needs Kubernetes 1.29" in render("sidecar", "1.28").stderr
    assert render("sidecar", "1.29").returncode == 0
    spreads = {version: "trafficDistribution" in render("memory", version).stdout for version in ("1.30", "1.31")}
    assert spreads == {"1.30": False, "1.31": True}


def test_kubernetes_refuses_a_field_that_it_does_not_know() -> None:
    service = _one(objects(CASES["node, plaintext"]), "Service")
    wrong = {**service, "spec": {**service["spec"], "internalTraffic": "Local"}}
    with pytest.raises(jsonschema.ValidationError, match="internalTraffic"):
        check_object(wrong, VERSIONS[-1])


class Started:
    """The server of a rendered pod, with its flags, settings and certificates, at the test's own places."""

    def __init__(self, rendered: list[dict[str, Any]], directory: Path, sockets: Path):
        (spec,) = pod_specs(rendered)
        self.container = containers(spec)["kvpool-server"]
        config = directory / "server.toml"
        config.write_text(next(each for each in rendered if each["kind"] == "ConfigMap")["data"]["server.toml"])
        authority = Authority.create(directory / "pki")
        files_of = files_in(authority.issue_server([]))
        operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        peer = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.PEER)))
        key = directory / "peers.key"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        places = {
            "/etc/kvpool/server.toml": str(config),
            "/etc/kvpool/peers/key": str(key),
            "/etc/kvpool/peers": str(Path(peer.cert).parent),
            "$(PEERS_DIRECTORY)": "redis://127.0.0.1:1/0",
            "/etc/kvpool/tls": str(Path(files_of.cert).parent),
            "/run/kvpool": str(sockets),
            "/var/lib/kvpool/tier": str(directory / "tier"),
            "$(POD_IP)": "127.0.0.1",
            "$(POD_NAME)": "kvpool-0",
            "$(NODE_NAME)": "node-0",
        }
        (directory / "tier").mkdir(mode=0o700)
        flags = [part for flag in self.container["args"] for part in (flag.split("=", 1) if "=" in flag else [flag])]
        for place, mine in places.items():
            flags = [flag.replace(place, mine) for flag in flags]
        self.settings = _settings(flags)
        check_exposure(self.settings)  # Before other addresses hide which ports other hosts reach.
        flags = [re.sub(r"^(0\.0\.0\.0|127\.0\.0\.1):500\d\d$", "127.0.0.1:0", flag) for flag in flags]
        self.has_tls = "--tls-cert" in flags
        tls: TlsFiles | None = operator if self.has_tls else None
        assert self.container["command"] == ["kvpool-server"]
        self.server = ServerProcess(directory, *flags, tls=tls)

    def answers(self, probe: dict[str, Any]) -> bool:
        """What the kubelet does with a probe."""
        if command := probe.get("exec", {}).get("command"):
            mine = [part.replace("http://127.0.0.1:50052", self.server.http_url) for part in command]
            assert mine != command
            return subprocess.run([sys.executable, *mine[1:]], check=False, capture_output=True).returncode == 0
        if "grpc" in probe:
            assert probe["grpc"]["port"] == _port(self.container, "grpc")
            with grpc.insecure_channel(self.server.endpoint) as channel:
                checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            return bool(checked.status == health_pb2.HealthCheckResponse.SERVING)
        get = probe["httpGet"]
        assert (get["port"], get["scheme"]) == ("http", "HTTPS") and self.server.http_url.startswith("https://")
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(self.server.http_url + get["path"], timeout=10, context=unverified) as answer:
            return bool(answer.status == 200)


def _settings(flags: list[str]) -> ServerConfig:
    given: dict[str, Any] = {}
    pending: str | None = None
    for flag in flags:
        if flag.startswith("--"):
            pending = flag.removeprefix("--").replace("-", "_")
            given.setdefault(pending, True)
        else:
            assert pending is not None
            given[pending] = flag if given[pending] is True else f"{given[pending]};{flag}"
    return load(given)


def _port(container: dict[str, Any], name: str) -> int:
    return int(next(port["containerPort"] for port in container["ports"] if port["name"] == name))


@pytest.fixture
def started(rendered: list[dict[str, Any]], tmp_path: Path, socket_dir: Path) -> Iterator[Started]:
    made = Started(rendered, tmp_path, socket_dir)
    yield made
    made.server.stop()


@pytest.mark.more
def test_the_rendered_command_serves_answers_its_probes_and_drains(
    started: Started, rendered: list[dict[str, Any]]
) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert started.answers(started.container[probe]), probe
    (spec,) = pod_specs(rendered)
    limit = TypeAdapter(ByteSize).validate_python(started.container["resources"]["limits"]["memory"] + "B")
    assert started.settings.memory + _own_memory(started) < limit
    assert spec["terminationGracePeriodSeconds"] > 2 * started.settings.drain_ms / 1000 + HANDOVER_S
    drains = "lifecycle" in started.container
    if drains:
        shell, option, script = started.container["lifecycle"]["preStop"]["exec"]["command"]
        script = script.replace("sleep 2;", "").replace("kill -USR2 1;", f"kill -USR2 {started.server.pid};")
        subprocess.run([shell, option, script.replace("kill -0 1;", "false;")], check=True, timeout=60)
    else:
        os.kill(started.server.pid, signal.SIGTERM)
    assert started.server.wait() == 0
    assert ('"drained"' in started.server.stderr) == drains


def _own_memory(started: Started) -> int:
    status = Path(f"/proc/{started.server.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_a_probe_fails_where_no_server_is(tmp_path: Path, socket_dir: Path) -> None:
    started = Started(objects(CASES["node"]), tmp_path, socket_dir)
    assert started.answers(started.container["readinessProbe"])
    started.server.stop()
    assert not started.answers(started.container["readinessProbe"])


def test_the_container_has_memory_for_the_arena_and_a_64th_and_a_gibibyte() -> None:
    (spec,) = pod_specs(objects([*MODES["node"], "memory=512GiB"]))
    server = containers(spec)["kvpool-server"]
    assert "--memory=512GiB" in server["args"]
    assert (
        server["resources"]["limits"]["memory"]
        == f"{(512 + 8 + 1) * 1024}Mi"
        == server["resources"]["requests"]["memory"]
    )


RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec: dict[str, Any]) -> list[str]:
    """What Pod Security "restricted" forbids. Source: kubernetes.io/docs/concepts/security/pod-security-standards."""
    pod = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name"} - RESTRICTED_VOLUMES]
    for name, container in containers(spec).items():
        context = container.get("securityContext", {})
        profile = context.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
        capabilities = context.get("capabilities", {})
        rules = {
            "privileged": context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True,
            "runAsUser": context.get("runAsUser", pod.get("runAsUser", 1)) == 0,
            "seccompProfile": profile not in ("RuntimeDefault", "Localhost"),
            "capabilities.drop": "ALL" not in capabilities.get("drop", []),
            "capabilities.add": set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
            "hostPort": any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{name}: {rule}" for rule, is_broken in rules.items() if is_broken]
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_whole_and_restricted(case: str) -> None:
    """Kubernetes runs a hook of a sidecar before its engine has stopped: only other pods have one."""
    rendered = objects(CASES[case])
    for each in rendered:
        if each["kind"] not in CRDS:
            for version in VERSIONS:
                check_object(each, version)
    (spec,) = pod_specs(rendered)
    both = containers(spec)
    is_node = case.startswith("node")
    if case == "node":
        assert {each.split(":")[0] for each in violations(spec)} == {"volume socket", "directories"}
    assert is_node or violations(spec) == []
    assert not spec.get("hostIPC") and not spec.get("hostNetwork")
    assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in both.values())
    assert ("lifecycle" in both["kvpool-server"]) == (not case.startswith("sidecar"))
    (workload,) = [each for each in rendered if each["kind"] in ("DaemonSet", "StatefulSet", "Deployment")]
    claims = workload["spec"].get("volumeClaimTemplates", [])
    there = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for each in both.values() for mount in each["volumeMounts"]} == there
    ports = {port["name"] for each in both.values() for port in each.get("ports", [])}
    labels = workload["spec"]["template"]["metadata"]["labels"]
    for service in (each["spec"] for each in rendered if each["kind"] == "Service"):
        assert {port["targetPort"] for port in service["ports"]} <= ports
        assert service["selector"].items() <= labels.items()
        assert not is_node or service["internalTrafficPolicy"] == "Local", "engines reach their own node's server"


def test_a_sidecar_that_hands_its_blocks_over_has_the_hook() -> None:
    (spec,) = pod_specs(objects([*CASES["sidecar, TLS, peers"], "peers.handover=8GiB"]))
    assert "USR2" in str(containers(spec)["kvpool-server"]["lifecycle"]["preStop"])


def test_the_engine_of_the_sidecar_is_pointed_at_its_server() -> None:
    values = [*MODES["sidecar"], 'engine.extraConfig={"max_pinned_fraction": 0.5}']
    (spec,) = pod_specs(objects(values))
    both = containers(spec)
    engine, server = both["engine"], both["kvpool-server"]
    assert server["restartPolicy"] == "Always" and engine["command"] == ["vllm", "serve"]
    (told,) = [arg.partition("=")[2] for arg in engine["args"] if arg.startswith("--kv-transfer-config=")]
    (path,) = [arg.partition("=")[2] for arg in server["args"] if arg.startswith("--unix-listen=")]
    tested = kvpool_transfer_config(f"unix:{path}", max_pinned_fraction=0.5)
    assert json.loads(told) == tested
    ConnectorConfig(**json.loads(told)["kv_connector_extra_config"])
    mounted = {
        name: {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]} for name, each in both.items()
    }
    assert mounted["engine"]["socket"] == mounted["kvpool-server"]["socket"] == str(Path(path).parent)


def test_the_rules_and_the_dashboard_are_the_shipped_files(tmp_path: Path) -> None:
    found = objects([*CASES["node, plaintext"], "prometheusRule.runbooks=https://wiki.example/kvpool"])
    spec = _one(found, "PrometheusRule")["spec"]
    text = RULES.read_text().replace("runbook_url: docs/", "runbook_url: https://wiki.example/kvpool/docs/")
    assert spec == yaml.safe_load(text)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    checked = promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert checked.returncode == 0, checked.stderr
    dashboards = [each for each in found if "kvpool.json" in each.get("data", {})]
    assert [each["data"]["kvpool.json"] for each in dashboards] == [DASHBOARD.read_text()]
    assert all((CHART / "files" / path.name).resolve() == path for path in (RULES, DASHBOARD))


def test_prometheus_is_told_the_jobs_that_the_rules_expect() -> None:
    found = objects([*MODES["sidecar"], "network=tls", "tls.issuer.name=ca", *MONITORED])
    monitor, service = _one(found, "ServiceMonitor"), _one(found, "Service")
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "kvpool"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    of_server, of_engine = monitor["spec"]["endpoints"]
    assert {of_server["port"], of_engine["port"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert of_engine["relabelings"] == [{"targetLabel": "job", "replacement": "vllm"}]
    (shipped,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"][1][
        "metric_relabel_configs"
    ]
    (mine,) = of_engine["metricRelabelings"]
    assert (mine["regex"], mine["replacement"]) == (shipped["regex"], shipped["replacement"])
    secrets = {each["spec"]["secretName"] for each in found if each["kind"] == "Certificate"}
    assert of_server["tlsConfig"]["keySecret"]["name"] in secrets


def test_certificates_name_the_servers_and_the_callers() -> None:
    found = objects([*MODES["memory"][:1], *ISSUER])
    server, engine = [each["spec"] for each in found if each["kind"] == "Certificate"]
    (spec,) = pod_specs(found)
    (mounted,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    assert server["secretName"] == mounted["secretName"] and mounted["defaultMode"] == 0o440
    assert {"kvpool.inference.svc", "*.kvpool-nodes.inference.svc", "localhost"} <= set(server["dnsNames"])
    assert engine["uris"] == [str(Principal("acme", Role.ENGINE_WRITE))]


def _peers_of(rendered: list[dict[str, Any]]) -> PeersOptions:
    """The tier of other servers, as the server reads it once Kubernetes has put its variables' values in."""
    (spec,) = pod_specs(rendered)
    *_, flag = [arg for arg in containers(spec)["kvpool-server"]["args"] if arg.startswith("--tier=")]
    values = {"PEERS_DIRECTORY": "redis://kvpool:secret@10.0.0.9:6379/0", "POD_IP": "10.0.0.2"}
    options = parse(re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], flag.removeprefix("--tier=")))
    assert isinstance(options, PeersOptions)
    assert (options.directory, options.advertise) == (values["PEERS_DIRECTORY"], "10.0.0.2:50051")
    return options


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("peers")])
def test_servers_find_one_another_by_what_secrets_hold(case: str) -> None:
    found = objects(CASES[case])
    options = _peers_of(found)
    (spec,) = pod_specs(found)
    others = containers(spec)
    server = others.pop("kvpool-server")
    variable = next(each for each in server["env"] if each["name"] == "PEERS_DIRECTORY")
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "kvpool-peers", "key": "directory"}}
    (mount,) = [each for each in server["volumeMounts"] if each["name"] == "peers"]
    (volume,) = [each["projected"] for each in spec["volumes"] if each["name"] == "peers"]
    assert mount["readOnly"] and volume["defaultMode"] == 0o440
    of_key, *of_certificate = [each["secret"] for each in volume["sources"]]
    assert of_key == {"name": "kvpool-peers", "items": [{"key": "key", "path": "key"}]}
    files = ["key"] if not of_certificate else ["key", "ca.crt", "tls.crt", "tls.key"]
    given = [options.key_file, options.ca, options.cert, options.key]
    assert [path for path in given if path] == [f"{mount['mountPath']}/{name}" for name in files]
    assert bool(of_certificate) == ("--tls-client-ca=/etc/kvpool/tls/ca.crt" in server["args"])
    if case == "memory, TLS, peers":
        assert of_certificate == [{"name": "kvpool-peer"}]
    assert "peers" not in {mount["name"] for each in others.values() for mount in each["volumeMounts"]}
    rule = _one(found, "NetworkPolicy")["spec"]["ingress"][0]
    labels = _one(found, "Service")["spec"]["selector"]
    assert rule["ports"] == [{"port": 50051}, {"port": 50053}]
    assert {"podSelector": {"matchLabels": labels}} in rule["from"]


def test_servers_without_peers_do_not_reach_one_another() -> None:
    rule = _one(objects(CASES["memory, TLS"]), "NetworkPolicy")["spec"]["ingress"][0]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"kvpool.engine": "true"}}}]


@pytest.mark.parametrize("empty", [["engines"], ["prometheus"], ["engines", "prometheus"]])
def test_a_port_that_nobody_may_reach_is_not_open_to_everybody(empty: list[str]) -> None:
    """Kubernetes takes an empty `from` as all sources."""
    values = [*MODES["node"], "network=insecure", *(f"networkPolicy.{callers}=[]" for callers in empty)]
    policy = _one(objects(values), "NetworkPolicy")
    check_object(policy, VERSIONS[-1])
    ports_of = {"engines": {50051, 50053}, "prometheus": {50052}}
    rules = policy["spec"]["ingress"]
    assert all(rule["from"] for rule in rules)
    opened = {port["port"] for rule in rules for port in rule["ports"]}
    assert opened == {50051, 50052, 50053}.difference(*(ports_of[callers] for callers in empty))


def test_an_issuer_makes_the_certificate_by_which_servers_read_from_one_another() -> None:
    listed = 'tls.clients=[{"tenant": "_", "role": "peer"}]'
    found = objects(["mode=memory", "network=tls", "tls.issuer.name=ca", "tls.trustDomain=example.org", PEERS, listed])
    server, peer = [each["spec"] for each in found if each["kind"] == "Certificate"]
    assert peer["uris"] == [str(Principal(ALL_TENANTS, Role.PEER, "example.org"))]
    (spec,) = pod_specs(found)
    (volume,) = [each["projected"] for each in spec["volumes"] if each["name"] == "peers"]
    assert volume["sources"][1]["secret"]["name"] == peer["secretName"]
    assert _peers_of(found).name in server["dnsNames"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["mode=pod"], "/mode"),
        (["memory=64Gi"], "/memory"),
        (["memmory=64GiB"], "memmory"),
        (["settings.value_sampel=640"], "value_sampel"),
        (["settings.value_sample=70000"], "value_sample"),
        (["settings.listen=0.0.0.0:1"], "listen"),
        (["socket.mode=rw"], "/socket/mode"),
        (["user=0"], "/user"),
        (["image.digest=sha256:12"], "/image/digest"),
        (['tls.clients=[{"tenant": "acme", "role": "writer"}]'], "/tls/clients/0/role"),
        (["network=tls"], "network: tls needs certificates"),
        (["tls.secretName=kvpool-tls"], "tls has no effect with network: none"),
        (["network=tls", "tls.secretName=a", "tls.issuer.name=b"], "are both set"),
        (["mode=memory"], "mode: memory with network: none reaches no engine"),
        (["serviceMonitor.enabled=true"], "serviceMonitor.enabled with network: none"),
        (["network=tls", "tls.secretName=a", "serviceMonitor.enabled=true"], "serviceMonitor.tlsSecretName is empty"),
        ([PEERS], "peers.secretName with network: none"),
        ([*MODES["memory"], PEERS], "peers.tlsSecretName is empty"),
        (["network=tls", "tls.issuer.name=b", PEERS, "settings.tokens=/t"], "servers that ask for certificates"),
        (["network=tls", "tls.issuer.name=b", PEERS, "settings.oidc_issuer=https://a"], "that ask for certificates"),
        (
            ["network=tls", "tls.issuer.name=b", "serviceMonitor.enabled=true", "settings.tokens=/t"],
            "serviceMonitor.enabled need servers that ask for certificates",
        ),
        (["peers.secretName=Bad_Name"], "/peers/secretName"),
        (["mode=sidecar"], "engine.model is empty"),
        ([*MODES["sidecar"], "tier.size=1TiB"], "tier.size is for the modes node and memory"),
        (["tier.size=1TiB"], "tier.hostPath is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_refused_by_name(values: list[str], told: str) -> None:
    said = refused(values)
    assert told in said or told.removeprefix("/").replace("/", ".") in said, said


def test_the_values_know_the_servers_settings() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert schema["properties"]["settings"]["properties"] == settings_schema(), "python -m tests.support.chart"


@pytest.mark.parametrize("mode", MODES)
def test_kustomize_builds_what_the_chart_renders(mode: str) -> None:
    assert (KUSTOMIZE / mode / "kvpool.yaml").read_text() == manifests(mode), "python -m tests.support.chart"
    kinds = sorted(each["kind"] for each in kustomized(KUSTOMIZE / mode))
    assert kinds == sorted(each["kind"] for each in objects(MODES[mode]))


def test_kustomize_makes_configmaps_of_the_rules_and_the_dashboard() -> None:
    data = {key: value for each in kustomized(MONITORING) for key, value in each["data"].items()}
    assert data == {"kvpool.rules.yml": RULES.read_text(), "kvpool.json": DASHBOARD.read_text()}


def test_the_documents_overlay_changes_the_memory(tmp_path: Path) -> None:
    page = next((ROOT / "docs").rglob("deploy.md")).read_text()
    (overlay,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", page, re.DOTALL)
    (tmp_path / "kvpool").symlink_to(ROOT)
    (tmp_path / "kustomization.yaml").write_text(overlay)
    (spec,) = pod_specs(kustomized(tmp_path))
    (wanted,) = pod_specs(objects([*MODES["node"], "memory=256GiB"]))
    assert containers(spec)["kvpool-server"] == containers(wanted)["kvpool-server"]
