"""What does a thread spend its time on while it reads blocks?"""

from __future__ import annotations

from collections.abc import Iterable

from ckptengine.phases import Phase

_NS = 1e-9


class Spent:
    """One thread's nanoseconds, and the bytes that went through its buffer.

    Only that thread changes it, so it needs no lock. The clock is asked a few times for each piece of half a
    megabyte, not for each tensor.
    """

    __slots__ = ("decompress_ns", "read_ns", "scatter_ns", "scattered_nbytes", "verify_ns")

    def __init__(self) -> None:
        self.read_ns = self.decompress_ns = self.verify_ns = self.scatter_ns = 0
        self.scattered_nbytes = 0


def parts(
    threads: Iterable[Spent], *, read_nbytes: int, decompressed_nbytes: int, verified_nbytes: int
) -> dict[str, Phase]:
    """The phases that threads went through side by side: see `ckptengine.phases`."""
    all_threads = list(threads)
    count = max(1, len(all_threads))

    def phase(nanoseconds: int, nbytes: int) -> Phase:
        return Phase(nanoseconds * _NS / count, nbytes, nanoseconds * _NS)

    return {
        "read": phase(sum(one.read_ns for one in all_threads), read_nbytes),
        "decompress": phase(sum(one.decompress_ns for one in all_threads), decompressed_nbytes),
        "verify": phase(sum(one.verify_ns for one in all_threads), verified_nbytes),
        "scatter": phase(
            sum(one.scatter_ns for one in all_threads), sum(one.scattered_nbytes for one in all_threads)
        ),
    }
