"""Chapter 7: determinism checks and debug."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import AmbientState, LiveStorages, Recorder, assert_equivalent
from conformance.observe.switches import Block, Call, both_ways, run_switches, switch_programs
from conformance.testing import clause, reached


@dataclass(frozen=True)
class _Metadata:
    """What the check compares of one saved tensor."""

    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def tensor(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _Keep(torch.autograd.Function):
    """The identity, whose backward formula needs the given tensors, whatever these are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *needed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*needed)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0], *(None for _ in ctx.saved_tensors))


class _Saving:
    """A function that saves tensors of the metadata ``runs[0]`` in its first run, ``runs[1]`` in
    the second and so on; the last entry holds for all further runs."""

    def __init__(self, *runs: Sequence[_Metadata]) -> None:
        self.runs = runs
        self.count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        saved = self.runs[min(self.count, len(self.runs) - 1)]
        self.count += 1
        result: torch.Tensor = _Keep.apply(x, *(metadata.tensor() for metadata in saved))
        return result


def _leaf(size: int = 3) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, size).requires_grad_()


def _run(ckpt: Candidate, function: Callable[..., Any], **options: Any) -> None:
    """Forward and backward of a region, with the gradient checked against the identity's."""
    x = _leaf()
    ckpt.checkpoint(function, x, use_reentrant=False, **options).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3)), f"expected the gradient 1, observed {x.grad}"


def _loggers() -> list[logging.Logger]:
    others = [
        log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)
    ]
    return [logging.getLogger(), *others]


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Let the garbage collector look at objects made in the block only: a full collection of a
    process with torch in it takes a tenth of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _on_a_short_stack(function: Callable[[], None]) -> None:
    """Run ``function`` in a thread of its own. Below the frames of pytest and Hypothesis the stack
    traces that an implementation may record with each operator are most of a test's time."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _backward_error(output: torch.Tensor) -> BaseException | None:
    """The exception that backward raises, if it does."""
    try:
        output.backward()
    except Exception as error:  # noqa: BLE001 - the class is judged by the caller
        return error
    return None


def _error(ckpt: Candidate, function: Callable[..., Any], **options: Any) -> BaseException | None:
    """The exception that backward of a region raises, if it does."""
    output = ckpt.checkpoint(function, _leaf(), use_reentrant=False, **options).sum()
    return _backward_error(output)


def _assert_reported(
    ckpt: Candidate,
    saved: Sequence[_Metadata],
    recomputed: Sequence[_Metadata],
    what: str,
    **options: Any,
) -> BaseException:
    """Fail unless the same metadata pass and the different ones raise."""
    _run(ckpt, _Saving(saved, saved), **options)
    function = _Saving(saved, recomputed)
    error = _error(ckpt, function, **options)
    assert function.count == 2, f"expected one recomputation, observed {function.count} runs"
    reached()
    assert error is not None, (
        f"expected an error for another {what}: saved {saved}, recomputed {recomputed}; "
        "observed none"
    )
    assert isinstance(error, RuntimeError), f"expected a RuntimeError, observed {error!r}"
    return error


_sizes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
)


@st.composite
def _mismatches(
    draw: st.DrawFn, one: st.SearchStrategy[_Metadata], other: st.SearchStrategy[_Metadata]
) -> tuple[list[_Metadata], list[_Metadata]]:
    """Saved and recomputed metadata that differ at one position at least."""
    first, second = draw(one), draw(other)
    assume(first != second)
    count = draw(st.integers(1, 4))
    saved = draw(st.lists(one, min_size=count, max_size=count))
    position = draw(st.integers(0, count - 1))
    saved[position] = first
    recomputed = list(saved)
    recomputed[position] = second
    return saved, recomputed


_shapes = st.builds(_Metadata, shape=_sizes)
_dtypes = st.builds(_Metadata, dtype=st.sampled_from(_DTYPES))
_cpu = st.just(_Metadata())
_meta = st.just(_Metadata(device="meta"))


# ---------------------------------------------------------------------- the default check


@clause("determinism/shape")
@given(pair=_mismatches(_shapes, _shapes), early_stop=st.booleans())
def test_another_shape(
    ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]], early_stop: bool
) -> None:
    """Is a recomputed tensor of another shape than the saved one an error, at any position?"""
    _assert_reported(ckpt, *pair, "shape", early_stop=early_stop)


@clause("determinism/shape")
@given(size=st.integers(2, 5), rows=st.integers(1, 6), data=st.data())
def test_another_shape_of_an_operator(
    ckpt: Candidate, size: int, rows: int, data: st.DataObject
) -> None:
    """Is it an error too where the tensor is an operator's input or result?"""
    other = data.draw(st.integers(1, 6).filter(lambda n: n != rows))
    operator = data.draw(st.sampled_from([torch.sin, torch.exp, torch.sigmoid]))

    def grows(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            n = sizes.pop(0)
            return operator(x[0].expand(n, size)).sum()

        return function

    assert _error(ckpt, grows([rows, rows])) is None
    sizes = [rows, other]
    error = _error(ckpt, grows(sizes))
    assert not sizes, "expected one recomputation"
    reached()
    assert isinstance(error, RuntimeError), (
        f"expected an error for {rows} and {other} rows, observed {error!r}"
    )


@clause("determinism/dtype")
@given(pair=_mismatches(_dtypes, _dtypes), early_stop=st.booleans())
def test_another_dtype(
    ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]], early_stop: bool
) -> None:
    """Is a recomputed tensor of another dtype than the saved one an error, at any position?"""
    _assert_reported(ckpt, *pair, "dtype", early_stop=early_stop)


