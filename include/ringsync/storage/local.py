"""The object store in a folder, on one machine or on a disk that all machines share.

Objects are plain files under their keys, so that Spark, Delta and people read and write the same folder.
The hidden folder ``.ringsync/<shard>/`` holds a lock and, for each object put here, a second hard link to its file,
named ``<hash of key>-<version>-<crc32c>``. So one inode has content, checksum and version, and no kill can separate
them. While the link exists, the inode's number is not used again.

Writers hold the shard's lock. They write and sync the hidden file first, and then link or rename it to its key in one
system call, so that no reader sees an incomplete object. Readers take no lock, and ``say`` takes none either. Objects
of ``say`` and files made by others have no hidden link: their checksum is computed on demand, and their version
consists of inode number and change time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import google_crc32c

import ringsync.storage.port as port

LOCK_SECONDS = 60.0
"""Seconds that a writer waits for another: as long as the client of Google Cloud Storage repeats a request."""

_SHARD_DIGITS = 3
_SWEEP_SECONDS = 24 * 3600
_PUBLISH_ATTEMPTS = 100
_CHUNK_BYTES = 16 << 20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

_LINK_NAME = re.compile(r"[0-9a-f]{32}-(?P<version>[0-9a-f]{32})-(?P<crc32c>[0-9a-f]{8})(\.new)?")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors that mean that no object has the key: nothing there, a file in place of a folder, a link, folder or socket."""

_RIGHTS = "give this user the right to read and write there, or choose another folder"
_IN_THE_WAY = "a file, folder or symbolic link has this name or that of a folder above: remove it or choose another key"
_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "mount the file system for writing, or choose another folder",
    errno.ENOENT: "create the file system's folder, or choose another one",
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "raise the quota or free some disk space",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.ELOOP: _IN_THE_WAY,
}


@dataclass(frozen=True)
class _Link:
    """A hidden link: its name in the shard's folder, its inode, and the object's version and checksum in the name."""

    name: str
    inode: int
    version: str
    crc32c: int


