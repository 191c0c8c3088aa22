"""Chapter 16: exceptions, what they leave behind, and warnings."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import (
    AmbientState,
    LiveStorages,
    PackLog,
    Recorder,
    assert_equivalent,
    assert_same,
    caught_warnings,
)
from conformance.testing import both_variants, clause, reached, variant_name

Region = Callable[..., Any]
Wrap = Callable[..., Any]


class _Own(Exception):
    """An exception class that no implementation knows."""


class _OwnBase(BaseException):
    """The same outside Exception."""


_CLASSES: list[type[BaseException]] = [
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
    OSError,
    UserWarning,
    StopAsyncIteration,
    _Own,
    _OwnBase,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
]


def _raised_by(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises, of any class, or None."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - any class may be asked about
        return error
    return None


def _describe(error: BaseException | None) -> str:
    return "no exception" if error is None else f"{type(error).__name__}: {error}"


def _input() -> torch.Tensor:
    return torch.linspace(0.25, 0.75, 3, requires_grad=True)


def _nested(ckpt: Candidate, function: Region, depth: int, **options: Any) -> Region:
    """``function`` inside ``depth`` regions, each of which has operators before and behind."""
    for _ in range(depth):

        def outer(t: torch.Tensor, inner: Region = function) -> Any:
            return ckpt.checkpoint(inner, t.sin(), **options).cos().tanh()

        function = outer
    return function


class _Fails:
    """Runs ``steps`` operators and raises ``error`` in run number ``at``, after ``after`` of them.

    The last operator needs its input, so a recomputation always gets as far as the fault.
    """

    def __init__(self, error: BaseException, *, at: int, after: int = 1, steps: int = 3) -> None:
        self.error = error
        self.at = at
        self.after = after
        self.steps = steps
        self.runs = 0

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for step in range(self.steps):
            if self.runs == self.at and step == self.after:
                raise self.error
            t = t.sin()
        return t


# ---------------------------------------------------------------------------- from the function


@clause("errors/forward-exception")
@both_variants
@given(kind=st.sampled_from(_CLASSES), after=st.integers(0, 2), depth=st.integers(0, 2))
def test_forward_exception_is_the_same_object(
    ckpt: Candidate, use_reentrant: bool, kind: type[BaseException], after: int, depth: int
) -> None:
    """Does an exception of forward leave the call as the very object, without a second run?"""
    ckpt.checkpoint(torch.sin, _input(), use_reentrant=use_reentrant).sum().backward()
    error = kind("the function's own")
    function = _Fails(error, at=1, after=after)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    observed = _raised_by(lambda: ckpt.checkpoint(region, _input(), use_reentrant=use_reentrant))
    reached()
    assert observed is error, (
        f"expected the {kind.__name__} that the function raised, observed {_describe(observed)}"
    )
    assert function.runs == 1, f"expected 1 run, observed {function.runs}"


@clause("errors/stop-iteration")
@both_variants
@pytest.mark.parametrize("how", ["next", "raise"])
@pytest.mark.parametrize("at", [1, 2], ids=["forward", "recomputation"])
@pytest.mark.parametrize("depth", [0, 1])
def test_stop_iteration_is_the_same_object(
    ckpt: Candidate, use_reentrant: bool, how: str, at: int, depth: int
) -> None:
    """Does StopIteration leave the call, or backward, as StopIteration?"""
    error = StopIteration("exhausted")
    runs: list[int] = []

    class Exhausted:
        def __iter__(self) -> Exhausted:
            return self

        def __next__(self) -> None:
            raise error

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        t = t.sin()
        if len(runs) == at and how == "next":
            next(Exhausted())
        elif len(runs) == at:
            raise error
        return t.exp().cos()

    _assert_works(ckpt, use_reentrant)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    observed = _raised_by(
        lambda: ckpt.checkpoint(region, _input(), use_reentrant=use_reentrant).sum().backward()
    )
    assert len(runs) == at, f"expected the fault in run {at}, observed {len(runs)} runs"
    reached()
    assert observed is error, (
        f"expected the StopIteration that the function raised, observed {_describe(observed)}"
    )


@clause("errors/recomputation-exception")
@both_variants
@given(
    kind=st.sampled_from(_CLASSES),
    after=st.integers(0, 2),
    depth=st.integers(0, 2),
    by_grad=st.booleans(),
)
def test_recomputation_exception_leaves_backward(
    ckpt: Candidate,
    use_reentrant: bool,
    kind: type[BaseException],
    after: int,
    depth: int,
    by_grad: bool,
) -> None:
    """Does an exception of the recomputation leave backward as the very object?"""
    error = kind("the second time")
    function = _Fails(error, at=2, after=after)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    x = _input()
    weight = torch.ones(3, requires_grad=True)
    result = ckpt.checkpoint(region, x * weight, use_reentrant=use_reentrant)
    assert function.runs == 1, f"expected 1 run in forward, observed {function.runs}"
    gradients: list[Any] = []

    def backward() -> None:
        if by_grad and not use_reentrant:
            gradients.extend(torch.autograd.grad(result.sum(), [x, weight]))
        else:
            result.sum().backward()

    observed = _raised_by(backward)
    assert function.runs == 2, f"expected 1 recomputation, observed {function.runs - 1}"
    reached()
    assert observed is error, (
        f"expected the {kind.__name__} that the function raised, observed {_describe(observed)}"
    )
    assert x.grad is None, "expected no gradient for the region's input"
    assert weight.grad is None, "expected no gradient for what lies behind the region"


class _FailingFormula(torch.autograd.Function):
    """The sine, whose gradient formula raises what ``error`` holds."""

    error: BaseException = _Own()

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return t.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert len(ctx.saved_tensors) == 1
        raise _FailingFormula.error


@clause("errors/backward-exception")
@both_variants
@given(
    kind=st.sampled_from(_CLASSES),
    where=st.sampled_from(["formula", "hook"]),
    depth=st.integers(0, 2),
    random_part=st.booleans(),
)
def test_exception_of_a_gradient_formula_leaves_backward(
    ckpt: Candidate,
    use_reentrant: bool,
    kind: type[BaseException],
    where: str,
    depth: int,
    random_part: bool,
) -> None:
    """Does an exception of a gradient formula leave backward, and no state behind?"""
    error = kind("in the formula")
    _FailingFormula.error = error
    runs: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        raise error

    def function(t: torch.Tensor) -> Any:
        runs.append(1)
        if random_part:
            t = t * torch.rand(3)
        t = t.exp()
        if where == "formula":
            return _FailingFormula.apply(t).exp()
        t = t.sin()
        if t.requires_grad:
            t.register_hook(hook)
        return t.exp()

    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    x = _input()
    result = ckpt.checkpoint(region, x, use_reentrant=use_reentrant)
    before = AmbientState.capture()
    observed = _raised_by(lambda: result.sum().backward())
    assert len(runs) >= 2, "expected a recomputation"
    reached()
    assert observed is error, (
        f"expected the {kind.__name__} that the formula raised, observed {_describe(observed)}"
    )
    changed = before.difference(AmbientState.capture())
    assert not changed, f"expected the state before backward, changed: {changed}"
    _assert_works(ckpt, use_reentrant)


def _assert_works(ckpt: Candidate, use_reentrant: bool) -> None:
    """A region called now gives exact results with one recomputation."""
    tail: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        t = (t * 2).sin().exp()
        tail.append(1)
        return t + 1

    x = _input()
    result = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
    result.sum().backward()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    assert_same(result, (x * 2).sin().exp() + 1, "result of the next region")
    assert_same(x.grad, expected, "gradient of the next region")
    assert len(tail) == (2 if use_reentrant else 1), (
        f"expected the next region to be recomputed as usual, observed {len(tail)} runs of its tail"
    )


@clause("errors/traceback")
@both_variants
@pytest.mark.parametrize("at", [1, 2], ids=["forward", "recomputation"])
def test_traceback_leads_into_the_function(ckpt: Candidate, use_reentrant: bool, at: int) -> None:
    """Does the traceback end at the function's line that raised?"""
    runs: list[int] = []

    def innermost_frame() -> None:
        raise _Own("here")

    def frame_of_the_function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        t = t.sin()
        if len(runs) == at:
            innermost_frame()
        return t.exp().cos()

    def program() -> None:
        x = _input()
        ckpt.checkpoint(frame_of_the_function, x, use_reentrant=use_reentrant).sum().backward()

    error = _raised_by(program)
    assert isinstance(error, _Own), f"expected the function's exception, got {_describe(error)}"
    reached()
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-2:] == ["frame_of_the_function", "innermost_frame"], (
        f"expected the traceback to end in the function's frames, observed {names}"
    )


