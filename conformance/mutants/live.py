"""Imports a patched copy of the reference under a name of its own, from memory."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from conformance.errors import ConformanceError
from conformance.mutants.catalogue import Mutant, Patch

REFERENCE = "reference_impl"


class PatchDoesNotApply(ConformanceError):
    """The source that a patch looks for is not there exactly once."""


def reference_dir() -> Path:
    """The reference's folder, found by its import name and not imported."""
    specification = importlib.util.find_spec(REFERENCE)
    if specification is None or not specification.submodule_search_locations:
        raise ConformanceError(f"{REFERENCE} is not installed")
    return Path(next(iter(specification.submodule_search_locations)))


def apply_patch(mutant: str, patch: Patch, source: str) -> str:
    """``source`` with the patch applied. Raises PatchDoesNotApply."""
    times = source.count(patch.find)
    if times != 1:
        raise PatchDoesNotApply(f"{mutant}: its text is {times} times in {patch.file}, not once")
    return source.replace(patch.find, patch.replace)


def patched_sources(mutant: Mutant) -> dict[str, str]:
    """New text of every file that the mutant changes; each must still be Python."""
    folder = reference_dir()
    changed: dict[str, str] = {}
    for patch in mutant.patches:
        if patch.file not in changed:
            path = folder / patch.file
            if not path.is_file():
                raise PatchDoesNotApply(f"{mutant.name}: the reference has no {patch.file}")
            changed[patch.file] = path.read_text(encoding="utf-8")
        changed[patch.file] = apply_patch(mutant.name, patch, changed[patch.file])
    for file, source in changed.items():
        try:
            compile(source, file, "exec")
        except SyntaxError as problem:
            raise PatchDoesNotApply(f"{mutant.name}: {file} is no Python: {problem}") from None
    return changed


class _Loader(SourceFileLoader):
    """Compiles from patched source and never reads or writes bytecode files."""

    def __init__(self, fullname: str, path: str, package: str, sources: dict[str, str]) -> None:
        super().__init__(fullname, path)
        self._package = package
        self._sources = sources

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        source = self._sources.get(path.name)
        if source is None:
            source = path.read_text(encoding="utf-8")
        # The reference imports itself by its absolute name; the copy must import the copy.
        source = re.sub(
            rf"^(\s*(?:from|import)\s+){REFERENCE}\b", rf"\g<1>{self._package}", source, flags=re.M
        )
        code: CodeType = compile(source, str(path), "exec")
        return code


class _Finder:
    """Finds the package and the modules of one patched copy."""

    def __init__(self, package: str, sources: dict[str, str]) -> None:
        self.package = package
        self.sources = sources
        self.folder = reference_dir()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """importlib's protocol."""
        if fullname == self.package:
            file, is_package = self.folder / "__init__.py", True
        elif fullname.startswith(f"{self.package}."):
            file = self.folder / f"{fullname.rpartition('.')[2]}.py"
            is_package = False
        else:
            return None
        if not file.is_file():
            return None
        loader = _Loader(fullname, str(file), self.package, self.sources)
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=loader,
            submodule_search_locations=[str(self.folder)] if is_package else None,
        )


def install(mutant: Mutant | None, sources: dict[str, str] | None = None) -> str:
    """Make the patched copy importable in this process; returns its module name.

    ``mutant`` None gives an unpatched copy. ``sources`` replaces whole files instead.
    """
    if sources is None:
        sources = patched_sources(mutant) if mutant is not None else {}
    slug = re.sub(r"\W", "_", mutant.name) if mutant is not None else "copy"
    package = f"{REFERENCE}__{slug}"
    sys.meta_path.insert(0, _Finder(package, sources))
    return package
