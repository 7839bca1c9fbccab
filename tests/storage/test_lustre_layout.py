"""Layouts byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.storage import lustre, lustre_layout
from ckptengine.storage.lustre_layout import ALL_OSTS, Component, Layout, LayoutError, decode, encode
from tests.helpers.lustre_layouts import (
    COMPOSITE,
    EOF,
    EXTENSION,
    FOREIGN,
    FSX,
    GIB,
    INIT,
    JOIN,
    MDT,
    MIB,
    OVERSTRIPED,
    RAID0,
    RELEASED,
    SPECIFIC,
    STALE,
    V1,
    composite,
    plain,
    u,
)


class TestDecode:
    def one(self, data: bytes) -> Component:
        layout = decode(data)
        assert layout.kind == "plain"
        (component,) = layout.components
        return component

    def test_v1_of_a_file(self) -> None:
        assert decode(plain((3, 0, 7), stripe_size=4 * MIB)) == Layout(
            "plain", (Component(0, None, "raid0", 3, 4 * MIB, osts=(3, 0, 7)),)
        )

    def test_v1_in_hex(self) -> None:
        # Without the helpers above: two stripes of 1 MiB, as `getfattr -e hex -n lustre.lov` shows them.
        data = bytes.fromhex(
            "d00bd10b 01000000 6504000000000000 0104000002000000 00001000 0200 ffff"
            "e705000000000000 0000000000000000 00000000 01000000"
            "c805000000000000 0000000000000000 00000000 00000000"
        )
        assert self.one(data) == Component(0, None, "raid0", 2, MIB, osts=(1, 0))

    def test_v1_of_a_directory_has_no_objects(self) -> None:
        assert self.one(plain(count=4)) == Component(0, None, "raid0", 4, MIB)

    @pytest.mark.parametrize(("count", "expected"), [(0xFFFF, ALL_OSTS), (0, 0), (2000, 2000)])
    def test_counts_of_a_directory(self, count: int, expected: int) -> None:
        assert self.one(plain(count=count)).stripe_count == expected

    def test_v3_has_a_pool(self) -> None:
        assert self.one(plain((1, 2), pool=b"flash")) == Component(
            0, None, "raid0", 2, MIB, pool="flash", osts=(1, 2)
        )

    @pytest.mark.parametrize(
        ("name", "expected"),
        [(b"", None), (b"x" * 15, "x" * 15), (b"y" * 16, "y" * 16), (b"a\0zz", "a"), (b"\xff\n", "\\xff\n")],
    )
    def test_names_of_pools(self, name: bytes, expected: str | None) -> None:
        assert self.one(plain(pool=name)).pool == expected

    def test_specific_is_a_v3(self) -> None:
        data = u(4, SPECIFIC) + plain((4, 2), pool=b"p")[4:]
        assert self.one(data).osts == (4, 2)

    @pytest.mark.parametrize("data", [plain((), pattern=RAID0 | RELEASED, count=4), plain(pattern=RELEASED)])
    def test_a_released_file(self, data: bytes) -> None:
        layout = decode(data)
        assert layout.released
        assert layout.components[0].osts == ()
        assert layout.components[0].pattern == "raid0"
        assert not decode(plain((1,))).released

    @pytest.mark.parametrize(
        ("bits", "expected"),
        [
            (0, "raid0"),
            (RAID0, "raid0"),
            (RAID0 | OVERSTRIPED, "overstriped"),
            (RAID0 | 0x4, "raid0"),  # parity
            (RAID0 | 0x800, "raid0"),  # compressed
            (MDT, "mdt"),
            (0x400, "foreign"),
            (0x2, "other"),
            (RAID0 | 0x40000000, "raid0"),  # with a hole
        ],
    )
    def test_patterns(self, bits: int, expected: str) -> None:
        assert self.one(plain((), pattern=bits, count=0)).pattern == expected

    def test_a_progressive_layout(self) -> None:
        assert decode(FSX) == Layout(
            "composite",
            (
                Component(0, 100 * MIB, "raid0", 1, MIB, osts=(5,)),
                Component(100 * MIB, 10 * GIB, "raid0", 8, MIB, osts=tuple(range(8))),
                Component(10 * GIB, 100 * GIB, "raid0", 16, MIB),
                Component(100 * GIB, None, "raid0", 32, MIB),
            ),
        )

    def test_data_on_the_metadata_server_and_pools(self) -> None:
        layout = decode(
            composite(
                (1, INIT, 0, MIB, plain((), pattern=MDT)), (2, INIT, MIB, EOF, plain((1, 2), pool=b"flash"))
            )
        )
        assert [c.pattern for c in layout.components] == ["mdt", "raid0"]
        assert layout.components[1].pool == "flash"
        assert layout.pool is None

    def test_mirrors(self) -> None:
        layout = decode(
            composite(
                (1 << 16 | 1, INIT, 0, EOF, plain((0,), pool=b"flash")),
                (2 << 16 | 2, INIT | STALE, 0, EOF, plain((1,), pool=b"flash")),
                mirrors=2,
            )
        )
        assert layout.mirrors == 2
        assert [(c.mirror, c.stale, c.osts) for c in layout.components] == [(1, False, (0,)), (2, True, (1,))]
        assert layout.pool == "flash"

    def test_a_component_that_extends_itself(self) -> None:
        layout = decode(
            composite(
                (1, INIT, 0, 64 * MIB, plain((0,))),
                (2, EXTENSION, 64 * MIB, GIB, plain(count=1, stripe_size=64 * MIB)),
                (3, EXTENSION, GIB, GIB, plain(count=1)),
            )
        )
        assert [c.extension for c in layout.components] == [False, True, True]

    def test_released_is_what_is_released_whole(self) -> None:
        away = plain((), pattern=RAID0 | RELEASED, count=1)
        assert decode(composite((1, INIT, 0, MIB, away), (2, INIT, MIB, EOF, away))).released
        assert not decode(composite((1, INIT, 0, MIB, away), (2, INIT, MIB, EOF, plain((1,))))).released

    def test_foreign_layouts(self) -> None:
        foreign = u(4, FOREIGN) + u(4, 5) + u(4, 1) + u(4, 0) + b"hello"
        assert decode(foreign) == Layout("foreign", ())
        assert not decode(foreign).released
        (component,) = decode(composite((1, INIT, 0, EOF, foreign))).components
        assert component.pattern == "foreign"
        with pytest.raises(LayoutError, match="5 bytes, there are 4"):
            decode(foreign[:-1])

    def test_bytes_after_the_layout_are_left_alone(self) -> None:
        assert decode(FSX + b"more") == decode(FSX)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "too few"),
            (b"\xd0\x0b", "too few"),
            (u(4, V1), "needs 32 bytes"),
            (u(4, 0xDEADBEEF) + bytes(60), "0xdeadbeef is unknown"),
            (u(4, JOIN) + bytes(60), "joined"),
            (plain((1, 2))[:-1], "a stripe at byte 56"),
            (plain((), pool=b"p")[:-1], "the pool's name"),
            (plain((1,), count=60_000), "a stripe"),
            (u(4, COMPOSITE) + bytes(27), "needs 32 bytes"),
            (u(4, COMPOSITE) + u(4, 31) + bytes(40), "says it has 31 bytes"),
            (u(4, COMPOSITE) + u(4, 99) + bytes(40), "says it has 99 bytes"),
            (FSX[:14] + u(2, 9999) + FSX[16:], "component"),
            (composite((1, INIT, MIB, MIB, plain((1,)))), "covers bytes"),
            (composite((1, INIT, MIB, 0, plain((1,)))), "covers bytes"),
            (composite((1, INIT, 0, EOF, b"")), "too few"),
            (composite((1, INIT, 0, EOF, FSX)), "0x0bd60bd0"),
            (FSX[:56] + u(4, 0) + FSX[60:], "says it lies at bytes 0"),
            (FSX[:56] + u(4, 0xFFFFFFF0) + FSX[60:], "says it lies"),
            (FSX[:60] + u(4, 0xFFFFFFF0) + FSX[64:], "says it lies"),
        ],
    )
    def test_what_is_malformed_is_said(self, data: bytes, message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            decode(data)

    @given(st.binary(max_size=400))
    def test_arbitrary_bytes_never_crash(self, data: bytes) -> None:
        try:
            lustre.describe(decode(data))
        except LayoutError:
            pass

    @given(st.sampled_from([FSX, plain((1, 2, 3)), plain((1,), pool=b"flash")]), st.data())
    def test_damaged_layouts_never_crash(self, data: bytes, draw: Any) -> None:
        damaged = bytearray(data[: draw.draw(st.integers(0, len(data)))])
        for _ in range(draw.draw(st.integers(0, 3))):
            if damaged:
                damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
        try:
            lustre.describe(decode(bytes(damaged)))
        except LayoutError:
            pass


class TestEncode:
    def test_v1(self) -> None:
        assert encode(4, 4 * MIB) == bytes.fromhex(
            "d00bd10b 01000000 0000000000000000 0000000000000000 00004000 0400 ffff"
        )

    def test_v3(self) -> None:
        assert encode(ALL_OSTS, 64 << 10, "flash") == bytes.fromhex(
            "d00bd30b 01000000 0000000000000000 0000000000000000 00000100 ffff ffff"
            "666c6173680000000000000000000000"
        )

    @given(
        st.one_of(st.just(ALL_OSTS), st.integers(1, 2000)),
        st.integers(1, (1 << 16) - 1),
        st.one_of(st.none(), st.text("abcxyz_-.", min_size=1, max_size=15)),
    )
    def test_what_is_encoded_is_decoded(self, count: int, quanta: int, pool: str | None) -> None:
        (component,) = decode(encode(count, quanta << 16, pool)).components
        assert component == Component(0, None, "raid0", count, quanta << 16, pool=pool)

    @pytest.mark.parametrize("count", [0, -2, 2001, 0xFFFF])
    def test_impossible_counts(self, count: int) -> None:
        with pytest.raises(ValueError, match="stripe_count"):
            encode(count, MIB)

    @pytest.mark.parametrize("nbytes", [0, -65536, 4096, MIB + 1, 1 << 32])
    def test_impossible_sizes(self, nbytes: int) -> None:
        with pytest.raises(ValueError, match="stripe_nbytes"):
            encode(1, nbytes)

    @pytest.mark.parametrize("pool", ["", "x" * 16, "a\0b"])
    def test_impossible_pools(self, pool: str) -> None:
        with pytest.raises(ValueError, match="pool"):
            encode(1, MIB, pool)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (plain((3, 1), stripe_size=4 * MIB), "2 x 4 MiB"),
        (plain(count=0xFFFF, pool=b"flash"), "all x 1 MiB, pool flash"),
        (plain(count=0, stripe_size=0), "default x 0"),
        (plain((), pattern=RAID0 | RELEASED, count=4), "4 x 1 MiB, released"),
        (plain((1, 1), pattern=RAID0 | OVERSTRIPED), "2 x 1 MiB (overstriped)"),
        (
            FSX,
            "0-100 MiB: 1 x 1 MiB, 100 MiB-10 GiB: 8 x 1 MiB, "
            "10 GiB-100 GiB: 16 x 1 MiB, 100 GiB-end: 32 x 1 MiB",
        ),
        (
            composite(
                (1 << 16, INIT, 0, MIB, plain((), pattern=MDT)),
                (1 << 16 | 1, INIT, MIB, EOF, plain((1,))),
                (2 << 16, INIT | STALE, 0, EOF, plain((1,))),
                mirrors=2,
            ),
            "0-1 MiB: on the metadata server, 1 MiB-end: 1 x 1 MiB, 0-end: 1 x 1 MiB (stale), 2 mirrors",
        ),
        (u(4, FOREIGN) + u(4, 0) + u(4, 1) + u(4, 0), "foreign"),
    ],
)
def test_how_a_layout_is_described(data: bytes, text: str) -> None:
    assert lustre.describe(lustre_layout.decode(data)) == text
