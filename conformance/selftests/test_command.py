"""The command's promises about bad input: one line, the right exit code, nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.selftests.conftest import Ran

Command = Callable[..., Ran]


def _one_line(ran: Ran, *words: str) -> None:
    lines = [line for line in ran.err.splitlines() if line.strip()]
    assert len(lines) == 1, ran.err
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = (", ("SyntaxError",)),
        ("raise ValueError('boom')", ("ValueError", "boom")),
        ("raise SystemExit(9)", ("SystemExit",)),
        ("raise KeyboardInterrupt('no')", ("KeyboardInterrupt",)),
        ("import os; os._exit(5)", ("exit code 5",)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ("SIGSEGV",)),
        ("import nonexistent_module_xyz", ("nonexistent_module_xyz",)),
        ("something_else = 1", ("none of the public names",)),
        ("UNSUPPORTED = ['selective']\ndef checkpoint(f, *a, **k): ...", ("UNSUPPORTED",)),
    ],
)
def test_a_candidate_that_does_not_load_ends_in_3(
    command: Command, tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(content)
    ran = command("run", "mine.py")
    assert ran.code == 3
    _one_line(ran, "mine.py", *words)
    assert not (ran.directory / "report.json").exists()


def test_a_missing_module_ends_in_3(command: Command) -> None:
    ran = command("run", "no.such.module")
    assert ran.code == 3
    _one_line(ran, "no.such.module")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--clauses", "nothing/*"), ("nothing/*",)),
        (("--profiles", "nothing"), ("nothing",)),
        (("--expectations", "absent.toml"), ("absent.toml",)),
        (("--clauses", "early-stop/*", "--profiles", "rng"), ("matches no clause",)),
        (("--out", "/dev/null/x"), ("cannot write",)),
    ],
)
def test_wrong_settings_end_in_2(
    command: Command, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ran = command("run", "torch.utils.checkpoint", *arguments)
    assert ran.code == 2
    _one_line(ran, *words)
    assert not (ran.directory / "report.json").exists()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("clause = 'no/such'\nreason = 'r'", ("no/such",)),
        ("clause = 'early-stop/needed-only'", ("no reason",)),
        ("clause = 'early-stop/needed-only'\nreason = 'r'\nexpires = 2020-01-01", ("expired",)),
        ("clause = 'early-stop/needed-only'\nreason = 'r'\nother = 1", ("other",)),
    ],
)
def test_a_wrong_expectation_ends_in_2(
    command: Command, tmp_path: Path, record: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "known.toml").write_text(f"[[record]]\n{record}\n")
    ran = command("run", "torch.utils.checkpoint", "--expectations", "known.toml")
    assert ran.code == 2
    _one_line(ran, "known.toml", *words)


def test_an_unknown_edition_ends_in_2(command: Command) -> None:
    ran = command("run", "torch.utils.checkpoint", "--edition", "1.0")
    assert ran.code == 2
    assert "1.0" in ran.err
    assert "Traceback" not in ran.err


def test_debug_shows_where(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ValueError('boom')")
    assert "Traceback" in command("--debug", "run", "mine.py").err


def test_show_suggests_the_nearest_clause(command: Command) -> None:
    ran = command("show", "early-stop/needed-onyl")
    assert ran.code == 2
    _one_line(ran, "early-stop/needed-only")


def test_show_tells_text_tests_and_place(command: Command) -> None:
    ran = command("show", "early-stop/needed-only")
    assert ran.code == 0
    assert "spec/06-early-stop.md" in ran.out
    assert "test: conformance/tests/test_early_stop.py" in ran.out


def test_smoke_accepts_torch_and_refuses_a_candidate_that_does_nothing(
    command: Command, tmp_path: Path
) -> None:
    assert command("smoke", "torch.utils.checkpoint:checkpoint").code == 1  # much is undeclared
    (tmp_path / "mine.py").write_text(
        "from conformance.selftests.candidates.no_checkpointing import *"
    )
    ran = command("smoke", "mine.py")
    assert ran.code == 1
    assert "nothing is checkpointed" in ran.out
