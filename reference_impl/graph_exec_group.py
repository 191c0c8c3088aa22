"""Graph execution groups: several backward calls that share one recomputation of each region."""

from __future__ import annotations

from types import TracebackType

from reference_impl.torch_private import (
    get_autograd_local,
    has_autograd_local,
    set_autograd_local,
)

_KEY = "reference_impl.graph_exec_group"


class GraphExecGroup:
    """Context manager: each region met by backward calls inside it is recomputed at most once.

    The calls must need disjoint sets of saved tensors, even with ``retain_graph=True``; a tensor
    needed twice raises `CheckpointError`. Groups do not nest (RuntimeError). Reentrant
    checkpoints are not affected. Source: documentation 2.14, GraphExecGroup.

    The group in force is kept where autograd passes it on to its device threads, which is where
    the nodes of an accelerator run.
    """

    def __enter__(self) -> GraphExecGroup:
        active = current_group()
        if active is not None:
            raise RuntimeError(f"a GraphExecGroup cannot be entered inside another one ({active})")
        set_autograd_local(_KEY, self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        set_autograd_local(_KEY, None)


def current_group() -> GraphExecGroup | None:
    """Return the group that the running thread, or its backward pass, is in."""
    if not has_autograd_local(_KEY):
        return None
    group: GraphExecGroup | None = get_autograd_local(_KEY)
    return group
