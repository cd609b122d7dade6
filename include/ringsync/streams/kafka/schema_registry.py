"""A schema registry with Confluent's REST API, asked by Confluent's client. Messages name schemas by its ids.

The client takes a quarter of a second to import: import this module only where there is a registry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any, TypeVar

import httpx2
from authlib.integrations.base_client import OAuthError
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

from ringsync.avro.mapping import AvroRecord
from ringsync.config.section import ConfigError
from ringsync.config.sections import RegistryLogin, Tls
from ringsync.streams.sink import BrokerUnavailableError, RelayError

TIMEOUT_SECONDS = 10
_LOGIN = "kafka.schema_registry_login"
_TOLD = 500
_NO_RIGHT = {401, 403}
_NOT_THERE = 404
_REFUSED = {409, 422}
_BUSY = {408, 429}
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_OTHER_FORM = (AttributeError, KeyError, TypeError, ValueError)
"""What the client raises if an answer is in another form than it expects."""

T = TypeVar("T")


class SchemaRegistry:
    """A schema registry, for all topics and threads of a process. No connection stays open, since it is asked seldom.

    Secrets and certificates are read again after each error.

    :param url: root URL, e.g. ``http://registry:8081``
    :param tls: authorities that an ``https`` registry is verified by, and our certificate; None: certifi's, and none
    :param login: None: no login
    :param compatibility: of new subjects; None: the registry's default
    """

    def __init__(
        self,
        url: str,
        tls: Tls | None = None,
        login: RegistryLogin | None = None,
        compatibility: str | None = "BACKWARD",
    ) -> None:
        self.url = url.rstrip("/")
        self._tls = tls or Tls()
        self._login = login
        self._compatibility = compatibility
        self._client: SchemaRegistryClient | None = None
        self._ids: dict[tuple[str, str], int] = {}

    def register(self, subject: str, schema: AvroRecord) -> int:
        """Register a schema as the subject's newest version, and return its id. A new subject gets its compatibility.

        :raises RelayError: the schema is not compatible with the version before, or not allowed; or the login is wrong
        :raises BrokerUnavailableError: the registry does not answer, or the answer is not a registry's
        :raises ConfigError: a secret cannot be read
        """
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if (subject, text) not in self._ids:
            with self._asked(subject) as client:
                self._ids[subject, text] = _register(client, subject, Schema(text), self._compatibility)
        return self._ids[subject, text]

    def subjects(self) -> list[str]:
        """List the subjects; the errors are those of :meth:`register`."""
        with self._asked("its subjects") as client:
            if self._login and self._login.oauth:
                client.get_subjects()  # only a second request looks at the token's end
            return _listed(client.get_subjects())

    @contextmanager
    def _asked(self, what: str) -> Iterator[SchemaRegistryClient]:
        """Explain the errors of asking for something. An error ends the client, and so the token that it has."""
        client = self._client = self._client or self._connect()
        try:
            yield client
        except (httpx2.HTTPError, httpx2.InvalidURL, OAuthTokenError, SchemaRegistryError, *_OTHER_FORM) as error:
            self._client = None
            raise self._explained(error, what) from error

    def _connect(self) -> SchemaRegistryClient:
        files = {}
        if self._tls.ca_file:
            files["ssl.ca.location"] = self._tls.ca_file
        if self._tls.certificate_file:
            files["ssl.certificate.location"] = self._tls.certificate_file
        if self._tls.key_file:
            files["ssl.key.location"] = self._tls.key_file
        login = _login_settings(self._login) if self._login else {}
        if self._tls.certificate_file:
            password = self._tls.key_password
            # Without a passphrase, a key that has one would be asked for on the terminal.
            login["ssl.key.password"] = password.resolve("kafka.tls.key_password") if password else "none"
        try:
            client = SchemaRegistryClient({"url": self.url, "timeout": TIMEOUT_SECONDS, **files, **login})
        except OSError as error:
            raise BrokerUnavailableError(
                f"the certificates of kafka.tls cannot be used ({', '.join(files.values())}): {error}; a key with a "
                "passphrase needs kafka.tls.key_password"
            ) from error
        except (ImportError, ValueError) as error:
            raise RelayError(
                f"{self.url} cannot be asked: {error}; check kafka.schema_registry_url, and the variables HTTP_PROXY "
                "and HTTPS_PROXY of the environment"
            ) from error
        # The client has no setting for it.
        client._rest_client.session.headers["Connection"] = "close"
        return client

    def _explained(self, error: Exception, what: str) -> RelayError:
        if isinstance(error, OAuthTokenError):
            return self._without_token(error)
        if isinstance(error, SchemaRegistryError):
            status, told = error.http_status_code, f"{error.http_status_code}: {str(error.error_message)[:_TOLD]}"
            if status in _NO_RIGHT:
                return RelayError(
                    f"the schema registry {self.url} refuses our login for {what}: {told}; check {self._login_key}, "
                    "and the rights of this login"
                )
            if status in _REFUSED or (_is_own(error) and _is_refusal(status)):
                return RelayError(
                    f"the schema registry {self.url} refuses a request for {what}: {told}. If this version is not "
                    "compatible, and readers of the topic can do without that, lower the compatibility of this subject"
                )
            return BrokerUnavailableError(f"the schema registry {self.url} fails: {told}")
        if isinstance(error, httpx2.LocalProtocolError):  # its text may be the header with the secret
            return RelayError(
                f"a request to the schema registry {self.url} cannot be sent with this login: check {self._login_key} "
                "for characters that no header may have"
            )
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx2.InvalidURL):
            return RelayError(f"{self.url} cannot be asked: {reason}; check kafka.schema_registry_url")
        if extract_tb(error.__traceback__)[-1].name == "token_expired":
            assert self._login
            assert self._login.oauth
            return RelayError(
                f"the token server {self._login.oauth.token_url} does not say in expires_in, as a number of seconds, "
                f"how long its token is valid ({reason}); check {self._login_key}"
            )
        if isinstance(error, httpx2.HTTPError):
            return BrokerUnavailableError(f"the schema registry {self.url} does not answer: {reason}")
        if isinstance(error, json.JSONDecodeError):
            return BrokerUnavailableError(f"the server at {self.url} does not answer in JSON: {error.doc[:_TOLD]}")
        return BrokerUnavailableError(f"the answer of {self.url} for {what} is no registry's: {reason}")

    def _without_token(self, error: OAuthTokenError) -> RelayError:
        assert self._login
        assert self._login.oauth
        cause = error.__context__  # the client wraps it without naming it
        where = f"the token server {self._login.oauth.token_url}"
        told = f"{str(cause).partition(chr(10))[0]}; check {self._login_key}"
        is_page = isinstance(cause, httpx2.HTTPStatusError) and _is_refusal(cause.response.status_code)
        if is_page or isinstance(cause, OAuthError):
            return RelayError(f"{where} refuses us: {told}")
        return BrokerUnavailableError(f"{where} gives no token: {type(cause).__name__}: {told}")

    @property
    def _login_key(self) -> str:
        """The configuration key to look at when the login fails."""
        parts = (self._login and [name for name in ("password", "token", "oauth") if getattr(self._login, name)]) or []
        return ".".join([_LOGIN, *parts])


def _login_settings(login: RegistryLogin) -> dict[str, str]:
    """Return the client's settings for a login, with its secrets."""
    if login.password:
        return {"basic.auth.user.info": f"{login.username}:{login.password.resolve(f'{_LOGIN}.password')}"}
    # The client wants a cluster and a scope, if only empty ones.
    settings = {"bearer.auth.logical.cluster": login.logical_cluster or ""}
    if login.identity_pool_id:
        settings["bearer.auth.identity.pool.id"] = login.identity_pool_id
    if login.token:
        token = login.token.resolve(f"{_LOGIN}.token")
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{_LOGIN}.token: the token is empty, or has characters that no token may have, e.g. a space or the "
                "end of a line (RFC 6750)"
            )
        return settings | {"bearer.auth.credentials.source": "STATIC_TOKEN", "bearer.auth.token": token}
    assert login.oauth
    return settings | {
        "bearer.auth.credentials.source": "OAUTHBEARER",
        "bearer.auth.issuer.endpoint.url": login.oauth.token_url,
        "bearer.auth.client.id": login.oauth.client_id,
        "bearer.auth.client.secret": login.oauth.client_secret.resolve(f"{_LOGIN}.oauth.client_secret"),
        "bearer.auth.scope": login.oauth.scope or "",
    }


