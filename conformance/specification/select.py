"""Which clauses a run grades."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.errors import SpecificationError, UsageError
from conformance.specification.load import Specification
from conformance.specification.model import PROFILES, Clause


def select(
    specification: Specification, patterns: Sequence[str], profiles: Sequence[str]
) -> dict[str, Clause]:
    """Clauses whose id matches a pattern and whose profile is named; no restriction where the
    sequence is empty.

    Raises UsageError for an unknown profile, a pattern that matches nothing, or an empty result:
    a run of nothing must not look like a success.
    """
    for profile in profiles:
        if profile not in PROFILES:
            raise UsageError(f"unknown profile {profile!r}; there are {', '.join(PROFILES)}")
    try:
        chosen = specification.select(patterns) if patterns else list(specification.clauses)
    except SpecificationError as problem:
        raise UsageError(str(problem)) from None
    kept = {
        clause.id: clause
        for clause in chosen
        if clause.retired is None and (not profiles or clause.profile in profiles)
    }
    if not kept:
        raise UsageError("the selection matches no clause")
    return kept
