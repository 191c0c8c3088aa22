"""The differential of two candidates, as a user runs it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from conformance.programs.command import differential

TORCH = "torch.utils.checkpoint"


def test_a_candidate_does_not_differ_from_itself() -> None:
    ended = CliRunner().invoke(
        differential, [TORCH, TORCH, "--examples", "20", "--programs", "nested"]
    )
    assert ended.exit_code == 0, ended.output
    assert "20 programs" in ended.output
    assert "0 differences" in ended.output


def test_a_difference_is_shown_with_both_traces(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "from torch.utils.checkpoint import *\n"
        "from torch.utils.checkpoint import checkpoint as right\n"
        "def checkpoint(function, *args, **options):\n"
        "    return right(function, *args, **{**options, 'preserve_rng_state': False})\n"
    )
    out = tmp_path / "out"
    ended = CliRunner().invoke(
        differential,
        [TORCH, str(other), "--examples", "60", "--programs", "random", "--out", str(out)],
    )
    assert ended.exit_code == 1, ended.output
    assert f"leaves the plain run: {other}" in ended.output
    first = out / "01"
    assert "region_1" in (first / "program.py").read_text()
    assert (first / "trace_A.txt").read_text() != (first / "trace_B.txt").read_text()


def test_an_unknown_family_is_refused_with_the_list() -> None:
    ended = CliRunner().invoke(differential, [TORCH, TORCH, "--programs", "nonsense"])
    assert ended.exit_code != 0
    assert "nested" in str(ended.exception)
