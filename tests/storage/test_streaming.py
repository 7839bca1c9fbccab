"""The compiled helper copies what it is told to, and nothing beside it, and is done when it returns. What is
wrong with it only makes copies slower."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptengine.storage import memcopy, streaming
from ckptengine.storage.linux import map_shared, unmap
from ckptengine.storage.streaming import LIBRARY, SOURCE, VARIABLE, Helper, load
from ckptengine.storage.threads import in_threads

PAGE = mmap.PAGESIZE
CC = shlex.split(os.environ.get("CC") or "cc")

needs_compiler = pytest.mark.skipif(
    shutil.which(CC[0]) is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="needs a C compiler, and x86-64",
)


def compiled(source: Path, library: Path, made_of: int) -> Path:
    command = [*CC, "-std=c11", "-O2", "-fPIC", "-shared", f"-DCKPTENGINE_SOURCE={made_of}u"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Helper:
    """The installed one, else one that is compiled here."""
    found, status = load(environ={})
    if found is None and shutil.which(CC[0]) is not None and platform.machine() == "x86_64":
        library = tmp_path_factory.mktemp("streaming") / LIBRARY.name
        found, status = load(compiled(SOURCE, library, zlib.crc32(SOURCE.read_bytes())), environ={})
        assert found is not None, status
    if found is None:
        pytest.skip(f"no helper here: {status}")
    return found


def test_what_was_built_is_used() -> None:
    """Also finds the library of a checkout whose source has changed since: install again."""
    if not LIBRARY.exists():
        pytest.skip("the package was installed, or is used, without the helper")
    helper, status = load(environ={})
    assert helper is not None, status
    switched_off = os.environ.get(VARIABLE) == "off"
    assert (streaming.helper is None) == switched_off, streaming.status


SHORT_NBYTES = 2048
"""`SHORT` in the source."""

LENGTHS = st.one_of(
    st.integers(0, 700),
    st.builds(
        lambda whole, rest: max(0, whole + rest),
        st.sampled_from([64, 256, 512, SHORT_NBYTES, 4096, 8192]),
        st.integers(-65, 65),
    ),
)


@pytest.mark.parametrize("way", ["copy", "copy_all", "copier"])
@settings(max_examples=150)
@given(nbytes=LENGTHS, to=st.integers(0, 130), source=st.integers(0, 130))
def test_every_byte_is_copied_and_none_beside_them(
    helper: Helper, way: str, nbytes: int, to: int, source: int
) -> None:
    ways = {
        "copy": helper.copy,
        "copy_all": lambda *move: memcopy.copy_all(move, 1, helper=helper),
        "copier": memcopy.Copier(helper).copy,
    }
    bytes_ = np.random.default_rng(nbytes).integers(0, 256, nbytes + 200, np.uint8)
    before = bytes_.copy()
    target = np.full(nbytes + 400, 7, np.uint8)
    expected = target.copy()
    expected[to : to + nbytes] = bytes_[source : source + nbytes]
    ways[way](target.ctypes.data + to, bytes_.ctypes.data + source, nbytes)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(bytes_, before)


@pytest.fixture
def fenced() -> Iterator[list[int]]:
    """Addresses of two times four pages, each with pages around it that nobody may touch."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    maps = [mmap.mmap(-1, 6 * PAGE) for _ in range(2)]
    firsts = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
    for first in firsts:
        for guard in (first, first + 5 * PAGE):
            assert libc.mprotect(guard, PAGE, 0) == 0
    yield [first + PAGE for first in firsts]
    for first in firsts:
        libc.mprotect(first, 6 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 255, 256, 257, PAGE, 4 * PAGE - 1, 4 * PAGE])
@pytest.mark.parametrize("at", ["begin", "end"])
def test_memory_around_may_be_out_of_bounds(helper: Helper, fenced: list[int], nbytes: int, at: str) -> None:
    """To touch it would end the process: also what is fetched ahead must not fault."""
    to, source = (address + (4 * PAGE - nbytes if at == "end" else 0) for address in fenced)
    wanted = os.urandom(nbytes)
    ctypes.memmove(source, wanted, nbytes)
    helper.copy(to, source, nbytes)
    assert ctypes.string_at(to, nbytes) == wanted
    ctypes.memset(to, 0, nbytes)
    memcopy.copy_all([to, source, nbytes], 1, helper=helper)
    assert ctypes.string_at(to, nbytes) == wanted


def test_threads_may_copy_side_by_side_to_the_same_lines(helper: Helper) -> None:
    nbytes, pieces = 1 << 20, 701
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    borders = np.linspace(0, nbytes, pieces + 1).astype(int).tolist()
    spans = list(itertools.pairwise(borders))

    def step(span: tuple[int, int], _: None) -> None:
        start, stop = span
        helper.copy(target.ctypes.data + start, source.ctypes.data + start, stop - start)

    in_threads(spans, 8, lambda: None, step)
    np.testing.assert_array_equal(target, source)


