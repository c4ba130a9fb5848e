"""The caller of the running handler, the table of what each role may call (all else is denied to all), and the calls
under way by credential: those of credentials that end or are revoked are ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import structlog

from kvpool.protocol.errors import PermissionDeniedError, UnauthenticatedError
from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.files import WatchedFiles
from kvpool.security.principal import Principal, Role
from kvpool_server.access.authentication import Credential

log = structlog.get_logger()

_READ = {
    "OpenNamespace", "Lookup", "LookupStream", "Get", "GetChunks", "Release", "Verify", "Report", "Exists",
}  # fmt: skip
_WRITE = {"PutStart", "PutEnd", "PutRevoke", "PutChunks", "Hint"}
_TENANT = {"ListNamespaces", "Remove", "Clear", "ListQuotas", "Ledger", "Explain", "Value", "Hint"}
_POOL = {"Stats", "SetQuotas", "Drain"}
_ANYBODY = {"Ping", "WhoAmI"}

CALLS: dict[Role, frozenset[str]] = {
    Role.ENGINE_READ: frozenset(_ANYBODY | _READ),
    Role.ENGINE_WRITE: frozenset(_ANYBODY | _READ | _WRITE),
    Role.TENANT_OPERATOR: frozenset(_ANYBODY | _TENANT),
    Role.OPERATOR: frozenset(_ANYBODY | _READ | _WRITE | _TENANT | _POOL),
    Role.ROUTER: frozenset(_ANYBODY | {"Exists", "ListNamespaces"}),
    Role.METRICS: frozenset(_ANYBODY | {"Stats", "Value"}),
    Role.PEER: frozenset(_ANYBODY | {"Lookup", "LookupStream", "Get", "GetChunks", "Release", "Verify"}),
}
"""By role: the methods of the Pool service."""

SCRAPERS = (Role.METRICS, Role.OPERATOR)
"""Roles that may read /metrics and the dashboard's numbers, which are those of all tenants."""

CALLER: ContextVar[Principal | None] = ContextVar("kvpool caller", default=None)
"""Whose call the running handler serves; None where callers are not authenticated, and may do everything."""

LOOK_S = 1.0
"""How often calls are compared with the credentials in force."""
MAX_CALLERS = 4_096
"""Credentials that are remembered after their last call; beyond it, the one that came first is forgotten."""

_INSTEAD = {"Stats": "; a tenant-operator sees the numbers of its tenant with `kvpool namespaces`"}
"""What a caller may call in place of a method."""


def check_call(principal: Principal, method: str) -> None:
    """Raises PermissionDeniedError unless the principal's role may call a method of the Pool service."""
    if method not in CALLS[principal.role]:
        roles = [str(role) for role, methods in CALLS.items() if method in methods]
        raise PermissionDeniedError(
            f"{principal} may not call {method}: its role is {principal.role}, and the call needs "
            f"{' or '.join(roles) or 'a role that does not exist'}{_INSTEAD.get(method, '')}"
        )


def check_scrape(principal: Principal, path: str) -> None:
    """Raises PermissionDeniedError unless the principal may read a path of numbers, which are those of all tenants."""
    if principal.role not in SCRAPERS:
        raise PermissionDeniedError(f"{principal} may not read {path}; it needs role {' or '.join(SCRAPERS)}")


def own_tenant() -> str | None:
    """The caller's tenant; None for a caller that may know of all tenants."""
    caller = CALLER.get()
    return caller.tenant if caller is not None and caller.role.has_tenant else None


def check_tenant(tenant: str) -> None:
    """Raises PermissionDeniedError if the caller declares another tenant's namespace."""
    own = own_tenant()
    if own is not None and own != tenant:
        raise PermissionDeniedError(
            f"{CALLER.get()} may not open a namespace of tenant {tenant!r}; give tenant {own!r}"
        )


def check_measurement(spec: NamespaceSpec) -> None:
    """Raises PermissionDeniedError if a caller who cannot measure opens a measurement's namespace.

    The use of these namespaces is not accounted for, so engines must not have them.
    """
    if spec.is_measurement and not caller_may("Stats"):
        raise PermissionDeniedError(
            f"{CALLER.get()} may not open a namespace of model {spec.model!r}, which is for measurements of role "
            f"{Role.OPERATOR}; give the model another name"
        )


