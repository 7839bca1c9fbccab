"""Do names and ids print, parse and order as the format says?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.names import (
    AttemptId,
    RunId,
    check_relative_path,
    parse_step_dirname,
    shard_filename,
    step_dirname,
)
from tests.format.strategies import attempt_ids, usual


@usual
@given(st.integers(0, 2**63 - 1))
def test_step_directory_names_come_back(step: int) -> None:
    assert parse_step_dirname(step_dirname(step)) == step


def test_step_directory_has_ten_digits_or_more() -> None:
    assert step_dirname(1000) == "step-0000001000"
    assert step_dirname(12345678901) == "step-12345678901"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-",
        "step-1",
        "step-000000001",
        "step-00000000001",
        "step-0000001000 ",
        "step-000000100x",
        "step--000000001",
        "Step-0000001000",
        "step-٠٠٠٠٠٠١٠٠٠",
        "step-9223372036854775808",
        "step-0000001000\n",
        "step-0000001000.tmp",
        "step-" + "9" * 5000,
    ],
)
def test_other_directories_are_no_steps(name: str) -> None:
    assert parse_step_dirname(name) is None


@pytest.mark.parametrize("step", [-1, 2**63])
def test_step_out_of_range_has_no_directory(step: int) -> None:
    with pytest.raises(ValueError):
        step_dirname(step)


def test_shard_files_are_told_apart_by_their_extension() -> None:
    assert shard_filename(7, compressed=False) == "shard-00007.safetensors"
    assert shard_filename(123456, compressed=True) == "shard-123456.ckptz"
    with pytest.raises(ValueError):
        shard_filename(-1, compressed=False)


@usual
@given(attempt_ids)
def test_attempt_ids_come_back(attempt: AttemptId) -> None:
    assert AttemptId.parse(str(attempt)) == attempt
    assert RunId.parse(str(attempt.run)) == attempt.run
    check_relative_path(f"{attempt}/{shard_filename(0, compressed=False)}")


@usual
@given(attempt_ids, attempt_ids)
def test_attempts_are_ordered_by_life_start_nonce_save_and_retry(a: AttemptId, b: AttemptId) -> None:
    def key(attempt: AttemptId) -> tuple[int, int, str, int, int]:
        run = attempt.run
        return run.life, run.created_ms, run.nonce, attempt.save, attempt.retry

    assert (a < b) == (key(a) < key(b))


def test_attempt_id_is_written_as_the_format_says() -> None:
    attempt = AttemptId(RunId(3, 0x18BCFE56800, "0badf00d"), save=12, retry=1)
    assert str(attempt) == "a000003-018bcfe56800-0badf00d-000012.1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "x000003-018bcfe56800-0badf00d-000012.1",
        "a3-018bcfe56800-0badf00d-000012.1",
        "a0000003-018bcfe56800-0badf00d-000012.1",
        "a000003-18bcfe56800-0badf00d-000012.1",
        "a000003-018BCFE56800-0badf00d-000012.1",
        "a000003-018bcfe56800-0badf00d-000012",
        "a000003-018bcfe56800-0badf00d-000012.01",
        "a000003-018bcfe56800-0badf00d-12.1",
        "a000003-018bcfe56800-0badf00d-000012.-1",
        "a000003-018bcfe56800-0badf00d-000012.1\n",
        "a000003-018bcfe56800-0badf00d-000012.1/..",
        "a" + "9" * 10**6,
    ],
)
def test_other_texts_are_no_attempt_ids(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        AttemptId.parse(text)


@pytest.mark.parametrize("fields", [(-1, 0, "0" * 8), (0, -1, "0" * 8), (0, 2**48, "0" * 8), (0, 0, "xyz")])
def test_impossible_run_id_is_refused(fields: tuple[int, int, str]) -> None:
    with pytest.raises(ValueError):
        RunId(*fields)


def test_impossible_attempt_id_is_refused() -> None:
    for save, retry in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError):
            AttemptId(RunId(0, 0, "0" * 8), save, retry)


@pytest.mark.parametrize("path", ["a", "a/b", "a/b.c/..d", "...", "größe/x y"])
def test_path_below_is_accepted(path: str) -> None:
    check_relative_path(path)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/a", "..", ".", "a/..", "../a", "a/../b", "a//b", "a/", "./a", "a/.", "a\\b", "..\\a", "a\0b"],
)
def test_path_that_may_lead_out_is_refused(path: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        check_relative_path(path)
