"""Checks of an engine, by its log or by its command line: settings that cost hits, and what the connector complains of.

A log is read at its start, where vLLM prints its settings, and at its end. Its text comes from others.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.doctor.finding import Finding, Level, error, ok, warning
from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.file_permissions import working_directory
from kvpool.hashing import ALGORITHM
from kvpool.holdings import escaped

HEAD_BYTES = 4 << 20
TAIL_BYTES = 32 << 20
MAX_LINE_CHARS = 240
"""Of a line of the log that a finding quotes."""
MAX_MATCHED_CHARS = 4_096
"""Of a line that patterns are matched with. Who sends an engine requests may choose parts of its lines."""
MAX_SETTINGS_CHARS = 65_536
"""Of the line with vLLM's settings."""
CONNECTOR = "KVPoolConnector"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is known of an engine's settings; None: not known, or the default of vLLM.

    Args:
        source: where they are from, for texts.
        hash_seed: PYTHONHASHSEED.
        files: that the connector reads to be let in, by setting.
    """

    source: str
    connectors: frozenset[str] = frozenset()
    hash_algorithm: str | None = None
    load_failure_policy: str | None = None
    role: str | None = None
    hash_seed: str | None = None
    has_prefix_caching: bool = True
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Complaint:
    """Lines of the connector that name a problem, by a pattern."""

    pattern: re.Pattern[str]
    level: Level
    text: str
    fix: str


COMPLAINTS = tuple(
    Complaint(re.compile(pattern), level, text, fix)
    for pattern, level, text, fix in (
        (r"kvpool is off for this engine", Level.ERROR, "the connector has turned itself off", "see the line"),
        (
            r"KV sharing is off for this engine until",
            Level.ERROR,
            "the engine shares no KV until it is started again",
            "start the engine again",
        ),
        (
            r"failed with an unexpected error",
            Level.ERROR,
            "the connector has a defect",
            "report the traceback below the line",
        ),
        (
            r"kvpool\.errors\.ConfigError: ",
            Level.ERROR,
            "the engine refused to start",
            "see the line; relative paths count from the directory in which vLLM was started",
        ),
        (
            r"kv_load_failure_policy is ",
            Level.WARNING,
            "requests fail if their loads fail",
            "set kv_load_failure_policy to recompute in --kv-transfer-config",
        ),
        (
            r"of which nothing can be read in",
            Level.WARNING,
            "the pool has blocks of this model that the engine cannot use",
            "start both engines with the same value of the fields that the line names",
        ),
        (
            r"a load of \d+ KV blocks failed",
            Level.WARNING,
            "loads failed, and their requests were computed",
            "the line names the reason; a slow network needs a larger load_timeout_ms",
        ),
        (
            r"KV blocks were not stored in the pool",
            Level.WARNING,
            "blocks were not stored",
            "the line names the reason",
        ),
        (
            r"KV blocks of a load left the pool",
            Level.WARNING,
            "blocks left the pool before they were loaded",
            "give the server more --memory",
        ),
        (
            r"transport grpc \(slow",
            Level.WARNING,
            "bytes go through gRPC, which is slow",
            "make a faster transport work; the line names what is missing",
        ),
        (
            r"whose connector interface may differ",
            Level.WARNING,
            "this release of kvpool is not tested with the engine's vLLM",
            "see docs/reference/compatibility.md",
        ),
        (
            r"cannot read the weights in memory",
            Level.WARNING,
            "a reset ends sharing with other engines",
            "the line names what cannot be read",
        ),
        (
            r"another connector has replaced that of KVPoolConnector",
            Level.ERROR,
            "another connector took the handshake",
            "run at most one connector with a handshake under a MultiConnector",
        ),
        (
            r"KV sharing is off until the engine's blocks",
            Level.WARNING,
            "KV sharing was off for a while after a reset",
            "reset the engine while no request runs",
        ),
    )
)
AWAY = re.compile(r"kvpool is away: ")
CONNECTED = re.compile(r"\A(?>.*?kvpool at ).*, namespace [0-9a-f]{12}, transport ")
"""The connector has reached the server, again. No pattern tries the rest of a line from more than one place on."""


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
        source="the arguments",
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


def of_log(text: str) -> Settings | None:
    """The settings that vLLM printed at its start; None if the log has no such line."""
    found_line = next((line for line in text.splitlines() if "non-default args: " in line), None)
    if found_line is None:
        return None
    line = found_line[:MAX_SETTINGS_CHARS]

    def value(name: str) -> str | None:
        found = re.search(rf"['\"]?{name}['\"]?\s*[=:]\s*['\"]?([\w.+-]+)", line)
        return found[1] if found is not None and found[1] != "None" else None

    return Settings(
        source="the log",
        connectors=frozenset(re.findall(r"kv_connector['\"]?\s*[=:]\s*['\"](\w+)", line)),
        hash_algorithm=value("prefix_caching_hash_algo"),
        load_failure_policy=value("kv_load_failure_policy"),
        role=value("kv_role"),
        has_prefix_caching=value("enable_prefix_caching") != "False",
    )


def settings(given: Settings) -> list[Finding]:
    """Whether an engine's settings let it share blocks."""
    where = given.source
    found = []
    if CONNECTOR not in given.connectors:
        text = f"{where} have no {CONNECTOR}" if given.connectors == frozenset() else f"{where} name other connectors"
        fix = "give vLLM the --kv-transfer-config that kvpool-server prints at its start"
        found.append(
            error(
                "connector", text.replace("the log have", "the log has").replace("the log name ", "the log names "), fix
            )
        )
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


