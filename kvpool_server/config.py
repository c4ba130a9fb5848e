"""Settings of the server, resolved once: flag > environment (KVPOOL_*) > TOML file > default. Unknown keys fail."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kvpool.errors import ConfigError, InvalidRequestError
from kvpool.quotas import parse_quota
from kvpool_server.service_links import service_links
from kvpool_server.tiers.registry import parse

ENV_PREFIX = "KVPOOL_"
_CLIENT_VARIABLES = {"KVPOOL_CONFIG", "KVPOOL_ENDPOINT"}


class ServerConfig(BaseModel):
    """Every setting says meaning, unit, and when to change it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field("127.0.0.1:50051", description="HOST:PORT for gRPC. Port 0 takes a free one.")
    http_listen: str = Field(
        "127.0.0.1:50052", description="HOST:PORT for /metrics and /healthz. Port 0 takes a free one; empty: none."
    )
    data_listen: str = Field(
        "127.0.0.1:50053",
        description="HOST:PORT where data workers move bytes over TCP, for clients that share no memory. Port 0 takes "
        "a free one; empty: none, and the bytes go through gRPC.",
    )
    data_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that serve --data-listen; 0: one for each four cores, from one to four.",
    )
    memory: ByteSize = Field(
        ByteSize(1 << 30), description="Size of the arena, e.g. 64GiB. As much as the host can spare."
    )
    policy: Literal["density", "lru"] = Field(
        "density",
        description="Whom to evict: density, who will serve the fewest hits, as it learns; lru, who was used least "
        "recently. `kvpool bench replay` compares them on a trace.",
    )
    tier: tuple[str, ...] = Field(
        (),
        description="A place under the arena, e.g. file:/mnt/kv,size=200GiB or mooncake:master=HOST:PORT; several are "
        "asked in their order. In the environment, ; separates them.",
    )
    quota: tuple[str, ...] = Field(
        (),
        description="Most that a tenant or a namespace may hold of the arena: tenant:NAME=SIZE, or "
        "namespace:FINGERPRINT=SIZE, of which the first characters do. One a flag; a list in the file; with commas in "
        "the environment.",
    )
    shm_dir: str = Field("/dev/shm", description="RAM-backed directory for the arena; clients on this host map it.")
    mooncake: Literal["off", "tcp", "rdma"] = Field(
        "off", description="Also serve bytes through Mooncake's Transfer Engine: off, tcp or rdma."
    )
    mooncake_device: str = Field(
        "", description="RDMA devices of the Transfer Engine, e.g. mlx5_0 or mlx5_0,mlx5_1; empty: all."
    )
    mooncake_host: str = Field(
        "", description="Name or address by which clients reach the Transfer Engine; empty: as in --listen."
    )
    max_ttl_ms: int = Field(
        120_000, ge=100, le=3_600_000, description="Longest lease or ticket a client gets, milliseconds."
    )
    grace_ms: int = Field(
        30_000, ge=0, le=3_600_000,
        description="How long the space of a writer that vanished waits for its last writes, milliseconds.",
    )  # fmt: skip
    drain_ms: int = Field(
        5_000,
        ge=0,
        le=600_000,
        description="How long calls under way may go on after SIGTERM, and then blocks on their way to a tier, ms.",
    )
    kv_events: str = Field(
        "",
        description="Where routers subscribe to KV events: tcp://HOST:PORT (port 0 takes a free one) or ipc://PATH; "
        "empty: no events.",
    )
    kv_events_replay: str = Field(
        "", description="Where subscribers ask for events they missed, or for all blocks: tcp or ipc; empty: nowhere."
    )
    kv_events_topic: str = Field("kv", description="What every topic begins with: TOPIC@FINGERPRINT@MODEL.")
    kv_events_medium: str = Field(
        "CPU", min_length=1,
        description="Where subscribers are told that blocks lie; change it if your router means another word.",
    )  # fmt: skip
    kv_events_hashes: Literal["int", "bytes"] = Field(
        "int",
        description="How blocks are named: int (low 64 bits of their hash) or bytes (all of it), as by engines.",
    )
    kv_events_buffer: int = Field(
        10_000, ge=1_000, le=1_000_000, description="Messages kept for subscribers that missed some."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged: debug, info, warning or error."
    )
    log_format: Literal["console", "json"] = Field("console", description="How log lines look: console or json.")

    @field_validator("listen", "http_listen", "data_listen")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name == "listen":
            split_address(value)
        return value

    @field_validator("tier", mode="before")
    @classmethod
    def _one_tier(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("tier")
    @classmethod
    def _check_tier(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            specs = list(map(parse, value))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        for nth, spec in enumerate(specs):
            if any(spec.tier_name == other.tier_name for other in specs[:nth]):
                raise ValueError(f"{spec.tier_name} is there twice; give each place once")
        return value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        scheme, _, place = value.partition("://")
        if scheme == "tcp":
            split_address(place)
        elif value and (scheme != "ipc" or not place):
            raise ValueError("it is neither tcp://HOST:PORT nor ipc://PATH")
        return value

    @field_validator("kv_events_topic")
    @classmethod
    def _check_topic(cls, value: str) -> str:
        if "@" in value:
            raise ValueError("@ separates what follows; leave it out")
        return value

    @field_validator("quota", mode="before")
    @classmethod
    def _split_quotas(cls, value: object) -> object:
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("quota")
    @classmethod
    def _check_quotas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            subjects = [quota.subject for quota in map(parse_quota, value) if quota.limit_bytes]
        except InvalidRequestError as error:
            raise ValueError(str(error)) from None
        if len(set(subjects)) < len(value):
            raise ValueError("a subject is there twice, or has 0 bytes; give each once, with a size")
        return value

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: int) -> int:
        if value < 1 << 20:
            raise ValueError("give at least 1MiB")
        return value


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"port {port} is none; give one of 1 to 65535, or 0 for a free one")
    return host.strip("[]"), int(port)


