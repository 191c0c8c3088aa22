"""Turns a user's words (module name, file path, ``module:attribute``) into a Candidate.

Knows nothing of clauses or verdicts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.errors import CandidateNotLoaded

PUBLIC_NAMES = (
    "checkpoint",
    "checkpoint_sequential",
    "CheckpointError",
    "CheckpointFunction",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "set_device_states",
    "noop_context_fn",
    "set_checkpoint_early_stop",
    "DefaultDeviceType",
    "set_checkpoint_debug_enabled",
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "create_selective_checkpoint_contexts",
    "SAC_IGNORED_OPS",
    "GraphExecGroup",
)
"""Every public name of the default edition."""


class NotProvided(Exception):
    """A test asked the candidate for a public name that it does not have."""


class Candidate:
    """The public names of one implementation, as attributes.

    A name that the implementation lacks raises :class:`NotProvided`, which the plugin turns into
    the verdict ``unsupported``.
    """

    def __init__(self, name: str, namespace: Any, location: str, version: str | None) -> None:
        self.name = name
        self.location = location
        self.version = version
        self.namespace = namespace
        declared = getattr(namespace, "UNSUPPORTED", {})
        if not isinstance(declared, dict) or not all(
            isinstance(key, str) and isinstance(reason, str) and reason.strip()
            for key, reason in declared.items()
        ):
            raise CandidateNotLoaded(
                f"{name}: UNSUPPORTED must be a dictionary of profile to reason"
            )
        self.declared_unsupported: dict[str, str] = dict(declared)

    def has(self, *names: str) -> bool:
        """Whether the candidate provides every one of ``names``."""
        return all(getattr(self.namespace, name, None) is not None for name in names)

    def __getattr__(self, name: str) -> Any:
        if name not in PUBLIC_NAMES:
            raise AttributeError(f"{name} is no public name of torch.utils.checkpoint")
        value = getattr(self.namespace, name, None)
        if value is None:
            raise NotProvided(name)
        return value

    def __repr__(self) -> str:
        return f"<candidate {self.name}>"


def load_candidate(spelling: str) -> Candidate:
    """Load ``spelling``: a dotted module name, a path to a ``.py`` file or a package folder, or
    either followed by ``:attribute`` (an object that carries the public names, or a bare
    ``checkpoint`` callable).

    Raises CandidateNotLoaded with one line that says what was tried and what went wrong.
    """
    if not spelling.strip():
        raise CandidateNotLoaded("the candidate's name is empty")
    target, attribute = _split(spelling)
    module = _import_file(target) if _is_path(target) else _import_module(target)
    namespace: Any = module
    for part in attribute.split(".") if attribute else ():
        try:
            namespace = getattr(namespace, part)
        except AttributeError:
            raise CandidateNotLoaded(f"{target} has no attribute {attribute!r}") from None
    if attribute and callable(namespace) and not hasattr(namespace, "checkpoint"):
        bare = ModuleType(spelling)
        bare.checkpoint = namespace  # type: ignore[attr-defined]
        namespace = bare
    if not any(getattr(namespace, name, None) is not None for name in PUBLIC_NAMES):
        raise CandidateNotLoaded(
            f"{spelling} has none of the public names (checkpoint, checkpoint_sequential, …)"
        )
    location = getattr(module, "__file__", None) or target
    return Candidate(spelling, namespace, str(location), _version(module))


def _split(spelling: str) -> tuple[str, str]:
    """Target and attribute; a colon in a path (a drive, a folder) does not split it."""
    if not _is_path(spelling):
        target, _, attribute = spelling.partition(":")
        return target, attribute
    target, separator, attribute = spelling.rpartition(":")
    if separator and (target.endswith(".py") or Path(target).is_dir()):
        return target, attribute
    return spelling, ""


def _is_path(spelling: str) -> bool:
    return spelling.split(":")[0].endswith(".py") or os.sep in spelling or spelling.startswith(".")


def _import_module(name: str) -> ModuleType:
    # A command's own folder is not on sys.path; users expect a module beside them to be found.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (name == problem.name or name.startswith(problem.name)):
            raise CandidateNotLoaded(f"no module named {name!r}") from problem
        raise CandidateNotLoaded(f"{name} cannot be imported: {problem}") from problem
    except BaseException as problem:
        raise CandidateNotLoaded(
            f"{name} cannot be imported: {type(problem).__name__}: {_one_line(problem)}"
        ) from problem


def _import_file(spelling: str) -> ModuleType:
    path = Path(spelling).resolve()
    if path.is_dir():
        path = path / "__init__.py"
    if not path.is_file():
        raise CandidateNotLoaded(f"no such file: {spelling}")
    name = path.parent.name if path.name == "__init__.py" else path.stem
    for folder in (str(path.parent), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)
    specification = importlib.util.spec_from_file_location(f"_candidate_{name}", path)
    if specification is None or specification.loader is None:
        raise CandidateNotLoaded(f"{spelling} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException as problem:
        sys.modules.pop(specification.name, None)
        raise CandidateNotLoaded(
            f"{spelling} cannot be imported: {type(problem).__name__}: {_one_line(problem)}"
        ) from problem
    return module


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]


def _version(module: ModuleType) -> str | None:
    """The candidate's version: its own, or that of the package it belongs to."""
    for name in (module.__name__, module.__name__.split(".")[0]):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            return str(version)
    return None
