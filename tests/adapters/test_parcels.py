"""Are tensors that share memory one parcel, and names in the order in which they were given?"""

from __future__ import annotations

import pytest

from ckptengine.adapters.parcels import Parcels


def test_memory_is_cut_where_no_two_tensors_overlap() -> None:
    parcels = Parcels([("c", (20, 30)), ("a", (0, 8)), ("b", (4, 10)), ("d", (30, 40))])
    assert parcels.names == [["a", "b"], ["c"], ["d"]]
    assert [parcels.at(address) for address in (0, 9, 20, 29, 30, 39)] == [0, 0, 1, 1, 2, 2]
    assert list(parcels.within((9, 31))) == [0, 1, 2]
    assert list(parcels.within((10, 20))) == []
    for address in (10, 40):
        with pytest.raises(KeyError):
            parcels.at(address)


def test_names_keep_their_order() -> None:
    parcels = Parcels([("c", (20, 30)), ("none", (0, 0)), ("a", (0, 8)), ("b", (4, 10))])
    assert list(parcels.of_name.items()) == [("c", 1), ("none", None), ("a", 0), ("b", 0)]


def test_a_name_of_several_parts_has_a_parcel_if_one_of_them_has() -> None:
    for named in ([("s", (0, 0)), ("s", (8, 16))], [("s", (8, 16)), ("s", (0, 0))]):
        assert Parcels(named).of_name == {"s": 0}
