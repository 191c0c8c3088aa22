"""How often, in which order and with what a function was run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from conformance.observe.ambient import AmbientState


@dataclass
class Run:
    """One run of a recorded function.

    ``args`` and ``kwargs`` are the very objects received. ``grad_enabled`` and ``ambient`` are
    read at the start of the run. ``finished`` is False while it runs and where it was left by an
    exception (early stop leaves it so).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_enabled: bool
    ambient: AmbientState
    thread: int
    finished: bool = False


class Recorder:
    """Wraps ``function`` and remembers each run. Holds the arguments alive: not for tests of
    lifetimes unless ``keep_arguments=False``.

        region = Recorder(lambda x: x.sin())
        y = ckpt.checkpoint(region, x, use_reentrant=False)
        region.count          # 1 after forward
        y.sum().backward()
        region.count          # 2: forward and one recomputation
    """

    def __init__(self, function: Callable[..., Any], *, keep_arguments: bool = True) -> None:
        self.function = function
        self.keep_arguments = keep_arguments
        self.runs: list[Run] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and note the run."""
        run = Run(
            args if self.keep_arguments else (),
            kwargs if self.keep_arguments else {},
            torch.is_grad_enabled(),
            AmbientState.capture(),
            threading.get_ident(),
        )
        self.runs.append(run)
        result = self.function(*args, **kwargs)
        run.finished = True
        return result

    @property
    def count(self) -> int:
        """Number of runs begun so far."""
        return len(self.runs)

    @property
    def finished(self) -> int:
        """Number of runs that reached the function's end."""
        return sum(run.finished for run in self.runs)
