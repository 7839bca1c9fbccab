"""Hypothesis strategies: any state a checkpoint can hold, and a target to restore it into.

::

    @given(states())
    def test_my_store(state):
        ckpt.save(1, state)
        target = blank(state)
        ckpt.restore(target)

Needs hypothesis, which the package itself does not depend on.
"""

from __future__ import annotations

import http
import math
import random
import re
import socket
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ckptengine.adapters.tensors import LocalChunk
from ckptengine.format.dtypes import is_known

DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {
            value
            for value in vars(torch).values()
            if isinstance(value, torch.dtype) and is_known(str(value).removeprefix("torch."))
        },
        key=str,
    )
)
"""The dtypes that can be stored, of those that this torch has."""

_NUMPY_SPECS: tuple[Any, ...] = (
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"),
    *(">i4", ">f8", "S5", "U3", "V7", "M8[ns]", "M8[D]", "m8[s]"),
    [("a", "<i2"), ("b", ">f4", (2, 3)), ("c", [("d", "S3")])],
    {"names": ["x", "y"], "formats": ["u1", "f8"], "offsets": [1, 16], "itemsize": 32},
)
NUMPY_DTYPES: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, _NUMPY_SPECS))

MEMORY_NBYTES = 960
"""Of the memory that tensors of one state may share; divisible by every item size."""


def _evenly(*choices: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of them, each as likely; `|` would count the choices within each."""
    return st.integers(0, len(choices) - 1).flatmap(lambda number: choices[number])


# --- values --------------------------------------------------------------------------------------

_text = st.text(max_size=6) | st.sampled_from(
    ["", ".", "a.b", "a/b", "..", "$", "weight", "ключ", "\0", "\n"]
)
_any_text = _text | st.text(st.characters(categories=["Cs", "Lu"]), min_size=1, max_size=3)
_ints = st.integers(-3, 3) | st.integers() | st.integers(-(1 << 200), 1 << 200)
_enums = st.sampled_from(
    [
        http.HTTPStatus.NOT_FOUND,
        socket.AddressFamily.AF_INET,
        re.RegexFlag.ASCII,
        re.RegexFlag.ASCII | re.RegexFlag.DOTALL,
    ]
)
# Not-a-numbers have a sign and a payload.
_NANS = struct.unpack(">3d", bytes.fromhex("7ff8000000000123 fff8000000000000 7ff80000000000ff"))
_torch_values = st.sampled_from(
    [
        *(torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex32, torch.bool),
        *(torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")),
        *(torch.strided, torch.sparse_coo, torch.channels_last, torch.contiguous_format),
        *(torch.Size([]), torch.Size([2, 0, 5])),
    ]
)
_atoms = (
    st.none()
    | st.booleans()
    | _ints
    | st.floats()
    | st.sampled_from(_NANS)
    | st.complex_numbers()
    | _any_text
    | st.binary(max_size=9)
    | _enums
    | _torch_values
    | st.sampled_from(NUMPY_DTYPES)
)


def _usable_as_key(value: Any) -> bool:
    return bool(value == value)


keys: st.SearchStrategy[Any] = _evenly(
    _text,
    _any_text,
    st.integers(-2, 5),
    _atoms.filter(_usable_as_key),
    st.tuples(_text, st.integers(0, 2), st.tuples(st.booleans()))
    | st.frozensets(st.integers(0, 5), max_size=2),
)
"""Keys of a dict. Not only strings, and those not only names."""


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A numpy array of any dtype that can be stored, in C or Fortran order, or with gaps."""
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3))) if draw(st.integers(0, 3)) else (1500,)
    made = _random_array(draw(st.integers(0, 1 << 30)), dtype, shape)
    layout = draw(st.sampled_from(["C", "F", "gaps", "reversed"]))
    if layout == "F":
        return np.asfortranarray(made)
    if layout != "C" and made.ndim:
        return made[:: 2 if layout == "gaps" else -1]
    return made


