"""In what condition is the machine that is about to be measured? `python -m native_bench.condition [DIR]`"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from ckptengine.storage import streaming
from ckptengine.storage.headroom import cgroups, meminfo
from native_bench.mounts import Mount, mount_of
from native_bench.page_cache import can_drop_caches

# Distributions whose version a figure may depend on. They are looked up, not imported: importing torch would
# itself put load on the machine.
PACKAGES = (
    "ckptengine",
    "torch",
    "nvidia-resiliency-ext",
    "numpy",
    "xxhash",
    "zstandard",
    "msgspec",
    "safetensors",
)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Condition:
    """What a figure has to be read beside. Sizes are bytes; None: not told, or no limit."""

    # processor
    cpu_model: str
    cores_online: int
    cores_usable: int
    """Cores this process may run on: its affinity mask."""
    cgroup_cores: float | None
    """CPU time the cgroup may use per second."""
    governor: str | None
    load: tuple[float, float, float]
    pressure: Mapping[str, float]
    """Percent of the last ten seconds in which some task waited for `cpu`, `io` or `memory`."""
    # memory
    memory_total: int
    memory_available: int
    page_cache: int
    dirty: int
    writeback: int
    swap_used: int
    cgroup_memory: int | None
    memlock_limit: int | None
    address_space_limit: int | None
    transparent_huge_pages: str | None
    # storage
    directory: str
    mount: Mount
    space_free: int
    can_drop_caches: bool
    # software
    kernel: str
    io_uring: str
    python: str
    packages: Mapping[str, str]
    streaming: str
    """Whether the engine's compiled helper for copies in memory is loaded, or why not."""

    @property
    def cores(self) -> float:
        """Cores' worth of time to be had: affinity or the cgroup's limit, whichever is less."""
        return min(self.cores_usable, self.cgroup_cores or self.cores_usable)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes figures taken now doubtful; empty on a quiet machine."""
        found = []
        if self.load[0] > 0.5 * self.cores:
            found.append(
                f"load is {self.load[0]:.2f} on {self.cores:g} cores: other work runs, wall-clock figures "
                "are noise"
            )
        for kind, percent in self.pressure.items():
            if percent > 20:
                found.append(f"tasks waited for {kind} in {percent:.0f} % of the last 10 s")
        if self.dirty + self.writeback > 256 << 20:
            found.append(
                f"{_size(self.dirty + self.writeback)} wait to be written back: the disk is, or will be, "
                "busy (run `sync`)"
            )
        if self.memory_available < 4 * GIB:
            found.append(f"only {_size(self.memory_available)} of memory are available")
        if self.cgroup_memory is not None and self.cgroup_memory < 4 * GIB:
            found.append(f"the cgroup may use {_size(self.cgroup_memory)} of memory; page cache counts, too")
        if self.swap_used > 64 << 20:
            found.append(f"{_size(self.swap_used)} are swapped out")
        if self.space_free < 8 * GIB:
            found.append(f"only {_size(self.space_free)} are free in {self.directory}")
        if self.governor not in (None, "performance"):
            found.append(f"the CPU frequency governor is {self.governor!r}: clocks may vary")
        if self.transparent_huge_pages == "never":
            found.append("transparent huge pages are off: huge-page figures are not")
        if not self.can_drop_caches:
            found.append("the page cache cannot be dropped (not root): cold reads rest on posix_fadvise")
        if self.streaming != streaming.LOADED and platform.machine() == "x86_64":
            found.append(f"the engine copies without its compiled helper ({self.streaming})")
        return tuple(found)

    def to_json(self) -> dict[str, object]:
        """As JSON values, with the derived `cores` and `warnings`."""
        return {**asdict(self), "cores": self.cores, "warnings": list(self.warnings)}

    def to_markdown(self) -> str:
        """A table of two columns and, if there are any, the warnings."""
        lines = ["| machine | |", "|---|---|"]
        lines += [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in self._rows()]
        if self.warnings:
            lines += ["", *(f"- **Warning:** {text}." for text in self.warnings)]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[tuple[str, str]]:
        limit = "none" if self.cgroup_cores is None else f"{self.cgroup_cores:g}"
        mount = self.mount
        return [
            ("CPU", self.cpu_model),
            ("cores", f"{self.cores_usable} usable of {self.cores_online} online, cgroup limit {limit}"),
            ("frequency governor", self.governor or "not told"),
            ("load (1, 5, 15 min)", ", ".join(f"{value:.2f}" for value in self.load)),
            (
                "waited in the last 10 s",
                ", ".join(f"{kind} {percent:g} %" for kind, percent in self.pressure.items()) or "not told",
            ),
            ("memory", f"{_size(self.memory_available)} available of {_size(self.memory_total)}"),
            (
                "memory limits",
                f"cgroup {_limit(self.cgroup_memory)}, memlock {_limit(self.memlock_limit)}, "
                f"address space {_limit(self.address_space_limit)}",
            ),
            (
                "page cache",
                f"{_size(self.page_cache)}; {_size(self.dirty)} dirty, {_size(self.writeback)} in writeback",
            ),
            ("swap used", _size(self.swap_used)),
            ("transparent huge pages", self.transparent_huge_pages or "not told"),
            ("directory", f"{self.directory} ({_size(self.space_free)} free)"),
            ("file system", f"{mount.file_system} on {mount.point}, from {mount.source}"),
            ("mount options", mount.options),
            ("device", mount.device or "not a block device"),
            ("page cache can be dropped", "yes" if self.can_drop_caches else "no"),
            ("kernel", self.kernel),
            ("io_uring", self.io_uring),
            ("Python", self.python),
            ("packages", ", ".join(f"{name} {version}" for name, version in self.packages.items())),
            ("compiled helper", self.streaming),
        ]


def condition_of(directory: str | os.PathLike[str] = ".") -> Condition:
    """The machine's condition now, seen from an existing `directory`. Takes milliseconds, changes nothing."""
    where = Path(directory).resolve(strict=True)
    memory = meminfo()
    space = os.statvfs(where)
    return Condition(
        cpu_model=_cpu_model(),
        cores_online=os.cpu_count() or 1,
        cores_usable=len(os.sched_getaffinity(0)),
        cgroup_cores=_cgroup_cores(),
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        load=os.getloadavg(),
        pressure=_pressure(),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        page_cache=memory.get("Cached", 0) + memory.get("Buffers", 0),
        dirty=memory.get("Dirty", 0),
        writeback=memory.get("Writeback", 0),
        swap_used=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        cgroup_memory=_cgroup_memory(memory.get("MemTotal", 0)),
        memlock_limit=_rlimit(resource.RLIMIT_MEMLOCK),
        address_space_limit=_rlimit(resource.RLIMIT_AS),
        transparent_huge_pages=_chosen(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        directory=str(where),
        mount=mount_of(where),
        space_free=space.f_bavail * space.f_frsize,
        can_drop_caches=can_drop_caches(),
        kernel=platform.release(),
        io_uring=_io_uring(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=versions_of(PACKAGES),
        streaming=streaming.status,
    )


def _text(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets, as in "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] or None if text else None


def _cpu_model() -> str:
    for line in (_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()  # arm64 has no such line


def _pressure() -> dict[str, float]:
    found = {}
    for kind in ("cpu", "io", "memory"):
        for line in (_text(f"/proc/pressure/{kind}") or "").splitlines():
            word, average, *_ = line.split()
            if word == "some":
                found[kind] = float(average.removeprefix("avg10="))
    return found


def _rlimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_cores() -> float | None:
    limits = []
    for group in cgroups("cpu"):
        quota, _, period = (_text(group / "cpu.max") or "").partition(" ")
        if not quota:
            quota = _text(group / "cpu.cfs_quota_us") or "max"
            period = _text(group / "cpu.cfs_period_us") or ""
        if quota not in ("max", "-1") and period:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _cgroup_memory(total: int) -> int | None:
    texts = (
        _text(group / name) for group in cgroups("memory") for name in ("memory.max", "memory.limit_in_bytes")
    )
    limits = [int(text) for text in texts if text and text != "max"]
    # Version 1 writes a huge number for "none".
    return min((limit for limit in limits if limit < total), default=None)


def _io_uring() -> str:
    disabled = _text("/proc/sys/kernel/io_uring_disabled")
    allowed = {"0": "allowed", "1": "allowed to the privileged", "2": "disabled by sysctl"}
    header = next((p for p in ("/usr/include", "/usr/local/include") if Path(p, "liburing.h").exists()), None)
    kernel = allowed.get(disabled, "not told by the kernel") if disabled else "not told by the kernel"
    return f"{kernel}, liburing {'found in ' + header if header else 'not found'}"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def _limit(nbytes: int | None) -> str:
    return "none" if nbytes is None else _size(nbytes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench.condition", description=__doc__)
    parser.add_argument("directory", nargs="?", default=".", help="where the files will be (default: here)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a Markdown table")
    given = parser.parse_args(arguments)
    try:
        condition = condition_of(given.directory)
    except OSError as exc:
        print(f"{given.directory}: {exc.strerror}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(condition.to_json(), indent=2))
    else:
        print(condition.to_markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
