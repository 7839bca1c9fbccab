"""Is there room elsewhere for a file that found none?

On Lustre each file lies on a few of many servers (OSTs), and one that is full refuses it, while the file
system as a whole has room. A new file gets others.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from ckptengine.errors import StorageError
from ckptengine.storage.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


def with_a_second_place(store: Store, path: str, nbytes: int, write: Callable[[], T]) -> T:
    """What `write` gives, which makes the file `path` of about `nbytes` bytes and leaves none if it fails.

    If it finds no space (`ENOSPC`) where another file may, it is called once more, from the start: after a
    failed write nothing about the file can be trusted. Any other error, and a second one, is raised.
    """
    try:
        return write()
    except StorageError as error:
        if error.errno != errno.ENOSPC or not store.may_fit_elsewhere(os.path.dirname(path), nbytes=nbytes):
            raise
        logger.warning("%s: one storage target is full, the file is written anew", error)
    try:
        return write()
    except StorageError as error:
        if error.errno == errno.ENOSPC:
            error.hint = (
                "a storage target (OST) of this file system is full while others have room, twice in a row; "
                "see `lfs df`, and free space there or keep fewer steps"
            )
        raise
