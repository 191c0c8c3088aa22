"""Which test grades which clause, read from the test files' source without importing them.

The command, the traceability table and the xdist controller use it where torch must not load.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import SpecificationError

EXAMPLES_FILE = "test_examples.py"


@dataclass(frozen=True)
class TestCase:
    """A test function: its file (a name inside ``conformance/tests``), name, clause and line."""

    file: str
    name: str
    clause: str
    line: int
    question: str

    __test__ = False  # not a test class, whatever pytest thinks of its name


def tests_dir() -> Path:
    """The folder of the suite's tests."""
    return Path(__file__).resolve().parent.parent / "tests"


def index_tests(directory: Path | None = None) -> list[TestCase]:
    """Every test function of the suite, in file order.

    Raises SpecificationError for a test without a clause: it would grade nothing.
    """
    found: list[TestCase] = []
    for path in sorted((directory or tests_dir()).glob("test_*.py")):
        if path.name == EXAMPLES_FILE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(_case(path, node))
    return sorted(found, key=lambda case: (case.file, case.line))


def _case(path: Path, node: ast.FunctionDef) -> TestCase:
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and isinstance(decorator.func, ast.Name)
            and decorator.func.id == "clause"
            and decorator.args
            and isinstance(decorator.args[0], ast.Constant)
        ):
            question = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            if not question:
                raise SpecificationError(
                    f"{path.name}:{node.lineno}: {node.name} has no docstring: what does it ask?"
                )
            return TestCase(
                path.name, node.name, str(decorator.args[0].value), node.lineno, question
            )
    raise SpecificationError(f"{path.name}:{node.lineno}: {node.name} names no clause")
