"""Random-number state of accelerators: which devices, reading it and setting it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_WITHOUT_STATE = ("cpu", "meta")
"""Device types that are no accelerator: the CPU's state is kept apart, meta has none."""


class DefaultDeviceType:
    """The accelerator type that is meant where no tensor and no argument says which.

    That of this machine's accelerator, "cuda" without one, unless changed. It holds for the
    process. Source: documentation 2.14, set_device_states.
    """

    _device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Make `device` (a device type such as "cuda" or "xpu") the default."""
        DefaultDeviceType._device_type = device

    @staticmethod
    def get_device_type() -> str:
        """Return the default device type."""
        return DefaultDeviceType._device_type or _machine_device_type()


@functools.cache
def _machine_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if accelerator is None else accelerator.type


def tensors_outside_cpu(values: Iterable[Any]) -> list[torch.Tensor]:
    """Find tensors not on the CPU in `values` and in lists, tuples and dicts nested in them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_cpu:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_outside_cpu(value)
        elif isinstance(value, dict):
            found += tensors_outside_cpu(value.values())
    return found


def accelerators_of(values: Iterable[Any]) -> dict[str, list[int]]:
    """Return the accelerators that hold tensors of `values`: sorted indices by device type."""
    tensors = tensors_outside_cpu(values)
    if not tensors:
        return {}
    found: dict[str, set[int]] = {}
    for tensor in tensors:
        device = tensor.device
        if device.type not in _WITHOUT_STATE:
            index = device.index if device.index is not None else 0
            found.setdefault(device.type, set()).add(index)
    return {device_type: sorted(indices) for device_type, indices in found.items()}


def read_states(device_type: str, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the generator state (uint8 tensor on the CPU) of each device."""
    module = torch.get_device_module(device_type)
    states = []
    for device in devices:
        with module.device(device):
            states.append(module.get_rng_state())
    return states


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Return the accelerators of the tensors in `args` and their random-number states.

    Tensors on the CPU or on meta do not count, wherever they stand. With tensors on several types
    of accelerator the first type found counts.

    Returns:
        Device indices, and the state of each (uint8 tensor); two empty lists without any.
    """
    for device_type, devices in accelerators_of(args).items():
        return devices, read_states(device_type, devices)
    return [], []


def set_device_states(
    devices: Sequence[int], states: Sequence[torch.Tensor], *, device_type: str | None = None
) -> None:
    """Set the random-number state of each device.

    Args:
        devices: device indices.
        states: the state for each device, as `get_device_states` returns them.
        device_type: type of the devices; None means `DefaultDeviceType.get_device_type()`.
            "meta" has no state: nothing happens.

    Source: documentation 2.14, set_device_states.
    """
    if device_type is None:
        device_type = DefaultDeviceType.get_device_type()
    if device_type == "meta" or not devices:
        return
    module = torch.get_device_module(device_type)
    for device, state in zip(devices, states, strict=True):
        with module.device(device):
            module.set_rng_state(state)
