"""Does the codec bench measure what it says, of data that are what they are called?"""

from __future__ import annotations

import json

import numpy as np
import pytest

from native_bench import codecs
from native_bench.codecs import THREADS, drawn_weights, main, measure, to_markdown, trained_state

NBYTES = 1 << 20


def test_drawn_weights_are_what_torch_would_draw() -> None:
    torch = pytest.importorskip("torch")
    found = drawn_weights(NBYTES)
    halves = torch.from_numpy(found["bfloat16 weights, drawn"].copy()).view(torch.bfloat16)
    singles = torch.from_numpy(found["float32 weights, drawn"].copy()).view(torch.float32)
    assert torch.equal(halves[: len(singles)], singles.bfloat16())
    assert singles.std().item() == pytest.approx(0.02, rel=0.01)


def test_trained_state_has_moments_that_moved() -> None:
    found = trained_state(NBYTES, steps=2)
    assert len(found) == 6
    for name in ("exp_avg", "exp_avg_sq"):
        values = found[f"float32 {name}, trained"].view(np.float32)
        assert np.isfinite(values).all()
        assert np.count_nonzero(values) > len(values) // 2


def test_every_case_is_measured_and_checked() -> None:
    rows = measure(drawn_weights(NBYTES), rounds=1)
    assert len(rows) == 14
    by_method = {row.method: row for row in rows if row.data.startswith("bfloat16")}
    assert by_method["planes, as the engine"].ratio > 1.15 * by_method["zstd 1"].ratio > 1.15
    for row in rows:
        assert row.compress.keys() == row.decompress.keys() == set(THREADS)
        assert min(row.compress_core, row.decompress_core) > 0
        assert min(*row.compress.values(), *row.decompress.values()) > 0
    assert len(to_markdown(rows).splitlines()) == 16


def test_a_wrong_result_is_not_timed_as_if_it_were_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs.planes, "join", lambda plain, size, out: None)
    with pytest.raises(AssertionError, match="came back as something else"):
        measure(drawn_weights(NBYTES), rounds=1)


def test_output_is_json_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mib", "0.25", "--rounds", "1", "--steps", "0"]
    assert main([*options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["codecs"][0]["data"] == "bfloat16 weights, drawn"
    assert "condition" in document
    assert main(options) == 0
    assert "| bfloat16 weights, drawn | zstd -5 |" in capsys.readouterr().out