class LocalStore:
    """Objects as files below one folder. The first put makes the folder, for this user only. Once it was seen, it must
    stay: where it was mounted, an empty folder is left, which is not the store.

    The methods are those of :class:`ringsync.storage.port.ObjectStore`; ``stat`` and ``list`` read files made by others
    for their checksums, and ``delete`` removes folders that become empty, too. Symbolic links inside the folder are not
    followed, so that no key leads out of it; the folder itself may be a link. A file cannot also be a folder, so ``a``
    and ``a/b`` cannot both be objects here.

    :param path: absolute path of the folder, on a file system with hard links and ``flock``
    :raises ValueError: the path is relative, or the root of the file system
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.normpath(path))
        if not self.path.is_absolute() or not self.path.name or "\0" in str(path):
            raise ValueError(f"local object store {str(path)!r}: give an absolute path other than '/'")
        self._inode_of_root: int | None = None

    def __repr__(self) -> str:
        return f"LocalStore({str(self.path)!r})"

    @property
    def url(self) -> str:
        """``file://`` and the path, not escaped, as Hadoop's ``Path`` reads it."""
        return f"file://{self.path}"

    def uri(self, key: str) -> str:
        return f"{self.url}/{port.check_key(key)}"

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None) -> port.Stat:
        port.check_key(key)
        port.check_conditions(if_absent, if_version)
        with self._explained(key), self._locked(key) as shard:
            self._check_conditions(key, if_absent, if_version)
            stat = port.Stat(key, len(data), google_crc32c.value(data), uuid.uuid4().hex)
            name = f"{_hash(key)}-{stat.version}-{stat.crc32c:08x}"
            try:
                self._write(shard, name, data, stat)
                if if_absent:
                    self._publish(key, shard, name, replace=False)
                else:
                    os.link(name, f"{name}.new", src_dir_fd=shard, dst_dir_fd=shard)
                    self._publish(key, shard, f"{name}.new", replace=True)
            finally:
                self._drop_old_links(key, shard)
            return stat

    def say(self, key: str, data: bytes) -> None:
        port.check_key(key)
        hashed, stat = _hash(key), port.Stat(key, len(data), google_crc32c.value(data), uuid.uuid4().hex)
        with self._explained(key), self._folder([port.HIDDEN_FOLDER, hashed[:_SHARD_DIGITS]], create=True) as shard:
            name = f"{hashed}-{stat.version}-{stat.crc32c:08x}.new"
            try:
                self._write(shard, name, data, stat)
                self._publish(key, shard, name, replace=True)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=shard)

    def get(self, key: str) -> bytes:
        port.check_key(key)
        with self._explained(key):
            found = self._look_up(key, read=True)
        if found is None:
            raise port.NotFoundError(f"{self.url}/{key} is not there")
        stat, data = found
        if google_crc32c.value(data) != stat.crc32c:
            raise port.ChecksumError(
                f"{self.url}/{key} is damaged: its CRC-32C is {google_crc32c.value(data):08x}, "
                f"but {stat.crc32c:08x} was written; restore it or remove it"
            )
        return data

    def get_range(self, key: str, start: int, size: int) -> bytes:
        port.check_key(key)
        with self._explained(key):
            try:
                file = self._open(key)
            except OSError as error:
                if error.errno in _ABSENT:
                    raise port.NotFoundError(f"{self.url}/{key} is not there") from None
                raise
            try:
                return os.pread(file, size, start) if S_ISREG(os.fstat(file).st_mode) else b""
            finally:
                os.close(file)

    def stat(self, key: str) -> port.Stat | None:
        port.check_key(key)
        with self._explained(key):
            found = self._look_up(key)
        return found[0] if found else None

    def list(self, prefix: str = "", start: str = "") -> list[port.Stat]:
        port.check_prefix(prefix)
        port.check_prefix(start)
        with self._explained(prefix):
            found = (self._look_up(key) for key in sorted(self._keys(prefix, start)))
            return [entry[0] for entry in found if entry]

    def delete(self, key: str) -> None:
        port.check_key(key)
        with self._explained(key):
            if self._inode(key) is None:
                return
            with self._locked(key) as shard:
                parents, name = _split(key)
                try:
                    with self._folder(parents) as folder:
                        os.unlink(name, dir_fd=folder)
                        os.fsync(folder)
                except FileNotFoundError:
                    return
                self._drop_old_links(key, shard)
            self._prune(parents)

    def _check_conditions(self, key: str, if_absent: bool, if_version: str | None) -> None:
        if not if_absent and if_version is None:
            return
        found = self._look_up(key)
        if if_absent:
            if found is not None:
                raise port.AlreadyExistsError(f"{self.url}/{key} is there already")
        elif found is None:
            raise port.VersionMismatchError(f"{self.url}/{key} is not there, version {if_version} was expected")
        elif found[0].version != if_version:
            raise port.VersionMismatchError(
                f"{self.url}/{key} has version {found[0].version}, {if_version} was expected"
            )

    def _write(self, shard: int, name: str, data: bytes, stat: port.Stat) -> None:
        """Write the hidden file, durably, and read it back."""
        file = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=shard)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
            os.lseek(file, 0, os.SEEK_SET)
            if _crc32c(file) != stat.crc32c:
                raise port.ChecksumError(
                    f"{self.url}/{stat.key}: the file system returns other bytes than were written: check the disk"
                )
        finally:
            os.close(file)
        os.fsync(shard)

    def _publish(self, key: str, shard: int, hidden: str, replace: bool) -> None:
        """Give the hidden file its key in one atomic system call."""
        parents, name = _split(key)
        for attempt in range(_PUBLISH_ATTEMPTS):
            try:
                with self._folder(parents, create=True) as folder:
                    if replace:
                        os.rename(hidden, name, src_dir_fd=shard, dst_dir_fd=folder)
                    else:
                        os.link(hidden, name, src_dir_fd=shard, dst_dir_fd=folder)
                    os.fsync(folder)
                return
            except FileExistsError:
                raise port.AlreadyExistsError(f"{self.url}/{key}: {_IN_THE_WAY}") from None
            except FileNotFoundError:
                # Another thread or process has just deleted in it and removed the empty folder: make it again.
                if attempt == _PUBLISH_ATTEMPTS - 1:
                    raise

    def _look_up(self, key: str, read: bool = False) -> tuple[port.Stat, bytes] | None:
        """Look up an object, and read its bytes if wanted; None: there is no object at the key."""
        while True:
            try:
                file = self._open(key)
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise
            try:
                status = os.fstat(file)
                if not S_ISREG(status.st_mode):
                    return None
                data, written_ms = b"".join(_chunks(file)) if read else b"", status.st_mtime_ns // 1_000_000
                link = self._link_of(key, status)
                if link is not None:
                    return port.Stat(key, status.st_size, link.crc32c, link.version, written_ms), data
                if self._inode(key) != status.st_ino:
                    # Another process replaced or deleted it meanwhile, so its hidden link may be gone: look again.
                    continue
                crc32c = google_crc32c.value(data) if read else _crc32c(file)
                version = f"file-{status.st_ino:x}-{status.st_ctime_ns:x}"
                return port.Stat(key, status.st_size, crc32c, version, written_ms), data
            finally:
                os.close(file)

    def _keys(self, prefix: str, start: str) -> Iterator[str]:
        """List the legal keys of files in the store's folder, without the hidden folder."""

        def is_wanted(folder: str) -> bool:
            return folder >= start or start.startswith(folder)

        parents = prefix.split("/")[:-1]
        try:
            with self._folder(parents) as top:
                for path, folders, files, _ in os.fwalk(".", dir_fd=top, onerror=_raise_unless_absent):
                    base = [*parents, *path.split("/")[1:]]
                    folders[:] = [
                        name
                        for name in folders
                        if name != port.HIDDEN_FOLDER and is_wanted("/".join([*base, name, ""]))
                    ]
                    for name in files:
                        key = "/".join([*base, name])
                        if key >= start and key.startswith(prefix) and port.is_legal_key(key):
                            yield key
        except OSError as error:
            _raise_unless_absent(error)

    def _open(self, key: str) -> int:
        parents, name = _split(key)
        with self._folder(parents) as folder:
            return os.open(name, _READ_FLAGS, dir_fd=folder)

    def _inode(self, key: str) -> int | None:
        parents, name = _split(key)
        try:
            with self._folder(parents) as folder:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                return status.st_ino if S_ISREG(status.st_mode) else None
        except OSError as error:
            _raise_unless_absent(error)
            return None

    def _link_of(self, key: str, status: os.stat_result) -> _Link | None:
        """Find the hidden link to a file; None: others made the file, or it was replaced."""
        if status.st_nlink == 1:
            return None
        hashed = _hash(key)
        try:
            with self._folder([port.HIDDEN_FOLDER, hashed[:_SHARD_DIGITS]]) as shard:
                return next((link for link in _links(shard, hashed) if link.inode == status.st_ino), None)
        except FileNotFoundError:
            return None

    def _drop_old_links(self, key: str, shard: int) -> None:
        """Remove the hidden links of a key's earlier objects and killed puts; once a day, of the whole shard."""
        current = self._inode(key)
        for link in _links(shard, _hash(key)):
            if link.inode != current:
                os.unlink(link.name, dir_fd=shard)
        if time.time() - os.stat("lock", dir_fd=shard).st_mtime > _SWEEP_SECONDS:
            _sweep(shard)

    def _prune(self, parents: Sequence[str]) -> None:
        """Remove the folders that a delete left empty, the innermost first."""
        for depth in range(len(parents) - 1, -1, -1):
            try:
                with self._folder(parents[:depth]) as folder:
                    os.rmdir(parents[depth], dir_fd=folder)
            except OSError as error:
                if error.errno not in (*_ABSENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return

    @contextmanager
    def _folder(self, parts: Sequence[str], create: bool = False) -> Iterator[int]:
        """Open a folder below the root, part by part, so that no symbolic link leads elsewhere."""
        folder = self._open_root(create)
        try:
            for part in parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                        os.fsync(folder)
                inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _open_root(self, create: bool) -> int:
        """Open the store's folder.

        :raises port.UnavailableError: it is another one than before, or gone
        """
        known = self._inode_of_root
        if create and known is None:
            # What is inside is open to whom this folder is: also the files that Spark writes, by its own umask.
            self.path.mkdir(0o700, parents=True, exist_ok=True)
        gone = port.UnavailableError(f"{self.url} is not the folder any more that it was: is it mounted?")
        try:
            folder = os.open(self.path, _FOLDER_FLAGS)
        except FileNotFoundError:
            if known is None:
                raise
            raise gone from None
        self._inode_of_root = os.fstat(folder).st_ino if known is None else known
        if os.fstat(folder).st_ino != self._inode_of_root:
            os.close(folder)
            raise gone
        return folder

    @contextmanager
    def _locked(self, key: str) -> Iterator[int]:
        """Hold the lock of a key's shard among threads, processes and machines; yield the shard's folder.

        :raises port.UnavailableError: another writer holds it for longer than :data:`LOCK_SECONDS`
        """
        with self._folder([port.HIDDEN_FOLDER, _hash(key)[:_SHARD_DIGITS]], create=True) as shard:
            lock = os.open("lock", _LOCK_FLAGS, 0o666, dir_fd=shard)
            try:
                if not _lock(lock):
                    file = f"{self.url}/{port.HIDDEN_FOLDER}/{_hash(key)[:_SHARD_DIGITS]}/lock"
                    raise port.UnavailableError(
                        f"{file}: another writer{_holder(lock)} has held this lock for more than {LOCK_SECONDS:g} s: "
                        "if that process hangs, let it continue, or end it"
                    )
                yield shard
            finally:
                # Closing is not enough: a process forked meanwhile holds the same lock open.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn errors of the operating system into errors that say where, why and what to do."""
        try:
            yield
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "check the disk and its mount")
            raise port.UnavailableError(f"{self.url}/{key}: {error.strerror}; {remedy}") from error


