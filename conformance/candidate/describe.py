"""``python -m conformance.candidate.describe CANDIDATE FILE``: load and probe in a process of its
own, so that a candidate that crashes, hangs or prints while it is imported harms nobody.

Writes one JSON object to FILE: ``error`` or what was found. Never prints.
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

from conformance.candidate.load import load_candidate
from conformance.candidate.probe import probe
from conformance.candidate.smoke import smoke
from conformance.errors import CandidateNotLoaded


def describe(spelling: str, with_smoke: bool = False) -> dict[str, Any]:
    """Everything the runner needs to know about a candidate and this environment."""
    import torch

    candidate = load_candidate(spelling)
    capabilities = probe(candidate)
    found: dict[str, Any] = {
        "name": candidate.name,
        "location": candidate.location,
        "version": candidate.version,
        "capabilities": capabilities.as_dict(),
        "environment": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "platform": platform.platform(),
        },
    }
    if with_smoke:
        found["smoke"] = smoke(candidate, capabilities)
    return found


def main(arguments: list[str]) -> None:
    """Entry point of the subprocess."""
    spelling, file, *rest = arguments
    try:
        found = describe(spelling, with_smoke="--smoke" in rest)
    except CandidateNotLoaded as problem:
        found = {"error": str(problem), "traceback": traceback.format_exc()}
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
