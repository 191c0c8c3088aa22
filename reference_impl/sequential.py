"""Checkpointing a model that is a list of layers: segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reference_impl.calling import checkpoint
from reference_impl.warn import warn_caller


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run layers one after another, checkpointing all segments of them but the last.

    Args:
        functions: a `torch.nn.Sequential`, or a list of modules or functions of one argument.
        segments: into how many segments to split them, 1 to ``len(functions)``. Each has
            ``len(functions) // segments`` layers, the last one also what remains.
        input: the tensor (any shape, dtype, device) given to the first layer.
        use_reentrant: as for `checkpoint`; pass it.
        **kwargs: `preserve_rng_state` (default True) only.

    Returns:
        What the last layer returns.

    Raises:
        ValueError: another number of segments, or another keyword.

    Source: documentation 2.14, checkpoint_sequential.
    """
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError(f"Unexpected keyword arguments: {', '.join(kwargs)}")
    layers: list[Callable[[Any], Any]] = list(functions)
    if not 1 <= segments <= len(layers):
        raise ValueError(
            f"segments must be 1 to the number of functions ({len(layers)}), not {segments}"
        )
    if use_reentrant is None:
        warn_caller(
            "checkpoint_sequential: pass use_reentrant explicitly. Without it the reentrant "
            "variant is used; use_reentrant=False is recommended."
        )
        use_reentrant = True
    size = len(layers) // segments
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(
            _chain(layers[start : start + size]),
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _chain(layers[size * (segments - 1) :])(input)


def _chain(layers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return run
