"""A stand-in for an accelerator, so that what is promised about device generators can be seen on
a machine that has none.

It borrows the name of a device type that torch knows but this machine has no module for, installs
a small device module under that name for the length of a ``with`` block, and takes it away again.
Nothing of the process is changed for good (renaming the private-use backend would be).
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_BORROWED = ("maia", "ipu", "hpu", "vulkan")
"""Device types of torch without a module in a plain build; the first free one is used."""

_STATE_SIZE = 4


class FakeAccelerator:
    """``count`` devices, each with a generator whose state is a small CPU tensor.

    ``state[i]`` is the generator of device ``i``: its first number is what the next draw gives, a
    draw adds one. ``log`` lists each access to a generator through the device module as
    ``(kind, device)`` with kind "get" or "set". ``current`` is the current device.
    """

    def __init__(self, device_type: str, count: int = 2) -> None:
        self.type = device_type
        self.count = count
        self.state = [torch.full((_STATE_SIZE,), 100.0 * index) for index in range(count)]
        self.log: list[tuple[str, int]] = []
        self.current = 0
        self.initialized = True

    def tensor(self, index: int = 0) -> FakeTensorOnDevice:
        """A tensor (three ones, no gradient) that lives on device ``index``."""
        return FakeTensorOnDevice(torch.ones(3), torch.device(self.type, index))

    def draw(self, index: int) -> float:
        """A number from the generator of device ``index``, which moves on by one."""
        value = float(self.state[index][0])
        self.state[index] = self.state[index] + 1
        return value

    def states(self) -> list[list[float]]:
        """The states of all generators, to compare."""
        return [state.tolist() for state in self.state]

    def index(self, device: Any) -> int:
        """The index that ``device`` means: an int, a string, a device, or None for the current."""
        if device is None:
            return self.current
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return self.current if found is None else found


class _DeviceModule(types.ModuleType):
    """What ``torch.<type>`` is for a device backend: what device-generic code calls.

    One object per device type for the life of the process, because torch and others remember the
    module that they once found under a name; ``accelerator`` is the one installed at the moment.
    """

    accelerator: FakeAccelerator

    @property
    def _initialized(self) -> bool:
        return self.accelerator.initialized

    @contextlib.contextmanager
    def device(self, wanted: Any) -> Iterator[None]:
        """Make ``wanted`` the current device for the block."""
        accelerator = self.accelerator
        before, accelerator.current = accelerator.current, accelerator.index(wanted)
        try:
            yield
        finally:
            accelerator.current = before

    def set_device(self, wanted: Any) -> None:
        """Make ``wanted`` the current device."""
        self.accelerator.current = self.accelerator.index(wanted)

    def current_device(self) -> int:
        """Index of the current device."""
        return self.accelerator.current

    def device_count(self) -> int:
        """Number of devices."""
        return self.accelerator.count

    def is_available(self) -> bool:
        """There is a device."""
        return True

    def is_initialized(self) -> bool:
        """Whether the backend has been initialised."""
        return self.accelerator.initialized

    def init(self) -> None:
        """Initialise the backend."""
        self.accelerator.initialized = True

    def synchronize(self, wanted: Any = None) -> None:
        """Every call has finished when it returns."""

    def get_rng_state(self, wanted: Any = None) -> torch.Tensor:
        """The state of one device's generator."""
        index = self.accelerator.index(wanted)
        self.accelerator.log.append(("get", index))
        return self.accelerator.state[index].clone()

    def set_rng_state(self, state: torch.Tensor, wanted: Any = None) -> None:
        """Set the state of one device's generator."""
        index = self.accelerator.index(wanted)
        self.accelerator.log.append(("set", index))
        self.accelerator.state[index] = state.clone()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of all generators."""
        return [self.get_rng_state(index) for index in range(self.accelerator.count)]

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        """Set the states of all generators."""
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes of autocast."""
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False


_modules: dict[str, _DeviceModule] = {}


class FakeTensorOnDevice(torch.Tensor):
    """Says that it lives on the fake device; its operators run on a CPU tensor inside."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> FakeTensorOnDevice:  # noqa: D102
        made: FakeTensorOnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=device
        )
        made._inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeTensorOnDevice(shape={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        devices: list[torch.device] = []

        def unwrap(tensor: FakeTensorOnDevice) -> torch.Tensor:
            devices.append(tensor.device)
            return tensor._inner

        inner_args = tree_map_only(FakeTensorOnDevice, unwrap, args)
        inner_kwargs = tree_map_only(FakeTensorOnDevice, unwrap, kwargs or {})
        result = func(*inner_args, **inner_kwargs)
        return tree_map_only(torch.Tensor, lambda made: cls(made, devices[0]), result)


@contextlib.contextmanager
def fake_accelerator(candidate: Any = None, *, count: int = 2) -> Iterator[FakeAccelerator]:
    """Install a fake accelerator for the block.

    With ``candidate``, its DefaultDeviceType is what it was before, after the block too.
    Raises RuntimeError if this build of torch has a module for every name that could be borrowed.
    """
    for name in _BORROWED:
        if not hasattr(torch, name) and f"torch.{name}" not in sys.modules:
            break
    else:
        raise RuntimeError("no device type is free to be borrowed for a fake accelerator")
    default = (
        candidate.DefaultDeviceType
        if candidate is not None and candidate.has("DefaultDeviceType")
        else None
    )
    before = default.get_device_type() if default is not None else None
    accelerator = FakeAccelerator(name, count)
    module = _modules.setdefault(name, _DeviceModule(f"torch.{name}"))
    module.accelerator = accelerator
    setattr(torch, name, module)
    try:
        yield accelerator
    finally:
        delattr(torch, name)
        if default is not None:
            default.set_device_type(before)
