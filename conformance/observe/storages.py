"""Exact accounting of tensor memory by the storages that are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts bytes of the storages made while it is active and still alive.

        with LiveStorages() as live:
            y = ckpt.checkpoint(function, x, use_reentrant=False)
            after_forward = live.bytes()

    Storages that existed before are not counted. Views share their storage and count once.
    ``peak`` is the largest value seen right after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self._known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf, inputs)
        self.peak = max(self.peak, self.bytes())
        return result

    def _watch(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in inputs:
            return
        self._alive[key] = storage.nbytes()
        weakref.finalize(storage, self._alive.pop, key, None)

    def bytes(self) -> int:
        """Bytes of the storages made here and alive now."""
        return sum(self._alive.values())

    def count(self) -> int:
        """Number of such storages."""
        return len(self._alive)
