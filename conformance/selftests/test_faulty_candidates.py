"""One-file adapters with one known fault each: the run exits 1 and names the right clauses, and
no clause of an unrelated part fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.selftests.conftest import CANDIDATES, Ran

Command = Callable[..., Ran]

_BAD = ("fail", "crash", "timeout", "error", "inconclusive")


@pytest.mark.parametrize(
    ("name", "profiles", "expected", "allowed_prefixes"),
    [
        (
            "no_checkpointing",
            ("core", "cost"),
            {"cost/intermediates-not-kept", "cost/one-recomputation-per-backward"},
            ("",),
        ),
        (
            "ignores_preserve_rng_state",
            ("rng", "early-stop"),
            {"rng/false-uses-current-stream"},
            ("rng/", "programs/"),
        ),
        (
            "never_stops_early",
            ("early-stop", "rng"),
            {"early-stop/needed-only", "early-stop/default"},
            ("early-stop/", "rng/", "programs/"),
        ),
        (
            "drops_keyword_arguments",
            ("core", "early-stop"),
            {"calling/keywords", "calling/keyword-tensors"},
            # Whatever hands something over by keyword notices; nothing else does.
            ("calling/", "structures/", "errors/", "nonreentrant/", "backward/", "programs/"),
        ),
        (
            "calls_policy_in_recomputation",
            ("selective", "early-stop"),
            {"selective/policy-forward-only", "selective/is-recompute-false"},
            ("selective/", "policy/", "programs/"),
        ),
    ],
)
def test_a_faulty_candidate_is_named(
    command: Command,
    name: str,
    profiles: tuple[str, ...],
    expected: set[str],
    allowed_prefixes: tuple[str, ...],
) -> None:
    options = [part for profile in profiles for part in ("--profiles", profile)]
    ran = command(
        "run", str(CANDIDATES / f"{name}.py"), "--budget", "quick", "--expectations", "none",
        *options,
    )  # fmt: skip
    failed = ran.with_verdict(*_BAD)
    assert ran.code == 1, ran.out + ran.err
    assert expected <= failed, failed
    strangers = {clause for clause in failed if not clause.startswith(allowed_prefixes)}
    assert not strangers


def test_a_candidate_that_spoils_the_process_harms_no_other_verdict(command: Command) -> None:
    ran = command(
        "run", str(CANDIDATES / "spoils_the_process.py"), "--budget", "quick", "--workers", "1",
        "--profiles", "debug", "--profiles", "early-stop", "--profiles", "determinism",
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
