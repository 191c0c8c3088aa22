"""Reads the chapters and the documentation list, and refuses what is malformed.

Knows the format of ``spec/`` (see ``spec/README.md``) and nothing of tests or candidates.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from conformance._toml import tomllib
from conformance.errors import SpecificationError
from conformance.specification.model import (
    CORNER_LEVEL,
    EDITIONS,
    LEVELS,
    ORACLES,
    PROFILES,
    TESTABLE,
    VARIANTS,
    Clause,
    Corner,
    Example,
    Paragraph,
)

_ID = re.compile(r"^[a-z0-9]+(?:-[a-z0-9]+)*/[a-z0-9]+(?:-[a-z0-9]+)*$")
_CLAUSE_KEYS = {
    "title", "level", "since", "until", "profile", "variant", "source", "oracle", "testable",
    "retired",
}  # fmt: skip
_CORNER_KEYS = {"title", "level", "observed"}


def specification_dir() -> Path:
    """The folder of the chapters: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_spec", package.parent / "spec"):
        if (candidate / "README.md").is_file():
            return candidate
    raise SpecificationError(f"no specification found beside or inside {package}")


@dataclass(frozen=True)
class Specification:
    """All clauses, corners and paragraphs, in reading order."""

    clauses: tuple[Clause, ...]
    corners: tuple[Corner, ...]
    paragraphs: tuple[Paragraph, ...]
    digest: str
    directory: Path

    @functools.cached_property
    def by_id(self) -> dict[str, Clause]:
        """Clauses by id."""
        return {clause.id: clause for clause in self.clauses}

    def select(self, patterns: Iterable[str]) -> list[Clause]:
        """Clauses whose id matches any of the shell-style ``patterns``; a pattern without a
        match is an error, so that a misspelt id never grades nothing."""
        chosen: dict[str, Clause] = {}
        for pattern in patterns:
            matched = [c for c in self.clauses if fnmatch.fnmatchcase(c.id, pattern)]
            if not matched:
                raise SpecificationError(f"no clause matches {pattern!r}")
            chosen.update((clause.id, clause) for clause in matched)
        return [clause for clause in self.clauses if clause.id in chosen]


def load_specification(directory: Path | None = None) -> Specification:
    """Read every chapter (``NN-name.md``) of ``directory``.

    Raises SpecificationError, with file and line, for anything malformed.
    """
    directory = directory or specification_dir()
    digest = hashlib.sha256()
    clauses: list[Clause] = []
    corners: list[Corner] = []
    documentation = directory / "documentation.toml"
    digest.update(documentation.read_bytes())
    paragraphs = tuple(_paragraphs(documentation))
    known = {paragraph.id for paragraph in paragraphs}
    for path in sorted(directory.glob("[0-9][0-9]-*.md")):
        text = path.read_text(encoding="utf-8")
        digest.update(path.name.encode() + b"\0" + text.encode())
        for entry in _entries(path, text):
            if isinstance(entry, Corner):
                corners.append(entry)
                continue
            for source in entry.source:
                if source not in known and not source.startswith("derived: "):
                    raise SpecificationError(
                        f"{path.name}:{entry.line}: {entry.id}: unknown source {source!r}"
                    )
            clauses.append(entry)
    seen: set[str] = set()
    items: list[Clause | Corner] = [*clauses, *corners]
    for item in items:
        if item.id in seen:
            raise SpecificationError(f"{item.chapter}:{item.line}: {item.id} is defined twice")
        seen.add(item.id)
    return Specification(
        tuple(clauses), tuple(corners), paragraphs, digest.hexdigest()[:16], directory
    )


def _paragraphs(path: Path) -> Iterator[Paragraph]:
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["paragraph"]:
        normative = row.get("normative", True)
        if not normative and not row.get("reason"):
            raise SpecificationError(f"{path.name}: {row['id']} is not normative; say why")
        yield Paragraph(
            row["id"], row["document"], row["place"], row["summary"], normative, row.get("reason")
        )


def _entries(path: Path, text: str) -> Iterator[Clause | Corner]:
    """The clauses and corners of one chapter, in order."""
    lines = text.splitlines()
    tokens = MarkdownIt().parse(text)
    headings = [
        (index, token) for index, token in enumerate(tokens) if token.type == "heading_open"
    ]
    chapter_number = int(path.name.split("-", 1)[0])
    position = 0
    for place, (index, heading) in enumerate(headings):
        if heading.tag != "h3":
            continue
        position += 1
        end_index = headings[place + 1][0] if place + 1 < len(headings) else len(tokens)
        identifier = tokens[index + 1].content.strip().strip("`")
        assert heading.map is not None
        yield _entry(
            path,
            lines,
            identifier,
            heading.map[0] + 1,
            f"{chapter_number}.{position}",
            tokens[index + 3 : end_index],
        )


def _entry(
    path: Path, lines: list[str], identifier: str, line: int, number: str, body: list[Token]
) -> Clause | Corner:
    def fail(problem: str) -> SpecificationError:
        return SpecificationError(f"{path.name}:{line}: {identifier}: {problem}")

    if not _ID.match(identifier):
        raise fail("a third-level heading must be an id such as early-stop/needed-only")
    if not body or body[0].type != "fence" or body[0].info.strip() != "toml":
        raise fail("the heading must be followed by a toml block")
    try:
        data: dict[str, Any] = tomllib.loads(body[0].content)
    except tomllib.TOMLDecodeError as problem:
        raise fail(f"metadata is not TOML: {problem}") from None
    examples = tuple(
        Example(token.content, token.map[0] + 2)
        for token in body
        if token.type == "fence" and token.info.strip() == "python" and token.map
    )
    prose = [token for token in body[1:] if token.level == 0 and token.map and token.nesting >= 0]
    text = "\n\n".join(
        "\n".join(lines[token.map[0] : token.map[1]]).strip()
        for token in prose
        if token.type != "fence" and token.map
    )
    if not text:
        raise fail("a clause needs prose")
    if data.get("level") == CORNER_LEVEL:
        if set(data) != _CORNER_KEYS:
            raise fail(f"a corner has exactly the keys {sorted(_CORNER_KEYS)}")
        if examples:
            raise fail("a corner has no example: nothing may grade it")
        return Corner(identifier, number, data["title"], data["observed"], text, path.name, line)
    if unknown := set(data) - _CLAUSE_KEYS:
        raise fail(f"unknown key {sorted(unknown)[0]!r}")
    required = _CLAUSE_KEYS - {"until", "testable", "retired"}
    if missing := required - set(data):
        raise fail(f"missing key {sorted(missing)[0]!r}")
    for key, allowed in (
        ("level", LEVELS),
        ("since", EDITIONS),
        ("until", EDITIONS),
        ("profile", PROFILES),
        ("variant", VARIANTS),
        ("oracle", ORACLES),
        ("testable", TESTABLE),
    ):
        if key in data and data[key] not in allowed:
            raise fail(f"{key} = {data[key]!r} is none of {', '.join(allowed)}")
    if not isinstance(data["source"], list) or not data["source"]:
        raise fail("source is a list of at least one entry")
    return Clause(
        id=identifier,
        number=number,
        title=data["title"],
        level=data["level"],
        since=data["since"],
        until=data.get("until"),
        profile=data["profile"],
        variant=data["variant"],
        source=tuple(data["source"]),
        oracle=data["oracle"],
        testable=data.get("testable", "cpu"),
        text=text,
        examples=examples,
        chapter=path.name,
        line=line,
        retired=data.get("retired"),
    )
