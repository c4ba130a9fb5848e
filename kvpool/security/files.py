"""Files of credentials: refused if the wrong users can read or write them, changed as a whole, watched for changes.

The permissions are those of the file that a symbolic link leads to: a Kubernetes Secret's volume has links.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvpool.protocol.errors import ConfigError, InvalidRequestError

MAX_PEM_BYTES = 1 << 20
LOCK_S = 5.0
"""How long a change waits for another change of the same file."""
_RETRY_S = 0.02
LOOK_EVERY_S = 5.0

log = logging.getLogger(__name__)

Value = TypeVar("Value")


def as_setting(setting: str) -> str:
    """The end of an error's fix: which setting gives the path; empty if that is not known."""
    return f" as {setting}" if setting else ""


def unreadable(path: object, error: OSError, setting: str = "") -> ConfigError:
    """The error for a file that cannot be read; `setting` gave the path, such as "--tokens"; empty: not known."""
    seen = "" if os.path.isabs(str(path)) else f" (seen from {_working_directory()})"
    return ConfigError(
        f"cannot read {path}{seen}: {error.strerror}; give a file{as_setting(setting)} that exists and that this "
        "process may read"
    )


def read_pem(path: Path, setting: str = "") -> bytes:
    """A file's bytes, at most `MAX_PEM_BYTES`. Raises ConfigError; `setting` as of `unreadable`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error, setting) from None
    if len(text) > MAX_PEM_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_PEM_BYTES} bytes; give a PEM file")
    return text


def require_private(path: str, what: str = "private key", setting: str = "") -> None:
    """Raises ConfigError if others than a key's owner, or a group that root has chosen, can read it."""
    found = _stat(path, setting)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o037 or (mode & 0o040 and found.st_uid):
        raise ConfigError(
            f"others can read the {what} {path} (mode {mode:04o}); give it mode 0600, or 0640 and owner root "
            "(Kubernetes: defaultMode: 0440 in the secret's volume)"
        )


def read_private(path: Path, setting: str, what: str = "private key") -> bytes:
    """The bytes of a file that nobody else can read. Raises ConfigError as `require_private` and `read_pem`."""
    require_private(str(path), what, setting)
    return read_pem(path, setting)


def require_owner_writes(path: str, danger: str, setting: str = "") -> None:
    """Raises ConfigError if a file's group or others can write it, and so could do the `danger`, as "add a token".

    They may read the file.
    """
    mode = stat.S_IMODE(_stat(path, setting).st_mode)
    if mode & 0o022:
        raise ConfigError(
            f"{path} can be written by its group or others (mode {mode:04o}), who could {danger}; chmod go-w {path}"
        )


def read_lines(
    path: Path, parse: Callable[[str], Value | None], danger: str, setting: str, fix: str = ""
) -> list[tuple[bytes, Value | None]]:
    """Each line of a file, with what `parse` makes of it; None: the line is empty, or a comment (`#`).

    Raises ConfigError, which names the line and ends with `fix`, if `parse` raises ValueError or InvalidRequestError;
    also for a file that its group or others can write (`require_owner_writes`).
    """
    require_owner_writes(str(path), danger, setting)
    found: list[tuple[bytes, Value | None]] = []
    for number, line in enumerate(read_pem(path, setting).splitlines(keepends=True), 1):
        entry = line.decode(errors="replace").strip()
        try:
            found.append((line, parse(entry) if entry and not entry.startswith("#") else None))
        except (ValueError, InvalidRequestError) as error:
            raise ConfigError(f"{path}, line {number}: {error}{fix}") from None
    return found


