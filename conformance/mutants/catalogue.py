"""Reads the named variants: faulty ones (``catalogue/*.toml``) and different-but-allowed ones
(``allowed/*.toml``). Imports no torch.

    [[mutant]]
    name = "early-stop-never"
    clauses = ["early-stop/needed-only"]       # each of them must catch it (faulty ones only)
    what = "recomputation always runs to the end"
    imitates = "pytorch#96866"                 # a public report of the same fault, if there is one
    file = "early_stop.py"                     # of the reference
    find = '''exact source text, exactly once in the file'''
    replace = '''what stands there instead'''

A patch of several places has ``[[mutant.patch]]`` tables with ``file``, ``find``, ``replace``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance._toml import tomllib
from conformance.errors import ConformanceError

_KEYS = {"name", "clauses", "what", "imitates", "file", "find", "replace", "patch"}
_FOLDER = Path(__file__).resolve().parent


class CatalogueError(ConformanceError):
    """A record of a variant is malformed."""


@dataclass(frozen=True)
class Patch:
    """One replaced place of one source file."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """A named variant of the reference. ``clauses`` is empty for an allowed variant."""

    name: str
    what: str
    clauses: tuple[str, ...]
    imitates: str | None
    patches: tuple[Patch, ...]
    origin: str


def faulty_variants(folder: Path | None = None) -> list[Mutant]:
    """Every faulty variant, in file order; each names at least one clause."""
    return _read(folder or _FOLDER / "catalogue", faulty=True)


def allowed_variants(folder: Path | None = None) -> list[Mutant]:
    """Every variant that differs and is allowed to."""
    return _read(folder or _FOLDER / "allowed", faulty=False)


def bites(mutants: Iterable[Mutant]) -> dict[str, int]:
    """How many of the mutants each clause must catch."""
    counts: dict[str, int] = {}
    for mutant in mutants:
        for clause in mutant.clauses:
            counts[clause] = counts.get(clause, 0) + 1
    return counts


def _read(folder: Path, *, faulty: bool) -> list[Mutant]:
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
            mutant = _mutant(row, path.name, faulty)
            if mutant.name in found:
                raise CatalogueError(f"{path.name}: {mutant.name} is defined twice")
            found[mutant.name] = mutant
    return list(found.values())


def _mutant(row: dict[str, Any], origin: str, faulty: bool) -> Mutant:
    name = row.get("name", "?")

    def fail(problem: str) -> CatalogueError:
        return CatalogueError(f"{origin}: {name}: {problem}")

    if unknown := set(row) - _KEYS:
        raise fail(f"unknown key {sorted(unknown)[0]!r}")
    if not row.get("what", "").strip():
        raise fail("say in one line what is wrong (what)")
    if faulty != bool(row.get("clauses")):
        raise fail("a faulty variant names its clauses, an allowed one names none")
    rows = row.get("patch") or [row]
    patches = tuple(Patch(part["file"], part["find"], part["replace"]) for part in rows)
    if any(patch.find == patch.replace for patch in patches):
        raise fail("the patch changes nothing")
    return Mutant(
        name, row["what"].strip(), tuple(row.get("clauses", ())), row.get("imitates"), patches,
        origin,
    )  # fmt: skip
