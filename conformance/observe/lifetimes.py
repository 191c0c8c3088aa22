"""Weak marks on tensors and objects, and exact byte counts of the data that a program makes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from conformance.observe.storages import LiveStorages

_T = TypeVar("_T")


class Marks:
    """Remembers weakly what it was shown.

        marks = Marks()
        y = marks(x.sin())      # the storage of the result is marked, y is that result
        marks.alive()           # number of marked storages and objects alive now

    A tensor is marked by its storage: a view or a copy of the tensor object keeps it alive, a copy
    of the data does not.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        # Collections look only at what is made from here on: the hundreds of thousands of objects
        # that torch and the test runner hold would make each of them some fifty times slower.
        gc.freeze()
        weakref.finalize(self, gc.unfreeze).atexit = False

    def __call__(self, value: _T) -> _T:
        """Mark ``value`` and return it."""
        target = value.untyped_storage() if isinstance(value, torch.Tensor) else value
        self._references.append(weakref.ref(target))
        return value

    def __len__(self) -> int:
        return len(self._references)

    def __bool__(self) -> bool:
        return True

    def indices(self) -> list[int]:
        """Which marks are alive now, counted in the order of marking."""
        return [i for i, reference in enumerate(self._references) if reference() is not None]

    def alive(self) -> int:
        """Number of marks alive now."""
        return len(self.indices())

    def surviving(self, allowed: int = 0) -> int:
        """Number of marks alive; where these are more than ``allowed``, after a garbage
        collection (left out where it cannot matter, for it takes time)."""
        alive, before = self.alive(), -1
        # What a collection frees may have held the next cycle: collect as long as that helps.
        while alive > allowed and alive != before:
            gc.collect()
            alive, before = self.alive(), alive
        return alive

    def clear(self) -> None:
        """Forget all marks."""
        self._references.clear()


class DataStorages(LiveStorages):
    """Counts only float64 storages, the dtype that a byte-counting program uses for its data, so
    that states of random generators and other bookkeeping of a candidate stay out of it."""

    def _watch(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        if tensor.dtype == torch.float64:
            super()._watch(tensor, inputs)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off for the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def young_heap() -> Iterator[None]:
    """Let collections and ``gc.get_objects`` in the block see only what the block makes, which
    spares them the hundred thousands of objects that torch and the test runner hold."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
