"""JWTs of an OpenID Connect issuer: what they prove, and what an issuer, or who poses as one, cannot do."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.protocol.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from kvpool.security.certificates import Authority
from kvpool.security.principal import Principal, Role
from kvpool.security.tls import TlsFiles
from kvpool_server.access import oidc
from kvpool_server.access.authentication import DenyList
from kvpool_server.access.oidc import (
    MAX_TOKEN_BYTES,
    SKEW_S,
    IssuedTokens,
    IssuerKeys,
    Keys,
    check_installed,
    parse_keys,
)
from kvpool_server.settings.config import ServerConfig
from tests.conftest import StartServer
from tests.support.calls import is_heard
from tests.support.certificates import files_in
from tests.support.processes import wait_for
from tests.support.values import namespace_spec, run_of

AUDIENCE = "kvpool"
KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65_537, 2_048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
"""By algorithm, which is also the key's id."""
HOUR_S = 3_600


def _document(*algorithms: str) -> dict[str, Any]:
    makers = {"RS256": jwt.algorithms.RSAAlgorithm, "ES256": jwt.algorithms.ECAlgorithm}
    listed = []
    for algorithm in algorithms:
        maker = makers.get(algorithm, jwt.algorithms.OKPAlgorithm)
        listed.append({**maker.to_jwk(KEYS[algorithm].public_key(), as_dict=True), "kid": algorithm, "use": "sig"})
    return {"keys": listed}


def _claims(issuer: str, **changed: Any) -> dict[str, Any]:
    claims = {
        "iss": issuer, "aud": AUDIENCE, "exp": int(time.time()) + HOUR_S, "sub": "pod",
        "kvpool_tenant": "acme", "kvpool_role": "engine-write",
    }  # fmt: skip
    return {name: value for name, value in {**claims, **changed}.items() if value is not None}


def _token(issuer: str, algorithm: str = "ES256", kid: str = "", key: Any = None, **changed: Any) -> str:
    signing = KEYS[algorithm] if key is None else key
    return jwt.encode(_claims(issuer, **changed), signing, algorithm, headers={"kid": kid or algorithm})


