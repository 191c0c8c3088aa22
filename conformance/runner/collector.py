"""Receives test reports in the controlling process, also of tests whose worker died."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from conformance.plugin.findings import PROPERTY, stable_name
from conformance.plugin.limits import HANG_PREFIX
from conformance.runner.progress import Progress
from conformance.runner.store import ResultStore
from conformance.specification.tests_index import EXAMPLES_FILE, index_tests


class Collector:
    """Findings by clause, in the order in which they came; each is stored at once."""

    def __init__(
        self,
        store: ResultStore,
        progress: Progress,
        directory: Path,
        earlier: list[dict[str, Any]],
    ) -> None:
        self.earlier = earlier
        self.findings: dict[str, list[dict[str, Any]]] = {}
        for finding in earlier:
            self.findings.setdefault(finding["clause"], []).append(finding)
        self.collected = False
        self.problems: list[str] = []
        self._store = store
        self._progress = progress
        self._directory = directory
        self._clause_of = {(case.file, case.name): case.clause for case in index_tests()}

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """A worker has collected its tests; every worker collects the same ones."""
        self.collected = True
        self._progress.expect(len(ids))

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker that is gone before it has collected anything is the suite's fault."""
        if error and not self.collected:
            self.problems.append(" ".join(str(error).split())[-400:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A test file that cannot be imported is the suite's fault."""
        if report.failed:
            self.problems.append(" ".join(str(report.longreprtext).split())[-400:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the finding out of a test's report."""
        for name, value in report.user_properties:
            if name == PROPERTY and isinstance(value, dict):
                self._add(value)
                return
        if report.failed and report.when not in ("setup", "call", "teardown"):
            # xdist's own report of a test whose worker is gone.
            self._add(self._crash(report))

    def _crash(self, report: pytest.TestReport) -> dict[str, Any]:
        test = stable_name(report.nodeid)
        hung = self._hung(test)
        return {
            "clause": self._clause(report.nodeid),
            "test": test,
            "verdict": "timeout" if hung else "crash",
            "message": "hung where nothing could interrupt it, the process was ended"
            if hung
            else "the process died while this test ran",
            "silent": False,
            "exception": None,
            "examples": 0,
            "seconds": round(getattr(report, "duration", 0.0), 4),
            "details": str(report.longrepr)[:2000],
        }

    def _hung(self, test: str) -> bool:
        """Whether the watch ended the process: it leaves the test's name and a traceback."""
        for path in self._directory.glob(f"{HANG_PREFIX}*.txt"):
            name, _, traceback = path.read_text(encoding="utf-8", errors="replace").partition("\n")
            if name == test:
                path.unlink()
                return bool(traceback.strip())
        return False

    def _clause(self, nodeid: str) -> str:
        file, _, name = nodeid.rpartition("/")[2].partition("::")
        if file == EXAMPLES_FILE and (found := re.search(r"\[(.+)\]$", name)):
            return found.group(1)
        return self._clause_of[file, name.split("[")[0]]

    def _add(self, finding: dict[str, Any]) -> None:
        source = finding.pop("repro_source", None)
        if source:
            finding["repro"] = self._write_repro(finding["clause"], source)
        self.findings.setdefault(finding["clause"], []).append(finding)
        self._store.append(finding)
        self._progress.seen(finding)

    def _write_repro(self, clause: str, source: str) -> str:
        path = self._directory / "repro" / f"{clause.replace('/', '--')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return str(path.relative_to(self._directory))
