"""From a program to a verdict: run it plainly and through a candidate, compare, report.

A property test is ``@clause(…) @reported @given(programs(LANGUAGE))`` around :func:`check`; what it
raises carries the failing script.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.programs import coverage
from conformance.programs.bounds import (
    RegionStorages,
    compare_memory,
    compare_operators,
    compare_runs,
)
from conformance.programs.compare import Difference, compare
from conformance.programs.execute import PLAIN, Observed, execute
from conformance.programs.language import Language
from conformance.programs.model import Program, Sequence, walk
from conformance.programs.reduce import reduce
from conformance.programs.render import Rendered, render
from conformance.programs.script import Failure, reproduce, script_source
from conformance.programs.trace import first_divergence, trace
from conformance.testing import Inconclusive, reached


class ProgramFailure(AssertionError):
    """A program does not do through the candidate what it does plainly.

    ``repro_source`` is the script, ``trace_diff`` the first event that is not as expected,
    ``silent`` whether the wrong outcome came without an exception.
    """

    def __init__(self, failure: Failure, note: str = "") -> None:
        self.failure = failure
        self.repro_source = script_source(failure)
        self.trace_diff = failure.trace
        self.silent = failure.difference.kind != "exception"
        lines = [str(failure.difference)]
        if note:
            lines.append(note)
        if failure.trace:
            lines += ["first event that is not as expected:", failure.trace]
        super().__init__("\n".join(lines))


def differ(program: Program, api: Any, language: Language) -> tuple[Difference | None, Observed]:
    """The first difference between the plain run and ``api``'s, and what was seen of the latter.

    Raises Inconclusive where the plain program raises or disagrees with itself.
    """
    rendered = render(program)
    expected = execute(rendered, PLAIN)
    if expected.error is not None:
        raise Inconclusive(f"the plain program raises {expected.error!r}") from expected.error
    observed = execute(rendered, api)
    found = compare(expected, observed, exact=language.exact, warnings=language.warnings)
    if found is None and language.counts:
        found = compare_runs(program, expected, observed)
    if found is None and language.memory:
        live = RegionStorages()
        found = compare_memory(program, execute(rendered, api, live=live, wrap=live.wrap))
    if found is None and language.operators:
        found = compare_operators(program, trace(rendered, PLAIN, saved=True), trace(rendered, api))
    if found is not None:
        disagreement = compare(expected, execute(rendered, PLAIN))
        if disagreement is not None:
            raise Inconclusive(f"the plain run disagrees with itself: {disagreement}")
    return found, observed


def check(program: Program, candidate: Any, language: Language) -> None:
    """Fail unless ``program`` does through ``candidate`` what it does plainly."""
    found, observed = differ(program, candidate, language)
    coverage.current.add(program)
    if found is not None:
        raise ProgramFailure(Failure(program, found, candidate.name, language))
    recomputed = any(count > 1 for count in observed.runs.values())
    if recomputed or not program.plan.steps or _divided(program):
        reached()


def _divided(program: Program) -> bool:
    """Whether a list of functions is cut into segments of which at least one is checkpointed;
    how often these run is not seen from outside, so that they stay the modules they are."""
    return any(isinstance(item, Sequence) and item.segments > 1 for item in walk(program.body))


def reduced(failure: Failure, candidate: Any) -> Failure:
    """The same failure of a smaller program."""
    language = failure.language

    def difference_of(program: Program) -> Difference | None:
        try:
            found, _ = differ(program, candidate, language)
        except Inconclusive:
            return None
        return found if found is not None and _alike(found, failure.difference) else None

    smaller = reduce(failure.program, lambda program: difference_of(program) is not None)
    found = difference_of(smaller)
    return failure if found is None else replace(failure, program=smaller, difference=found)


def _alike(one: Difference, other: Difference) -> bool:
    """Whether two differences can be taken for the same fault."""
    if one.kind == other.kind == "exception":
        return one.observed.split(":")[0] == other.observed.split(":")[0]
    return one.kind == other.kind and ("grad" in one.name) == ("grad" in other.name)


def explain(failure: Failure, candidate: Any) -> ProgramFailure:
    """The failure with its trace, after the script was run in a fresh process."""
    rendered: Rendered = render(failure.program)
    try:
        divergence = first_divergence(trace(rendered, PLAIN), trace(rendered, candidate))
    except Exception as problem:  # noqa: BLE001 - a trace is a help, its failure no verdict
        divergence = f"(no trace: {problem!r})"
    failure = replace(failure, trace=divergence)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failing.py"
        path.write_text(script_source(failure), encoding="utf-8")
        result = reproduce(path)
    note = (
        "the script reproduces it in a fresh process"
        if result.reproduced
        else f"the script does not reproduce it in a fresh process: {result.output[-300:]}"
    )
    return ProgramFailure(failure, note)


def reported(test: Callable[..., None]) -> Callable[..., None]:
    """Around a property test: what its first failing program raises is made small and explained.

    A test whose settings the plugin has replaced grades a recorded fault: that is found, no more.
    """
    original = getattr(test, _SETTINGS)

    @functools.wraps(test)
    def wrapper(ckpt: Any, **kwargs: Any) -> None:
        settings = getattr(wrapper, _SETTINGS)
        setattr(test, _SETTINGS, settings)
        failed: Failure
        try:
            test(ckpt, **kwargs)
            return
        except ProgramFailure as raised:
            if settings is not original:
                raise
            failed = raised.failure
        raise explain(reduced(failed, ckpt), ckpt)

    return wrapper


_SETTINGS = "_hypothesis_internal_use_settings"
