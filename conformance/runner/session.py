"""One run: probe the candidate, run the tests in workers, write the report.

The process that runs this imports neither torch nor the candidate; workers do.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout
from xdist.workermanage import NodeManager

from conformance import __version__
from conformance._files import write_atomically
from conformance.candidate import Capabilities
from conformance.errors import ConformanceError, UsageError
from conformance.expectations import Expectation, load_expectations
from conformance.plugin.limits import HANG_PREFIX
from conformance.report.document import SCHEMA_VERSION, write_report
from conformance.report.junit import render_junit
from conformance.report.markdown import render_markdown
from conformance.runner.collector import Collector
from conformance.runner.describe import describe_candidate
from conformance.runner.progress import Progress
from conformance.runner.settings import Settings, load_header, save_header
from conformance.runner.sharding import shard_of
from conformance.runner.store import ResultStore, read_findings
from conformance.runner.verdicts import clause_result, conclude, summarise
from conformance.specification import Clause, Specification, load_specification
from conformance.specification.select import select
from conformance.specification.tests_index import tests_dir

_PLUGINS = ("xdist.plugin", "xdist.looponfail", "_hypothesis_pytestplugin")
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Ended:
    """The document of a run and the exit code that it means."""

    document: dict[str, Any]
    exit_code: int
    directory: Path


def run_candidate(spelling: str, settings: Settings, progress: Progress) -> Ended:
    """Grade one candidate and leave ``report.json`` and its renderings in ``settings.out``.

    Raises ConformanceError for wrong usage or a candidate that cannot be loaded; what the
    candidate does while it is graded never raises.
    """
    specification = load_specification()
    select(specification, settings.clauses, settings.profiles)
    _check_expectations(settings, spelling, specification)
    with _writable(settings.out) as directory:
        progress.say(f"loading {spelling}")
        described = describe_candidate(spelling)
        started = _now()
        save_header(directory, settings, described, started, specification.digest)
        return _grade(settings, described, started, specification, directory, progress, [])


def resume_run(out: Path, progress: Progress) -> Ended:
    """Run what the run in ``out`` had not yet run, with its settings, and finish its report.

    Raises UsageError where there is no run, or the specification has changed since.
    """
    settings, described, started, digest = load_header(out)
    specification = load_specification()
    if digest != specification.digest:
        raise UsageError(f"{out}: the specification has changed since this run began")
    with _writable(out) as directory:
        earlier = read_findings(directory)
        progress.say(f"resuming {described['name']}: {len(earlier)} tests are done")
        return _grade(settings, described, started, specification, directory, progress, earlier)


def _grade(
    settings: Settings,
    described: dict[str, Any],
    started: str,
    specification: Specification,
    directory: Path,
    progress: Progress,
    earlier: list[dict[str, Any]],
) -> Ended:
    chosen = select(specification, settings.clauses, settings.profiles)
    if settings.shard is not None:
        mine = shard_of(list(chosen.values()), *settings.shard)
        chosen = {clause.id: clause for clause in mine}
    expected = load_expectations(
        settings.expectations,
        described["name"],
        described["version"],
        known=specification.by_id,
    )
    store = ResultStore(directory, earlier)
    try:
        collector = Collector(store, progress, directory, earlier)
        ended = _run_tests(settings, described, list(chosen), directory, collector)
    finally:
        store.close()
    document = _document(
        described, settings, specification, chosen, expected, collector, started, ended == 0
    )
    write_report(document, directory)
    write_atomically(directory / "report.md", render_markdown(document, specification))
    write_atomically(directory / "junit.xml", render_junit(document))
    for leftover in (directory / "plan.json", *directory.glob(f"{HANG_PREFIX}*.txt")):
        leftover.unlink(missing_ok=True)
    exit_code = document["summary"]["exit_code"]
    if ended == EXIT_INTERRUPTED:
        exit_code = EXIT_INTERRUPTED
    progress.finish()
    return Ended(document, exit_code, directory)


def _check_expectations(settings: Settings, spelling: str, specification: Specification) -> None:
    """A malformed file is reported before anything long begins."""
    load_expectations(settings.expectations, spelling, None, known=specification.by_id)


@contextlib.contextmanager
def _writable(out: Path) -> Iterator[Path]:
    """The output folder, made if need be and held against a second run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".write-test"
        probe.write_text("")
        probe.unlink()
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another run is writing to {out}") from None
    except OSError as problem:
        raise UsageError(f"cannot write to {out}: {problem.strerror or problem}") from None
    try:
        yield out
    finally:
        lock.release()
        (out / ".lock").unlink(missing_ok=True)


