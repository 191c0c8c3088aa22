"""What travels from a test's process to the runner. Imports no torch."""

from __future__ import annotations

PROPERTY = "conformance"
"""Name of the user property of a report that carries a finding (a plain dictionary)."""


def stable_name(nodeid: str) -> str:
    """A test's name that is the same in every checkout and working directory:
    ``test_early_stop.py::test_tail_is_not_recomputed[…]``."""
    path, separator, name = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}{separator}{name}"
