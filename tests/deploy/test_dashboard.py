"""Every query of the dashboard, and every recording rule, has data of real servers and a real connector's metrics.

Prometheus runs with the shipped configurations; targets, intervals and paths are the test's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvpool.client.client import Client, Namespace
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import KVPoolError
from kvpool.protocol.types import Quota
from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from tests.support.certificates import files_in, server_flags
from tests.support.processes import ServerProcess, wait_for
from tests.support.prometheus import MONITORING, RULES, Prometheus, Query, queries, rules
from tests.support.toy.engine import ToyEngine
from tests.support.toy.fixtures import MakeConfig
from tests.support.values import block_hash, group_spec, namespace_spec, payload, run_of
from tests.support.vllm_objects import tokens
from vllm_plugin.connector import KVPoolConnector
from vllm_plugin.scheduler import telemetry

SCRAPE = "200ms"
REPORT_S = 0.1
"""How often engines report to the server."""
RATE, RANGE = "10m", "10m"
BLOCK_BYTES = 64 << 10
HOSTILE = 'a"}\\\n{model="b' + "x" * 500


class Scene:
    """A server with a file tier, a server with TLS, two engines, and Prometheus, which reads all of them."""

    def __init__(self, directory: Path, vllm_config: MakeConfig, stack: ExitStack):
        disk = directory / "disk"
        disk.mkdir()
        tier = f"file:{disk},size=64MiB,name=disk"
        self.server = ServerProcess(directory / "server", "--memory", "8MiB", "--tier", tier)
        stack.callback(self.server.stop)
        self.secured, secured_job = self._secured(directory)
        stack.callback(self.secured.stop)
        registry = CollectorRegistry()
        kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
        extra = {"salt": "scene", "lookup_timeout_ms": 5_000, "decline_slow_loads": False, "max_pinned_fraction": 1.0}
        config = vllm_config(self.server.endpoint, extra=extra)
        self._exported = KVPoolConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
        http, thread = start_http_server(0, "127.0.0.1", registry)
        stack.callback(thread.join, 10)
        stack.callback(http.server_close)
        stack.callback(http.shutdown)
        self.engines = [ToyEngine(vllm_config(self.server.endpoint, extra=extra)) for _ in range(2)]
        for engine in self.engines:
            stack.callback(engine.shutdown)
        self.prometheus = Prometheus(
            directory / "prometheus",
            _config({"kvpool": self.server.http_url, "vllm": f"http://127.0.0.1:{http.server_port}"}, secured_job),
        )
        stack.callback(self.prometheus.stop)
        self.client = stack.enter_context(Client(ClientConfig(self.server.endpoint, timeout_ms=10_000)))
        self._drives = 0

    def _secured(self, directory: Path) -> tuple[ServerProcess, dict[str, Any]]:
        """A server with TLS, and the job of the shipped configuration that reads it with a certificate."""
        authority = Authority.create(directory / "pki")
        scraper = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.METRICS)))
        operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        flags = server_flags(authority.issue_server([], days=20))
        server = ServerProcess(directory / "secured", *flags, tls=operator)
        (job, *_) = yaml.safe_load((MONITORING / "prometheus-tls.yml").read_text())["scrape_configs"]
        assert set(job["tls_config"]) == {"ca_file", "cert_file", "key_file"}
        job["tls_config"] = {"ca_file": scraper.ca, "cert_file": scraper.cert, "key_file": scraper.key}
        job["static_configs"] = [{"targets": [_host(server.http_url)]}]
        return server, {**job, "job_name": "kvpool-tls"}

    def drive(self) -> None:
        """Stores, lookups, hits, misses, loads, evictions, tier reads, a quota, errors, and both engines' requests."""
        self._drives += 1
        client, names = self.client, [f"{self._drives}-{nth}" for nth in range(160)]
        client.admin.set_quotas([Quota("tenant:acme", 2 << 20)])
        acme = client.open_namespace(_spec(tenant="acme", model="org/model"))
        self._load(acme, names[:8])
        self._load(client.open_namespace(_spec(model=HOSTILE)), names[:4])
        everybody = client.open_namespace(_spec(model="org/model"))
        for start in range(0, len(names), 40):  # More than the arena holds: the tier keeps what is evicted.
            self._put(everybody, names[start : start + 40])
        wait_for(lambda: self._find(everybody, names[:8]) == 8, "blocks from the tier")
        client.lookup(everybody, [run_of("nobody", "stored", "them")])
        with contextlib.suppress(KVPoolError):
            client.rpc.release([])
            client.admin.clear(block_hash("no namespace"))
        with Client(ClientConfig(self.server.endpoint, timeout_ms=10_000, transport="tcp")) as remote:
            self._load(remote.open_namespace(_spec(model="org/remote")), names[:4], remote)
        prompt = tokens(200, f"prompt {self._drives}")
        for engine in self.engines:
            before = engine.stats
            engine.stats = type(before)()
            engine.generate(prompt)
            self._exported.observe(engine.stats.data)
            engine.scheduler.reset_prefix_cache()
        assert self.engines[1].cached_tokens["prompt-0"] > 0, "the second engine loads what the first one stored"

    def wait_until_read(self) -> None:
        """Returns when Prometheus has the numbers of the last drive."""
        lookups = self.client.admin.stats().counters["lookups"]
        wait_for(lambda: self.prometheus.value("kvpool_lookups_total") >= lookups, "the server's numbers")
        hits = sum(engine.cached_tokens["prompt-0"] for engine in self.engines)
        wait_for(lambda: self.prometheus.value("vllm:kvpool_hit_tokens_total") >= hits, "the engines' numbers")
        loaded = "kvpool_loaded_tokens_total"
        wait_for(lambda: self.prometheus.value(loaded) >= hits * self._drives, "what the engines report")

    def _load(self, namespace: Namespace, names: Sequence[str], client: Client | None = None) -> None:
        self._put(namespace, names, client)
        assert self._find(namespace, names, client) == len(names)

    def _put(self, namespace: Namespace, names: Sequence[str], client: Client | None = None) -> None:
        (client or self.client).put_blocks(namespace, run_of(*names), [payload(name, BLOCK_BYTES) for name in names])

    def _find(self, namespace: Namespace, names: Sequence[str], client: Client | None = None) -> int:
        """Looks up and loads; returns how many blocks were there."""
        client = client or self.client
        found = client.lookup(namespace, [run_of(*names)])
        count = found.hits[0].num_leading
        if count:
            client.get_blocks(namespace, found.lease_id, run_of(*names[:count]))
            client.release([found.lease_id])
        return count


