"""What a worker may do in a folder of segments."""

from __future__ import annotations

import os
import stat
from pathlib import Path

REMEDY = "give the user of this worker the right, e.g. by the node's group and a umask of 002"
"""What helps against a missing right."""


def what_is_refused(folder: Path) -> str | None:
    """Tell what this process may not do in a folder of segments, without trying, so nothing of the node is touched.

    :returns: a sentence that names the folder and what to do; None: it may do all
    :raises OSError: the folder or what is in it cannot be looked at
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} cannot be listed: {REMEDY}"
    for file in folder.iterdir():
        if not os.access(file, os.R_OK) and file.exists():
            return f"{file} cannot be read: {REMEDY}"
    if not os.access(folder, os.W_OK):
        return f"nothing can be deleted in {folder}, and it fills: {REMEDY}, or mount it so that it can be written to"
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid):
        return f"files of other users cannot be deleted in {folder}, and it fills: take away its sticky bit (chmod -t)"
    return None
