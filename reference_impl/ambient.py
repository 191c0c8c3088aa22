"""Ambient state: what a function reads without being given it, replayed for the recomputation.

That is the state of the random-number generators (CPU, and each accelerator that holds a tensor
argument), autocast (CPU and accelerator) and the default device. Python's `random`, NumPy and
explicit `torch.Generator` objects are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from reference_impl.device_states import (
    DefaultDeviceType,
    accelerators_of,
    read_states,
    set_device_states,
)
from reference_impl.torch_private import device_initialized, function_mode_count

AutocastState = tuple[Any, ...]
"""Enabled and dtype for the CPU, cache flag; then enabled and dtype for the accelerator, if any."""


class RandomState:
    """The state of the default generators of the CPU and of some accelerators.

    Args:
        accelerators: device indices by device type.
    """

    __slots__ = ("accelerators", "cpu")

    def __init__(self, accelerators: dict[str, list[int]]) -> None:
        self.cpu = torch.default_generator.get_state()
        self.accelerators = [
            (device_type, devices, read_states(device_type, devices))
            for device_type, devices in accelerators.items()
        ]

    def restore(self) -> None:
        """Put the generators into this state."""
        torch.default_generator.set_state(self.cpu)
        for device_type, devices, states in self.accelerators:
            set_device_states(devices, states, device_type=device_type)


class AmbientState:
    """The ambient state at a forward pass; `replay` runs a function under it.

    Args:
        args, kwargs: what is given to the function; its devices are the ones that count.
        preserve_rng_state: whether random state is part of it. If not, it is neither read nor
            written (rng/false-uses-current-stream).
    """

    __slots__ = ("accelerator", "accelerators", "autocast", "default_device", "random")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> None:
        self.accelerators = accelerators_of((*args, *kwargs.values()) if kwargs else args)
        self.accelerator = next(iter(self.accelerators), None) or default_accelerator()
        self.autocast = autocast_state(self.accelerator)
        self.default_device = default_device()
        self.random = RandomState(self.accelerators) if preserve_rng_state else None

    def check_after_forward(self) -> None:
        """errors/device-initialized-inside: its random state could not be read in time."""
        if self.accelerator is None and self.random is not None:
            initialized = default_accelerator()
            if initialized is not None:
                raise RuntimeError(
                    f"The {initialized} device was first initialised inside a checkpointed "
                    "function, so its random-number state at the start is not known. Initialise "
                    "the device before, or pass preserve_rng_state=False."
                )

    def random_now(self) -> RandomState | None:
        """Return the present random state, None where it is not to be preserved."""
        return None if self.random is None else RandomState(self.accelerators)

    def replay(self, function: Callable[[], Any]) -> Any:
        """Call `function` under this state; everything is put back afterwards, also on errors."""
        if self.random is None:
            return self._replay_modes(function)
        surrounding = RandomState(self.accelerators)
        try:
            self.random.restore()
            return self._replay_modes(function)
        finally:
            # rng/stream-undisturbed: what surrounds backward draws as if nothing had run.
            surrounding.restore()

    def _replay_modes(self, function: Callable[[], Any]) -> Any:
        """Enter autocast and the default device, each only where it differs from the present."""
        autocast_differs = autocast_state(self.accelerator) != self.autocast
        device_differs = default_device() != self.default_device
        if not (autocast_differs or device_differs):
            return function()
        with ExitStack() as modes:
            if autocast_differs:
                # autocast/cache-isolated: casts made under one state do not serve the other.
                torch.clear_autocast_cache()
                modes.callback(torch.clear_autocast_cache)
                cpu_enabled, cpu_dtype, cache, *accelerator = self.autocast
                modes.enter_context(
                    torch.autocast("cpu", dtype=cpu_dtype, enabled=cpu_enabled, cache_enabled=cache)
                )
                if accelerator and self.accelerator is not None:
                    enabled, dtype = accelerator
                    modes.enter_context(
                        torch.autocast(
                            self.accelerator, dtype=dtype, enabled=enabled, cache_enabled=cache
                        )
                    )
            if device_differs:
                # A new context: the forward's own one may be entered, or closed, by now.
                modes.enter_context(torch.device(self.default_device or "cpu"))
            return function()


def default_accelerator() -> str | None:
    """Return the default type of accelerator, None if that is not in use in this process."""
    device_type = DefaultDeviceType.get_device_type()
    return device_type if device_initialized(device_type) else None


def autocast_state(accelerator: str | None) -> AutocastState:
    """Return the autocast state of the thread for the CPU and one type of accelerator."""
    cpu = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    if accelerator is None or not torch.amp.is_autocast_available(accelerator):
        return cpu
    return (*cpu, torch.is_autocast_enabled(accelerator), torch.get_autocast_dtype(accelerator))


def default_device() -> torch.device | None:
    """Return the default device, None where nothing has changed it (then it is the CPU)."""
    return torch.get_default_device() if function_mode_count() else None
