"""Is a save refused where the job's memory limit has no room for it and its writer process, and never anybody
killed?"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.helpers.memory_groups import kills, memory_group
from tests.helpers.scripts import Script

MIB = 1 << 20
LIMIT = 1000 * MIB
FITS, EDGE, BEYOND = 80, (190, 220, 240, 270, 310), 340
"""MiB of state: the trainer, of some 250 MiB, has it, and its snapshot. What is left beside three of `FITS`
holds a writer, too; beside two of `BEYOND` it does not."""

SAVES = """
    import gc, os, sys
    with open(sys.argv[1], "w") as procs:
        procs.write(str(os.getpid()))
    import torch
    import ckptengine as ck
    root, snapshot, codec, how, *sizes = sys.argv[2:]
    if __name__ == "__main__":
        for mib in map(int, sizes):
            weight = torch.nn.Parameter(torch.randn(1 << 18).repeat(mib))
            state = {"weight": weight, "optimizer": torch.optim.SGD([weight])}
            config = ck.Config(snapshot=snapshot, codec=codec, keep_last=1, on_error="warn")
            with ck.Checkpointer(f"{root}/{mib}", config=config) as ckpt:
                ended = []
                for step in range(3):
                    try:
                        if how == "save":
                            ckpt.save(step, state)
                            ended.append("committed")
                        else:
                            ended.append(ckpt.async_save(step, state))
                    except ck.SaveFailedError as error:
                        ended.append(error)
                ckpt.wait()
                for end in ended:
                    if isinstance(end, ck.SaveHandle):
                        end = end.exception() or "committed"
                    print(mib, end if end == "committed" else f"{type(end).__name__}: {end}", flush=True)
            # Before the next one is made. An error's traceback holds the state, too.
            weight = state = ckpt = ended = end = None
            gc.collect()
        print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("snapshot", "codec", "how"),
    [
        pytest.param("copy", "raw", "async", marks=pytest.mark.sample),
        ("copy", "zstd", "async"),
        ("copy", "raw", "save"),
        ("overlap", "raw", "async"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_first_saves_around_the_limit_are_committed_or_refused(
    tmp_path: Path, snapshot: str, codec: str, how: str
) -> None:
    sizes = [FITS, *EDGE, BEYOND]
    with memory_group(LIMIT) as group:
        arguments = [str(group / "cgroup.procs"), str(tmp_path), snapshot, codec, how, *map(str, sizes)]
        with Script(SAVES, *arguments) as trainer:
            code = trainer.ends(240.0)
            assert code == 0, trainer.stdout + trainer.stderr
            *ended, last = trainer.stdout.splitlines()
            assert kills(group) == 0, trainer.stdout
    assert last == "alive"
    assert len(ended) == 3 * len(sizes)
    for line in ended:
        size, _, how_it_ended = line.partition(" ")
        assert how_it_ended == "committed" or how_it_ended.startswith("SaveFailedError: no memory"), line
        if int(size) == FITS:
            assert how_it_ended == "committed", line
        if int(size) == BEYOND:
            assert "left for writer processes" in how_it_ended, line
            assert "raise the memory limit of the job" in how_it_ended, line


TOGETHER = """
    import gc, os, sys, time
    from pathlib import Path
    with open(sys.argv[1], "w") as procs:
        procs.write(str(os.getpid()))
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    import torch
    import ckptengine as ck
    root, me, *sizes = sys.argv[2:]
    def meet(place):
        Path(f"{place}.{me}").touch()
        while not all(Path(f"{place}.{other}").exists() for other in range(4)):
            time.sleep(0.001)
    if __name__ == "__main__":
        for mib in map(int, sizes):
            state = {"weight": torch.randn(1 << 18).repeat(mib)}
            with ck.Checkpointer(f"{root}/{me}/{mib}", config=ck.Config(on_error="warn")) as ckpt:
                meet(f"{root}/{mib}")
                try:
                    end = ckpt.async_save(1, state).exception() or "committed"
                except ck.SaveFailedError as error:
                    end = error
                print(mib, end if end == "committed" else f"{type(end).__name__}: {end}", flush=True)
                meet(f"{root}/{mib}.done")
            state = ckpt = end = None
            gc.collect()
        print("alive", flush=True)
"""


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(200)
def test_ranks_that_save_at_once_see_what_the_others_take(tmp_path: Path) -> None:
    """Four under one limit, which has room for any one's snapshot, and not for all of theirs."""
    small, large = 60, 300
    with memory_group(3000 * MIB) as group, contextlib.ExitStack() as running:
        procs = str(group / "cgroup.procs")
        ranks = [
            running.enter_context(Script(TOGETHER, procs, str(tmp_path), str(me), str(small), str(large)))
            for me in range(4)
        ]
        for rank in ranks:
            code = rank.ends(150.0)
            assert code == 0, rank.stdout + rank.stderr
        said = [rank.stdout.splitlines() for rank in ranks]
        assert kills(group) == 0, said
    assert all(first == f"{small} committed" and last == "alive" for first, _, last in said), said
    refused = [how for _, how, _ in said if how.startswith(f"{large} SaveFailedError: no memory")]
    committed = [how for _, how, _ in said if how == f"{large} committed"]
    assert refused, said
    assert len(refused) + len(committed) == 4, said


ANEW = """
    import os, signal, sys, time
    with open(sys.argv[1], "w") as procs:
        procs.write(str(os.getpid()))
    import torch
    import ckptengine as ck
    from ckptengine.storage.headroom import available_memory
    if __name__ == "__main__":
        state = {"weight": torch.zeros(1 << 20)}
        with ck.Checkpointer(sys.argv[2], config=ck.Config(on_error="warn")) as ckpt:
            ckpt.save(1, state)
            writer = ckpt.writer_pid
            os.kill(writer, signal.SIGKILL)
            while os.path.exists(f"/proc/{writer}") and "Z" not in open(f"/proc/{writer}/stat").read():
                time.sleep(0.01)
            filled = torch.ones(available_memory() - (100 << 20), dtype=torch.uint8)
            try:
                ckpt.save(2, state)
            except ck.SaveFailedError as error:
                print(error, flush=True)
            del filled
            ckpt.save(3, state)
            print(ckpt.steps(), flush=True)
"""


def test_a_writer_is_started_anew_only_where_there_is_memory_for_it(tmp_path: Path) -> None:
    with memory_group(LIMIT) as group:
        with Script(ANEW, str(group / "cgroup.procs"), str(tmp_path)) as trainer:
            assert trainer.ends() == 0, trainer.stderr
            refused, steps = trainer.stdout.splitlines()
        assert kills(group) == 0
    assert "no memory for the writer process" in refused
    assert "bytes are available, and it needs" in refused
    assert "raise the memory limit of the job" in refused
    assert steps == "[1, 3]"