@clause("determinism/device")
@given(pair=st.one_of(_mismatches(_cpu, _meta), _mismatches(_meta, _cpu)), early_stop=st.booleans())
def test_another_device(
    ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]], early_stop: bool
) -> None:
    """Is a recomputed tensor on another device than the saved one an error, at any position?"""
    _assert_reported(ckpt, *pair, "device", early_stop=early_stop)


_METADATA = st.one_of(_shapes, _dtypes, _meta)
_any_mismatch = _mismatches(_METADATA, _METADATA)


@clause("determinism/explicit-default")
@given(pair=_any_mismatch)
def test_default_by_name(ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]]) -> None:
    """Does determinism_check="default" check what the omitted argument checks?"""
    _assert_reported(ckpt, *pair, "metadata", determinism_check="default")


@clause("determinism/every-recomputation")
@given(pair=_any_mismatch, good=st.integers(1, 3))
def test_a_later_recomputation_differs(
    ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]], good: int
) -> None:
    """Is the check made in each backward pass over a retained graph, and not only the first?"""
    saved, recomputed = pair
    function = _Saving(*[saved] * (1 + good), recomputed)
    output = ckpt.checkpoint(function, _leaf(), use_reentrant=False).sum()
    for _ in range(good):
        output.backward(retain_graph=True)
    assert function.count == 1 + good, "expected one recomputation in each backward pass"
    reached()
    for _ in range(2):  # the error must not make the difference the new standard
        with pytest.raises(RuntimeError):
            output.backward(retain_graph=True)


@clause("determinism/per-region")
@given(
    pair=_any_mismatch,
    regions=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=4),
)
def test_each_region_is_checked_as_it_says(
    ckpt: Candidate,
    pair: tuple[list[_Metadata], list[_Metadata]],
    regions: list[tuple[bool, bool]],
) -> None:
    """Is the backward of several regions an error exactly if one that differs has its check on?"""
    saved, recomputed = pair
    x = leaf = _leaf()
    functions = []
    for differs, checked in regions:
        functions.append(_Saving(saved, recomputed if differs else saved))
        mode = "default" if checked else "none"
        x = ckpt.checkpoint(functions[-1], x, use_reentrant=False, determinism_check=mode)
    error = None
    try:
        x.sum().backward()
    except RuntimeError as raised:
        error = raised
    reached()
    expected = any(differs and checked for differs, checked in regions)
    assert (error is not None) == expected, (
        f"(differs, checked) of the regions: {regions}; expected "
        f"{'an error' if expected else 'no error'}, observed {error!r}"
    )
    if not expected:
        assert all(function.count == 2 for function in functions)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.ones(3))


def _positional(x: torch.Tensor) -> torch.Tensor:
    index = x.argsort(dim=-1)
    return x.gather(-1, index) * x.detach()


_PASSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "transposed": lambda x: x.t().sin() if x.dim() == 2 else x.sin(),
    "strided": lambda x: x[..., ::2].sin(),
    "expanded": lambda x: x.expand(2, *x.shape).exp(),
    "index": _positional,
    "maximum": lambda x: x.relu(),
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "cast": lambda x: x.to(torch.float32 if x.dtype == torch.float64 else torch.float64).sin(),
    "in-place": lambda x: x.clone().sin_().mul_(2),
    "nothing": lambda x: x + 1,
}


