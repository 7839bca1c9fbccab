"""The comparison itself, at tiny sizes: all systems come out right, and one that goes wrong fails alone."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from native_bench import bench, ground, guard, results, room, runner
from native_bench.__main__ import ALL, main
from native_bench.cases import FULL, MIB, Case, fill, layout
from native_bench.nursery import Nursery
from native_bench.pace import enough
from native_bench.plan import Plan
from native_bench.results import CaseResult, Results, System
from native_bench.team import Missing, Team, TeamError
from native_bench.worker import Order

FAKES = "tests.native_bench.fakes:"
TINY = Case(name="tiny", title="Tiny", kind="model", nbytes=MIB, count=18)
TINY_PAIR = Case(name="pair", title="Tiny pair", kind="small", nbytes=0, count=30, world_size=2)
ROOT = Path(__file__).parents[2]


def measure(directory: Path, case: Case, *systems: str, rounds: int = 2) -> CaseResult:
    plan = Plan(
        mode="quick",
        cases=(case,),
        systems=systems,
        directory=directory,
        rounds=rounds,
        limits=False,
        # However slow a system happens to be today, it has all of its rounds.
        patience=math.inf,
    )
    found = runner.new_results("quick")
    runner.run(plan, found, lambda text: None)
    assert list(directory.iterdir()) == []
    return found.cases[0]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> CaseResult:
    directory = tmp_path_factory.mktemp("one-rank")
    fakes = [FAKES + name for name in ("LikeTorch", "Wrong", "Lazy", "Dying", "Absent")]
    return measure(directory, TINY, "engine", "dcp-1", "torch", "torch-mmap", *fakes)


def test_every_round_of_every_system_is_recorded(one_rank: CaseResult) -> None:
    for name in ("engine", "dcp-1", "torch"):
        system = one_rank.find(name)
        assert system is not None
        assert system.error is None
        for figure in ("stall_s", "save_s", "restore_cold_s", "restore_hot_s", "restore_hot_cpu_s"):
            assert system.rounds(figure) == 2, (name, figure)
            assert min(system.samples[figure]) > 0


def test_a_stall_is_part_of_its_save(one_rank: CaseResult) -> None:
    engine = one_rank.find("engine")
    assert engine is not None
    for stall, save in zip(engine.samples["stall_s"], engine.samples["save_s"], strict=True):
        assert stall < save


def test_a_system_that_saves_like_another_reads_that_ones_files(one_rank: CaseResult) -> None:
    reader = one_rank.find("torch-mmap")
    assert reader is not None
    assert reader.error is None
    assert "save_s" not in reader.samples
    assert reader.rounds("restore_cold_s") == 2


def test_a_system_that_restores_like_another_is_checked_but_not_timed(one_rank: CaseResult) -> None:
    saver = one_rank.find(FAKES + "LikeTorch")
    assert saver is not None
    assert saver.error is None
    assert saver.rounds("save_s") == 2
    assert "restore_cold_s" not in saver.samples


def test_wrong_bytes_are_found(one_rank: CaseResult) -> None:
    wrong = one_rank.find(FAKES + "Wrong")
    assert wrong is not None
    assert wrong.error is not None
    assert "1 of 18 tensors came back with other bytes" in wrong.error


def test_what_an_earlier_restore_left_in_the_target_counts_for_nothing(one_rank: CaseResult) -> None:
    lazy = one_rank.find(FAKES + "Lazy")
    assert lazy is not None
    assert lazy.error is not None
    assert "18 of 18 tensors" in lazy.error


def test_a_dead_worker_fails_its_system_only(one_rank: CaseResult) -> None:
    dying = one_rank.find(FAKES + "Dying")
    assert dying is not None
    assert dying.error is not None
    assert "died with exit status 7; its last words: about to die" in dying.error


def test_what_is_not_installed_is_skipped_with_the_reason(one_rank: CaseResult) -> None:
    assert one_rank.skipped == {FAKES + "Absent": "not installed (of_all_things)"}
    assert one_rank.find(FAKES + "Absent") is None


def test_the_guard_finds_an_engine_that_was_slowed(tmp_path: Path) -> None:
    slowed = FAKES + "SlowedEngine"
    found = measure(tmp_path, msgspec.structs.replace(TINY, name="large"), "engine", slowed, "raw", rounds=1)

    def of(name: str) -> Results:
        """With that one as the engine."""
        engine = found.find(name)
        assert engine is not None
        assert engine.error is None
        systems = [msgspec.structs.replace(engine, name="engine"), found.find("raw")]
        return Results(mode="quick", started="", cases=[msgspec.structs.replace(found, systems=systems)])

    baseline = guard.Baseline(started="", machine="", ratios=guard.ratios(of("engine")))
    assert guard.check(lambda names: of("engine"), baseline, lambda text: None) == []
    behind = guard.check(lambda names: of(slowed), baseline, lambda text: None)
    wanted = {f"large.{name}" for name in ("async_save", "restore_cold", "restore_hot", "stall")}
    assert {one.name for one in behind} == wanted == set(baseline.ratios)


def test_two_ranks(tmp_path: Path) -> None:
    result = measure(tmp_path, TINY_PAIR, "engine", "torch", FAKES + "DyingOnRank1", rounds=1)
    assert result.nbytes == sum(layout(TINY_PAIR, rank).nbytes for rank in range(2))
    for name in ("engine", "torch"):
        system = result.find(name)
        assert system is not None
        assert system.error is None
        assert system.rounds("save_s") == system.rounds("restore_cold_s") == 1
    dying = result.find(FAKES + "DyingOnRank1")
    assert dying is not None
    assert "rank 1: died with exit status 7" in str(dying.error)


def test_a_slow_system_has_fewer_rounds_unless_a_target_is_about_it(tmp_path: Path) -> None:
    slow, named, reader = FAKES + "Slow", FAKES + "SlowToo", FAKES + "SlowReader"
    plan = Plan(
        mode="quick",
        cases=(msgspec.structs.replace(TINY, named=(named, "torch", "dcp-1"), at_most={"dcp-1": 1}),),
        systems=("engine", slow, named, "torch", reader, "dcp-1"),
        directory=tmp_path,
        rounds=2,
        patience=0.0,  # so that each is slow, whatever else the machine does
        limits=False,
    )
    found = runner.new_results("quick")
    runner.run(plan, found, lambda text: None)
    for name, rounds in ((slow, 1), (named, 2)):
        system = found.cases[0].find(name)
        assert system is not None
        assert system.error is None
        assert system.rounds("save_s") == system.rounds("restore_cold_s") == rounds
        assert (system.note or "").startswith("only its first turn was measured: ") == (rounds == 1)
    seldom = found.cases[0].find("dcp-1")
    assert seldom is not None
    assert (seldom.note, seldom.rounds("save_s")) == ("stopped after 1: no target is about it", 1)
    # What reads another's files is in that one's turns, which go on without it.
    reads, torch = found.cases[0].find(reader), found.cases[0].find("torch")
    assert reads is not None
    assert torch is not None
    assert (reads.error, reads.rounds("restore_hot_s"), torch.rounds("restore_hot_s")) == (None, 1, 2)
    assert str(reads.note).startswith("stopped after 1: ")


def test_a_system_is_measured_the_less_the_farther_it_is_behind() -> None:
    def took(**figures: float) -> System:
        return System(name="", title="", samples={name: [seconds] for name, seconds in figures.items()})

    engine = took(save_s=1.0, restore_cold_s=0.5, restore_hot_s=0.5)
    twice = took(save_s=2.0, restore_cold_s=1.0, restore_hot_s=1.0)
    assert [enough(twice, engine, rounds, 6.0) is None for rounds in range(5)] == [True] * 4 + [False]
    assert enough(twice, engine, 4, 6.0) == "stopped after 4: 2 × the engine's time"
    assert enough(took(save_s=7.0), engine, 0, 6.0) == (
        "only its first turn was measured: 7 × the engine's time"
    )
    # Of what only restores, no save of the engine's counts; and without an engine nothing is far behind it.
    assert enough(took(restore_hot_s=2.0), engine, 2, 6.0) == "stopped after 2: 4 × the engine's time"
    assert enough(took(save_s=99.0), None, 3, 6.0) is None


def test_without_a_turn_to_warm_up_every_restore_is_checked_all_the_same(tmp_path: Path) -> None:
    plan = Plan(
        mode="quick",
        cases=(TINY,),
        systems=("torch", FAKES + "LikeTorch", FAKES + "WrongLikeTorch"),
        directory=tmp_path,
        rounds=1,
        limits=False,
        warm=False,
    )
    found = runner.new_results("quick")
    runner.run(plan, found, lambda text: None)
    right, wrong = (found.cases[0].find(FAKES + name) for name in ("LikeTorch", "WrongLikeTorch"))
    assert right is not None
    assert wrong is not None
    assert right.error is None
    assert right.rounds("save_s") == 1
    assert "restore_cold_s" not in right.samples
    assert "came back with other bytes" in str(wrong.error)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture
def memory() -> Iterator[tuple[int, int]]:
    extent = layout(TINY, 0).extent
    fds = [os.memfd_create(name) for name in ("state", "target")]
    for fd in fds:
        os.ftruncate(fd, extent)
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


def test_a_hanging_worker_is_given_up_and_ended(
    tmp_path: Path, memory: tuple[int, int], nursery: Nursery
) -> None:
    team = Team(FAKES + "Hanging", TINY, [memory], nursery)
    team.wait()
    (pid,) = (process.pid for process in team._processes)
    with pytest.raises(TeamError, match=r"save: no answer from rank 0 within 0 s"):
        team.order(Order(do="save", directory=str(tmp_path)), 0.2)
    assert not Path(f"/proc/{pid}").exists()


def test_helpers_of_a_worker_end_with_it(tmp_path: Path, memory: tuple[int, int], nursery: Nursery) -> None:
    team = Team(FAKES + "Littering", TINY, [memory], nursery)
    team.wait()
    team.order(Order(do="save", directory=str(tmp_path)), 60)
    helper = (tmp_path / "pid").read_text()
    team.close()
    assert not Path(f"/proc/{helper}").exists() or "Z" in Path(f"/proc/{helper}/stat").read_text()


def test_semaphores_of_helpers_that_have_to_be_killed_are_removed(
    tmp_path: Path, memory: tuple[int, int], nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("native_bench.sessions.GENTLE_S", 0.2)
    team = Team(FAKES + "Deaf", TINY, [memory], nursery)
    team.wait()
    team.order(Order(do="save", directory=str(tmp_path)), 60)
    file = Path("/dev/shm") / f"sem.{(tmp_path / 'semaphore').read_text().lstrip('/')}"
    assert file.exists()
    team.close()
    assert not file.exists()


def test_a_missing_system_says_so_when_it_starts(memory: tuple[int, int], nursery: Nursery) -> None:
    team = Team(FAKES + "Absent", TINY, [memory], nursery)
    with pytest.raises(Missing, match="of_all_things"):
        team.wait()


def test_a_system_that_needs_more_descriptors_than_there_may_be_says_so(
    memory: tuple[int, int], nursery: Nursery
) -> None:
    team = Team(FAKES + "Greedy", TINY, [memory], nursery)
    with pytest.raises(Missing, match=r"needs 18,?000,?001,?000 file descriptors.*ulimit -Hn"):
        team.wait()


def test_the_limit_of_descriptors_is_raised_as_far_as_needed() -> None:
    script = (
        "import resource; from native_bench.worker import _room_for_descriptors as room;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard));"
        "print(room(0), *resource.getrlimit(resource.RLIMIT_NOFILE));"
        "print(room(50), *resource.getrlimit(resource.RLIMIT_NOFILE), hard)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first == ["None", "100", second[3]]
    assert second == ["None", "1050", second[3], second[3]]


def test_an_interrupted_run_leaves_nothing_but_its_results(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    command = [sys.executable, "-m", "native_bench", "run", "--quick", "--no-limits", "--cases", "small"]
    run = subprocess.Popen(
        [*command, "--systems", f"{FAKES}Hanging", "--dir", str(work), "--out", str(out)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    deadline = time.monotonic() + 60
    while not list(work.rglob("save-1")):  # the save that hangs has begun
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    workers = _descendants(run.pid)
    assert len(workers) > 1  # the nursery, and those it has started
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert list(work.iterdir()) == []
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    left = msgspec.json.decode((out / "results.json").read_bytes(), type=Results)
    assert left.interrupted
    assert not left.whole
    assert left.unfinished == ["small"]
    assert "**This run was cut short: interrupted, in `small`.**" in (out / "report.md").read_text()


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    """Neither what it has started, nor what the workers have, nor semaphores of theirs, nor files in
    memory."""
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "native_bench", "run", "--quick", "--no-limits", "--cases", "tmpfs"]
    run = subprocess.Popen(
        [*command, "--systems", f"{FAKES}DeafAndHanging", "--dir", str(work), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        deadline = time.monotonic() + 60
        shm = Path("/dev/shm")
        while not (
            told := [
                path for path in shm.glob(f"{ground.PREFIX}{run.pid}-*/*/*/semaphore") if path.read_text()
            ]
        ):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        semaphore = Path("/dev/shm") / f"sem.{told[0].read_text().lstrip('/')}"
        assert semaphore.exists()
        pids = _descendants(run.pid)
        assert len(pids) >= 5  # nursery, sentinel, worker, its helper, and that one's resource tracker
    finally:
        run.kill()
        run.wait()
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not semaphore.exists()
    assert list(shm.glob(f"{ground.PREFIX}{run.pid}-*")) == []


def test_an_interrupted_part_leaves_nothing(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "native_bench", "run", "--quick", "--cases", "step-time"),
            *("--dir", str(work), "--out", str(out)),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    deadline = time.monotonic() + 60
    while not list(work.iterdir()):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.02)
    (part,) = _children(run.pid)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert not Path(f"/proc/{part}").exists()
    assert list(work.iterdir()) == []


def test_a_run_can_be_added_to_another(tmp_path: Path) -> None:
    def run(*arguments: str) -> Results:
        given = ["run", "--quick", "--no-limits", "--dir", str(tmp_path), "--out", str(tmp_path / "out")]
        assert main([*given, *arguments]) == 0
        return results.read(str(tmp_path / "out" / "results.json"))

    first = run("--cases", "tmpfs", "--systems", "raw")
    both = run("--cases", "small", "--systems", "raw", "--add")
    assert [case.case.name for case in both.cases] == ["tmpfs", "small"]
    assert both.cases[0] == first.cases[0]
    assert both.seconds > first.seconds
    again = run("--cases", "small", "--systems", "raw")
    assert [case.case.name for case in again.cases] == ["small"]
    with_part = run("--cases", "growth")
    assert with_part.added == ["growth"], "its own run"
    assert msgspec.structs.replace(with_part, added=[]) == again
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## One rank, 500 tensors" in text
    assert "## What grows" in text


@pytest.mark.parametrize(
    ("available_gib", "left_out"), [(21, []), (19, ["engine-sync"]), (17, ["engine-sync", "engine-overlap"])]
)
def test_systems_that_memory_has_no_room_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch, available_gib: int, left_out: list[str]
) -> None:
    """The whole comparison fits into a machine of 24 GiB."""
    monkeypatch.setattr(room, "available_memory", lambda: available_gib << 30)
    large = next(case for case in FULL if case.name == "large")
    fit, out = room.that_fit(large, 2 << 30, list(ALL))
    assert fit == [name for name in ALL if name not in left_out]
    assert list(out) == left_out


def test_what_a_case_does_not_measure_is_said_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing is left of what was asked for."""
    given = ["run", "--quick", "--no-limits", "--cases", "small", "--dir", str(tmp_path)]
    assert main([*given, "--out", str(tmp_path / "out"), "--systems", "dcp-2,raw,nvrx"]) == 0
    said = capsys.readouterr().err
    assert "small: dcp-2, nvrx are skipped: a quick run checks it in `large`\n" in said
    (case,) = results.read(str(tmp_path / "out" / "results.json")).cases
    assert [system.name for system in case.systems] == ["raw"]
    assert main([*given, "--out", str(tmp_path / "none"), "--systems", "dcp-2"]) == 0
    said = capsys.readouterr().err
    assert "small: dcp-2 is skipped: a quick run checks it in `large`\n" in said
    assert "small: nothing is left to measure\n" in said
    assert "`dcp-2`" in (tmp_path / "none" / "report.md").read_text()