class _Meeting:
    """Lets threads meet at a point. One that waits in vain goes on: an implementation may well run
    regions one at a time."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def wait(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(timeout=0.2)


def _in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    outcome: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_raised_by(work)))
    thread.start()
    return thread, outcome


@clause("errors/thread")
@both_variants
def test_exception_comes_out_where_backward_was_called(
    ckpt: Candidate, use_reentrant: bool
) -> None:
    """Does the exception come out in the thread that runs backward, and only there?"""
    error = _Own("the second time")
    function = _Fails(error, at=2)
    x = _input()
    result = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
    thread, outcome = _in_thread(lambda: result.sum().backward())
    thread.join()
    reached()
    assert outcome[0] is error, (
        f"expected the function's exception in the thread of backward, "
        f"observed {_describe(outcome[0])}"
    )
    assert x.grad is None, "expected no gradient"
    _assert_works(ckpt, use_reentrant)


@clause("errors/thread")
@both_variants
@pytest.mark.parametrize("at", [1, 2], ids=["forward", "recomputation"])
def test_failure_does_not_reach_another_threads_region(
    ckpt: Candidate, use_reentrant: bool, at: int
) -> None:
    """Is a region that is being run in another thread unaffected by a failure?"""
    inside, failed = _Meeting(2), _Meeting(2)
    error = _Own("only mine")
    x = _input()
    runs: list[int] = []

    def survives(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        t = t.sin()
        if len(runs) == at:
            inside.wait()
            failed.wait()
        return t.exp().cos()

    fails_runs: list[int] = []

    def fails(t: torch.Tensor) -> torch.Tensor:
        fails_runs.append(1)
        t = t.sin()
        if len(fails_runs) == at:
            inside.wait()
            raise error
        return t.exp().cos()

    def failing() -> None:
        try:
            ckpt.checkpoint(fails, _input(), use_reentrant=use_reentrant).sum().backward()
        finally:
            failed.wait()

    def surviving() -> None:
        ckpt.checkpoint(survives, x, use_reentrant=use_reentrant).sum().backward()

    one, first = _in_thread(failing)
    other, second = _in_thread(surviving)
    one.join()
    other.join()
    assert first[0] is error, f"expected the function's exception, observed {_describe(first[0])}"
    reached()
    if second[0] is not None:
        raise second[0]
    (expected,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    assert_same(x.grad, expected, "gradient of the other thread's region")
    assert len(runs) == 2, f"expected 1 recomputation there, observed {len(runs) - 1}"


# ---------------------------------------------------------------------------- left behind


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "device": lambda: torch.device("cpu"),
    "hooks": PackLog,
    "default dtype": _default_dtype,
}
_CONTEXTS = st.lists(st.sampled_from(sorted(_SURROUNDINGS)), max_size=3)
_RECORDING = st.lists(st.sampled_from(sorted(set(_SURROUNDINGS) - {"no_grad"})), max_size=3)


def _fails_inside(
    contexts: list[str], draws: int, error: BaseException, *, at: int, runs: list[int]
) -> Region:
    """A function that fails inside context managers of its own, after drawing random numbers."""

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        with contextlib.ExitStack() as stack:
            for name in contexts:
                stack.enter_context(_SURROUNDINGS[name]())
            masks = [torch.rand(3) for _ in range(draws)]
            if len(runs) == at:
                raise error
        for mask in masks:
            t = t * mask
        return t.sin().exp().cos()

    return function


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """What a candidate leaves behind must not reach the next example: Hypothesis runs a failing
    one again, and would call a failure that changed with the state flaky."""
    top, pop = _HOOKS._top_saved_tensors_default_hooks, _HOOKS._pop_saved_tensors_default_hooks
    hooks = top(True)
    before = AmbientState.capture()
    try:
        yield
    finally:
        for _ in range(16):
            if top(True) is None or top(True) == hooks:
                break
            pop()
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        for device, enabled, _ in before.autocast:
            torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)


_HOOKS = torch._C._autograd


@clause("errors/state-after-forward")
@both_variants
@given(around=_CONTEXTS, inside=_CONTEXTS, draws=st.integers(0, 2), depth=st.integers(0, 2))
def test_state_after_a_failed_forward_is_the_plain_one(
    ckpt: Candidate,
    use_reentrant: bool,
    around: list[str],
    inside: list[str],
    draws: int,
    depth: int,
) -> None:
    """Does a failed forward leave the state that the failed plain call leaves?"""
    with _put_back():
        _check_failed_forward(ckpt, use_reentrant, around, inside, draws, depth)


def _check_failed_forward(
    ckpt: Candidate,
    use_reentrant: bool,
    around: list[str],
    inside: list[str],
    draws: int,
    depth: int,
) -> None:
    error = _Own("in forward")

    def state(wrap: Wrap) -> tuple[AmbientState, AmbientState, list[int]]:
        function = _fails_inside(inside, draws, error, at=1, runs=[])

        def build(function: Region, depth: int) -> Region:
            if depth == 0:
                return function
            inner = build(function, depth - 1)
            return lambda t: wrap(inner, t.sin()).cos()

        torch.manual_seed(5)
        x = _input()
        packed = []
        with contextlib.ExitStack() as stack:
            entered = [stack.enter_context(_SURROUNDINGS[name]()) for name in around]
            raised = _raised_by(lambda: wrap(build(function, depth), x))
            assert raised is error, f"expected the function's exception, got {_describe(raised)}"
            within = AmbientState.capture()
            before = [len(log.packed) for log in entered if isinstance(log, PackLog)]
            with torch.enable_grad():
                (x * 2).sin()
            after = [len(log.packed) for log in entered if isinstance(log, PackLog)]
            packed = [now - then for now, then in zip(after, before, strict=True)]
        return within, AmbientState.capture(), packed

    expected = state(lambda function, t: function(t))
    observed = state(functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant))
    reached()
    places = ("within the surrounding contexts", "outside of them")
    for name, plain, region in zip(places, expected[:2], observed[:2], strict=True):
        changed = plain.difference(region)
        assert not changed, f"{name}: expected the state of the plain call, differing: {changed}"
    assert observed[2] == expected[2], (
        f"expected the surrounding hooks to see {expected[2]} tensors saved after the failure, "
        f"observed {observed[2]}"
    )


@clause("errors/state-after-recomputation")
@both_variants
@example(forward=[], backward=[], inside=[], draws=2, depth=0)
@example(forward=["autocast off"], backward=["autocast"], inside=["no_grad"], draws=1, depth=1)
@given(
    forward=_RECORDING,
    backward=_CONTEXTS,
    inside=_CONTEXTS,
    draws=st.integers(0, 2),
    depth=st.integers(0, 2),
)
def test_state_after_a_failed_recomputation_is_that_before_backward(
    ckpt: Candidate,
    use_reentrant: bool,
    forward: list[str],
    backward: list[str],
    inside: list[str],
    draws: int,
    depth: int,
) -> None:
    """Does a failed recomputation leave the state that backward found?"""
    with _put_back():
        _check_failed_recomputation(ckpt, use_reentrant, forward, backward, inside, draws, depth)


def _check_failed_recomputation(
    ckpt: Candidate,
    use_reentrant: bool,
    forward: list[str],
    backward: list[str],
    inside: list[str],
    draws: int,
    depth: int,
) -> None:
    error = _Own("the second time")
    runs: list[int] = []
    function = _fails_inside(inside, draws, error, at=2, runs=runs)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    x = _input()
    with contextlib.ExitStack() as stack:
        for name in forward:
            stack.enter_context(_SURROUNDINGS[name]())
        result = ckpt.checkpoint(region, x, use_reentrant=use_reentrant)
        assert len(runs) == 1, f"expected 1 run in forward, observed {len(runs)}"
        loss = result.float().sum()
    torch.rand(1)  # backward starts elsewhere in the random stream than a failed run ends
    outside = AmbientState.capture()
    with contextlib.ExitStack() as stack:
        entered = [stack.enter_context(_SURROUNDINGS[name]()) for name in backward]
        within = AmbientState.capture()
        raised = _raised_by(loss.backward)
        changed = within.difference(AmbientState.capture())
        logs = [log for log in entered if isinstance(log, PackLog)]
        before = [len(log.packed) for log in logs]
        with torch.enable_grad():
            (x * 2).sin()
        packed = [len(log.packed) - then for log, then in zip(logs, before, strict=True)]
    assert raised is error, f"expected the function's exception, observed {_describe(raised)}"
    assert len(runs) == 2, f"expected 1 recomputation, observed {len(runs) - 1}"
    reached()
    assert not changed, f"expected the state that backward found, changed: {changed}"
    changed = outside.difference(AmbientState.capture())
    assert not changed, f"expected the state around backward's contexts, changed: {changed}"
    # Of several pairs of hooks the one entered last sees what is saved.
    expected = [0] * (len(logs) - 1) + [1] if logs else []
    assert packed == expected, (
        f"expected the surrounding hooks to see {expected} tensors saved after the failure, "
        f"observed {packed}"
    )


_EVENTS = st.lists(
    st.sampled_from(["works", "pending", "forward fails", "recomputation fails", "formula fails"]),
    min_size=1,
    max_size=5,
)


@clause("errors/next-region")
@both_variants
@given(events=_EVENTS, depth=st.integers(0, 2), kind=st.sampled_from([_Own, _OwnBase]))
def test_regions_around_failures_work(
    ckpt: Candidate,
    use_reentrant: bool,
    events: list[str],
    depth: int,
    kind: type[BaseException],
) -> None:
    """Do regions before, between and after failures give exact gradients?"""
    call = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    pending: list[tuple[torch.Tensor, torch.Tensor, Recorder]] = []

    def start() -> None:
        region = Recorder(lambda t: (t * 3).sin().exp())
        x = _input()
        pending.append((x, call(region, x), region))

    start()
    for event in [*events, "pending"]:
        error = kind(event)
        if event == "works":
            _assert_works(ckpt, use_reentrant)
        elif event == "pending":
            start()
        elif event == "formula fails":
            _FailingFormula.error = error
            region = _nested(
                ckpt, lambda t: _FailingFormula.apply(t.exp()), depth, use_reentrant=use_reentrant
            )
            result = call(region, _input())
            observed = _raised_by(result.sum().backward)
            assert observed is error, f"{event}: expected its exception, got {_describe(observed)}"
        else:
            function = _Fails(error, at=1 if event == "forward fails" else 2)
            region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
            if event == "forward fails":
                observed = _raised_by(functools.partial(call, region, _input()))
            else:
                observed = _raised_by(call(region, _input()).sum().backward)
            assert observed is error, f"{event}: expected its exception, got {_describe(observed)}"
    reached()
    for number, (x, result, region) in enumerate(pending):
        result.sum().backward()
        (expected,) = torch.autograd.grad((x * 3).sin().exp().sum(), x)
        assert_same(x.grad, expected, f"gradient of pending region {number}")
        assert region.count == 2, (
            f"pending region {number}: expected 1 recomputation, observed {region.count - 1}"
        )
    _assert_works(ckpt, use_reentrant)


@clause("errors/next-region")
@pytest.mark.parametrize("use_reentrant", [True], ids=["reentrant"])
@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_reentrant_region_works_after_an_unsupported_backward(
    ckpt: Candidate, use_reentrant: bool, how: str
) -> None:
    """Does a reentrant region work after a backward that this variant does not support?"""
    x = _input()
    result = ckpt.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=use_reentrant)
    reached()
    # Whether it is refused is for chapter 3.
    with contextlib.suppress(RuntimeError):
        if how == "grad":
            torch.autograd.grad(result.sum(), x)
        else:
            torch.autograd.backward(result.sum(), inputs=[x])
    _assert_works(ckpt, use_reentrant)


@clause("errors/next-region")
@given(depth=st.integers(1, 3), at=st.integers(1, 2))
def test_configured_early_stop_survives_a_failure(ckpt: Candidate, depth: int, at: int) -> None:
    """Does each region keep its own early_stop when one nested in it fails and is caught?"""
    function = _Fails(_Own("inside"), at=at)
    tail: list[int] = []

    def outer(t: torch.Tensor) -> torch.Tensor:
        region = _nested(ckpt, function, depth - 1, use_reentrant=False)
        with contextlib.suppress(_Own):
            ckpt.checkpoint(region, t, use_reentrant=False)
        t = t.sin()
        tail.append(1)
        return t + 1

    x = _input()
    ckpt.checkpoint(outer, x, use_reentrant=False).sum().backward()
    reached()
    assert len(tail) == 1, f"expected the region to stop early, observed {len(tail)} tails"
    _assert_works(ckpt, False)


@clause("errors/retry")
@given(
    failures=st.integers(1, 3), after=st.integers(0, 2), depth=st.integers(0, 2), tail=st.booleans()
)
def test_retained_graph_is_recomputed_anew(
    ckpt: Candidate, failures: int, after: int, depth: int, tail: bool
) -> None:
    """Does backward succeed with exact gradients once the function does?"""
    state = {"runs": 0, "left": 0}

    def function(t: torch.Tensor) -> torch.Tensor:
        state["runs"] += 1
        for step in range(3):
            if state["left"] and step == after:
                state["left"] -= 1
                raise MemoryError("for the moment")
            t = (t * (step + 1)).sin()
        return t + 1 if tail else t

    def plain(t: torch.Tensor, depth: int) -> torch.Tensor:
        return plain(t.sin(), depth - 1).cos().tanh() if depth else function(t)

    x = _input()
    region = _nested(ckpt, function, depth, use_reentrant=False)
    result = ckpt.checkpoint(region, x, use_reentrant=False)
    state["left"] = failures
    for failure in range(failures):
        error = _raised_by(lambda: result.sum().backward(retain_graph=True))
        assert isinstance(error, MemoryError), (
            f"pass {failure}: expected the function's exception, observed {_describe(error)}"
        )
    assert x.grad is None, "expected no gradient from failed passes"
    reached()
    result.sum().backward()
    (expected,) = torch.autograd.grad(plain(x, depth).sum(), x)
    assert_same(x.grad, expected, "gradient after the retry")


@clause("errors/failed-forward-frees")
@both_variants
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_failed_forward_keeps_nothing(ckpt: Candidate, use_reentrant: bool, depth: int) -> None:
    """Are the tensors of a failed forward freed with its exception?"""
    x = _input()
    function = _Fails(_Own("in forward"), at=1, after=2)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    with LiveStorages() as live:
        try:
            ckpt.checkpoint(region, x, use_reentrant=use_reentrant)
        except _Own:
            peak = live.peak
    function.error = _Own("another")  # the old one held the frames
    if live.count():
        gc.collect()  # a cycle is allowed, and collecting takes its time
    assert peak > 0, "expected the function to have made tensors"
    reached()
    assert live.count() == 0, f"expected nothing to be kept, observed {live.count()} storages"


@clause("errors/failed-recomputation-frees")
@both_variants
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_failed_recomputation_keeps_nothing(
    ckpt: Candidate, use_reentrant: bool, depth: int
) -> None:
    """Is everything freed once exception and result of a failed region are dropped?"""
    x = _input()
    function = _Fails(_Own("the second time"), at=2, after=2)
    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    with LiveStorages() as live:
        result = ckpt.checkpoint(region, x, use_reentrant=use_reentrant)
        try:
            result.sum().backward()
        except _Own:
            peak = live.peak
    assert function.runs == 2, f"expected 1 recomputation, observed {function.runs - 1}"
    function.error = _Own("another")  # the old one held the frames
    del result
    if live.count():
        gc.collect()  # a cycle is allowed, and collecting takes its time
    assert peak > 0, "expected the function to have made tensors"
    reached()
    assert live.count() == 0, f"expected nothing to be kept, observed {live.count()} storages"


# ---------------------------------------------------------------------------- handlers inside


@clause("errors/caught-inside")
@both_variants
@given(
    kind=st.sampled_from([ValueError, KeyError, TypeError, OSError, LookupError, _Own, _OwnBase]),
    attempts=st.lists(st.booleans(), min_size=1, max_size=3),
    tail=st.booleans(),
    use_else=st.booleans(),
)
def test_exceptions_caught_inside_change_nothing(
    ckpt: Candidate,
    use_reentrant: bool,
    kind: type[BaseException],
    attempts: list[bool],
    tail: bool,
    use_else: bool,
) -> None:
    """Does a function that catches its own exceptions get the plain gradients?"""

    def function(t: torch.Tensor) -> torch.Tensor:
        for fails in attempts:
            try:
                t = t.sin()
                if fails:
                    raise kind("own")
                t = t.exp()
            except kind:
                t = t.cos() * 2
            else:
                t = t.tanh() if use_else else t
            finally:
                t = t * 3
        return t + 1 if tail else t.sigmoid()

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result

    wrap = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    assert_equivalent(program, lambda: [_input()], wrap)
    reached()


@clause("errors/caught-inside")
@both_variants
@given(
    kind=st.sampled_from([ValueError, KeyError, RuntimeError, _Own, _OwnBase]),
    depth=st.integers(1, 3),
    after=st.integers(0, 2),
    fails=st.booleans(),
    tail=st.booleans(),
)
def test_exceptions_of_nested_regions_are_caught(
    ckpt: Candidate,
    use_reentrant: bool,
    kind: type[BaseException],
    depth: int,
    after: int,
    fails: bool,
    tail: bool,
) -> None:
    """Can a function catch what a region inside it raises, and still get the plain gradients?"""
    if use_reentrant and kind is RuntimeError:
        kind = _Own

    def risky(t: torch.Tensor) -> torch.Tensor:
        for step in range(3):
            if fails and step == after:
                raise kind("in the inner region")
            t = t.sin()
        return t

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        region: Region = risky
        for _ in range(depth - 1):

            def between(t: torch.Tensor, inner: Region = region) -> Any:
                return wrap(inner, t.cos()).tanh()

            region = between

        def outer(t: torch.Tensor) -> Any:
            t = t.exp()
            try:
                t = wrap(region, t)
            except kind:
                t = t.cos() * 2
            return t * 2 if tail else t.sigmoid()

        result: torch.Tensor = wrap(outer, leaves[0])
        result.sum().backward()
        return result

    wrap = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    assert_equivalent(program, lambda: [_input()], wrap)
    reached()


def _handled(place: int, guarded: int, broad: str, fallback: str, tail: int) -> Region:
    """Operators, of which ``guarded`` from ``place`` on are under a handler for everything."""
    caught = {"Exception": Exception, "BaseException": BaseException}[broad]

    def function(t: torch.Tensor) -> Any:
        for _ in range(place):
            t = t.sin()
        try:
            for _ in range(guarded):
                t = t.exp().sin()
        except caught as error:
            if fallback == "raises":
                raise _Own("instead") from error
            if fallback == "returns nothing":
                return None
            t = {
                "saves more": lambda t: t.cos().cos().cos() * 3,
                "saves one": lambda t: t.cos() * 3,
                "saves none": lambda t: t * 100,
                "goes on": lambda t: t,
            }[fallback](t)
        for _ in range(tail):
            t = t.cos()
        return t

    return function


@clause("errors/broad-handler")
@given(
    place=st.integers(0, 2),
    guarded=st.integers(1, 2),
    broad=st.sampled_from(["Exception", "BaseException"]),
    fallback=st.sampled_from(
        ["saves more", "saves one", "saves none", "goes on", "raises", "returns nothing"]
    ),
    tail=st.integers(0, 2),
)
def test_broad_handler_gives_no_wrong_gradient(
    ckpt: Candidate, place: int, guarded: int, broad: str, fallback: str, tail: int
) -> None:
    """Is the gradient exact, or else an error loud, when the function catches everything?"""
    function = _handled(place, guarded, broad, fallback, tail)
    region = Recorder(function)
    x = _input()
    result = ckpt.checkpoint(region, x, use_reentrant=False)
    assert_same(result, function(x), "result")
    error = _raised_by(lambda: result.sum().backward())
    assert region.count >= 2, "expected a recomputation"
    reached()
    if error is None:
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        assert_same(x.grad, expected, f"gradient beside a fallback that {fallback}")
    else:
        assert x.grad is None, f"expected no gradient with {_describe(error)}"
    _assert_works(ckpt, False)


@clause("errors/broad-handler")
@given(
    depth=st.integers(1, 2),
    fallback=st.sampled_from(["saves more", "saves none"]),
    tail=st.integers(0, 2),
)
def test_broad_handler_around_a_nested_region(
    ckpt: Candidate, depth: int, fallback: str, tail: int
) -> None:
    """Is the gradient exact, or an error loud, with a broad handler around an inner region?"""

    def function(wrap: Wrap, t: torch.Tensor, left: int) -> torch.Tensor:
        if left == 0:
            return t.sin().exp()
        t = t.sin()
        try:
            t = wrap(lambda t: function(wrap, t, left - 1), t)
        except Exception:  # noqa: BLE001 - the handler is what is asked about
            t = t.cos() * 3 if fallback == "saves more" else t * 100
        for _ in range(tail):
            t = t.cos()
        return t

    x = _input()
    wrap = functools.partial(ckpt.checkpoint, use_reentrant=False)
    region = Recorder(lambda t: function(wrap, t, depth))
    result = wrap(region, x)
    error = _raised_by(lambda: result.sum().backward())
    assert region.count >= 2, "expected a recomputation"
    reached()
    if error is None:
        plain = function(lambda inner, t: inner(t), x, depth)
        (expected,) = torch.autograd.grad(plain.sum(), x)
        assert_same(x.grad, expected, "gradient")
    _assert_works(ckpt, False)


class _Noted:
    """A context manager that notes when it is entered and left, and with what."""

    def __init__(self, name: int, events: list[tuple[str, int]]) -> None:
        self.name = name
        self.events = events

    def __enter__(self) -> None:
        self.events.append(("enter", self.name))

    def __exit__(self, *raised: object) -> None:
        self.events.append(("exit", self.name))


@clause("errors/unwinding")
@both_variants
@given(
    contexts=st.integers(1, 3),
    use_finally=st.booleans(),
    end=st.sampled_from(["inside", "behind", "fails"]),
    depth=st.integers(0, 1),
)
def test_contexts_of_the_function_are_left(
    ckpt: Candidate, use_reentrant: bool, contexts: int, use_finally: bool, end: str, depth: int
) -> None:
    """Is whatever a run of the function entered left again, innermost first?"""
    events: list[tuple[str, int]] = []
    runs: list[int] = []
    marks: list[int] = []

    def inner(t: torch.Tensor, level: int) -> torch.Tensor:
        if level == contexts:
            t = t.sin()
            if end == "fails" and len(runs) == 2:
                raise _Own("the second time")
            return t.exp()
        if use_finally:
            events.append(("enter", level))
            try:
                return inner(t, level + 1)
            finally:
                events.append(("exit", level))
        with _Noted(level, events), torch.autocast("cpu", enabled=False):
            return inner(t, level + 1)

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        t = inner(t, 0)
        marks.append(1)
        return t.cos() if end == "behind" else t + 1

    region = _nested(ckpt, function, depth, use_reentrant=use_reentrant)
    result = ckpt.checkpoint(region, _input(), use_reentrant=use_reentrant)
    before = AmbientState.capture()
    once = [("enter", level) for level in range(contexts)]
    once += [("exit", level) for level in reversed(range(contexts))]
    assert events == once, f"forward: expected {once}, observed {events}"
    error = _raised_by(lambda: result.sum().backward())
    assert isinstance(error, _Own) == (end == "fails"), f"observed {_describe(error)}"
    assert len(runs) >= 2, "expected a recomputation"
    reached()
    assert events == once * len(runs), (
        f"expected each of {len(runs)} runs to leave what it entered, observed {events}"
    )
    changed = before.difference(AmbientState.capture())
    assert not changed, f"expected the state before backward, changed: {changed}"


@clause("errors/consumed-argument")
@given(
    container=st.sampled_from(["list", "dictionary", "iterator", "object"]),
    before=st.integers(0, 2),
    by_keyword=st.booleans(),
)
def test_used_up_argument_is_noticed(
    ckpt: Candidate, container: str, before: int, by_keyword: bool
) -> None:
    """Is the gradient exact, or an error loud, when the second run finds its argument used up?"""
    x = _input()
    weight = torch.full((3,), 0.5, requires_grad=True)

    class Box:
        held: torch.Tensor

    def make() -> Any:
        box = Box()
        box.held = x * 2
        return {
            "list": [x * 2],
            "dictionary": {"held": x * 2},
            "iterator": iter([x * 2]),
            "object": box,
        }[container]

    def take(box: Any) -> torch.Tensor:
        taken: torch.Tensor
        if container == "iterator":
            taken = next(box)
        elif container == "object":
            taken = box.held
            del box.held
        else:
            taken = box.pop(0 if container == "list" else "held")
        return taken

    def function(w: torch.Tensor, box: Any) -> torch.Tensor:
        for _ in range(before):
            w = w.sin()
        return (take(box) * w).sin().exp()

    region = Recorder(function, keep_arguments=False)
    if by_keyword:
        result = ckpt.checkpoint(region, weight, use_reentrant=False, box=make())
    else:
        result = ckpt.checkpoint(region, weight, make(), use_reentrant=False)
    assert_same(result, function(weight, make()), "result")
    error = _raised_by(lambda: result.sum().backward())
    reached()
    if error is None:
        expected = torch.autograd.grad(function(weight, make()).sum(), [x, weight])
        assert_same([x.grad, weight.grad], list(expected), "gradients")
    else:
        assert isinstance(error, Exception), f"observed {_describe(error)}"
        assert weight.grad is None, f"expected no gradient with {_describe(error)}"


# ---------------------------------------------------------------------------- particular errors

_WITH_CONSTANT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "added": lambda t, k: ((t + k) * 3).sin(),
    "added last": lambda t, k: t.sin().exp() + k,
    "multiplied": lambda t, k: (t * k).sin(),
    "unused": lambda t, k: t.sin().exp(),
    "shape only": lambda t, k: t.sin().exp() * k.numel(),
    "detached": lambda t, k: t.sin() + k.sin().detach(),
}


@clause("errors/inference-tensor")
@both_variants
@pytest.mark.parametrize("use", sorted(_WITH_CONSTANT))
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
def test_inference_tensor_is_refused_or_exact(
    ckpt: Candidate, use_reentrant: bool, use: str, first: bool
) -> None:
    """Does an inference tensor give exact gradients or an exception of the call?"""

    def function(*args: torch.Tensor) -> torch.Tensor:
        t, k = reversed(args) if first else args
        return _WITH_CONSTANT[use](t, k)

    def call(wrap: Wrap, k: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
        x = _input()
        try:
            result = wrap(function, *((k, x) if first else (x, k)))
        except RuntimeError:
            return None, None
        result.sum().backward()
        return result, x.grad

    wrap = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    normal = torch.full((3,), 2.0)
    with torch.inference_mode():
        inference = torch.full((3,), 2.0)
    plain = call(lambda function, *args: function(*args), normal)
    assert_same(call(wrap, normal), plain, "result and gradient with an ordinary tensor")
    reached()
    observed = call(wrap, inference)
    if observed[0] is not None:
        assert_same(observed, plain, "result and gradient with an inference tensor")


@clause("errors/checkpoint-error")
@pytest.mark.parametrize("change", ["shape", "dtype", "number"])
def test_checkpoint_error_is_public(ckpt: Candidate, change: str) -> None:
    """Is the failed determinism check a CheckpointError, and that a RuntimeError?"""
    runs: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2 and change == "shape":
            t = t[:2]
        elif len(runs) == 2 and change == "dtype":
            t = t.double()
        elif len(runs) == 2:
            return t * 1
        return t.sin().exp().sum()

    assert issubclass(ckpt.CheckpointError, RuntimeError), (
        f"expected a subclass of RuntimeError, observed {ckpt.CheckpointError.__mro__}"
    )
    error = _raised_by(lambda: ckpt.checkpoint(function, _input(), use_reentrant=False).backward())
    assert len(runs) == 2, f"expected 1 recomputation, observed {len(runs) - 1}"
    reached()
    assert isinstance(error, ckpt.CheckpointError), (
        f"expected a CheckpointError for another {change}, observed {_describe(error)}"
    )


# ---------------------------------------------------------------------------- warnings


def _naming_the_option(
    seen: list[warnings.WarningMessage],
) -> list[warnings.WarningMessage]:
    return [warning for warning in seen if "use_reentrant" in str(warning.message)]


def _texts(seen: list[warnings.WarningMessage]) -> list[str]:
    return [f"{warning.category.__name__}: {warning.message}"[:100] for warning in seen]


@clause("warnings/missing-choice")
@given(calls=st.integers(1, 4), backward=st.booleans(), explicit_first=st.booleans())
def test_every_omitted_choice_is_announced(
    ckpt: Candidate, calls: int, backward: bool, explicit_first: bool
) -> None:
    """Does each call without use_reentrant warn once, in a category that is shown, or raise?"""
    for call in range(calls):
        region = Recorder(lambda t: t.sin().exp())
        x = _input()
        if explicit_first:
            ckpt.checkpoint(torch.sin, x, use_reentrant=False)
        with caught_warnings() as seen:
            try:
                result = ckpt.checkpoint(region, x)
            except Exception:  # noqa: BLE001 - refusing is one of the two ways
                reached()
                assert region.count == 0, "expected a refused call not to run the function"
                continue
        reached()
        named = _naming_the_option(seen)
        assert len(named) == 1, (
            f"call {call}: expected 1 warning that names use_reentrant, observed {_texts(seen)}"
        )
        hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
        assert not issubclass(named[0].category, hidden), (
            f"expected a category that Python shows by default, observed {named[0].category}"
        )
        if backward:
            with caught_warnings() as seen:
                result.sum().backward()
            assert not _naming_the_option(seen), (
                f"expected no further warning in backward, observed {_texts(seen)}"
            )


@clause("warnings/missing-choice")
def test_announcement_may_be_turned_into_an_error(ckpt: Candidate) -> None:
    """Do filters that turn warnings into errors turn the announcement into an exception?"""
    x = _input()
    region = Recorder(lambda t: t.sin().exp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.checkpoint(region, x, use_reentrant=False).sum().backward()
        assert region.count == 2, f"expected 1 recomputation, observed {region.count - 1}"
        reached()
        with pytest.raises(Exception):  # noqa: B017 - a warning or the announced exception
            ckpt.checkpoint(region, x)
    _assert_works(ckpt, False)


_CALLER = """
def call(checkpoint, function, x):
    return checkpoint(function, x)