def open_private(path: str, flags: int, what: str, setting: str) -> int:
    """A descriptor of a regular file that its owner alone can use; the file is made if it does not exist.

    Raises ConfigError, which says `what` the file is and which `setting` gave the path.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot open the {what} {path}: {why}; give a {setting} that the server may write") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) and not mode & 0o077:
        return fd
    os.close(fd)
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the {what} {path} is no regular file; give another {setting}")
    raise ConfigError(f"others may use the {what} {path} (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")


def write_new(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes a new file, and makes its directory. Raises ConfigError, also if there is such a file."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give the path of a new file") from None


def write_whole(path: Path, text: bytes, secret: bool = False, like: os.stat_result | None = None) -> None:
    """Replaces a file as a whole, so that readers see the old bytes or the new ones. Raises ConfigError.

    Args:
        secret: only the file's owner may read it.
        like: has the owner, group and mode of the new file; None: the caller's, and as `secret` says.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if secret else 0o644)
        try:
            with open(fd, "wb") as file:
                if like is not None:
                    os.fchown(fd, like.st_uid, like.st_gid)
                    os.fchmod(fd, stat.S_IMODE(like.st_mode))
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def append_line(path: Path, line: str, mode: int = 0o600) -> None:
    """Adds a line to a file, which is made if it does not exist. Raises ConfigError as `open_locked`."""
    fd = open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
    with open(fd, "a+b") as file:
        file.seek(max(0, os.fstat(fd).st_size - 1))
        ends_a_line = file.read() in (b"", b"\n")
        file.write(("" if ends_a_line else "\n").encode() + line.encode())


def open_locked(path: Path, flags: int, mode: int = 0o600) -> int:
    """Opens a file for a change, of which there is one at a time: a lost one would bring a removed token back.

    Raises ConfigError.
    """
    ends_at = time.monotonic() + LOCK_S
    while time.monotonic() < ends_at:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, mode)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # Else it was replaced before it was locked.
                    return fd
            except BlockingIOError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        time.sleep(_RETRY_S)
    raise ConfigError(f"another process has locked {path} for {LOCK_S:g} s; end it, or try again")


class WatchedFiles(Generic[Value]):
    """The value of some files, which may be replaced at any time. Thread-safe.

    While the files cannot be used (half of a pair is replaced, say), the last good value stays in force, and one
    warning says why. Such files are read at each look: the reason may have been the process, not the files.

    Args:
        read: reads the files. Raises ConfigError if they cannot be used; so does the constructor.
        when_read: called with None after the first reading, after each that changes the value, and after the first that
            succeeds again; called with the error after each that fails, once per change and reason.

    Attributes:
        version: how often the value has changed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
        when_read: Callable[[ConfigError | None], None] = lambda _: None,
    ):
        self.paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._when_read = when_read
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self.value = read()
        self.version = 0
        self._reason = ""  # Why the files as they are now cannot be used; empty: they can.
        self._look_at = clock() + LOOK_EVERY_S
        when_read(None)

    @property
    def is_refused(self) -> bool:
        """Whether the files as they are now cannot be used, so that `value` is what they held before."""
        return bool(self._reason)

    def look(self, *, at_once: bool = False) -> int:
        """Reads files that have changed or are refused, every `LOOK_EVERY_S` or `at_once`; returns the version."""
        if self._clock() < self._look_at and not at_once:
            return self.version
        with self._lock:
            self._look_at = self._clock() + LOOK_EVERY_S
            seen, reason = self._stamps(), self._reason
            is_changed, self._seen = seen != self._seen, seen
            if not (is_changed or reason):
                return self.version
            try:
                value = self._read()
            except ConfigError as error:
                self._reason = str(error)
                if is_changed or self._reason != reason:
                    log.warning("new files cannot be used, and what they held before stays in force: %s", error)
                    self._when_read(error)
                return self.version
            except Exception as error:
                self._reason = repr(error)
                raise
            self._reason = ""
            is_new = value != self.value
            if is_new:
                self.value = value
                self.version += 1
            if is_new or reason:
                log.info("read again: %s", ", ".join(self.paths))
                self._when_read(None)
            return self.version

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp, self.paths))


def _stat(path: str, setting: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise unreadable(path, error, setting) from None
    except ValueError:  # A zero byte.
        fix = f"give another path{as_setting(setting)}"
        raise ConfigError(f"cannot read {path!r}: no file has such a name; {fix}") from None


def _working_directory() -> str:
    """The directory of relative paths, for errors. It may have been deleted since the process began there."""
    try:
        return os.getcwd()
    except OSError:
        return "a directory that is gone"


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file is replaced or written, or gets another mode or owner; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid
