"""Who may call a server: its own credentials and those of its callers, from files that are watched while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import functools
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography import x509

from kvpool.protocol.errors import ConfigError, InvalidRequestError, KVPoolError
from kvpool.protocol.wire import status_of
from kvpool.security.certificates import CertificateFacts, facts_of
from kvpool.security.curve import read_subscribers
from kvpool.security.files import Value, WatchedFiles, require_owner_writes
from kvpool.security.tls import TlsFiles, TlsIdentity, read_identity
from kvpool.security.tokens import TokenRecord, read_records
from kvpool_server.access.audit import AuditLog
from kvpool_server.access.authentication import (
    Certificates,
    DenyList,
    RefusedCredentialError,
    Tokens,
    Who,
    listed_principal,
)
from kvpool_server.access.caller import RunningCalls, check_scrape, watch_access
from kvpool_server.access.oidc import IssuedTokens, IssuerKeys, check_installed, read_keys
from kvpool_server.settings.config import ServerConfig
from kvpool_server.sharing import IdentityLimits

log = structlog.get_logger()

DAY_S = 24 * 3_600.0
MAX_LIMIT = 1 << 32
_LIMITS = tuple(each.name for each in dataclasses.fields(IdentityLimits))
SOON = dt.timedelta(days=30)
"""How long before its end a certificate is warned of."""
_SETTINGS = TlsFiles("--tls-client-ca", "--tls-cert", "--tls-key")
"""What gives a server the paths, for errors."""


class AccessControl:
    """The credentials of a server with TLS. Let `watch` and `warn` run in the background; `close` last.

    Raises ConfigError for a file that cannot be used.

    Args:
        files: of the server's certificate and, where callers have certificates, of their authorities.
        audit: gets a line for each file that is read, and for each scrape that is refused.

    Attributes:
        event_lists: the list of subscribers to KV events, and the deny list.
        watch: as `watch_access`; `woken` has it read changed files at once.
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
        self._denied: DenyList | None = None
        self.credentials = ServerCredentials(files, self._when_read("certificates", *files.paths))
        self._watched["certificates"] = self.credentials
        self.limits_of = identity_limits(config.limit, self._domain)
        self.who = self._ask_who()
        subscribers = None
        if path := config.kv_events_subscribers:
            subscribers = self._watch("subscribers", path, lambda: read_subscribers(Path(path)))
        self.event_lists = subscribers, self._denied
        self.running = RunningCalls(self.who.checked, config.max_ttl_ms / 1_000)
        self.woken = asyncio.Event()
        files_of_all = tuple(self._watched.values())
        self.watch = functools.partial(watch_access, files_of_all, self.running, expire_owned, self.woken)

    @property
    def _domain(self) -> str | None:
        """The trust domain of all callers; None: the server's own tokens may be of any."""
        return None if self._config.tokens else self._config.trust_domain

    def _ask_who(self) -> Who:
        """Callers with certificates, with tokens of the server's file, or with tokens of an OpenID Connect issuer."""
        config = self._config
        if path := config.deny:
            self._denied = DenyList(path, self._when_read("deny list", path), self._domain)
            self._watched["deny list"] = self._denied
        if path := config.tokens:
            return Tokens(self._watch("tokens", path, lambda: _read_tokens(path)), self._denied)
        if not config.oidc_issuer:
            return Certificates(self._denied, config.trust_domain)
        check_installed()
        if path := config.oidc_jwks:  # Else the issuer's keys are fetched.
            file = self._watch("issuer's keys", path, lambda: read_keys(path))
            return IssuedTokens(config, lambda: file.value, denied=self._denied)
        self._issuer_keys = keys = IssuerKeys(config.oidc_issuer, self._when_read("issuer's keys", config.oidc_issuer))
        return IssuedTokens(config, lambda: keys.value, keys.refetch, self._denied)

    def _watch(self, what: str, path: str, read: Callable[[], Value]) -> WatchedFiles[Value]:
        files = WatchedFiles([path], read, when_read=self._when_read(what, path))
        self._watched[what] = files
        return files

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


def identity_limits(texts: Sequence[str], domain: str | None) -> Callable[[str], IdentityLimits]:
    """The limits of an identity, by its SPIFFE ID, from the texts of --limit.

    `leases=2000` is a limit of all identities, and one of a single identity is
    `spiffe://kvpool.local/kvpool/acme/engine-write,leases=8000`. Raises ConfigError, which quotes the option; also for
    a name that `listed_principal` refuses: an operator who has misspelt it must not believe that a limit is in force.
    """
    given: dict[str, dict[str, int]] = {"": {}}
    for text in texts:
        try:
            name, limits = _parse_limit(text, domain)
        except InvalidRequestError as error:
            raise ConfigError(f"--limit {text}: {error}") from None
        if given.get(name):
            raise ConfigError(
                f"--limit {text}: {name or 'all identities'} have limits already; give them in one option"
            )
        given[name] = limits
    of_all = IdentityLimits(**given.pop(""))
    of_each = {name: dataclasses.replace(of_all, **limits) for name, limits in given.items()}
    return lambda name: of_each.get(name, of_all)