def _split(key: str) -> tuple[list[str], str]:
    *parents, name = key.split("/")
    return parents, name


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _raise_unless_absent(error: OSError) -> None:
    if error.errno not in _ABSENT:
        raise error


def _lock(lock: int) -> bool:
    """Take a lock; return whether that was possible in time."""
    deadline, pause = time.monotonic() + LOCK_SECONDS, 0.001
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _holder(lock: int) -> str:
    """Name the process that holds a lock, for a message; empty: it is on another machine, or the kernel hides it."""
    status = os.fstat(lock)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        if found := re.search(rf"FLOCK +\S+ +\S+ +([1-9]\d*) {place} ", Path("/proc/locks").read_text()):
            return f" (process {found[1]})"
    return ""


def _links(shard: int, start: str = "") -> Iterator[_Link]:
    """List the hidden links in a shard's folder whose names begin with ``start``."""
    with os.scandir(shard) as entries:
        for entry in entries:
            name = _LINK_NAME.fullmatch(entry.name)
            if name and entry.name.startswith(start):
                yield _Link(entry.name, entry.inode(), name["version"], int(name["crc32c"], 16))


def _sweep(shard: int) -> None:
    """Remove links without an object, left by killed puts or by people who removed the object's file."""
    links = list(_links(shard))
    hidden = Counter(link.inode for link in links)
    for link in links:
        if os.stat(link.name, dir_fd=shard).st_nlink <= hidden[link.inode]:
            os.unlink(link.name, dir_fd=shard)
            hidden[link.inode] -= 1
    os.utime("lock", dir_fd=shard)


def _chunks(file: int) -> Iterator[bytes]:
    while chunk := os.read(file, _CHUNK_BYTES):
        yield chunk


def _crc32c(file: int) -> int:
    checksum = 0
    for chunk in _chunks(file):
        checksum = google_crc32c.extend(checksum, chunk)
    return checksum
