"""What becomes of what was stored for an object: which of its tensors are filled, and what is it given?

A module is *closed*: its tensors are all there, are filled in place, and must match. Any other object is
*open*: it takes a state that is made as it was stored, of its own tensors where it has them. See `objects`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ckptengine.adapters import objects
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.kinds import article, kind_of, type_name
from ckptengine.adapters.loads import Load
from ckptengine.adapters.matching_tensors import Tensors
from ckptengine.adapters.matching_values import Values
from ckptengine.adapters.opened import Fresh, Opened
from ckptengine.adapters.placing import Placement
from ckptengine.adapters.tensors import LocalChunk, is_tensor
from ckptengine.adapters.values import Node
from ckptengine.adapters.walk import Walk, tag_of
from ckptengine.adapters.wanted import Path, names_in
from ckptengine.read.partial import other_prefix

MatchDict = Callable[[dict[Any, Any], Node, Path], object]


class Objects:
    """Those of one walk. What is found are its `actions`, each a `Load`."""

    def __init__(self, walk: Walk, tensors: Tensors, values: Values) -> None:
        self._walk = walk
        self._wanted = walk.wanted
        self._own = walk.own
        self._tensors = tensors
        self._values = values

    def match(self, target: Any, node: Node, path: Path, match_dict: MatchDict) -> None:
        """match_dict: for an object that is made of others."""
        if tag_of(node) == "object":
            node = node["v"]
        adapter = objects.adapter(target)
        parts = adapter.parts()
        if parts is None and not isinstance(adapter, objects.ModuleAdapter):
            self._match_open(adapter, node, path)
            return
        kind = kind_of(node, self._walk.leaves)
        if kind != "dict":
            self._walk.differs(path, f"{type_name(target)}, in the checkpoint {article(kind)}")
        elif parts is not None:
            match_dict(parts, node, path)
        else:
            self._match_module(adapter, node, path)

    def _match_module(self, adapter: Any, node: Node, path: Path) -> None:
        walk, wanted = self._walk, self._wanted
        state = adapter.state()
        entries = self._values.entries(node, path)
        stored_as: dict[Any, Any] = {}
        if wanted.partial.rename is None and not state.keys() <= entries.keys():
            renamed = adapter.otherwise_named(state, entries)
            stored_as = {here: stored for stored, here in renamed.items()}
            entries = {renamed.get(key, key): child for key, child in entries.items()}
        stored = wanted.entries(state, path, entries, of_module=True)
        walk.look_for_prefix(state, path, stored, entries)
        buffers = adapter.buffers() if wanted.partial.parameters_only else ()
        given: dict[Any, Callable[[], Any]] = {}
        needed: list[Placement] = []
        large = set(self._values.large)
        for key, value in state.items():
            inner = (*path, key)
            first = len(walk.placements)
            is_own = is_tensor(value) and not objects.is_extra_state(key)
            parameter = is_own and key not in buffers
            if key not in stored:
                walk.missing(inner, parameter=parameter)
            elif not wanted.is_all and not wanted.takes(inner, parameter=parameter):
                continue
            elif is_own:
                self._tensors.match(value, stored[key], inner, parameter=parameter)
                if not adapter.owns(value):
                    given[key] = _constant(value)
            elif not self._own.stay(stored[key], (*path, stored_as.get(key, key))):
                opened = self._opened(value, inner, lambda path, leaf: None)
                given[key] = opened.open(stored[key])
                self._differ_as_unplaced(opened.unplaced)
            if key in given:
                needed += walk.placements[first:]
        for key, child in entries.items():
            if key not in state:
                walk.unexpected((*path, key), child)
        if given:
            walk.actions.append(
                Load(
                    adapter,
                    lambda: {key: get() for key, get in given.items()},
                    joined(path),
                    tuple(needed),
                    tuple(self._values.large.keys() - large),
                    walk.origin,
                    of_module=True,
                )
            )

    def _match_open(self, adapter: objects.Adapter, node: Node, path: Path) -> None:
        walk, wanted = self._walk, self._wanted
        torn = wanted.torn(path, node)
        if torn:
            few = ", ".join(torn[:3])
            walk.differs(path, f"is restored as a whole or not at all; the patterns divide it: {few}")
            return
        if not wanted.takes(path) or self._own.stay(node, path):
            return
        names = adapter.parameter_names()
        node = wanted.renamed_optimizer(names, node, path)
        first, large = len(walk.placements), set(self._values.large)
        opened = self._opened(adapter.state(), path, adapter.fresh)
        get = opened.open(node)
        loaded, unplaced = get(), opened.unplaced
        problems = adapter.problems(loaded)
        for problem in problems:
            walk.differs(path, problem)
        if problems and names:
            self._look_for_prefix_of_parameters(names, path, loaded)
            # Of parameters that it does not hold: the problems tell of these.
            known = set(names)
            unplaced = [inner for inner in unplaced if inner[len(path) + 1] in known]
        self._differ_as_unplaced(unplaced)
        needed, values = tuple(walk.placements[first:]), tuple(self._values.large.keys() - large)
        walk.actions.append(Load(adapter, get, joined(path), needed, values, walk.origin))

    def _opened(self, current: Any, path: Path, fresh: Fresh) -> Opened:
        return Opened(self._walk, self._tensors, self._values, current, path, fresh)

    def _differ_as_unplaced(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._walk.differs(
                path,
                "a chunk of a sharded tensor is stored; the object has no such tensor yet, and cannot be "
                "told how to make one; let it build its state first, or use training_state",
            )

    def _look_for_prefix_of_parameters(self, names: Collection[str], path: Path, loaded: Any) -> None:
        """An optimizer's parameters follow those of the model beside it: were they stored under another
        beginning?"""
        groups = loaded.get("param_groups") if isinstance(loaded, dict) else None
        if self._wanted.partial.rename is None and type(groups) is list:
            self._walk.note_prefix((*path[:-1], "model"), other_prefix(names, names_in(groups)))


def _constant(value: Any) -> Callable[[], Any]:
    if isinstance(value, LocalChunk):
        return lambda: value.tensor
    return lambda: value
