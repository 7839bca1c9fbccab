"""Carries small values between ranks and their writer processes: one contract, two implementations that need
no torch.

The store of `torch.distributed` is the third implementation (`ckptengine.adapters.c10d`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Protocol

POLL_FIRST_S = 0.001
POLL_LAST_S = 0.5


class Transport(Protocol):
    """A key-value space shared by all ranks of one run and their writer processes.

    A key is written once and read many times: by `set` when only one writer can exist, by `set_if_absent`
    when several race and the first must win. Values are small (receipts, outcomes, plans), never tensor data.
    Any method may be called from any thread. Nothing is durable: after a crash of the whole job the values
    are gone, and nothing is owed to them.

    Every method raises `ConnectionError` when the space cannot be reached.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store `value`; visible to every rank on return."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for `key` and return its value; `TimeoutError` when `timeout_s` pass first. The wait can be
        interrupted by a signal."""
        ...

    def peek(self, key: str) -> bytes | None:
        """The value of `key` if it has one now."""
        ...

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Store `value` unless the key exists; returns what is stored now."""
        ...

    def delete(self, key: str) -> None:
        """Forget `key`; a missing key is no error."""
        ...

    def close(self) -> None:
        """Release connections; the space itself lives on."""
        ...


def wait_for(
    peek: Callable[[], bytes | None], timeout_s: float, sleep: Callable[[float], None] | None = None
) -> bytes | None:
    """Look again and again until there is a value; None when `timeout_s` pass first. `sleep`: instead of
    `time.sleep`.

    The pauses are a twentieth of the time waited so far, up to half a second: a parallel file system's
    metadata server, and a job's one store, serve all ranks.
    """
    sleep = sleep or time.sleep
    started = time.monotonic()
    while (value := peek()) is None:
        waited = time.monotonic() - started
        if waited >= timeout_s:
            return None
        pause = min(max(waited / 20, POLL_FIRST_S), POLL_LAST_S)
        sleep(min(pause, timeout_s - waited))
    return value


class MemoryTransport:
    """The ranks are threads of one process (or there is one rank)."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(f"no value for {key!r} within {timeout_s:g} s")
            return self._values[key]

    def peek(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        with self._changed:
            stored = self._values.setdefault(key, value)
            self._changed.notify_all()
            return stored

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def close(self) -> None:
        pass


class FileTransport:
    """The ranks share a directory, and nothing else.

    A value is a file that appears whole under its name: written beside it, then renamed (`set`) or
    hard-linked (`set_if_absent`: link fails if the name exists, also over NFS and Lustre). Readers poll.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise ConnectionError(f"cannot make the exchange directory {directory}: {error}") from error

    def _path(self, key: str) -> str:
        return os.path.join(self.directory, "k-" + urllib.parse.quote(key, safe=""))

    def _write_beside(self, path: str, value: bytes) -> str:
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
        with open(temporary, "wb") as file:
            file.write(value)
        return temporary

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        try:
            os.rename(self._write_beside(path, value), path)
        except OSError as error:
            raise ConnectionError(f"cannot write {path}: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        value = wait_for(lambda: self.peek(key), timeout_s)
        if value is None:
            raise TimeoutError(f"no value for {key!r} in {self.directory} within {timeout_s:g} s")
        return value

    def peek(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConnectionError(f"cannot read {path}: {error}") from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        path = self._path(key)
        try:
            temporary = self._write_beside(path, value)
            try:
                os.link(temporary, path)
            except FileExistsError:
                with open(path, "rb") as file:
                    return file.read()
            finally:
                os.unlink(temporary)
        except OSError as error:
            raise ConnectionError(f"cannot write {path}: {error}") from error
        return value

    def delete(self, key: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def close(self) -> None:
        pass

    def remove(self) -> None:
        """Delete the directory with all values; for the coordinator, when the run ends."""
        shutil.rmtree(self.directory, ignore_errors=True)
