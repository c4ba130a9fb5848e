"""The options of a file tier."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ByteSize, Field, field_validator

from kvpool_server.tiers.block_mac import KeyedTierOptions
from kvpool_server.tiers.file.disk import Disk
from kvpool_server.tiers.file.peer_directories import DEFAULT_MEMORY_BYTES
from kvpool_server.tiers.file.tier import FileTier
from kvpool_server.tiers.file.usrbio import UsrbioDisk
from kvpool_server.tiers.tier import TierContext


class FileOptions(KeyedTierOptions):
    """A directory, on a local disk or shared."""

    EXAMPLE: ClassVar[str] = "file:/mnt/kv,size=200GiB"
    PLACE: ClassVar[str] = "path"

    path: Path = Field(description="directory, on a local disk or shared")
    size: ByteSize = Field(ge=4 << 20, description="bytes that this server may take there, as 200GiB")
    name: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", description="this server's directory below; default: host and port"
    )
    threads: int = Field(4, ge=1, le=64, description="reads and writes at once")
    io: Literal["direct", "buffered", "usrbio"] = Field(
        "direct", description="direct bypasses the page cache where possible; usrbio is for mounts of 3FS"
    )
    owners: tuple[int, ...] = Field(
        (), description="user ids beside this server's own whose directories and files are trusted, as 1000+1001"
    )
    peer_memory: ByteSize = Field(
        ByteSize(DEFAULT_MEMORY_BYTES), ge=0, description="memory for what other servers' journals list, as 4GiB"
    )
    create: bool = Field(False, description="yes: make the directory if it does not exist")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: Path) -> Path:
        """A relative path depends on where the server was started; ~ would be a directory of that name."""
        if not path.is_absolute():
            raise ValueError("an absolute path, as in file:/mnt/kv")
        return path

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        """`.` and `..` are other directories, and a directory that is being deleted begins with a dot."""
        if name.startswith("."):
            raise ValueError("a name that does not begin with a dot")
        return name

    @field_validator("owners", mode="before")
    @classmethod
    def _split_owners(cls, owners: object) -> object:
        if not isinstance(owners, str):
            return owners
        if not all(part.isascii() and part.isdecimal() for part in owners.split("+")):
            raise ValueError("user ids as numbers, as 1000 or 1000+1001")
        return tuple(map(int, owners.split("+")))

    @property
    def tier_name(self) -> str:
        return f"file:{self.path}"

    def make(self, context: TierContext) -> FileTier:
        return FileTier(
            self.path,
            self.name or re.sub(r"[^A-Za-z0-9._-]|^\.", "_", f"{socket.gethostname()}-{context.listen[1]}"),
            self.size,
            context.policy,
            threads=self.threads,
            direct=self.io == "direct",
            create=self.create,
            handover_s=context.handover_s,
            disk=UsrbioDisk(self.path) if self.io == "usrbio" else Disk(),
            open_files=context.open_files,
            owners=self.owners,
            peer_memory_bytes=self.peer_memory,
            mac=self.load_mac(),
        )
