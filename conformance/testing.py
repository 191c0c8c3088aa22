"""What a clause's test is written with.

    @clause("early-stop/needed-only")
    @given(tail=st.integers(1, 4))
    def test_tail_is_not_recomputed(ckpt, tail):
        "Operators behind the last needed tensor run once."
        ...
        reached()
        assert ...

The decorated test takes the fixture ``ckpt``, the candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from conformance.evidence import reached

__all__ = ["Inconclusive", "both_variants", "clause", "reached", "variant_name"]

_F = TypeVar("_F", bound=Callable[..., object])


class Inconclusive(Exception):
    """The plain run disagrees with itself, so nothing can be said about the candidate."""


def clause(identifier: str, *, minimum: int = 1) -> Callable[[_F], _F]:
    """Mark a test as grading the clause ``identifier``.

    ``minimum`` is how many times the test must call :func:`reached` for a pass to count.
    """
    return pytest.mark.clause(identifier, minimum=minimum)


def variant_name(use_reentrant: bool) -> str:
    """Name of a variant as the specification spells it."""
    return "reentrant" if use_reentrant else "nonreentrant"


both_variants = pytest.mark.parametrize("use_reentrant", [False, True], ids=variant_name)
"""Run a test once per variant; a variant that the candidate lacks is left out."""