def call_none(checkpoint, function, x):
    return checkpoint(function, x, use_reentrant=None)

def outer(checkpoint, function, x):
    return call(checkpoint, function, x)

class Model:
    def forward(self, checkpoint, function, x):
        return checkpoint(function, x)

def decorate(checkpoint, function, x):
    decorator = checkpoint()
    wrapped = decorator(function)
    return wrapped(x)

def method(checkpoint, function, x):
    class Decorated:
        @checkpoint()
        def forward(self, x):
            return function(x)

    return Decorated().forward(x)
"""


def _caller(padding: int, name: str) -> tuple[dict[str, Any], str, list[str]]:
    """Functions compiled as if they stood in a file ``name``, ``padding`` lines down."""
    source = "\n" * padding + _CALLER
    namespace: dict[str, Any] = {"__name__": "callers_own_module"}
    exec(compile(source, name, "exec"), namespace)
    return namespace, name, source.splitlines()


@clause("warnings/direct-call-location")
@given(
    padding=st.integers(0, 40),
    way=st.sampled_from(["call", "call_none", "outer", "Model"]),
    again=st.booleans(),
)
def test_warning_points_to_the_call(ckpt: Candidate, padding: int, way: str, again: bool) -> None:
    """Do file and line of the warning say which call omitted use_reentrant?"""
    namespace, name, lines = _caller(padding, f"/somewhere/caller_{padding}.py")
    call = namespace["Model"]().forward if way == "Model" else namespace[way]
    for _ in range(2 if again else 1):
        with caught_warnings() as seen:
            try:
                call(ckpt.checkpoint, torch.sin, _input())
            except Exception:  # noqa: BLE001 - a refused call has its location in the traceback
                reached()
                return
        named = _naming_the_option(seen)
        assert named, f"expected a warning that names use_reentrant, observed {_texts(seen)}"
        reached()
        (warning, *_) = named
        assert warning.filename == name, (
            f"expected the warning to point into the caller's file {name}, "
            f"observed {warning.filename}:{warning.lineno}"
        )
        line = lines[warning.lineno - 1] if warning.lineno <= len(lines) else "no such line"
        expected = {
            "call_none": "    return checkpoint(function, x, use_reentrant=None)",
            "Model": "        return checkpoint(function, x)",
        }.get(way, "    return checkpoint(function, x)")
        assert line == expected, (
            f"expected the warning to point to {expected.strip()!r}, observed line "
            f"{warning.lineno}: {line.strip()!r}"
        )


@clause("warnings/decorator-location")
@given(padding=st.integers(0, 40), way=st.sampled_from(["decorate", "method"]))
def test_warning_of_the_decorator_form_points_to_the_user(
    ckpt: Candidate, padding: int, way: str
) -> None:
    """Do file and line of the warning lie where the user decorates or calls?"""
    namespace, name, lines = _caller(padding, f"/somewhere/caller_{padding}.py")
    with caught_warnings() as seen:
        try:
            namespace[way](ckpt.checkpoint, torch.sin, _input())
        except Exception:  # noqa: BLE001 - a refused call has its location in the traceback
            reached()
            return
    named = _naming_the_option(seen)
    assert named, f"expected a warning that names use_reentrant, observed {_texts(seen)}"
    reached()
    for warning in named:
        assert warning.filename == name, (
            f"expected the warning to point into the caller's file {name}, "
            f"observed {warning.filename}:{warning.lineno}"
        )
        line = lines[warning.lineno - 1].strip() if warning.lineno <= len(lines) else ""
        allowed = {
            "decorate": [
                "decorator = checkpoint()",
                "wrapped = decorator(function)",
                "return wrapped(x)",
            ],
            "method": ["@checkpoint()", "def forward(self, x):", "return Decorated().forward(x)"],
        }[way]
        assert line in allowed, (
            f"expected the warning to point to one of {allowed}, observed line "
            f"{warning.lineno}: {line!r}"
        )


@clause("warnings/explicit-choice")
@both_variants
@given(omitted_before=st.integers(0, 2), calls=st.integers(1, 3))
def test_explicit_choice_is_silent(
    ckpt: Candidate, use_reentrant: bool, omitted_before: int, calls: int
) -> None:
    """Is a call that chooses not warned, whatever calls before it did?"""
    x = _input()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(omitted_before):
            with contextlib.suppress(Exception):
                ckpt.checkpoint(torch.sin, x)
    for _ in range(calls):
        region = Recorder(lambda t: t.sin().exp())
        with caught_warnings() as seen:
            ckpt.checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
        assert region.count == 2, f"expected 1 recomputation, observed {region.count - 1}"
        reached()
        assert not _naming_the_option(seen), (
            f"expected no warning about use_reentrant={use_reentrant}, observed {_texts(seen)}"
        )


_NO_GRAD_ARGUMENTS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "constant": lambda x: (x.detach(),),
    "several": lambda x: (x.detach(), torch.arange(3), 2.5, None),
    "list": lambda x: ([x],),
    "dictionary": lambda x: (x.detach(), {"a": x}),
}


@clause("warnings/reentrant-without-grad-input")
@pytest.mark.parametrize("kind", sorted(_NO_GRAD_ARGUMENTS))
@pytest.mark.parametrize("repeat", [1, 2])
def test_region_without_grad_input_is_announced(ckpt: Candidate, kind: str, repeat: int) -> None:
    """Does a reentrant region that will get no gradients say so, and only such a region?"""
    x = _input()
    weight = torch.ones(3, requires_grad=True)

    def function(*args: Any) -> torch.Tensor:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        result: torch.Tensor = (first * weight).sin().exp()
        return result

    for _ in range(repeat):
        with caught_warnings() as seen:
            ckpt.checkpoint(function, x, *_NO_GRAD_ARGUMENTS[kind](x), use_reentrant=True)
        assert not seen, (
            f"expected no warning where an input requires grad, observed {_texts(seen)}"
        )
        reached()
        with caught_warnings() as seen:
            ckpt.checkpoint(function, *_NO_GRAD_ARGUMENTS[kind](x), use_reentrant=True)
        assert any("requires_grad" in str(warning.message) for warning in seen), (
            f"expected a warning that mentions requires_grad, observed {_texts(seen)}"
        )


def _clean_programs(wrap: Wrap) -> dict[str, Callable[[torch.Tensor], object]]:
    """Programs of the non-reentrant variant that warn of nothing in the plain run."""

    def function(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).sin().exp()

    def autocast(x: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = wrap(lambda t: t @ t, x.expand(3, 3))
        y.float().sum().backward()

    def twice(x: torch.Tensor) -> None:
        y = wrap(function, x).sum()
        y.backward(retain_graph=True)
        y.backward()

    def second_order(x: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(wrap(function, x).sum(), x, create_graph=True)
        gradient.sum().backward()

    def module(x: torch.Tensor) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.ReLU())
        wrap(model, x.reshape(1, 3)).sum().backward()

    def no_grad(x: torch.Tensor) -> None:
        with torch.no_grad():
            wrap(function, x)

    def hooks(x: torch.Tensor) -> None:
        with PackLog():
            y = wrap(function, x)
        y.sum().backward()

    def weights(x: torch.Tensor) -> None:
        weight = torch.ones(3, requires_grad=True)
        wrap(lambda t: (t * weight).sin().exp(), x.detach()).sum().backward()

    return {
        "backward": lambda x: wrap(function, x).sum().backward(),
        "grad": lambda x: torch.autograd.grad(wrap(function, x).sum(), x),
        "inputs": lambda x: wrap(function, x).sum().backward(inputs=[x]),
        "random": lambda x: wrap(lambda t: (t * torch.rand(3)).sin().exp(), x).sum().backward(),
        "containers": lambda x: (
            wrap(lambda d: {"y": function(d["x"][0])}, {"x": [x]})["y"].sum().backward()
        ),
        "keywords": lambda x: (
            wrap(lambda t, *, gain: function(t * gain), x, gain=x * 2).sum().backward()
        ),
        "nested": lambda x: wrap(lambda t: wrap(function, t.sin()).cos(), x).sum().backward(),
        "no input needs grad": weights,
        "nothing needs grad": lambda x: wrap(function, x.detach()),
        "inference mode": lambda x: torch.inference_mode()(wrap)(function, x),
        "dropped": lambda x: wrap(function, x),
        "autocast": autocast,
        "retained graph": twice,
        "second order": second_order,
        "module": module,
        "no_grad": no_grad,
        "saved-tensor hooks": hooks,
    }


_SUPPORTED_BY_REENTRANT = ("backward", "random", "autocast", "module", "no_grad", "dropped")


def _silently(program: Callable[[torch.Tensor], object], capfd: Any) -> list[str]:
    """What ``program`` warns of and writes."""
    capfd.readouterr()
    with caught_warnings() as seen:
        program(_input())
    written = capfd.readouterr()
    noise = [text for text in _texts(seen) if "NumPy" not in text]  # torch without NumPy says so
    return noise + [text for text in written if text]


def _clean_cases() -> list[Any]:
    uses = sorted(_clean_programs(lambda function, *args: None))
    cases = [(False, use) for use in uses] + [(True, use) for use in _SUPPORTED_BY_REENTRANT]
    return [
        pytest.param(use_reentrant, use, id=f"{variant_name(use_reentrant)}-{use}")
        for use_reentrant, use in cases
    ]


@clause("warnings/clean-use")
@pytest.mark.parametrize(("use_reentrant", "use"), _clean_cases())
def test_documented_use_is_silent(
    ckpt: Candidate, use_reentrant: bool, use: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Does use as documented warn of nothing and print nothing?"""
    plain = _clean_programs(lambda function, *args, **kwargs: function(*args, **kwargs))[use]
    before = _silently(plain, capfd)
    assert not before, f"the plain run is not silent: {before}"
    wrap = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    program = _clean_programs(wrap)[use]
    reached()
    for run in ("first", "second"):
        noise = _silently(program, capfd)
        assert not noise, f"{run} run: expected no warning and no output, observed {noise}"