def test_a_system_that_memory_has_no_room_for_is_said_to_be_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "that_fit", lambda case, nbytes, wanted: (["raw"], {"torch": "no room"}))
    given = ["run", "--quick", "--no-limits", "--cases", "small", "--dir", str(tmp_path)]
    assert main([*given, "--out", str(tmp_path / "out"), "--systems", "torch,raw"]) == 0
    assert "small: torch is skipped: no room\n" in capsys.readouterr().err


def test_too_little_memory_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not found out by the kernel, which ends a worker without a word."""
    monkeypatch.setattr(room, "available_memory", lambda: 100 << 20)
    given = ["run", "--quick", "--no-limits", "--cases", "small", "--systems", "raw"]
    assert main([*given, "--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "native_bench: small takes about 1.2 GiB of memory, and not with less than 0.2; available" in said
    assert "cgroup: 0.1 GiB; free some" in said


def test_a_worker_that_the_kernel_kills_is_said_to_have_run_out_of_memory(tmp_path: Path) -> None:
    result = measure(tmp_path, TINY, FAKES + "Killed", rounds=1)
    killed = result.find(FAKES + "Killed")
    assert killed is not None
    assert str(killed.error).startswith("save: was ended by SIGKILL, most likely by the kernel as memory ran")
    assert "its last words: too much; the case takes about 1.1 GiB of memory" in str(killed.error)


def test_systems_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take no others (Orbax)."""
    monkeypatch.chdir(tmp_path)
    with ground.work_directory(TINY, Path(".")) as directory:
        assert directory.is_absolute()
        assert directory.parent == tmp_path
    assert not directory.exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f"{ground.PREFIX}{ended.pid}-x" / "deep").mkdir(parents=True)
    ours = tmp_path / f"{ground.PREFIX}{os.getpid()}-y"
    ours.mkdir()
    with ground.work_directory(TINY, tmp_path) as directory:
        assert directory.parent == tmp_path
        assert sorted(tmp_path.iterdir()) == sorted([ours, directory])


