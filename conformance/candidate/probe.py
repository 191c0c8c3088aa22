"""Finds out which profiles and variants a candidate has, by using it.

A signature proves nothing (wrappers take ``**kwargs``), so every probe is a small call that must
have the effect which marks the feature as present. A probe says *present or not*; whether it is
right is for the clauses.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from conformance.candidate.capabilities import Capabilities
from conformance.candidate.load import Candidate, NotProvided
from conformance.specification.model import PROFILES


def _input() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _needs(*names: str) -> Callable[[Candidate], None]:
    def check(candidate: Candidate) -> None:
        for name in names:
            getattr(candidate, name)

    return check


def _takes_option(**option: Any) -> Callable[[Candidate], None]:
    """The option must be consumed by ``checkpoint`` and not handed to the function."""

    def check(candidate: Candidate) -> None:
        leaked: dict[str, Any] = {}

        def function(x: torch.Tensor, **received: Any) -> torch.Tensor:
            leaked.update(received)
            return x.sin()

        candidate.checkpoint(function, _input(), use_reentrant=False, **option)
        if leaked:
            raise NotProvided(f"checkpoint does not know the option {sorted(leaked)[0]}")

    return check


def _variant(use_reentrant: bool) -> Callable[[Candidate], None]:
    def check(candidate: Candidate) -> None:
        output = candidate.checkpoint(torch.sin, _input(), use_reentrant=use_reentrant)
        if not isinstance(output, torch.Tensor):
            raise NotProvided("checkpoint does not return the function's result")

    return check


def _decorator(candidate: Candidate) -> None:
    wrapped = candidate.checkpoint(use_reentrant=False)(torch.sin)
    if not isinstance(wrapped(_input()), torch.Tensor):
        raise NotProvided("checkpoint without a function returns no decorator")


def _sequential(candidate: Candidate) -> None:
    candidate.checkpoint_sequential([torch.sin, torch.cos], 2, _input(), use_reentrant=False)


def _compile(candidate: Candidate) -> None:
    def region(x: torch.Tensor) -> Any:
        return candidate.checkpoint(torch.sin, x, use_reentrant=False)

    try:
        torch.compile(region, backend="eager")(_input()).sum().backward()
    finally:
        torch._dynamo.reset()


def _any_variant(candidate: Candidate) -> None:
    problems = []
    for use_reentrant in (False, True):
        try:
            return _variant(use_reentrant)(candidate)
        except Exception as problem:  # noqa: BLE001 - the reason is reported
            problems.append(problem)
    raise problems[0]


_PROBES: dict[str, tuple[Callable[[Candidate], None], ...]] = {
    "core": (_any_variant,),
    "reentrant": (_variant(True),),
    "sequential": (_sequential,),
    "decorator": (_decorator,),
    "rng": (_takes_option(preserve_rng_state=True),),
    "autocast": (_any_variant,),
    "early-stop": (_needs("set_checkpoint_early_stop"), _takes_option(early_stop=True)),
    "determinism": (_takes_option(determinism_check="default"),),
    "debug": (_needs("set_checkpoint_debug_enabled"), _takes_option(debug=False)),
    "selective": (
        _needs("CheckpointPolicy", "create_selective_checkpoint_contexts"),
        _takes_option(context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())),
    ),
    "hooks": (_takes_option(respect_saved_tensors_hooks=False),),
    "graph-exec-group": (_needs("GraphExecGroup"),),
    "device-state": (_needs("set_device_states", "DefaultDeviceType"),),
    "nesting": (_any_variant,),
    "cost": (_any_variant,),
    "compile": (_compile,),
    "cuda": (_any_variant,),
}
assert tuple(_PROBES) == PROFILES


def probe(candidate: Candidate) -> Capabilities:
    """Try every profile and variant once. Never raises for what the candidate does."""
    found = Capabilities(declared=dict(candidate.declared_unsupported))
    for profile, checks in _PROBES.items():
        found.profiles[profile] = _first_problem(candidate, checks)
    for variant, use_reentrant in (("nonreentrant", False), ("reentrant", True)):
        found.variants[variant] = _first_problem(candidate, (_variant(use_reentrant),))
    return found


def _first_problem(
    candidate: Candidate, checks: tuple[Callable[[Candidate], None], ...]
) -> str | None:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        for check in checks:
            try:
                check(candidate)
            except NotProvided as missing:
                text = str(missing)
                return f"{text} is missing" if text.isidentifier() else text
            except BaseException as problem:  # noqa: BLE001 - a candidate may raise anything
                return f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
    return None
