"""The vocabulary of the specification: clauses, corners, paragraphs of documentation."""

from __future__ import annotations

from dataclasses import dataclass

EDITIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
DEFAULT_EDITION = "2.14"
LEVELS = ("MUST", "SHOULD", "MAY")
CORNER_LEVEL = "IMPLEMENTATION-DEFINED"
PROFILES = (
    "core",
    "reentrant",
    "sequential",
    "decorator",
    "rng",
    "autocast",
    "early-stop",
    "determinism",
    "debug",
    "selective",
    "hooks",
    "graph-exec-group",
    "device-state",
    "nesting",
    "cost",
    "compile",
    "cuda",
)
VARIANTS = ("nonreentrant", "reentrant", "any")
ORACLES = ("bitwise", "tolerance", "metadata", "count", "event", "exception", "warning")
TESTABLE = ("cpu", "cuda", "no")


def edition_index(edition: str) -> int:
    """Position of ``edition`` in the order of releases; ValueError for an unknown one."""
    return EDITIONS.index(edition)


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of the published documentation, summarised in our own words."""

    id: str
    document: str
    place: str
    summary: str
    normative: bool
    reason: str | None


@dataclass(frozen=True)
class Example:
    """A Python block of a clause. ``line`` is its first line of code in the chapter, from 1."""

    source: str
    line: int


@dataclass(frozen=True)
class Clause:
    """One normative statement.

    ``number`` is its place for a reader (chapter.position) and may change; ``id`` never does.
    """

    id: str
    number: str
    title: str
    level: str
    since: str
    until: str | None
    profile: str
    variant: str
    source: tuple[str, ...]
    oracle: str
    testable: str
    text: str
    examples: tuple[Example, ...]
    chapter: str
    line: int
    retired: str | None = None

    def applies_to(self, edition: str) -> bool:
        """Whether the clause is in force at ``edition``."""
        if self.retired is not None:
            return False
        at = edition_index(edition)
        if at < edition_index(self.since):
            return False
        return self.until is None or at <= edition_index(self.until)

    @property
    def derived(self) -> bool:
        """Whether the clause follows from another one instead of a paragraph of its own."""
        return any(source.startswith("derived:") for source in self.source)


@dataclass(frozen=True)
class Corner:
    """Something the documentation leaves open; written down so that nobody tests it."""

    id: str
    number: str
    title: str
    observed: str
    text: str
    chapter: str
    line: int
