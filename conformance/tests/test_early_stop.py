"""Chapter 6: early stop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.testing import clause, reached


@clause("early-stop/needed-only")
@given(head=st.integers(1, 4), tail=st.integers(1, 4))
def test_tail_is_not_recomputed(ckpt: Candidate, head: int, tail: int) -> None:
    """Are operators behind the last needed tensor left out of the recomputation?"""
    steps: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(head):
            x = x.sin()
        for _ in range(tail):
            steps.append("tail")
            x = x + 1
        return x

    x = torch.ones(3, requires_grad=True)
    ckpt.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    reached()
    assert len(steps) == tail, f"expected {tail} steps behind the last saved tensor, observed {len(steps)}"
