"""``compare``: what changed between two runs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.report.compare import KINDS, Comparison, as_markdown, compare_documents
from conformance.report.document import read_report


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Compare unlike runs too.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
)
@click.pass_context
def compare(ctx: click.Context, base: Path, new: Path, force: bool, form: str) -> None:
    """Show regressions, fixes and other differences; exits 1 on a regression.

    BASE and NEW are reports, or the folders that hold them.
    """
    comparison = compare_documents(read_report(base), read_report(new), force=force)
    if form == "json":
        click.echo(json.dumps({"regressed": comparison.regressed, **comparison.kinds}, indent=1))
    elif form == "markdown":
        click.echo(as_markdown(comparison))
    else:
        _print(comparison, Console(highlight=False))
    ctx.exit(1 if comparison.regressed else 0)


def _print(comparison: Comparison, console: Console) -> None:
    nothing = True
    for kind, rows in comparison.kinds.items():
        if not rows:
            continue
        nothing = False
        console.print(Text(f"{kind} ({len(rows)}): {KINDS[kind]}", style="bold"))
        table = Table("clause", "level", "base", "new", "message", box=None)
        for clause, level, before, after, message in rows:
            table.add_row(clause, level, before, after, Text(message[:160]))
        console.print(table)
    if nothing:
        console.print("no difference")
