"""How much memory does a restore need beside the target? Measured in processes that do nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from native_bench.memory import MIB, POOL_NBYTES, restored, saved

N = 8
NBYTES = 512 * MIB


@pytest.mark.parametrize("codec", ["raw", pytest.param("zstd", marks=[pytest.mark.slow, pytest.mark.sample])])
def test_a_restore_needs_no_more_than_its_pool_beside_the_target(tmp_path: Path, codec: str) -> None:
    saved(tmp_path, codec, N, NBYTES)
    for layout in ("straight", "turned"):
        peak = restored(tmp_path, layout, N, NBYTES)
        assert peak <= POOL_NBYTES, f"{layout}: {peak / MIB:.0f} MiB"
        print(f"{codec}, {layout}: {peak / MIB:.0f} MiB beside a target of {NBYTES // MIB} MiB")
