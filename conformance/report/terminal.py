"""The run on a screen: verdict, counts, what fails, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.report.summary import against, level_rows, profile_rows, verdict_line

_COLOURS = {
    "conforms": "green",
    "pass": "green",
    "partial": "yellow",
    "expected-fail": "yellow",
    "unsupported": "yellow",
    "not-run": "yellow",
    "incomplete": "yellow",
}
_MOST = 15


def print_summary(document: dict[str, Any], directory: Path, console: Console) -> None:
    """Print the summary of a run; nothing from a candidate is read as markup."""
    verdict = document["summary"]["verdict"]
    candidate = document["candidate"]
    console.print()
    console.print(
        Text(f"{candidate['name']} {candidate['version'] or ''}".strip(), style="bold"),
        Text(f"edition {document['spec']['edition']}, torch {document['environment']['torch']}"),
    )
    console.print(Text(verdict_line(document), style=_COLOURS.get(verdict, "red")))
    console.print()
    columns, rows = level_rows(document)
    table = Table("level", *columns, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
    table = Table("profile", "status", "passed", "of", box=None)
    for profile, status, passed, total in profile_rows(document):
        table.add_row(profile, Text(status, style=_COLOURS.get(status, "red")), passed, total)
    console.print(table)
    failing = against(document)
    if failing:
        console.print()
    for result in failing[:_MOST]:
        silent = ", silently wrong" if result["silent"] else ""
        head = Text()
        head.append(result["clause"], style="bold red")
        head.append(f" {result['level']} {result['verdict']}{silent}")
        console.print(head)
        console.print(Text(f"  {_short(result['message'])}"))
        if result["repro"]:
            console.print(Text(f"  script: {directory / result['repro']}"))
    if len(failing) > _MOST:
        console.print(f"… and {len(failing) - _MOST} more")
    console.print()
    _print_missing(document, console)
    console.print(Text(f"report: {directory / 'report.json'}"))
    if failing:
        first = failing[0]["clause"]
        console.print(Text(f"next: checkpoint-conformance show {first}"))


def _print_missing(document: dict[str, Any], console: Console) -> None:
    capabilities = document["candidate"]["capabilities"]
    graded = set(document["summary"]["profiles"])
    for name, reason in capabilities["profiles"].items():
        if name in graded and reason is not None and name not in capabilities["declared"]:
            console.print(Text(f"missing: {name} ({_short(reason)})", style="yellow"))
    for name, reason in capabilities["declared"].items():
        console.print(Text(f"declared unsupported: {name} ({_short(reason)})", style="yellow"))


def _short(message: str, limit: int = 240) -> str:
    return " ".join(message.split())[:limit]
