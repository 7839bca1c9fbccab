"""Who stores what: the same answer on every rank, balanced by bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptengine.adapters.replicas import Unit, assign

groups = st.sampled_from([(0, 1), (2, 3), (0, 1, 2, 3), (5, 3, 7)])
units = st.lists(st.builds(Unit, nbytes=st.integers(0, 1000), ranks=groups), max_size=30)


@given(units)
def test_every_unit_has_an_owner_among_its_ranks_and_none_has_much_more(units: list[Unit]) -> None:
    owners = assign(units)
    for unit, owner in zip(units, owners, strict=True):
        assert owner in unit.ranks
    for ranks in {unit.ranks for unit in units}:
        mine = [(unit, owner) for unit, owner in zip(units, owners, strict=True) if unit.ranks == ranks]
        loads = [sum(unit.nbytes for unit, owner in mine if owner == rank) for rank in ranks]
        assert max(loads) - min(loads) <= max(unit.nbytes for unit, _ in mine)


@given(units)
def test_ranks_agree_whatever_else_they_hold(units: list[Unit]) -> None:
    """A rank sees only the units it holds itself."""
    owners = dict(enumerate(assign(units)))
    for rank in range(8):
        held = [index for index, unit in enumerate(units) if rank in unit.ranks]
        assert assign([units[index] for index in held]) == [owners[index] for index in held]