def _parse_limit(text: str, domain: str | None) -> tuple[str, dict[str, int]]:
    """An identity, empty for all, and its limits. Raises InvalidRequestError."""
    name, *parts = text.split(",")
    if "=" in name:
        name, parts = "", [name, *parts]
    else:
        listed_principal(name, domain)
    limits = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in _LIMITS:
            raise InvalidRequestError(f"unknown limit {key!r}; the limits are {', '.join(_LIMITS)}")
        if key in limits:
            raise InvalidRequestError(f"{key} is given twice")
        if not value.isdecimal() or not 1 <= int(value) <= MAX_LIMIT:
            raise InvalidRequestError(f"{key}={value}; give a whole number, 1 to {MAX_LIMIT}")
        limits[key] = int(value)
    if not limits:
        raise InvalidRequestError("no limit; give at least one, such as leases=2000")
    return name, limits


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server's files held when they were read; `context` is that of HTTP's connections."""

    tls: TlsIdentity
    names: tuple[str, ...]
    context: ssl.SSLContext = field(compare=False)


class ServerCredentials(WatchedFiles[ServerIdentity]):
    """What gRPC and HTTP prove to clients, and ask of them.

    Raises ConfigError for files that cannot be used, for authorities that others can write, and for a certificate that
    no client would take: one that has ended, is not valid yet, or is for clients only. Each successful reading logs the
    certificate's names and end, and warns of certificates that end soon. Connections that exist keep what they were
    made with; those made after a change get the new files.

    Args:
        files: `ca` are the authorities of clients' certificates; empty: clients have tokens.
    """

    def __init__(self, files: TlsFiles, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        self._asks_certificate = bool(files.ca)

        def tell(error: ConfigError | None) -> None:
            if error is None:
                log.info("the server's certificate", names=self.value.names, ends_at=str(self.value.tls.ends_at))
                warn_of_ends(self.value.tls, dt.datetime.now(dt.UTC))
            when_read(error)

        super().__init__(files.paths, lambda: _read_server(files), when_read=tell)

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials that require a client's certificate where the files name authorities of clients.

        For one port: gRPC asks for new files once for each port, and a second port with the same credentials gets none.
        """
        served = self.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads at each handshake: new files, or None."""
            nonlocal served
            version = self.look()
            if version == served:
                return None
            served = version
            return _configuration(self.value.tls)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.value.tls),
            changed,  # type: ignore[arg-type]  # May return None: nothing has changed.
            require_client_authentication=self._asks_certificate,
        )

    def for_http(self) -> ssl.SSLContext:
        """The context of new connections, of the files as `look` has read them: the thread that accepts reads none.

        A client's certificate is verified if there is one.
        """
        return self.value.context


def ends_of(identity: TlsIdentity) -> Mapping[str, dt.datetime]:
    """When a server's certificates end: its own (`server`), and its clients' first authority (`client_ca`)."""
    ends = {"server": identity.ends_at, "client_ca": identity.ca_ends_at}
    return {name: ends_at for name, ends_at in ends.items() if ends_at is not None}


def warn_of_ends(identity: TlsIdentity, now: dt.datetime) -> None:
    """Logs a warning for each certificate that ends within `SOON`."""
    for name, ends_at in ends_of(identity).items():
        if ends_at - now <= SOON:
            log.warning(
                "a certificate ends soon: replace its file, which needs no restart",
                certificate=name,
                ends_at=ends_at.isoformat(),
                days_left=max(0, (ends_at - now).days),
            )


def _read_server(files: TlsFiles) -> ServerIdentity:
    if files.ca:
        require_owner_writes(files.ca, "add an authority that signs callers' certificates", _SETTINGS.ca)
    tls = read_identity(files, _SETTINGS)
    assert tls.cert is not None, "`exposure.tls_files` has asked for a certificate"
    facts = _check_certificate(files.cert, x509.load_pem_x509_certificates(tls.cert)[0])
    return ServerIdentity(tls, facts.names, _context(files, tls.ca))


def _check_certificate(path: str, certificate: x509.Certificate) -> CertificateFacts:
    """What a server's certificate says. Raises ConfigError if clients would refuse it."""
    now = dt.datetime.now(dt.UTC)
    if (ended := certificate.not_valid_after_utc) <= now:
        raise ConfigError(f"the server's certificate {path} ended at {ended:%Y-%m-%d %H:%M} UTC; give a new one")
    if (begins := certificate.not_valid_before_utc) > now:
        raise ConfigError(
            f"the server's certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; set this host's clock, "
            "or give another certificate"
        )
    facts = facts_of((path,), certificate)
    if facts.use == "client":
        raise ConfigError(
            f"the certificate {path} is for clients only; give the server's, such as that of `kvpool certs init --host`"
        )
    return facts


def _configuration(tls: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert tls.cert is not None and tls.key is not None
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca)


def _context(files: TlsFiles, authorities: bytes | None) -> ssl.SSLContext:
    """Raises ConfigError for files that OpenSSL refuses, such as a pair that is none, because it is being replaced."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # A resumed session would show a certificate that was verified long ago.
    try:
        context.load_cert_chain(files.cert, files.key)
        if authorities is not None:
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))  # Comments may have any bytes.
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ValueError) as error:
        raise ConfigError(f"{' and '.join(files.paths)} cannot be used: {error}") from None
    return context
