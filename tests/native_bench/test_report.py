"""Tables, targets and the guard, from results made up here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from native_bench import explained, guard, more, plots, readme, report, results, sections
from native_bench.__main__ import main
from native_bench.cases import FULL, GIB, QUICK, Case
from native_bench.guard import Baseline
from native_bench.peers import SYSTEMS, make
from native_bench.peers.engine import cpu_seconds_of
from native_bench.reached import fastest_limit
from native_bench.results import NATIVE, STREAMING, CaseResult, Results, System
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target, overhead_s, summary, targets, unmeasured

ROOT = Path(__file__).parents[2]
NEAR = (
    "engine-sync",
    "dcp-1",
    "dcp-2",
    "dcp-async-thread",
    "dcp-async-stager",
    "nvrx",
    "nvrx-writer",
    "flashpack",
)


def system(name: str, **figures: float | list[float]) -> System:
    samples = {key: value if isinstance(value, list) else [value] * 5 for key, value in figures.items()}
    return System(
        name=name,
        title=name,
        how=f"how {name} does it",
        fsyncs=name != "torch",
        copies=name != "nvrx",
        limit=name in (NATIVE, "raw"),
        samples=samples,
    )


def made_up(**engine: float | list[float]) -> Results:
    figures = {
        "stall_s": 0.2,
        "save_s": 1.0,
        "save_writer_cpu_s": 0.8,
        "restore_cold_s": 1.0,
        "restore_hot_s": 0.25,
        **engine,
    }
    large = CaseResult(
        case=Case(name="large", title="Large", kind="model", nbytes=2 * GIB, count=117),
        nbytes=2 * GIB,
        tensors=117,
        directory="/data",
        file_system="ext4",
        systems=[
            system(NATIVE, save_s=0.9, restore_cold_s=0.96, restore_hot_s=0.2, memcpy_s=0.2),
            system("engine", **figures),
            system("engine-sync", stall_s=0.95, save_s=0.95),
            system("torch", stall_s=1.0, save_s=2.0, restore_cold_s=4.0, restore_hot_s=2.0),
            system("dcp-1", stall_s=3.1, save_s=3.1, restore_cold_s=2.6, restore_hot_s=1.3),
            system("nvrx", stall_s=0.05, save_s=3.5),
        ],
        skipped={"orbax": "not installed (orbax)"},
    )
    small = CaseResult(
        case=Case(name="small", title="Small", kind="small", nbytes=0, count=20_000),
        nbytes=GIB // 4,
        tensors=20_000,
        directory="/data",
        file_system="ext4",
        systems=[
            system(NATIVE, save_s=0.2, restore_cold_s=0.2, restore_hot_s=0.05, memcpy_s=0.02),
            system(
                "engine",
                stall_s=0.1,
                save_s=0.4,
                save_writer_cpu_s=0.2,
                restore_cold_s=0.4,
                restore_hot_s=0.2,
            ),
            system("dcp-1", stall_s=9.0, save_s=9.0, restore_cold_s=8.0, restore_hot_s=8.0),
        ],
    )
    return Results(
        mode="full",
        started="2026-01-02T03:04:05+00:00",
        machine={
            "cpu_model": "some CPU",
            "cores": 2.0,
            "load": [0.1, 0.2, 0.3],
            "warnings": ["the load is high"],
        },
        cases=[large, small],
    )


def by_figure(found: list[Target]) -> dict[str, Target]:
    return {target.figure: target for target in found}


def test_targets_are_held_against_the_right_figures() -> None:
    found = by_figure(targets(made_up()))
    assert found["stall, copied snapshot"].measured == "1.00 × native memcpy"
    assert found["stall, copied snapshot"].met
    # nvrx stalls less, but does not copy; dcp-1 and torch do.
    assert found["stall, beside the fastest peer that copies"].measured == "5.00 × torch"
    assert found["save to committed, large, by `save`"].measured == "0.95 × native"
    assert found["save to committed, large, by `save`"].met
    # torch is the fastest, but does not fsync.
    assert found["save, beside the fastest peer that fsyncs, by `save`"].measured == "3.26 × dcp-1"
    assert found["restore cold, large"].met
    assert found["restore cold, beside the fastest peer"].measured == "2.60 × dcp-1"
    assert found["restore hot, digests checked"].measured == "0.80 × native memcpy"
    assert found["restore hot, digests not checked"].met is None
    assert found["small tensors, restore cold, beside DCP"].met
    assert found["save, beside stock NVRx, by `save`"].met


def test_saves_behind_the_training_stand_beside_and_count_only_where_no_others_were_measured() -> None:
    found = by_figure(targets(made_up(save_s=1.5)))
    beside = found["save to committed, large, by `async_save`"]
    assert (beside.measured, beside.target, beside.met) == ("0.60 × native", REPORTED, None)
    assert found["save to committed, large, by `save`"].met
    # The small case has none: what there is decides, and says so.
    small = found["small tensors, save, beside DCP, by `async_save`"]
    assert (small.measured, small.met, small.note) == ("22.50 × dcp-1", True, "`save`: not measured")
    assert "small tensors, save, beside DCP, by `save`" not in found


def test_peers_that_were_not_measured_are_named_beside_the_fastest_one() -> None:
    measured = made_up()
    large = measured.cases[0]
    assert by_figure(targets(measured))["stall, beside the fastest peer that copies"].note == (
        "12 peers were not measured"
    )
    absent = ("dcp-async-stager", "nvrx-writer", "orbax")
    large.systems += [
        system(name, stall_s=9.0, save_s=9.0, restore_cold_s=9.0, restore_hot_s=9.0)
        for name in SYSTEMS
        if large.find(name) is None and name not in absent
    ]
    found = by_figure(targets(measured))
    # NVRx's writer copies nothing; Orbax does not fsync; the stager restores as DCP, which was measured.
    stall = found["stall, beside the fastest peer that copies"].note
    assert stall == "not measured: `dcp-async-stager`, `orbax`"
    save = found["save, beside the fastest peer that fsyncs, by `save`"].note
    assert save == "not measured: `dcp-async-stager`, `nvrx-writer`"
    assert found["restore cold, beside the fastest peer"].note == "not measured: `orbax`"


def test_every_system_without_a_figure_is_listed_with_the_reason() -> None:
    measured = made_up()
    large = measured.cases[0]
    large.case = msgspec.structs.replace(large.case, apart={"raw": "left out | here"})
    large.systems.append(System(name="flashpack", title="flashpack", error="died", samples={"turn_s": [1.0]}))
    found = unmeasured(large)
    shown = {"engine", "engine-sync", "torch", "dcp-1", "nvrx"}
    assert set(found) == set(SYSTEMS) - shown
    assert (found["raw"], found["orbax"], found["flashpack"], found["dcp-async-stager"]) == (
        "left out | here",
        "not installed (orbax)",
        "failed: died",
        "not asked for in this run",
    )
    text = report.render(measured).partition("## Large")[2].partition("## Small")[0]
    lines = [line for line in text.splitlines() if line.startswith("- Not measured: ")]
    assert "- Not measured: `raw`: left out \\| here." in lines
    for name in set(SYSTEMS) - shown - {"flashpack"}:
        assert sum(f"`{name}`" in line for line in lines) == 1, name
    assert "- flashpack failed: died" in text


@pytest.mark.parametrize("case", FULL + QUICK, ids=lambda case: f"{case.name}-{case.nbytes}")
def test_cases_leave_out_only_systems_that_there_are_and_say_why(case: Case) -> None:
    assert set(case.apart) <= set(SYSTEMS)
    assert all(case.apart.values())
    if case in FULL:
        # A peer that saves in ways of its own is measured everywhere.
        assert not [name for name in case.apart if make(name).traits.saves_like is None and name in NEAR]


def test_what_non_temporal_stores_reach_is_told_and_makes_no_target_easier() -> None:
    plain, streaming = made_up(stall_s=0.26), made_up(stall_s=0.26)
    for case in streaming.cases:
        if (native := case.find(NATIVE)) is not None:
            native.samples[STREAMING] = [0.1]
    before, after = by_figure(targets(plain)), by_figure(targets(streaming))
    assert {name: (one.measured, one.target, one.met) for name, one in before.items()} == {
        name: (one.measured, one.target, one.met) for name, one in after.items()
    }
    assert before["stall, copied snapshot"].note == ""
    assert after["stall, copied snapshot"].note == "a copy by non-temporal stores takes 0.50 × native memcpy"
    # Nor does a limit excuse what the faster copy would reach.
    limits = [fastest_limit(measured.cases[0], "stall_s") for measured in (plain, streaming)]
    assert [limit and limit[:2] for limit in limits] == [
        ("native memcpy", 0.2),
        ("copy by non-temporal stores", 0.1),
    ]


def test_a_target_beyond_the_limit_of_the_machine_says_so() -> None:
    measured = made_up(restore_cold_s=1.2, save_s=1.1)
    found = by_figure(targets(measured))
    # 2.5 x the 2.6 s of dcp-1 is 1.04 s, which the machine's 0.96 s allow.
    assert found["restore cold, beside DCP"] == Target(
        "restore cold, beside DCP", "2.17 × dcp-1", "≥ 2.5 ×", False
    )
    measured.cases[0].systems[0].samples["restore_cold_s"] = [1.1] * 5
    short = by_figure(targets(measured))["restore cold, beside DCP"]
    assert (short.met, short.note) == (False, "the limit itself (native) is 2.36 × dcp-1")
    assert "| **short** | the limit itself (native) is 2.36 × dcp-1 |" in report.render(measured)
    # Whatever was faster is the limit, with native programs or without.
    measured.cases[0].systems.append(system("raw", restore_cold_s=1.0))
    assert by_figure(targets(measured))["restore cold, beside DCP"].note == ""
    measured.cases[0].systems[-1].samples["restore_cold_s"] = [1.05] * 5
    short = by_figure(targets(measured))["restore cold, beside DCP"]
    assert short.note == "the limit itself (raw) is 2.48 × dcp-1"


def test_the_faster_limit_counts_and_the_row_names_both() -> None:
    measured = made_up(restore_cold_s=0.8)
    large = measured.cases[0]
    row = by_figure(targets(measured))["restore cold, large"]
    assert (row.measured, row.met, row.note) == ("1.20 × native", True, "")
    # Native probes that came out slow flatter nobody, as raw was measured, too.
    large.systems.append(system("raw", stall_s=0.1, save_s=2.0, save_memcpy_s=0.16, restore_cold_s=0.72))
    found = by_figure(targets(measured))
    row = found["restore cold, large"]
    assert (row.measured, row.met, row.note) == ("0.90 × raw", False, "1.20 × native")
    assert found["save to committed, large, by `save`"].note == "2.11 × raw"
    assert found["restore hot, digests checked"].measured == "0.64 × memcpy by Python threads"
    text = report.render(measured)
    assert "**Restore** (the limit: raw, 0.720 s)" in text
    assert "**Save** (the limit: native, 0.900 s)" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| engine | 0.800"))
    assert line.split(" | ")[3] == "0.90"
    assert guard.ratios(measured)["large.restore_cold"] == pytest.approx(0.72 / 0.8)


def test_tmpfs_has_no_limit_but_the_copy() -> None:
    measured = made_up()
    large = measured.cases[0]
    large.case = msgspec.structs.replace(large.case, name="tmpfs", place="tmpfs")
    found = [target for target in targets(measured) if target.figure.startswith("tmpfs")]
    assert found
    assert all(target.target == REPORTED and target.held is None for target in found)
    assert not [target for target in found if "native" in target.measured or "limit" in target.note]
    text = report.render(measured).partition("## Large")[2].partition("## Small")[0]
    assert "**Save**\n" in text
    assert "- No limit of a save stands here: there is no device" in text


def test_the_summary_says_by_which_call_saves_are_judged() -> None:
    measured = made_up(save_s=1.5)
    rows = by_figure(targets(measured))
    assert rows["save to committed, large, by `async_save`"].held is False
    assert rows["save, beside DCP `thread_count=1`, by `async_save`"].held is False
    assert rows["save, beside the fastest peer that fsyncs, by `async_save`"].held is True
    said = summary(list(rows.values()))
    assert re.match(r"\d+ met, \d+ short, \d+ not measured\. Saves are judged by `save\(\)`, ", said)
    assert (
        "whose own saves would be 1 met, 3 short of the same targets (save to committed, large: 0.60" in said
    )
    assert said in report.render(measured)


def test_a_peer_that_decides_a_row_in_fewer_rounds_is_told() -> None:
    measured = made_up()
    for each in measured.cases[0].systems:
        if each.name == "dcp-1":
            each.samples["restore_cold_s"] = [2.6] * 4
    rows = by_figure(targets(measured))
    assert rows["restore cold, beside DCP"].note == "from 4 of 5 rounds"


def test_two_ranks_are_held_against_the_same_limits_and_the_fastest_peer() -> None:
    measured = made_up()
    measured.cases[0].case = msgspec.structs.replace(measured.cases[0].case, name="two-ranks", world_size=2)
    found = by_figure(targets(measured))
    assert found["two ranks, stall, copied snapshot"].measured == "1.00 × native memcpy"
    assert found["two ranks, save, by `save`"].measured == "0.95 × native"
    assert found["two ranks, save, by `async_save`"].target == REPORTED
    assert found["two ranks, restore cold"].measured == "0.96 × native"
    assert found["two ranks, restore hot, digests checked"].measured == "0.80 × native memcpy"
    assert found["two ranks, save, beside the fastest peer that fsyncs, by `save`"].measured == "3.26 × dcp-1"
    assert found["two ranks, restore hot, beside the fastest peer"].measured == "5.20 × dcp-1"
    assert len(found) == len([name for name in found if name.startswith(("two ranks", "small"))])


def test_a_target_that_is_missed_is_short() -> None:
    found = by_figure(targets(made_up(stall_s=0.3, restore_cold_s=1.1)))
    assert found["stall, copied snapshot"].met is False
    assert found["restore cold, large"].met is False


@pytest.mark.parametrize(
    ("hot_s", "said"), [(0.2 / 0.65, "0.65"), (0.2 / 0.6496, "0.6496"), (0.2 / 0.64, "0.64"), (0.2, "1.00")]
)
def test_a_ratio_that_just_misses_its_target_is_not_rounded_to_it(hot_s: float, said: str) -> None:
    found = by_figure(targets(made_up(restore_hot_s=hot_s)))
    assert found["restore hot, digests checked"].measured == f"{said} × native memcpy"


def test_stalls_are_held_against_the_copy_whatever_their_spread() -> None:
    text = report.render(made_up(stall_s=[0.1, 0.2, 0.3, 0.4, 0.5]))
    (row,) = (line for line in text.splitlines() if line.startswith("| engine | 0.300 (0.200–0.400)"))
    assert row.split(" | ")[2] == "1.50"


def test_the_overhead_of_a_small_tensor_leaves_out_what_its_bytes_cost() -> None:
    measured = made_up()
    small, large = measured.case("small"), measured.case("large")
    assert small is not None
    assert overhead_s(small, large, "restore_hot_s") == pytest.approx((0.2 - 0.25 / 8) / 20_000)
    assert overhead_s(small, None, "restore_hot_s") is None


def test_the_overhead_of_a_save_is_that_of_its_call_and_of_its_writer() -> None:
    row = "small tensors, overhead of a save, in call and writer, without I/O, copy and digest"
    measured = made_up()
    for case, cpu_s in zip(measured.cases, (0.8, 0.22), strict=True):
        engine = case.find("engine")
        assert engine is not None
        engine.samples["save_writer_cpu_s"] = [cpu_s] * 5
        # What the large case takes for an eighth of its bytes: 25 ms in the call, 100 ms in the writer.
        engine.samples["stall_s"] = [0.2 if case.case.name == "large" else 0.105]
    found = by_figure(targets(measured))[row]
    assert found.measured == "10.0 µs a tensor: 4.0 in the call, 6.0 of the writer process's CPU time"
    assert found.met
    measured.cases[1].systems[1].samples["save_writer_cpu_s"] = [0.24] * 5
    found = by_figure(targets(measured))[row]
    assert (found.met, found.measured[:16]) == (False, "11.0 µs a tensor")
    del measured.cases[1].systems[1].samples["save_writer_cpu_s"]
    found = by_figure(targets(measured))[row]
    assert (found.met, found.measured) == (None, "not measured")


def test_a_process_s_cpu_time_has_its_ended_threads_in_it() -> None:
    assert cpu_seconds_of(None) == 0.0
    before = time.process_time()
    seconds = cpu_seconds_of(os.getpid())
    assert before <= seconds <= time.process_time()
    code = "import threading, time\nt = threading.Thread(target=lambda: sum(range(3_000_000)))\n"
    code += "t.start(); t.join(); print(time.process_time(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = float(child.stdout.readline())
        assert said <= cpu_seconds_of(child.pid) <= said + 0.5
        child.communicate("\n")


def test_the_report_tells_what_was_measured_and_what_was_not() -> None:
    text = report.render(made_up(), images={"large": "img/large.svg"})
    assert "some CPU" in text
    assert "**Warning:** the load is high." in text
    assert "- Not measured: `orbax`: not installed (orbax)." in text
    assert "(aliases)" in text
    assert "2.00 †" not in text  # the brackets stand between
    assert "2.00 (2.00–2.00) †" in text
    assert "![Large](img/large.svg)" in text
    rows = [line for line in text.splitlines() if line.startswith("| dcp-1 |")]
    assert "3.10 ×" in rows[0]
    assert "2.60 ×" in rows[1]


def test_failures_and_fewer_rounds_are_in_the_report() -> None:
    measured = made_up()
    large = measured.cases[0]
    large.systems.append(System(name="flashpack", title="flashpack", error="restore: ValueError: a | b"))
    large.systems[3].note = "stopped after 3: 9 × the engine's time"
    text = report.render(measured)
    assert "flashpack failed: restore: ValueError: a \\| b" in text
    assert "torch: stopped after 3: 9 × the engine's time." in text
    assert measured.errors == ["large: flashpack: restore: ValueError: a | b"]


def test_spread_is_that_of_the_middle_half() -> None:
    assert results.quartiles([1.0, 2.0, 3.0, 4.0, 100.0]) == (2.0, 4.0)
    assert results.quartiles([3.0]) == (3.0, 3.0)


def test_what_people_wrote_stays_when_the_tables_are_replaced() -> None:
    once = report.insert("# Benchmarks\n\nBy hand.\n", "first")
    twice = report.insert(once + "\nMore by hand.\n", "second")
    assert twice.startswith("# Benchmarks\n\nBy hand.\n")
    assert twice.endswith("\nMore by hand.\n")
    assert "second" in twice
    assert "first" not in twice
    assert twice.count(report.BEGIN) == 1


def test_a_document_with_half_of_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="but not"):
        report.insert(f"text\n{report.BEGIN}\nrest", "new")


def test_results_survive_being_written(tmp_path: Path) -> None:
    path = str(tmp_path / "results.json")
    results.write(made_up(), path)
    assert results.read(path) == made_up()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99, "mode": "full", "started": ""}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json"):
        results.read(str(path))


def elsewhere() -> Section:
    return Section(
        name="growth",
        title="What grows",
        text=["How."],
        tables=[Table(head=["", "value"], rows=[["a | b", "3"]])],
        targets=[Target("elsewhere", "3", "4", False), Target("told", "5", REPORTED, None)],
        started="2026-01-02T04:00:00+00:00",
        seconds=60.0,
    )


def test_what_was_measured_beside_the_comparison_is_in_the_report() -> None:
    text = report.render(made_up(), sections=[elsewhere()])
    assert "| elsewhere | 3 | 4 | **short** |  |" in text
    assert "| told | 5 | reported | – |  |" in text
    assert "## What grows\n\nHow.\n\n|  | value |\n| --- | ---: |\n| a | b | 3 |" in text
    assert "Measured on" not in text
    assert "2 not measured" in text  # the engine overlapping, and without digests: `told` is no target
    other = elsewhere()
    other.started, other.targets, other.error = "2026-01-03T04:00:00+00:00", [], "no memory"
    text = report.render(made_up(), sections=[other])
    assert "Measured on 2026-01-03." in text
    assert "| What grows | failed: no memory | – | – |  |" in text


def put(raw: dict[str, Any], path: str, value: object) -> None:
    """Into decoded JSON, by a path as msgspec writes it."""
    *inner, last = re.findall(r"\w+", path)
    at: Any = raw
    for part in inner:
        at = at[int(part) if part.isdigit() else part]
    at[int(last) if last.isdigit() else last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("$.cases[0].systems[1].samples.save_s[2]", "fast", "Expected `float`, got `str`"),
        ("$.cases[0].systems[1].samples.save_s", 1.5, "Expected `array`, got `float`"),
        ("$.cases[0].systems[1].samples.save_s", [], "no samples"),
        ("$.cases[1].systems[0].samples.memcpy_s[0]", 0.0, "0 s is not above 0"),
        ("$.cases[0].systems[3].samples.restore_hot_s[4]", -1.0, "-1 s is not above 0"),
        ("$.cases[0].nbytes", 0, "0 is not above 0"),
        ("$.cases[1].tensors", 0, "0 is not above 0"),
        ("$.cases[0].case.world_size", 0, "0 is not above 0"),
        ("$.cases[1].case.count", 0, "0 is not above 0"),
        ("$.cases[1].case.nbytes", -1, "-1 is not 0 or more"),
        ("$.cases", None, "Expected `array`, got `null`"),
        ("$.machine.load", ["a", "b"], "Expected `float`, got `str`"),
        ("$.machine.mount", 3, "Expected `object | null`, got `int`"),
        ("$.machine.memory_total", "much", "Expected `float`, got `str`"),
        ("$.started", 7, "Expected `str`, got `int`"),
    ],
)
def test_results_that_nothing_measured_are_named_by_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: object, said: str
) -> None:
    file = tmp_path / "results.json"
    raw = msgspec.json.decode(msgspec.json.encode(made_up()))
    raw["machine"] = {"load": [0.1, 0.2, 0.3], "mount": {"file_system": "ext4"}, "cores": 2.0}
    file.write_bytes(msgspec.json.encode(raw))
    assert main(["report", str(file), "--document", "-"]) == 0
    put(raw, path, value)
    file.write_bytes(msgspec.json.encode(raw))
    capsys.readouterr()
    assert main(["report", str(file), "--document", "-"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"native_bench: {file} is no result of native_bench: ")
    assert said in error
    shown = path.removeprefix("$.machine").removeprefix("$")
    # Where the type is wrong, msgspec does not say at which key of a mapping.
    assert shown in error or re.sub(r"samples\.\w+", "samples[...]", shown) in error
    assert ("$.machine" in error) == path.startswith("$.machine")


def test_the_report_command_writes_document_pictures_and_readme(tmp_path: Path) -> None:
    path, document = tmp_path / "results.json", tmp_path / "docs" / "benchmarks.md"
    measured = made_up()
    measured.cases[0].case = msgspec.structs.replace(measured.cases[0].case, title="One rank, 2 GiB")
    measured.cases[0].systems[1].title = readme.ENGINE
    measured.cases[0].systems[-1].title = readme.BESIDE[2]
    results.write(measured, str(path))
    sections.write(elsewhere(), tmp_path / "growth.json")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nstale\n{readme.END}\nafter\n")
    arguments = ["--document", str(document), "--images", str(tmp_path / "docs" / "img")]
    assert main(["report", str(path), *arguments, "--readme", str(page)]) == 0
    text = document.read_text()
    assert "| elsewhere | 3 | 4 | [**short**](" in text
    assert "design/performance.md#growth) |" in text
    shown = page.read_text()
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")
    assert "stale" not in shown
    assert f"| {readme.ENGINE} | 0.200 | 1.00 | 1.00 | 0.250 |" in shown
    assert "some CPU, 2 cores" in shown
    # Whose stall copies nothing is not shown as if it did.
    assert f"| {readme.BESIDE[2]} | 0.050 (aliases) | 3.50 | – | – |" in shown
    assert "*Aliases*: " in shown
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "![" not in text
    else:
        assert "](img/large.svg)" in text
        assert 0 < (tmp_path / "docs" / "img" / "large.svg").stat().st_size < 200_000


def test_the_figures_of_the_readme_are_those_of_the_document() -> None:
    page, document = (ROOT / "README.md").read_text(), (ROOT / "docs" / "benchmarks.md").read_text()
    assert readme.insert(page, readme.figures(document)) == page, "run `make bench-report`"
    with pytest.raises(ValueError, match="has no line"):
        readme.insert("# no markers", "figures")
    with pytest.raises(ValueError, match="make bench"):
        readme.figures("# no tables")


def test_pictures_are_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, other = plots.draw(made_up(), tmp_path / "a"), plots.draw(made_up(), tmp_path / "b")
    assert one["large"].read_bytes() == other["large"].read_bytes()


def test_every_short_row_leads_to_a_chapter_that_there_is() -> None:
    """Of everything that may be short, here and in the document."""
    chapters = (ROOT / "docs" / explained.DOCUMENT).read_text()
    headings = {
        heading.lower().replace(",", "").replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", chapters, re.MULTILINE)
    }
    assert set(explained.ANCHORS) <= headings
    assert set(explained.SECTIONS) == set(more.PARTS)
    measured = made_up(stall_s=9.0, save_s=9.0, restore_cold_s=9.0, restore_hot_s=9.0)
    for name in ("two-ranks", "tmpfs"):
        again = msgspec.convert(msgspec.to_builtins(measured.cases[0]), CaseResult)
        again.case = msgspec.structs.replace(again.case, name=name)
        measured.cases.append(again)
    for target in targets(measured):
        assert explained.anchor(target.figure) in explained.ANCHORS, target.figure
    for text in (
        report.render(measured, explained=explained.DOCUMENT),
        (ROOT / "docs" / "benchmarks.md").read_text(),
    ):
        rows = [line for line in text.splitlines() if "**short**" in line and line.startswith("|")]
        assert len(rows) > 5
        for row in rows:
            found = re.search(rf"\[\*\*short\*\*\]\({re.escape(explained.DOCUMENT)}#([a-z-]+)\)", row)
            assert found, row
            assert found[1] in headings, row


class Tried:
    """Stands in for measuring: each try gives the next of `runs`, of the cases asked for."""

    def __init__(self, *runs: Results) -> None:
        self.runs = list(runs)
        self.asked: list[list[str]] = []
        self.said: list[str] = []

    def __call__(self, names: Collection[str]) -> Results:
        self.asked.append(list(names))
        run = self.runs.pop(0)
        return msgspec.structs.replace(run, cases=[case for case in run.cases if case.case.name in names])

    def behind(self, ratios: dict[str, float]) -> dict[str, list[float]]:
        """What the guard finds behind a baseline of these ratios: the ratio in each try."""
        baseline = Baseline(started="", machine="", ratios=ratios)
        return {one.name: list(one.tries) for one in guard.check(self, baseline, self.said.append)}


def test_the_guard_compares_ratios_not_seconds() -> None:
    before = guard.ratios(made_up())
    assert before["large.save"] == pytest.approx(0.9 / 0.95)
    assert before["large.async_save"] == pytest.approx(0.9)
    assert before["large.stall"] == pytest.approx(1.0)
    assert before["large.restore_hot"] == pytest.approx(0.8)
    twice_as_slow = made_up()
    for case in twice_as_slow.cases:
        for each in case.systems:
            each.samples = {key: [2 * value for value in values] for key, values in each.samples.items()}
    assert guard.ratios(twice_as_slow) == pytest.approx(before)
    assert Tried(twice_as_slow).behind(before) == {}


@pytest.mark.parametrize("table", [FULL, QUICK], ids=["full", "quick"])
def test_the_guard_measures_what_its_ratios_are_made_of_and_no_more(table: Sequence[Case]) -> None:
    watched = guard.watched(table)
    assert [case.name for case in watched] == list(guard.CASES)
    found: set[str] = set()
    for case in watched:
        taken = {name for name in guard.SYSTEMS if case.takes(name)}
        fakes = [
            system(name, stall_s=1.0, save_s=1.0, restore_cold_s=1.0, restore_hot_s=1.0) for name in taken
        ]
        for one in fakes:
            if one.name == "raw":  # a limit, which counts where it is the faster one
                one.samples["restore_cold_s"] = [0.5]
        fakes.append(system(NATIVE, save_s=1.0, restore_cold_s=1.0, memcpy_s=1.0))
        alone = CaseResult(case=case, nbytes=1, tensors=1, directory="", file_system="", systems=fakes)
        every = guard.ratios(Results(mode="full", started="", cases=[alone]))
        found |= every.keys()
        for name in taken:
            alone.systems = [one for one in fakes if one.name != name]
            assert guard.ratios(Results(mode="full", started="", cases=[alone])) != every, name
    assert found == guard.read().ratios.keys()


@pytest.mark.parametrize("figure", sorted(guard.read().ratios))
def test_a_regression_of_more_than_a_quarter_fails_whichever_the_ratio(figure: str) -> None:
    """However much the rounds of the baseline's run, or of this one, scatter."""
    case, _, what = figure.partition(".")
    system_of = {"save": "engine-sync", "stall_overlap": "engine-overlap"}.get(what, "engine")
    seconds_of = {
        "save": "save_s",
        "async_save": "save_s",
        "stall_overlap": "stall_s",
    }.get(what, f"{what}_s")

    def slower(share: float) -> Results:
        run = whole()
        for found in run.cases:
            if found.case.name == "small" and not found.find("engine-sync"):
                found.systems.append(system("engine-sync", stall_s=0.3, save_s=0.3))
        measured = run.case(case)
        engine = measured.find(system_of) if measured else None
        assert engine is not None
        seconds = engine.median(seconds_of)
        assert seconds is not None
        engine.samples[seconds_of] = [share * seconds * scatter for scatter in (0.3, 0.5, 1.0, 1.9, 3.0)]
        return run

    before = guard.ratios(slower(1.0))
    assert set(before) == set(guard.read().ratios)
    assert Tried(slower(1 / 0.76)).behind(before) == {}
    tried = Tried(*[slower(1 / 0.74)] * 3)
    assert tried.behind(before) == {figure: pytest.approx([0.74 * before[figure]] * 3)}
    assert tried.asked == [list(guard.CASES), [case], [case]]


