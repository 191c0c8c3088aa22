"""Known faults are strict: stale, misspelt and reasonless records are refused."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from conformance.errors import UsageError
from conformance.expectations import load_expectations
from conformance.runner.verdicts import clause_result
from conformance.specification import load_specification

_CLAUSE = load_specification().clauses[0]


def _load(tmp_path: Path, text: str, version: str | None = "2.14.1+cu130") -> list[object]:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return list(
        load_expectations(
            str(path), "x", version, known=["a/b", "c/d"], today=datetime.date(2026, 11, 30)
        )
    )


def test_records_are_chosen_by_version(tmp_path: Path) -> None:
    text = "[[record]]\nclause='a/b'\nreason='r'\nversions='>=2.14,<2.15'\n"
    assert len(_load(tmp_path, text, "2.14.1+cu130")) == 1
    assert _load(tmp_path, text, "2.15.0") == []
    assert _load(tmp_path, text, None) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[record]]\nclause='x/y'\nreason='r'", "no clause"),
        ("[[record]]\nclause='a/b'", "no reason"),
        ("[[record]]\nclause='a/b'\nreason='  '", "no reason"),
        ("[[record]]\nclause='a/b'\nreason='r'\nexpires=2026-11-29", "expired"),
        ("[[record]]\nclause='a/b'\nreason='r'\nexpires='soon'", "date"),
        ("[[record]]\nclause='a/b'\nreason='r'\nversions='??'", "specifier"),
        ("[[record]]\nclause='a/b'\nreason='r'\n" * 2, "twice"),
        ("record = 3", "list of tables"),
        ("nonsense", "not TOML"),
    ],
)
def test_malformed_records_are_refused(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        _load(tmp_path, text)


def test_a_record_is_valid_on_its_last_day(tmp_path: Path) -> None:
    assert _load(tmp_path, "[[record]]\nclause='a/b'\nreason='r'\nexpires=2026-11-30")


def _result(tmp_path: Path, verdict: str, exception: str | None, record: str) -> dict[str, object]:
    path = tmp_path / "known.toml"
    path.write_text(f"[[record]]\nclause='{_CLAUSE.id}'\nreason='known'\n{record}")
    (expectation,) = load_expectations(str(path), "x", "1", known=[_CLAUSE.id])
    finding = {
        "test": "t", "verdict": verdict, "message": "m", "silent": False, "examples": 1,
        "seconds": 0.1, "exception": exception,
    }  # fmt: skip
    return clause_result(
        _CLAUSE, [finding], edition="2.14", device="cpu", missing=None,
        expectation=expectation, complete=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "exception", "record", "becomes"),
    [
        ("fail", "RuntimeError", "exception='RuntimeError'", "expected-fail"),
        ("fail", "ValueError", "exception='RuntimeError'", "fail"),
        ("fail", "ValueError", "", "expected-fail"),
        ("crash", None, "", "expected-fail"),
        ("pass", None, "", "unexpected-pass"),
        ("error", "TypeError", "", "error"),
        ("inconclusive", None, "", "inconclusive"),
    ],
)
def test_what_a_record_makes_of_a_verdict(
    tmp_path: Path, verdict: str, exception: str | None, record: str, becomes: str
) -> None:
    assert _result(tmp_path, verdict, exception, record)["verdict"] == becomes


def test_the_shipped_records_are_in_force() -> None:
    known = load_specification().by_id
    assert load_expectations("auto", "torch.utils.checkpoint", "2.14.1", known=known)
