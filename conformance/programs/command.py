"""``checkpoint-conformance differential A B``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformance.candidate import load_candidate
from conformance.errors import EXIT_CONFORMS, EXIT_DOES_NOT_CONFORM, UsageError

if TYPE_CHECKING:
    from conformance.programs.differential import Comparison, Found


@click.command()
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@click.option("--seed", default=0, show_default=True, help="Which programs are drawn.")
@click.option("--examples", default=100, show_default=True, help="Programs of each family.")
@click.option(
    "--programs",
    "names",
    multiple=True,
    metavar="FAMILY",
    help="Only these families (default: all); a wrong name lists them.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for each difference's program and both traces.",
)
@click.pass_context
def differential(
    ctx: click.Context,
    one: str,
    other: str,
    seed: int,
    examples: int,
    names: tuple[str, ...],
    out: Path | None,
) -> None:
    """Run the same random programs on candidates A and B and show every observable difference,
    smallest program first. Exits 0 where nothing differs, 1 where something does."""
    # torch is loaded here and not with the command line: listing clauses needs none of it.
    from conformance.programs.differential import compare_candidates
    from conformance.programs.languages import LANGUAGES

    unknown = [name for name in names if name not in LANGUAGES]
    if unknown:
        raise UsageError(f"no family {unknown[0]!r}; there are: {', '.join(LANGUAGES)}")
    if examples < 1:
        raise UsageError("--examples must be at least 1")
    chosen = [LANGUAGES[name] for name in names or LANGUAGES]
    comparison = compare_candidates(
        load_candidate(one),
        load_candidate(other),
        examples=examples,
        seed=seed,
        languages=chosen,
        progress=lambda text: click.echo(f"… {text}", err=True),
    )
    for number, found in enumerate(comparison.found, 1):
        click.echo(describe(number, found, comparison))
        if out is not None:
            write(out / f"{number:02d}", found, comparison)
    for name, reason in comparison.left_out.items():
        click.echo(f"left out: {name} ({reason})")
    click.echo(comparison.coverage.summary())
    click.echo(
        f"{comparison.programs} programs on {one} and {other}: "
        f"{len(comparison.found)} differences, {comparison.inconclusive} inconclusive"
    )
    ctx.exit(EXIT_DOES_NOT_CONFORM if comparison.found else EXIT_CONFORMS)


def describe(number: int, found: Found, comparison: Comparison) -> str:
    """One difference for the terminal."""
    from conformance.programs.render import render

    wrong = " and ".join(found.wrong) or "neither"
    lines = [
        f"── {number}. {found.language}: {found.difference.name}{found.difference.path} "
        f"({found.difference.kind})",
        f"A {comparison.one}: {found.difference.expected}",
        f"B {comparison.other}: {found.difference.observed}",
        f"leaves the plain run: {wrong}",
        "",
        render(found.program).source,
    ]
    if found.parting:
        lines += ["where the traces part:", found.parting, ""]
    return "\n".join(lines)


def write(folder: Path, found: Found, comparison: Comparison) -> None:
    """The program and both traces of one difference as files."""
    from conformance.programs.render import render

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(render(found.program).source, encoding="utf-8")
    for name, text in zip("AB", found.traces, strict=True):
        (folder / f"trace_{name}.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "difference.txt").write_text(describe(1, found, comparison), encoding="utf-8")
