"""Finding, loading and probing candidates."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.candidate import NotProvided, load_candidate
from conformance.candidate.probe import probe
from conformance.errors import CandidateNotLoaded


@pytest.mark.parametrize(
    "spelling", ["torch.utils.checkpoint", "torch.utils:checkpoint", "torch:utils.checkpoint"]
)
def test_spellings_of_a_module(spelling: str) -> None:
    candidate = load_candidate(spelling)
    assert candidate.has("checkpoint", "GraphExecGroup")


@pytest.mark.parametrize("suffix", ["", ":holder", ":holder.checkpoint"])
def test_spellings_of_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "adapter.py"
    path.write_text(
        "class holder:\n    @staticmethod\n    def checkpoint(f, *a, **k): return f(*a)\n"
        "checkpoint = holder.checkpoint\n"
    )
    candidate = load_candidate(f"{path}{suffix}")
    assert candidate.checkpoint(lambda x: x + 1, 1) == 2


def test_a_missing_name_is_not_provided(tmp_path: Path) -> None:
    path = tmp_path / "adapter.py"
    path.write_text("def checkpoint(f, *a, **k): return f(*a)\n")
    candidate = load_candidate(str(path))
    with pytest.raises(NotProvided):
        _ = candidate.GraphExecGroup
    with pytest.raises(AttributeError):
        _ = candidate.no_public_name


@pytest.mark.parametrize("spelling", ["", "  ", "no.such", "torch.utils.checkpoint:nothing"])
def test_wrong_spellings(spelling: str) -> None:
    with pytest.raises(CandidateNotLoaded):
        load_candidate(spelling)


def test_torch_has_every_profile_of_its_edition() -> None:
    found = probe(load_candidate("torch.utils.checkpoint"))
    missing = {name for name, reason in found.profiles.items() if reason is not None}
    assert missing <= {"decorator", "hooks"}  # these two came with 2.14
    assert set(found.variants.values()) == {None}


def test_a_bare_function_lacks_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "adapter.py"
    path.write_text(
        "import torch.utils.checkpoint as t\n"
        "UNSUPPORTED = {'reentrant': 'not written'}\n"
        "def checkpoint(function, *args, use_reentrant=False):\n"
        "    if use_reentrant: raise NotImplementedError\n"
        "    return t.checkpoint(function, *args, use_reentrant=False)\n"
    )
    found = probe(load_candidate(str(path)))
    assert found.missing("core", "nonreentrant") is None
    assert found.missing("reentrant") == "declared unsupported: not written"
    assert found.missing("core", "reentrant") is not None
    for profile in ("decorator", "rng", "selective", "sequential", "graph-exec-group"):
        assert found.missing(profile) is not None
