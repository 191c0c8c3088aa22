"""``merge``: the shards of a run into one."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from conformance._files import write_atomically
from conformance.report.document import read_report, write_report
from conformance.report.junit import render_junit
from conformance.report.markdown import render_markdown
from conformance.report.terminal import print_summary
from conformance.runner.merge import merge_documents
from conformance.specification import load_specification


@click.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("conformance-report"),
    show_default=True,
)
@click.pass_context
def merge(ctx: click.Context, directories: tuple[Path, ...], out: Path) -> None:
    """Join the reports of all shards of one run; the exit code is that of the whole."""
    specification = load_specification()
    document = merge_documents([read_report(path) for path in directories], specification)
    out.mkdir(parents=True, exist_ok=True)
    write_report(document, out)
    write_atomically(out / "report.md", render_markdown(document, specification))
    write_atomically(out / "junit.xml", render_junit(document))
    print_summary(document, out, Console(highlight=False))
    ctx.exit(document["summary"]["exit_code"])