def _run_tests(
    settings: Settings,
    described: dict[str, Any],
    clauses: list[str],
    directory: Path,
    collector: Collector,
) -> int:
    """0 where every selected test was run, EXIT_INTERRUPTED after Ctrl-C, 1 where cut short."""
    plan = directory / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "capabilities": described["capabilities"],
                "clauses": clauses,
                "done": [finding["test"] for finding in collector.earlier],
                "directory": str(directory.resolve()),
                "time_limit": settings.time_limit,
                "memory_limit": settings.memory_limit,
            }
        ),
        encoding="utf-8",
    )
    tests = tests_dir()
    arguments = [
        str(tests),
        "-c", str(tests / "suite.ini"),
        "--rootdir", str(tests),
        "-n", str(settings.workers),
        "--dist", "worksteal",
        "-p", "no:terminal",
        "-s",  # workers silence each test themselves, in a way that no candidate can undo
        "--candidate", described["name"],
        "--edition", settings.edition,
        "--budget", settings.budget,
        "--expectations", settings.expectations,
        "--device", settings.device,
        "--hypothesis-seed", str(settings.seed),
        "--conformance-plan", str(plan),
    ]  # fmt: skip
    for name in (*_PLUGINS, "conformance.plugin.options"):
        arguments += ["-p", name]
    if settings.fail_fast:
        arguments.append("-x")
    # How long xdist waits for its workers at the end, also after Ctrl-C, before it kills them.
    NodeManager.EXIT_TIMEOUT = 1
    with _environment(settings), contextlib.redirect_stderr(io.StringIO()) as noise:
        code = pytest.main(arguments, plugins=[collector])
    if code == pytest.ExitCode.INTERRUPTED and not collector.problems:
        return EXIT_INTERRUPTED
    if not collector.problems and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(settings.fail_fast and code != pytest.ExitCode.OK)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and collector.collected:
        return 0  # every chosen clause is unsupported or not applicable, or all is done already
    problem = "; ".join(collector.problems) or noise.getvalue().strip()[-500:] or str(code)
    raise ConformanceError(f"the tests could not be run: {problem}")


@contextlib.contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Workers inherit this: no plugins of the user's, no options of the user's, one thread each.

    One thread: two workers on two cores must not fight for them, and reductions must add up in
    the same order on every machine.
    """
    changes = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        # torch says so on import; nothing here needs numpy.
        "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _document(
    described: dict[str, Any],
    settings: Settings,
    specification: Specification,
    chosen: dict[str, Clause],
    expected: list[Expectation],
    collector: Collector,
    started: str,
    complete: bool,
) -> dict[str, Any]:
    capabilities = Capabilities(**described["capabilities"])
    by_clause = {record.clause: record for record in expected}
    results = [
        clause_result(
            clause,
            collector.findings.get(clause.id, ()),
            edition=settings.edition,
            device=settings.device,
            missing=capabilities.missing(clause.profile, clause.variant),
            expectation=by_clause.get(clause.id),
            complete=complete,
        )
        for clause in chosen.values()
    ]
    declared = [name for name in capabilities.declared if _relevant(name, settings)]
    verdict, exit_code = conclude(results, level=settings.level, declared=declared)
    summary = summarise(results) | {"verdict": verdict, "exit_code": exit_code}
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": {"version": __version__},
        "spec": {"edition": settings.edition, "digest": specification.digest},
        "candidate": {
            key: described[key] for key in ("name", "location", "version", "capabilities")
        },
        "environment": described["environment"] | {"device": settings.device},
        "settings": {
            "budget": settings.budget,
            "seed": settings.seed,
            "workers": settings.workers,
            "shard": None if settings.shard is None else "{}/{}".format(*settings.shard),
            "level": settings.level,
            "expectations": settings.expectations,
            "clauses": list(settings.clauses),
            "profiles": list(settings.profiles),
            "time_limit": settings.time_limit,
        },
        "started": started,
        "finished": _now(),
        "complete": complete,
        "summary": summary,
        "results": results,
    }


def _relevant(declared: str, settings: Settings) -> bool:
    return not settings.profiles or declared in settings.profiles


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
