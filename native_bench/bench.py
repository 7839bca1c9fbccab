"""One case: every round each system saves, restores and is checked, in rotated order."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from native_bench import cases
from native_bench.cases import GIB, Case
from native_bench.ground import make_cold, make_hot, memories
from native_bench.limits import LimitError
from native_bench.mounts import mount_of
from native_bench.native import Limits
from native_bench.nursery import Nursery
from native_bench.pace import enough
from native_bench.peers.base import files_below
from native_bench.plan import Plan
from native_bench.results import NATIVE, CaseResult, Results, System, by_reason, now
from native_bench.room import Memory, check_space, memory_of, that_fit
from native_bench.team import Missing, Team, TeamError
from native_bench.worker import Order

Report = Callable[[str], None]


class Bench:
    """One case."""

    def __init__(
        self,
        plan: Plan,
        case: Case,
        directory: Path,
        results: Results,
        say: Report,
        advance: Report,
        nursery: Nursery,
        limits: Limits | None,
    ) -> None:
        self.plan, self.case, self.directory = plan, case, directory
        self.say, self.advance, self.nursery = say, advance, nursery
        layouts = [cases.layout(case, rank) for rank in range(case.world_size)]
        self.result = CaseResult(
            case=case,
            nbytes=sum(layout.nbytes for layout in layouts),
            tensors=sum(len(layout.tensors) for layout in layouts),
            directory=str(plan.directory if case.place == "disk" else directory.parent),
            started=now(),
            file_system=mount_of(directory.resolve()).file_system,
        )
        self.results = results
        self.extents = [layout.extent for layout in layouts]
        self.memories: list[tuple[int, int]] = []
        self.teams: dict[str, Team] = {}
        self.fresh: set[str] = set()
        self.checked: set[str] = set()
        self.systems: dict[str, System] = {}
        self.warm_ups: dict[str, System] = {}
        self.last_round: dict[str, float] = {}
        self.step = 0
        self.round = 0
        self.limits = limits
        self.memory: Memory | None = None

    def run(self) -> None:
        wanted = [name for name in self.plan.systems if self.case.takes(name)]
        wanted, left_out = that_fit(self.case, self.result.nbytes, wanted)
        self.result.skipped.update(left_out)
        apart = {name: self.case.apart[name] for name in self.plan.systems if not self.case.takes(name)}
        for reason, names in by_reason({**apart, **left_out}).items():
            are = "is" if len(names) == 1 else "are"
            self.say(f"{self.case.name}: {', '.join(names)} {are} skipped: {reason}")
        self.memory = memory_of(self.case, self.result.nbytes, wanted)
        check_space(self.directory, self.result.nbytes, self.case)
        self.results.cases.append(self.result)
        self.say(f"{self.case.title}: starting {len(wanted)} systems in {self.directory}")
        with contextlib.ExitStack() as stack:
            stack.push(self._close)
            self.memories = [stack.enter_context(memories(extent)) for extent in self.extents]
            for rank, (state_fd, _) in enumerate(self.memories):
                with mmap.mmap(state_fd, self.extents[rank]) as memory:
                    view = memoryview(memory)
                    cases.fill(self.case, rank, view)
                    view.release()
            self._add_limits()
            for name in wanted:
                self.teams[name] = Team(name, self.case, self.memories, self.nursery)
            for name in wanted:
                self._begin(name)
            names = list(self.systems)
            if not names:
                self.say(f"{self.case.name}: nothing is left to measure")
                return
            for number in range(1, self.plan.rounds + 1):
                self.round = number
                shift = (self.round - 1) * max(1, len(names) // self.plan.rounds)
                for name in names[shift % len(names) :] + names[: shift % len(names)]:
                    due = self._due(name)
                    self.advance(
                        f"{self.case.name}: round {number} of {self.plan.rounds}, {name}" if due else ""
                    )
                    if due:
                        began = time.monotonic()
                        self._turn(name)
                        self.last_round[name] = time.monotonic() - began
                        self._record(name, {"turn_s": self.last_round[name]})
                self.say(f"{self.case.name}: round {self.round} of {self.plan.rounds} done")
            if NATIVE in self.systems and self.limits is not None:
                self.systems[NATIVE].how = self.limits.how

    def _add_limits(self) -> None:
        if self.limits is None:
            return
        self.advance("")
        self.say(f"{self.case.name}: finding the native programs' fastest settings")
        if self.limits.missing:
            self.result.skipped[NATIVE] = self.limits.missing
        else:
            system = System(name=NATIVE, title="native limit", fsyncs=True, limit=True)
            self.systems[NATIVE] = system
            self.result.systems.append(system)
            try:
                self.limits.prepare(self.result.nbytes)
            except LimitError as exc:
                self._fail(NATIVE, str(exc))

    def _begin(self, name: str) -> None:
        """Wait for a system's workers, and let them do everything once, untimed."""
        self.advance(f"{self.case.name}: {name} begins, untimed")
        team = self.teams[name]
        try:
            team.wait()
        except Missing as exc:
            self.result.skipped[name] = str(exc)
            self.say(f"{self.case.name}: {name} is skipped: {exc}")
            return
        except TeamError as exc:
            failed = System(name=name, title=name, error=self._told(exc))
            self.result.systems.append(failed)
            self.say(f"{self.case.name}: {name} failed: {failed.error}")
            return
        known = {field.name for field in dataclasses.fields(_FIELDS)}
        system = System(
            **{key: value for key, value in team.traits.items() if key in known and key != "name"}, name=name
        )
        self.systems[name] = system
        self.result.systems.append(system)
        # Those that begin anew in each turn have an untimed save in it.
        warm = (self.plan.warm or name.startswith("engine")) and not team.traits["fresh"]
        if warm and not self._source(name):
            began = time.monotonic()
            self._turn(name, timed=False)
            self.last_round[name] = time.monotonic() - began
        if team.traits["fresh"]:
            self.fresh.add(name)
            self.teams.pop(name).close()

    def _due(self, name: str) -> bool:
        system = self.systems[name]
        if system.error or (self._source(name) and name != NATIVE):
            return False  # failed, or measured with the one whose files it reads
        return not self._has_enough(name)

    def _has_enough(self, name: str) -> bool:
        """Whether it is so slow that it is not measured again; its note then says so."""
        system = self.systems[name]
        # The first turn of the engine's ways to save makes an arena: it says nothing of those that follow.
        if system.limit or (name.startswith("engine") and name not in self.fresh):
            return False
        if system.note:
            return True
        rounds = self.round - 1
        if rounds >= self.case.at_most.get(name, self.plan.rounds):
            system.note = f"stopped after {rounds}: no target is about it"
            return True
        if rounds and self.last_round.get(name, 0.0) > self.plan.round_s:
            system.note = f"stopped after {rounds}: a round took {self.last_round[name]:.0f} s"
            return True
        seen = system if rounds else self.warm_ups.get(name)
        if seen is None or name in self.case.named:
            return False
        system.note = enough(seen, self.systems.get("engine"), rounds, self.plan.patience)
        if system.note:
            system.samples = seen.samples
        return bool(system.note)

    def _source(self, name: str) -> System | None:
        """The system whose files this one reads in that one's turn, if it still runs."""
        own = self.systems[name].saves_like
        source = self.systems.get(own) if own else None
        return source if source is not None and not source.error and not source.note else None

    def _turn(self, name: str, timed: bool = True) -> None:
        """Save, restore cold and hot, check, remove. A failure ends the system's part in this case."""
        if name == NATIVE:
            assert self.limits is not None
            try:
                self._record(name, self.limits.alone())
            except LimitError as exc:
                self._fail(name, str(exc))
            return
        root = self.directory / name.replace(":", ".")
        self.step += 1
        directory = root / f"save-{self.step}"
        directory.mkdir(parents=True)
        try:
            if name in self.fresh and not self._renew(name, directory):
                return
            figures = self._order(name, "save", directory)
            if figures is None:
                return
            self._record(name, figures, timed)
            self._restores(name, root, directory, timed)
        finally:
            # Not the root itself: the engine keeps files there for as long as it is open.
            for child in root.iterdir():
                if child.name.startswith(("save-", "step-")):
                    shutil.rmtree(child)
            if name in self.fresh:
                self.teams.pop(name).close()

    def _renew(self, name: str, directory: Path) -> bool:
        """New workers for a turn, which have saved once."""
        self.teams[name] = Team(name, self.case, self.memories, self.nursery)
        try:
            self.teams[name].wait()
        except TeamError as exc:
            self._fail(name, self._told(exc))
            return False
        warm = self._order(name, "save", directory)
        for child in directory.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        return warm is not None

    def _restores(self, name: str, root: Path, directory: Path, timed: bool) -> None:
        """The system's own restores and, beside them on the same files, those of others that read them. Where
        those of another system are timed for it, it is checked once."""
        elsewhere = self.systems[name].restores_like in self.systems
        if elsewhere and name in self.checked:
            return
        self.checked.add(name)
        others = [other for other in self.systems if timed and self._reads(other, name)]
        readers = [name] + [other for other in others if not self._has_enough(other)]
        # Whoever is first after a save might find the disk still busy: it is not always the same.
        shift = self.round % len(readers)
        for kind in ("hot",) if elsewhere or self.case.place == "tmpfs" else ("cold", "hot"):
            for reader in readers[shift:] + readers[:shift]:
                if self.systems[reader].error:
                    continue
                self._prepare_cache(root, kind)
                if reader == NATIVE:
                    assert self.limits is not None
                    try:
                        figures = self.limits.read(list(files_below(str(root))), kind)
                    except LimitError as exc:
                        self._fail(NATIVE, str(exc))
                        continue
                else:
                    answered = self._order(reader, "restore", directory)
                    if answered is None:
                        continue
                    figures = {f"restore_{kind}_{key}": value for key, value in answered.items()}
                if not elsewhere:
                    self._record(reader, figures, timed)

    def _reads(self, other: str, name: str) -> bool:
        if other == NATIVE:
            return name == "engine"
        return self.systems[other].saves_like == name and not self.systems[other].error

    def _order(self, name: str, what: str, directory: Path) -> dict[str, float] | None:
        timeout_s = self.plan.deadline_s * max(1.0, self.result.nbytes / GIB)
        try:
            return self.teams[name].order(Order(do=what, directory=str(directory), step=self.step), timeout_s)
        except TeamError as exc:
            self._fail(name, self._told(exc))
            return None

    def _told(self, exc: TeamError) -> str:
        needs = f"; the case takes {self.memory.told}" if exc.killed and self.memory is not None else ""
        return f"{exc}{needs}"

    def _fail(self, name: str, error: str) -> None:
        self.systems[name].error = error
        self.say(f"{self.case.name}: {name} failed: {error}")

    def _record(self, name: str, figures: dict[str, float], timed: bool = True) -> None:
        kept = self.systems if timed else self.warm_ups
        system = kept.setdefault(name, System(name=name, title=name))
        for figure, value in figures.items():
            system.samples.setdefault(figure, []).append(value)

    def _prepare_cache(self, root: Path, kind: str) -> None:
        tolerated = 0.01 * self.result.nbytes
        if kind == "cold":
            if (left := make_cold(root)) > tolerated:
                self._note(f"{left / GIB:.2f} GiB were still in the page cache before a cold restore")
        elif make_hot(root) > tolerated:
            self._note("not all of a file stayed in the page cache before a hot restore: memory is short")

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """All at once, as one by one they would take a minute; and by force if the case was cut short."""
        for team in self.teams.values():
            if kind is None:
                team.dismiss()
            else:
                team.terminate()
        for team in self.teams.values():
            if kind is None:
                team.close()
            else:
                team.kill()


_FIELDS = dataclasses.make_dataclass(
    "_FIELDS", ["title", "how", "fsyncs", "copies", "limit", "restores_like", "saves_like"]
)
"""The traits that a result repeats."""
