"""State that operators read and no argument carries: capture, compare, restore.

The plugin restores it around every test; tests compare captures to see what a candidate left.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field, fields
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class AmbientState:
    """One capture. Tensors of random state are kept as bytes, so that captures compare with
    ``==``. ``function_modes``, ``dispatch_modes`` and ``saved_tensor_hooks`` are depths of the
    active stacks (the counts of entered contexts)."""

    rng: bytes = field(repr=False)
    python_rng: int = field(repr=False)
    grad_enabled: bool
    inference: bool
    default_dtype: str
    default_device: str
    autocast: tuple[tuple[str, bool, str], ...]
    autocast_cache: bool
    threads: int
    deterministic: bool
    anomaly: bool
    function_modes: int
    dispatch_modes: int
    saved_tensor_hooks: bool

    @classmethod
    def capture(cls) -> AmbientState:
        """Read the state of this thread and process."""
        return cls(
            rng=random_state(),
            python_rng=hash(random.getstate()),
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            default_dtype=str(torch.get_default_dtype()),
            default_device=str(torch.get_default_device()),
            autocast=tuple(
                (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
                for device in _AUTOCAST_DEVICES
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            anomaly=torch.is_anomaly_enabled(),
            function_modes=torch._C._len_torch_function_stack(),
            dispatch_modes=torch._C._len_torch_dispatch_stack(),
            saved_tensor_hooks=torch._C._autograd._top_saved_tensors_default_hooks(False)
            is not None,
        )

    def difference(self, later: AmbientState, *, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
        """Names of the fields that changed, with both values (random states: only their names)."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            before, after = getattr(self, item.name), getattr(later, item.name)
            if item.name not in ignore and before != after:
                changed[item.name] = "changed" if item.name.endswith("rng") else (before, after)
        return changed


def random_state() -> bytes:
    """The CPU generator's state."""
    state = torch.get_rng_state()
    # Read in place: torch turns tensors into bytes only through numpy, which need not be there.
    return ctypes.string_at(state.data_ptr(), state.numel())