@pytest.mark.slow
@pytest.mark.sample
def test_more_than_four_gibibytes_are_copied_in_one_call(helper: Helper) -> None:
    """Of a source and a target that have the same 2 MiB again and again, but for the target's last."""
    piece, repeats = 2 << 20, 2048
    fds = [os.memfd_create(f"piece-{i}") for i in range(3)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
    places = []
    try:
        for fd in fds:
            os.ftruncate(fd, piece)
        os.pwrite(fds[0], wanted := os.urandom(piece), 0)
        whole = os.memfd_create("whole")
        fds.append(whole)
        os.ftruncate(whole, (repeats + 1) * piece)
        for fd in (fds[0], fds[1]):
            places.append(first := map_shared(whole, (repeats + 1) * piece, piece))
            for i in range(repeats + 1):
                of = fds[2] if i == repeats and fd == fds[1] else fd
                assert libc.mmap(first + i * piece, piece, 3, flags, of, 0) == first + i * piece
        helper.copy(places[1], places[0], (repeats + 1) * piece)
        assert os.pread(fds[1], piece, 0) == wanted
        assert os.pread(fds[2], piece, 0) == wanted
    finally:
        for place in places:
            unmap(place, (repeats + 1) * piece)
        for fd in fds:
            os.close(fd)


HARNESS = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include STREAMING

enum { WORDS = 2048, PER_LINE = 8 };

int main(int argc, char **argv) {
  const uint64_t rounds = argc > 1 ? strtoull(argv[1], 0, 10) : 0;
  volatile uint64_t *shared = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  volatile uint64_t *mark = shared, *seen = shared + 512, *data = shared + 1024;
  static uint64_t source[WORDS] __attribute__((aligned(64)));
  const pid_t trainer = fork();
  if (trainer == 0) {
    for (uint64_t round = 1; round <= rounds; round++) {
      for (int i = 0; i < WORDS; i++) source[i] = round;
      COPY;
      *mark = round;
      while (*seen != round) _mm_pause();
    }
    _exit(0);
  }
  uint64_t early = 0;
  for (uint64_t round = 1; round <= rounds; round++) {
    while (*mark < round) {}
    int missing = 0;
    for (int i = WORDS - PER_LINE; i >= 0; i -= PER_LINE) missing |= data[i] != round;
    early += missing;
    *seen = round;
  }
  int status;
  waitpid(trainer, &status, 0);
  printf("%llu\n", (unsigned long long)early);
  return 0;
}
"""


@needs_compiler
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes spin: needs two CPUs")
@pytest.mark.parametrize(
    "copy",
    [
        "ckptengine_stream((void *)data, source, sizeof source)",
        "ckptengine_stream_all(&(struct move){(uintptr_t)data, (uintptr_t)source, sizeof source}, 1)",
    ],
    ids=["one", "many"],
)
def test_what_was_copied_is_seen_by_who_sees_the_mark_raised_after_it(tmp_path: Path, copy: str) -> None:
    """Another process, which reads as soon as it sees the mark. In C, as between two calls from Python the
    stores come to their end by themselves; without the fence, half of the rounds find bytes missing."""
    (tmp_path / "harness.c").write_text(HARNESS)
    define = [f'-DSTREAMING="{SOURCE}"', "-DCKPTENGINE_SOURCE=0u", f"-DCOPY={copy}"]
    command = [*CC, "-std=c11", "-O2", *define, "-o", str(tmp_path / "harness"), str(tmp_path / "harness.c")]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        [str(tmp_path / "harness"), "3000"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0\n"


def test_it_can_be_switched_off() -> None:
    assert load(environ={VARIABLE: "off"}) == (None, f"switched off by {VARIABLE}")


def test_without_a_build_there_is_none(tmp_path: Path) -> None:
    helper, status = load(tmp_path / LIBRARY.name, environ={})
    assert helper is None
    assert "not built" in status


@pytest.mark.parametrize("content", [b"", b"no library at all", b"\x7fELF" + bytes(60)])
def test_what_cannot_be_loaded_is_left_alone(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / LIBRARY.name
    library.write_bytes(content)
    helper, status = load(library, environ={})
    assert helper is None
    assert "cannot be loaded" in status


@needs_compiler
def test_a_library_without_the_function_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
    helper, status = load(compiled(tmp_path / "other.c", tmp_path / "other.so", 0), environ={})
    assert helper is None
    assert "ckptengine_streaming_source" in status


@needs_compiler
def test_a_library_of_another_source_is_left_alone_and_said_to_be_stale(tmp_path: Path) -> None:
    made_of = zlib.crc32(SOURCE.read_bytes())
    library = compiled(SOURCE, tmp_path / LIBRARY.name, made_of)
    assert load(library, environ={})[0] is not None
    edited = tmp_path / SOURCE.name
    edited.write_bytes(SOURCE.read_bytes() + b"\n")
    helper, status = load(library, edited, {})
    assert helper is None
    assert "stale" in status
    assert "install again" in status
    assert load(library, tmp_path / "removed.c", {})[0] is None
