"""``mutants``: does the suite catch what it claims to catch?"""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.errors import EXIT_DOES_NOT_CONFORM, EXIT_SUITE_FAILED, UsageError
from conformance.mutants.catalogue import Mutant, allowed_variants, faulty_variants
from conformance.specification import load_specification


@click.command()
@click.argument("pattern", metavar="[GLOB]", default="*")
@click.option(
    "--budget",
    type=click.Choice(["quick", "standard", "deep"]),
    default="standard",
    show_default=True,
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=len(os.sched_getaffinity(0)))
@click.option("--allowed", is_flag=True, help="Run the variants that must pass instead.")
@click.option("--list", "only_list", is_flag=True, help="List the variants and run nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for mutants.json and mutants.md.",
)
@click.pass_context
def mutants(
    ctx: click.Context,
    pattern: str,
    budget: str,
    seed: int,
    workers: int,
    allowed: bool,
    only_list: bool,
    out: Path | None,
) -> None:
    """Run the faulty variants of the reference; each must be caught by the clauses it names.

    GLOB matches names of variants or of clauses.
    """
    console = Console(highlight=False)
    specification = load_specification()
    every = allowed_variants() if allowed else faulty_variants()
    chosen = [mutant for mutant in every if _matches(mutant, pattern)]
    if not chosen:
        raise UsageError(f"no variant matches {pattern!r}")
    for mutant in chosen:
        for clause in mutant.clauses:
            if clause not in specification.by_id:
                raise UsageError(f"{mutant.origin}: {mutant.name} names {clause!r}, no clause")
    if only_list:
        _print_list(chosen, console)
        return
    if allowed:
        ctx.exit(_run_allowed(chosen, budget, seed, workers, console))
    from conformance.mutants.proof import as_document, as_markdown, prove, toothless

    done = 0

    def seen(outcome: object) -> None:
        nonlocal done
        done += 1
        if done % 20 == 0 or done == len(chosen) + 1:
            console.print(f"{done - 1} of {len(chosen)} variants")

    proof = prove(chosen, budget=budget, seed=seed, workers=workers, seen=seen)
    for mutant, missed, happened in proof.survivors:
        console.print(Text(f"survived: {mutant.name}", style="bold red"), Text(mutant.what))
        console.print(Text(f"  not caught by {', '.join(missed)}"))
        console.print(Text(f"  {' '.join(happened.split())[:300]}"))
    for clause, message in proof.unsound.items():
        console.print(Text(f"the reference itself fails {clause}: {message[:300]}", style="red"))
    unbitten = toothless(specification, every) if pattern == "*" else []
    for clause in unbitten:
        console.print(Text(f"bites nothing: {clause}", style="red"))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "mutants.json").write_text(json.dumps(as_document(proof), indent=1) + "\n")
        (out / "mutants.md").write_text(as_markdown(proof, specification))
    console.print(
        f"{proof.killed} killed, {len(proof.survivors)} survived in {proof.seconds} s "
        f"at the {budget} budget"
    )
    if proof.unsound:
        ctx.exit(EXIT_SUITE_FAILED)
    ctx.exit(EXIT_DOES_NOT_CONFORM if proof.survivors or unbitten else 0)


def _matches(mutant: Mutant, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (mutant.name, *mutant.clauses))


def _print_list(chosen: list[Mutant], console: Console) -> None:
    table = Table("variant", "clauses", "what is wrong", "imitates", box=None)
    for mutant in chosen:
        table.add_row(
            mutant.name, "\n".join(mutant.clauses), Text(mutant.what), mutant.imitates or ""
        )
    console.print(table)


def _run_allowed(
    chosen: list[Mutant], budget: str, seed: int, workers: int, console: Console
) -> int:
    """Variants that differ and may: every clause of the default edition must pass."""
    from conformance.mutants.engine import Job, run_jobs
    from conformance.specification import DEFAULT_EDITION

    clauses = tuple(
        clause.id
        for clause in load_specification().clauses
        if clause.applies_to(DEFAULT_EDITION) and clause.testable == "cpu"
    )
    outcomes = run_jobs(
        [Job(mutant, clauses) for mutant in chosen],
        budget=budget,
        seed=seed,
        workers=workers,
        time_limit=1800.0,
    )
    wrong = 0
    for mutant, outcome in zip(chosen, outcomes, strict=True):
        failed = {c: v for c, v in outcome.verdicts.items() if v not in ("pass", "unsupported")}
        wrong += bool(failed or outcome.problem)
        state = Text("passes", "green") if not (failed or outcome.problem) else Text("fails", "red")
        console.print(state, Text(f"{mutant.name}: {mutant.what}"))
        for clause, verdict in failed.items():
            console.print(Text(f"  {clause} {verdict}: {outcome.messages[clause][:300]}"))
        if outcome.problem:
            console.print(Text(f"  {outcome.problem[:300]}"))
    console.print(f"{len(chosen) - wrong} pass, {wrong} are wrongly rejected")
    return EXIT_DOES_NOT_CONFORM if wrong else 0
