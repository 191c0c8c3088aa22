"""The examples of the specification, each run alone against the candidate.

Sybil parses the chapters and runs the code, so that a traceback points into the chapter.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from conformance.candidate import Candidate
from conformance.specification import Clause, load_specification
from conformance.testing import reached

_SPECIFICATION = load_specification()
_WITH_EXAMPLE = [clause for clause in _SPECIFICATION.clauses if clause.examples]


def _cases() -> list[object]:
    return [
        pytest.param(clause, id=clause.id, marks=pytest.mark.clause(clause.id))
        for clause in _WITH_EXAMPLE
    ]


class _CandidateModule(ModuleType):
    """What ``from candidate import …`` imports from."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__("candidate")
        self._candidate = candidate

    def __getattr__(self, name: str) -> object:
        return getattr(self._candidate, name)


@pytest.mark.parametrize("example_of", _cases())
def test_example(ckpt: Candidate, example_of: Clause, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the clause runs to its end."""
    monkeypatch.setitem(sys.modules, "candidate", _CandidateModule(ckpt))
    path = _SPECIFICATION.directory / example_of.chapter
    document = Document.parse(str(path), PythonCodeBlockParser())
    lines = {example.line for example in example_of.examples}
    for example in document.examples():
        # Sybil counts from the fence, the specification from the first line of code.
        if example.line + 1 in lines:
            example.evaluate()
            lines.discard(example.line + 1)
    assert not lines, f"no example found at line {sorted(lines)} of {path.name}"
    assert any("assert" in example.source for example in example_of.examples), (
        "an example without an assertion shows nothing"
    )
    reached()
