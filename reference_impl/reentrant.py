"""The reentrant variant: one backward node that runs the function again and backward through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reference_impl.ambient import AmbientState
from reference_impl.torch_private import nested_backward_allowed
from reference_impl.warn import warn_caller


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn (UserWarning) if no tensor among `inputs` requires grad: there will be no gradients.

    Only tensors directly in `inputs` count; those nested in containers are not looked at.
    """
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        warn_caller("None of the inputs have requires_grad=True. Gradients will be None")


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `inputs` with each tensor detached: a leaf with the same requires_grad.

    Other values are returned as they are.

    Raises:
        RuntimeError: if `inputs` is not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"detach_variable takes a tuple, not {type(inputs).__name__}")
    return tuple(
        value.detach().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    )


class CheckpointFunction(torch.autograd.Function):
    """The backward node of a reentrant checkpoint.

    ``CheckpointFunction.apply(function, preserve_rng_state, *args)`` calls ``function(*args)``
    without a graph. Tensor outputs require grad if any tensor in `args` does. In backward the
    function runs again, entirely, on detached arguments, and a backward pass inside this node goes
    through its graph; parameters get their gradients there.
    """

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        """Call the function; autograd has turned grad mode off here."""
        check_backward_validity(args)
        ctx.set_materialize_grads(False)
        ctx.run_function = run_function
        ctx.ambient = AmbientState(args, {}, preserve_rng_state)
        ctx.positions = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in args]
        ctx.save_for_backward(*(args[i] for i in ctx.positions))
        return run_function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the function again and backward through it."""
        if not nested_backward_allowed():
            raise RuntimeError(
                "A checkpoint with use_reentrant=True supports only backward() without inputs=. "
                "For torch.autograd.grad or inputs= use use_reentrant=False."
            )
        inputs = list(ctx.others)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            inputs[position] = tensor
        detached = detach_variable(tuple(inputs))

        def run() -> Any:
            with torch.enable_grad():
                return ctx.run_function(*detached)

        outputs = ctx.ambient.replay(run)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        given = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None]
        needed = [
            (out, grad)
            for out, grad in given
            if isinstance(out, torch.Tensor) and out.requires_grad
        ]
        if needed:
            torch.autograd.backward([out for out, _ in needed], [grad for _, grad in needed])
        elif given:
            raise RuntimeError(
                "none of the outputs has requires_grad=True when the checkpointed function runs "
                "again, so this checkpoint is not necessary; detach tensors outside of it"
            )
        return (
            None,
            None,
            *(value.grad if isinstance(value, torch.Tensor) else None for value in detached),
        )
