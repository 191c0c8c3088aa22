"""Is the adapter itself sound? The few things without which no verdict would mean anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from conformance.candidate.capabilities import Capabilities
from conformance.candidate.load import Candidate


def smoke(candidate: Candidate, capabilities: Capabilities) -> list[dict[str, str | None]]:
    """Checks by name, each with None or the problem."""
    checks: dict[str, Callable[[], None]] = {}
    for variant, use_reentrant in (("nonreentrant", False), ("reentrant", True)):
        if capabilities.missing("core", variant) is None:
            for name, check in (("value and gradient", _value), ("recomputes", _recomputes)):
                checks[f"{variant}: {name}"] = functools.partial(check, candidate, use_reentrant)
    checks["declared and probed agree"] = lambda: _declared(capabilities)
    results: list[dict[str, str | None]] = []
    for name, run_check in checks.items():
        problem: str | None = None
        try:
            run_check()
        except BaseException as raised:  # noqa: BLE001 - a candidate may raise anything
            problem = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
        results.append({"check": name, "problem": problem})
    return results


def _value(candidate: Candidate, use_reentrant: bool) -> None:
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    output = candidate.checkpoint(torch.sin, x, use_reentrant=use_reentrant)
    assert torch.equal(output, x.sin()), f"expected sin(x), observed {output!r}"
    output.sum().backward()
    assert x.grad is not None, "backward left no gradient"
    assert torch.equal(x.grad, x.detach().cos()), f"expected cos(x), observed {x.grad!r}"


def _recomputes(candidate: Candidate, use_reentrant: bool) -> None:
    runs: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    candidate.checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert len(runs) > 1, "backward did not run the function again: nothing is checkpointed"


def _declared(capabilities: Capabilities) -> None:
    known = set(capabilities.profiles) | set(capabilities.variants)
    unknown = sorted(set(capabilities.declared) - known)
    assert not unknown, f"UNSUPPORTED names {unknown[0]!r}, which is no profile or variant"
    undeclared = [
        name
        for name, reason in capabilities.profiles.items()
        if reason is not None and name not in capabilities.declared
    ]
    assert not undeclared, f"missing but not declared in UNSUPPORTED: {', '.join(undeclared)}"
