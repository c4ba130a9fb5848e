"""The systemd unit that kvpool ships: its settings, and its sandbox for a process that no systemd starts."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "kvpool-server.service"
EPERM = 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE, _PR_CAPBSET_DROP = 38, 65, 24
_LAST_CAPABILITY = 40
_SCMP_ACT_ALLOW, _SCMP_ACT_ERRNO = 0x7FFF0000, 0x00050000


def settings(name: str) -> list[str]:
    """The values of a setting, in the order of the unit's lines."""
    lines = [line.partition("=") for line in UNIT.read_text().splitlines() if not line.startswith("#")]
    return [value for key, _, value in lines if key == name]


def allowed_syscalls() -> list[str]:
    """The system calls of the unit's SystemCallFilter=, with systemd's sets resolved by systemd-analyze."""
    allowed: set[str] = set()
    for value in settings("SystemCallFilter"):
        names = _resolve(value.removeprefix("~").split())
        allowed = allowed - names if value.startswith("~") else allowed | names
    return sorted(allowed)


def _resolve(names: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        if not name.startswith("@"):
            found.add(name)
            continue
        shown = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
        members = [line.strip() for line in shown.stdout.splitlines()[1:]]
        found |= _resolve([member for member in members if member and not member.startswith("#")])
    return found


def _confine() -> None:
    """Applies what the unit says of capabilities, privileges, executable memory and system calls to this process.

    The user stays, because another one may not reach this Python.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    filtered = _filter(allowed_syscalls()) if settings("SystemCallFilter") else None
    if settings("CapabilityBoundingSet") == [""] and os.geteuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            assert libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
    if settings("NoNewPrivileges") == ["yes"]:
        assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if settings("MemoryDenyWriteExecute") == ["yes"]:
        libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0)  # Since Linux 6.3; older ones leave it to systemd's own filter.
    os.umask(int(settings("UMask")[0], 8))
    if filtered is not None:
        library, context = filtered
        assert library.seccomp_load(context) == 0


def _filter(names: Sequence[str]) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    context = ctypes.c_void_p(library.seccomp_init(_SCMP_ACT_ERRNO | EPERM))
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # Others are of other processors.
            assert library.seccomp_rule_add(context, _SCMP_ACT_ALLOW, number, 0) == 0, name
    return library, context


if __name__ == "__main__":
    _confine()
    os.execv(sys.argv[1], sys.argv[1:])
