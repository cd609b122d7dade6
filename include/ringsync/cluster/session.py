"""Connections to the cluster, and explanations of the driver's errors that say what to do."""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    InvalidRequest,
    Unauthorized,
    UnresolvableContactPoints,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.policies import DCAwareRoundRobinPolicy, HostDistance, RetryPolicy, TokenAwarePolicy
from cassandra.protocol import IsBootstrappingErrorMessage
from cassandra.query import SimpleStatement, named_tuple_factory

from ringsync.cluster import guardrails
from ringsync.cluster.connection import NotScyllaError, PageConnection, ScyllaConnection
from ringsync.cluster.node import NO_ANSWER
from ringsync.config.document import did_you_mean
from ringsync.config.sections import Tls

NATIVE_PROTOCOL = 5
"""First protocol version that can read as of a given moment (``now_in_seconds``); Cassandra 4.0 and later speak it."""

SCYLLA_PROTOCOL = 4
"""The protocol version of ScyllaDB, which has no other. It always reads as of the server's clock."""

HOSTS_TRIED = 10
"""So many further hosts are asked at most, if a host cannot serve a request."""

SCAN_PROFILE = "scan"
"""Name of the sessions' execution profile that returns rows undecoded."""


class ClusterError(Exception):
    """The cluster cannot be used; the message says what is wrong and what to do."""


class UnreachableError(ClusterError):
    """No contact point can serve us now: none answers, or those that answer cannot check the password."""


class OldProtocolError(ClusterError):
    """A node does not speak a protocol version that we need."""


class GuardrailError(ClusterError):
    """A guardrail of the cluster forbids a request, now and whenever it is repeated.

    :ivar name: its name, for example ``page_size``
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[type[GuardrailError], tuple[str, str]]:
        return GuardrailError, (str(self), self.name)


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of a connection to a cluster.

    :ivar contact_points: addresses or names of nodes, all in the local datacenter
    :ivar local_datacenter: name of the datacenter; None: that of the first contact point that answers
    :ivar consistency_level: consistency level of reads, a name of ``cassandra.ConsistencyLevel``
    :ivar page_size: most rows of a page, also of the schema and of ringsync's own tables
    """

    contact_points: tuple[str, ...]
    port: int = 9042
    local_datacenter: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    consistency_level: str = "LOCAL_QUORUM"
    page_size: int = 5000
    request_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0


class ReplicaAwarePolicy(TokenAwarePolicy):  # type: ignore[misc]
    """A load balancing policy that prefers the hosts in a statement's attribute ``endpoints`` (``address:port``, …).

    The driver itself finds the replicas of a partition key, but not those of a token range.
    """

    def make_query_plan(self, working_keyspace: str | None = None, query: Any = None) -> Iterator[Any]:
        by_endpoint = {}
        if endpoints := getattr(query, "endpoints", ()):
            by_endpoint = {endpoint_of(host): host for host in self._cluster_metadata.all_hosts()}
        first = [by_endpoint[endpoint] for endpoint in endpoints if endpoint in by_endpoint]
        near = [host for host in first if host.is_up and self.distance(host) == HostDistance.LOCAL]
        yield from near
        for host in super().make_query_plan(working_keyspace, query):
            if host not in near:
                yield host


class PagesShrink(RetryPolicy):  # type: ignore[misc]
    """A policy that never repeats a request for a page which a node has tried to read.

    The driver's own policy sends it to one node after another, even if the connection was lost because the page was too
    large for the node's memory. :mod:`ringsync.sources.scan.pages` asks again, for a smaller page.
    """

    def on_read_timeout(self, *_: Any, **__: Any) -> tuple[int, None]:
        """Tell the reader."""
        return self.RETHROW, None

    def on_request_error(self, query: Any, consistency: Any, error: Any, retry_num: int) -> tuple[int, None]:
        """Ask another node only if this one has refused at once."""
        refused = isinstance(error, IsBootstrappingErrorMessage)
        return (self.RETRY_NEXT_HOST if refused else self.RETHROW), None


def endpoint_of(host: Any) -> str:
    """Return ``address:port`` of one of the driver's hosts."""
    return f"{host.endpoint.address}:{host.endpoint.port}"


class FewRetries(RetryPolicy):  # type: ignore[misc]
    """The driver's policy with an end: it sends a request for one given host to this host again, without a pause, as
    long as it answers that it is overloaded or has failed."""

    def on_request_error(self, query: Any, consistency: Any, error: Exception, retry_num: int) -> tuple[int, Any]:
        if retry_num >= HOSTS_TRIED:
            return self.RETHROW, None
        decision: tuple[int, Any] = super().on_request_error(query, consistency, error, retry_num)
        return decision


