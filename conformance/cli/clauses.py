"""``clauses`` and ``show``: the specification on a screen."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from conformance.errors import SpecificationError, UsageError
from conformance.mutants.catalogue import faulty_variants
from conformance.specification import Clause, Specification, load_specification
from conformance.specification.tests_index import TestCase, index_tests


def _tests_of(clause: Clause, cases: list[TestCase]) -> list[TestCase]:
    return [case for case in cases if case.clause == clause.id]


@click.command()
@click.argument("pattern", metavar="[GLOB]", default="*")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with everything known.")
def clauses(pattern: str, as_json: bool) -> None:
    """List the clauses of the specification."""
    specification = load_specification()
    try:
        chosen = specification.select([pattern])
    except SpecificationError as problem:
        raise UsageError(str(problem)) from None
    cases = index_tests()
    if as_json:
        rows = [_as_dict(clause, cases) for clause in chosen]
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table = Table("no.", "clause", "level", "profile", "since", "tests", "title", box=None)
    for clause in chosen:
        tests = str(len(_tests_of(clause, cases)) + bool(clause.examples))
        table.add_row(
            clause.number,
            clause.id,
            clause.level if clause.retired is None else "retired",
            clause.profile,
            clause.since,
            tests,
            Text(clause.title),
        )
    Console(width=None if Console().is_terminal else 200).print(table)


@click.command()
@click.argument("identifier", metavar="ID")
def show(identifier: str) -> None:
    """Print one clause: text, source, example, tests."""
    specification = load_specification()
    clause = specification.by_id.get(identifier)
    if clause is None:
        raise UsageError(f"no clause is called {identifier!r}{_near(identifier, specification)}")
    console = Console(highlight=False)
    console.print(Text(f"{clause.number}  {clause.id}", style="bold"))
    console.print(Text(clause.title))
    facts = [clause.level, f"profile {clause.profile}", f"variant {clause.variant}"]
    facts += [f"since {clause.since}", f"oracle {clause.oracle}"]
    if clause.until:
        facts.append(f"until {clause.until}")
    if clause.testable != "cpu":
        facts.append(f"testable: {clause.testable}")
    if clause.retired:
        facts.append(f"retired: {clause.retired}")
    console.print(Text(", ".join(facts)))
    console.print()
    console.print(Markdown(clause.text))
    paragraphs = {paragraph.id: paragraph for paragraph in specification.paragraphs}
    console.print()
    for source in clause.source:
        known = paragraphs.get(source)
        text = f"{known.place}: {known.summary}" if known else source
        console.print(Text(f"source: {text}"))
    for example in clause.examples:
        console.print()
        console.print(Text(example.source.rstrip()))
    console.print()
    for case in _tests_of(clause, index_tests()):
        console.print(Text(f"test: conformance/tests/{case.file}:{case.line} {case.name}"))
        console.print(Text(f"      {case.question}"))
    biting = [mutant for mutant in faulty_variants() if clause.id in mutant.clauses]
    console.print(Text(f"bites: {len(biting)}"))
    for mutant in biting:
        console.print(Text(f"      {mutant.name}: {mutant.what}"))
    console.print(Text(f"text: spec/{clause.chapter}:{clause.line}"))


def _near(identifier: str, specification: Specification) -> str:
    import difflib

    close = difflib.get_close_matches(identifier, list(specification.by_id), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _as_dict(clause: Clause, cases: list[TestCase]) -> dict[str, object]:
    return {
        "id": clause.id,
        "number": clause.number,
        "title": clause.title,
        "level": clause.level,
        "since": clause.since,
        "until": clause.until,
        "profile": clause.profile,
        "variant": clause.variant,
        "source": list(clause.source),
        "oracle": clause.oracle,
        "testable": clause.testable,
        "retired": clause.retired,
        "text": clause.text,
        "examples": [example.source for example in clause.examples],
        "chapter": clause.chapter,
        "line": clause.line,
        "tests": [f"{case.file}::{case.name}" for case in _tests_of(clause, cases)],
    }
