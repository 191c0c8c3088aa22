"""Candidates that crash, hang, leak, print and lie: the run ends, its report is complete and
true, and no other clause's verdict changes.

One run holds all of it: a candidate that does one terrible thing in each of a number of tests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from conformance.selftests.conftest import CANDIDATES, Ran
from conformance.specification.tests_index import TestCase, index_tests

Command = Callable[..., Ran]

# What the candidate does, the verdict that its clause must get, and words of the message.
_MISBEHAVIOURS = {
    "segfault": ("crash", "died"),
    "os_exit": ("crash", "died"),
    "system_exit": ("fail", "SystemExit"),
    "keyboard_interrupt": ("fail", "KeyboardInterrupt"),
    "base_exception": ("fail", "BaseException"),
    "recurse_for_ever": ("fail", "RecursionError"),
    "sleep_for_ever": ("timeout", "Timeout"),
    "deadlock": ("timeout", "Timeout"),
    "hang_in_native_code": ("timeout", "nothing could interrupt"),
    "exhaust_memory": ("fail", ""),
    "close_stdout": ("pass", ""),
    "replace_stdout": ("pass", ""),
    "monkeypatch_torch": ("fail", "left behind: torch.Tensor.backward"),
    "seed_and_leave_state": ("fail", "left behind: autocast"),
    "endless_thread": ("pass", "a thread that does not end"),
    "spawn_children": ("pass", "a child process"),
}


def _hosts() -> list[TestCase]:
    """Tests of chapter 6 that are the only test of their clause."""
    cases = [case for case in index_tests() if case.file == "test_early_stop.py"]
    times = Counter(case.clause for case in cases)
    return [case for case in cases if times[case.clause] == 1]


def test_misbehaviour_changes_no_other_verdict(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = dict(zip(_MISBEHAVIOURS, _hosts(), strict=False))
    chosen = {host.name: misbehaviour for misbehaviour, host in hosts.items()}
    assert len(chosen) >= 10, "too few clauses to play host"
    monkeypatch.setenv("CONFORMANCE_MISBEHAVIOURS", json.dumps(chosen))
    ran = command(
        "run", str(CANDIDATES / "misbehaves.py"), "--budget", "quick", "--workers", "2",
        "--time-limit", "8", "--memory-limit", "3000", "--expectations", "none",
        "--clauses", "early-stop/*", "--clauses", "determinism/*",
    )  # fmt: skip
    assert ran.report["complete"] is True
    assert ran.code == 1, ran.out + ran.err
    results = {row["clause"]: row for row in ran.report["results"]}
    wrong = {}
    for misbehaviour, host in hosts.items():
        verdict, words = _MISBEHAVIOURS[misbehaviour]
        result = results.pop(host.clause)
        texts = " ".join(test["message"] for test in result["tests"])
        if result["verdict"] != verdict or words not in texts:
            wrong[misbehaviour] = result["verdict"], texts
    assert wrong == {}
    assert {c: r["verdict"] for c, r in results.items() if r["verdict"] != "pass"} == {}