def test_any_run_removes_what_a_killed_one_left_in_memory(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])  # not waited for, as a runner that make has not asked about yet
    while Path(f"/proc/{ended.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    left = Path(tempfile.mkdtemp(prefix=f"{ground.PREFIX}{ended.pid}-", dir="/dev/shm"))
    given = ["run", "--quick", "--no-limits", "--cases", "growth"]
    try:
        assert main([*given, "--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
        assert not left.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)
        ended.wait()


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tiny needs .* GiB in"):
        room.check_space(tmp_path, 1 << 60, TINY)


def test_a_run_that_runs_out_of_space_keeps_what_it_has_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["run", "--quick", "--no-limits", "--systems", "raw", "--dir", str(tmp_path), "--out", str(out)]
    full = ["tmpfs"]

    def check(directory: Path, nbytes: int, case: Case) -> None:
        room.check_space(directory, 1 << 60 if case.name in full else nbytes, case)

    monkeypatch.setattr(bench, "check_space", check)
    assert main([*given, "--cases", "small,tmpfs"]) == 1
    error = capsys.readouterr().err
    assert "native_bench: tmpfs needs " in error
    left = results.read(str(out / "results.json"))
    assert [case.case.name for case in left.cases] == ["small"]
    assert (left.unfinished, left.interrupted) == (["tmpfs"], False)
    text = (out / "report.md").read_text()
    assert "**This run was cut short: tmpfs needs " in text
    assert "not, or not wholly, measured: `tmpfs`." in text
    # What is measured afterwards makes it whole.
    full.clear()
    assert main([*given, "--cases", "tmpfs", "--add"]) == 0
    left = results.read(str(out / "results.json"))
    assert left.whole
    assert left.cut_short is None
    assert "cut short" not in (out / "report.md").read_text()
    # And a run that measured nothing leaves what there was.
    before = (out / "results.json").read_bytes()
    full.append("small")
    assert main([*given, "--cases", "small"]) == 1
    assert (out / "results.json").read_bytes() == before
    assert "cut short" not in (out / "report.md").read_text()


def test_steps_are_told_as_they_begin(tmp_path: Path) -> None:
    said: list[str] = []
    systems = ("raw", "torch")
    plan = Plan(
        mode="quick", cases=(TINY,), systems=systems, directory=tmp_path, rounds=2, limits=False, warm=False
    )
    runner.run(plan, runner.new_results("quick"), lambda _: None, said.append)
    assert len(said) == runner.steps(plan) == 6
    assert said[:2] == ["tiny: raw begins, untimed", "tiny: torch begins, untimed"]
    assert "tiny: round 2 of 2, torch" in said


def test_layouts_do_not_overlap_and_values_are_put_into_every_tensor() -> None:
    for case in (TINY, TINY_PAIR):
        placed = layout(case, 1)
        assert len(placed.tensors) == case.count
        end = 0
        for tensor in placed.tensors:
            assert tensor.offset >= end
            assert tensor.offset % 64 == 0
            end = tensor.offset + tensor.nbytes
        assert end <= placed.extent
        memory = bytearray(placed.extent)
        fill(case, 1, memoryview(memory))
        for tensor in placed.tensors:
            assert any(memory[tensor.offset : tensor.offset + tensor.nbytes])
        assert {t.name for t in layout(case, 0).tensors}.isdisjoint(t.name for t in placed.tensors)


def _descendants(pid: int) -> list[int]:
    return [found for child in _children(pid) for found in (child, *_descendants(child))]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
