"""Builds the compiled helper, `ckptengine/storage/streaming.c`; where it cannot, the package is pure.

Nothing here fails a build: without the helper all works, and copies in memory take longer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "ckptengine/storage/streaming.c"
LIBRARY = "ckptengine/storage/libstreaming.so"
COST = "it works without, but saves stall training longer: copies in memory take about 1.6 times as long"


class CannotBuild(Exception):
    """Why, in one line."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels: the library goes into the wheel, or for an editable one beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # In the same file system, so that it can be moved to its place in one step: another process may have
        # the old one mapped, and would crash if that were overwritten.
        self._scratch = tempfile.TemporaryDirectory(
            prefix=".streaming-", dir=root if version == "editable" else None
        )
        made = Path(self._scratch.name) / "libstreaming.so"
        try:
            compile_helper(root / SOURCE, made)
        except CannotBuild as reason:
            self.app.display_warning(f"ckptengine is built without its compiled helper ({reason}): {COST}")
            return
        if version == "editable":
            os.replace(made, root / LIBRARY)
            return
        build_data["force_include"][str(made)] = LIBRARY
        # Called through ctypes, it hangs on no version of Python.
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()


def compile_helper(source: Path, library: Path) -> None:
    """Compiles it and tries it. Raises CannotBuild."""
    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64" or struct.calcsize("P") != 8:
        raise CannotBuild(f"it is for 64-bit Linux on x86-64, this is {sys.platform} on {machine}")
    text = source.read_bytes()
    # -O2: nothing here is to be vectorized by the compiler, and no instruction set is asked for beyond SSE2.
    words = [
        *shlex.split(os.environ.get("CC") or "cc"),
        *(
            "-std=c11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-fPIC",
            "-shared",
            f"-DCKPTENGINE_SOURCE={zlib.crc32(text)}u",
        ),
        *shlex.split(os.environ.get("CFLAGS", "")),
        *shlex.split(os.environ.get("LDFLAGS", "")),
        *("-o", str(library), str(source)),
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuild(
            f"there is no C compiler to be run: {error}; on Debian: apt-get install gcc"
        ) from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        raise CannotBuild(f"`{shlex.join(words[:1])}` failed with {done.returncode} and said: {said[-1]}")
    try:
        stream = ctypes.CDLL(str(library)).ckptengine_stream
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"what `{words[0]}` made cannot be loaded: {error}") from None
    stream.argtypes, stream.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    given, got = bytes(range(256)) * 5, ctypes.create_string_buffer(1280)
    stream(ctypes.addressof(got), given, 1279)
    if got.raw != given[:1279] + b"\0":
        raise CannotBuild(f"what `{words[0]}` made does not copy right")
