"""The shipped rules, alerts and configurations of Prometheus are valid, tested and documented."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from kvpool_server.observability.usage import MAX_PAIRS, MAX_PAIRS_OF_TENANT
from tests.support.metrics_page import PAGE
from tests.support.prometheus import MONITORING, ROOT, dashboard, promtool, queries, rules, series_in

ALERTS = rules("alert")
RECORDS = rules("record")
TESTS = MONITORING / "kvpool.rules.test.yml"
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks.md"


def _documented() -> set[str]:
    names = re.findall(r"^\| `((?:vllm:)?kvpool_\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(names) > 80
    return set(names)


def test_the_configurations_and_rules_are_valid() -> None:
    for arguments in (
        ["check", "config", "prometheus.yml"],
        ["check", "config", "--syntax-only", "prometheus-tls.yml"],
        ["check", "rules", "kvpool.rules.yml"],
    ):
        checked = promtool(*arguments)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_unit_test_of_the_alerts_passes() -> None:
    tested = promtool("test", "rules", TESTS.name)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_to_do_and_is_shown_to_fire_and_not_to_fire(alert: dict[str, Any]) -> None:
    groups = yaml.safe_load(TESTS.read_text())["tests"]
    cases = [case for group in groups for case in group["alert_rule_test"] if case["alertname"] == alert["alert"]]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    annotations = alert["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert len(annotations["summary"]) < 80 and annotations["description"].endswith(".")
    path, _, anchor = annotations["runbook_url"].partition("#")
    assert ROOT / path == RUNBOOKS and anchor == str(alert["alert"]).lower()


def test_every_runbook_is_of_an_alert() -> None:
    headings = re.findall(r"^## (KVPool\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)


EXPRESSIONS = [rule["expr"] for rule in (*RECORDS, *ALERTS)] + [query.expr for query in queries()]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_series_that_a_rule_or_a_panel_reads_is_documented(expression: str) -> None:
    recorded = set(re.findall(r"\b[a-z_]+:kvpool_\w+:\w+", expression))
    assert recorded <= {each["record"] for each in RECORDS}
    read = series_in(expression)
    assert read or recorded or re.search(r"\b(?:up|ALERTS)\{", expression)
    assert read <= _documented()


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    board = dashboard()
    assert board["uid"] == "kvpool" and board["schemaVersion"] >= 39
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "tenant"]
    assert variables["datasource"]["type"] == "datasource"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            refs = [target["refId"] for target in panel["targets"]]
            assert refs and len(set(refs)) == len(refs), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_page_says_how_many_labels_there_are() -> None:
    text = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    assert f"The first {MAX_PAIRS} pairs in use have labels of their own" in text
    assert f"at most {MAX_PAIRS_OF_TENANT} of the pairs are of one tenant" in text