def _register(client: SchemaRegistryClient, subject: str, schema: Schema, compatibility: str | None) -> int:
    """Register a schema. The compatibility of a subject that has a version or a setting is its owner's."""
    compatible = partial(client.set_compatibility, subject, compatibility)
    is_new = (
        compatibility is not None
        and not _listed(_if_there(partial(client.get_versions, subject)) or [])
        and _if_there(partial(client.get_compatibility, subject)) is None
    )
    # First, so that a kill leaves no subject without it. But some registries know no subject without versions.
    is_set = is_new and _if_there(compatible) is not None
    schema_id = client.register_schema(subject, schema)
    if is_new and not is_set:
        compatible()
    return int(schema_id)


def _if_there(ask: Callable[[], T]) -> T | None:
    """Return an answer; None: the registry says that what was asked for is not there."""
    try:
        return ask()
    except SchemaRegistryError as error:
        if error.http_status_code == _NOT_THERE and _is_own(error):
            return None
        raise


def _is_refusal(status: int) -> bool:
    """Tell whether the same request would be refused again."""
    return 400 <= status < 500 and status not in _BUSY


def _is_own(error: SchemaRegistryError) -> bool:
    """Tell whether an error is the registry's own, by its code, and not that of a proxy."""
    return isinstance(error.error_code, int) and error.error_code > 0


def _listed(answer: Any) -> list[Any]:
    if not isinstance(answer, list):
        raise TypeError(f"no list: {str(answer)[:_TOLD]}")
    return answer
