"""Determinism: what a recomputation must have in common with the forward, and the error if not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Metadata = tuple[torch.Size, torch.dtype, torch.device]
"""What is compared of a saved tensor: shape, dtype and device; never the values."""

DETERMINISM_CHECKS = ("default", "none")


class CheckpointError(RuntimeError):
    """The recomputation did not give back what the forward had saved."""


def require_known_check(name: str) -> None:
    """determinism/only-two-values: raise ValueError for a mode that does not exist."""
    if name not in DETERMINISM_CHECKS:
        raise ValueError(
            f"determinism_check must be one of {', '.join(map(repr, DETERMINISM_CHECKS))}, "
            f"not {name!r}"
        )


def _describe(metadata: Metadata) -> str:
    shape, dtype, device = metadata
    return f"shape {list(shape)}, dtype {dtype}, device {device}"


def metadata_error(mismatches: Sequence[tuple[int, Metadata, Metadata]]) -> CheckpointError:
    """Build the error for recomputed tensors that do not look like the saved ones.

    Args:
        mismatches: (position among the saved tensors, metadata then, metadata now), in order.
    """
    lines = [
        "Recomputed tensors have different metadata than those saved in the forward pass.",
    ]
    for position, saved, recomputed in mismatches:
        lines += [
            f"tensor at position {position}:",
            f"  saved:      {_describe(saved)}",
            f"  recomputed: {_describe(recomputed)}",
        ]
    lines.append(
        "The function must do the same in both runs; look for global state, caches that grow, "
        "or modes that were active in only one of them. "
        'determinism_check="none" turns this check off.'
    )
    return CheckpointError("\n".join(lines))


def count_error(saved: int, recomputed: int) -> CheckpointError:
    """Build the error for a recomputation that saved another number of tensors."""
    return CheckpointError(
        f"A different number of tensors was saved in the forward pass ({saved}) and in the "
        f"recomputation ({recomputed}). The function must do the same in both runs."
    )


def consumed_error() -> CheckpointError:
    """Build the error for a saved tensor that is asked for twice after one recomputation."""
    return CheckpointError(
        "A saved tensor was unpacked a second time although its region is recomputed only once "
        "here. In the backward of a custom autograd.Function read ctx.saved_tensors once; inside "
        "a GraphExecGroup backward passes must not share saved tensors, whatever retain_graph is."
    )