@clause("determinism/no-false-alarm")
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    names=st.lists(st.sampled_from(sorted(_PASSING)), min_size=1, max_size=4),
    early_stop=st.booleans(),
)
def test_deterministic_functions_pass(
    ckpt: Candidate, shape: list[int], dtype: torch.dtype, names: list[str], early_stop: bool
) -> None:
    """Does a function that repeats itself pass the check, whatever it saves?"""

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = _PASSING[name](x)
        return x

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result.detach()

    reached()
    assert_equivalent(
        program,
        lambda: [torch.rand(shape, dtype=dtype).requires_grad_()],
        lambda f, x: ckpt.checkpoint(
            f, x, use_reentrant=False, determinism_check="default", early_stop=early_stop
        ),
    )


@clause("determinism/values-not-compared")
@given(options=st.sampled_from([{}, {"determinism_check": "default"}]), steps=st.integers(1, 3))
def test_other_values_pass(ckpt: Candidate, options: dict[str, Any], steps: int) -> None:
    """Do recomputed tensors that differ in their values alone pass?"""
    generator = torch.Generator()
    noise: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            # A generator of its own: no checkpoint replays it.
            noise.append(torch.rand(3, generator=generator))
            x = (x * noise[-1]).sin()
        return x

    x = _leaf()
    ckpt.checkpoint(function, x, use_reentrant=False, **options).sum().backward()
    assert len(noise) > steps, "expected a recomputation"
    assert not torch.equal(noise[0], noise[steps]), "the values were meant to differ"
    reached()
    assert x.grad is not None


@clause("determinism/values-not-compared")
def test_other_dropout_masks_pass(ckpt: Candidate) -> None:
    """Does a dropout that recomputation draws anew, as asked for, pass?"""
    region = Recorder(lambda x: torch.dropout(x.sin(), 0.5, True).exp())
    x = _leaf(64)
    ckpt.checkpoint(region, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert region.count == 2, f"expected one recomputation, observed {region.count} runs"
    reached()
    assert x.grad is not None


@clause("determinism/missing-tensor")
@given(
    saved=st.lists(_METADATA, min_size=1, max_size=4),
    missing=st.integers(1, 4),
    check=st.sampled_from(["default", "none"]),
    early_stop=st.booleans(),
)
def test_a_needed_tensor_is_not_recomputed(
    ckpt: Candidate, saved: list[_Metadata], missing: int, check: str, early_stop: bool
) -> None:
    """Is it an error if the recomputation ends without a tensor that backward needs?"""
    options = {"determinism_check": check, "early_stop": early_stop}
    _run(ckpt, _Saving(saved, saved), **options)
    function = _Saving(saved, saved[: max(0, len(saved) - missing)])
    error = _error(ckpt, function, **options)
    assert function.count == 2, f"expected one recomputation, observed {function.count} runs"
    reached()
    assert isinstance(error, RuntimeError), (
        f"expected an error where {missing} of {len(saved)} tensors are not recomputed, "
        f"observed {error!r}"
    )


# ---------------------------------------------------------------------- the check's error


@clause("determinism/error-class")
@given(pair=_any_mismatch)
def test_class_of_a_mismatch(
    ckpt: Candidate, pair: tuple[list[_Metadata], list[_Metadata]]
) -> None:
    """Is a mismatch of metadata a CheckpointError?"""
    error = _assert_reported(ckpt, *pair, "metadata")
    assert isinstance(error, ckpt.CheckpointError), f"observed a {type(error).__name__}"


@clause("determinism/error-class")
@given(saved=st.lists(_METADATA, min_size=1, max_size=3))
def test_class_of_a_missing_tensor(ckpt: Candidate, saved: list[_Metadata]) -> None:
    """Is a tensor that recomputation did not make a CheckpointError?"""
    error = _error(ckpt, _Saving(saved, saved[:-1]))
    reached()
    assert isinstance(error, ckpt.CheckpointError), f"observed {error!r}"


def _text(error: BaseException | None) -> str:
    """The message as a traceback shows it, notes included."""
    return "" if error is None else "".join(traceback.format_exception_only(error))


@clause("determinism/message-metadata")
@given(saved=_METADATA, recomputed=_METADATA, before=st.integers(0, 2))
def test_message_tells_both_metadata(
    ckpt: Candidate, saved: _Metadata, recomputed: _Metadata, before: int
) -> None:
    """Does the message give shape, dtype and device of both tensors where these differ?"""
    assume(saved != recomputed)
    same = [_Metadata((1,))] * before
    message = _text(_assert_reported(ckpt, [*same, saved], [*same, recomputed], "metadata"))
    for metadata, side in ((saved, "saved"), (recomputed, "recomputed")):
        if saved.shape != recomputed.shape:
            sizes = r",?\s*".join(str(size) for size in metadata.shape)
            assert re.search(rf"[\[(]\s*{sizes},?\s*[\])]", message), (
                f"expected the {side} tensor's shape {metadata.shape} in: {message}"
            )
        if saved.dtype != recomputed.dtype:
            assert str(metadata.dtype).removeprefix("torch.") in message, (
                f"expected the {side} tensor's dtype {metadata.dtype} in: {message}"
            )
        if saved.device != recomputed.device:
            assert metadata.device in message, (
                f"expected the {side} tensor's device {metadata.device} in: {message}"
            )


@clause("determinism/message-position")
@given(count=st.integers(2, 5), data=st.data())
def test_message_tells_the_tensor(ckpt: Candidate, count: int, data: st.DataObject) -> None:
    """Do the messages for two different tensors with the same metadata differ?"""
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    messages = []
    for position in (one, other):
        recomputed = [_Metadata()] * count
        recomputed[position] = _Metadata((7,))
        messages.append(_text(_assert_reported(ckpt, [_Metadata()] * count, recomputed, "shape")))
    assert messages[0] != messages[1], (
        f"expected the message to tell tensor {one} from tensor {other}: {messages[0]}"
    )


# ---------------------------------------------------------------------- switching it off


@clause("determinism/off")
@given(pair=_any_mismatch, early_stop=st.booleans(), passes=st.integers(1, 2))
def test_none_makes_no_check(
    ckpt: Candidate,
    pair: tuple[list[_Metadata], list[_Metadata]],
    early_stop: bool,
    passes: int,
) -> None:
    """Does determinism_check="none" let other shapes, dtypes and devices pass?"""
    _assert_reported(ckpt, *pair, "metadata", determinism_check="default")
    x = _leaf()
    output = ckpt.checkpoint(
        _Saving(*pair),
        x,
        use_reentrant=False,
        determinism_check="none",
        early_stop=early_stop,
    ).sum()
    for _ in range(passes):
        output.backward(retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), float(passes)))


