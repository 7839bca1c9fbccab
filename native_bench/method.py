"""How was it measured? The report's last chapter."""

from __future__ import annotations

from native_bench.results import Results, System


def chapter(results: Results) -> str:
    """Markdown: what all systems have in common, what the marks mean, and which calls each one makes."""
    if not results.cases:
        return ""
    lines = [
        "## How it was measured",
        "",
        "Every system runs in a process of its own per rank, on the same memory; in each round each of them "
        "saves, restores with the page cache dropped, restores with it filled, and has every byte compared; "
        "the order rotates. The state is looked at before each save, as by a training step, the target "
        "overwritten before each restore, and loaders that return tensors of their own have theirs copied "
        "into it, since that is where a training process needs them. What they have freed goes back to the "
        "system after each turn, so that such a loader pays for fresh pages in each. Of two ranks the slower "
        "one counts. "
        "Figures are medians, with the middle half of the samples in brackets; the first save and restore of "
        "each process are not counted. The farther a system is behind, the fewer rounds it has, unless a "
        "target is about it.",
        "",
        "- † does not fsync by itself: its files are fsynced afterwards, and that is in the figure.",
        "- *aliases*: when the call returns the snapshot is not a copy; what training changes "
        "afterwards can get into "
        "the file, or is paid for later by copy-on-write.",
        "- *of the limit*: whichever of two was faster in this run, by medians; the table says which. "
        "*native*: the native programs' direct write of as many bytes, and their direct read of the engine's "
        "own files; *raw*: what Python threads reach without a format. The programs try a grid of settings "
        "once; of the two best that use memory in different ways (straight to its place or by way of "
        "buffers; pages of 4 KiB or huge ones) the fastest of several probes counts in each round. "
        "*of memcpy*: the faster of a native copy and one by Python threads, both by libc. On tmpfs there is "
        "no other limit.",
        "- *engine is*: how many times as fast the engine is, its `async_save` in case of a save.",
        "",
        "| system | calls |",
        "|---|---|",
    ]
    seen: dict[str, System] = {}
    for case in results.cases:
        for system in case.systems:
            if system.how:
                seen.setdefault(system.name, system)
    lines += [f"| {system.title} | {cell(system.how)} |" for system in seen.values()]
    return "\n".join(lines)


def cell(text: str) -> str:
    """As a cell of a table in Markdown."""
    return " ".join(text.replace("|", "\\|").split())
