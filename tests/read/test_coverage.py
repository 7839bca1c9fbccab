from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptengine.read.coverage import Region, describe, first_gap, region

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(shapes)
    chunks = []
    for _ in range(draw(st.integers(0, 6))):
        bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        chunks.append(tuple((low, high) for low, high in bounds))
    return shape, chunks


@given(arrangements())
def test_a_gap_is_found_exactly_when_an_element_is_uncovered(
    arrangement: tuple[tuple[int, ...], list[Region]],
) -> None:
    shape, chunks = arrangement

    def inside(index: tuple[int, ...], area: Region) -> bool:
        return all(start <= i < stop for i, (start, stop) in zip(index, area, strict=True))

    uncovered = {
        index for index in product(*map(range, shape)) if not any(inside(index, chunk) for chunk in chunks)
    }
    gap = first_gap(shape, chunks)
    if gap is None:
        assert not uncovered
    else:
        elements = set(product(*(range(start, stop) for start, stop in gap)))
        assert elements
        assert elements <= uncovered


def test_a_mesh_of_many_chunks_is_checked_quickly() -> None:
    chunks = [region((8 * i, 8 * j), (8, 8)) for i in range(64) for j in range(32)]
    assert first_gap((512, 256), chunks) is None
    del chunks[777]
    gap = first_gap((512, 256), chunks)
    assert gap == region((8 * (777 // 32), 8 * (777 % 32)), (8, 8))
    assert describe(gap) == "[192:200, 72:80]"
