"""Reads expectation files and refuses records that have gone stale.

A file is TOML:

    candidate = "torch.utils.checkpoint"      # shipped files: whom the records are for
    [[record]]
    clause = "autocast/shared-weight"         # exactly one clause id
    versions = ">=2.13,<2.15"                 # of the candidate; every version if left out
    reason = "expected …; observed …"         # required
    link = "https://…"                        # optional
    expires = 2027-12-31                      # optional; from the next day on it is an error
    exception = "RuntimeError"                # optional; another kind of failure does not match
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance._toml import tomllib
from conformance.errors import UsageError

_KEYS = {"clause", "versions", "reason", "link", "expires", "exception"}


@dataclass(frozen=True)
class Expectation:
    """One known fault. ``exception`` is the type name that the failure must have, if given."""

    clause: str
    reason: str
    link: str | None = None
    expires: datetime.date | None = None
    exception: str | None = None
    origin: str = ""


def shipped_dir() -> Path:
    """The folder of the records shipped with the suite, one file per candidate."""
    return Path(__file__).resolve().parent / "data"


def load_expectations(
    choice: str,
    candidate: str,
    version: str | None,
    *,
    known: Iterable[str],
    today: datetime.date | None = None,
) -> list[Expectation]:
    """The records in force. ``choice`` is ``auto`` (shipped ones for this candidate and version),
    ``none``, or a file.

    Raises UsageError for a file or record that is malformed, names an unknown clause, has no
    reason or has expired.
    """
    if choice == "none":
        return []
    known = set(known)
    if choice != "auto":
        path = Path(choice)
        if not path.is_file():
            raise UsageError(f"no such expectations file: {choice}")
        return _records(_parse(path), path.name, version, known, today)
    found: list[Expectation] = []
    for path in sorted(shipped_dir().glob("*.toml")):
        data = _parse(path)
        if data.get("candidate") == candidate:
            found.extend(_records(data, path.name, version, known, today))
    return found


def _parse(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return data
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path.name} is not TOML: {problem}") from None


def _records(
    data: dict[str, Any],
    origin: str,
    version: str | None,
    known: set[str],
    today: datetime.date | None,
) -> list[Expectation]:
    today = today or datetime.date.today()
    rows = data.get("record", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{origin}: [[record]] must be a list of tables")
    kept: dict[str, Expectation] = {}
    for number, row in enumerate(rows, 1):

        def fail(problem: str, number: int = number) -> UsageError:
            return UsageError(f"{origin}: record {number}: {problem}")

        if unknown := set(row) - _KEYS:
            raise fail(f"unknown key {sorted(unknown)[0]!r}")
        clause = row.get("clause")
        if clause not in known:
            raise fail(f"{clause!r} is no clause")
        if not isinstance(row.get("reason"), str) or not row["reason"].strip():
            raise fail(f"{clause} has no reason")
        expires = row.get("expires")
        if expires is not None and not isinstance(expires, datetime.date):
            raise fail("expires must be a date, such as 2027-12-31")
        if not _in_force(row.get("versions"), version, fail):
            continue
        if expires is not None and expires < today:
            raise fail(f"{clause} expired on {expires}")
        if clause in kept:
            raise fail(f"{clause} is recorded twice")
        kept[clause] = Expectation(
            clause, row["reason"].strip(), row.get("link"), expires, row.get("exception"), origin
        )
    return list(kept.values())


def _in_force(versions: str | None, version: str | None, fail: Any) -> bool:
    if versions is None:
        return True
    try:
        wanted = SpecifierSet(versions)
    except InvalidSpecifier:
        raise fail(f"versions = {versions!r} is no version specifier") from None
    if version is None:
        return False
    try:
        # A local part such as +cpu or +cu130 says how torch was built, not which release it is.
        return wanted.contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False