_sessions: dict[tuple[int, ClusterSettings], Session] = {}
opening = threading.RLock()
"""Held while a session is opened, so that several threads open one."""


def connect(settings: ClusterSettings) -> Session:
    """Return the process's session for these settings; the first call opens it.

    :raises UnreachableError: no contact point answered
    :raises ClusterError: the cluster refuses us, or TLS fails
    """
    # The key has the process id, since a forked worker must not use its parent's sockets.
    key = (os.getpid(), settings)
    with opening:
        session = _sessions.get(key)
        if session is None or session.is_shutdown:
            session = _sessions[key] = _open(settings)
    return session


def close_all() -> None:
    """Close every session of this process."""
    for key in [key for key in _sessions if key[0] == os.getpid()]:
        _sessions.pop(key).cluster.shutdown()


@contextmanager
def explained_errors(user: str | None) -> Iterator[None]:
    """Turn the driver's refusals inside the block into errors that name the remedy.

    :raises ClusterError: the user lacks a permission
    :raises GuardrailError: a guardrail forbids this
    """
    try:
        yield
    except Unauthorized as error:
        raise ClusterError(_missing_permission(user, str(error))) from error
    except InvalidRequest as error:
        if (name := guardrails.guardrail_of(str(error))) is None:
            raise
        raise GuardrailError(guardrails.explained(error), name) from error


def _open(settings: ClusterSettings) -> Session:
    """Connect to Cassandra, or else to ScyllaDB."""
    try:
        return _connected(_cluster(settings, NATIVE_PROTOCOL, PageConnection), settings)
    except OldProtocolError as refused:
        try:
            return _connected(_cluster(settings, SCYLLA_PROTOCOL, ScyllaConnection), settings)
        except OldProtocolError:
            raise refused from None


def _cluster(settings: ClusterSettings, protocol: int, connection: type[PageConnection]) -> Cluster:
    credentials = PlainTextAuthProvider(settings.username, settings.password) if settings.username else None
    try:
        return Cluster(
            contact_points=list(settings.contact_points),
            port=settings.port,
            protocol_version=protocol,
            auth_provider=credentials,
            ssl_context=_tls_context(settings.tls) if settings.tls else None,
            execution_profiles={
                EXEC_PROFILE_DEFAULT: _profile(settings, named_tuple_factory, FewRetries()),
                SCAN_PROFILE: _profile(settings, lambda names, rows: rows, PagesShrink()),
            },
            connection_class=connection,
            connect_timeout=settings.connect_timeout_s,
            control_connection_timeout=settings.connect_timeout_s,
            # We read the schemas we need ourselves: a cluster may have thousands of tables.
            schema_metadata_enabled=False,
            # It would wait for gossip after each statement. Who changes the schema waits as suits
            # (ringsync.cluster.agreement).
            max_schema_agreement_wait=0,
        )
    except UnresolvableContactPoints as error:
        points = ", ".join(settings.contact_points)
        raise UnreachableError(f"no such host: {points} (cassandra.contact_points)") from error


def _connected(cluster: Cluster, settings: ClusterSettings) -> Session:
    try:
        session = cluster.connect()
        session.default_fetch_size = min(session.default_fetch_size, settings.page_size)
        if problem := _wrong_datacenter(cluster, settings):
            raise problem
        with explained_errors(settings.username):  # guardrails are for all tables, those of the system, too
            session.execute(SimpleStatement("SELECT key FROM system.local", fetch_size=settings.page_size))
    except NO_ANSWER as error:
        explained = _wrong_datacenter(cluster, settings) or _explain(error, settings)
        cluster.shutdown()
        raise explained from error
    except BaseException:
        cluster.shutdown()
        raise
    return session


def _profile(
    settings: ClusterSettings, row_factory: Callable[[Any, Any], Any], retries: RetryPolicy
) -> ExecutionProfile:
    nodes = DCAwareRoundRobinPolicy(local_dc=settings.local_datacenter or "")
    return ExecutionProfile(
        load_balancing_policy=ReplicaAwarePolicy(nodes),
        consistency_level=ConsistencyLevel.name_to_value[settings.consistency_level],
        request_timeout=settings.request_timeout_s,
        row_factory=row_factory,
        retry_policy=retries,
    )


