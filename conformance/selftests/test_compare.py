"""Two runs side by side: each kind of difference, and unlike runs refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.errors import UsageError
from conformance.report.compare import as_markdown, compare_documents
from conformance.selftests.conftest import Ran
from conformance.selftests.test_report import _result, document


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("pass", "fail", "regression"),
        ("pass", "crash", "regression"),
        ("pass", "unsupported", "regression"),
        ("expected-fail", "fail", "regression"),
        ("fail", "pass", "fixed"),
        ("unsupported", "pass", "fixed"),
        ("fail", "timeout", "still-failing"),
        ("pass", "inconclusive", "inconclusive"),
        ("unsupported", "fail", "other"),
        ("pass", "pass", None),
        ("pass", "expected-fail", None),
    ],
)
def test_each_kind_of_difference(before: str, after: str, kind: str | None) -> None:
    comparison = compare_documents(
        document(_result("a/b", before)), document(_result("a/b", after))
    )
    assert [name for name, rows in comparison.kinds.items() if rows] == ([kind] if kind else [])
    assert comparison.regressed == (kind == "regression")


def test_clauses_of_one_run_only() -> None:
    comparison = compare_documents(
        document(_result("a/b", "pass")), document(_result("a/c", "fail"))
    )
    assert len(comparison.kinds["gone"]) == len(comparison.kinds["new"]) == 1
    assert not comparison.regressed


def test_unlike_runs_are_refused_unless_forced() -> None:
    base, new = document(), document()
    new["environment"] = new["environment"] | {"torch": "9"}
    with pytest.raises(UsageError, match="torch: 2 and 9"):
        compare_documents(base, new)
    assert compare_documents(base, new, force=True).regressed is False


def test_text_of_a_candidate_is_escaped() -> None:
    comparison = compare_documents(
        document(_result("a/b", "pass")),
        document(_result("a/b", "fail", message="<script>|\n")),
    )
    assert "<script>" not in as_markdown(comparison)


def test_the_command_exits_1_on_a_regression(command: Callable[..., Ran], tmp_path: Path) -> None:
    for name, verdict in (("base", "pass"), ("new", "fail")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(document(_result("a/b", verdict))))
    ran = command("compare", "base", "new", "--format", "json")
    assert ran.code == 1
    assert json.loads(ran.out)["regression"][0][0] == "a/b"
    assert command("compare", "base", "base").code == 0
    assert command("compare", "base", "absent").code == 2
