"""Planted faults: programs must find each, and what they report must be short and true."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from conformance.candidate import Candidate, load_candidate
from conformance.programs import languages
from conformance.programs.grade import ProgramFailure, check, explain, reduced
from conformance.programs.language import Language
from conformance.programs.model import Program
from conformance.programs.script import write_script
from conformance.programs.strategy import programs

HEAD = """
import torch
from torch.utils.checkpoint import *
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as right
"""

FAULTS: dict[str, tuple[str, Language]] = {
    "ignores preserve_rng_state": (
        """
        def checkpoint(function, *args, **options):
            options["preserve_rng_state"] = False
            return right(function, *args, **options)
        """,
        languages.RANDOM,
    ),
    "detaches keyword arguments": (
        """
        def checkpoint(function, *args, use_reentrant, **passed):
            for name, value in passed.items():
                if isinstance(value, torch.Tensor):
                    passed[name] = value.detach()
            return right(function, *args, use_reentrant=use_reentrant, **passed)
        """,
        languages.STRUCTURES,
    ),
    "returns later outputs detached": (
        """
        def checkpoint(function, *args, **options):
            result = right(function, *args, **options)
            if type(result) is tuple:
                return result[:1] + tuple(
                    item.detach() if isinstance(item, torch.Tensor) else item
                    for item in result[1:]
                )
            return result
        """,
        languages.PLAIN,
    ),
    "recomputes outside of autocast": (
        """
        def checkpoint(function, *args, **options):
            runs = []
            def twice(*args, **passed):
                runs.append(0)
                if len(runs) == 1:
                    return function(*args, **passed)
                with torch.autocast("cpu", enabled=False):
                    return function(*args, **passed)
            return right(twice, *args, determinism_check="none", **options)
        """,
        languages.AUTOCAST,
    ),
    "loses gradients at depth 2": (
        """
        depth = 0
        def checkpoint(function, *args, **options):
            def deeper(*args, **passed):
                global depth
                depth += 1
                try:
                    return function(*args, **passed)
                finally:
                    depth -= 1
            if depth > 1:
                args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
            return right(deeper, *args, **options)
        """,
        languages.NESTED,
    ),
    "never stops early": (
        """
        def checkpoint(function, *args, **options):
            options["early_stop"] = False
            return right(function, *args, **options)
        """,
        languages.RECOMPUTED,
    ),
    "keeps everything": (
        """
        def checkpoint(function, *args, use_reentrant, **passed):
            return function(*args, **passed)
        """,
        languages.MEMORY,
    ),
    "recomputes for every saved tensor": (
        """
        def checkpoint(function, *args, use_reentrant, early_stop=True, **passed):
            count = [0]
            def pack(tensor):
                count[0] += 1
                return count[0] - 1
            def unpack(index):
                again = []
                keep = lambda tensor: again.append(tensor.detach()) or tensor
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, id):
                    function(*args, **passed)
                return again[index]
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return function(*args, **passed)
        """,
        languages.RUNS,
    ),
    "repeats a kept operator": (
        """
        def checkpoint(function, *args, context_fn=None, **options):
            return right(function, *args, **options)
        """,
        languages.KEPT,
    ),
    "warns every time": (
        """
        import warnings
        def checkpoint(function, *args, **options):
            warnings.warn("checkpointing", stacklevel=2)
            return right(function, *args, **options)
        """,
        languages.PLAIN,
    ),
}


def first_failure(candidate: Candidate, language: Language, examples: int) -> ProgramFailure:
    """What the property of ``language`` raises for the candidate, made small and explained."""

    @seed(0)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(language))
    def search(program: Program) -> None:
        check(program, candidate, language)

    with pytest.raises(ProgramFailure) as found:
        search()
    return explain(reduced(found.value.failure, candidate), candidate)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_script_is_short(
    name: str, tmp_path: Path, record_property: Any
) -> None:
    source, language = FAULTS[name]
    path = tmp_path / "planted.py"
    path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
    failure = first_failure(load_candidate(str(path)), language, 200)
    written = write_script(failure.failure, tmp_path / "repro" / "script.py")
    lines = written.read_text(encoding="utf-8").count("\n")
    record_property("lines", lines)
    print(f"{name}: {lines} lines\n{failure}\n{failure.repro_source}")
    assert "the script reproduces it in a fresh process" in str(failure)
    assert failure.trace_diff
    # What must be counted or watched while the program runs takes a few more lines.
    most = 70 if failure.failure.difference.kind in ("memory", "operators", "runs") else 45
    assert lines <= most, f"expected a short script, got {lines} lines"
