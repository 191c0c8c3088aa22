"""The oracle: a program run plainly and through the candidate, compared bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from conformance.observe.ambient import AmbientState
from conformance.testing import Inconclusive


def assert_same(observed: Any, expected: Any, what: str) -> None:
    """Fail unless both values are the same, down to the bits of every tensor.

    Tensors must agree in shape, dtype, device and bits (NaN equals NaN; -0.0 differs from 0.0);
    containers in type and items; anything else by ``==``. ``what`` names the value in the message.
    """
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(observed, expected, what)
    elif isinstance(expected, dict):
        assert type(observed) is type(expected), _types(observed, expected, what)
        assert list(observed) == list(expected), (
            f"{what}: expected keys {list(expected)}, observed {list(observed)}"
        )
        for key in expected:
            assert_same(observed[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(observed) is type(expected), _types(observed, expected, what)
        assert len(observed) == len(expected), (
            f"{what}: expected {len(expected)} items, observed {len(observed)}"
        )
        for index, (one, other) in enumerate(zip(observed, expected, strict=True)):
            assert_same(one, other, f"{what}[{index}]")
    elif is_dataclass(expected) and not isinstance(expected, type):
        assert type(observed) is type(expected), _types(observed, expected, what)
        for item in fields(expected):
            assert_same(
                getattr(observed, item.name), getattr(expected, item.name), f"{what}.{item.name}"
            )
    elif isinstance(expected, float) and isinstance(observed, float):
        assert struct.pack("d", observed) == struct.pack("d", expected), (
            f"{what}: expected {expected!r}, observed {observed!r}"
        )
    else:
        assert observed == expected, f"{what}: expected {expected!r}, observed {observed!r}"


def _types(observed: Any, expected: Any, what: str) -> str:
    return f"{what}: expected a {type(expected).__name__}, observed a {type(observed).__name__}"


def _assert_same_tensor(observed: Any, expected: torch.Tensor, what: str) -> None:
    assert isinstance(observed, torch.Tensor), (
        f"{what}: expected a tensor of shape {tuple(expected.shape)}, observed {observed!r}"
    )
    for name in ("shape", "dtype", "device"):
        wanted, got = getattr(expected, name), getattr(observed, name)
        assert got == wanted, f"{what}: expected {name} {wanted}, observed {got}"
    if expected.device.type == "meta":
        return
    # A size of 1 may have any stride and still count as contiguous: only a copy is dense for sure.
    wanted, got = (
        tensor.detach().clone(memory_format=torch.contiguous_format)
        for tensor in (expected, observed)
    )
    if torch.equal(wanted.view(-1).view(torch.uint8), got.view(-1).view(torch.uint8)):
        return
    if wanted.is_floating_point() and torch.equal(wanted.isnan(), got.isnan()):
        # NaN payloads are no part of any promise; everything else is compared by its bits.
        keep = ~wanted.isnan()
        wanted, got = wanted[keep], got[keep]
        if torch.equal(wanted.view(torch.uint8), got.view(torch.uint8)):
            return
    differing = int((wanted != got).sum())
    raise AssertionError(
        f"{what}: {differing} of {expected.numel()} values differ; "
        f"expected {_brief(expected)}, observed {_brief(observed)}"
    )


def _brief(tensor: torch.Tensor) -> str:
    values = tensor.detach().reshape(-1)[:4].tolist()
    return f"{values}{'…' if tensor.numel() > 4 else ''}"


def gradients(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of the sum of ``output``, with unused inputs allowed."""
    return torch.autograd.grad(output.sum(), list(inputs), allow_unused=True, **options)


@dataclass
class Outcome:
    """What a program did: its result, the gradients left in its leaves, its state afterwards.

    ``gradients`` are the ``.grad`` of the leaves in order; ``ambient`` is captured after the run;
    ``error`` is the exception that ended it, if one did.
    """

    result: Any = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    ambient: AmbientState | None = None
    error: BaseException | None = None


Wrap = Callable[..., Any]
Program = Callable[[Wrap, list[torch.Tensor]], Any]


def observe_program(
    program: Program,
    make_leaves: Callable[[], list[torch.Tensor]],
    wrap: Wrap,
    *,
    seed: int = 1234,
) -> Outcome:
    """Run ``program(wrap, leaves)`` from a fixed random state and note what it did.

    ``program`` calls ``wrap(function, *args, **kwargs)`` where a region may stand, and runs its
    own backward. ``make_leaves`` returns fresh leaf tensors.
    """
    torch.manual_seed(seed)
    leaves = make_leaves()
    torch.manual_seed(seed + 1)
    outcome = Outcome()
    try:
        outcome.result = program(wrap, leaves)
    except Exception as error:  # noqa: BLE001 - the exception is part of the outcome
        outcome.error = error
    outcome.gradients = [leaf.grad for leaf in leaves]
    outcome.ambient = AmbientState.capture()
    return outcome


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The region without checkpointing."""
    return function(*args, **kwargs)


def assert_equivalent(
    program: Program,
    make_leaves: Callable[[], list[torch.Tensor]],
    wrap: Wrap,
    *,
    seed: int = 1234,
    ambient: bool = True,
) -> None:
    """Fail unless ``program`` does through ``wrap`` what it does plainly: result, ``.grad`` of
    every leaf and (with ``ambient``) the state left behind, random streams included.

    The plain program runs twice; one that disagrees with itself raises Inconclusive. A plain
    program that raises is a mistake of the test and is raised as it is.
    """
    expected = observe_program(program, make_leaves, plain, seed=seed)
    if expected.error is not None:
        raise expected.error
    again = observe_program(program, make_leaves, plain, seed=seed)
    try:
        _compare(again, expected, ambient)
    except AssertionError as problem:
        raise Inconclusive(f"the plain run disagrees with itself: {problem}") from None
    observed = observe_program(program, make_leaves, wrap, seed=seed)
    if observed.error is not None:
        raise observed.error
    _compare(observed, expected, ambient)


def _compare(observed: Outcome, expected: Outcome, ambient: bool) -> None:
    assert_same(observed.result, expected.result, "result")
    for index, (got, wanted) in enumerate(zip(observed.gradients, expected.gradients, strict=True)):
        assert (got is None) == (wanted is None), (
            f"gradient of leaf {index}: expected {'none' if wanted is None else 'one'}, "
            f"observed {'none' if got is None else 'one'}"
        )
        if wanted is not None:
            assert_same(got, wanted, f"gradient of leaf {index}")
    if ambient:
        assert expected.ambient is not None
        assert observed.ambient is not None
        changed = expected.ambient.difference(observed.ambient)
        assert not changed, f"state after the run differs from the plain run: {changed}"
