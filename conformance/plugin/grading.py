"""Runs the suite's tests against one candidate and gives each a verdict.

Lives in the process that runs tests (an xdist worker or plain pytest). What it finds goes out as
a plain dictionary in each report's ``user_properties``; turning these into a run document is the
runner's business.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Flaky, HypothesisException

from conformance import evidence
from conformance.candidate import Candidate, Capabilities, NotProvided, load_candidate
from conformance.candidate.probe import probe
from conformance.errors import ConformanceError
from conformance.expectations import load_expectations
from conformance.plugin.findings import PROPERTY, stable_name
from conformance.plugin.isolation import Isolation, describe
from conformance.plugin.limits import TimeLimit, TimeLimitReached, limit_memory
from conformance.specification import Clause, load_specification
from conformance.specification.select import select
from conformance.testing import Inconclusive, variant_name

EXAMPLES = {"quick": 4, "standard": 20, "deep": 300}
"""Hypothesis examples per property test. Quick must fit into 20 s, standard into 90 s on two
cores; deep is for a night."""

FIND_ONLY = (Phase.explicit, Phase.generate)
"""Phases of Hypothesis where finding a failure is enough and its smallest form costs only time."""


def use_hypothesis_settings(budget: str, *, only_find: bool) -> None:
    """Make the settings of ``budget`` the default. ``@given`` reads the default when a test module
    is imported, so this comes first."""
    hypothesis.settings.register_profile(
        "conformance",
        max_examples=EXAMPLES[budget],
        deadline=None,  # a deadline would measure this machine, not the candidate
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=FIND_ONLY if only_find else tuple(Phase),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    hypothesis.settings.load_profile("conformance")


class Grader:
    """One per process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        plan_file = config.getoption("conformance_plan")
        plan = json.loads(Path(plan_file).read_text(encoding="utf-8")) if plan_file else None
        try:
            self.specification = load_specification()
            self.candidate: Candidate = load_candidate(config.getoption("candidate"))
            self.capabilities = (
                Capabilities(**plan["capabilities"]) if plan else probe(self.candidate)
            )
            self.selected = (
                set(plan["clauses"])
                if plan and "clauses" in plan
                else set(
                    select(
                        self.specification,
                        config.getoption("clauses"),
                        config.getoption("profiles"),
                    )
                )
            )
            self.expected = load_expectations(
                config.getoption("expectations"),
                self.candidate.name,
                self.candidate.version,
                known=set(self.specification.by_id),
            )
        except ConformanceError as problem:
            raise pytest.UsageError(str(problem)) from None
        self.edition: str = config.getoption("edition")
        self.isolation = Isolation(
            int(config.getoption("hypothesis_seed", None) or 0),
            silence=hasattr(config, "workerinput"),
        )
        self._left: dict[str, list[str]] = {}
        self._done = set(plan.get("done", ())) if plan else set()
        self._watch: TimeLimit | None = None
        if plan and "directory" in plan:
            self._watch = TimeLimit(plan["time_limit"], Path(plan["directory"]))
        self._memory_limit: int | None = plan.get("memory_limit") if plan else None
        use_hypothesis_settings(config.getoption("budget"), only_find=self._only_find())
        if hasattr(config, "workerinput"):
            # Ctrl-C reaches every process of the terminal; only the controller may act on it.
            # So a KeyboardInterrupt seen here was raised by the candidate.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _only_find(self) -> bool:
        """A quick run is to be quick for a candidate that fails everywhere, too."""
        quick = self.config.getoption("budget") == "quick"
        return bool(quick or self.config.getoption("no_shrink"))

    def pytest_unconfigure(self) -> None:
        """A thread that a candidate left must not keep a worker alive for ever."""
        if hasattr(self.config, "workerinput"):
            timer = threading.Timer(1.0, os._exit, (0,))
            timer.daemon = True
            timer.start()

    # ------------------------------------------------------------------ selection

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of clauses that are selected, in force and supported."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            clause = self._clause_of(item)
            (kept if self._graded(clause, item) else dropped).append(item)
        items[:] = kept
        if dropped:
            self.config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self) -> None:
        """Take what is loaded now out of the collector's sight: tests of lifetimes collect
        garbage often, and going through all of torch takes half a second each time."""
        gc.collect()
        gc.freeze()

    def _clause_of(self, item: pytest.Item) -> Clause:
        marker = item.get_closest_marker("clause")
        if marker is None:
            raise pytest.UsageError(f"{item.nodeid} names no clause")
        clause = self.specification.by_id.get(marker.args[0])
        if clause is None:
            raise pytest.UsageError(f"{item.nodeid} names {marker.args[0]!r}, which is no clause")
        return clause

    def _graded(self, clause: Clause, item: pytest.Item) -> bool:
        if stable_name(item.nodeid) in self._done:
            return False
        if clause.id not in self.selected or not clause.applies_to(self.edition):
            return False
        if clause.testable != "cpu" and clause.testable != self.config.getoption("device"):
            return False
        variant = clause.variant
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if variant == "any" and "use_reentrant" in parameters:
            variant = variant_name(bool(parameters["use_reentrant"]))
        return self.capabilities.missing(clause.profile, variant) is None

    # ------------------------------------------------------------------ running

    # Inside pytest's own wrappers, so that the log handlers that these add can be taken away.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run each test in the known state, and let nothing that it raises end the session."""
        evidence.current.reset()
        clause = self._clause_of(item)
        if any(record.clause == clause.id for record in self.expected):
            _do_not_shrink(item)
        left = self._left[item.nodeid] = []
        if self._memory_limit is not None:
            limit_memory(self._memory_limit)
            self._memory_limit = None  # it holds for the process from now on
        name = stable_name(item.nodeid)
        watched = self._watch.around(name) if self._watch else contextlib.nullcontext()
        with watched, self.isolation.around(name, left):
            try:
                return (yield)
            except (KeyboardInterrupt, SystemExit, GeneratorExit, TimeLimitReached) as raised:
                # These would end the session; here they are only what became of one test.
                raise CandidateRaised(raised) from raised

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach what was found to the report of each test."""
        report = yield
        if call.when == "call" or (call.when == "setup" and call.excinfo is not None):
            report.user_properties.append((PROPERTY, self._finding(item, call)))
        return report

    def _finding(self, item: pytest.Item, call: pytest.CallInfo[None]) -> dict[str, Any]:
        marker = item.get_closest_marker("clause")
        assert marker is not None
        minimum = marker.kwargs.get("minimum", 1)
        verdict, message, silent, exception = _judge(call, minimum)
        left = describe(self._left.pop(item.nodeid, []))
        if left and verdict == "pass":
            message = left
        elif left:
            message = f"{message} ({left})"
        return {
            "clause": marker.args[0],
            "test": stable_name(item.nodeid),
            "verdict": verdict,
            "message": message,
            "silent": silent,
            "exception": exception,
            "examples": evidence.current.count,
            "seconds": round(call.duration, 4),
            "details": _details(call) if verdict not in ("pass", "unsupported") else "",
            "repro_source": _repro_source(call),
        }


class CandidateRaised(Exception):
    """Stands in for an exception that must not end the session."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(f"the candidate raised {type(original).__name__}: {original}")
        self.original = original