_OTHER_VALUES = st.one_of(
    st.sampled_from(
        ["strict", "", "None", "DEFAULT", "default ", " none", "off", None, True, False, 0, ()]
    ),
    st.text("adefnotul ", max_size=8).filter(lambda text: text not in ("default", "none")),
)


@clause("determinism/only-two-values")
@given(value=_OTHER_VALUES)
def test_another_value_is_refused(ckpt: Candidate, value: Any) -> None:
    """Is every value of determinism_check but the two supported ones an error?"""
    for supported in ("default", "none"):
        _run(ckpt, _Saving([_Metadata()]), determinism_check=supported)
    reached()
    with pytest.raises(Exception):  # noqa: B017 - the class is not documented
        _run(ckpt, _Saving([_Metadata()]), determinism_check=value)


@clause("determinism/reentrant-off")
@given(
    pair=_any_mismatch,
    options=st.sampled_from([{}, {"determinism_check": "default"}]),
)
def test_reentrant_variant_checks_nothing(
    ckpt: Candidate,
    pair: tuple[list[_Metadata], list[_Metadata]],
    options: dict[str, Any],
) -> None:
    """Does the reentrant variant let other shapes, dtypes and devices pass?"""
    function = _Saving(*pair)
    x = _leaf()
    ckpt.checkpoint(function, x, use_reentrant=True, **options).sum().backward()
    assert function.count == 2, f"expected one recomputation, observed {function.count} runs"
    reached()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))


# ---------------------------------------------------------------------- debug: traces

# Each saves one tensor of its input's shape. The names are rare words, so that a message that has
# one of them has it from a trace.
_FORWARD = ("sinh", "expm1", "tanh", "digamma")
_RECOMPUTED = ("cosh", "atan", "erfc", "log1p")
_OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name) for name in (*_FORWARD, *_RECOMPUTED)
}


class _Faulty:
    """Runs ``forward`` in its first run and ``later`` in further ones; these then lack the last
    tensor (``fewer``) or make it of another shape."""

    def __init__(
        self,
        forward: Sequence[str] = ("sinh", "expm1"),
        later: Sequence[str] = ("cosh", "atan"),
        *,
        fewer: bool = False,
    ) -> None:
        self.forward, self.later, self.fewer = forward, later, fewer
        self.count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        first = self.count == 1
        for name in self.forward if first else self.later:
            x = _OPERATORS[name](x)
        if first:
            return x.sin().sum()
        return x.sum() if self.fewer else x[:2].sin().sum()


