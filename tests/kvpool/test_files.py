"""Files with secrets, and files that decide who may call: who may read and write them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from kvpool.protocol.errors import ConfigError
from kvpool.security.files import open_private, require_owner_writes, require_private


def test_a_file_that_others_can_write_is_refused_and_one_that_they_can_read_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for mode in (0o400, 0o440, 0o444, 0o600, 0o640, 0o644, 0o755):
        file.chmod(mode)
        require_owner_writes(str(file), "rule")
    for mode in (0o620, 0o602, 0o664, 0o666):
        file.chmod(mode)
        told = f"{file} can be written by its group or others (mode {mode:04o}), who could rule; chmod go-w {file}"
        with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
            require_owner_writes(str(file), "rule")


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o644])
def test_a_secret_of_kubernetes_is_taken(tmp_path: Path, mode: int) -> None:
    """Its volume is a directory that all may write, with links through `..data` to the files."""
    revision = tmp_path / "..2026_11_22"
    revision.mkdir()
    (revision / "ca.crt").touch()
    (revision / "ca.crt").chmod(mode)
    (tmp_path / "..data").symlink_to(revision.name)
    (tmp_path / "ca.crt").symlink_to("..data/ca.crt")
    tmp_path.chmod(0o3777)
    require_owner_writes(str(tmp_path / "ca.crt"), "rule")
    (revision / "ca.crt").chmod(mode | 0o020)
    with pytest.raises(ConfigError, match="chmod go-w"):
        require_owner_writes(str(tmp_path / "ca.crt"), "rule")


@pytest.mark.parametrize("path", ["nothing", "a\0b"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, path: str) -> None:
    for check in (require_private, lambda path: require_owner_writes(path, "rule")):
        with pytest.raises(ConfigError, match=r"cannot read .*(nothing|x00b)"):
            check(str(tmp_path / path))


def test_a_relative_path_is_named_with_the_directory_that_it_is_seen_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with pytest.raises(ConfigError, match=rf"cannot read no/ca.crt \(seen from {gone}\): No such file"):
        require_owner_writes("no/ca.crt", "do harm")
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"cannot read no/ca.crt \(seen from a directory that is gone\): "):
        require_owner_writes("no/ca.crt", "do harm")


def test_a_private_file_is_made_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(2):
        os.close(open_private(str(path), os.O_RDWR, "ledger", "--ledger"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    before = len(os.listdir("/proc/self/fd"))
    for name, told in (
        ("file", f"others may use the ledger {path} (mode 0640); chmod 600 {path}"),
        ("pipe", "is no regular file; give another --ledger"),
        ("link", "cannot open the ledger"),
        ("a\0b", "give a --ledger that the server may write"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            open_private(str(tmp_path / name), os.O_RDWR, "ledger", "--ledger")
    assert len(os.listdir("/proc/self/fd")) == before
