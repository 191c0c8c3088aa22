"""Run documents: what is written reads back, what is damaged is named, candidates are escaped."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from conformance.errors import ConformanceError, UsageError
from conformance.report.document import read_report, write_report
from conformance.report.junit import render_junit
from conformance.report.markdown import render_markdown
from conformance.runner.verdicts import conclude, profile_status, summarise
from conformance.specification import load_specification


def _result(clause: str, verdict: str, level: str = "MUST", **more: Any) -> dict[str, Any]:
    return {
        "clause": clause, "level": level, "profile": "core", "verdict": verdict, "silent": False,
        "message": "", "examples": 1, "seconds": 0.5, "repro": None,
    } | more  # fmt: skip


def document(*results: dict[str, Any]) -> dict[str, Any]:
    rows = list(results) or [_result("a/b", "pass")]
    verdict, code = conclude(rows, level="must", declared=())
    return {
        "schema_version": 1, "suite": {"version": "1"},
        "spec": {"edition": "2.14", "digest": "0" * 16},
        "candidate": {
            "name": "<script>alert(1)</script>|x", "location": "x", "version": None,
            "capabilities": {"profiles": {"core": None}, "variants": {}, "declared": {}},
        },
        "environment": {"python": "3", "torch": "2", "platform": "p", "device": "cpu"},
        "settings": {"budget": "quick", "seed": 0, "workers": 1, "shard": None},
        "started": "t", "finished": "t", "complete": True,
        "summary": summarise(rows) | {"verdict": verdict, "exit_code": code},
        "results": rows,
    }  # fmt: skip


def test_a_document_reads_back(tmp_path: Path) -> None:
    written = document()
    write_report(written, tmp_path)
    assert read_report(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_an_invalid_document_is_not_written(tmp_path: Path) -> None:
    wrong = document()
    wrong["results"][0]["verdict"] = "fine"
    with pytest.raises(ConformanceError, match="verdict"):
        write_report(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _damage(text: str) -> dict[str, str]:
    whole = json.loads(text)
    newer = copy.deepcopy(whole) | {"schema_version": 99}
    missing = {key: value for key, value in whole.items() if key != "results"}
    return {
        "truncated": text[: len(text) // 2],
        "foreign": '{"hello": 1}',
        "list": "[]",
        "newer": json.dumps(newer),
        "missing": json.dumps(missing),
    }


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("truncated", "damaged at line"),
        ("foreign", "not a run document"),
        ("list", "not a run document"),
        ("newer", "version 99"),
        ("missing", "results"),
    ],
)
def test_a_damaged_document_is_named(tmp_path: Path, kind: str, word: str) -> None:
    path = write_report(document(), tmp_path)
    path.write_text(_damage(path.read_text())[kind])
    with pytest.raises(UsageError, match=word) as problem:
        read_report(path)
    assert "\n" not in str(problem.value)


def test_markdown_holds_no_markup_of_a_candidate() -> None:
    message = "<img src=x> | `code`\nnext"
    text = render_markdown(document(_result("a/b", "fail", message=message)), load_specification())
    assert "<script>" not in text
    assert "<img" not in text
    assert "a/b" in text


def test_junit_is_xml_with_every_clause() -> None:
    rows = [
        _result("a/b", "pass"),
        _result("a/c", "fail", message="bad \x00 byte"),
        _result("a/d", "unsupported"),
        _result("a/e", "error"),
    ]
    root = ElementTree.fromstring(render_junit(document(*rows)))
    assert {case.get("name") for case in root.iter("testcase")} == {"a/b", "a/c", "a/d", "a/e"}
    assert (root.get("failures"), root.get("errors"), root.get("skipped")) == ("1", "1", "1")


@pytest.mark.parametrize(
    ("rows", "verdict", "code"),
    [
        ([("pass", "MUST")], "conforms", 0),
        ([("expected-fail", "MUST")], "conforms", 0),
        ([("pass", "MUST"), ("fail", "SHOULD")], "conforms", 0),
        ([("pass", "MUST"), ("fail", "MUST")], "does-not-conform", 1),
        ([("unexpected-pass", "MUST")], "does-not-conform", 1),
        ([("unsupported", "MUST")], "does-not-conform", 1),
        ([("pass", "MUST"), ("not-run", "MUST")], "incomplete", 1),
        ([("crash", "MUST"), ("error", "MAY")], "does-not-conform", 1),
        ([("pass", "MUST"), ("error", "MAY")], "suite-error", 4),
    ],
)
def test_what_the_whole_becomes(rows: list[tuple[str, str]], verdict: str, code: int) -> None:
    results = [_result(f"a/{i}", v, level) for i, (v, level) in enumerate(rows)]
    assert conclude(results, level="must", declared=()) == (verdict, code)


def test_a_declared_gap_makes_the_whole_partial() -> None:
    results = [
        _result("a/b", "pass"),
        _result("a/c", "unsupported", message="declared unsupported: not written yet"),
    ]
    assert conclude(results, level="must", declared=["x"]) == ("partial", 0)


def test_levels_are_never_mixed() -> None:
    rows = [_result("a/b", "pass"), _result("a/c", "fail", "SHOULD"), _result("a/d", "pass", "MAY")]
    assert summarise(rows)["levels"] == {
        "must": {"pass": 1}, "should": {"fail": 1}, "may": {"pass": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["pass", "expected-fail", "not-applicable"], "conforms"),
        (["pass", "fail"], "partial"),
        (["unsupported"], "unsupported"),
        (["pass", "unsupported"], "partial"),
        (["not-run"], "not-run"),
        (["not-applicable"], "not-run"),
    ],
)
def test_status_of_a_profile(verdicts: list[str], status: str) -> None:
    assert profile_status([{"verdict": verdict} for verdict in verdicts]) == status