def log_file(path: Path) -> list[Finding]:
    """What an engine's log says. Raises ConfigError if the file cannot be read."""
    text = read_log(path)
    given = of_log(text)
    found = [] if given is None else settings(given)
    return [*found, *complaints(text)]


def complaints(log: str) -> list[Finding]:
    """The connector's lines that name a problem, each kind once, with its last line."""
    found, counts, last = [], dict.fromkeys(COMPLAINTS, 0), dict.fromkeys(COMPLAINTS, "")
    away, is_away, away_line, was_connected = 0, False, "", False
    for whole in log.splitlines():
        line = whole[:MAX_MATCHED_CHARS]
        if "kvpool" not in line:
            continue
        if AWAY.search(line):
            away, is_away, away_line = away + 1, True, line
        elif CONNECTED.search(line):
            is_away, was_connected = False, True
        for complaint in COMPLAINTS:
            if complaint.pattern.search(line):
                counts[complaint] += 1
                last[complaint] = line
    if away:
        level = error if is_away else warning
        since = "and is still" if is_away else "and came back"
        text = f"the server was away {away} times, {since}: {_quoted(away_line)}"
        found.append(level("engine log", text, "the line names the reason; check the endpoint and the server"))
    for complaint, count in counts.items():
        if count:
            text = f"{complaint.text} ({count:,} lines): {_quoted(last[complaint])}"
            found.append(Finding("engine log", complaint.level, text, complaint.fix))
    if found:
        return found
    said = "the connector reached the server" if was_connected else "the connector says nothing"
    if was_connected:
        return [ok("engine log", f"{said}, and complains of nothing")]
    fix = "give the log of an engine with the connector, from its start, at level INFO"
    return [warning("engine log", f"{said} in it", fix)]


def read_log(path: Path) -> str:
    """The start and the end of a log. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            size = file.seek(0, 2)
            file.seek(max(HEAD_BYTES, size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES) if size > HEAD_BYTES else b""
    except OSError as failed:
        raise ConfigError(f"cannot read {path}: {failed.strerror}; give the engine's log as --engine-log") from None
    return (head + tail).decode(errors="replace")


def _quoted(line: str) -> str:
    """The message of a line, without what vLLM puts before it."""
    message = line[line.find("] ") + 2 :] if "] " in line else line
    return escaped(message.strip(), MAX_LINE_CHARS)
