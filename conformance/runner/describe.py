"""Asks a process of its own what a candidate is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance.errors import CandidateNotLoaded

TIME_LIMIT = 180
"""Seconds for import and probing; importing torch alone takes up to a minute on a cold disk."""


def describe_candidate(spelling: str, *, smoke: bool = False) -> dict[str, Any]:
    """What the candidate is and has (see ``conformance.candidate.describe``).

    Raises CandidateNotLoaded, also where the process dies or does not end.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        file = Path(folder) / "candidate.json"
        command = [sys.executable, "-m", "conformance.candidate.describe", spelling, str(file)]
        if smoke:
            command.append("--smoke")
        environment = dict(os.environ)
        # The suite must be importable there even where it is not installed (a plain checkout).
        root = str(Path(__file__).resolve().parent.parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (environment.get("PYTHONPATH"), root) if part
        )
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=TIME_LIMIT,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CandidateNotLoaded(f"{spelling} was not loaded within {TIME_LIMIT} s") from None
        if not file.is_file():
            raise CandidateNotLoaded(
                f"the process that loaded {spelling} {_how(ended.returncode)}"
                f"{_last_line(ended.stderr)}"
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "error" in found:
        raise CandidateNotLoaded(found["error"], details=found.get("traceback", ""))
    return found


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