class _OwnWarning(UserWarning):
    """A category of the function's own."""


@clause("warnings/functions-own")
@both_variants
@given(
    times=st.integers(1, 3),
    category=st.sampled_from([UserWarning, RuntimeWarning, DeprecationWarning, _OwnWarning]),
    depth=st.integers(0, 1),
)
def test_warnings_of_the_function_get_through(
    ckpt: Candidate,
    use_reentrant: bool,
    times: int,
    category: type[Warning],
    depth: int,
) -> None:
    """Do warnings of forward reach the caller's filters unchanged?"""

    def function(t: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            warnings.warn("the function's own", category, stacklevel=1)
        return t.sin().exp()

    def forward(wrap: Wrap) -> list[tuple[type[Warning], str, str, int]]:
        def build(depth: int) -> Region:
            if depth == 0:
                return function
            inner = build(depth - 1)
            return lambda t: wrap(inner, t.sin()).cos()

        with caught_warnings() as seen:
            wrap(build(depth), _input())
        return [
            (w.category, str(w.message), w.filename, w.lineno)
            for w in seen
            if "function's own" in str(w.message)
        ]

    expected = forward(lambda function, t: function(t))
    observed = forward(functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant))
    reached()
    assert observed == expected, (
        f"expected the function's {len(expected)} warnings, observed {observed}"
    )


