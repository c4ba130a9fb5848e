"""NVIDIA Dynamo's own indexer, in an environment of its own: it is too large for that of the tests."""

from __future__ import annotations

import fcntl
import http.client
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.ports import free_port
from tests.support.processes import wait_for

VERSION = "1.6.1"
MODEL = "routed"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
ROOT = Path(__file__).parents[2] / "build" / "environments"


def dynamo_python() -> Path:
    """An interpreter that has Dynamo's runtime. The first call builds its environment, which later runs find again."""
    place = ROOT / f"dynamo-{VERSION}"
    ROOT.mkdir(parents=True, exist_ok=True)
    python = place / "bin" / "python"
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            uv = (sys.executable, "-m", "uv")
            subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, place], check=True)
            install = [*uv, "pip", "install", "--quiet", "--python", python, f"ai-dynamo-runtime=={VERSION}"]
            subprocess.run(install, check=True, timeout=600)
            (place / ".ready").touch()
    return python


class DynamoIndexer:
    """`python -m dynamo.indexer` as a subprocess: a `Router`.

    Args:
        block_tokens: of the streams.
    """

    def __init__(self, log: Path, block_tokens: int):
        self._block_tokens = block_tokens
        port = free_port()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [dynamo_python(), "-m", "dynamo.indexer", "--port", str(port)], stdout=out, stderr=subprocess.STDOUT
            )
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            wait_for(self._is_up, "an answer of Dynamo's indexer", START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "Dynamo's indexer has ended"
        try:
            self._call("GET", "/health")
        except OSError:
            self._http.close()
            return False
        return True

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        self._http.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        answer = self._http.getresponse()
        text = answer.read()
        assert answer.status < 300, f"{path}: {answer.status} {text.decode()}"
        return json.loads(text) if text else None

    def follow(self, nth: int, endpoint: str) -> None:
        registration = {
            "instance_id": nth,
            "endpoint": endpoint,
            "model_name": MODEL,
            "block_size": self._block_tokens,
        }
        assert self._call("POST", "/register", registration) == {"status": "ok"}

    def promised(self, tokens: Sequence[int]) -> Mapping[int, int]:
        found = self._call("POST", "/query", {"token_ids": list(tokens), "model_name": MODEL})
        return {int(nth): each["cpu"] for nth, each in found["instances"].items() if each["cpu"]}

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
