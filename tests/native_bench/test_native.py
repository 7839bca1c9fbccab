"""Are the knobs of the limits found once for cases that are alike, and used for all of them?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from native_bench import limits
from native_bench.cases import FULL
from native_bench.native import Limits, Tuned
from native_bench.results import STREAMING


def test_knobs_are_found_once_for_cases_of_a_kind_and_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, Any]] = []
    used: list[tuple[Any, Any]] = []
    write = limits.WriteKnobs(threads=4, block=16 << 20)
    read = limits.ReadKnobs(threads=4)
    huge, copied = limits.WriteKnobs(pages="huge"), limits.ReadKnobs(into="copy")

    def best(*found: Any) -> Any:
        rates = zip(found, range(len(found), 0, -1), strict=True)
        return limits.Best(found[0], 1.0, tuple(rates), ())

    def best_direct_write(directory: Path, nbytes: int, *, files: int, rounds: int) -> Any:
        tried.append(("write", nbytes))
        return best(write, limits.WriteKnobs(), huge)

    def best_direct_read(paths: list[str], *, rounds: int) -> Any:
        tried.append(("read", paths))
        return best(read, limits.ReadKnobs(), copied)

    def measured(*given: Any, **more: Any) -> Any:
        used.append((given, more))
        if more.get("repeat") == 1:  # by a probe of these knobs
            return SimpleNamespace(seconds=(5.0 - len(used),))
        return SimpleNamespace(seconds=(3.0, 1.0, 2.0), gib_s=1.0)

    monkeypatch.setattr(limits, "build", lambda: None)
    monkeypatch.setattr(limits, "best_direct_write", best_direct_write)
    monkeypatch.setattr(limits, "best_direct_read", best_direct_read)
    for name in ("direct_write", "direct_read", "memcpy"):
        monkeypatch.setattr(limits, name, measured)
    tuned: dict[tuple[str, str], Tuned] = {}
    by_name = {case.name: case for case in FULL}
    for name in ("large", "two-ranks", "small", "tmpfs"):
        one = Limits(by_name[name], tmp_path, tuned)
        one.prepare(4096)
        used.clear()
        alone = one.alone()
        if name == "tmpfs":  # no device, and no limit of one
            assert alone == {"memcpy_s": 2.0, STREAMING: 2.0}
            assert "direct_" not in one.how
            continue
        assert alone == {"save_s": 3.0, "memcpy_s": 2.0, STREAMING: 2.0}, "the faster of two probes"
        first, second, (_, libc), (_, streaming) = used
        assert "stores" not in libc
        assert streaming["stores"] == "streaming"
        assert [given[2] for given, _ in (first, second)] == [write, huge]
        assert first[1]["files"] == by_name[name].world_size
        used.clear()
        assert one.read([f"{name}/shard-0", f"{name}/INDEX"], "cold") == {"restore_cold_s": 1.0}
        assert [given for given, _ in used] == [([f"{name}/shard-0"], knobs) for knobs in (read, copied)] * 2
        assert "`direct_write` (threads, 4, 16 MiB blocks or threads, 2, 8 MiB blocks, huge pages)" in one.how
    # Two ranks are like one, small tensors are not.
    assert [what for what, _ in tried] == ["write", "read"] * 2


def test_a_machine_without_non_temporal_stores_has_the_other_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memcpy(*given: Any, stores: str = "libc", **more: Any) -> Any:
        if stores == "streaming":
            raise limits.Unavailable("for x86-64 only")
        return SimpleNamespace(seconds=(3.0, 1.0, 2.0))

    monkeypatch.setattr(limits, "build", lambda: None)
    monkeypatch.setattr(limits, "memcpy", memcpy)
    monkeypatch.setattr(limits, "direct_write", lambda *given, **more: SimpleNamespace(seconds=(1.0,)))
    assert Limits(FULL[0], tmp_path, {}).alone() == {"save_s": 1.0, "memcpy_s": 2.0}
