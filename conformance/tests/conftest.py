"""The fixtures of the suite's tests."""

from __future__ import annotations

import pytest

from conformance.candidate import Candidate
from conformance.plugin.options import grader


@pytest.fixture(scope="session")
def ckpt(request: pytest.FixtureRequest) -> Candidate:
    """The candidate: its public names as attributes."""
    active = grader(request.config)
    assert active is not None, "the suite's tests need --candidate"
    return active.candidate