def _names_in_order(names: Sequence[str], message: str) -> bool:
    """Whether ``message`` names the operators one after another."""
    position = 0
    for name in names:
        found = re.compile(rf"(?<![a-z0-9]){name}(?![a-z0-9])").search(message, position)
        if found is None:
            return False
        position = found.end()
    return True


def _has_any(names: Sequence[str], message: str) -> bool:
    return any(_names_in_order([name], message) for name in names)


def _assert_traced(
    error: BaseException | None,
    forward: Sequence[str] = ("sinh", "expm1"),
    later: Sequence[str] = ("cosh", "atan"),
) -> None:
    assert isinstance(error, RuntimeError), f"expected the mismatch's error, observed {error!r}"
    message = _text(error)
    for names, run in ((forward, "forward"), (later, "recomputation")):
        assert _names_in_order(names, message), (
            f"expected the operators of {run}, {', '.join(names)}, in this order in the message; "
            f"observed (end): {message[-1500:]}"
        )


def _assert_not_traced(error: BaseException | None) -> None:
    assert isinstance(error, RuntimeError), f"expected the mismatch's error, observed {error!r}"
    message = _text(error)
    seen = [name for name in (*_FORWARD, *_RECOMPUTED) if _has_any([name], message)]
    assert not seen, f"expected no trace, observed the operators {seen} in the message"


def _assert_as(error: BaseException | None, traced: bool) -> None:
    if traced:
        _assert_traced(error)
    else:
        _assert_not_traced(error)


def _debug(argument: bool | None) -> dict[str, Any]:
    return {} if argument is None else {"debug": argument}


def _name(value: bool | None) -> str:
    return "omitted" if value is None else str(value)


@clause("debug/traces")
@given(
    forward=st.lists(st.sampled_from(_FORWARD), min_size=1, max_size=4),
    fewer=st.booleans(),
    early_stop=st.booleans(),
    data=st.data(),
)
def test_message_traces_both_runs(
    ckpt: Candidate, forward: list[str], fewer: bool, early_stop: bool, data: st.DataObject
) -> None:
    """Does the message name every operator of forward and of recomputation, in order?"""
    count = len(forward)
    later = data.draw(st.lists(st.sampled_from(_RECOMPUTED), min_size=count, max_size=count))
    function = _Faulty(forward, later, fewer=fewer)

    def check() -> None:
        error = _error(ckpt, function, debug=True, early_stop=early_stop)
        assert function.count == 2, f"expected one recomputation, observed {function.count} runs"
        reached()
        _assert_traced(error, forward, later)

    _on_a_short_stack(check)


@clause("debug/every-backward")
@pytest.mark.parametrize("good", [1, 2])
def test_trace_of_a_later_recomputation(ckpt: Candidate, good: int) -> None:
    """Is it the failing recomputation that is traced, where earlier ones were right?"""
    runs = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs <= 1 + good:
            return x.sinh().sin().sum()
        return x.cosh()[:2].sin().sum()

    output = ckpt.checkpoint(function, _leaf(), use_reentrant=False, debug=True)
    reached()
    for _ in range(good):
        output.backward(retain_graph=True)
    error = _backward_error(output)
    if error is not None and not isinstance(error, RuntimeError):
        raise error
    assert runs == 2 + good, f"expected {1 + good} recomputations, observed {runs} runs"
    _assert_traced(error, ["sinh"], ["cosh"])


@clause("debug/traces")
@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_trace_of_the_region_that_differs(ckpt: Candidate, faulty: int) -> None:
    """Is it the differing region that is traced, where several regions have debug on?"""
    x = _leaf()
    for index in range(3):
        function: Callable[[torch.Tensor], torch.Tensor] = (
            _Faulty(["tanh"], ["erfc"]) if index == faulty else torch.sin
        )
        x = ckpt.checkpoint(function, x, use_reentrant=False, debug=True).expand(3)
    error = _backward_error(x.sum())
    reached()
    _assert_traced(error, ["tanh"], ["erfc"])


