"""Does the FUSE file system of these tests leave the machine as it was, however they end?"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import fuse_lustre
from tests.helpers.ranks import wait_until
from tests.helpers.scripts import Script

USER = """
    import time
    from tests.helpers.fuse_lustre import mounted
    with mounted() as mount:
        print("mounted", mount.path, flush=True)
        time.sleep(600)
"""


def mounts() -> set[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split()[1] for line in lines if "fuse-lustre-" in line}


def processes(path: str) -> list[psutil.Process]:
    """The server, and the fusermount3 that waits to clean up after it."""
    return [one for one in psutil.process_iter(["cmdline"]) if path in (one.info["cmdline"] or [])]


@pytest.fixture(autouse=True)
def fuse() -> None:
    reason = fuse_lustre.why_not()
    if reason is not None:
        pytest.skip(reason)


def test_nothing_is_left_after_use() -> None:
    with fuse_lustre.mounted(osts=2) as mount:
        assert mount.path in mounts()
        assert processes(mount.path)
        Path(mount.path, "file").write_bytes(b"x")
    assert mount.path not in mounts()
    wait_until(lambda: not processes(mount.path))
    assert not os.path.exists(os.path.dirname(mount.path))


def test_a_file_that_is_still_open_hinders_nothing() -> None:
    with fuse_lustre.mounted(osts=2) as mount:
        fd = os.open(f"{mount.path}/file", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="Transport endpoint"):
        os.write(fd, b"x")
    with pytest.raises(OSError, match="Transport endpoint"):
        os.close(fd)
    assert mount.path not in mounts()


def test_a_server_that_is_killed_takes_its_mount_along() -> None:
    with fuse_lustre.mounted(osts=2) as mount:
        for process in processes(mount.path):
            if process.name() != "fusermount3":
                process.kill()
        wait_until(lambda: mount.path not in mounts())


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_a_user_that_is_killed_leaves_no_mount(with_signal: signal.Signals) -> None:
    with Script(USER) as script:
        script.says("mounted")
        path = script.stdout.split()[1]
        assert path in mounts()
        script.process.send_signal(with_signal)
        script.process.wait(30)
        deadline = time.monotonic() + 30
        while path in mounts() or processes(path):
            assert time.monotonic() < deadline, (mounts(), processes(path))
            time.sleep(0.02)
    # What nobody could remove any more.
    for left in (f"{path}/../source", path, f"{path}/../log"):
        left = os.path.normpath(left)
        if os.path.isdir(left):
            os.rmdir(left)
        elif os.path.exists(left):
            os.unlink(left)
    os.rmdir(os.path.dirname(path))
