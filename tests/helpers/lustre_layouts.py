"""Values of `lustre.lov`, put together field by field, as Lustre's header declares them."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30
V1, JOIN, V3, SPECIFIC = 0x0BD10BD0, 0x0BD20BD0, 0x0BD30BD0, 0x0BD50BD0
COMPOSITE, FOREIGN = 0x0BD60BD0, 0x0BD70BD0
RAID0, MDT, OVERSTRIPED, RELEASED = 0x1, 0x100, 0x200, 0x80000000
STALE, INIT, EXTENSION = 0x1, 0x10, 0x40
EOF = 0xFFFFFFFFFFFFFFFF


def u(nbytes: int, value: int) -> bytes:
    return value.to_bytes(nbytes, "little")


def plain(
    osts: tuple[int, ...] = (),
    *,
    magic: int = V1,
    pattern: int = RAID0,
    stripe_size: int = MIB,
    count: int | None = None,
    pool: bytes | None = None,
) -> bytes:
    """struct lov_user_md_v1 (v3 with a pool), with a lov_user_ost_data_v1 for each OST."""
    data = u(4, magic if pool is None else V3)  # lmm_magic
    data += u(4, pattern)  # lmm_pattern
    data += u(8, 0x1A2B) + u(8, 0x200000401)  # lmm_oi: id, sequence
    data += u(4, stripe_size)  # lmm_stripe_size
    data += u(2, len(osts) if count is None else count)  # lmm_stripe_count
    data += u(2, 0xFFFF)  # lmm_stripe_offset
    if pool is not None:
        data += pool.ljust(16, b"\0")  # lmm_pool_name
    for ost in osts:
        data += u(8, 77) + u(8, 0)  # l_ost_oi
        data += u(4, 0) + u(4, ost)  # l_ost_gen, l_ost_idx
    return data


def composite(*parts: tuple[int, int, int, int, bytes], mirrors: int = 1) -> bytes:
    """struct lov_comp_md_v1 of (id, flags, start, end, body), each a lov_comp_md_entry_v1."""
    offset = 32 + 48 * len(parts)
    entries, bodies = b"", b""
    for ident, flags, start, end, body in parts:
        entries += u(4, ident) + u(4, flags)  # lcme_id, lcme_flags
        entries += u(8, start) + u(8, end)  # lcme_extent
        entries += u(4, offset + len(bodies)) + u(4, len(body))  # lcme_offset, lcme_size
        entries += u(4, 3) + u(8, 1_700_000_000) + bytes(4)  # lcme_layout_gen, lcme_time_and_id, …
        bodies += body
    head = u(4, COMPOSITE) + u(4, offset + len(bodies))  # lcm_magic, lcm_size
    head += u(4, 9) + u(2, 0) + u(2, len(parts))  # lcm_layout_gen, lcm_flags, lcm_entry_count
    head += u(2, mirrors - 1) + bytes(2) + bytes(4) + bytes(8)  # lcm_mirror_count, …
    assert len(head) == 32
    return head + entries + bodies


FSX = composite(
    (1, INIT, 0, 100 * MIB, plain((5,))),
    (2, INIT, 100 * MIB, 10 * GIB, plain(tuple(range(8)))),
    (3, 0, 10 * GIB, 100 * GIB, plain(count=16)),
    (4, 0, 100 * GIB, EOF, plain(count=32)),
)
"""What an FSx file system gives a file of some GiB by default: objects for what has been written."""
