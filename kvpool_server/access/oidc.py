"""Callers that are authenticated by a JWT of an OpenID Connect issuer, sent as a bearer token.

Source: JSON Web Token, RFC 7519, and its best current practices, RFC 8725.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.protocol.errors import ConfigError, InvalidRequestError, UnauthenticatedError
from kvpool.security.principal import ALL_TENANTS, Principal, Role
from kvpool_server.access.authentication import Who, bearer_token
from kvpool_server.access.credential import Credential, RefusedCredentialError
from kvpool_server.access.deny_list import DenyList
from kvpool_server.access.jwks import ALGORITHMS, Keys

if TYPE_CHECKING:
    import jwt

SKEW_S = 60
"""How far the clocks of issuer and server may differ."""
MAX_TOKEN_BYTES = 12 << 10
MAX_REMEMBERED = 4_096
"""Tokens whose signatures are not verified again, because every call shows the same one."""


@dataclass(frozen=True, slots=True)
class OidcRules:
    """What a token must contain.

    Args:
        issuer, audience: the exact values of the claims iss and aud.
        tenant_claim, role_claim: the claims with a principal's tenant and role.
    """

    issuer: str
    audience: str
    tenant_claim: str
    role_claim: str


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
        keys: returns those of the issuer.
        refetch: called for a token that names a key which is not known.
    """

    def __init__(
        self,
        rules: OidcRules,
        keys: Callable[[], Keys],
        refetch: Callable[[], None] = lambda: None,
        denied: DenyList | None = None,
    ):
        super().__init__(denied)
        self._rules = rules
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

        rules, keys = self._rules, self._keys()
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid", ""))
            if key_id not in keys:
                self._refetch()
                raise UnauthenticatedError("the call's token names a key that its issuer does not have, or not yet")
            claims = jwt.decode(
                token,
                keys[key_id],
                algorithms=sorted(ALGORITHMS),
                issuer=rules.issuer,
                audience=rules.audience,
                leeway=SKEW_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            ends_at = dt.datetime.fromtimestamp(float(claims["exp"]) + SKEW_S, dt.UTC)
            digest = hashlib.sha256(token.rpartition(".")[0].encode()).hexdigest()
            return IssuedCredential(self._principal(claims), digest, ends_at, key_id, keys[key_id])
        except (jwt.PyJWTError, InvalidRequestError, ValueError, OverflowError, OSError, RecursionError) as error:
            raise UnauthenticatedError(f"the call's token is not valid: {error}") from None

    def _principal(self, claims: dict[str, object]) -> Principal:
        rules = self._rules
        role, tenant = claims.get(rules.role_claim), claims.get(rules.tenant_claim, ALL_TENANTS)
        if role not in list(Role):
            raise InvalidRequestError(f"its claim {rules.role_claim} is not one of the roles {', '.join(Role)}")
        if not isinstance(tenant, str):
            raise InvalidRequestError(f"its claim {rules.tenant_claim} is not a tenant's name")
        return Principal(tenant, Role(str(role)))


def check_installed() -> None:
    """Raises ConfigError if PyJWT is not installed."""
    try:
        import jwt  # noqa: F401
    except ImportError:
        raise ConfigError("--oidc-issuer needs PyJWT, which is not installed: pip install 'pyjwt[crypto]'") from None
