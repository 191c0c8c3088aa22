"""Test results on disk as they come: one JSON line per test in ``results.jsonl``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "results.jsonl"


class ResultStore:
    """Appends findings; each line is flushed, so that a killed run leaves what it had."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / FILE).open("w", encoding="utf-8")

    def append(self, finding: dict[str, Any]) -> None:
        """Write one finding."""
        self._file.write(json.dumps(finding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
