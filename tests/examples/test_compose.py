"""The compose files: valid, consistent with what they start, and their server started with their flags."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvpool_server.settings.config import ServerConfig
from kvpool_server.settings.loading import check_exposure
from tests.conftest import StartServer
from tests.support.prometheus import MONITORING, ROOT, promtool
from vllm_plugin.config import ConnectorConfig

COMPOSE = ROOT / "examples" / "compose"
FILES = ("compose.yaml", "prefill-decode.yaml")
ROLES = {"compose.yaml": ["kv_both", "kv_both"], "prefill-decode.yaml": ["kv_producer", "kv_consumer"]}


def _loaded(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / name).read_text())
    return loaded


def _flags(command: list[str]) -> list[str]:
    """A command's flags and values, with the defaults of ${NAME:-default}."""
    filled = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part) for part in command]
    return [part for flag in filled for part in flag.split("=", 1)]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid(name: str) -> None:
    schema = json.loads((Path(sys.prefix) / "share" / "compose-spec.json").read_text())
    validator = jsonschema.Draft201909Validator(schema)
    validator.validate(_loaded(name))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"services": {"pool": {"imagge": "kvpool"}}})


def test_each_file_and_volume_that_is_mounted_exists() -> None:
    loaded = _loaded("compose.yaml")
    for service in loaded["services"].values():
        for source in (mount.split(":")[0] for mount in service.get("volumes", [])):
            assert source in loaded["volumes"] or (COMPOSE / source).is_file(), source
        if build := service.get("build"):
            assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("name", FILES)
def test_engines_are_pointed_at_the_pools_socket(name: str) -> None:
    flags = _flags(_loaded("compose.yaml")["services"]["pool"]["command"])
    path = flags[flags.index("--unix-listen") + 1]
    services = _loaded(name)["services"]
    for engine, role in zip(("engine-a", "engine-b"), ROLES[name], strict=True):
        given = _flags(services[engine]["command"])
        told = json.loads(given[given.index("--kv-transfer-config") + 1])
        assert (told["kv_role"], told["kv_load_failure_policy"]) == (role, "recompute")
        assert ConnectorConfig(**told["kv_connector_extra_config"]).endpoint == f"unix:{path}"


def test_the_pools_command_serves(pool_server: StartServer, socket_dir: Path) -> None:
    flags = _flags(_loaded("compose.yaml")["services"]["pool"]["command"])
    named = [part if part.startswith("--") else part.replace("/run/kvpool", str(socket_dir)) for part in flags]
    given = dict(re.findall(r"--(\S+) (?!--)(\S+)", " ".join(named)))
    check_exposure(
        ServerConfig(**{name.replace("-", "_"): value for name, value in given.items()}, insecure_network=True)
    )
    named = [{"0.0.0.0:50052": "127.0.0.1:0", "64GiB": "64MiB"}.get(part, part) for part in named]
    server = pool_server(*named)
    with urllib.request.urlopen(f"{server.http_url}/healthz", timeout=10) as answer:
        assert answer.status == 200
    assert (socket_dir / "kvpool.sock").is_socket()


def test_prometheus_scrapes_the_jobs_of_the_shipped_configuration(tmp_path: Path) -> None:
    mine, shipped = _loaded("prometheus.yml"), yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    services = _loaded("compose.yaml")["services"]
    for config in (mine, shipped):
        for job in config["scrape_configs"]:
            targets = [target for static in job.pop("static_configs") for target in static["targets"]]
            assert config is shipped or {target.split(":")[0] for target in targets} <= services.keys()
    assert mine == shipped
    for path in (COMPOSE / "prometheus.yml", MONITORING / "kvpool.rules.yml"):
        (tmp_path / path.name).write_text(path.read_text())
    checked = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_grafana_is_given_the_dashboard_and_where_prometheus_is() -> None:
    services = _loaded("compose.yaml")["services"]
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    (provider,) = _loaded("grafana/dashboards.yml")["providers"]
    shown = mounts["../../deploy/monitoring/grafana-dashboard.json"]
    assert str(Path(shown).parent) == provider["options"]["path"]
    (source,) = _loaded("grafana/datasource.yml")["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in services
