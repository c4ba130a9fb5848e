"""What a tier is told: `file:/mnt/kv,size=200GiB`, `mooncake:master=10.0.0.1:50051,segment=16GiB`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from kvpool.errors import ConfigError

_STRICT = ConfigDict(extra="forbid", frozen=True)


class FileSpec(BaseModel):
    """A directory."""

    model_config = _STRICT

    path: Path = Field(description="directory, of a local disk or shared")
    size: ByteSize = Field(ge=4 << 20, description="bytes that this server may take there, e.g. 200GiB")
    name: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", description="this server's directory below; default: host and port"
    )
    threads: int = Field(4, ge=1, le=64, description="reads and writes at once")
    io: Literal["direct", "buffered", "usrbio"] = Field(
        "direct", description="direct passes by the page cache, where it can; usrbio is for mounts of 3FS"
    )
    write: Literal["through", "back"] = Field("through", description="when a block is written down")
    create: bool = Field(False, description="yes: the directory is made where it is not there")

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        """Else it depends on where the server was started, and ~ is a directory of that name."""
        if not path.is_absolute():
            raise ValueError("give a path from the root on, as in file:/mnt/kv")
        return path

    @field_validator("name")
    @classmethod
    def _no_leading_dot(cls, name: str) -> str:
        """`.` and `..` are other directories, and what begins with a dot is being removed."""
        if name.startswith("."):
            raise ValueError("a server's directory may not begin with a dot")
        return name

    @property
    def place(self) -> str:
        """What the tier is called."""
        return f"file:{self.path}"


class MooncakeSpec(BaseModel):
    """A Mooncake Store cluster."""

    model_config = _STRICT

    master: str = Field(pattern=r"^.+:\d+$", description="HOST:PORT of mooncake_master")
    metadata: str = Field("P2PHANDSHAKE", description="metadata server of the Transfer Engine")
    segment: ByteSize = Field(ByteSize(0), description="memory that this server gives to the cluster, e.g. 16GiB")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="of the Transfer Engine")
    device: str = Field("", description="its RDMA devices")
    host: str = Field("", description="name or address by which the others reach this server; default: as in --listen")
    threads: int = Field(2, ge=1, le=64, description="reads and writes at once")
    write: Literal["through", "back"] = Field("through", description="when a block is written down")

    @property
    def place(self) -> str:
        """What the tier is called."""
        return f"mooncake:{self.master}"


Spec = FileSpec | MooncakeSpec

_KINDS: dict[str, type[FileSpec] | type[MooncakeSpec]] = {"file": FileSpec, "mooncake": MooncakeSpec}


def parse(text: str) -> Spec:
    """Reads one --tier. Raises ConfigError, naming the option, its value and what is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS or not rest:
        raise ConfigError(f"tier {text!r}: begin with file:/PATH,size=... or mooncake:master=HOST:PORT")
    options: dict[str, Any] = {}
    parts = rest.split(",")
    if kind == "file":
        options["path"] = parts.pop(0)
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or name in options:
            raise ConfigError(f"tier {text!r}: {part!r} is not one NAME=VALUE; {_options(kind)}")
        options[name] = value
    try:
        return _KINDS[kind](**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        match first["type"]:
            case "missing":
                wrong = f"{name}= is missing; {_options(kind)}"
            case "extra_forbidden":
                wrong = f"{name} is no option of a {kind} tier; {_options(kind)}"
            case _:
                wrong = f"{name}={first['input']}: {_wrong(first)}"
        raise ConfigError(f"tier {text!r}: {wrong}") from None


def _options(kind: str) -> str:
    fields = _KINDS[kind].model_fields
    return "options: " + "; ".join(f"{name}= {field.description}" for name, field in fields.items() if name != "path")


def _wrong(error: ErrorDetails) -> str:
    """What to give instead, where pydantic does not say it in the words of whoever gave it."""
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal" if error["loc"] == ("size",):
            return f"give at least {ByteSize(context['ge']).human_readable()}"
        case "greater_than_equal":
            return f"give at least {context['ge']}"
        case "less_than_equal":
            return f"give at most {context['le']}"
        case "byte_size":
            return "give a number of bytes, as 200GiB"
        case "literal_error":
            return f"give {context['expected']}"
        case "int_parsing":
            return "give a whole number"
        case "string_pattern_mismatch":
            return f"it does not match {context['pattern']}"
        case "bool_parsing":
            return "give yes or no"
        case _:
            return error["msg"].removeprefix("Value error, ")
