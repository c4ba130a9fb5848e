"""Checks of an engine by its command line: settings that cost hits."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.doctor.finding import Finding, error, ok, warning
from kvpool.errors import InvalidRequestError
from kvpool.file_permissions import working_directory
from kvpool.hashing import ALGORITHM
from kvpool.holdings import escaped

MAX_LINE_CHARS = 240
"""Of a setting that a finding quotes."""
CONNECTOR = "KVPoolConnector"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is known of an engine's settings; None: not known, or the default of vLLM.

    Args:
        hash_seed: PYTHONHASHSEED.
        files: that the connector reads to be let in, by setting.
    """

    connectors: frozenset[str] = frozenset()
    hash_algorithm: str | None = None
    load_failure_policy: str | None = None
    role: str | None = None
    hash_seed: str | None = None
    has_prefix_caching: bool = True
    files: Mapping[str, str] = field(default_factory=dict)


def of_arguments(text: str) -> Settings:
    """The settings of a command line of vLLM, with assignments of the environment before it if there are any.

    Raises InvalidRequestError, which names the part that cannot be read.
    """
    try:
        words = shlex.split(text)
    except ValueError as failed:
        raise InvalidRequestError(f"--vllm-args cannot be read: {failed}; quote it as for a shell") from None
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    options = _options(words)
    transfer = _transfer(options.get("kv-transfer-config", ""))
    return Settings(
        connectors=frozenset(_connectors(transfer)),
        hash_algorithm=options.get("prefix-caching-hash-algo"),
        load_failure_policy=_text(transfer.get("kv_load_failure_policy")),
        role=_text(transfer.get("kv_role")),
        hash_seed=environment.get("PYTHONHASHSEED"),
        has_prefix_caching="no-enable-prefix-caching" not in options,
        files=_files(transfer),
    )


def _options(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for nth, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = words[nth + 1] if nth + 1 < len(words) and not words[nth + 1].startswith("--") else ""
            found[name.replace("_", "-")] = value if equals else follows
    return found


def _transfer(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as failed:
        raise InvalidRequestError(
            f"--kv-transfer-config in --vllm-args is not JSON ({failed}); quote it as for a shell"
        ) from None
    if not isinstance(found, dict):
        raise InvalidRequestError("--kv-transfer-config in --vllm-args is no JSON object; give {...}")
    return found


def _parts(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configuration of the connector, and of those of a MultiConnector."""
    inner = _object(transfer, "kv_connector_extra_config").get("connectors")
    return [transfer, *(part for part in inner if isinstance(part, dict))] if isinstance(inner, list) else [transfer]


def _connectors(transfer: Mapping[str, Any]) -> list[str]:
    return [str(part["kv_connector"]) for part in _parts(transfer) if "kv_connector" in part]


def _files(transfer: Mapping[str, Any]) -> dict[str, str]:
    """The files of certificates and tokens that a connector is given, by setting."""
    found: dict[str, Any] = {}
    for part in _parts(transfer):
        if part.get("kv_connector") == CONNECTOR:
            extra = _object(part, "kv_connector_extra_config")
            tls = _object(extra, "tls")
            found |= {f"tls.{name}": tls[name] for name in ("ca", "cert", "key") if name in tls}
            found |= {"token_file": extra["token_file"]} if "token_file" in extra else {}
    return {name: path for name, path in found.items() if isinstance(path, str) and path}


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def settings(given: Settings) -> list[Finding]:
    """Whether an engine's settings let it share blocks."""
    where = "the arguments"
    found = []
    if CONNECTOR not in given.connectors:
        text = f"{where} {'name other connectors' if given.connectors else f'have no {CONNECTOR}'}"
        fix = "give vLLM the --kv-transfer-config that kvpool-server prints at its start"
        found.append(error("connector", text, fix))
    if given.hash_algorithm == ALGORITHM:
        found.append(ok("hash algorithm", f"{where}: {ALGORITHM}"))
    else:
        chosen = "vLLM's default" if given.hash_algorithm is None else escaped(given.hash_algorithm, MAX_LINE_CHARS)
        text = f"{where}: {chosen}, which may name equal blocks differently in two processes"
        found.append(error("hash algorithm", text, f"start vLLM with --prefix-caching-hash-algo {ALGORITHM}"))
    if given.hash_seed is not None:
        text = f"{where}: PYTHONHASHSEED is set"
        fix = "set the same PYTHONHASHSEED for all engines that share blocks, or none"
        found.append(warning("hash seed", text, fix))
    if given.load_failure_policy == "recompute":
        found.append(ok("kv_load_failure_policy", f"{where}: recompute"))
    else:
        chosen = "fail" if given.load_failure_policy is None else escaped(given.load_failure_policy, MAX_LINE_CHARS)
        fix = "set kv_load_failure_policy to recompute in --kv-transfer-config"
        found.append(warning("kv_load_failure_policy", f"{where}: {chosen}: a request whose load fails will fail", fix))
    if given.role not in (None, "kv_both"):
        does = {"kv_consumer": "stores nothing", "kv_producer": "loads nothing"}.get(given.role or "", "is unknown")
        text = f"{where}: {escaped(given.role or '', MAX_LINE_CHARS)}: the engine {does}"
        found.append(warning("kv_role", text, "set kv_role to kv_both unless other engines do the rest"))
    for name, path in given.files.items():
        if _is_missing(path):
            seen = f"seen from {working_directory()}"
            text = f"{where}: {name} {escaped(path, MAX_LINE_CHARS)} is not on this host, {seen}"
            found.append(warning(name, text, "give a file that the engine can read, best by its absolute path"))
    if not given.has_prefix_caching:
        text = f"{where}: vLLM's prefix caching is off, so that stored blocks are not kept in the engine, too"
        found.append(warning("prefix caching", text, "leave out --no-enable-prefix-caching"))
    return found


def _is_missing(path: str) -> bool:
    """Whether no file has this name. False if this process may not know: the engine's user may."""
    try:
        os.stat(path)
    except PermissionError:
        return False
    except (OSError, ValueError):  # ValueError: a zero byte.
        return True
    return False
