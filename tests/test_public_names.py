"""Are the public names all there, and what they say they are?"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest

import ckptengine as ck

# Adding a name is a decision; taking one away breaks users.
PUBLIC = {
    "Checkpointer",
    "Config",
    "SaveHandle",
    "CommitInfo",
    "RestoreHandle",
    "RestoreInfo",
    "open_checkpoint",
    "CheckpointReader",
    "verify",
    "VerifyReport",
    "training_state",
    "LocalChunk",
    "CheckpointError",
    "CheckpointNotFoundError",
    "NotCommittedError",
    "CorruptCheckpointError",
    "UnsupportedFormatError",
    "StateMismatchError",
    "UnsupportedStateError",
    "StorageError",
    "SaveFailedError",
    "CommitTimeoutError",
    "__version__",
}


def test_the_public_names_are_these() -> None:
    assert set(ck.__all__) == PUBLIC
    assert len(ck.__all__) == len(PUBLIC)
    assert set(dir(ck)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_imported_and_is_documented(name: str) -> None:
    value = getattr(ck, name)
    if name != "__version__":
        assert value.__name__ == name
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'ckptengine' has no attribute 'no_such_name'"):
        ck.no_such_name  # noqa: B018


def test_no_submodule_takes_the_place_of_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(ck.__path__)}
    assert not modules & PUBLIC
    before = ck.verify
    for module in sorted(modules - {"testing"}):
        importlib.import_module(f"ckptengine.{module}")
    assert ck.verify is before
    assert inspect.isfunction(ck.verify)


def test_every_error_is_a_checkpoint_error_and_in_the_tree_of_the_docstring() -> None:
    errors = importlib.import_module("ckptengine.errors")
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert all(issubclass(getattr(ck, name), ck.CheckpointError) for name in classes)
    assert classes == {name for name in PUBLIC if name.endswith("Error")}
    assert set(re.findall(r"\w+Error\b", errors.__doc__)) >= classes
    assert issubclass(ck.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(ck.CommitTimeoutError, TimeoutError)
    assert issubclass(ck.StorageError, OSError)


def test_the_version_is_the_installed_distributions() -> None:
    from importlib.metadata import version

    assert version("ckptengine") == ck.__version__
