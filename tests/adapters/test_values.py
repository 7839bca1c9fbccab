"""Values come back with their type and every bit; what cannot is refused by its key path."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import random
import signal
import struct
import sys
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.adapters.values import decode_value, encode_value
from ckptengine.errors import CorruptCheckpointError, UnsupportedStateError
from ckptengine.format.tree import check_tree
from tests.adapters.fake import same


class Colour(enum.Enum):
    RED = "r"
    ROUGE = "r"  # noqa: PIE796 (an alias is meant)
    BLUE = 2


class Mode(enum.Flag):
    R = 1
    W = 2
    X = 4
    RW = 3


class Holder:
    class Inner(enum.IntEnum):
        ONE = 1


Point = collections.namedtuple("Point", "x y")


def through_json(value: Any, **options: Any) -> Any:
    node = encode_value(value, **options)
    check_tree(node, 0)
    again = msgspec.json.decode(msgspec.json.encode(node))
    assert msgspec.json.encode(again) == msgspec.json.encode(node)
    return decode_value(again, **options)


NAN = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
STRUCT = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "S3"), ("d", [("e", "<U2")])])

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**53,
    2**53 + 1,
    -(2**53) - 1,
    10**400,
    -(10**400),
    0.0,
    -0.0,
    1e300,
    5e-324,
    1.0,
    1e16,
    math.inf,
    -math.inf,
    NAN,
    complex(-0.0, NAN),
    complex(1, math.inf),
    "",
    "naïve 🙂",
    "\ud800 lone",
    "nul \x00 end",
    b"",
    b"\x00\xff",
    bytearray(b"abc"),
    [],
    [1, [2, [3]]],
    (),
    (1, (2,)),
    {},
    {"a": 1, "b": {"c": None}},
    {"$": 1},
    {"$": "t", "i": 0},
    {"\udcff": 1},
    {1: "int", "1": "str", 1.5: "float", None: 0, False: 2} | {(1, ("x", b"y")): "tuple"},
    {Colour.RED: 1, torch.float32: 2, frozenset({1}): 3, b"k": 4, torch.device("cpu"): 5},
    {math.inf: 1, 2**70: 2},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.OrderedDict(),
    collections.Counter({"b": 2, ("a", 1): 1}),
    collections.deque([1, (2,), "x"], maxlen=5),
    collections.deque(),
    set(),
    {1, "a", (2, 3), None},
    frozenset({b"x", 1.5}),
    torch.float32,
    torch.bfloat16,
    torch.complex32,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([]),
    torch.Size([2, 0, 3]),
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.preserve_format,
    Colour.RED,
    Colour.ROUGE,
    Mode.R | Mode.X,
    Mode.RW,
    Mode.R,
    Holder.Inner.ONE,
    np.dtype("float32"),
    np.dtype(">i2"),
    STRUCT,
    np.float32(1.5),
    np.float64("nan"),
    np.int8(-3),
    np.bool_(True),
    np.complex128(1 + 2j),
    np.str_("näm"),
    np.str_(""),
    np.bytes_(b"a\x00b"),
    np.datetime64("2024-02-29T12:00", "s"),
    np.datetime64("NaT"),
    np.timedelta64(5, "D"),
    np.longdouble("1.1"),
    np.zeros(3),
    np.array(7),
    np.arange(12).reshape(3, 4),
    np.asfortranarray(np.arange(12).reshape(3, 4)),
    np.arange(12).reshape(3, 4)[:, ::2].copy(),
    np.arange(6, dtype=">u4"),
    np.zeros((0, 3)),
    np.array([b"ab", b"c"]),
    np.array(["å", "bc"]),
    np.array(["", ""]),
    np.array([True, False]),
    np.array(["2020", "NaT"], dtype="M8[D]"),
    np.array([1, 2], dtype="m8[ns]"),
    np.zeros(2, STRUCT),
    np.zeros((), STRUCT)[()],
    np.arange(4, dtype=np.float16),
    random.Random(3).getstate(),
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    signal.SIGTERM,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_value_comes_back_with_type_and_bits(value: Any) -> None:
    again = through_json(value)
    assert same(again, value), (again, value)
    assert same(through_json([value, (value,), {"k": value}]), [value, (value,), {"k": value}])


def test_array_that_is_not_contiguous_comes_back_in_c_order() -> None:
    array = np.arange(24).reshape(4, 6)[::2, ::3]
    again = through_json(array)
    assert np.array_equal(again, array)
    assert again.flags.c_contiguous


def test_arrays_own_their_memory_and_can_be_written() -> None:
    array = through_json(np.zeros(3))
    array[0] = 1
    assert array.flags.owndata


def test_list_used_twice_is_copied_twice() -> None:
    shared = [1]
    first, second = through_json([shared, shared])
    assert first == second == [1]
    assert first is not second


def test_sets_are_encoded_in_one_order() -> None:
    names = [f"name{i}" for i in range(50)]
    assert encode_value(set(names)) == encode_value({*names[25:], *names})


keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.binary().map(bytearray)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
        | st.frozensets(keys, max_size=4)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_any_nested_value_comes_back(value: Any) -> None:
    assert same(through_json(value), value)


class Custom:
    pass


class MyInt(int):
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyArray(np.ndarray):  # type: ignore[type-arg]
    pass


def _local_enum() -> Any:
    class Local(enum.Enum):
        A = 1

    return Local.A


REFUSED = [
    Custom(),
    MyInt(1),
    MyDict(a=1),
    Point(1, 2),
    collections.defaultdict(list),
    collections.UserDict(a=2),
    collections.UserList([1]),
    datetime.datetime(2024, 1, 1),
    len,
    lambda: None,
    int,
    types,
    torch.Generator(),
    np.zeros(2, dtype=object),
    np.zeros(2).view(MyArray),
    np.ma.masked_array([1, 2], [0, 1]),
    np.dtype("O"),
    np.dtype("i4", metadata={"a": 1}),
    np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]}),
    range(3),
    slice(1),
    ...,
    _local_enum(),
    memoryview(b"a"),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: repr(value)[:40])
def test_other_types_are_refused_with_their_key_path(value: Any) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode_value({"a": [0, 1, 2, {"b": (value,)}]}, path="state")
    assert caught.value.fqn == 'state["a"][3]["b"][0]'
    assert 'state["a"][3]["b"][0]' in str(caught.value)


def test_path_shows_keys_of_any_type() -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode_value({(1, "x"): {Colour.RED: {"\udc80": Custom()}}}, path="metadata")
    assert caught.value.fqn == "metadata[(1, 'x')][<Colour.RED: 'r'>]['\\udc80']"


@pytest.mark.parametrize("key", [Custom(), (1, Custom()), Point(1, 2)])
def test_keys_of_other_types_are_refused(key: Any) -> None:
    with pytest.raises(UnsupportedStateError):
        encode_value({key: 1})


def test_cycles_are_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(UnsupportedStateError, match="contains itself") as caught:
        encode_value(loop)
    assert caught.value.fqn == 'value[1]["again"]'


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {1: (x,)}, lambda x: {"a": [x]}])
@pytest.mark.parametrize(
    "leaf", [1, 2**70, 1j, np.dtype([("a", [("b", [("c", "<i4")])])]), np.zeros(2, STRUCT), torch.Size([1])]
)
def test_nesting_beyond_the_format_is_refused_and_within_it_can_be_read(wrap: Any, leaf: Any) -> None:
    value, depth = leaf, 0
    try:
        while depth < 100:
            assert same(through_json(value), value)
            value, depth = wrap(value), depth + 1
    except UnsupportedStateError as error:
        assert "nested too deep" in str(error)  # noqa: PT017 (the depth is what is sought)
    assert 8 <= depth < 64


def test_values_of_other_types_are_pickled_on_request_only() -> None:
    value = {"when": datetime.datetime(2024, 1, 1), "p": Point(1, 2)}
    node = encode_value(value, allow_pickle=True)
    assert decode_value(node, allow_pickle=True) == value
    with pytest.raises(UnsupportedStateError, match="allow_pickle=True") as caught:
        decode_value(node, path="state")
    assert caught.value.fqn == 'state["when"]'


def test_what_cannot_be_pickled_either_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedStateError, match=r'state\["f"\].*pickle'):
        encode_value({"f": lambda: None}, path="state", allow_pickle=True)


def test_pickle_that_fails_to_load_names_its_path() -> None:
    with pytest.raises(CorruptCheckpointError, match=r'value\["x"\]'):
        decode_value({"x": {"$": "pickle", "v": "AAAA"}}, allow_pickle=True)


MALFORMED = [
    {"$": "t", "i": 0},
    {"$": "nothing"},
    {"$": "float", "v": "00"},
    {"$": "bytes", "v": "a"},
    {"$": "dtype", "v": "nn"},
    {"$": "dtype", "v": "load"},
    {"$": "layout", "v": "float32"},
    {"$": "device", "v": "nowhere"},
    {"$": "npdtype", "v": "|O"},
    {"$": "npdtype", "v": [["a", "<i4", "x"]]},
    {"$": "npdtype", "v": [["a"]]},
    {"$": "npdtype", "v": "nonsense"},
    {"$": "ndarray", "d": "|O", "s": [1], "v": "AAAAAAAAAAA="},
    {"$": "ndarray", "d": "<i4", "s": [2], "v": "AAAA"},
    {"$": "ndarray", "d": "<i4", "s": [-1], "v": ""},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": [[1]]},
    {"$": "enum", "m": "os", "q": "system", "n": "x"},
    {"$": "enum", "m": "enum", "q": "Enum", "n": "mro"},
    {"$": "enum", "m": "no.such.module", "q": "A", "n": "B"},
    {"$": "enum", "m": "socket", "q": "AddressFamily", "n": "AF_NOTHING"},
    {"$": "enum", "m": "tests.adapters.test_values", "q": "Custom.__init__", "n": "x"},
    {"$": "int", "v": "xyz"},
    {"$": "complex", "v": []},
    {"$": "str", "v": "/w=="},
]


@pytest.mark.parametrize("node", MALFORMED, ids=str)
def test_malformed_nodes_are_an_error_that_names_the_path(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r'value\["k"\]\[1\]'):
        decode_value({"k": [0, node]})


def test_no_module_is_imported_for_an_enum() -> None:
    assert "antigravity" not in sys.modules
    for module in ("antigravity", "this", "pip"):
        before = set(sys.modules)
        with pytest.raises(CorruptCheckpointError, match="not imported"):
            decode_value({"$": "enum", "m": module, "q": "A", "n": "B"})
        assert set(sys.modules) == before


def test_enum_of_the_standard_library_is_found_without_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards: other tests hold members of the first import's classes.
    monkeypatch.delitem(sys.modules, "http", raising=False)
    assert decode_value({"$": "enum", "m": "http", "q": "HTTPStatus", "n": "OK"}).value == 200