class Issuer:
    """An HTTPS server with a discovery document and keys. `answers` may change what a path gives."""

    def __init__(self, directory: Path):
        self.files = files_in(Authority.create(directory / "pki").issue_server([]))
        self.answers: dict[str, Callable[[http.server.BaseHTTPRequestHandler], None]] = {}
        self.keys = _document(*KEYS)
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if answer := issuer.answers.get(self.path):
                    answer(self)
                elif self.path == "/.well-known/openid-configuration":
                    issuer.reply(self, {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"})
                else:
                    issuer.reply(self, issuer.keys)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.files.cert, self.files.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @staticmethod
    def reply(handler: http.server.BaseHTTPRequestHandler, document: object) -> None:
        body = json.dumps(document).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    made = Issuer(tmp_path / "issuer")
    yield made
    made.close()


class Held:
    """Keys that the test changes."""

    def __init__(self, value: Keys):
        self.value = value


URL = "https://issuer.example"


def _settings(issuer: str) -> ServerConfig:
    return ServerConfig(oidc_issuer=issuer, oidc_audience=AUDIENCE)


def _callers(held: Held, refetch: Callable[[], None] = lambda: None) -> IssuedTokens:
    return IssuedTokens(_settings(URL), lambda: held.value, refetch)


def _all_keys(*algorithms: str) -> Held:
    return Held(parse_keys(json.dumps(_document(*(algorithms or KEYS))).encode(), "keys"))


def _call(callers: IssuedTokens, token: str) -> Principal:
    return callers.of_request(None, [f"Bearer {token}"]).principal


def _respelt(token: str) -> Iterator[str]:
    """The same header and claims with another spelling of the signature, or another signature."""
    yield token + "=="
    head, _, signature = token.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    if len(raw) == 64:  # Beside the (r, s) of ECDSA on P-256, (r, order - s) is a signature, too.
        order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
        other = raw[:32] + (order - int.from_bytes(raw[32:], "big")).to_bytes(32, "big")
        yield f"{head}.{base64.urlsafe_b64encode(other).rstrip(b'=').decode()}"


@pytest.mark.parametrize("algorithm", list(KEYS))
def test_a_good_token_names_a_principal_unless_it_is_denied_however_its_signature_is_written(
    tmp_path: Path, algorithm: str
) -> None:
    token, held = _token(URL, algorithm), _all_keys()
    free = _callers(held)
    assert _call(free, token) == Principal("acme", Role.ENGINE_WRITE)
    assert _call(free, _token(URL, algorithm, aud=["other", AUDIENCE])).tenant == "acme"
    assert _call(free, _token(URL, algorithm, kvpool_role="metrics", kvpool_tenant=None)).role is Role.METRICS
    assert _call(free, _token(URL, algorithm, exp=time.time() - SKEW_S / 2)).tenant == "acme"
    (tmp_path / "deny").write_text(hashlib.sha256(token.rpartition(".")[0].encode()).hexdigest() + "\n")
    callers = IssuedTokens(_settings(URL), lambda: held.value, denied=DenyList(str(tmp_path / "deny")))
    for spelling in (token, *_respelt(token)):
        assert algorithm == "EdDSA" or _call(free, spelling)
        with pytest.raises(UnauthenticatedError):
            _call(callers, spelling)
    assert _call(callers, _token(URL, algorithm, sub="another pod"))


def _public_pem(algorithm: str) -> bytes:
    return bytes(
        KEYS[algorithm].public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )  # fmt: skip


def _unsigned() -> str:
    parts = [{"alg": "none", "typ": "JWT", "kid": "RS256"}, _claims(URL)]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def _signed_with_a_public_key() -> str:
    """As HS256, whose secret everybody knows: a verifier that believes the header is deceived."""
    parts = [{"alg": "HS256", "typ": "JWT", "kid": "RS256"}, _claims(URL)]
    text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    mac = hmac.digest(_public_pem("RS256"), text, hashlib.sha256)
    return (text + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


BAD: dict[str, Callable[[], str]] = {
    "another issuer": lambda: _token("https://other.example"),
    "an issuer that begins alike": lambda: _token(URL + ".evil"),
    "no issuer": lambda: _token(URL, iss=None),
    "no audience": lambda: _token(URL, aud=None),
    "a list of roles": lambda: _token(URL, kvpool_role=["engine-write"]),
    "metrics of one tenant": lambda: _token(URL, kvpool_role="metrics"),
    "another audience": lambda: _token(URL, aud="somebody"),
    "ended": lambda: _token(URL, exp=int(time.time()) - SKEW_S - 5),
    "no end": lambda: _token(URL, exp=None),
    "not yet": lambda: _token(URL, nbf=int(time.time()) + SKEW_S + 60),
    "another key": lambda: _token(URL, key=ec.generate_private_key(ec.SECP256R1())),
    "a key of another algorithm": lambda: _token(URL, "ES256", kid="EdDSA"),
    "an algorithm that is not allowed": lambda: jwt.encode(_claims(URL), KEYS["RS256"], "PS256", {"kid": "RS256"}),
    "an unknown key": lambda: _token(URL, kid="new"),
    "no algorithm": _unsigned,
    "a public key as a secret": _signed_with_a_public_key,
    "no role": lambda: _token(URL, kvpool_role=None),
    "a role that is none": lambda: _token(URL, kvpool_role="root"),
    "no tenant": lambda: _token(URL, kvpool_tenant=None),
    "a tenant that is none": lambda: _token(URL, kvpool_tenant="../umbra"),
    "a number as tenant": lambda: _token(URL, kvpool_tenant=7),
    "an operator of one tenant": lambda: _token(URL, kvpool_role="operator"),
    "an end beyond all time": lambda: _token(URL, exp=10**15),
    "an end that the system's clock cannot have": lambda: jwt.PyJWS().encode(
        json.dumps(_claims(URL, exp=1e18)).encode(), KEYS["ES256"], "ES256", {"kid": "ES256"}
    ),
    "an end that is no number": lambda: jwt.PyJWS().encode(
        json.dumps(_claims(URL, exp=[])).encode(), KEYS["ES256"], "ES256", {"kid": "ES256"}
    ),
    "too long": lambda: _token(URL, more="x" * MAX_TOKEN_BYTES),
    "nothing": lambda: "",
    "not ASCII": lambda: "ä.ö.ü",
}


@pytest.mark.parametrize("fault", list(BAD))
def test_a_token_that_is_not_good(fault: str) -> None:
    callers = _callers(_all_keys())
    token = BAD[fault]()
    with pytest.raises(UnauthenticatedError) as raised:
        _call(callers, token)
    assert not token or token not in str(raised.value)


@given(st.integers(0, 2), st.integers(0, 10_000), st.characters(codec="ascii"))
def test_no_changed_token_names_another_principal(part: int, at: int, char: str) -> None:
    callers = _callers(_all_keys("ES256"))
    parts = _token(URL).split(".")
    at %= len(parts[part])
    parts[part] = parts[part][:at] + char + parts[part][at + 1 :]
    try:
        found = _call(callers, ".".join(parts))
    except UnauthenticatedError:
        return
    assert found == Principal("acme", Role.ENGINE_WRITE)  # The last bits of a part mean nothing.


def test_a_token_is_good_no_longer_than_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "MAX_REMEMBERED", 2)
    held, asked = _all_keys(), []
    callers = _callers(held, lambda: asked.append(1))
    headers = {each: [f"Bearer {_token(URL, each)}"] for each in ("ES256", "EdDSA")}
    replaced, withdrawn = (callers.of_request(None, header) for header in headers.values())
    for sub in "abc":  # The server forgets the first tokens.
        _call(callers, _token(URL, "RS256", sub=sub))
    assert (callers.checked(replaced), callers.checked(withdrawn)) == (replaced, withdrawn)
    document, maker = _document("RS256"), jwt.algorithms.ECAlgorithm
    other = maker.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
    document["keys"].append({**other, "kid": "ES256", "use": "sig"})
    held.value = parse_keys(json.dumps(document).encode(), "keys")
    for credential in (replaced, withdrawn):
        with pytest.raises(UnauthenticatedError, match="withdrawn"):
            callers.checked(credential)
    with pytest.raises(UnauthenticatedError, match="not valid"):
        callers.of_request(None, headers["ES256"])
    assert not asked
    with pytest.raises(UnauthenticatedError, match="does not have"):
        callers.of_request(None, headers["EdDSA"])
    assert asked == [1]
    assert _call(callers, _token(URL, "RS256"))


def test_a_token_that_ends_is_found_out_although_it_is_remembered() -> None:
    callers = _callers(_all_keys())
    header = [f"Bearer {_token(URL, exp=int(time.time()) - SKEW_S + 5)}"]
    credential = callers.of_request(None, header)
    wait_for(lambda: credential.has_ended, "its end")
    for ask in (lambda: callers.of_request(None, header), lambda: callers.checked(credential)):
        with pytest.raises(UnauthenticatedError, match="has ended"):
            ask()


def test_keys_that_sign_nothing_are_left_out() -> None:
    document = _document(*KEYS)
    document["keys"] += [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"},
        {**document["keys"][0], "kid": "encrypts", "use": "enc"},
        {**document["keys"][0], "kid": "other", "alg": "RS512"},
        {"kty": "what", "kid": "unknown"},
    ]
    assert set(parse_keys(json.dumps(document).encode(), "keys")) == set(KEYS)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), lambda each: st.lists(each, min_size=1)).map(
    lambda value: json.dumps({"keys": value}).encode()
))  # fmt: skip
def test_what_is_no_key_set_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_keys(text, "keys")


