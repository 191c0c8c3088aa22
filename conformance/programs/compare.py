"""Where two runs of one program part."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from conformance.observe import assert_same
from conformance.programs.execute import Observed, TensorCopy


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    ``kind``: exception, value, flag (requires_grad), structure, state, warning, runs, memory.
    ``name`` is the observation, ``path`` the place inside it. ``expected`` and ``observed`` are
    texts.
    """

    kind: str
    name: str
    path: str
    expected: str
    observed: str

    def __str__(self) -> str:
        return (
            f"{self.name}{self.path} ({self.kind}): expected {self.expected}, "
            f"observed {self.observed}"
        )


def compare(
    expected: Observed, observed: Observed, *, exact: bool = True, warnings: bool = True
) -> Difference | None:
    """The first difference in the order of the program, or None.

    Without ``exact``, gradients may differ by rounding (see ``Language.exact``); without
    ``warnings``, additional ones are no difference.
    """
    for (name, wanted), (_, got) in zip(expected.notes, observed.notes, strict=False):
        tolerant = not exact and "grad" in name
        if (found := _compare(wanted, got, name, "", tolerant)) is not None:
            return found
    if (found := _compare_endings(expected, observed)) is not None:
        return found
    if len(expected.notes) != len(observed.notes):
        return Difference(
            "structure",
            "observations",
            "",
            f"{[name for name, _ in expected.notes]}",
            f"{[name for name, _ in observed.notes]}",
        )
    if (found := _compare_states(expected, observed)) is not None:
        return found
    return _compare_warnings(expected, observed) if warnings else None


def _compare_endings(expected: Observed, observed: Observed) -> Difference | None:
    if type(expected.error) is type(observed.error):
        return None
    return Difference("exception", "end", "", _ending(expected), _ending(observed))


def _ending(run: Observed) -> str:
    if run.error is None:
        return "no exception"
    text = " ".join(str(run.error).split())
    return f"{type(run.error).__name__}: {text[:200]}"


def _compare_states(expected: Observed, observed: Observed) -> Difference | None:
    for phase, wanted in expected.states.items():
        changed = wanted.difference(observed.states[phase])
        for field, values in changed.items():
            texts = ("the plain run's", "another") if values == "changed" else map(str, values)
            return Difference("state", phase, f" {field}", *texts)
    return None


def _compare_warnings(expected: Observed, observed: Observed) -> Difference | None:
    added = [text for text in observed.warnings if text not in expected.warnings]
    if added:
        return Difference("warning", "warnings", "", "none", added[0][:200])
    return None


def _compare(
    expected: Any, observed: Any, name: str, path: str, tolerant: bool
) -> Difference | None:
    if isinstance(expected, TensorCopy) and isinstance(observed, TensorCopy):
        return _compare_tensors(expected, observed, name, path, tolerant)
    if type(expected) is not type(observed):
        return Difference("structure", name, path, brief(expected), brief(observed))
    if isinstance(expected, dict):
        if list(expected) != list(observed):
            return Difference("structure", name, path, str(list(expected)), str(list(observed)))
        pairs = [(f"[{key!r}]", expected[key], observed[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(observed):
            return Difference(
                "structure", name, path, f"{len(expected)} items", f"{len(observed)} items"
            )
        pairs = [
            (f"[{index}]", one, other)
            for index, (one, other) in enumerate(zip(expected, observed, strict=True))
        ]
    elif is_dataclass(expected):
        pairs = [
            (f".{item.name}", getattr(expected, item.name), getattr(observed, item.name))
            for item in fields(expected)
        ]
    else:
        if expected != observed:
            return Difference("value", name, path, repr(expected), repr(observed))
        return None
    for step, one, other in pairs:
        if (found := _compare(one, other, name, path + step, tolerant)) is not None:
            return found
    return None


def _compare_tensors(
    expected: TensorCopy, observed: TensorCopy, name: str, path: str, tolerant: bool
) -> Difference | None:
    wanted, got = expected.value, observed.value
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return Difference("value", name, path, brief(expected), brief(observed))
    # torch.equal takes 0.0 and -0.0 for the same; assert_same looks at the bits.
    if not torch.equal(wanted, got) or wanted.is_floating_point():
        try:
            assert_same(got, wanted, name)
        except AssertionError:
            if not (tolerant and _close(wanted, got)):
                return Difference("value", name, path, brief(expected), brief(observed))
    if expected.grad != observed.grad:
        return Difference(
            "flag",
            name,
            f"{path}.requires_grad",
            str(expected.grad),
            str(observed.grad),
        )
    return None


def _close(expected: torch.Tensor, observed: torch.Tensor) -> bool:
    """Equal but for the order in which a gradient's parts were added.

    A gradient here is a sum of at most some hundred products that were each rounded at most some
    ten times: 1024 units in the last place of the largest one bounds every order of adding.
    """
    if not expected.is_floating_point():
        return False
    unit = torch.finfo(expected.dtype).eps
    largest = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
    return torch.allclose(
        expected, observed, rtol=0, atol=1024 * unit * max(1.0, largest), equal_nan=True
    )


def brief(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, TensorCopy):
        tensor = value.value
        values = [
            round(item, 6) if isinstance(item, float) else item
            for item in tensor.reshape(-1)[:4].tolist()
        ]
        more = ", …" if tensor.numel() > 4 else ""
        return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} [{str(values)[1:-1]}{more}]"
    return (
        repr(value)
        if isinstance(value, (int, str, float, bool, type(None)))
        else str(type(value).__name__)
    )