def test_a_ratio_that_is_not_found_has_fallen_behind() -> None:
    before = guard.ratios(made_up())
    assert Tried(*[made_up()] * 3).behind({**before, "large.gone": 0.9}) == {"large.gone": [0.0] * 3}


def test_what_is_short_is_measured_again_and_fails_only_if_it_is_short_each_time() -> None:
    before = guard.ratios(made_up())
    once, twice = Tried(made_up(save_s=2.0), made_up()), Tried(*[made_up(save_s=2.0)] * 2, made_up())
    assert once.behind(before) == twice.behind(before) == {}
    assert once.asked == [["large", "small"], ["large"]]
    assert twice.asked == [["large", "small"], ["large"], ["large"]]
    assert "try 1 of 3: large.async_save at 50% of the baseline; measuring again" in once.said[0]
    # What was right once is not looked at again, and may be short in a later try.
    other = Tried(made_up(save_s=2.0), made_up(restore_cold_s=9.0))
    assert other.behind(before) == {}
    slow = Tried(made_up(save_s=2.0, restore_hot_s=9.0), made_up(save_s=1.5), made_up(save_s=1.8))
    assert slow.behind(before) == {"large.async_save": pytest.approx([0.9 / 2.0, 0.9 / 1.5, 0.9 / 1.8])}
    (line,) = [line for line in slow.said if line.startswith("large.async_save ")]
    assert line.split(None, 1)[1] == (
        "0.45, then 0.6, then 0.5 of the limit, baseline 0.9, at least 0.675  BEHIND"
    )
    assert [line for line in slow.said if "BEHIND" in line] == [line]
    assert Tried(made_up()).behind(before) == {}


