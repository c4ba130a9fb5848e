"""Errors of kvpool: one class a cause, each with one gRPC status (`kvpool.protocol.wire` translates).

A miss is a value, never an error. Messages name the thing, the value and the fix.
"""

__all__ = [
    "ChecksumError", "ConfigError", "DrainingError", "IncompatibleNamespaceError", "IncompatibleReleaseError",
    "InvalidReplyError", "InvalidRequestError", "KVPoolError", "LeaseExpiredError", "OutOfSpaceError",
    "PermissionDeniedError", "PoolTimeoutError", "TransferError", "UnauthenticatedError", "UnavailableError",
    "UnknownNamespaceError",
]  # fmt: skip
"""What kvpool exports: `BusyError` is none of it, because clients call again by themselves."""

MAX_TEXT_CHARS = 4_000
"""Of an error. Some quote what a caller chose, and every error is sent and logged."""


class KVPoolError(Exception):
    """Base of every error that kvpool raises."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."


class ConfigError(KVPoolError):
    """A setting is wrong; found at start-up."""


class InvalidRequestError(KVPoolError):
    """A request is malformed: a key, a size or a batch (INVALID_ARGUMENT)."""


class UnknownNamespaceError(KVPoolError):
    """The namespace is not open on this server: open it first (NOT_FOUND)."""


class IncompatibleNamespaceError(KVPoolError):
    """Two namespaces that were to be the same differ; the message names the fields (FAILED_PRECONDITION)."""


class IncompatibleReleaseError(KVPoolError):
    """Client and server are of releases that do not work together; the message names both, and which one to upgrade
    (FAILED_PRECONDITION, kvpool-error)."""


class OutOfSpaceError(KVPoolError):
    """No room, and nothing that may be evicted; nothing changed (RESOURCE_EXHAUSTED)."""


class BusyError(OutOfSpaceError):
    """The caller has as much under way as it may at once: call again, as clients do by themselves, after the time that
    gRPC's metadata names (RESOURCE_EXHAUSTED, kvpool-error, grpc-retry-pushback-ms)."""


class LeaseExpiredError(KVPoolError):
    """A lease or a ticket is not live: expired, ended, or of another boot (ABORTED)."""


class UnavailableError(KVPoolError):
    """The server cannot be reached (UNAVAILABLE)."""


class DrainingError(UnavailableError):
    """The server refuses new leases and tickets, because it is about to stop (UNAVAILABLE, kvpool-error)."""


class PoolTimeoutError(KVPoolError):
    """The server did not answer in time (DEADLINE_EXCEEDED)."""


class TransferError(KVPoolError):
    """Bytes did not travel as they should (INTERNAL)."""


class InvalidReplyError(KVPoolError):
    """A server's reply breaks the protocol, or is more than its request allows; raised by clients, never sent."""


class ChecksumError(KVPoolError):
    """Bytes differ from their checksum (DATA_LOSS)."""


class PermissionDeniedError(KVPoolError):
    """The caller may not do this (PERMISSION_DENIED)."""


class UnauthenticatedError(KVPoolError):
    """The caller has not proved who it is (UNAUTHENTICATED)."""
