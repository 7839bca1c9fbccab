"""Which tensors of a target are waited for as one, and where in memory are they?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import torch

from ckptengine.adapters.items import extent_nelem
from ckptengine.adapters.tensors import extract

Memory = tuple[int, int]
"""The address of its first byte, and of the byte after its last."""


class Parcels:
    """The memory that a restore fills, cut where no two tensors overlap: each such part is a parcel, and has
    a number. Tensors that share memory (tied weights) are one parcel.

    named: of each tensor its name and its memory; an empty one has none, and is in no parcel.
    """

    def __init__(self, named: Iterable[tuple[str, Memory]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.names: list[list[str]] = []
        """Of each parcel."""
        named = list(named)
        self.of_name: dict[str, int | None] = dict.fromkeys([name for name, _ in named])
        """In the order of `named`. None: an empty tensor's, which is always there."""
        for start, stop, name in sorted((start, stop, name) for name, (start, stop) in named):
            if start == stop:
                continue
            if self._stops and start < self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
                self.names[-1].append(name)
            else:
                self._starts.append(start)
                self._stops.append(stop)
                self.names.append([name])
            self.of_name[name] = len(self._starts) - 1

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, address: int) -> int:
        """The parcel that an address lies in; `KeyError` if there is none."""
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address >= self._stops[number]:
            raise KeyError(f"nothing is restored to {address:#x}")
        return number

    def within(self, memory: Memory) -> range:
        """The parcels that have a byte there."""
        start, stop = memory
        first = bisect_right(self._stops, start)
        return range(first, max(first, bisect_left(self._starts, stop)))

    def holding(self, memory: Iterable[Memory]) -> list[int]:
        """The parcels that have a byte in any of these."""
        return sorted({parcel for one in memory for parcel in self.within(one)})

    def of(self, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
        """Of tensors of any kind, in their order; those that are not restored have none."""
        for tensor in tensors:
            for memory in memory_of(tensor):
                yield from self.within(memory)


def memory_of(value: torch.Tensor) -> list[Memory]:
    """Where the parts of a tensor are that this rank holds: of a DTensor, its local tensor."""
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return _span(value)
    try:
        return [memory for local in extract(value, in_place=True) for memory in _span(local.tensor)]
    except ValueError:
        return []  # of a kind that cannot be restored


def _span(tensor: torch.Tensor) -> list[Memory]:
    if not tensor.numel() or not (tensor.is_cpu or tensor.is_cuda):
        return []
    start = tensor.data_ptr()
    nelem = tensor.numel() if tensor.is_contiguous() else extent_nelem(tensor)
    return [(start, start + nelem * tensor.element_size())]
