"""Whether a node's ``cdc_raw`` can be used by this process: listed, read, and rid of what has been staged."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_REMEDY = "give the user of this worker the right, e.g. by the node's group and a umask of 002"


def what_is_refused(folder: Path) -> str | None:
    """What this process may not do in a folder of segments; nothing is tried, so nothing of the node is touched.

    :returns: a sentence that names the folder and what to do; None: it may do all
    :raises OSError: the folder or what is in it cannot be looked at
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} cannot be listed: {_REMEDY}"
    for file in folder.iterdir():
        if not os.access(file, os.R_OK) and file.exists():
            return f"{file} cannot be read: {_REMEDY}"
    if not os.access(folder, os.W_OK):
        return f"nothing can be deleted in {folder}, and it fills: {_REMEDY}, or mount it so that it can be written to"
    found = folder.stat()
    if found.st_mode & stat.S_ISVTX and os.geteuid() not in (0, found.st_uid):
        return f"nothing of others can be deleted in {folder}, and it fills: take away its sticky bit (chmod -t)"
    return None