@clause("warnings/functions-own")
@both_variants
@pytest.mark.parametrize("phase", ["forward", "recomputation"])
def test_filters_turn_the_functions_warnings_into_exceptions(
    ckpt: Candidate, use_reentrant: bool, phase: str
) -> None:
    """Does a warning that the filters turn into an exception come out?"""

    def function(t: torch.Tensor) -> torch.Tensor:
        warnings.warn("the function's own", _OwnWarning, stacklevel=1)
        return t.sin().exp()

    x = _input()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reached()
        error = _raised_by(
            functools.partial(ckpt.checkpoint, function, x, use_reentrant=use_reentrant)
            if phase == "forward"
            else result.sum().backward
        )
        assert isinstance(error, _OwnWarning), (
            f"expected the function's warning as an exception, observed {_describe(error)}"
        )


@clause("warnings/filters-untouched")
@both_variants
@given(
    end=st.sampled_from(["works", "forward fails", "recomputation fails", "omitted"]),
    action=st.sampled_from(["always", "ignore", "default"]),
)
def test_filters_stay_as_they_were(
    ckpt: Candidate, use_reentrant: bool, end: str, action: Any
) -> None:
    """Are filters and display of warnings the same after a region as before?"""
    at = {"forward fails": 1, "recomputation fails": 2}.get(end, 0)
    function = _Fails(_Own(end), at=at)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.filterwarnings("ignore", message="of the user")
        # With no display of its own, an implementation's warning would reach the terminal.
        warnings.showwarning = shown = lambda *args, **kwargs: None
        before = list(warnings.filters)
        choice = {} if end == "omitted" else {"use_reentrant": use_reentrant}
        error = _raised_by(lambda: ckpt.checkpoint(function, _input(), **choice).sum().backward())
        after, display = list(warnings.filters), warnings.showwarning
    assert isinstance(error, _Own) == (at > 0) or end == "omitted", f"observed {_describe(error)}"
    reached()
    assert after == before, f"expected the filters {before}, observed {after}"
    assert display is shown, "expected warnings.showwarning to stay the user's"
