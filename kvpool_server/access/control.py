"""Who may call a server: its own credentials and those of its callers, from files that are watched while it runs."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable, Sequence, Set
from pathlib import Path
from typing import Any

import structlog

from kvpool.protocol.errors import ConfigError, KVPoolError
from kvpool.protocol.wire import status_of
from kvpool.security.tls import TlsFiles
from kvpool.security.tokens import TokenRecord, read_records
from kvpool.security.watched_files import WatchedFiles
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.authentication import Certificates, Tokens, Who
from kvpool_server.access.caller import check_scrape
from kvpool_server.access.credential import RefusedCredentialError
from kvpool_server.access.credentials import ServerCredentials, warn_of_ends
from kvpool_server.access.deny_list import DenyList
from kvpool_server.access.identity_limits import identity_limits
from kvpool_server.access.jwks import IssuerKeys, read_keys
from kvpool_server.access.oidc import IssuedTokens, OidcRules, check_installed
from kvpool_server.access.running_calls import AccessWatch, RunningCalls
from kvpool_server.settings.config import ServerConfig

log = structlog.get_logger()

DAY_S = 24 * 3_600.0


class AccessControl:
    """The credentials of a server with TLS. Let `watch.run` and `warn` run in the background; `close` last.

    Raises ConfigError for a file that cannot be used.

    Args:
        files: of the server's certificate and, where callers have certificates, of their authorities.
        audit: gets a line for each file that is read, and for each scrape that is refused.
        expire_owned: ends the leases and tickets of some principals.

    Attributes:
        denied: the deny list; None: there is none.
        limits_of: what an identity may have at once.
        watch: of the files, which ends the calls of callers who are refused since.
    """

    def __init__(
        self,
        config: ServerConfig,
        files: TlsFiles,
        audit: AuditLog | None,
        expire_owned: Callable[[Set[str]], Awaitable[None]],
    ):
        self._config = config
        self._audit = audit
        self._issuer_keys: IssuerKeys | None = None
        self._watched: dict[str, WatchedFiles[Any]] = {}
        self.denied: DenyList | None = None
        self.credentials = ServerCredentials(files, self._when_read("certificates", *files.paths))
        self._watched["certificates"] = self.credentials
        self.limits_of = identity_limits(config.limit, self._domain)
        self.who = self._ask_who()
        self.running = RunningCalls(self.who.checked, config.max_ttl_ms / 1_000)
        self.watch = AccessWatch(tuple(self._watched.values()), self.running, expire_owned)

    @property
    def _domain(self) -> str | None:
        """The trust domain of all callers; None: the server's own tokens may be of any."""
        return None if self._config.tokens else self._config.trust_domain

    def _ask_who(self) -> Who:
        """Callers with certificates, with tokens of the server's file, or with tokens of an issuer."""
        config, denied = self._config, None
        if path := config.deny:
            self.denied = denied = DenyList(path, self._when_read("deny list", path), self._domain)
            self._watched["deny list"] = denied
        if path := config.tokens:
            tokens = WatchedFiles([path], lambda: _read_tokens(path), when_read=self._when_read("tokens", path))
            self._watched["tokens"] = tokens
            return Tokens(tokens, denied)
        if config.oidc_issuer:
            return self._ask_issuer(denied)
        return Certificates(denied, config.trust_domain)

    def _ask_issuer(self, denied: DenyList | None) -> Who:
        """Callers with tokens of an OpenID Connect issuer, whose keys are in a file or are fetched."""
        config = self._config
        rules = OidcRules(config.oidc_issuer, config.oidc_audience, config.oidc_tenant_claim, config.oidc_role_claim)
        check_installed()
        if path := config.oidc_jwks:
            when_read = self._when_read("issuer's keys", path)
            file = WatchedFiles([path], lambda: read_keys(path), when_read=when_read)
            self._watched["issuer's keys"] = file
            return IssuedTokens(rules, lambda: file.value, denied=denied)
        keys = IssuerKeys(config.oidc_issuer, self._when_read("issuer's keys", config.oidc_issuer))
        self._issuer_keys = keys
        return IssuedTokens(rules, lambda: keys.value, keys.refetch, denied)

    def _when_read(self, what: str, *paths: str) -> Callable[[ConfigError | None], None]:
        audit = self._audit
        return lambda error: audit.read(what, paths, error) if audit is not None else None

    async def warn(self) -> None:
        """Warns once a day of certificates that end soon, until cancelled."""
        while True:
            await asyncio.sleep(DAY_S)  # `credentials` has warned when it read the files.
            warn_of_ends(self.credentials.value.tls, dt.datetime.now(dt.UTC))

    def refused_files(self) -> dict[str, bool]:
        """Whether watched files cannot be used as they are now, by what they hold. Thread-safe."""
        return {what: files.is_refused for what, files in self._watched.items()}

    def check_scrape(self, path: str, address: str, certificate: bytes | None, authorization: Sequence[str]) -> None:
        """Raises UnauthenticatedError and PermissionDeniedError for a client that may not read the server's numbers.

        HTTP's threads call it. The arguments are those of `http.Gate`.
        """
        caller = None
        try:
            caller = self.who.of_request(certificate, authorization).principal
            check_scrape(caller, path)
        except KVPoolError as error:
            if self._audit is not None:
                caller = error.principal if isinstance(error, RefusedCredentialError) else caller
                status = status_of(error).name
                self._audit.write(path, status, caller=caller, peer=address, why=str(error))
            raise

    def close(self) -> None:
        """Ends the thread that fetches an issuer's keys; blocks for a second at most."""
        if self._issuer_keys is not None:
            self._issuer_keys.close()


def _read_tokens(path: str) -> dict[str, TokenRecord]:
    records = read_records(Path(path))
    if not records:
        log.warning("the file of tokens has no token, so nobody can call; make one: kvpool token create", path=path)
    return records
