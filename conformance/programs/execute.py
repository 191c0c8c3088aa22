"""Runs a rendered program against an implementation and keeps what could be observed."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from conformance.observe import AmbientState
from conformance.programs import prelude
from conformance.programs.render import Rendered

OPTIONS = frozenset(
    {
        "use_reentrant",
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "respect_saved_tensors_hooks",
    }
)


@dataclass
class Observed:
    """One run of a program.

    ``notes`` in order: name and a copy of the value. ``states``: ambient state by phase.
    ``runs``: how often each region's function was begun, by the name of the function.
    ``error`` is what ended the program early.
    """

    notes: list[tuple[str, Any]] = field(default_factory=list)
    states: dict[str, AmbientState] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None


class Plain:
    """The names of an implementation, without checkpointing."""

    name = "plain run"

    @staticmethod
    def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; without one, give the decorator that does nothing."""
        if function is None:
            return lambda function: function
        passed = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        return function(*args, **passed)

    @staticmethod
    def checkpoint_sequential(functions: Any, segments: int, input: Any, **options: Any) -> Any:
        """Call one after another."""
        for function in functions:
            input = function(input)
        return input

    GraphExecGroup = contextlib.nullcontext
    CheckpointPolicy = None
    create_selective_checkpoint_contexts = None

    @staticmethod
    def set_checkpoint_early_stop(enable: bool) -> Any:
        """Nothing to set."""
        return contextlib.nullcontext()

    @staticmethod
    def set_checkpoint_debug_enabled(enabled: bool | None) -> Any:
        """Nothing to set."""
        return contextlib.nullcontext()


PLAIN = Plain()

RegionWrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrapped_checkpoint(real: Callable[..., Any], wrap: RegionWrap) -> Callable[..., Any]:
    """``real`` with ``wrap`` around the function of every region, in every form of the call."""

    def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            decorate = real(**kwargs)
            return lambda function: decorate(wrap(function))
        return real(wrap(function), *args, **kwargs)

    return checkpoint


class _Notes:
    """What ``note`` is in a program that is being observed."""

    def __init__(self, observed: Observed, live: Any = None) -> None:
        self._observed = observed
        self._live = live

    def __call__(self, name: str, value: Any) -> None:
        if self._live is None:
            self._observed.notes.append((name, snapshot(value)))

    def state(self, phase: str) -> None:
        if self._live is None:
            self._observed.states[phase] = AmbientState.capture()
        else:
            self._observed.live[phase] = self._live.bytes()


@dataclass(frozen=True, eq=False)
class TensorCopy:
    """A tensor's bits at one moment and whether it required grad."""

    value: torch.Tensor
    grad: bool


def snapshot(value: Any) -> Any:
    """A copy that nothing can change later; tensors become :class:`TensorCopy`."""
    if isinstance(value, torch.Tensor):
        return TensorCopy(value.detach().clone(), value.requires_grad)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([snapshot(item) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(snapshot(getattr(value, item.name)) for item in fields(value)))
    return value


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> Any:
    """The function ``program`` of a rendered source."""
    names = dict(prelude.namespace())
    exec(compile(source, "<program>", "exec"), names)
    return names["program"]


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def execute(
    rendered: Rendered, api: Any, *, live: Any = None, wrap: RegionWrap | None = None
) -> Observed:
    """Run the program with the names of ``api`` and observe it.

    ``live``, a ``LiveStorages``, makes it a run that observes memory and nothing else: copies of
    values would count. ``wrap`` goes around every region's function, inside the counting.
    """
    observed = Observed()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        inner = function if wrap is None else wrap(function)

        def region(*args: Any, **kwargs: Any) -> Any:
            observed.runs[name] = observed.runs.get(name, 0) + 1
            return inner(*args, **kwargs)

        return region

    passed: dict[str, Any] = {name: getattr(api, name) for name in rendered.names}
    if "checkpoint" in passed:
        passed["checkpoint"] = wrapped_checkpoint(passed["checkpoint"], counted)
    before = torch.get_rng_state()
    with _quiet() as seen, live or contextlib.nullcontext():
        try:
            compiled(rendered.source)(note=_Notes(observed, live), **passed)
        except Exception as error:  # noqa: BLE001 - how a program ends is part of what it does
            observed.error = error
            observed.states["after the exception"] = AmbientState.capture()
        if live is not None and observed.error is None:
            observed.live["at the end"] = live.bytes()
    torch.set_rng_state(before)
    observed.warnings = [f"{item.category.__name__}: {item.message}" for item in seen]
    return observed
