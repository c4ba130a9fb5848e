"""The Dockerfiles: linted, and what they say of the server is true of the server. No image is built here."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from testbed.ports import free_endpoint
from tests.support.chart import ROOT, containers, objects, pod_specs, program
from tests.support.processes import clean_environment, wait_for

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
SERVER = DOCKER / "server.Dockerfile"


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, in order."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def _last(path: Path, word: str) -> str:
    return [rest for name, rest in instructions(path) if name == word][-1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_linted_pinned_and_not_of_root(path: Path) -> None:
    linted = subprocess.run([program("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
    first, *_ = instructions(path)
    variable = first[1].partition("=")[0]
    stages = [rest for name, rest in instructions(path) if name == "FROM"]
    assert first[0] == "ARG" and len(stages) > 1
    assert all(stage.startswith(f"${{{variable}}}") for stage in stages), "the base can be pinned"
    (spec,) = pod_specs(objects(["mode=sidecar", "engine.model=m"]))
    assert _last(path, "USER") == f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert _last(path, "STOPSIGNAL") == "SIGTERM"
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY" and "--from" not in rest]
    for source in (each for sources in copied for each in sources):
        assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, each) for each in kept), source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_package_is_checked_by_its_hash(path: Path) -> None:
    runs = "&&".join(rest for name, rest in instructions(path) if name == "RUN")
    pips = [each for each in re.split(r"&&|;", runs) if re.search(r"\bpip\S* (install|wheel) ", each)]
    checked = ("--require-hashes", "--no-index", "--dry-run --only-binary :all:", "--no-deps --no-build-isolation .")
    assert pips and all(any(way in each for way in checked) for each in pips), pips
    build, lock = ((ROOT / "requirements" / name).read_text() for name in ("build.txt", "lock.txt"))
    assert build.partition("\n")[2] in lock


def test_what_vllms_image_lacks_comes_with_its_hashes(tmp_path: Path) -> None:
    (run,) = [rest for name, rest in instructions(DOCKER / "vllm.Dockerfile") if name == "RUN" and "lacks" in rest]
    (program,) = re.findall(r'python3 -c "(.*?)" >', run)
    report = tmp_path / "report.json"

    def lacking(*names: str) -> subprocess.CompletedProcess[str]:
        report.write_text(json.dumps({"install": [{"metadata": {"name": name}} for name in names]}))
        command = [sys.executable, "-c", program.replace("/tmp/report.json", str(report))]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    listed = (ROOT / "requirements" / "runtime.txt").read_text()
    given = lacking("kvpool", "Structlog", "grpcio_health.checking").stdout
    assert re.findall(r"^([\w-]+)==", given, re.M) == ["grpcio-health-checking", "structlog"]
    assert all(block in listed for block in re.split(r"\n(?=\w)", given.strip())) and given.count("--hash=") >= 2
    assert not lacking("kvpool").stdout.strip() and lacking("unknown").returncode != 0


def test_the_image_runs_what_the_chart_runs() -> None:
    (spec,) = pod_specs(objects(["network=insecure"]))
    container = containers(spec)["kvpool-server"]
    assert json.loads(_last(SERVER, "ENTRYPOINT")) == container["command"]
    assert _last(SERVER, "EXPOSE").split() == [str(port["containerPort"]) for port in container["ports"]]


def test_a_server_that_the_chart_runs_as_another_user_can_enter_the_directories_above_its_tier() -> None:
    (spec,) = pod_specs(objects(["tier.size=64MiB", "tier.hostPath=/mnt/nvme/kv", "user=1234"]))
    mounts = containers(spec)["kvpool-server"]["volumeMounts"]
    (path,) = [Path(mount["mountPath"]) for mount in mounts if mount["name"] == "tier"]
    made = [rest for name, rest in instructions(SERVER) if name == "RUN" and "useradd" in rest]
    (mode,) = re.findall(rf"install -d -m (\d+) [^&]*{path.parent}(?![^ ])", *made)
    assert int(mode, 8) & 0o005 == 0o005


def test_the_server_is_a_good_process_1_and_writes_nothing_to_its_root(tmp_path: Path, socket_dir: Path) -> None:
    """The image's command as process 1 of a namespace whose root is read-only, but for its volumes and /tmp."""
    if os.geteuid() != 0:
        pytest.skip("a namespace of processes needs root")
    http = free_endpoint()
    command = json.loads(_last(SERVER, "ENTRYPOINT")) + json.loads(_last(SERVER, "CMD"))
    command = [part.replace("/run/kvpool", str(socket_dir)).replace("1GiB", "64MiB") for part in command]
    command[0] = str(Path(sys.executable).parent / command[0])
    script = f"""
        mount --bind {socket_dir} {socket_dir} && mount -o remount,ro,bind / && exec "$@"
    """
    isolate = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", "sh", "-ec", script, "sh"]
    ports = {"KVPOOL_LISTEN": "127.0.0.1:0", "KVPOOL_HTTP_LISTEN": http, "KVPOOL_DATA_LISTEN": "127.0.0.1:0"}
    environment = clean_environment(**ports, PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(ROOT))
    with (tmp_path / "log").open("w") as log:
        outer = subprocess.Popen([*isolate, *command], stdout=log, stderr=log, env=environment)
    try:
        (probe,) = [rest for name, rest in instructions(SERVER) if name == "HEALTHCHECK"]
        asked = json.loads(probe.partition("CMD ")[2])
        asked = [sys.executable, *(part.replace("127.0.0.1:50052", http) for part in asked[1:])]
        wait_for(lambda: outer.poll() is not None or _serves(http), "the server", 60)
        assert outer.poll() is None, (tmp_path / "log").read_text()
        assert subprocess.run(asked, check=False, capture_output=True).returncode == 0
        (server,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        numbers = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{server}/status").read_text(), re.MULTILINE)
        assert numbers is not None and numbers[1] == "1"
        os.kill(int(server), signal.SIGTERM)
        assert outer.wait(60) == 0
        assert subprocess.run(asked, check=False, capture_output=True).returncode != 0
    finally:
        outer.kill()
        outer.wait(10)


def _serves(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
