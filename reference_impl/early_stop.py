"""Early stop: a recomputation ends once every tensor that backward needs exists again.

The function is left by an exception, raised where the last of these tensors is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_override: ContextVar[bool | None] = ContextVar("checkpoint_early_stop", default=None)


class StopRecomputation(BaseException):
    """Leaves a function whose needed tensors are all there. Its argument: whose recomputation.

    It is no failure, so like `GeneratorExit` it passes by ``except Exception`` of user code.
    """


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Context manager: whether checkpoints called inside it stop their recomputation early.

    It overrides the argument `early_stop` of `checkpoint` and matters only around the forward
    pass; backward may run outside. It holds for the current thread. Source: documentation 2.14,
    set_checkpoint_early_stop.

    Args:
        enable: True stops early, False recomputes the whole function, None leaves the choice
            to the argument.
    """
    token = _override.set(enable)
    try:
        yield
    finally:
        _override.reset(token)


def early_stop_in_force(argument: bool) -> bool:
    """early-stop/context-on and -off: the context, if it says anything, decides."""
    override = _override.get()
    return argument if override is None else override