def _tls_context(tls: Tls) -> ssl.SSLContext:
    for path in (tls.ca_file, tls.certificate_file, tls.key_file):
        if path and (os.path.isdir(path) or not os.access(path, os.R_OK)):
            raise ClusterError(f"cannot read the TLS file {path} (cassandra.tls)")

    def key_password() -> str:  # without it, OpenSSL would ask on the terminal
        if tls.key_password is None:
            raise ClusterError("the key of cassandra.tls has a passphrase: set cassandra.tls.key_password")
        return tls.key_password.resolve("cassandra.tls.key_password")

    keys = "ca_file"
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        keys = "certificate_file, key_file and key_password"
        if tls.certificate_file:
            context.load_cert_chain(tls.certificate_file, tls.key_file, key_password)
    except OSError as error:  # also ssl.SSLError
        raise ClusterError(
            f"the files of cassandra.tls are not usable PEM certificates and keys: {error}; check {keys}"
        ) from error
    context.check_hostname = tls.verify_hostname
    return context


def _wrong_datacenter(cluster: Cluster, settings: ClusterSettings) -> ClusterError | None:
    existing = sorted({host.datacenter for host in cluster.metadata.all_hosts() if host.datacenter})
    if not existing or settings.local_datacenter in (None, *existing):
        return None
    return ClusterError(f"cassandra.local_datacenter: {no_datacenter(settings.local_datacenter or '', existing)}")


def no_datacenter(name: str, existing: Collection[str]) -> str:
    """Say that the cluster has no datacenter of this name, and which may have been meant."""
    near = did_you_mean(name, existing)
    return f"the cluster has no datacenter {name}; {near and f'{near} '}it has {', '.join(existing)}"


def _explain(error: Exception, settings: ClusterSettings) -> ClusterError:
    points = ", ".join(f"{point}:{settings.port}" for point in settings.contact_points)
    causes = errors if isinstance(errors := getattr(error, "errors", None), dict) else {points: error}
    refusals = [str(cause) for cause in causes.values() if isinstance(cause, AuthenticationFailed)]
    if refusals and settings.username is None:
        return ClusterError(
            "the cluster requires a user name and password: set cassandra.username and cassandra.password"
        )
    for cause in causes.values():
        if isinstance(cause, InvalidRequest) and guardrails.guardrail_of(str(cause)):
            return ClusterError(f"the cluster refuses what each driver asks first: {guardrails.explained(cause)}")
    # Other "Bad credentials" of Cassandra may be temporary: replicas of system_auth are down, or too slow.
    if any("incorrect" in refusal for refusal in refusals):
        return ClusterError(
            f"the cluster refused user {settings.username}: check cassandra.username and cassandra.password"
        )
    for endpoint, cause in causes.items():
        if isinstance(cause, NotScyllaError) or "explicitly set client protocol_version" in str(cause):
            return OldProtocolError(
                f"{endpoint} does not speak native protocol {NATIVE_PROTOCOL}: ringsync needs Cassandra 4.0 or newer, "
                "or ScyllaDB"
            )
        # The driver wraps ssl.SSLError into an OSError that keeps only its text: "[SSL: …] why (_ssl.c:1006)".
        if match := re.search(r"\[SSL[^\]]*\] (.*?)( \(_ssl\.c:\d+\))?$", _reason(cause)):
            hint = "check that the node speaks TLS on this port, and whether it requires cassandra.tls.certificate_file"
            if "certificate verify failed" in match.group(1):
                hint = "check cassandra.tls.ca_file and cassandra.tls.verify_hostname"
            return ClusterError(f"TLS with {endpoint} failed: {match.group(1)}; {hint}")
    reasons = [f"{endpoint} ({_reason(cause)})" for endpoint, cause in causes.items()]
    hint = "check cassandra.contact_points and cassandra.port, whether the node runs, and firewalls"
    if settings.tls is None:
        hint += "; if the cluster requires TLS, set cassandra.tls"
    if refusals:
        hint = f"check the replicas of system_auth, and whether user {settings.username} may log in"
    return UnreachableError(f"cannot reach the cluster at {', '.join(reasons) or points}: {hint}")


def _reason(cause: object) -> str:
    """Return the innermost cause: ``Connection refused`` instead of the driver's wrapping."""
    text = getattr(cause, "strerror", None) or str(cause)
    match = re.search(r"Last error: (.*)", text)
    return (match.group(1) if match else text).strip() or type(cause).__name__


def _missing_permission(user: str | None, message: str) -> str:
    # The second form is about restrictions of masked columns (C: SelectStatement.authorize).
    form = r"has no (\w+) (?:nor \w+ )?permission on <?(\w+) ([^>,]*)(?:> or any of its parents|, cannot query masked)"
    match = re.search(form, message)
    if not match:
        return f"the cluster refuses this to user {user}: {message}"
    permission, kind, name = match.groups()
    return f"user {user} lacks a permission: GRANT {permission} ON {kind.upper()} {name} TO {user};"