def check_all_tenants(what: str) -> None:
    """Raises PermissionDeniedError if the caller belongs to a tenant."""
    if own_tenant() is not None:
        raise PermissionDeniedError(f"{CALLER.get()} may not ask for {what}: it is for role {Role.OPERATOR}")


def is_visible(tenant: str | None) -> bool:
    """Whether the caller may know of a tenant's namespace; None: of one that is not open."""
    own = own_tenant()
    return own is None or own == tenant


def may_see_quota(subject: str) -> bool:
    """Whether the caller may know of a quota; a tenant knows of its own."""
    own = own_tenant()
    return own is None or subject == f"tenant:{own}"


def caller_may(method: str) -> bool:
    """Whether the caller's role may call a method, by which other things that a role may do are decided, too."""
    caller = CALLER.get()
    return caller is None or method in CALLS[caller.role]


class RunningCalls:
    """The calls of one server. Owned by its event loop.

    Args:
        check: raises UnauthenticatedError if a credential is not in force any more.
        hold_s: longest time that a caller may hold leases and tickets after its last call.
    """

    def __init__(
        self, check: Callable[[Credential], Credential], hold_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._check = check
        self._hold_s = hold_s
        self._clock = clock
        self._calls: dict[asyncio.Task[object], Credential] = {}
        self._ended: dict[asyncio.Task[object], UnauthenticatedError] = {}
        self._callers: dict[str, tuple[Credential, float]] = {}  # By digest -> when the last call began or ended.

    def call(self, credential: Credential) -> _Call:
        """Surrounds the call that the current task serves, which `end_refused` ends with an UnauthenticatedError."""
        return _Call(self, credential)

    def end_refused(self) -> set[str]:
        """Ends the calls whose credentials are not in force any more.

        Returns the principals of credentials that were revoked before their end, and that may have left leases and
        tickets. Those of a credential that has ended by itself are left to their deadlines: its principal goes on with
        a new one.
        """
        refused: dict[str, UnauthenticatedError] = {}
        now = self._clock()
        callers = {digest: credential for digest, (credential, _) in self._callers.items()}
        for digest, credential in (callers | {each.digest: each for each in self._calls.values()}).items():
            try:
                self._check(credential)
            except UnauthenticatedError as error:
                refused[digest] = error
        for task, credential in self._calls.items():
            refusal = refused.get(credential.digest)
            if refusal is not None and task not in self._ended:
                self._ended[task] = refusal
                task.cancel()
        taken = {
            str(credential.principal)
            for digest, credential in callers.items()
            if digest in refused and not credential.has_ended
        }
        running = {credential.digest for credential in self._calls.values()}
        self._callers = {
            digest: caller
            for digest, caller in self._callers.items()
            if digest not in refused and (digest in running or now - caller[1] <= self._hold_s)
        }
        return taken

    def _remember(self, credential: Credential) -> None:
        if credential.digest not in self._callers and len(self._callers) >= MAX_CALLERS:
            del self._callers[next(iter(self._callers))]
        self._callers[credential.digest] = credential, self._clock()


class _Call:
    """The context manager of `RunningCalls.call`: a class, because a generator would take four times as long."""

    __slots__ = ("_calls", "_credential", "_task")

    def __init__(self, calls: RunningCalls, credential: Credential):
        self._calls, self._credential = calls, credential

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._calls._calls[task] = self._credential
        self._calls._remember(self._credential)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        del self._calls._calls[self._task]
        refusal = self._calls._ended.pop(self._task, None)
        if refusal is None:
            self._calls._remember(self._credential)
        elif isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise refusal from None


async def watch_access(
    files: Sequence[WatchedFiles[Any]],
    calls: RunningCalls,
    expire_owned: Callable[[Set[str]], Awaitable[None]],
    woken: asyncio.Event,
) -> None:
    """Reads changed files, and ends the calls and holds of callers that they refuse, until cancelled.

    Args:
        files: each looks at its own interval.
        expire_owned: ends the leases and tickets of some principals.
        woken: set to have changed files read at once.
    """

    def look(at_once: bool) -> None:
        for each in files:
            each.look(at_once=at_once)

    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await woken.wait()
        at_once = woken.is_set()
        woken.clear()
        try:
            await asyncio.to_thread(look, at_once)
            if taken := calls.end_refused():
                log.warning("ended calls, leases and tickets of callers that are refused now", principals=sorted(taken))
                await expire_owned(taken)
        except Exception:
            log.exception("reading credentials failed; the server tries again", next_in_s=LOOK_S)
