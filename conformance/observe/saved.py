"""Saved-tensor hooks that log what passes through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PackLog(torch.autograd.graph.saved_tensors_hooks):
    """Logs each pack and unpack inside ``with PackLog() as log:``.

    ``packed`` and ``unpacked`` hold (shape, dtype, storage pointer) of each tensor, so nothing is
    kept alive by the log itself. ``on_unpack`` may replace the tensor that is given back.
    """

    def __init__(self, on_unpack: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.packed: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self.unpacked: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self._on_unpack = on_unpack
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> PackLog:  # type: ignore[override]
        super().__enter__()
        return self

    @staticmethod
    def _describe(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, int]:
        return tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().data_ptr()

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.packed.append(self._describe(tensor))
        # A saved output must not be kept through its own graph: hand over a detached alias.
        return tensor.detach()

    def _unpack(self, tensor: Any) -> torch.Tensor:
        self.unpacked.append(self._describe(tensor))
        return tensor if self._on_unpack is None else self._on_unpack(tensor)
