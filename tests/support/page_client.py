"""Asks the HTTP port of a server, and starts one that asks for tokens."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.security.certificates import Authority
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import append_record, create_token
from tests.security.test_access import DAY
from tests.support.certificates import files_in
from tests.support.processes import ServerProcess

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


class Guarded:
    """A server with tokens."""

    def __init__(self, directory: Path, start: Callable[..., ServerProcess]):
        files = files_in(Authority.create(directory / "pki").issue_server([]))
        known, operator = directory / "tokens", directory / "operator"
        self.tokens = {}
        for role in Role:
            principal = Principal("acme" if role.has_tenant else ALL_TENANTS, role)
            self.tokens[role], record = create_token(principal, DAY)
            append_record(known, record)
        operator.write_text(self.tokens[Role.OPERATOR])
        operator.chmod(0o600)
        flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--tokens", str(known))
        self.tls, self.token_file = TlsFiles(files.ca), str(operator)
        self.server = start(*flags, tls=self.tls, token_file=self.token_file)
        self.ca = files.ca

    def get(self, path: str, role: Role | None = None, token: str = "") -> Answer:
        given = token or (self.tokens[role] if role is not None else "")
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        return Answer(self.server.http_url, path, ca=self.ca, **headers)
