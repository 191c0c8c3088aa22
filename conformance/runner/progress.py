"""Shows that something happens: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

_NOTEWORTHY = ("fail", "crash", "timeout", "error", "inconclusive")


class Progress:
    """One per run. ``quiet`` shows nothing."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._total = 0
        self._seen = 0
        self._bad = 0
        self._next_line = 0
        self._bar: Bar | None = None
        if console.is_terminal and not quiet:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting workers", total=None)
            self._bar.start()

    def say(self, text: str) -> None:
        """A line that tells what is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif not self._quiet:
            self._console.print(text, highlight=False, markup=False)

    def expect(self, total: int) -> None:
        """How many tests there are; each worker reports the same number."""
        if total != self._total:
            self._total = total
            if self._bar is not None:
                self._bar.update(self._task, total=total, description="running tests")

    def seen(self, finding: dict[str, Any]) -> None:
        """One test has ended."""
        self._seen += 1
        noteworthy = finding["verdict"] in _NOTEWORTHY
        self._bad += noteworthy
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self._seen, description=f"{self._bad} not passing"
            )
        elif not self._quiet and self._seen * 10 >= self._total * (self._next_line + 1):
            self._next_line = self._seen * 10 // max(self._total, 1)
            self._console.print(
                f"{self._seen} of {self._total} tests, {self._bad} not passing",
                highlight=False,
            )

    def finish(self) -> None:
        """End the display; what remains on the screen is the summary that follows."""
        if self._bar is not None:
            self._bar.stop()
