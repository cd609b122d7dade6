"""ringsync: copy Cassandra tables to Delta Lake, keep them in sync from the commit logs, prove that they are equal."""

import contextlib
import os
import tempfile
import zlib
from pathlib import Path

__version__ = "0.1.0"


_ROOMS_WITH_KERNELS = ("avro", "changes", "compiled", "cql", "formats", "images", "scylla")


def _kernel_cache() -> str:
    """A writable folder for compiled kernels, per user and state of the source.

    numba looks at the file of a kernel only, not at those of the kernels that are compiled into it: after a change of
    one of these it would go on with the old code, without a word.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "ringsync" / "kernels" / _source_state()
    if folder.is_absolute():
        with contextlib.suppress(OSError):  # a service's user often has no writable home
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return str(folder)
    return str(Path(tempfile.gettempdir()) / f"ringsync-{os.getuid()}" / "kernels" / _source_state())


def _source_state() -> str:
    """Changes with every change of a file whose kernels are compiled into others; the version alone in a zip."""
    root = Path(__file__).parent
    files = sorted(file for room in _ROOMS_WITH_KERNELS for file in (root / room).rglob("*.py"))
    stamps = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{__version__}-{zlib.crc32(repr(stamps).encode()):08x}"


# Must happen before numba is imported anywhere.
os.environ.setdefault("NUMBA_CACHE_DIR", _kernel_cache())
# And before pyarrow is: its own allocator asks Linux for huge pages, gives them back at once and has them cleared anew
# for each large array, which was most of the time of making messages of change rows (docs/performance.md).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