class Fetched:
    """Keys of an issuer, fetched every few milliseconds, and what went wrong."""

    def __init__(self, url: str):
        self.errors: list[str] = []
        self.num_good = 0
        self.keys = IssuerKeys(url, self._when_read)

    def _when_read(self, error: ConfigError | None) -> None:
        if error is None:
            self.num_good += 1
        else:
            self.errors.append(str(error))

    def fails(self, told: str) -> None:
        wait_for(lambda: any(told in error for error in self.errors), told)
        self.errors.clear()


@pytest.fixture
def fetched(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetched]:
    monkeypatch.setenv("SSL_CERT_FILE", issuer.files.ca)
    for name, seconds in (("RETRY_S", 0.05), ("REFETCH_S", 0.05), ("FETCH_S", 0.5)):
        monkeypatch.setattr(oidc, name, seconds)
    made = Fetched(issuer.url)
    yield made
    made.keys.close()


def test_keys_are_fetched_again_and_faults_leave_them_in_force(issuer: Issuer, fetched: Fetched) -> None:
    keys = fetched.keys
    wait_for(lambda: set(keys.value) == set(KEYS), "the first keys")
    document = issuer.keys
    callers = IssuedTokens(_settings(issuer.url), lambda: keys.value)
    credential = callers.of_request(None, [f"Bearer {_token(issuer.url)}"])
    issuer.keys = {"keys": "none"}
    for _ in range(2):
        fetched.fails("not a JSON Web Key Set")
    issuer.keys = {"keys": ["x" * oidc.MAX_BYTES]}
    fetched.fails("more than")

    def redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"{issuer.url}/elsewhere")
        handler.end_headers()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            pass

    issuer.answers["/keys"] = redirect
    fetched.fails("302")
    issuer.answers["/keys"] = drip
    fetched.fails("did not answer within")
    discovery = "/.well-known/openid-configuration"
    del issuer.answers["/keys"]
    issuer.answers[discovery] = lambda to: issuer.reply(to, {"issuer": "https://other", "jwks_uri": issuer.url})
    fetched.fails("another issuer")
    plain = issuer.url.replace("https", "http")
    issuer.answers[discovery] = lambda to: issuer.reply(to, {"issuer": issuer.url, "jwks_uri": plain})
    fetched.fails("not https")
    assert set(keys.value) == set(KEYS)
    asked: list[None] = []

    def count(handler: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(None)
        issuer.reply(handler, {"keys": document["keys"][:1]})

    with capture_logs() as logs:
        issuer.answers = {"/keys": count}
        wait_for(lambda: set(keys.value) == {"RS256"}, "the keys that are left")
        wait_for(lambda: len(asked) >= 3, "further fetches")
        assert fetched.num_good == 2
        issuer.keys, issuer.answers = {"keys": []}, {}
        wait_for(lambda: not keys.value, "the end of the keys")
    told = [line["event"] for line in logs if line["log_level"] == "info"]
    assert told == ["the keys of the OIDC issuer can be fetched again"]
    assert any("nobody can call" in line["event"] for line in logs)
    with pytest.raises(UnauthenticatedError, match="withdrawn"):
        callers.checked(credential)


def test_an_issuer_with_another_certificate_is_not_believed(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "RETRY_S", 0.05)
    made = Fetched(issuer.url)
    try:
        made.fails("CERTIFICATE_VERIFY_FAILED")
        assert made.keys.value == {}
    finally:
        made.keys.close()


def test_engines_come_with_tokens_of_an_issuer(pool_server: StartServer, issuer: Issuer, tmp_path: Path) -> None:
    files, file = issuer.files, tmp_path / "token"
    file.write_text(_token(issuer.url))
    file.chmod(0o600)
    flags = ("--tls-cert", files.cert, "--tls-key", files.key)
    oidc = ("--oidc-issuer", issuer.url, "--oidc-audience", AUDIENCE)
    server = pool_server(
        *flags, *oidc, environment={"SSL_CERT_FILE": files.ca}, tls=TlsFiles(files.ca), token_file=str(file)
    )

    def config() -> ClientConfig:
        return ClientConfig(server.endpoint, tls=TlsFiles(files.ca), token_file=str(file), timeout_ms=10_000)

    with Client(config()) as client:
        wait_for(lambda: is_heard(client), "the issuer's keys to be fetched")
        found = client.admin.whoami()
        assert found.principal == str(Principal("acme", Role.ENGINE_WRITE))
        assert abs(found.ends_at - time.time() - HOUR_S - SKEW_S) < 60
        client.open_namespace(namespace_spec(tenant="acme"))
        with pytest.raises(PermissionDeniedError, match="give tenant 'acme'"):
            client.open_namespace(namespace_spec(tenant="umbra"))
        assert client.lookup(client.open_namespace(namespace_spec(tenant="acme")), [run_of("x")])
    file.write_text(_token(issuer.url, aud="somebody"))
    file.chmod(0o600)
    with Client(config()) as client, pytest.raises(UnauthenticatedError, match="not valid"):
        client.admin.ping()


def test_without_pyjwt_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'pyjwt\[crypto\]'"):
        check_installed()
