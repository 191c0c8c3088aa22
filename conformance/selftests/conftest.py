"""Fixtures of the self-tests: the command as a user runs it, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CANDIDATES = Path(__file__).parent / "candidates"
ROOT = Path(__file__).parent.parent.parent


@dataclass
class Ran:
    """How the command ended and what it left."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def report(self) -> dict[str, Any]:
        """The run document."""
        document: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return document

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by clause."""
        return {row["clause"]: row["verdict"] for row in self.report["results"]}

    def with_verdict(self, *verdicts: str) -> set[str]:
        """Clauses that have any of ``verdicts``."""
        return {clause for clause, verdict in self.verdicts.items() if verdict in verdicts}


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Ran]:
    """Runs ``python -m conformance ARGUMENTS`` in an empty folder."""

    def run(*arguments: str, timeout: float = 600) -> Ran:
        ended = subprocess.run(
            [sys.executable, "-m", "conformance", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            timeout=timeout,
            check=False,
        )
        return Ran(ended.returncode, ended.stdout, ended.stderr, tmp_path / "conformance-report")

    return run
