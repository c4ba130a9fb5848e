"""The keys with which an OpenID Connect issuer signs: from a file, or from the issuer itself.

An issuer names them at ISSUER/.well-known/openid-configuration. A thread fetches everything over HTTPS, with a deadline
and a bound on size, and follows no redirect.

Source: OpenID Connect Discovery 1.0; JSON Web Key, RFC 7517.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvpool.protocol.errors import ConfigError
from kvpool.security.certificates import read_pem
from kvpool.security.file_permissions import require_owner_writes

if TYPE_CHECKING:
    import jwt

log = structlog.get_logger()

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
        version: how often the keys have changed.
    """

    def __init__(self, issuer: str, when_read: Callable[[ConfigError | None], None] = lambda _: None):
        self._issuer = issuer
        self._when_read = when_read
        self._wanted, self._is_closed = threading.Event(), False
        self._texts: bytes = b""
        self._is_refused = False
        self.value: Keys = {}
        self.version = 0
        self._thread = threading.Thread(target=self._run, name="kvpool-jwks", daemon=True)
        self._thread.start()

    def refetch(self) -> None:
        """Asks the issuer again soon, for a token that names a key which is not known; does not wait."""
        self._wanted.set()

    def close(self) -> None:
        """Ends the thread; waits a second at most for a fetch under way."""
        self._is_closed = True
        self._wanted.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            self._wanted.clear()
            if self._is_closed:
                return
            try:
                self._fetch()
                rest_s = REFETCH_S
            except ConfigError as error:
                self._is_refused = True
                log.warning("the keys of the OIDC issuer cannot be fetched; the server tries again", why=str(error))
                self._when_read(error)
                rest_s = RETRY_S
            self._wanted.wait(rest_s)
            while not self._is_closed and (left := began + RETRY_S - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))

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
        if is_new := text != self._texts:
            self._texts, self.value = text, keys
            self.version += 1
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