def _spec(**fields: Any) -> Any:
    return namespace_spec(group_spec(chunk_bytes=BLOCK_BYTES), salt="dashboard", **fields)


def _host(url: str) -> str:
    return url.partition("://")[2]


def _config(urls: dict[str, str], further_job: dict[str, Any]) -> dict[str, Any]:
    """The shipped configuration with other targets, quickly."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert config["rule_files"] == [RULES.name]
    assert [job["job_name"] for job in config["scrape_configs"]] == list(urls)
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [_host(urls[job["job_name"]])]}]
    config["scrape_configs"].append(further_job)
    config["rule_files"] = [str(RULES)]
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    return config


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, vllm_config: MakeConfig) -> Iterator[Scene]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("REPORT_EVERY_S", "FIRST_REPORT_EVERY_S"):
            patch.setattr(telemetry, name, REPORT_S)
        made = Scene(tmp_path_factory.mktemp("scene"), vllm_config, stack)
        prometheus = made.prometheus
        wait_for(lambda: prometheus.value("sum(up)") == 3, "three targets that answer")
        for _ in range(2):  # What a series counts before it is first read is not in its rate.
            made.drive()
            made.wait_until_read()
        yield made


def _filled_in(expr: str) -> str:
    """A query as Grafana sends it, with all models and tenants chosen."""
    values = {"$__rate_interval": RATE, "$__range": RANGE, "$model": ".*", "$tenant": ".*"}
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.panel)
def test_every_query_of_the_dashboard_returns_data(query: Query, scene: Scene) -> None:
    expr = _filled_in(query.expr)
    wait_for(lambda: scene.prometheus.query(expr), f"data of {expr}", deadline_s=15)


@pytest.mark.parametrize("record", [rule["record"] for rule in rules("record")])
def test_every_recording_rule_has_values(record: str, scene: Scene) -> None:
    wait_for(lambda: scene.prometheus.query(record), f"values of {record}", deadline_s=15)


def test_no_rule_fails(scene: Scene) -> None:
    loaded = list(scene.prometheus.rules())
    assert len(loaded) == len(rules("record")) + len(rules("alert"))
    wait_for(lambda: all(rule["health"] == "ok" for rule in scene.prometheus.rules()), "the rules' evaluation")
    assert not [rule["lastError"] for rule in scene.prometheus.rules() if rule.get("lastError")]


def test_the_variables_offer_the_models_and_tenants(scene: Scene) -> None:
    def pairs() -> set[tuple[str, str]]:
        found = scene.prometheus.query("kvpool_lookup_tokens_total")
        return {(each["metric"]["model"], each["metric"].get("tenant", "")) for each in found}

    assert {("org/model", "acme"), ("org/model", ""), ("org/remote", "")} <= pairs()
    (hostile,) = [model for model, _ in pairs() if model.startswith("a")]
    assert len(hostile) <= 100 and "\n" not in hostile


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [("hit_tokens", "hit_tokens"), ("located_bytes", "loaded_bytes"), ("stored_bytes", "stored_bytes")],
)
def test_the_server_counts_for_a_model_what_its_engines_count(mine: str, theirs: str, scene: Scene) -> None:
    of_server, of_engines = f'kvpool_{mine}_total{{model="tiny"}}', f"vllm:kvpool_{theirs}_total"
    assert scene.prometheus.value(of_engines) > 0
    assert scene.prometheus.value(of_server) == scene.prometheus.value(of_engines)
