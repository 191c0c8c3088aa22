"""Command-line options of the plugin and the decision whether it takes part at all.

Without ``--candidate`` the suite's tests are not collected and nothing else happens, so the
plugin is silent in other projects' test runs. Imports no torch: an xdist controller loads it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.specification.model import DEFAULT_EDITION, EDITIONS

if TYPE_CHECKING:
    from conformance.plugin.grading import Grader

_TESTS = Path(__file__).resolve().parent.parent / "tests"
BUDGETS = ("quick", "standard", "deep")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; all are ignored without ``--candidate``."""
    group = parser.getgroup("conformance", "activation checkpointing conformance")
    group.addoption("--candidate", metavar="NAME", help="implementation to grade")
    group.addoption("--edition", default=DEFAULT_EDITION, choices=EDITIONS)
    group.addoption("--budget", default="standard", choices=BUDGETS)
    group.addoption("--clauses", action="append", default=[], metavar="GLOB")
    group.addoption("--profiles", action="append", default=[], metavar="NAME")
    group.addoption("--expectations", default="auto", metavar="auto|none|FILE")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"))
    group.addoption(
        "--no-shrink", action="store_true", help="do not look for the smallest failing example"
    )
    group.addoption(
        "--conformance-plan", metavar="FILE", help="written by the runner: what was probed"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start grading in a process that runs tests; an xdist controller runs none."""
    config.addinivalue_line("markers", "clause(id, minimum=1): the clause that a test grades")
    if not config.getoption("candidate"):
        return
    controller = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if controller:
        return
    from conformance.plugin.grading import Grader

    config.pluginmanager.register(Grader(config), "conformance-grader")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the suite with a candidate and the suite's own tests without one, never both."""
    root = _TESTS.parent
    if root not in (collection_path, *collection_path.parents):
        return None
    graded = collection_path in (root, _TESTS) or _TESTS in collection_path.parents
    if config.getoption("candidate"):
        return None if graded else True
    return True if graded and collection_path != root else None


def grader(config: pytest.Config) -> Grader | None:
    """The active grader of this process, if there is one."""
    return config.pluginmanager.get_plugin("conformance-grader")
