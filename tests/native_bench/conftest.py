"""The native programs, built once for all tests: with what was found, and as if no library were there."""

from __future__ import annotations

import pytest

from native_bench.building import Build, ToolMissing, build

WITHOUT = ("-DNATIVE_BENCH_LIBURING=OFF", "-DNATIVE_BENCH_LIBXXHASH=OFF", "-DNATIVE_BENCH_LIBZSTD=OFF")


def _build(factory: pytest.TempPathFactory, *options: str) -> Build:
    try:
        # Debug, as nothing is measured here and it compiles twice as fast.
        return build(
            factory.mktemp("programs"),
            options=("-DNATIVE_BENCH_WERROR=ON", "-DCMAKE_BUILD_TYPE=Debug", *options),
        )
    except ToolMissing as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return _build(tmp_path_factory)


@pytest.fixture(scope="session")
def bare_programs(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return _build(tmp_path_factory, *WITHOUT)
