"""The JSON document of a run: the schema, writing, reading.

Everything else (terminal, Markdown, JUnit) is rendered from the document and from nothing else.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastjsonschema

from conformance._files import write_atomically
from conformance.errors import ConformanceError, UsageError

SCHEMA_VERSION = 1
FILE = "report.json"


@functools.cache
def _validator() -> Callable[[Any], Any]:
    path = Path(__file__).resolve().parent / "schema" / f"report-{SCHEMA_VERSION}.json"
    validate: Callable[[Any], Any] = fastjsonschema.compile(
        json.loads(path.read_text(encoding="utf-8"))
    )
    return validate


def write_report(document: dict[str, Any], directory: Path) -> Path:
    """Validate ``document`` and write it as ``directory/report.json``; the old file stays whole
    until the new one is."""
    try:
        _validator()(document)
    except fastjsonschema.JsonSchemaValueException as problem:
        raise ConformanceError(f"the run document is not valid: {problem.message}") from problem
    path = directory / FILE
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path


def read_report(path: Path) -> dict[str, Any]:
    """Read and validate a run document, given the file or the folder that holds it.

    Raises UsageError, with one line that names what is wrong and where.
    """
    if path.is_dir():
        path = path / FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: cannot be read: {problem}") from None
    except json.JSONDecodeError as problem:
        raise UsageError(
            f"{path}: damaged at line {problem.lineno}, column {problem.colno}: {problem.msg}"
        ) from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise UsageError(f"{path}: not a run document (no schema_version)")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: schema version {version}, this suite reads version {SCHEMA_VERSION}"
        )
    try:
        _validator()(document)
    except fastjsonschema.JsonSchemaValueException as problem:
        raise UsageError(f"{path}: {problem.message}") from None
    return document