def whole() -> Results:
    """With all cases that the guard measures."""
    measured = made_up()
    two = msgspec.convert(msgspec.to_builtins(measured.cases[0]), CaseResult)
    two.case = msgspec.structs.replace(two.case, name="two-ranks", world_size=2)
    for case in (measured.cases[0], two):
        case.systems.append(system("engine-overlap", stall_s=0.002, save_s=1.0))
    measured.cases.append(two)
    return measured


def test_a_baseline_is_what_a_whole_run_has_measured(tmp_path: Path) -> None:
    path, file = tmp_path / "baseline.json", tmp_path / "results.json"
    results.write(whole(), str(file))
    assert main(["guard", "--from", str(file), "--baseline", str(path)]) == 0
    assert guard.read(path).ratios == pytest.approx(guard.ratios(whole()), abs=1e-3)
    assert guard.read(path).started == whole().started
    assert set(guard.read(path).ratios) == {
        *(f"large.{name}" for name in ("save", "async_save", "restore_cold", "restore_hot", "stall")),
        "large.stall_overlap",
        *(f"small.{name}" for name in ("async_save", "restore_cold", "restore_hot")),
        *(f"two-ranks.{name}" for name in ("save", "async_save", "restore_cold", "restore_hot", "stall")),
    }
    before = path.read_bytes()
    for change, said in (
        ({"unfinished": ["small"]}, "without the case small"),
        ({"mode": "quick"}, "a quick run"),
        ({"cases": whole().cases[:1]}, "without the cases small, two-ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            guard.write(msgspec.structs.replace(whole(), **change), path)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    path.write_text("[]")
    with pytest.raises(ValueError, match="no baseline"):
        guard.read(path)


def test_the_guard_goes_by_the_run_that_the_document_shows(tmp_path: Path) -> None:
    document, baseline = (ROOT / "docs" / "benchmarks.md").read_text(), guard.read()
    assert f"\nBegun at {baseline.started}.\n" in document, "run `make bench-report`"
    save = document.partition(f"case `{guard.CASES[0]}`.")[2]
    (share,) = re.findall(rf"^\| {re.escape(readme.ENGINE)} \|(?:[^|]*\|){{4}} ([\d.]+) \|", save, re.M)[:1]
    assert float(share) == pytest.approx(baseline.ratios["large.async_save"], abs=0.006)
    # As the report writes both at once.
    file, page = tmp_path / "results.json", tmp_path / "docs" / "benchmarks.md"
    results.write(whole(), str(file))
    written = tmp_path / "baseline.json"
    readme_page = tmp_path / "README.md"
    readme_page.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    titled = whole()
    titled.cases[0].case = msgspec.structs.replace(titled.cases[0].case, title="One rank, 2 GiB")
    results.write(titled, str(file))
    options = ["--document", str(page), "--images", str(tmp_path), "--readme", str(readme_page)]
    assert main(["report", str(file), *options, "--baseline", str(written)]) == 0
    assert f"\nBegun at {guard.read(written).started}.\n" in page.read_text()


def test_a_run_that_was_cut_short_says_so_and_why() -> None:
    measured = made_up()
    assert "cut short" not in report.render(measured)
    measured.unfinished, measured.cut_short = ["small", "tmpfs"], "no space, in `small`"
    text = report.render(measured)
    assert "**This run was cut short: no space, in `small`.**" in text
    assert "not, or not wholly, measured: `small`, `tmpfs`." in text
    assert "- **The run was cut short in this case.**" in text.partition("## Small")[2]
    assert "- **The run was cut short in this case.**" not in text.partition("## Small")[0]


def test_parts_from_before_a_run_are_told_from_its_own() -> None:
    old = elsewhere()
    old.started = "2026-01-02T03:00:00+00:00"
    text = report.render(made_up(), sections=[old])
    assert "Measured at 2026-01-02T03:00:00+00:00, before this run" in text
    assert (
        f"Not in this run, but in one of its own, begun at the time in brackets: `{old.name}` (2026-" in text
    )
    old.started = "2026-01-02T03:30:00+00:00"
    measured = made_up()
    assert "All that stands below was measured in this run." in report.render(measured, sections=[old])
    measured.added = [old.name]
    measured.cases[1].started = "2026-01-01T00:00:00+00:00"
    text = report.render(measured, sections=[old])
    assert "Measured at 2026-01-02T03:30:00+00:00, in a run of its own after this one." in text
    assert f"brackets: `small` (2026-01-01T00:00:00+00:00), `{old.name}` (2026-01-02T03:30:00+00:00)." in text


def test_what_is_no_system_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a:b", ":b", "os:nothing", "os:getcwd", "tests.native_bench.fakes:Missing"):
        assert main(["run", "--systems", name]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"native_bench: no system at {name!r}: ")
        assert said.count("\n") == 1


def test_unknown_names_are_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--systems", "dcp"]) == 1
    assert "unknown system 'dcp'; there are engine" in capsys.readouterr().err
    assert main(["run", "--cases", "huge"]) == 1
    assert "unknown case 'huge'; there are large" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--rounds", "0", "must be at least 1"),
        ("--rounds", "-1", "must be at least 1"),
        ("--rounds", "x", "must be at least 1"),
        ("--deadline", "0", "must be a positive number"),
        ("--deadline", "nan", "must be a positive number"),
        ("--cases", ",", "names at least one"),
        ("--systems", "", "names at least one"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    """Not taken for options that were not given, which would measure for half an hour."""
    with pytest.raises(SystemExit) as caught:
        main(["run", f"{option}={value}"])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_limits_fall_back_to_what_python_threads_reach() -> None:
    measured = made_up()
    measured.cases[0].systems[0] = system("raw", save_s=0.8, save_memcpy_s=0.2, restore_cold_s=0.9)
    found = by_figure(targets(measured))
    assert found["save to committed, large, by `save`"].measured == "0.84 × raw"
    assert found["stall, copied snapshot"].measured == "1.00 × memcpy by Python threads"
    assert msgspec.json.encode(measured)
