"""The Helm chart that kvpool ships: rendered by Helm, and checked against Kubernetes' schemas.

`python -m tests.support.chart` refreshes the schema's list of settings and the manifests for Kustomize.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from kvpool_server.settings.config import ServerConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvpool"
SCHEMA = CHART / "values.schema.json"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
SCHEMAS = Path(sys.prefix) / "share" / "kubernetes"
OWN = (
    "config", "memory", "drain_ms", "log_format", "listen", "http_listen", "data_listen", "unix_listen", "unix_mode",
    "tier", "insecure_network", "tls_cert", "tls_key", "tls_client_ca", "trust_domain",
)  # fmt: skip
"""Settings for which the chart has values of its own."""

MODES: dict[str, list[str]] = {
    "node": ["mode=node"],
    "sidecar": ["mode=sidecar", "engine.model=Qwen/Qwen3-8B"],
    "memory": ["mode=memory", "network=tls", "tls.secretName=kvpool-tls"],
}


def program(name: str) -> str:
    """A program that requirements/setup.sh has put beside Python."""
    path = Path(sys.executable).with_name(name)
    assert path.exists(), f"{path} is missing; run requirements/setup.sh, which downloads it"
    return str(path)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def kustomized(directory: Path) -> list[dict[str, Any]]:
    """The objects that Kustomize builds of a directory."""
    command = [program("kubectl"), "kustomize", str(directory)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [each for each in yaml.safe_load_all(built.stdout) if each]


def template(values: Sequence[str], namespace: str = "inference") -> subprocess.CompletedProcess[str]:
    """`helm template` of a release named kvpool."""
    given = [part for value in values for part in (("--set-json" if value.endswith(("]", "}")) else "--set"), value)]
    return helm("template", "kvpool", str(CHART), "--namespace", namespace, *given)


@functools.cache
def _rendered(values: tuple[str, ...]) -> str:
    done = template(values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(values: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a release with these values."""
    return [each for each in yaml.safe_load_all(_rendered(tuple(values))) if each]


def refused(values: Sequence[str]) -> str:
    """Helm's words about values that it does not accept."""
    done = template(values)
    assert done.returncode != 0, done.stdout
    return done.stderr


def pod_specs(rendered: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in rendered:
        if each["kind"] in ("DaemonSet", "StatefulSet", "Deployment"):
            yield each["spec"]["template"]["spec"]


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}


@functools.cache
def _definitions(version: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{version}.json").read_text())
    return loaded


def check_object(each: dict[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError if Kubernetes of this version does not know the object's kind or fields."""
    definitions = _definitions(version)
    group, _, number = each["apiVersion"].rpartition("/")
    wanted = {"group": group, "version": number, "kind": each["kind"]}
    names = [
        name for name, it in definitions["$defs"].items() if wanted in it.get("x-kubernetes-group-version-kind", [])
    ]
    if not names:
        raise jsonschema.ValidationError(f"Kubernetes {version} has no {wanted}")
    jsonschema.Draft7Validator({**definitions, "$ref": f"#/$defs/{names[0]}"}).validate(each)


def settings_schema() -> dict[str, Any]:
    """The server's settings, as the values' schema lists them."""
    listed = {}
    for name, of in ServerConfig.model_json_schema()["properties"].items():
        if name not in OWN:
            kept = {key: value for key, value in of.items() if key in ("type", "enum", "minimum", "maximum", "items")}
            listed[name] = {"type": "string", "pattern": "^[0-9]+[KMGT]iB$"} if name == "record_bytes" else kept
    return listed


def manifests(mode: str) -> str:
    """What deploy/kustomize has for a mode: the chart's objects, without Helm's own labels."""
    told = [each for each in objects(MODES[mode]) if each["kind"] != "PodDisruptionBudget" or mode != "node"]
    for each in told:
        for metadata in (each["metadata"], each.get("spec", {}).get("template", {}).get("metadata", {})):
            for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
                metadata.get("labels", {}).pop(label, None)
    head = (
        "# Made by `python -m tests.support.chart` from deploy/helm/kvpool; a test compares. Change it with patches.\n"
    )
    return head + yaml.safe_dump_all(told, sort_keys=False, width=120)


if __name__ == "__main__":
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["settings"]["properties"] = settings_schema()
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")
    for mode in MODES:
        (KUSTOMIZE / mode).mkdir(parents=True, exist_ok=True)
        (KUSTOMIZE / mode / "kvpool.yaml").write_text(manifests(mode))
