"""The command ``checkpoint-conformance``, also ``python -m conformance``."""

from __future__ import annotations

import sys
import traceback

import click

from conformance import __version__
from conformance.cli.clauses import clauses, show
from conformance.cli.compare import compare
from conformance.cli.merge import merge
from conformance.cli.mutants import mutants
from conformance.cli.run import run, smoke
from conformance.errors import EXIT_SUITE_FAILED, ConformanceError
from conformance.programs.command import differential


class _Commands(click.Group):
    """A group whose commands end in one line and an exit code, never in a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConformanceError as problem:
            if ctx.params.get("debug"):
                traceback.print_exc()
                click.echo(problem.details, err=True)
            click.echo(f"checkpoint-conformance: {' '.join(str(problem).split())}", err=True)
            ctx.exit(problem.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as problem:  # noqa: BLE001 - the suite's own fault, said in one line
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(
                f"checkpoint-conformance: internal error: {type(problem).__name__}: {problem} "
                "(--debug shows where)",
                err=True,
            )
            ctx.exit(EXIT_SUITE_FAILED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="checkpoint-conformance")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def cli(debug: bool) -> None:
    """Grade implementations of activation checkpointing against the specification."""


for command in (run, smoke, clauses, show, compare, merge, mutants, differential):
    cli.add_command(command)


def main() -> None:
    """Entry point."""
    sys.exit(cli(prog_name="checkpoint-conformance"))
