"""Callers that are authenticated by a JWT of an OpenID Connect issuer, sent as a bearer token.

The issuer's keys are in a file, or are fetched from the issuer, which names them at
ISSUER/.well-known/openid-configuration. A thread fetches everything over HTTPS, with a deadline and a bound on size,
and follows no redirect.

Source: JSON Web Token, RFC 7519, and its best current practices, RFC 8725; JSON Web Key, RFC 7517; OpenID Connect
Discovery 1.0.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvpool.protocol.errors import ConfigError, InvalidRequestError, UnauthenticatedError
from kvpool.security.files import read_pem, require_owner_writes
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool_server.access.authentication import Credential, DenyList, RefusedCredentialError, Who, bearer_token
from kvpool_server.settings.config import ServerConfig

if TYPE_CHECKING:
    import jwt

log = structlog.get_logger()

SKEW_S = 60
"""How far the clocks of issuer and server may differ."""
MAX_TOKEN_BYTES = 12 << 10
MAX_REMEMBERED = 4_096
"""Tokens whose signatures are not verified again, because every call shows the same one."""
ALGORITHMS = frozenset({"RS256", "ES256", "EdDSA"})
MAX_BYTES = 256 << 10
"""Of each answer of an issuer."""
MAX_KEYS = 64
FETCH_S = 10.0
"""How long an issuer may take for each answer."""
REFETCH_S = 600.0
RETRY_S = 30.0
"""How soon after a failure, or for a key that is not known, the issuer is asked again."""
_PIECE_BYTES = 16 << 10

Keys = Mapping[str, "jwt.PyJWK"]
"""By key id; empty for a key without one."""


@dataclass(frozen=True, slots=True)
class IssuedCredential(Credential):
    """A token whose signature was verified, with the key that did so and the key's id.

    Its digest is that of the signed part (header and claims): the same signature can be written in several ways.
    """

    key_id: str
    key: jwt.PyJWK = field(compare=False)


class IssuedTokens(Who):
    """Callers with tokens of one issuer. Owned by the event loop; HTTP's threads may call it, too.

    Args:
        config: names the issuer and the audience, exactly as tokens have them, and the claims of tenant and role.
        refetch: called for a token that names a key which is not known.
    """

    def __init__(
        self,
        config: ServerConfig,
        keys: Callable[[], Keys],
        refetch: Callable[[], None] = lambda: None,
        denied: DenyList | None = None,
    ):
        super().__init__(denied)
        self._config = config
        self._keys = keys
        self._refetch = refetch
        self._verified: dict[str, IssuedCredential] = {}  # By the digest of the whole token, with its signature.

    def of_request(self, certificate: bytes | None, authorization: Sequence[str]) -> Credential:
        token = bearer_token(authorization)
        if len(token) > MAX_TOKEN_BYTES:
            raise UnauthenticatedError(f"the call's token is longer than {MAX_TOKEN_BYTES} bytes")
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self._verified.get(digest)
        if known is None or not self._is_in_force(known):
            known = self._verify(token)
            if len(self._verified) >= MAX_REMEMBERED:
                kept = {name: each for name, each in self._verified.items() if not each.has_ended}
                self._verified = dict(list(kept.items())[-MAX_REMEMBERED // 2 :])
            self._verified[digest] = known
        return self.checked(known)

    def _check(self, credential: Credential) -> None:
        if credential.has_ended:
            raise RefusedCredentialError("the call's token has ended; get another from the issuer", credential)
        assert isinstance(credential, IssuedCredential), "a credential is of the one who made it"
        if not self._is_in_force(credential):
            raise RefusedCredentialError(
                "the issuer has withdrawn the key of the call's token; get another token", credential
            )

    def _is_in_force(self, credential: IssuedCredential) -> bool:
        """Whether the issuer still has the key of a token; another one may have its id."""
        found = self._keys().get(credential.key_id)
        return found is credential.key or (found is not None and found.key == credential.key.key)

    def _verify(self, token: str) -> IssuedCredential:
        import jwt

        keys = self._keys()
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid", ""))
            if key_id not in keys:
                self._refetch()
                raise UnauthenticatedError("the call's token names a key that its issuer does not have, or not yet")
            claims = jwt.decode(
                token,
                keys[key_id],
                algorithms=sorted(ALGORITHMS),
                issuer=self._config.oidc_issuer,
                audience=self._config.oidc_audience,
                leeway=SKEW_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            ends_at = dt.datetime.fromtimestamp(float(claims["exp"]) + SKEW_S, dt.UTC)
            digest = hashlib.sha256(token.rpartition(".")[0].encode()).hexdigest()
            return IssuedCredential(self._principal(claims), digest, ends_at, key_id, keys[key_id])
        except (jwt.PyJWTError, InvalidRequestError, ValueError, OverflowError, OSError, RecursionError) as error:
            raise UnauthenticatedError(f"the call's token is not valid: {error}") from None

    def _principal(self, claims: dict[str, object]) -> Principal:
        role_claim, tenant_claim = self._config.oidc_role_claim, self._config.oidc_tenant_claim
        role, tenant = claims.get(role_claim), claims.get(tenant_claim, ALL_TENANTS)
        if role not in list(Role):
            raise InvalidRequestError(f"its claim {role_claim} is not one of the roles {', '.join(Role)}")
        if not isinstance(tenant, str):
            raise InvalidRequestError(f"its claim {tenant_claim} is not a tenant's name")
        return Principal(tenant, Role(str(role)))


def check_installed() -> None:
    """Raises ConfigError if PyJWT is not installed."""
    try:
        import jwt  # noqa: F401
    except ImportError:
        raise ConfigError("--oidc-issuer needs PyJWT, which is not installed: pip install 'pyjwt[crypto]'") from None


def parse_keys(text: bytes, source: str) -> Keys:
    """The keys of a JWKS document for `ALGORITHMS`; none if all are withdrawn. Raises ConfigError for another text."""
    import jwt

    try:
        listed = json.loads(text)["keys"]
        if not isinstance(listed, list):
            raise ValueError
        found = {}
        for fields in listed[:MAX_KEYS]:
            if fields.get("kty") == "oct" or fields.get("use", "sig") != "sig":
                continue
            try:
                key = jwt.PyJWK(fields)
            except jwt.PyJWTError:
                continue  # Of an algorithm that this library does not know.
            if key.algorithm_name in ALGORITHMS:
                found[str(fields.get("kid", ""))] = key
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{source} is not a JSON Web Key Set: an object with a list of keys") from None
    if not found:
        log.warning(f"no key signs with {', '.join(sorted(ALGORITHMS))}, so nobody can call", source=source)
    return found


def read_keys(path: str) -> Keys:
    """The keys of a file. Raises ConfigError, also for a file that its group or others can write."""
    require_owner_writes(path, "add a key that signs tokens", "--oidc-jwks")
    return parse_keys(read_pem(Path(path)), path)


class IssuerKeys:
    """The keys of an issuer, fetched now and again by a thread. Thread-safe.

    The server starts while the issuer is away, and keeps the keys that it has.

    Args:
        issuer: https://…
        when_read: called after each fetch that changed something or failed, and after the first that succeeds again.

    Attributes:
        value: the keys; empty before the first answer.
    """

    def __init__(self, issuer: str, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        self._issuer = issuer
        self._when_read = when_read
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._text = b""
        self._is_refused = False
        self.value: Keys = {}
        self._thread = threading.Thread(target=self._run, name="kvpool-jwks", daemon=True)
        self._thread.start()

    def refetch(self) -> None:
        """Asks the issuer again soon, for a token that names a key which is not known; does not wait."""
        self._wanted.set()

    def close(self) -> None:
        """Ends the thread; waits a second at most for a fetch under way."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.clear()
            try:
                self._fetch()
                rest_s = REFETCH_S
            except ConfigError as error:
                self._is_refused = True
                log.warning("the keys of the OIDC issuer cannot be fetched; the server tries again", why=str(error))
                self._when_read(error)
                rest_s = RETRY_S
            if not self._closed.wait(RETRY_S):
                self._wanted.wait(rest_s - RETRY_S)

    def _fetch(self) -> None:
        """Raises ConfigError."""
        discovery = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            found = json.loads(_get(discovery))
            issuer, uri = str(found["issuer"]), str(found["jwks_uri"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{discovery} is not an object with issuer and jwks_uri") from None
        if issuer != self._issuer:
            raise ConfigError(f"{discovery} is of another issuer, {issuer!r}; give that as --oidc-issuer")
        text = _get(uri)
        keys = parse_keys(text, uri)
        was_refused, self._is_refused = self._is_refused, False
        if is_new := text != self._text:
            self._text, self.value = text, keys
        if was_refused:
            log.info("the keys of the OIDC issuer can be fetched again", issuer=self._issuer)
        if is_new or was_refused:
            self._when_read(None)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _get(url: str) -> bytes:
    """What a URL holds, within `FETCH_S` and `MAX_BYTES`. Raises ConfigError."""
    if not url.startswith("https://"):
        raise ConfigError(f"{url!r} is not https: whoever is on the network could name other keys")
    ends_at, text = time.monotonic() + FETCH_S, bytearray()
    try:
        with urllib.request.build_opener(_NoRedirects).open(url, timeout=FETCH_S) as answer:
            while piece := answer.read1(_PIECE_BYTES):
                text += piece
                if len(text) > MAX_BYTES:
                    raise ConfigError(f"{url} holds more than {MAX_BYTES} bytes")
                if time.monotonic() > ends_at:
                    raise ConfigError(f"{url} did not answer within {FETCH_S:g} s")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"cannot read {url}: {error}") from None
    return bytes(text)
