"""How do a few threads share a list of jobs, and how does the first failure stop them?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Job = TypeVar("Job")
Local = TypeVar("Local")


def in_threads(
    jobs: Sequence[Job], threads: int, local: Callable[[], Local], step: Callable[[Job, Local], object]
) -> None:
    """Calls `step(job, mine)` for each job; `mine` is what `local()` made for the thread that takes the job.

    The calling thread is one of the `threads`, so one thread starts none. Jobs are taken in order. After the
    first exception no job is begun; it is raised once the other threads have ended the job they are at.
    """
    if not jobs:
        return
    todo = iter(jobs)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            mine = local()
            while not failures:
                with lock:
                    try:
                        job = next(todo)
                    except StopIteration:
                        return
                step(job, mine)
        except BaseException as error:
            # A KeyboardInterrupt too must stop the other threads before it is raised.
            failures.append(error)

    helpers = [
        threading.Thread(target=work, name=f"ckptengine-work-{i}", daemon=True)
        for i in range(1, min(threads, len(jobs)))
    ]
    try:
        for helper in helpers:
            helper.start()
    except RuntimeError:
        # The system has no more threads to give: those there are do the work.
        pass
    except BaseException as error:
        failures.append(error)
    work()
    for helper in helpers:
        if helper.ident is None:
            continue  # never started
        try:
            helper.join()
        except BaseException as error:
            failures.append(error)
            helper.join()
    if failures:
        raise failures[0]
