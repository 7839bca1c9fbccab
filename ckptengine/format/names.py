"""What are the files and directories of a checkpoint called, and which paths may a manifest name?"""

from __future__ import annotations

import operator
import re
from contextlib import suppress
from dataclasses import dataclass

from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.limits import INT64_MAX

MANIFEST_NAME = "MANIFEST.json"
INDEX_NAME = "INDEX"
RAW_SUFFIX = ".safetensors"
ZSTD_SUFFIX = ".ckptz"

_STEP = re.compile(r"step-([0-9]{10,19})")
_RUN = re.compile(r"a([0-9]{6,})-([0-9a-f]{12})-([0-9a-f]{8})")
_ATTEMPT = re.compile(r"(a[0-9]{6,}-[0-9a-f]{12}-[0-9a-f]{8})-([0-9]{6,})\.([0-9]+)")
_MAX_ID_LENGTH = 255


def check_step(step: object) -> int:
    """The number that a caller means by `step`: any whole number, also numpy's or a tensor's.

    Raises `TypeError` for anything else, and for a truth value, which is a number only by accident of the
    language; `ValueError` outside of [0, 2^63).
    """
    number: int | None = None
    if not isinstance(step, bool) and "bool" not in str(getattr(step, "dtype", "")):
        with suppress(TypeError, ValueError, RuntimeError):
            number = operator.index(step)  # type: ignore[arg-type]  # as what it may be
    if number is None:
        raise TypeError(f"step must be an integer, not {_shown(step)} ({type(step).__name__})")
    if not 0 <= number <= INT64_MAX:
        raise ValueError(f"step must be in [0, 2^63), not {_shown(number)}")
    return number


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # Python refuses to print an integer of thousands of digits
        return "this"
    return text if len(text) <= 100 else f"{text[:100]}…"


def step_dirname(step: int) -> str:
    """The directory of a step, `step-0000001000`."""
    if not 0 <= step <= INT64_MAX:
        raise ValueError(f"step must be in [0, 2^63), not {step}")
    return f"step-{step:010d}"


def parse_step_dirname(name: str) -> int | None:
    """The step a directory name stands for, or None; only the one canonical spelling counts."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step <= INT64_MAX and step_dirname(step) == name else None


def shard_filename(rank: int, *, compressed: bool) -> str:
    """The file of a rank's shard inside its attempt's directory."""
    if rank < 0:
        raise ValueError(f"rank must not be negative, not {rank}")
    return f"shard-{rank:05d}{ZSTD_SUFFIX if compressed else RAW_SUFFIX}"


def check_relative_path(path: str) -> None:
    """Refuse a path that is not plainly below the step directory; `CorruptCheckpointError` says why."""
    problem = None
    if not path:
        problem = "is empty"
    elif path.startswith("/"):
        problem = "is absolute"
    elif "\\" in path or "\0" in path:
        problem = "has a backslash or a NUL"
    elif any(part in ("", ".", "..") for part in path.split("/")):
        problem = 'has an empty, "." or ".." component'
    if problem is not None:
        raise CorruptCheckpointError(
            f"the path {path!r} {problem}, so it may lead out of its checkpoint",
            hint="do not read this checkpoint; restore an earlier step",
        )


@dataclass(frozen=True, order=True, slots=True)
class RunId:
    """One life of a job: `life` counts the runs that wrote to a root, `nonce` tells two at once apart."""

    life: int
    created_ms: int
    nonce: str

    def __post_init__(self) -> None:
        if (
            self.life < 0
            or not 0 <= self.created_ms < 1 << 48
            or not re.fullmatch(r"[0-9a-f]{8}", self.nonce)
        ):
            raise ValueError(
                f"not a run id: life {self.life}, created_ms {self.created_ms}, nonce {self.nonce!r}"
            )

    def __str__(self) -> str:
        return f"a{self.life:06d}-{self.created_ms:012x}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> RunId:
        """The id that prints as `text`; `ValueError` if none does."""
        match = _RUN.fullmatch(text) if len(text) <= _MAX_ID_LENGTH else None
        run = cls(int(match[1]), int(match[2], 16), match[3]) if match else None
        if run is None or str(run) != text:
            raise ValueError(f"not a run id: {text[:_MAX_ID_LENGTH]!r}")
        return run


@dataclass(frozen=True, order=True, slots=True)
class AttemptId:
    """One try at saving one step; a later run, save or retry compares greater."""

    run: RunId
    save: int
    retry: int = 0

    def __post_init__(self) -> None:
        if self.save < 0 or self.retry < 0:
            raise ValueError(f"not an attempt id: save {self.save}, retry {self.retry}")

    def __str__(self) -> str:
        return f"{self.run}-{self.save:06d}.{self.retry}"

    @classmethod
    def parse(cls, text: str) -> AttemptId:
        """The id that prints as `text`; `ValueError` if none does."""
        match = _ATTEMPT.fullmatch(text) if len(text) <= _MAX_ID_LENGTH else None
        attempt = cls(RunId.parse(match[1]), int(match[2]), int(match[3])) if match else None
        if attempt is None or str(attempt) != text:
            raise ValueError(f"not an attempt id: {text[:_MAX_ID_LENGTH]!r}")
        return attempt
