"""The chapters are well-formed, traced in both directions, and malformed ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conformance.errors import SpecificationError, UsageError
from conformance.specification import load_specification, specification_dir
from conformance.specification.select import select
from conformance.specification.tests_index import index_tests
from conformance.specification.traceability import FILE, gaps, render

_GOOD = """### area/name

```toml
title = "T"
level = "MUST"
since = "2.13"
profile = "core"
variant = "any"
source = ["checkpoint/trade"]
oracle = "count"
```

Prose.
"""


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    shutil.copy(specification_dir() / "documentation.toml", tmp_path)

    def with_chapter(text: str):  # type: ignore[no-untyped-def]
        (tmp_path / "01-x.md").write_text(text)
        return load_specification(tmp_path)

    return with_chapter


def test_everything_is_traced() -> None:
    assert gaps(load_specification(), index_tests()) == []


def test_the_traceability_table_is_fresh() -> None:
    specification = load_specification()
    written = (specification.directory / FILE).read_text(encoding="utf-8")
    assert written == render(specification, index_tests())


def test_every_chapter_has_an_example_and_is_in_the_index() -> None:
    specification = load_specification()
    index = (specification.directory / "README.md").read_text(encoding="utf-8")
    for chapter in sorted({clause.chapter for clause in specification.clauses}):
        assert f"({chapter})" in index
        assert any(c.examples for c in specification.clauses if c.chapter == chapter), chapter


def test_an_edition_decides_what_applies(load) -> None:  # type: ignore[no-untyped-def]
    (clause,) = load(_GOOD.replace('since = "2.13"', 'since = "2.13"\nuntil = "2.14"')).clauses
    assert [clause.applies_to(e) for e in ("2.12", "2.13", "2.14", "2.15")] == [
        False, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("area/name", "Not An Id"), "must be an id"),
        (("```toml", "```ini"), "toml block"),
        (('level = "MUST"', 'level = "OUGHT"'), "OUGHT"),
        (('profile = "core"', 'profile = "cor"'), "cor"),
        (('since = "2.13"', ""), "missing key 'since'"),
        (('title = "T"', 'title = "T"\ncolour = 1'), "unknown key"),
        (("checkpoint/trade", "checkpoint/nothing"), "unknown source"),
        (('source = ["checkpoint/trade"]', "source = []"), "at least one"),
        (("Prose.", ""), "prose"),
        (("title =", "title ="), None),
    ],
)
def test_a_malformed_clause_is_refused(load, change, problem) -> None:  # type: ignore[no-untyped-def]
    text = _GOOD.replace(*change)
    if problem is None:
        assert len(load(text).clauses) == 1
        return
    with pytest.raises(SpecificationError, match=problem):
        load(text)


def test_an_id_is_defined_once(load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecificationError, match="twice"):
        load(_GOOD + "\n" + _GOOD)


def test_a_selection_of_nothing_is_refused() -> None:
    specification = load_specification()
    with pytest.raises(UsageError, match="no clause matches"):
        select(specification, ["nothing/*"], [])
    with pytest.raises(UsageError, match="unknown profile"):
        select(specification, [], ["nothing"])
