"""The publication of a bootstrap: the files of its committed ranges, and nothing else, become a pass of the stream and
the replica.

The pass comes first: it is refused if another bootstrap has begun, and once it is there the files stay. The run may be
killed between any two writes, and each write may be repeated: the log of passes takes a bootstrap's rows once, the
replica takes its transaction once, its table of changes begins anew once for each base, and the folder's manifest is
put once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ringsync.config import Config
from ringsync.ledger.passes import check_rows, first_to_add, get_pass, mark, pass_folder, pass_numbers
from ringsync.ledger.topic_owners import take_topic
from ringsync.replica.base import replace_base, replaced_table, transaction_of
from ringsync.replica.changes import begin_changes, empty_changes
from ringsync.replica.delta_log import DataFile, read_snapshot
from ringsync.replica.folders import base_folder
from ringsync.state.bootstrap import CommittedRange
from ringsync.steps.application import Report, StepError
from ringsync.steps.bootstrap.leftovers import remove_leftovers
from ringsync.steps.passes.follow_ups import digests_kept_ms, publish_passes
from ringsync.steps.sync_plan import sync_table
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import Part, StreamDamagedError

if TYPE_CHECKING:
    from ringsync.steps.bootstrap.plan import BootstrapPlan


@dataclass(frozen=True)
class Outputs:
    """The files with the rows of a committed range: for the replica, and the same rows as messages.

    :ivar hidden: rows of the replica less messages: what no SELECT shows, e.g. deleted rows, has no message
    """

    files: tuple[DataFile, ...]
    parts: tuple[Part, ...]
    hidden: int = 0

    def to_json(self) -> str:
        """Return the ledger's form."""
        files, parts = [asdict(file) for file in self.files], [asdict(part) for part in self.parts]
        return json.dumps({"files": files, "parts": parts, **({"hidden": self.hidden} if self.hidden else {})})

    @staticmethod
    def from_json(text: str) -> Outputs:
        """Read what :meth:`to_json` wrote."""
        document = json.loads(text)
        return Outputs(
            tuple(DataFile(**file) for file in document["files"]),
            tuple(Part(**part) for part in document["parts"]),
            document.get("hidden", 0),
        )


