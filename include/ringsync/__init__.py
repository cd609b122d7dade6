"""ringsync: a provably equal replica and change stream of Cassandra and ScyllaDB tables."""

import contextlib
import os
import tempfile
from pathlib import Path

__version__ = "0.1.0"


def _kernel_cache() -> str:
    """A writable folder for compiled kernels, per user: numba fails at import where it finds none."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "ringsync" / "kernels"
    if folder.is_absolute():
        with contextlib.suppress(OSError):  # a service's user often has no writable home
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return str(folder)
    return str(Path(tempfile.gettempdir()) / f"ringsync-{os.getuid()}" / "kernels")


# Must happen before numba is imported anywhere (specs/kernels.md §4).
os.environ.setdefault("NUMBA_CACHE_DIR", _kernel_cache())
