"""Small deterministic functions to run in a region, put together from named steps.

A list of names is what Hypothesis draws and what a failing example prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node

Step = Callable[[torch.Tensor], torch.Tensor]


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x.cos() * 2


def _largest(x: torch.Tensor) -> torch.Tensor:
    values, _ = x.max(dim=-1, keepdim=True)
    return x * values


def _halves(x: torch.Tensor) -> torch.Tensor:
    parts = x.tensor_split(2, dim=-1)
    return torch.cat([parts[1].tanh(), parts[0].exp()], dim=-1)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)
    y[..., 0] = 0.5
    return y.sin_()


def _window(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., :1].mul_(3)
    return y * y


def _stacked(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x.cos(), x], dim=0).prod(dim=0)


STEPS: dict[str, Step] = {
    "sin": torch.sin,
    "exp": lambda x: (x * 0.1).exp(),
    "square": lambda x: x * x,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "cumsum": lambda x: x.cumsum(dim=-1),
    "add": lambda x: x + 0.25,
    "reshape": lambda x: x.reshape(-1).reshape(x.shape),
    "flip": lambda x: x.flip(-1) * 0.5,
    "sort": lambda x: x.sort(dim=-1).values,
    "divide": lambda x: x / (1 + x * x),
    "where": lambda x: torch.where(x > 0, x.sin(), x),
    "branch": _branch,
    "largest": _largest,
    "halves": _halves,
    "in-place": _in_place,
    "window": _window,
    "stacked": _stacked,
}
"""Steps that keep shape and dtype of any real floating-point tensor of one dimension or more."""

KEEPING = ("sin", "exp", "square", "tanh", "softmax", "divide", "halves", "stacked")
"""Steps of which autograd keeps a tensor, so that a region of them has something to recompute."""


def chain(names: Sequence[str]) -> Step:
    """The function that does the named steps one after another."""
    steps = [STEPS[name] for name in names]

    def function(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x

    return function


def graph_nodes(outputs: Iterable[torch.Tensor]) -> list[Node]:
    """Every autograd node behind ``outputs``, each once."""
    found: dict[Node, None] = {}
    waiting = [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found[node] = None
        waiting.extend(parent for parent, _ in node.next_functions)
    return list(found)


def node_names(outputs: Iterable[torch.Tensor]) -> Counter[str]:
    """How often each kind of node stands behind ``outputs``."""
    return Counter(node.name() for node in graph_nodes(outputs))


def graph_leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that the graph behind ``outputs`` accumulates into."""
    return [
        node.variable  # type: ignore[attr-defined]
        for node in graph_nodes(outputs)
        if hasattr(node, "variable")
    ]
