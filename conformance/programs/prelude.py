"""Definitions that a program may need above it: custom autograd functions, the record type, a
pair of saved-tensor hooks. Each is source, so that a script carries exactly what it uses."""

from __future__ import annotations

import functools
from typing import Any

DEFINITIONS: dict[str, str] = {
    "Doubled": """
class Doubled(torch.autograd.Function):  # saves nothing
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
""",
    "Squared": """
class Squared(torch.autograd.Function):  # saves its input
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x
""",
    "Exponential": """
class Exponential(torch.autograd.Function):  # saves its output
    @staticmethod
    def forward(ctx, x):
        y = (-x.abs()).exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return -grad * y * x.sign()
""",
    "Scaled": """
class Scaled(torch.autograd.Function):  # keeps a number, takes a non-tensor
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None
""",
    "SignAndCube": """
class SignAndCube(torch.autograd.Function):  # an output that is not differentiable
    @staticmethod
    def forward(ctx, x):
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * x * x, positive

    @staticmethod
    def backward(ctx, grad, _):
        (x,) = ctx.saved_tensors
        return None if grad is None else grad * 3 * x * x
""",
    "Product": """
class Product(torch.autograd.Function):  # asks which gradients are needed
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return grad * y if left else None, grad * x if right else None
""",
    "Record": """
@dataclasses.dataclass
class Record:
    first: object
    second: object
""",
    "nothing": """
def nothing():
    return contextlib.nullcontext(), contextlib.nullcontext()
""",
}

IMPORTS = {
    "Record": "dataclasses",
    "nothing": "contextlib",
}


@functools.cache
def namespace() -> dict[str, Any]:
    """Every definition, run once: what programs of this process run in."""
    import contextlib
    import dataclasses
    import functools as functools_

    import torch

    made: dict[str, Any] = {
        "torch": torch,
        "contextlib": contextlib,
        "dataclasses": dataclasses,
        "functools": functools_,
        "__name__": __name__,
    }
    for source in DEFINITIONS.values():
        exec(compile(source, "<prelude>", "exec"), made)
    return made
