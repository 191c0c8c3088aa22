"""Counts the examples that reached what a clause is about.

A test calls :func:`reached` at the point where the situation that it asks about exists, just
before its verdict. A test that passes without having reached that point often enough proves
nothing, and the plugin turns its verdict into ``error``.
"""

from __future__ import annotations


class Evidence:
    """How often the running test reached its point. One per process, reset for each test."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        """Begin a new test."""
        self.count = 0


current = Evidence()


def reached() -> None:
    """Record that the situation under test exists in this example."""
    current.count += 1
