"""The relay, which copies the published messages of a file stream to a sink, e.g. Kafka. The file stream is the outbox.

The cursor (:mod:`ringsync.streams.cursor`) moves behind a message only after the sink has confirmed it. So each
message arrives at least once, under one event id, in the order of the stream, whatever is killed or down. Repeated
messages keep their order, too, up to the newest message.

A relay that wakes up after another has taken over can do no harm. A relay first lets the sink shut out all earlier ones
(Kafka: a transactional producer), then reads and claims the cursor, then sends. So the messages of earlier relays come
before its own, it continues from the stored cursor, and no other process can move the cursor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ringsync.config import ConfigError
from ringsync.storage.port import ObjectStore
from ringsync.streams.cursor import Cursor, CursorObject
from ringsync.streams.files import FileStream, Part, StreamDamagedError, StreamError
from ringsync.streams.part_index import MessageBlock
from ringsync.streams.sink import AnotherRelayError, Sink

CONFIRM_AFTER = 100_000
"""Least number of messages between two confirmations, so that small folders do not each write the cursor."""

LOOK_BACK = 300
"""Folders before the newest one of the sink among which a relay looks for some that the sink lacks. Folders appear in
the order of their names, so there should be none. A thousand objects, which a listing returns at once, have as many."""

PIECE_BYTES = 256 << 10
"""Approximate size of the pieces of a part that are handed over at once; after each the time is checked."""


@dataclass(frozen=True)
class Relayed:
    """The result of a relay.

    :ivar folders: folders that are now completely in the sink
    :ivar messages: number of confirmed messages
    :ivar waiting: published folders that are left because the relay was asked to stop, in order
    """

    folders: tuple[str, ...] = ()
    messages: int = 0
    waiting: tuple[str, ...] = ()


def relay(
    store: ObjectStore,
    topic: str,
    sink: Sink,
    *,
    folders: Sequence[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[Cursor], None] = lambda cursor: None,
) -> Relayed:
    """Copy the published folders of a file stream that the sink does not have yet, in the order of their names.

    If several relays copy one topic at once, only the one that began last can continue; the others raise.

    :param topic: topic of the file stream
    :param folders: published folders to copy, in order; if there are none, or their numbers show a gap, the relay lists
        the folders after the newest that the sink has. None: all, beginning :data:`LOOK_BACK` before this newest one
    :param stop: called after every part, and after long waits; True ends the relay, which has then stored its cursor
    :param tell: called with what the sink has confirmed, as a cursor, at the beginning and whenever that is more
    :raises BrokerUnavailableError: the sink does not answer; the next call continues
    :raises AnotherRelayError: another process relays the topic, too; the next call takes it over
    :raises RelayError: the sink refuses
    :raises ConfigError: a secret for the sink cannot be read; the next call reads it again
    :raises CursorError: the cursor is damaged or belongs to another topic of the sink
    :raises StreamError: a folder is not published, damaged, or does not follow its schemas; the sink has all before it
    """
    stream, target = FileStream(store, topic), sink.topic_of(topic)
    place = CursorObject(store, topic, target, sink.name)
    cursor = place.load()
    tell(cursor)
    waiting = _waiting(stream, folders, cursor)
    if not waiting:
        return Relayed()
    handed_over: list[Part] = []
    try:
        if sink.open(target):
            claimed = place.claim()
            tell(claimed)
            if claimed != cursor:
                cursor, waiting = claimed, _waiting(stream, folders, claimed)
        return _relay(stream, waiting, cursor, place, target, sink, stop, handed_over, tell)
    except BaseException as error:
        # The transaction may hold a part's first messages: it is aborted, and the complete parts are sent again. But
        # not if the broker refuses, or if another relay has taken over.
        whole = len(handed_over) if sink.is_open(target) and not isinstance(error, AnotherRelayError) else 0
        sink.give_up(target)
        if whole and isinstance(error, Exception):
            parts = iter(range(1, whole))
            relay(store, topic, sink, folders=folders, stop=lambda: stop() or next(parts, None) is None, tell=tell)
        raise


def _waiting(stream: FileStream, folders: Sequence[str] | None, cursor: Cursor) -> list[str]:
    """List the folders that the sink does not have yet, among all or some."""
    after = cursor.before_newest(LOOK_BACK) if folders is None else cursor.newest
    if folders:
        given, ahead = [folder for folder in dict.fromkeys(folders) if folder not in cursor], cursor
        for folder in given:
            if not ahead.is_next(folder):
                break
            ahead = ahead.behind(folder)
        else:
            return given
        # A gap may be a pass without messages, or one that another process has published and not relayed.
        after = after if after < given[0] else ""
    listed = [folder for folder in stream.folders(after) if folder not in cursor]
    # A listing takes time: it may show a folder, but not an earlier one that was published meanwhile.
    return listed and [folder for folder in stream.folders(after) if folder not in cursor and folder <= listed[-1]]


def _relay(
    stream: FileStream,
    waiting: Sequence[str],
    cursor: Cursor,
    place: CursorObject,
    target: str,
    sink: Sink,
    stop: Callable[[], bool],
    handed_over: list[Part],
    tell: Callable[[Cursor], None],
) -> Relayed:
    """Copy the waiting folders.

    :param handed_over: gets the parts that were handed over completely and are not confirmed
    """
    done: list[str] = []
    confirmed = unconfirmed = 0
    for folder in waiting:
        parts = stream.parts(folder)
        if parts is None:
            raise StreamError(f"folder {folder!r} of {stream.topic} is not published")
        for piece, behind, part in _pieces(stream, folder, parts, cursor):
            try:
                sink.send(target, piece, stream.schemas)
            except ConfigError:  # a secret that cannot be read says nothing about the stream
                raise
            except ValueError as error:
                raise StreamDamagedError(
                    f"{stream.topic}, version {piece.schema_version} of its schemas: {error}"
                ) from error
            cursor, unconfirmed = behind, unconfirmed + len(piece.keys)
            if part is not None:
                handed_over.append(part)
            is_long = sink.is_long(target)
            stopped = (part is not None or is_long) and stop()
            if stopped or is_long or (part is not None and unconfirmed >= CONFIRM_AFTER):
                confirmed += sink.confirm(target)
                place.save(cursor)
                tell(cursor)
                handed_over.clear()
                unconfirmed = 0
            if stopped:
                return Relayed(tuple(done), confirmed, tuple(waiting[len(done) :]))
        cursor = cursor.behind(folder)
        done.append(folder)
        if not unconfirmed:
            tell(cursor)
    confirmed += sink.confirm(target)
    place.save(cursor)
    tell(cursor)
    return Relayed(tuple(done), confirmed)


def _pieces(
    stream: FileStream, folder: str, parts: Sequence[Part], cursor: Cursor
) -> Iterator[tuple[MessageBlock, Cursor, Part | None]]:
    """Cut the messages of a folder that the sink does not have yet into pieces.

    :returns: each piece, the cursor after it, and the part that ends with it, if one does
    """
    for number in range(cursor.parts_of(folder), len(parts)):
        part, relayed = parts[number], cursor.messages_of(folder, number)
        first = 0  # number of the block's first message
        for block in stream.blocks(folder, part):
            count = len(block.keys)
            size = sum(map(len, block.keys)) + sum(map(len, block.values))
            most = max(1, PIECE_BYTES * count // max(1, size))
            while first <= relayed < first + count:
                piece = block.cut(relayed - first, most)
                relayed += len(piece.keys)
                if relayed < part.records:
                    yield piece, cursor.within(folder, number, relayed), None
                else:
                    yield piece, cursor.within(folder, number + 1), part
            first += count
