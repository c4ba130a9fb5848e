"""Environment variables that Kubernetes sets for each Service, and that look like settings if one is named kvpool.

A Service `kvpool-server` with port 50051 named `grpc` gives KVPOOL_SERVER_SERVICE_HOST, KVPOOL_SERVER_SERVICE_PORT,
KVPOOL_SERVER_SERVICE_PORT_GRPC, KVPOOL_SERVER_PORT, and KVPOOL_SERVER_PORT_50051_TCP with _PROTO, _PORT and _ADDR.
`enableServiceLinks: false` in the pod's specification turns these service links off.

A name alone does not make a service link: a user who sets KVPOOL_PORT=50051 must be told that there is no such setting.
A link belongs to a Service whose host and port are also set, and its value has the form that Kubernetes writes.

Source: kubernetes `pkg/kubelet/envvars/envvars.go`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

_HOST = "_SERVICE_HOST"
_URL = re.compile(r"(tcp|udp|sctp)://(\[[0-9a-fA-F:.]+\]|[0-9.]+|[0-9a-fA-F:]+):\d{1,5}")
_NUMBER = re.compile(r"\d{1,5}")
_SHAPES = (
    (re.compile(r"_SERVICE_PORT(_[A-Z0-9_]+)?"), _NUMBER),
    (re.compile(r"_PORT(_\d{1,5}_(TCP|UDP|SCTP))?"), _URL),
    (re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_PROTO"), re.compile("tcp|udp|sctp")),
    (re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_PORT"), _NUMBER),
)
_ADDRESS = re.compile(r"_PORT_\d{1,5}_(TCP|UDP|SCTP)_ADDR")


def service_links(environ: Mapping[str, str], prefix: str) -> frozenset[str]:
    """The names of the variables that begin with `prefix`, such as KVPOOL_, and are service links."""
    services = [
        name.removesuffix(_HOST)
        for name, value in environ.items()
        if name.startswith(prefix) and name.endswith(_HOST) and _is_address(value)
    ]
    services = [each for each in services if _NUMBER.fullmatch(environ.get(f"{each}_SERVICE_PORT", ""))]
    return frozenset(
        name
        for name, value in environ.items()
        if any(name.startswith(f"{each}_") and _is_link(name.removeprefix(each), value) for each in services)
    )


def _is_link(rest: str, value: str) -> bool:
    if rest == _HOST or _ADDRESS.fullmatch(rest):
        return _is_address(value)
    return any(shape.fullmatch(rest) and wanted.fullmatch(value) for shape, wanted in _SHAPES)


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True