def load(flags: dict[str, Any], config_file: Path | None, environ: dict[str, str] | None = None) -> ServerConfig:
    """The settings in force.

    Args:
        flags: what the command line gave.
        config_file: a TOML file; None for none.
        environ: the environment; the process's by default.

    Raises:
        ConfigError: names the source, the key, the value and what is wrong.
    """
    environ = dict(os.environ) if environ is None else environ
    from_environment = _from_environment(environ)
    values = {**_from_file(config_file), **from_environment, **flags}
    try:
        return ServerConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        source = f"config file {config_file}"
        if key in flags:
            source = f"--{key.replace('_', '-')}"
        elif key in from_environment:
            source = ENV_PREFIX + key.upper()
        field = ServerConfig.model_fields.get(key)
        wanted = f". {field.description}" if field is not None else ""
        wrong = first["msg"].removeprefix("Value error, ")
        if first["type"].startswith("byte_size"):
            wrong = "it is no size; give bytes, or 512MiB, 20GiB, 1.5TiB"
        raise ConfigError(f"setting {key} = {first['input']!r} ({source}): {wrong}{wanted}") from None


def _from_file(config_file: Path | None) -> dict[str, Any]:
    if config_file is None:
        return {}
    try:
        values = tomllib.loads(config_file.read_text())
    except OSError as error:
        raise ConfigError(f"config file {config_file}: {error.strerror}; give --config a TOML file") from None
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"config file {config_file} is not TOML: {error}") from None
    _refuse_unknown(values, f"config file {config_file}")
    return values


def _from_environment(environ: dict[str, str]) -> dict[str, Any]:
    ignored = _CLIENT_VARIABLES | service_links(environ, ENV_PREFIX)
    values: dict[str, Any] = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in ignored
    }
    if "tier" in values:
        values["tier"] = [text for text in values["tier"].split(";") if text]
    _refuse_unknown(values, "environment", ENV_PREFIX)
    return values


def _refuse_unknown(values: dict[str, Any], source: str, prefix: str = "") -> None:
    for key in values:
        if key not in ServerConfig.model_fields:
            shown = prefix + (key.upper() if prefix else key)
            known = ", ".join(ServerConfig.model_fields)
            raise ConfigError(f"{source}: unknown key {shown}; the keys are {known}")
