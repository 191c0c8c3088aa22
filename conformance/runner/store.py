"""Test results on disk as they come: one JSON line per test in ``results.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conformance._files import write_atomically

FILE = "results.jsonl"


class ResultStore:
    """Appends findings; each line is flushed, so that a killed run leaves what it had.

    ``earlier`` are the findings of the run that is continued; they are written again, because the
    last line of a killed run may be cut off.
    """

    def __init__(self, directory: Path, earlier: Iterable[dict[str, Any]] = ()) -> None:
        write_atomically(
            directory / FILE, "".join(json.dumps(finding) + "\n" for finding in earlier)
        )
        self._file = (directory / FILE).open("a", encoding="utf-8")

    def append(self, finding: dict[str, Any]) -> None:
        """Write one finding."""
        self._file.write(json.dumps(finding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_findings(directory: Path) -> list[dict[str, Any]]:
    """What an earlier run left; a last line that was cut off is dropped."""
    path = directory / FILE
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