def _judge(call: pytest.CallInfo[None], minimum: int) -> tuple[str, str, bool, str | None]:
    """Verdict, message, whether the wrong outcome came silently, and the exception's type."""
    if call.excinfo is None:
        if evidence.current.count < minimum:
            return (
                "error",
                f"reached what it asks about {evidence.current.count} times, needs {minimum}",
                False,
                None,
            )
        return "pass", "", False, None
    raised = call.excinfo.value
    if isinstance(raised, CandidateRaised):
        raised = raised.original
    name = type(raised).__name__
    message = _first_lines(raised)
    if isinstance(raised, NotProvided):
        return "unsupported", f"the candidate has no {raised}", False, name
    if isinstance(raised, (Inconclusive, Flaky)):
        return "inconclusive", message, False, name
    if call.when == "setup" or isinstance(raised, HypothesisException):
        return "error", message, False, name
    if isinstance(raised, TimeLimitReached):
        return "timeout", str(raised), False, name
    silent = isinstance(raised, (AssertionError, pytest.fail.Exception))
    silent = bool(getattr(raised, "silent", silent))
    return "fail", message, silent, name


def _first_lines(raised: BaseException, limit: int = 600) -> str:
    try:
        text = str(raised)
    except BaseException as problem:  # noqa: BLE001 - a candidate's __str__ may raise anything
        text = f"<its message raises {type(problem).__name__}>"
    if not isinstance(raised, (AssertionError, pytest.fail.Exception)):
        text = f"{type(raised).__name__}: {text}"
    # pytest rewrites assertions: the first line says what failed, the rest shows both sides.
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:6])[:limit] or type(raised).__name__


def _details(call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return ""
    lines = traceback.format_exception(call.excinfo.value)
    return "".join(lines)[-6000:]


def _repro_source(call: pytest.CallInfo[None]) -> str | None:
    """The standalone script that a failure of a random program carries."""
    if call.excinfo is None:
        return None
    source = getattr(call.excinfo.value, "repro_source", None)
    return source if isinstance(source, str) else None


def _do_not_shrink(item: pytest.Item) -> None:
    """A recorded fault is known: finding it is enough, its smallest form costs only time."""
    function = getattr(item, "obj", None)
    settings = getattr(function, "_hypothesis_internal_use_settings", None)
    if settings is not None:
        function._hypothesis_internal_use_settings = hypothesis.settings(  # type: ignore[union-attr]
            settings, phases=FIND_ONLY
        )
