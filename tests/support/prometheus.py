"""A real Prometheus on loopback, and the monitoring files that it is given."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from testbed.ports import free_endpoint
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "kvpool.rules.yml"
DASHBOARD = MONITORING / "grafana-dashboard.json"
TIMEOUT_S = 10.0
_SERIES = re.compile(r"(?<![\w:])(?:vllm:)?kvpool_\w+(?![\w:])")
_OF_HISTOGRAMS = re.compile(r"_(?:bucket|count|sum)$")


def program(name: str) -> str:
    """A program of Debian's package `prometheus`, which `make` puts beside Python."""
    path = Path(sys.executable).with_name(name)
    assert path.exists(), f"{path} is missing; run requirements/setup.sh, which downloads Prometheus"
    return str(path)


def promtool(*arguments: str, cwd: Path = MONITORING) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def rules(kind: str) -> list[dict[str, Any]]:
    """The shipped rules of one kind: "alert" or "record"."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


class Query(NamedTuple):
    """One query of the dashboard."""

    panel: str
    expr: str


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def queries() -> list[Query]:
    """All queries of the dashboard's panels."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [Query(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def series_in(expr: str) -> set[str]:
    """kvpool's series that an expression reads, named as in docs/reference/metrics.md; without those of records."""
    return {_OF_HISTOGRAMS.sub("", name) for name in _SERIES.findall(re.sub(r'"[^"]*"', "", expr))}


class Prometheus:
    """One Prometheus, ready once it is made.

    Args:
        config: see Prometheus' documentation.
    """

    def __init__(self, directory: Path, config: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        path, self._log = directory / "prometheus.yml", directory / "prometheus.log"
        path.write_text(yaml.safe_dump(config))
        endpoint = free_endpoint()
        self.url = f"http://{endpoint}"
        command = [program("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}"]
        command += [f"--web.listen-address={endpoint}", "--log.level=warn"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(self._is_ready, "Prometheus")
        except BaseException:
            self.stop()
            raise

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query whose values are numbers."""
        found: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return [each for each in found if not math.isnan(float(each["value"][1]))]

    def value(self, expr: str) -> float:
        """The sum of a query's samples; 0 without any."""
        return sum(float(each["value"][1]) for each in self.query(expr))

    def rules(self) -> Iterator[dict[str, Any]]:
        for group in self._get("rules")["groups"]:
            yield from group["rules"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"Prometheus ended at its start: {self._log.read_text()}"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=TIMEOUT_S) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
