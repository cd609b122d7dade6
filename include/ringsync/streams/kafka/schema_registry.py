"""The client of a schema registry with Confluent's REST API. Messages name schemas by the registry's ids.

https://docs.confluent.io/platform/current/schema-registry/develop/api.html
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import requests

from ringsync.avro.mapping import AvroRecord
from ringsync.streams.sink import BrokerUnavailableError, RelayError

TIMEOUT_SECONDS = 10
COMPATIBILITY = "BACKWARD"
_HEADERS = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
_NO_SUBJECT = 404


class SchemaRegistry:
    """A schema registry. No connection stays open, since a process has hundreds of topics and asks seldom.

    :param url: root URL, e.g. ``http://registry:8081``
    :param ca_file: file of certificates that verify an ``https`` registry; None: the system's
    :param client_certificate: files of a certificate and its key, for a registry that asks for them
    """

    def __init__(self, url: str, ca_file: str | None = None, client_certificate: tuple[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._ca_file = ca_file
        self._client_certificate = client_certificate
        self._ids: dict[tuple[str, str], int] = {}

    def register(self, subject: str, schema: AvroRecord) -> int:
        """Register a schema as the subject's newest version, with compatibility BACKWARD, and return its id.

        :raises RelayError: the schema is not compatible with the version before, or not allowed
        :raises BrokerUnavailableError: the registry does not answer, or the answer is not a registry's
        """
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if (subject, text) not in self._ids:
            with requests.Session() as session:
                session.verify = self._ca_file or True
                session.cert = self._client_certificate
                self._ids[subject, text] = self._register(session, subject, text)
        return self._ids[subject, text]

    def _register(self, session: requests.Session, subject: str, text: str) -> int:
        path, config = f"/subjects/{quote(subject, safe='')}/versions", f"/config/{quote(subject, safe='')}"
        # First, so that it holds for this schema. Some registries refuse settings for a subject without versions.
        compatible = self._ask(session, "PUT", config, {"compatibility": COMPATIBILITY}, subject, or_none=_NO_SUBJECT)
        answer = self._ask(session, "POST", path, {"schema": text, "schemaType": "AVRO"}, subject)
        if compatible is None:
            self._ask(session, "PUT", config, {"compatibility": COMPATIBILITY}, subject)
        try:
            return int(answer["id"])
        except (TypeError, KeyError, ValueError) as error:
            raise BrokerUnavailableError(f"the server at {self.url} returns no id for {subject}: {answer}") from error

    def _ask(
        self, session: requests.Session, method: str, path: str, body: Any, subject: str, or_none: int | None = None
    ) -> Any:
        try:
            answer = session.request(
                method, self.url + path, data=json.dumps(body).encode(), headers=_HEADERS, timeout=TIMEOUT_SECONDS
            )
        except requests.RequestException as error:
            raise BrokerUnavailableError(f"the schema registry {self.url} does not answer: {error}") from error
        if answer.status_code == or_none:
            return None
        if answer.status_code >= 500:
            raise BrokerUnavailableError(f"the schema registry {self.url} fails: {_told(answer)}")
        if not answer.ok:
            raise RelayError(f"the schema registry {self.url} refuses {method} for {subject}: {_told(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise BrokerUnavailableError(
                f"the server at {self.url} does not answer in JSON: {_told(answer)}"
            ) from error


def _told(answer: requests.Response) -> str:
    return f"{answer.status_code} {answer.reason}: {answer.text[:500]}"
