"""``run`` and ``smoke``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from conformance.errors import UsageError
from conformance.report.terminal import print_summary
from conformance.runner import Settings, describe_candidate, resume_run, run_candidate
from conformance.runner.progress import Progress
from conformance.specification import DEFAULT_EDITION, EDITIONS, LEVELS


class _Workers(click.ParamType):
    name = "N|auto"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if value == "auto":
            return max(1, min(len(os.sched_getaffinity(0)), 8))
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1:
            self.fail("must be auto or a number from 1", param, ctx)
        return number


class _Shard(click.ParamType):
    name = "I/N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)/(\d+)", str(value))
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            self.fail("must be I/N with 1 <= I <= N, such as 2/4", param, ctx)
        return int(found[1]), int(found[2])


def _slug(spelling: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", spelling).strip("-.") or "candidate"


@click.command()
@click.argument("candidate", nargs=-1)
@click.option("--edition", type=click.Choice(EDITIONS), default=DEFAULT_EDITION, show_default=True)
@click.option(
    "--budget",
    type=click.Choice(["quick", "standard", "deep"]),
    default="standard",
    show_default=True,
    help="How many examples each property tries.",
)
@click.option("--clauses", multiple=True, metavar="GLOB", help="Grade these clauses only.")
@click.option("--profiles", multiple=True, metavar="NAME", help="Grade these profiles only.")
@click.option(
    "--level",
    type=click.Choice([level.lower() for level in LEVELS]),
    default="must",
    show_default=True,
    help="Lowest level that decides the exit code.",
)
@click.option(
    "--expectations",
    default="auto",
    show_default=True,
    metavar="auto|none|FILE",
    help="Known faults, strict; auto: the records shipped for this candidate and version.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--workers", type=_Workers(), default="auto", show_default=True)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=60,
    show_default=True,
    help="Seconds for one test.",
)
@click.option(
    "--memory-limit",
    type=click.IntRange(min=64),
    metavar="MIB",
    help="How much one worker may grow once its tests begin.",
)
@click.option("--shard", type=_Shard(), help="Grade the I-th of N parts; see merge.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Finish the run in DIR with its own settings; takes no CANDIDATE.",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("conformance-report"),
    show_default=True,
    help="Folder for report.json and its renderings; with several candidates, one folder each.",
)
@click.pass_context
def run(
    ctx: click.Context,
    candidate: tuple[str, ...],
    edition: str,
    budget: str,
    clauses: tuple[str, ...],
    profiles: tuple[str, ...],
    level: str,
    expectations: str,
    seed: int,
    workers: int,
    time_limit: float,
    memory_limit: int | None,
    shard: tuple[int, int] | None,
    resume: Path | None,
    fail_fast: bool,
    device: str,
    out: Path,
) -> None:
    """Grade one or more candidates.

    CANDIDATE is a module name, a path to a Python file, or either followed by :ATTRIBUTE.
    """
    console = Console(highlight=False)
    if resume is not None:
        if candidate:
            raise UsageError("--resume takes no candidate: the run in DIR has one")
        ended = resume_run(resume, Progress(console))
        print_summary(ended.document, ended.directory, console)
        ctx.exit(ended.exit_code)
    if not candidate:
        raise UsageError("name at least one candidate, such as torch.utils.checkpoint")
    worst = 0
    for spelling in candidate:
        settings = Settings(
            edition=edition,
            budget=budget,
            out=out if len(candidate) == 1 else out / _slug(spelling),
            clauses=clauses,
            profiles=profiles,
            level=level,
            expectations=expectations,
            seed=seed,
            workers=workers,
            time_limit=time_limit,
            memory_limit=memory_limit,
            shard=shard,
            fail_fast=fail_fast,
            device=device,
        )
        ended = run_candidate(spelling, settings, Progress(console))
        print_summary(ended.document, ended.directory, console)
        worst = max(worst, ended.exit_code)
    ctx.exit(worst)


@click.command()
@click.argument("candidate")
@click.pass_context
def smoke(ctx: click.Context, candidate: str) -> None:
    """Is the adapter itself sound? Takes seconds.

    Loads CANDIDATE, shows which profiles it has, and checks the few things without which no
    verdict would mean anything.
    """
    console = Console(highlight=False)
    found = describe_candidate(candidate, smoke=True)
    capabilities = found["capabilities"]
    console.print(Text(f"{found['name']} {found['version'] or ''} from {found['location']}"))
    for kind in ("variants", "profiles"):
        for name, reason in capabilities[kind].items():
            declared = capabilities["declared"].get(name)
            state = "present" if reason is None else f"missing: {reason}"
            if declared:
                state = f"declared unsupported: {declared}"
            style = "green" if state == "present" else "yellow"
            console.print(Text(f"  {name:18}"), Text(state, style=style))
    failed = False
    for check in found["smoke"]:
        failed |= check["problem"] is not None
        mark = Text("ok     ", "green") if check["problem"] is None else Text("problem", "red")
        console.print(mark, Text(f"{check['check']}{_because(check['problem'])}"))
    ctx.exit(1 if failed else 0)


def _because(problem: str | None) -> str:
    return "" if problem is None else f": {problem}"
