"""Runs variants against the tests of chosen clauses, each variant in a forked process.

The parent imports torch and the tests once; a fork starts in milliseconds, and whatever a
variant breaks dies with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.mutants.catalogue import Mutant
from conformance.mutants.live import install
from conformance.specification import DEFAULT_EDITION, EDITIONS, load_specification
from conformance.specification.model import PROFILES, VARIANTS
from conformance.specification.tests_index import EXAMPLES_FILE, index_tests, tests_dir

KILLING = ("fail", "crash", "timeout", "inconclusive")
"""Verdicts by which a clause catches a variant. *Inconclusive* is one: no run of the unpatched
reference is, so a variant that makes a test disagree with itself (by state that it leaves for the
next example) has been noticed, and does not conform."""


@dataclass
class Job:
    """One variant and the clauses to grade it on. ``sources`` overrides the mutant's patches.
    ``first_kill`` ends the job at the first failing test."""

    mutant: Mutant | None
    clauses: tuple[str, ...]
    sources: dict[str, str] | None = None
    first_kill: bool = False


@dataclass
class Outcome:
    """What became of a job: verdict by clause (the worst of its tests), or why it did not run."""

    job: Job
    verdicts: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    problem: str | None = None
    seconds: float = 0.0

    @property
    def killers(self) -> set[str]:
        """Clauses that caught the variant."""
        return {clause for clause, verdict in self.verdicts.items() if verdict in KILLING}


def run_jobs(
    jobs: Iterable[Job],
    *,
    budget: str,
    seed: int = 0,
    workers: int = 2,
    time_limit: float = 120.0,
    seen: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run every job, ``workers`` at a time, and return the outcomes in the order of the jobs.

    ``time_limit`` is for a whole job, in seconds; a job over it is killed, and the clause whose
    test was running has the verdict ``timeout``.
    """
    _preload(budget)
    waiting = list(enumerate(jobs))
    outcomes: dict[int, Outcome] = {}
    running: dict[int, _Child] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"capabilities": _everything()}), encoding="utf-8")
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < workers:
                    index, job = waiting.pop(0)
                    child = _Child(index, job, plan, budget, seed)
                    running[child.pid] = child
                    selector.register(child.pipe, selectors.EVENT_READ, child)
                for key, _ in selector.select(timeout=0.2):
                    key.data.read()
                for child in list(running.values()):
                    if time.monotonic() - child.began > time_limit:
                        child.kill()
                    if child.ended:
                        selector.unregister(child.pipe)
                        outcome = outcomes[child.index] = child.outcome()
                        del running[child.pid]
                        if seen is not None:
                            seen(outcome)
    return [outcomes[index] for index in sorted(outcomes)]


