"""What a caller can configure, as one value that travels from the call to the region."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The context of the forward pass and that of the recomputation."""


_NOTHING = nullcontext()


def noop_context_fn() -> ContextPair:
    """Return two context managers that do nothing: the default of `context_fn`."""
    return _NOTHING, _NOTHING


@dataclass(slots=True)
class Options:
    """The configuration of a checkpoint, as documented for `checkpoint`."""

    use_reentrant: bool | None = None
    preserve_rng_state: bool = True
    context_fn: Callable[[], ContextPair] = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None
