"""One-file adapters with one known fault each: the run exits 1 and names the right clauses, and
no clause of an unrelated part fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.selftests.conftest import CANDIDATES, Ran

Command = Callable[..., Ran]

_BAD = ("fail", "crash", "timeout", "error", "inconclusive")


@pytest.mark.parametrize(
    ("name", "graded", "caught_by", "clean"),
    [
        (
            "no_checkpointing",
            ("calling/*", "cost/*"),
            {"calling/runs-at-once", "cost/intermediates-not-kept", "cost/forward-bytes"},
            None,  # a great many clauses notice
        ),
        (
            "ignores_preserve_rng_state",
            ("rng/*", "early-stop/*"),
            {"rng/false-uses-current-stream"},
            "early-stop/",
        ),
        (
            "never_stops_early",
            ("early-stop/*", "rng/*"),
            {"early-stop/needed-only", "early-stop/default"},
            "rng/",
        ),
        (
            "drops_keyword_arguments",
            ("calling/*", "early-stop/*"),
            {"calling/keywords", "calling/keyword-tensors"},
            "early-stop/",
        ),
        (
            "calls_policy_in_recomputation",
            ("selective/*", "early-stop/*"),
            {"selective/policy-forward-only", "selective/is-recompute-false"},
            "early-stop/",
        ),
    ],
)
def test_a_faulty_candidate_is_named(
    command: Command, name: str, graded: tuple[str, ...], caught_by: set[str], clean: str | None
) -> None:
    options = [part for pattern in graded for part in ("--clauses", pattern)]
    ran = command(
        "run", str(CANDIDATES / f"{name}.py"), "--budget", "quick", "--expectations", "none",
        *options,
    )  # fmt: skip
    assert ran.code == 1, ran.out + ran.err
    failed = ran.with_verdict(*_BAD)
    assert caught_by <= failed, failed
    if clean is not None:
        assert {clause for clause in failed if clause.startswith(clean)} == set()


def test_a_candidate_that_spoils_the_process_harms_no_other_verdict(command: Command) -> None:
    ran = command(
        "run", str(CANDIDATES / "spoils_the_process.py"), "--budget", "quick", "--workers", "1",
        "--clauses", "debug/*", "--clauses", "early-stop/*", "--clauses", "determinism/*",
        "--expectations", "none",
    )  # fmt: skip
    assert ran.code == 1, ran.out + ran.err
    failed = ran.with_verdict(*_BAD)
    assert any(clause.startswith("debug/") for clause in failed)
    assert {clause for clause in failed if not clause.startswith("debug/")} == set()
    results = {row["clause"]: row for row in ran.report["results"]}
    messages = " ".join(results[clause]["message"] for clause in failed)
    assert "KeyboardInterrupt" in messages
    assert "left" in messages
    assert "default_dtype" in messages
    assert ran.report["complete"] is True
