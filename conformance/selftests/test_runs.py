"""Runs that are killed, interrupted, resumed, divided and joined."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from conformance.runner.merge import merge_documents
from conformance.runner.sharding import shard_of
from conformance.selftests.conftest import Ran
from conformance.specification import load_specification

Command = Callable[..., Ran]

_SELECTION = ("--clauses", "early-stop/*", "--budget", "quick", "--seed", "3")


def _timeless(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what differs from run to run."""
    kept = json.loads(json.dumps(document))
    for key in ("started", "finished"):
        kept.pop(key)
    for result in kept["results"]:
        result.pop("seconds")
        for test in result["tests"]:
            test.pop("seconds")
    return dict(kept)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of one uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    _start(out, *_SELECTION).wait(timeout=300)
    document: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert document["complete"] is True
    return document


def _start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "conformance",
            "run",
            "torch.utils.checkpoint",
            *arguments,
            "--out",
            str(out),
            "--workers",
            "1",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_results(out: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = out / "results.jsonl"
        if path.is_file() and path.read_text().count("\n") >= number:
            return
        time.sleep(0.05)
    raise AssertionError("no results came")


def test_a_killed_run_is_resumed_to_the_same_report(
    command: Command, tmp_path: Path, whole: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    process = _start(out, *_SELECTION)
    _wait_for_results(out, 3)
    process.kill()
    process.communicate(timeout=60)
    assert not (out / "report.json").exists()
    path = out / "results.jsonl"
    done = path.read_text().count("\n")
    path.write_text(path.read_text() + '{"clause": "early-st')  # cut off while being written
    ran = command("run", "--resume", str(out))
    assert ran.code == 0, ran.out + ran.err
    resumed = json.loads((out / "report.json").read_text())
    assert resumed["complete"] is True
    assert _timeless(resumed) == _timeless(whole)
    assert path.read_text().count("\n") > done


def test_ctrl_c_ends_soon_with_what_is_known(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = _start(out, *_SELECTION, "--budget", "deep")
    _wait_for_results(out, 3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    # Two seconds are promised; the rest is for machines that are busy with other tests.
    assert time.monotonic() - began < 10
    document = json.loads((out / "report.json").read_text())
    assert document["complete"] is False
    verdicts = {result["verdict"] for result in document["results"]}
    assert "not-run" in verdicts
    assert "pass" in verdicts
    assert "Traceback" not in output


def test_nothing_to_resume(command: Command, tmp_path: Path) -> None:
    ran = command("run", "--resume", str(tmp_path / "nowhere"))
    assert ran.code == 2
    assert "no run to resume" in ran.err
    assert not (tmp_path / "nowhere").exists()


def test_a_second_run_into_the_same_folder_is_refused(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "conformance-report"
    out.mkdir()
    with FileLock(out / ".lock"):
        ran = command("run", "torch.utils.checkpoint", *_SELECTION)
    assert ran.code == 2
    assert "another run is writing" in ran.err


def test_shards_join_to_the_whole(command: Command, whole: dict[str, Any], tmp_path: Path) -> None:
    folders = []
    for index in (1, 2):
        folders.append(str(tmp_path / f"shard{index}"))
        ran = command(
            "run", "torch.utils.checkpoint", *_SELECTION, "--workers", "1",
            "--shard", f"{index}/2", "--out", folders[-1],
        )  # fmt: skip
        assert ran.code == 0, ran.out + ran.err
    assert command("merge", *folders).code == 0
    merged = json.loads((tmp_path / "conformance-report" / "report.json").read_text())
    assert _timeless(merged) == _timeless(whole)
    alone = command("merge", folders[0])
    assert alone.code == 2
    assert "2/2 is missing" in alone.err
    twice = command("merge", folders[0], folders[0])
    assert twice.code == 2
    assert "twice" in twice.err


def test_unlike_shards_are_refused(whole: dict[str, Any]) -> None:
    from conformance.errors import UsageError

    one = whole | {"settings": whole["settings"] | {"shard": "1/2"}}
    other = whole | {"settings": whole["settings"] | {"shard": "2/2", "seed": 9}}
    with pytest.raises(UsageError, match="seed"):
        merge_documents([one, other], load_specification())
    with pytest.raises(UsageError, match="no shard"):
        merge_documents([whole], load_specification())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_divide_every_clause_once(count: int) -> None:
    clauses = list(load_specification().clauses)
    parts = [shard_of(clauses, index, count) for index in range(1, count + 1)]
    together = [clause.id for part in parts for clause in part]
    assert sorted(together) == sorted(clause.id for clause in clauses)
    assert len(together) == len(set(together))