@clause("debug/inner-region")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_inner_region_differs(ckpt: Candidate, depth: int) -> None:
    """Are the traces there where the differing region is inside others?"""
    options = {"use_reentrant": False, "debug": True}
    inner = _Faulty()

    def enclose(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: ckpt.checkpoint(function, x * 2, **options)

    function: Callable[..., torch.Tensor] = lambda x: ckpt.checkpoint(inner, x, **options)
    for _ in range(depth):
        function = enclose(function)
    error = _backward_error(function(_leaf()))
    assert inner.count >= 2
    reached()
    _assert_traced(error)


def _enclosing_region_differs(ckpt: Candidate, inner_debug: bool) -> None:
    runs = 0

    def outer(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        x = x.sinh() if runs == 1 else x.cosh()[:2]
        x = ckpt.checkpoint(torch.tanh, x, use_reentrant=False, debug=inner_debug)
        return x.sum()

    error = _error(ckpt, outer, debug=True)
    assert runs == 2, f"expected one recomputation, observed {runs} runs"
    reached()
    _assert_traced(error, ["sinh"], ["cosh"])


@clause("debug/traces")
def test_trace_of_a_region_with_another_inside(ckpt: Candidate) -> None:
    """Are the traces there where the differing region has one without debug inside?"""
    _enclosing_region_differs(ckpt, False)


@clause("debug/enclosing-region")
def test_enclosing_region_differs(ckpt: Candidate) -> None:
    """Are the traces there where the differing region has one with debug inside?"""
    _enclosing_region_differs(ckpt, True)


@clause("debug/off")
@pytest.mark.parametrize("fewer", [False, True])
def test_no_traces_without_it(ckpt: Candidate, fewer: bool) -> None:
    """Is the message without traces where debug is False?"""
    error = _error(ckpt, _Faulty(fewer=fewer), debug=True)
    _assert_traced(error)
    reached()
    _assert_not_traced(_error(ckpt, _Faulty(fewer=fewer), debug=False))


@clause("debug/default")
@pytest.mark.parametrize("fewer", [False, True])
def test_no_traces_by_default(ckpt: Candidate, fewer: bool) -> None:
    """Is the message without traces where nobody asks for them?"""
    _assert_traced(_error(ckpt, _Faulty(fewer=fewer), debug=True))
    reached()
    _assert_not_traced(_error(ckpt, _Faulty(fewer=fewer)))


# ---------------------------------------------------------------------- debug: context manager


@clause("debug/context-on")
@pytest.mark.parametrize("argument", [None, True, False], ids=_name)
def test_context_switches_traces_on(ckpt: Candidate, argument: bool | None) -> None:
    """Does set_checkpoint_debug_enabled(True) give traces, whatever the argument says?"""
    _assert_not_traced(_error(ckpt, _Faulty(), debug=False))
    with ckpt.set_checkpoint_debug_enabled(True):
        error = _error(ckpt, _Faulty(), **_debug(argument))
    reached()
    _assert_traced(error)


@clause("debug/context-off")
@pytest.mark.parametrize("argument", [None, True, False], ids=_name)
def test_context_switches_traces_off(ckpt: Candidate, argument: bool | None) -> None:
    """Does set_checkpoint_debug_enabled(False) suppress traces, whatever the argument says?"""
    _assert_traced(_error(ckpt, _Faulty(), debug=True))
    with ckpt.set_checkpoint_debug_enabled(False):
        error = _error(ckpt, _Faulty(), **_debug(argument))
    reached()
    _assert_not_traced(error)


@clause("debug/context-none")
@pytest.mark.parametrize("argument", [None, True, False], ids=_name)
@pytest.mark.parametrize("enclosing", [None, True, False], ids=_name)
def test_none_leaves_it_to_the_argument(
    ckpt: Candidate, argument: bool | None, enclosing: bool | None
) -> None:
    """Does the argument decide under set_checkpoint_debug_enabled(None), inside other settings
    too?"""
    with contextlib.ExitStack() as stack:
        if enclosing is not None:
            stack.enter_context(ckpt.set_checkpoint_debug_enabled(enclosing))
        with ckpt.set_checkpoint_debug_enabled(None):
            error = _error(ckpt, _Faulty(), **_debug(argument))
    reached()
    _assert_as(error, traced=argument is True)


@clause("debug/context-forward-only")
@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("around_backward", ["nothing", "opposite"])
def test_setting_at_the_call_counts(ckpt: Candidate, setting: bool, around_backward: str) -> None:
    """Does a region called under the context manager follow it when backward runs outside?"""
    with ckpt.set_checkpoint_debug_enabled(setting):
        output = ckpt.checkpoint(_Faulty(), _leaf(), use_reentrant=False, debug=not setting)
    later: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if around_backward == "opposite":
        later = ckpt.set_checkpoint_debug_enabled(not setting)
    with later:
        error = _backward_error(output)
    reached()
    _assert_as(error, traced=setting)


def _follow(ckpt: Candidate, program: tuple[Call | Block, ...]) -> None:
    """Run ``program`` with a differing region at each call, all backward passes last, and fail
    unless each message has traces exactly where setting and argument say so."""
    made: list[tuple[bool, torch.Tensor]] = []

    def call(argument: bool | None, settings: tuple[bool | None, ...]) -> None:
        function = _Faulty(["sinh"], ["cosh"])
        output = ckpt.checkpoint(function, _leaf(), use_reentrant=False, **_debug(argument))
        setting = settings[-1] if settings else None
        made.append(((argument if setting is None else setting) is True, output))

    run_switches(program, ckpt.set_checkpoint_debug_enabled, call)
    for traced, output in made:
        error = _backward_error(output)
        reached()
        if traced:
            _assert_traced(error, ["sinh"], ["cosh"])
        else:
            _assert_not_traced(error)


@clause("debug/context-nests")
@given(program=switch_programs([True, False, None], raises=False, calls=2))
@example(program=both_ways(raises=False))
def test_innermost_context_counts(ckpt: Candidate, program: tuple[Call | Block, ...]) -> None:
    """Does the innermost of nested context managers count, and does leaving one bring back what
    was in force before it?"""
    _on_a_short_stack(lambda: _follow(ckpt, program))


@clause("debug/context-after-exception")
@given(program=switch_programs([True, False, None], raises=True, calls=2))
@example(program=both_ways(raises=True))
def test_exception_leaves_contexts_in_order(
    ckpt: Candidate, program: tuple[Call | Block, ...]
) -> None:
    """Is the setting from before brought back where a block is left by an exception, and does
    the exception go on?"""
    _on_a_short_stack(lambda: _follow(ckpt, program))


# ---------------------------------------------------------------------- debug: nothing else


@clause("debug/same-results")
@given(
    names=st.lists(st.sampled_from(sorted(_PASSING)), min_size=1, max_size=3),
    early_stop=st.booleans(),
    by_context=st.booleans(),
)
def test_debug_changes_no_result(
    ckpt: Candidate, names: list[str], early_stop: bool, by_context: bool
) -> None:
    """Are result, gradients and state those of the plain run with debug on?"""

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = _PASSING[name](x)
        return x

    def wrap(function: Callable[..., Any], x: torch.Tensor) -> Any:
        with ckpt.set_checkpoint_debug_enabled(by_context or None):
            return ckpt.checkpoint(
                function, x, use_reentrant=False, debug=not by_context, early_stop=early_stop
            )

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result.detach()

    reached()
    _on_a_short_stack(
        lambda: assert_equivalent(program, lambda: [torch.rand(2, 4).requires_grad_()], wrap)
    )


def _compare_runs(ckpt: Candidate, early_stop: bool, passes: int) -> None:
    """Fail unless a region is run as often, and as far, with debug as without, and gives the same
    gradient."""
    seen = []
    for debug in (False, True):
        region = Recorder(lambda x: x.sin().exp())
        x = _leaf()
        output = ckpt.checkpoint(
            region, x, use_reentrant=False, debug=debug, early_stop=early_stop
        ).sum()
        for _ in range(passes):
            output.backward(retain_graph=True)
            reached()
        assert x.grad is not None
        seen.append((region.count, region.finished, x.grad.tolist()))
    assert seen[0][0] == 1 + passes, f"expected {passes} recomputations, observed {seen[0]}"
    assert seen[1] == seen[0], (
        f"(runs, runs to the end, gradient): expected {seen[0]} as without debug, "
        f"observed {seen[1]}"
    )


@clause("debug/same-results")
@pytest.mark.parametrize("early_stop", [False, True])
def test_debug_changes_no_count(ckpt: Candidate, early_stop: bool) -> None:
    """Is the function run as often, and as far, as without debug?"""
    _compare_runs(ckpt, early_stop, 1)


@clause("debug/every-backward")
@given(early_stop=st.booleans(), passes=st.integers(2, 4))
def test_debug_with_several_backward_passes(ckpt: Candidate, early_stop: bool, passes: int) -> None:
    """Do several backward passes over a retained graph work with debug as without?"""
    _compare_runs(ckpt, early_stop, passes)


@clause("debug/every-backward")
def test_debug_with_partial_backward_passes(ckpt: Candidate) -> None:
    """Does backward of a region's outputs one after the other work with debug as without?"""
    gradients = []
    for debug in (False, True):
        x = _leaf()
        one, other = ckpt.checkpoint(
            lambda x: (x.sin(), x.exp()), x, use_reentrant=False, debug=debug
        )
        reached()
        one.sum().backward()
        other.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients), f"expected equal gradients, observed {gradients}"


@clause("debug/keeps-nothing")
@given(steps=st.integers(2, 6))
def test_debug_keeps_no_tensor(ckpt: Candidate, steps: int) -> None:
    """Are as few tensors alive after forward, and after backward, as without debug?"""
    alive = []
    for debug in (False, True):
        x = _leaf(64)

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(steps):
                x = x.sin()
            return x

        with _only_new_objects(), LiveStorages() as live:
            output = ckpt.checkpoint(function, x, use_reentrant=False, debug=debug)
            gc.collect()
            after_forward = live.bytes()
            output.sum().backward()
            del output
            gc.collect()
            alive.append((after_forward, live.bytes()))
    reached()
    assert alive[1] <= alive[0], (
        f"bytes after forward and backward: expected {alive[0]} as without debug, "
        f"observed {alive[1]}"
    )


class _Argument:
    """Something to hand to a region, whose life can be watched."""


@clause("debug/keeps-nothing")
@pytest.mark.parametrize("fails", [False, True])
def test_debug_lets_go_of_the_region(ckpt: Candidate, fails: bool) -> None:
    """Are the region's arguments and log handlers gone when it is over, failed or not?"""

    def handlers() -> int:
        return sum(len(log.handlers) for log in _loggers())

    def once() -> weakref.ref[_Argument]:
        argument = _Argument()
        faulty = _Faulty()

        def function(x: torch.Tensor, _: _Argument) -> torch.Tensor:
            return faulty(x) if fails else x.sin().sum()

        x = _leaf()
        output = ckpt.checkpoint(function, x, argument, use_reentrant=False, debug=True)
        if fails:
            with pytest.raises(RuntimeError):
                output.backward()
        else:
            output.backward()
        return weakref.ref(argument)

    with _only_new_objects():
        once()
        before, state = handlers(), AmbientState.capture()
        references = [once() for _ in range(3)]
        gc.collect()
        after = handlers()
    reached()
    left = sum(reference() is not None for reference in references)
    assert left == 0, f"expected no argument alive after the region is over, observed {left} of 3"
    assert after == before, f"expected {before} log handlers, observed {after}"
    changed = state.difference(AmbientState.capture())
    assert not changed, f"expected the state from before, observed changes {changed}"


# ---------------------------------------------------------------------- debug: where supported


@clause("debug/reentrant-refused")
def test_reentrant_variant_refuses_debug(ckpt: Candidate) -> None:
    """Is debug=True an error with use_reentrant=True?"""
    region = Recorder(torch.sin)
    ckpt.checkpoint(region, _leaf(), use_reentrant=True, debug=False).sum().backward()
    assert region.count == 2, f"expected one recomputation, observed {region.count} runs"
    reached()
    with pytest.raises(Exception):  # noqa: B017 - the class is not documented
        ckpt.checkpoint(region, _leaf(), use_reentrant=True, debug=True)


@clause("debug/with-context-fn")
@pytest.mark.parametrize("by_context", [False, True])
def test_debug_and_context_fn_together(ckpt: Candidate, by_context: bool) -> None:
    """Are debug and context_fn together either refused at the call or both in effect?"""
    entered: list[str] = []

    @contextlib.contextmanager
    def note(name: str) -> Any:
        entered.append(name)
        yield

    def contexts() -> Any:
        return note("forward"), note("recomputation")

    error = _error(ckpt, _Faulty(), context_fn=contexts)
    assert entered == ["forward", "recomputation"], f"expected both contexts, observed {entered}"
    _assert_not_traced(error)
    entered.clear()
    reached()
    options = {} if by_context else {"debug": True}
    with ckpt.set_checkpoint_debug_enabled(True if by_context else None):
        try:
            output = ckpt.checkpoint(
                _Faulty(), _leaf(), use_reentrant=False, context_fn=contexts, **options
            )
        except Exception:  # noqa: BLE001 - a refusal, of whatever class
            return
    error = _backward_error(output)
    assert entered == ["forward", "recomputation"], f"expected both contexts, observed {entered}"
    _assert_traced(error)
