"""Debug mode: remember the operators of both runs, to show them if the runs disagree."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from reference_impl.determinism import CheckpointError
from reference_impl.torch_private import DispatchMode
from reference_impl.warn import is_user_code

_override: ContextVar[bool | None] = ContextVar("checkpoint_debug", default=None)


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None = None) -> Iterator[None]:
    """Context manager: whether checkpoints called inside it run in debug mode.

    It overrides the argument `debug` of `checkpoint` and holds for the current thread. Source:
    documentation 2.14, set_checkpoint_debug_enabled.

    Args:
        enabled: True or False override the argument; None, the default, leaves it in force.
    """
    token = _override.set(enabled)
    try:
        yield
    finally:
        _override.reset(token)


def debug_in_force(argument: bool) -> bool:
    """debug/context-on, -off and -none: the context, if it says anything, decides."""
    override = _override.get()
    return argument if override is None else override


class OperatorTrace(DispatchMode):
    """Notes each operator that runs under it, with the line of user code that called it.

    Entering it anew starts an empty list. It keeps text only, no tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> OperatorTrace:
        self.lines = []
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.lines.append(f"{func}({_briefly((*args, *kwargs.values()))})  # {_user_line()}")
        return func(*args, **kwargs)


def _briefly(values: tuple[Any, ...]) -> str:
    """Name operands by dtype and shape, so that both traces can be compared line by line."""
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        if isinstance(value, (list, tuple, dict))
        else repr(value)
        for value in values
    )


def _user_line() -> str:
    for frame, line in traceback.walk_stack(None):
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return "no Python frame"


def with_traces(error: CheckpointError, forward: object, recomputation: object) -> CheckpointError:
    """debug/traces: the same error with the operators of both runs, if they were traced.

    The plain error is the cause of the returned one.
    """
    if not isinstance(forward, OperatorTrace) or not isinstance(recomputation, OperatorTrace):
        return error
    parts = [str(error)]
    for title, trace in (("forward pass", forward), ("recomputation", recomputation)):
        parts += ["", f"Operators of the {title}:", *(f"  {line}" for line in trace.lines)]
    traced = CheckpointError("\n".join(parts))
    traced.__cause__ = error
    return traced