class _Child:
    """A forked process that runs pytest on one variant and reports test by test."""

    def __init__(self, index: int, job: Job, plan: Path, budget: str, seed: int) -> None:
        self.index = index
        self.job = job
        self.began = time.monotonic()
        self.timed_out = False
        self.ended = False
        self._buffer = b""
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _run_in_child(job, plan, budget, seed, write)
        os.close(write)

    def read(self) -> None:
        """Take what the child has written; an empty read means that it is gone."""
        data = os.read(self.pipe, 1 << 16)
        self._buffer += data
        if not data:
            self.ended = True

    def kill(self) -> None:
        """End a child that takes too long."""
        self.timed_out = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while not self.ended:
            self.read()

    def outcome(self) -> Outcome:
        """What the child reported."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        outcome = Outcome(self.job, seconds=round(time.monotonic() - self.began, 3))
        current: str | None = None
        finished = False
        for line in self._buffer.decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a child that died while writing it
            if "problem" in event:
                outcome.problem = event["problem"]
            elif "begin" in event:
                current = event["begin"]
            elif "end" in event:
                finished = True
            else:
                current = None
                _worst(outcome, event["clause"], event["verdict"], event["message"])
        if not finished and outcome.problem is None:
            if current is None:
                outcome.problem = f"the process ended with status {status} outside any test"
            else:
                verdict = "timeout" if self.timed_out else "crash"
                _worst(outcome, current, verdict, f"the process ended with status {status}")
        return outcome


def _worst(outcome: Outcome, clause: str, verdict: str, message: str) -> None:
    order = ("crash", "timeout", "fail", "error", "inconclusive", "pass", "unsupported")
    before = outcome.verdicts.get(clause)
    if before is None or order.index(verdict) < order.index(before):
        outcome.verdicts[clause] = verdict
        outcome.messages[clause] = message


def _run_in_child(job: Job, plan: Path, budget: str, seed: int, write: int) -> None:
    """Never returns."""
    code = 1
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(devnull, descriptor)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        pipe = os.fdopen(write, "w", buffering=1)
        import pytest

        name = install(job.mutant, job.sources)
        arguments = [
            *_files(job.clauses),
            "-c", str(tests_dir() / "suite.ini"),
            "--rootdir", str(tests_dir()),
            "-p", "_hypothesis_pytestplugin",
            "-p", "conformance.plugin.options",
            "-p", "no:terminal", "-p", "no:faulthandler", "-s",
            "--candidate", name,
            "--budget", budget,
            "--edition", _edition(job.clauses),
            "--expectations", "none",
            "--hypothesis-seed", str(seed),
            "--conformance-plan", str(plan),
            "--no-shrink",
        ]  # fmt: skip
        for clause in job.clauses:
            arguments += ["--clauses", clause]
        if job.first_kill:
            arguments.append("-x")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ["PYTEST_ADDOPTS"] = ""
        code = int(pytest.main(arguments, plugins=[_Reporter(pipe)]))
        if code in (0, 1):
            pipe.write('{"end": true}\n')
        else:
            pipe.write(json.dumps({"problem": f"pytest ended with {code}"}) + "\n")
        pipe.flush()
    except BaseException as problem:  # noqa: BLE001 - the parent must learn of anything
        with contextlib.suppress(BaseException):
            text = f"{type(problem).__name__}: {problem}"
            os.write(write, (json.dumps({"problem": text}) + "\n").encode())
    finally:
        os._exit(code)


class _Reporter:
    """Writes each test's finding into the pipe as it comes."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def pytest_runtest_setup(self, item: Any) -> None:
        """Say which clause is being graded, in case the process dies of it."""
        marker = item.get_closest_marker("clause")
        self._pipe.write(json.dumps({"begin": marker.args[0]}) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pass the finding on."""
        from conformance.plugin.findings import PROPERTY

        for name, value in report.user_properties:
            if name == PROPERTY and report.when in ("setup", "call"):
                event = {key: value[key] for key in ("clause", "verdict", "message", "test")}
                self._pipe.write(json.dumps(event) + "\n")

    def pytest_internalerror(self, excrepr: Any) -> None:
        """An error of the suite itself."""
        self._pipe.write(json.dumps({"problem": str(excrepr)[-500:]}) + "\n")


def _files(clauses: Sequence[str]) -> Iterator[str]:
    """Only the test files that grade ``clauses``: collecting the others would take longer than
    running these."""
    wanted = set(clauses)
    files = {case.file for case in index_tests() if case.clause in wanted}
    for file in sorted(files | {EXAMPLES_FILE}):
        yield str(tests_dir() / file)


def _edition(clauses: Sequence[str]) -> str:
    """An edition in which every one of ``clauses`` holds: the default one where possible."""
    known = load_specification().by_id
    for edition in (DEFAULT_EDITION, *reversed(EDITIONS)):
        if all(known[clause].applies_to(edition) for clause in clauses):
            return edition
    raise ConformanceError(f"no edition has all of {', '.join(clauses)}")


def _preload(budget: str) -> None:
    """Import everything that the children need, once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    from conformance.plugin.grading import use_hypothesis_settings

    use_hypothesis_settings(budget, only_find=True)
    for path in sorted(tests_dir().glob("test_*.py")):
        importlib.import_module(f"conformance.tests.{path.stem}")
    for name in ("torch._dynamo", "torch._inductor", "torch.testing"):
        importlib.import_module(name)  # else each child would import them again
    gc.collect()
    gc.freeze()


def _everything() -> dict[str, dict[str, str | None]]:
    """The reference has every profile; a variant that lacks one must fail, not be left out."""
    return {
        "profiles": dict.fromkeys(PROFILES),
        "variants": dict.fromkeys(VARIANTS),
        "declared": {},
    }