def _random_array(seed: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if dtype.names is not None:
        # Field by field: what lies between the fields is no content, and numpy does not always copy it.
        made = np.zeros(shape, dtype)
        for number, name in enumerate(dtype.names):
            made[name] = _random_array(seed + number, dtype[name].base, made[name].shape)
        return made
    data = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    if dtype.kind in "US":  # not every four bytes are a character
        data = np.where(np.arange(data.size) % 4 == 0, data % 100 + 1, 0).astype(np.uint8)
    elif dtype.kind == "b":
        data &= 1
    return data.view(dtype).reshape(shape)


@st.composite
def _random_states(draw: st.DrawFn) -> Any:
    """The states of random number generators, as they are given out."""
    seed = draw(st.integers(0, 1000))
    kind = draw(st.sampled_from(["random", "numpy", "numpy legacy", "torch"]))
    if kind == "random":
        return random.Random(seed).getstate()
    if kind == "numpy":
        return np.random.default_rng(seed).bit_generator.state
    if kind == "numpy legacy":
        return np.random.RandomState(seed).get_state()
    return torch.Generator().manual_seed(seed).get_state()


values: st.SearchStrategy[Any] = _evenly(
    _atoms,
    _atoms,
    st.binary(max_size=9).map(bytearray),
    st.integers(1025, 5000).map(lambda size: random.Random(size).randbytes(size))
    | st.integers(1025, 2000).map(lambda size: bytearray(random.Random(size).randbytes(size))),
    arrays(),
    arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    st.sets(_atoms.filter(_usable_as_key), max_size=3)
    | st.frozensets(_atoms.filter(_usable_as_key), max_size=3),
    _random_states(),
    st.dictionaries(st.text(max_size=3) | st.integers(0, 9), st.integers(0, 5), max_size=3).map(Counter),
    st.builds(deque, st.lists(_atoms, max_size=3), st.none() | st.integers(3, 9)),
)
"""Anything that is kept without pickle and holds no tensor, but for the generator state of torch."""


# --- tensors -------------------------------------------------------------------------------------


def _memory(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (MEMORY_NBYTES,), dtype=torch.uint8, generator=generator)


@st.composite
def tensors(draw: st.DrawFn, memory: st.SearchStrategy[torch.Tensor] | None = None) -> torch.Tensor:
    """A tensor of any dtype and layout.

    memory: uint8 tensors of `MEMORY_NBYTES` that the drawn ones are to lie in; by default each has its own.
    """
    dtype = draw(_evenly(st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(DTYPES)))
    raw = draw(st.integers(0, 1 << 30)) if memory is None else 0
    flat = (_memory(raw) if memory is None else draw(memory)).view(dtype)
    if dtype is torch.bool and flat.view(torch.uint8).max() > 1:
        flat = (flat.view(torch.uint8) & 1).view(dtype)
    layout = draw(st.sampled_from(sorted(_LAYOUTS)))
    start = draw(st.integers(0, 7))
    made = _LAYOUTS[layout](draw, flat[start:])
    # Not of elements that lie on one another: torch refuses to write into such a view.
    is_target = layout not in ("expanded", "windows")
    if dtype in (torch.complex64, torch.complex128) and is_target and draw(st.booleans()):
        made = made.conj()
        if draw(st.booleans()):
            made = made.imag  # a negated view
    elif (dtype.is_floating_point and dtype.itemsize > 1) and draw(st.integers(0, 3)) == 0:
        made = torch.nn.Parameter(made)
    return made


def _draw_shape(draw: st.DrawFn, *, least: int = 0, nelem: int) -> list[int]:
    shape: list[int] = []
    for _ in range(draw(st.integers(least, 4))):
        shape.append(draw(st.integers(1, min(5, nelem // math.prod(shape)))))
    return shape


def _in_c_order(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    shape = _draw_shape(draw, nelem=flat.numel())
    return flat[: math.prod(shape)].view(shape)


def _permuted(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    shape = _draw_shape(draw, least=2, nelem=flat.numel())
    order = draw(st.permutations(range(len(shape))).filter(lambda order: order != sorted(order)))
    return flat[: math.prod(shape)].view(shape).permute(order)


def _channels_last(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    n, c, h, w = (draw(st.integers(1, 2)) for _ in range(4))
    return flat[: n * c * h * w].view(n, h, w, c).permute(0, 3, 1, 2)


def _with_gaps(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    matrix = flat[: flat.numel() // 4 * 4].view(-1, 4)
    start, stop = sorted((draw(st.integers(0, 4)), draw(st.integers(0, 4))))
    return matrix[:: draw(st.integers(1, 3)), start:stop]


def _expanded(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    count = draw(st.integers(1, 4))
    return flat[:count].view(count, 1).expand(-1, draw(st.integers(1, 4)))


def _windows(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    """Rows that overlap: of k elements, each s after the one before."""
    k, s = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return flat[: flat.numel() // 2].unfold(0, k, s) if flat.numel() // 2 >= k else flat[:0].view(0, 2)


def _scalar(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    return flat[draw(st.integers(0, 9))]


def _empty(draw: st.DrawFn, flat: torch.Tensor) -> torch.Tensor:
    return flat[:0].view(draw(st.sampled_from([(0,), (0, 3), (2, 0, 5)])))


_LAYOUTS: dict[str, Callable[[st.DrawFn, torch.Tensor], torch.Tensor]] = {
    "C order": _in_c_order,
    "channels last": _channels_last,
    "empty": _empty,
    "expanded": _expanded,
    "permuted": _permuted,
    "scalar": _scalar,
    "windows": _windows,
    "with gaps": _with_gaps,
}


@st.composite
def families(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of one matrix, which may be among them: the ways in which the tensors of a state are tied."""
    dtype = draw(_evenly(st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(DTYPES)))
    memory = _memory(draw(st.integers(0, 1 << 30)))
    if dtype is torch.bool:
        memory &= 1
    rows, columns, start = draw(st.integers(2, 6)), draw(st.integers(2, 6)), draw(st.integers(0, 7))
    base = memory.view(dtype)[start : start + rows * columns].view(rows, columns)
    kinds = draw(st.lists(st.sampled_from(sorted(_VIEWS)), min_size=2, max_size=5))
    views = [_VIEWS[kind](draw, base) for kind in kinds]
    if draw(st.integers(0, 2)):
        views.insert(draw(st.integers(0, len(views))), base)
    return views


def _span(draw: st.DrawFn, size: int) -> slice:
    start = draw(st.integers(0, size - 1))
    return slice(start, draw(st.integers(start + 1, size)))


_VIEWS: dict[str, Callable[[st.DrawFn, torch.Tensor], torch.Tensor]] = {
    "bytes": lambda draw, base: base.view(torch.uint8),
    "columns": lambda draw, base: base[:, _span(draw, base.shape[1])],
    "every other row": lambda draw, base: base[draw(st.integers(0, 1)) :: 2],
    "flat": lambda draw, base: base.view(-1),
    "range": lambda draw, base: base.view(-1)[_span(draw, base.numel())],
    "rows": lambda draw, base: base[_span(draw, base.shape[0])],
    "same": lambda draw, base: base.detach(),
    "transposed": lambda draw, base: base.t(),
    "transposed rows": lambda draw, base: base[_span(draw, base.shape[0])].t(),
}


# --- states --------------------------------------------------------------------------------------


class Stateful:
    """An object that is stored as its `state_dict()`."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


@st.composite
def _chunks(draw: st.DrawFn, tensor: torch.Tensor, *, parts: bool) -> LocalChunk:
    shape = tuple(tensor.shape)
    before, after = (draw(st.tuples(*(st.integers(0, 3 if parts else 0) for _ in shape))) for _ in range(2))
    if tensor.dim() == 1 and tensor.numel() and draw(st.booleans()):
        count = before[0] + shape[0] + after[0]
        factor = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        return LocalChunk(tensor, (count,), before, (factor, count // factor))
    whole = tuple(map(sum, zip(before, shape, after, strict=True)))
    return LocalChunk(tensor, whole, before)


@st.composite
def states(draw: st.DrawFn, *, max_leaves: int = 12, parts: bool = False) -> dict[Any, Any]:
    """A state: nested dicts, lists, tuples, OrderedDicts and objects of tensors and values.

    Its tensors may be tied, overlap, or be views of the same memory. parts: its `LocalChunk`s may be parts of
    larger tensors; by default they are whole.
    """
    memories = [_memory(seed) for seed in draw(st.lists(st.integers(0, 1 << 30), max_size=2))]
    pool = draw(st.lists(tensors(), max_size=4))
    if memories:
        pool += draw(st.lists(tensors(st.sampled_from(memories)), min_size=1, max_size=6))
    if draw(st.booleans()):
        pool += draw(families())
    leaves = values
    if pool:
        # By number, for hypothesis shows what it samples from, and torch cannot show tensors of every dtype.
        drawn = st.integers(0, len(pool) - 1).map(lambda number: pool[number])
        chunks = drawn.flatmap(lambda tensor: _chunks(tensor, parts=parts))
        leaves = _evenly(drawn, drawn.map(torch.Tensor.detach), chunks, values)
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(_text, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
            | st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
        ),
        max_leaves=max_leaves,
    )
    state = draw(st.dictionaries(keys, nested, max_size=4))
    # A tree that is small, as most are, would hold few of them.
    leftover = pool + draw(st.lists(values, max_size=3))
    within = st.dictionaries(keys, leaves | st.lists(leaves, max_size=2), max_size=3)
    leftover += draw(st.lists(within.map(Stateful), max_size=2))
    names = draw(st.lists(keys, min_size=len(leftover), max_size=len(leftover), unique=True))
    state[draw(keys)] = dict(zip(names, leftover, strict=True))
    return state


def blank(state: Any) -> Any:
    """A target for `state`: of the same structure, its tensors tied in the same way, its content garbage."""
    return _Blank().copy(state)


def shown(state: Any) -> str:
    """The state as text, for a failing example; `repr` fails for tensors of some dtypes."""
    if isinstance(state, torch.Tensor):
        return (
            f"<{type(state).__name__} {str(state.dtype).removeprefix('torch.')} {tuple(state.shape)} strides "
            f"{state.stride()} at {state.data_ptr():#x}{' conj' if state.is_conj() else ''}"
            f"{' negated' if state.is_neg() else ''}>"
        )
    if isinstance(state, LocalChunk):
        chunk = f"{state.global_shape}, {state.offsets}, {state.flat_of}"
        return f"LocalChunk({shown(state.tensor)}, {chunk})"
    if isinstance(state, Stateful):
        return f"Stateful({shown(state.state)})"
    if isinstance(state, dict):
        inside = ", ".join(f"{key!r}: {shown(value)}" for key, value in state.items())
        return f"OrderedDict({{{inside}}})" if isinstance(state, OrderedDict) else f"{{{inside}}}"
    if type(state) in (list, tuple):
        inside = ", ".join(map(shown, state))
        return f"[{inside}]" if type(state) is list else f"({inside}{',' if len(state) == 1 else ''})"
    return repr(state)


class _Blank:
    def __init__(self) -> None:
        self._memories: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, LocalChunk):
            return replace(value, tensor=self._tensor(value.tensor))
        if isinstance(value, Stateful):
            return Stateful(self.copy(value.state))
        if isinstance(value, Counter):
            return Counter("garbage")
        if isinstance(value, dict):
            return type(value)((key, self.copy(inner)) for key, inner in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, bytearray):
            return bytearray(b"\xaa" * len(value))
        if type(value) is set:
            return {"garbage"}
        return None if isinstance(value, str) else "garbage"

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj():
            return self._tensor(tensor.detach().conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self._tensor(torch._neg_view(tensor.detach())))
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._memories:
            fresh = torch.full((memory.nbytes(),), 0xAA, dtype=torch.uint8)
            self._memories[memory.data_ptr()] = fresh.untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(
            self._memories[memory.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made
