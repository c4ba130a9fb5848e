"""Asks the HTTP port of a server, and starts one that asks for tokens."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.security.principal import Role
from tests.support.processes import ServerProcess
from tests.support.secured_server import SecuredServer

TIMEOUT_S = 10.0


class Answer:
    """One answer of the HTTP port."""

    def __init__(self, url: str, path: str, method: str = "GET", ca: str = "", **headers: str):
        scheme, _, host = url.partition("://")
        if scheme == "https":
            context = ssl.create_default_context(cafile=ca)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        self.status, self.headers, self.body = response.status, response.headers, response.read()
        connection.close()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def status_and_text(url: str, path: str) -> tuple[int, str]:
    """What a server's HTTP port answers to a GET."""
    answer = Answer(url, path)
    return answer.status, answer.body.decode()


class Guarded(SecuredServer):
    """A server with tokens."""

    def __init__(self, directory: Path, start: Callable[..., ServerProcess]):
        super().__init__(directory, start, proof="tokens")

    def get(self, path: str, role: Role | None = None, token: str = "") -> Answer:
        given = token or (self.tokens[role] if role is not None else "")
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        return Answer(self.server.http_url, path, ca=self.ca, **headers)
