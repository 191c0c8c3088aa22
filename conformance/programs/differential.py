"""The same programs on two implementations: every observable difference between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from conformance.candidate import Candidate, Capabilities
from conformance.candidate.probe import probe
from conformance.programs.bounds import RegionStorages
from conformance.programs.compare import Difference, compare
from conformance.programs.coverage import Coverage
from conformance.programs.execute import PLAIN, Observed, execute
from conformance.programs.grade import differ
from conformance.programs.language import Language
from conformance.programs.languages import LANGUAGES
from conformance.programs.model import Program
from conformance.programs.reduce import reduce
from conformance.programs.render import render
from conformance.programs.script import Failure, script_source
from conformance.programs.strategy import programs
from conformance.programs.trace import Trace, first_difference, trace
from conformance.testing import Inconclusive

_NEEDS = {
    "policy": "selective",
    "random policy": "selective",
    "contexts": "selective",
    "form": "decorator",
    "debug": "debug",
    "early_stop": "early-stop",
    "determinism_check": "determinism",
    "respect_saved_tensors_hooks": "hooks",
    "early stop": "early-stop",
    "group": "graph-exec-group",
}
"""Profiles that options, statements and plans of a language need."""


@dataclass(frozen=True)
class Found:
    """A program on which two implementations differ. ``wrong`` says which of them leave the plain
    run; both may, in two ways, and neither, where the plain run allows both."""

    language: str
    program: Program
    difference: Difference
    wrong: tuple[str, ...]
    traces: tuple[str, str] = ("", "")
    parting: str = ""

    @property
    def size(self) -> int:
        """Lines of the program: what "smallest first" sorts by."""
        return render(self.program).source.count("\n")


@dataclass
class Comparison:
    """What a differential run found."""

    one: str
    other: str
    programs: int = 0
    inconclusive: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)


def compare_candidates(
    one: Candidate,
    other: Candidate,
    *,
    examples: int = 100,
    seed: int = 0,
    languages: Iterable[Language] = LANGUAGES.values(),
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run ``examples`` programs of each language on both and compare everything observable.

    Languages that need what one of the two lacks are left out, with the reason. At most one
    difference of each kind is kept for a language, made as small as possible; smallest first.
    """
    result = Comparison(one.name, other.name)
    capabilities = (probe(one), probe(other))
    for language in languages:
        missing = _missing(language, capabilities)
        if missing:
            result.left_out[language.name] = missing
            continue
        progress(language.name)
        for found in _search(language, one, other, examples, seed, result):
            result.found.append(found)
    result.found.sort(key=lambda found: (found.size, found.language, found.difference.kind))
    return result


def _missing(language: Language, capabilities: tuple[Capabilities, Capabilities]) -> str:
    words = {*language.options, *language.statements, *language.plans}
    needed = {_NEEDS[word]: "any" for word in words if word in _NEEDS}
    needed["sequential" if language.sequential else "core"] = "any"
    for found in capabilities:
        for profile, variant in needed.items():
            if (reason := found.missing(profile, variant)) is not None:
                return reason
        for use_reentrant in language.variants:
            variant = "reentrant" if use_reentrant else "nonreentrant"
            if (reason := found.missing("core", variant)) is not None:
                return reason
    return ""


def difference_between(
    program: Program, one: Any, other: Any, language: Language
) -> Difference | None:
    """The first observable difference; ``expected`` is what ``one`` does.

    Raises Inconclusive where ``one`` or the plain run does not agree with itself.
    """
    rendered = render(program)
    first = execute(rendered, one)
    found = compare(first, execute(rendered, other), exact=language.exact)
    if found is None:
        found = _runs(program, first, execute(rendered, other))
    if found is None and language.memory:
        found = _memory(rendered, one, other)
    if found is None and language.operators:
        found = _operators(trace(rendered, one), trace(rendered, other))
    if found is not None:
        again = compare(first, execute(rendered, one), exact=language.exact)
        if again is not None or execute(rendered, PLAIN).error is not None:
            raise Inconclusive("the program does not agree with itself")
    return found


def _runs(program: Program, first: Observed, second: Observed) -> Difference | None:
    for name in first.runs:
        if first.runs[name] != second.runs.get(name, 0):
            return Difference(
                "runs", name, "", str(first.runs[name]), str(second.runs.get(name, 0))
            )
    return None


def _memory(rendered: Any, one: Any, other: Any) -> Difference | None:
    lives = []
    for api in (one, other):
        live = RegionStorages()
        lives.append(execute(rendered, api, live=live, wrap=live.wrap).live)
    for phase, wanted in lives[0].items():
        if lives[1].get(phase) != wanted:
            return Difference(
                "memory", phase, "", f"{wanted} bytes", f"{lives[1].get(phase)} bytes"
            )
    return None


def _operators(first: Trace, second: Trace) -> Difference | None:
    parting = first_difference(first, second)
    if not parting:
        return None
    lines = parting.splitlines()
    return Difference("trace", "events", "", lines[-2][2:], lines[-1][2:])


def _search(
    language: Language,
    one: Candidate,
    other: Candidate,
    examples: int,
    seed: int,
    result: Comparison,
) -> list[Found]:
    kinds: dict[str, tuple[Program, Difference]] = {}

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(language))
    def search(program: Program) -> None:
        result.programs += 1
        result.coverage.add(program)
        try:
            found = difference_between(program, one, other, language)
        except Inconclusive:
            result.inconclusive += 1
            return
        if found is not None and found.kind not in kinds:
            kinds[found.kind] = (program, found)

    before = random.getstate()
    search()
    random.setstate(before)
    return [
        _explained(language, program, difference, one, other)
        for program, difference in kinds.values()
    ]


def _explained(
    language: Language,
    program: Program,
    difference: Difference,
    one: Candidate,
    other: Candidate,
) -> Found:
    def kept(smaller: Program) -> Difference | None:
        try:
            found = difference_between(smaller, one, other, language)
        except Inconclusive:
            return None
        return found if found is not None and found.kind == difference.kind else None

    program = reduce(program, lambda smaller: kept(smaller) is not None)
    difference = kept(program) or difference
    wrong = []
    for candidate in (one, other):
        try:
            leaves, _ = differ(program, candidate, language)
        except Inconclusive:
            leaves = None
        if leaves is not None:
            wrong.append(candidate.name)
    rendered = render(program)
    traces = (trace(rendered, one, saved=True), trace(rendered, other, saved=True))
    return Found(
        language.name,
        program,
        difference,
        tuple(wrong),
        (_text(traces[0]), _text(traces[1])),
        first_difference(*traces),
    )


def _text(made: Trace) -> str:
    return "\n".join(map(str, made.events))


def script_of(found: Found, comparison: Comparison, candidate: str) -> str:
    """The script of a difference for one of the two, where it leaves the plain run."""
    language = LANGUAGES[found.language]
    difference = replace(found.difference)
    return script_source(Failure(found.program, difference, candidate, language))
