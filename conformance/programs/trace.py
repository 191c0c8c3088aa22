"""The events of a run: functions entered and left, operators, contexts, tensors saved and read.

Runs only after a failure was found. A recomputation is held against the forward run of the same
region: the events must be the same from its start to wherever it ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.observe.ambient import random_state
from conformance.programs.execute import Observed, RegionWrap, execute
from conformance.programs.render import Rendered


@dataclass(frozen=True)
class Event:
    """One event. ``run`` is the region's function and the number of its run, outermost first
    where they nest; empty outside of regions. ``text`` says what happened."""

    run: tuple[tuple[str, int], ...]
    text: str

    def __str__(self) -> str:
        place = " > ".join(
            f"{name} {'forward' if number == 1 else f'recompute {number - 1}'}"
            for name, number in self.run
        )
        return f"{place or 'program'}: {self.text}"


@dataclass
class Trace:
    """The events of one run, in order."""

    events: list[Event] = field(default_factory=list)
    observed: Observed | None = None

    def of_run(self, name: str, number: int) -> list[str]:
        """What happened inside one run of a region, runs of inner regions aside."""
        return [
            event.text for event in self.events if event.run and event.run[-1] == (name, number)
        ]

    def runs(self) -> Iterator[tuple[str, int]]:
        """Every run of a region, in the order of their beginnings."""
        seen = set()
        for event in self.events:
            if event.run and event.run[-1] not in seen:
                seen.add(event.run[-1])
                yield event.run[-1]


class _Operators(TorchDispatchMode):
    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Autograd and saved-tensor hooks detach what they keep: bookkeeping, not the program.
        if func is not torch.ops.aten.detach.default:
            self._log(f"operator {func} -> {_described(result)}")
        return result


class _Tracer:
    def __init__(self) -> None:
        self.trace = Trace()
        self._stack: list[tuple[str, int]] = []
        self._runs: dict[str, int] = {}

    def log(self, text: str) -> None:
        self.trace.events.append(Event(tuple(self._stack), text))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        def region(*args: Any, **kwargs: Any) -> Any:
            self._runs[name] = self._runs.get(name, 0) + 1
            self._stack.append((name, self._runs[name]))
            self.log(f"random state {_digest()}")
            self.log(f"autocast {'on' if torch.is_autocast_enabled('cpu') else 'off'}")
            self.log(f"default device {torch.get_default_device()}")
            self.log(f"given {_described((args, kwargs))}")
            ended = "left by an exception or early stop"
            try:
                result = function(*args, **kwargs)
                ended = f"returned {_described(result)}"
                return result
            finally:
                self.log(ended)
                self._stack.pop()

        return region


def trace(rendered: Rendered, api: Any, *, saved: bool = False) -> Trace:
    """Run the program and log its events; with ``saved``, also what passes through saved-tensor
    hooks around the whole program."""
    tracer = _Tracer()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tracer.log(f"saved {_described(tensor)}")
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        tracer.log(f"unpacked {_described(tensor)}")
        return tensor

    wrap: RegionWrap = tracer.wrap
    with _Operators(tracer.log):
        if saved:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                tracer.trace.observed = execute(rendered, api, wrap=wrap)
        else:
            tracer.trace.observed = execute(rendered, api, wrap=wrap)
    return tracer.trace


def first_divergence(expected: Trace, observed: Trace) -> str:
    """The first event where the observed trace leaves what it should be, with the events around.

    Forward is held against the plain run, each recomputation against that region's forward run.
    Returns a sentence where every event is as expected.
    """
    for name, number in observed.runs():
        wanted, got = expected.of_run(name, 1), observed.of_run(name, number)
        for index, event in enumerate(got):
            if index < len(wanted) and event == wanted[index]:
                continue
            if number > 1 and (event.startswith(("left", "returned"))):
                break  # Early stop, or an end without one: a recomputation may do either.
            before = got[max(0, index - 2) : index]
            lines = [f"  {text}" for text in before]
            lines.append(f"- {wanted[index] if index < len(wanted) else 'the end'}")
            lines.append(f"+ {event}")
            run = "forward" if number == 1 else f"recompute {number - 1}"
            return "\n".join([f"{name}, {run}:", *lines])
    missing = [run for run in expected.runs() if run not in set(observed.runs())]
    if missing:
        return f"{missing[0][0]} never ran"
    for name in {name for name, _ in observed.runs()}:
        if (name, 2) not in set(observed.runs()):
            return f"{name} was not recomputed; every event before is as expected"
    return "every event is as expected: only values differ"


def first_difference(one: Trace, other: Trace) -> str:
    """Where two traces of the same program on two implementations part, or an empty text."""
    for index in range(max(len(one.events), len(other.events))):
        left = one.events[index] if index < len(one.events) else "the end"
        right = other.events[index] if index < len(other.events) else "the end"
        if left != right:
            before = [f"  {event}" for event in one.events[max(0, index - 2) : index]]
            return "\n".join([*before, f"A {left}", f"B {right}"])
    return ""


def _digest() -> str:
    with torch.utils._python_dispatch._disable_current_modes():
        return format(zlib.crc32(random_state()), "08x")


def _described(value: Any) -> str:
    parts = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}")
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            parts.append(repr(leaf))
    return ", ".join(parts) or "nothing"
