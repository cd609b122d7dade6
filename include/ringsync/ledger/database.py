"""Which database the sync follows, Cassandra or ScyllaDB: ``state/database.json``.

Whoever is connected to the cluster asks it (:func:`ringsync.cluster.scylla.is_scylla`). Whoever only looks at the state
of the sync, e.g. to find which loops have to run, reads it here.
"""

from __future__ import annotations

import json

from ringsync.storage.port import ChecksumError, ObjectStore, get_json

CDC_LOGS = "cdc_logs"
"""In place of a host id: Scylla's CDC logs, which are tables and belong to no node."""

_KEY = "state/database.json"


def note_database(store: ObjectStore, of_scylla: bool) -> None:
    """Record which database the sync follows.

    :param of_scylla: whether it is ScyllaDB; False: Cassandra
    :raises StorageError: the store cannot be used
    """
    store.put(_KEY, json.dumps({"of_scylla": of_scylla}).encode())


def follows_scylla(store: ObjectStore) -> bool:
    """Tell whether the sync follows ScyllaDB; False also if nothing is recorded.

    :raises StorageError: the store cannot be used, or the object is damaged
    """
    try:
        noted = get_json(store, _KEY)
        return noted is not None and bool(noted["of_scylla"])
    except (ValueError, TypeError, KeyError) as error:
        raise ChecksumError(f"{store.uri(_KEY)} is damaged: cdcservice start writes it anew") from error