def publish(
    store: ObjectStore,
    config: Config,
    plan: BootstrapPlan,
    check: Callable[[], None],
    ranges: Sequence[CommittedRange],
    begin: int,
    ring: str,
) -> None:
    """Publish what the ledger holds, which must be everything that was selected.

    :param check: raises if this run must not publish
    :param ranges: the ledger's ranges, in token order
    :param begin: number of the pass with which the bootstrap has begun
    :param ring: digest of the ring snapshot of all that was read; empty: the ring has changed meanwhile
    :raises StepError: the counts do not reconcile, or a part or file is missing; nothing was published
    :raises LostOwnershipError: another run has taken over, or the bootstrap was cancelled
    :raises BootstrapReplacedError: another bootstrap has begun, or this one was cancelled
    :raises TableReplacedError: the table was dropped and created again since
    :raises ConcurrentCommitError: another writer has changed the replica meanwhile
    """
    files, parts = files_of(ranges)
    counts = _counts(ranges)
    if not counts["rows"] == counts["rows_written"] == counts["messages_published"] + counts["rows_hidden"]:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise StepError(f"the counts do not reconcile: {listed}; nothing was published: bootstrap anew with restart")
    table = plan.scan.table
    before = read_snapshot(store, base_folder(table.keyspace, table.name))
    # The base may belong to an earlier table of this name, but not to a newer one.
    take_topic(store, plan.topic, table.table_id, int(time.time() * 1000))
    numbers = pass_numbers(store, table.table_id)
    passes = {number: get_pass(store, table.table_id, number) for number in numbers if number <= begin}
    try:
        check_rows(store, table.table_id, plan.bootstrap.id, parts, plan.topic)
    except StreamDamagedError as error:
        raise StepError(f"{error}; nothing was published: bootstrap anew with restart") from error
    if transaction_of(plan.bootstrap.id) not in before.transactions:
        _check_files(store, base_folder(table.keyspace, table.name), files)
    check()
    first = first_to_add(passes, begin, digests_kept_ms(config), ring)
    # Passes before the first one that is added may have deleted rows: no SELECT and no added pass shows that.
    deletions_from_ms = passes[min(first, begin)].created_at_ms
    # If another bootstrap has begun, the mark is refused. If not, no other bootstrap removes our files from here on. If
    # another writer changes the base meanwhile, replace_base finds a version newer than the one that was read above.
    now_ms = int(time.time() * 1000)
    mark(store, table.table_id, "rows", plan.bootstrap.id, now_ms, tuple(parts), topic=plan.topic, ring=ring)
    if replaced_table(before, table):
        empty_changes(store, table, before, int(time.time() * 1000))
    replace_base(
        store,
        table,
        before,
        files,
        as_of_us=plan.bootstrap.as_of * 1_000_000,
        properties={
            "run_id": plan.run,
            "bootstrap": plan.bootstrap.id,
            "selection": plan.scan.selection.to_json(),
            "element_times": json.dumps(plan.scan.element_times),
            "deletions_from_us": str(deletions_from_ms * 1000),
        },
        transaction=transaction_of(plan.bootstrap.id),
        now_ms=int(time.time() * 1000),
        from_pass=first,
        deletion_vectors=config.replica.deletion_vectors,
    )
    begin_changes(store, table, int(time.time() * 1000))
    publish_passes(store, config, sync_table(store, config, table))
    remove_leftovers(store, table, plan.topic, begin, plan.bootstrap.id, {file.name for file in files})


def describe_published(store: ObjectStore, plan: BootstrapPlan, ranges: Sequence[CommittedRange], begin: int) -> Report:
    """Return what :func:`publish` has published, now or in a run before."""
    files, parts = files_of(ranges)
    table = plan.scan.table
    folder = base_folder(table.keyspace, table.name)
    return {
        **_counts(ranges),
        "replica": {
            "uri": store.uri(folder),
            "version": read_snapshot(store, folder).transactions.get(transaction_of(plan.bootstrap.id)),
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
        },
        "stream": {
            "topic": plan.topic,
            "folder": pass_folder(begin),
            "parts": len(parts),
            "bytes": sum(part.bytes for part in parts),
        },
    }


def _check_files(store: ObjectStore, folder: str, files: Sequence[DataFile]) -> None:
    """Check that the files are there: to VACUUM they are left over until the base names them.

    :raises StepError: a file is gone; nothing was published
    """
    sizes = {stat.key: stat.size for stat in store.list(f"{folder}/part-")}
    gone = [file.name for file in files if sizes.get(f"{folder}/{file.name}") != file.bytes]
    if gone:
        raise StepError(
            f"{store.uri(folder)}: {len(gone)} files of this bootstrap are gone, the first is {gone[0]}: perhaps a "
            "VACUUM with a retention shorter than the bootstrap has removed them; nothing was published: bootstrap "
            "anew with restart, without such a VACUUM"
        )


def files_of(ranges: Sequence[CommittedRange]) -> tuple[list[DataFile], list[Part]]:
    """Return the files of committed ranges, in their order."""
    outputs = [Outputs.from_json(done.outputs) for done in ranges]
    return [file for output in outputs for file in output.files], [part for output in outputs for part in output.parts]


def _counts(ranges: Sequence[CommittedRange]) -> dict[str, int]:
    outputs = [Outputs.from_json(done.outputs) for done in ranges]
    return {
        "rows": sum(done.rows for done in ranges),
        "rows_written": sum(file.rows for output in outputs for file in output.files),
        "messages_published": sum(part.records for output in outputs for part in output.parts),
        "rows_hidden": sum(output.hidden for output in outputs),
    }
