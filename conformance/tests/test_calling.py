"""Chapter 1: calling, options, arguments and the decorator form."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import (
    AmbientState,
    LiveStorages,
    Recorder,
    assert_equivalent,
    assert_same,
    caught_warnings,
)
from conformance.testing import both_variants, clause, reached

Region = Callable[..., Any]
Wrap = Callable[..., Any]

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "square": torch.square,
    "scale": lambda t: t * 3,
}
_STEPS = st.lists(st.sampled_from(sorted(_UNARY)), min_size=1, max_size=4)
_SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_ORDERS = list(itertools.permutations(range(3)))
_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])


def _apply(steps: list[str], tensor: torch.Tensor) -> torch.Tensor:
    for step in steps:
        tensor = _UNARY[step](tensor)
    return tensor


def _total(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.abs() if tensor.is_complex() else tensor).sum()


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def _direct(ckpt: Candidate, **options: Any) -> Wrap:
    return functools.partial(ckpt.checkpoint, **options)


def _decorated(ckpt: Candidate, **options: Any) -> Wrap:
    """The decorator form, called like the direct one."""

    def call(function: Region, /, *args: Any, **kwargs: Any) -> Any:
        return ckpt.checkpoint(**options)(function)(*args, **kwargs)

    return call


# ---------------------------------------------------------------------------- the call


def _results(tensor: torch.Tensor, thing: object) -> dict[str, Any]:
    return {
        "tensor": tensor.sin(),
        "tuple": (tensor.sin(), tensor.cos()),
        "mixed tuple": (None, tensor.sin(), 3, "a", thing),
        "tuple of one": (tensor.sin(),),
        "empty tuple": (),
        "list": [tensor.sin(), 1],
        "dictionary": {"b": tensor.sin(), "a": 2.5},
        "none": None,
        "integer": 7,
        "string": "result",
        "object": thing,
        "integer tensor": tensor.detach().to(torch.int64),
        "boolean": False,
    }


_KINDS = sorted(_results(torch.zeros(1), None))


@clause("calling/returns-result")
@both_variants
@given(shape=_SHAPES, dtype=_DTYPES, reverse=st.booleans())
def test_result_is_what_the_function_returned(
    ckpt: Candidate,
    use_reentrant: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    reverse: bool,
) -> None:
    """Does a direct call give back the function's result, whatever it is?"""
    thing = object()
    x = torch.randn(shape).to(dtype).requires_grad_()

    def function(tensor: torch.Tensor, kind: str) -> Any:
        # Complex tensors have no integer form.
        result = _results(tensor.real if tensor.is_complex() else tensor, thing)[kind]
        return result[::-1] if reverse and isinstance(result, tuple) else result

    for kind in _KINDS:
        observed = ckpt.checkpoint(function, x, kind, use_reentrant=use_reentrant)
        reached()
        assert_same(observed, function(x, kind), f"result ({kind})")


@clause("calling/returns-result")
@both_variants
def test_each_call_returns_its_own_result(ckpt: Candidate, use_reentrant: bool) -> None:
    """Does a second call give the second result, and does the first one keep its own?"""
    x = torch.linspace(0.0, 1.0, 4, requires_grad=True)
    results = [
        ckpt.checkpoint(lambda t, k: (t * k).sin(), x, k, use_reentrant=use_reentrant)
        for k in (1, 2, 3)
    ]
    reached()
    for k, result in zip((1, 2, 3), results, strict=True):
        assert_same(result, (x * k).sin(), f"result of call {k}")


@clause("calling/gradients")
@both_variants
@given(
    steps=_STEPS,
    other=_STEPS,
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    dtype=_DTYPES,
)
def test_gradients_are_those_of_the_plain_run(
    ckpt: Candidate,
    use_reentrant: bool,
    steps: list[str],
    other: list[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Does backward through a region leave the plain run's gradients, bit for bit?"""

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return _apply(steps, a * b).sin() + _apply(other, b.cos()) * c

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        before = [leaf * 0.5 for leaf in leaves]
        result: torch.Tensor = wrap(function, *before).tanh()
        _total(result).backward()
        return result

    def leaves() -> list[torch.Tensor]:
        return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]

    assert_equivalent(program, leaves, _direct(ckpt, use_reentrant=use_reentrant))
    reached()


@clause("calling/gradients")
@both_variants
@given(index=st.integers(0, 2))
def test_inputs_without_grad_get_none(ckpt: Candidate, use_reentrant: bool, index: int) -> None:
    """Is the gradient of a constant input left out, and are the others exact?"""

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(lambda a, b, c: (a.sin() * b.exp()).tanh() * c.cos(), *leaves)
        result.sum().backward()
        return result

    def leaves() -> list[torch.Tensor]:
        return [torch.randn(3).requires_grad_(place != index) for place in range(3)]

    assert_equivalent(program, leaves, _direct(ckpt, use_reentrant=use_reentrant))
    reached()


@clause("calling/any-part")
@both_variants
@given(plan=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_any_stretch_of_layers_may_be_a_region(
    ckpt: Candidate, use_reentrant: bool, plan: list[int]
) -> None:
    """Does it make no difference which stretches of a model are regions?"""
    # For each layer: outside (0), start of a new region (1), same region as the one before (2).
    stretches: list[tuple[bool, list[int]]] = []
    for layer, place in enumerate(plan):
        if place == 2 and stretches and stretches[-1][0]:
            stretches[-1][1].append(layer)
        else:
            stretches.append((place != 0, [layer]))

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        x, *weights = leaves
        for checkpointed, members in stretches:

            def stretch(t: torch.Tensor, members: list[int] = members) -> torch.Tensor:
                for member in members:
                    t = torch.tanh(t @ weights[member] + t)
                return t

            x = wrap(stretch, x) if checkpointed else stretch(x)
        x.square().sum().backward()
        return x

    assert_equivalent(
        program,
        lambda: [_leaf(2, 3), *(_leaf(3, 3) for _ in plan)],
        _direct(ckpt, use_reentrant=use_reentrant),
    )
    reached()


@clause("calling/runs-at-once")
@both_variants
@given(inputs=st.integers(1, 3), width=st.integers(1, 3))
def test_function_runs_once_and_not_again_before_backward(
    ckpt: Candidate, use_reentrant: bool, inputs: int, width: int
) -> None:
    """Is the function run once, to its end, in this thread, and left alone until backward?"""
    region = Recorder(lambda *args: (functools.reduce(torch.mul, args).sin().exp(), width))
    args = [_leaf(width) for _ in range(inputs)]
    y, _ = ckpt.checkpoint(region, *args, use_reentrant=use_reentrant)
    assert region.count == 1, f"expected 1 run during the call, observed {region.count}"
    assert region.finished == 1, "expected the run to be finished when the call returns"
    assert region.runs[0].thread == threading.get_ident(), (
        "expected the function to run in the calling thread"
    )
    loss = (y * 2).tanh().sum()
    loss.item()
    repr(y)
    unused = ckpt.checkpoint(region, *args, use_reentrant=use_reentrant)
    del unused
    assert region.count == 2, f"expected no run but those of the 2 calls, observed {region.count}"
    loss.backward()
    reached()
    assert region.count == 3, (
        f"expected one recomputation for one backward, observed {region.count - 2}"
    )


class _Scale:
    """Reaches a tensor through ``self`` in every way that a class offers."""

    factor = 3.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def method(self, t: torch.Tensor) -> torch.Tensor:
        return (t * self.weight).sin().exp()

    @classmethod
    def of_class(cls, t: torch.Tensor) -> torch.Tensor:
        return (t * cls.factor).sin().exp()

    @staticmethod
    def static(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).sin().exp()

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        return self.method(t)


class _Module(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return (t * self.weight).sin().exp()


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return t.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (t,) = ctx.saved_tensors
        result: torch.Tensor = gradient * t.cos()
        return result


def _function(t: torch.Tensor) -> torch.Tensor:
    return t.sin().exp()


def _scaled(t: torch.Tensor, factor: float) -> torch.Tensor:
    return (t * factor).sin().exp()


_CALLABLES: dict[str, Callable[[torch.Tensor], Region]] = {
    "function": lambda weight: _function,
    "lambda": lambda weight: lambda t: t.sin().exp(),
    "closure": lambda weight: lambda t: (t * weight).sin().exp(),
    "builtin": lambda weight: torch.sin,
    "tensor method": lambda weight: torch.Tensor.sin,
    "bound method": lambda weight: _Scale(weight).method,
    "class method": lambda weight: _Scale.of_class,
    "static method": lambda weight: _Scale.static,
    "callable object": lambda weight: _Scale(weight),
    "module": lambda weight: _Module(weight),
    "partial": lambda weight: functools.partial(_scaled, factor=2.0),
    "partial with position": lambda weight: functools.partial(torch.mul, 3.0),
    "custom function": lambda weight: _Sine.apply,
    "operator": lambda weight: torch.ops.aten.sin.default,
}


def _calls_everything(kind: str) -> Callable[[Wrap, list[torch.Tensor]], torch.Tensor]:
    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        x, weight = leaves
        result: torch.Tensor = wrap(_CALLABLES[kind](weight), x * 1.0)
        (result * result).sum().backward()
        return result

    return program


def _two_leaves() -> list[torch.Tensor]:
    return [_leaf(3), torch.nn.Parameter(torch.randn(3))]


@clause("calling/any-callable")
@both_variants
@pytest.mark.parametrize("kind", sorted(_CALLABLES))
def test_callable_is_accepted(ckpt: Candidate, use_reentrant: bool, kind: str) -> None:
    """Is every kind of callable accepted, with the plain result and gradients?"""
    wrap = _direct(ckpt, use_reentrant=use_reentrant)
    assert_equivalent(_calls_everything(kind), _two_leaves, wrap)
    reached()


class _Brings:
    """Ways for a tensor to come along with a callable that is not handed it at the call."""

    @staticmethod
    def closure(tensor: torch.Tensor) -> Region:
        return lambda t: (t * tensor).sin() * tensor.exp()

    @staticmethod
    def partial(tensor: torch.Tensor) -> Region:
        return functools.partial(lambda k, t: (t * k).sin() * k.exp(), tensor)

    @staticmethod
    def partial_dictionary(tensor: torch.Tensor) -> Region:
        return functools.partial(
            lambda t, *, store: (t * store["k"]).sin() * store["k"].exp(), store={"k": tensor}
        )

    @staticmethod
    def default(tensor: torch.Tensor) -> Region:
        def function(t: torch.Tensor, k: torch.Tensor = tensor) -> torch.Tensor:
            return (t * k).sin() * k.exp()

        return function

    @staticmethod
    def bound_method(tensor: torch.Tensor) -> Region:
        return _Scale(tensor).method


@clause("calling/bound-tensors")
@pytest.mark.parametrize(
    "way", ["closure", "partial", "partial_dictionary", "default", "bound_method"]
)
@given(history=st.integers(0, 2), regions=st.integers(1, 3), grad_input=st.booleans())
def test_tensor_brought_along_gets_its_gradient(
    ckpt: Candidate, way: str, history: int, regions: int, grad_input: bool
) -> None:
    """Does a tensor that comes along with the callable get the plain gradient, once?"""
    walks: list[int] = []

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        x, weight = leaves
        brought = weight
        for _ in range(history):
            brought = brought.sin()
        if history:
            brought.register_hook(lambda gradient: walks.append(1))
        region = getattr(_Brings, way)(brought)
        for _ in range(regions):
            x = wrap(region, x)
        x.sum().backward()
        return x

    def leaves() -> list[torch.Tensor]:
        return [torch.randn(3).requires_grad_(grad_input), _leaf(3)]

    assert_equivalent(program, leaves, _direct(ckpt, use_reentrant=False))
    reached()
    # Three runs in all: twice plainly, once with regions.
    assert len(walks) == (3 if history else 0), (
        f"expected the tensor's own history to be walked once per run, "
        f"observed {len(walks)} walks in 3 runs"
    )


@clause("calling/no-inputs")
@both_variants
def test_call_without_inputs_runs_at_once(ckpt: Candidate, use_reentrant: bool) -> None:
    """Is a call with a function and no inputs a direct call?"""
    weight = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    region = Recorder(lambda: (weight * 2).sin().exp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no input requires grad: the reentrant variant may say so
        result = ckpt.checkpoint(region, use_reentrant=use_reentrant)
    assert region.count == 1, f"expected the function to run at once, observed {region.count} runs"
    received = (region.runs[0].args, region.runs[0].kwargs)
    assert received == ((), {}), f"expected no arguments, observed {received}"
    reached()
    assert_same(result, (weight * 2).sin().exp(), "result")
    if not use_reentrant:
        result.sum().backward()
        (expected,) = torch.autograd.grad((weight * 2).sin().exp().sum(), weight)
        assert_same(weight.grad, expected, "gradient of the closure's tensor")
        assert region.count == 2, f"expected 1 recomputation, observed {region.count - 1}"


@clause("calling/function-by-keyword")
@both_variants
def test_function_is_accepted_by_name(ckpt: Candidate, use_reentrant: bool) -> None:
    """Is the function accepted as the keyword that the documentation names?"""
    weight = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    region = Recorder(lambda: weight.sin().exp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        positional = ckpt.checkpoint(region, use_reentrant=use_reentrant)
        named = ckpt.checkpoint(function=region, use_reentrant=use_reentrant)
    reached()
    assert_same(named, positional, "result of the call by name")
    assert [run.kwargs for run in region.runs] == [{}, {}], (
        f"expected no keyword to reach the function, observed {region.runs[-1].kwargs}"
    )


@clause("calling/independent-calls")
@both_variants
@given(order=st.sampled_from(_ORDERS), dropped=st.sampled_from([None, 0, 1, 2]))
def test_regions_of_one_function_are_independent(
    ckpt: Candidate, use_reentrant: bool, order: tuple[int, ...], dropped: int | None
) -> None:
    """Do several pending regions of the same function keep their own arguments?"""

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        results: dict[int, Any] = {
            k: wrap(lambda t, k: (t * (k + 1)).sin().exp(), leaf, k)
            for k, leaf in enumerate(leaves)
        }
        if dropped is not None:
            del results[dropped]
        values = [result.detach().clone() for result in results.values()]
        for k in order:
            if k in results:
                results[k].sum().backward()
        return values

    assert_equivalent(
        program,
        lambda: [_leaf(2) for _ in order],
        _direct(ckpt, use_reentrant=use_reentrant),
    )
    reached()


# ---------------------------------------------------------------------------- arguments


@clause("calling/argument-order")
@both_variants
@given(count=st.integers(1, 6), constants=st.sets(st.integers(0, 5)))
def test_arguments_keep_their_order(
    ckpt: Candidate, use_reentrant: bool, count: int, constants: set[int]
) -> None:
    """Are all positional arguments passed, in order, in forward and in the recomputation?"""
    constants &= set(range(1, count))  # the first one requires grad
    args = [
        torch.full((2,), float(place)).requires_grad_(place not in constants)
        for place in range(count)
    ]
    region = Recorder(
        lambda *received: sum(((k + 1) * t).sin() for k, t in enumerate(received)).exp()
    )
    ckpt.checkpoint(region, *args, use_reentrant=use_reentrant).sum().backward()
    assert region.count == 2, f"expected forward and one recomputation, observed {region.count}"
    reached()
    for phase, run in zip(("forward", "recomputation"), region.runs, strict=True):
        values = [int(t[0]) for t in run.args]
        assert values == list(range(count)), (
            f"{phase}: expected arguments 0 to {count - 1} in order, observed {values}"
        )
        assert not run.kwargs, f"{phase}: expected no keywords, observed {sorted(run.kwargs)}"


_ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "integer": lambda: torch.arange(4),
    "boolean": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "half": lambda: torch.ones(2, dtype=torch.float16),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "view": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "with grad": lambda: torch.ones(2, requires_grad=True),
    "with history": lambda: torch.ones(2, requires_grad=True) * 3,
    "parameter": lambda: torch.nn.Parameter(torch.full((2,), 0.5)),
}


@clause("calling/tensor-arguments")
@both_variants
@given(
    kinds=st.lists(st.sampled_from(sorted(_ODD_TENSORS)), max_size=5),
    position=st.integers(0, 5),
)
def test_tensor_arguments_come_back_the_same(
    ckpt: Candidate, use_reentrant: bool, kinds: list[str], position: int
) -> None:
    """Does the recomputation see each tensor argument as forward saw it?"""
    args = [_ODD_TENSORS[kind]() for kind in kinds]
    position = min(position, len(args))
    main = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    args.insert(position, main)
    seen: list[list[tuple[Any, ...]]] = []

    def function(*received: torch.Tensor) -> torch.Tensor:
        seen.append(
            [
                (t.dtype, tuple(t.shape), t.stride(), t.requires_grad, t.detach().clone())
                for t in received
            ]
        )
        return received[position].sin().exp()

    ckpt.checkpoint(function, *args, use_reentrant=use_reentrant).sum().backward()
    assert len(seen) == 2, f"expected forward and one recomputation, observed {len(seen)} runs"
    reached()
    for phase, run in zip(("forward", "recomputation"), seen, strict=True):
        assert len(run) == len(args), f"{phase}: expected {len(args)} arguments, got {len(run)}"
        for place, (got, wanted) in enumerate(zip(run, args, strict=True)):
            description = (wanted.dtype, tuple(wanted.shape), wanted.stride(), wanted.requires_grad)
            assert got[:4] == description, (
                f"{phase}, argument {place}: expected {description}, observed {got[:4]}"
            )
            assert_same(got[4], wanted.detach(), f"{phase}, argument {place}")


class _Equal:
    """Equal to all of its kind, so that only identity tells two apart."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equal)

    __hash__ = None  # type: ignore[assignment]


_THINGS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "integer": lambda: 10**6 + 1,
    "float": lambda: 4.25,
    "string": lambda: "".join(["te", "xt"]),
    "list": lambda: [1, "a", None],
    "dictionary": lambda: {"a": [1]},
    "tuple": lambda: (1, (2, None)),
    "object": _Equal,
    "function": lambda: lambda: None,
    "dtype": lambda: torch.float64,
    "device": lambda: torch.device("cpu"),
    "generator": torch.Generator,
}


@clause("calling/non-tensor-arguments")
@both_variants
@given(
    before=st.lists(st.sampled_from(sorted(_THINGS)), max_size=3),
    after=st.lists(st.sampled_from(sorted(_THINGS)), max_size=3),
)
def test_other_arguments_are_passed_untouched(
    ckpt: Candidate, use_reentrant: bool, before: list[str], after: list[str]
) -> None:
    """Do arguments that are no tensors reach both runs as the objects that were passed?"""
    things = [_THINGS[kind]() for kind in before + after]
    split = len(before)
    x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    region = Recorder(lambda *received: received[split].sin().exp())
    ckpt.checkpoint(
        region, *things[:split], x, *things[split:], use_reentrant=use_reentrant
    ).sum().backward()
    assert region.count == 2, f"expected forward and one recomputation, observed {region.count}"
    reached()
    for phase, run in zip(("forward", "recomputation"), region.runs, strict=True):
        received = [*run.args[:split], *run.args[split + 1 :]]
        assert len(received) == len(things), (
            f"{phase}: expected {len(things)} other arguments, observed {len(received)}"
        )
        for place, (got, wanted) in enumerate(zip(received, things, strict=True)):
            assert got is wanted, (
                f"{phase}: expected the very object {wanted!r} as other argument {place}, "
                f"observed {got!r}"
            )


@clause("calling/repeated-argument")
@both_variants
@given(places=st.lists(st.integers(0, 2), min_size=2, max_size=5))
def test_repeated_tensor_gets_the_sum(
    ckpt: Candidate, use_reentrant: bool, places: list[int]
) -> None:
    """Is the gradient of a tensor passed several times the sum over its positions?"""

    def function(*args: torch.Tensor) -> torch.Tensor:
        # Small whole numbers: their sums are exact in any order.
        return torch.stack([(k + 1) * t * t for k, t in enumerate(args)]).sum(0)

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, *(leaves[place] for place in places))
        result.sum().backward()
        return result

    def leaves() -> list[torch.Tensor]:
        return [torch.randint(1, 5, (2,)).float().requires_grad_() for _ in range(3)]

    assert_equivalent(program, leaves, _direct(ckpt, use_reentrant=use_reentrant))
    reached()


@clause("calling/arguments-captured")
@both_variants
@given(count=st.integers(2, 4), change=st.sampled_from(["clear", "replace", "reverse", "append"]))
def test_callers_list_is_not_read_again(
    ckpt: Candidate, use_reentrant: bool, count: int, change: str
) -> None:
    """Does the recomputation use the arguments of the call after the caller changed its list?"""
    args: list[Any] = [torch.full((2,), float(k), requires_grad=True) for k in range(1, count + 1)]
    leaves = list(args)
    region = Recorder(
        lambda *received: sum(((k + 1) * t).sin() for k, t in enumerate(received)).exp()
    )
    result = ckpt.checkpoint(region, *args, use_reentrant=use_reentrant)
    if change == "replace":
        args[:] = [torch.zeros(2)] * count
    elif change == "append":
        args.append(torch.zeros(2))
    else:
        getattr(args, change)()
    result.sum().backward()
    assert region.count == 2, f"expected forward and one recomputation, observed {region.count}"
    reached()
    values = [t[0].item() for t in region.runs[1].args]
    assert values == [float(k) for k in range(1, count + 1)], (
        f"expected the recomputation to get the arguments of the call, observed {values}"
    )
    expected = torch.autograd.grad(region.function(*leaves).sum(), leaves)
    assert_same([leaf.grad for leaf in leaves], list(expected), "gradients")


# ---------------------------------------------------------------------------- keywords

_NAMES = ["scale", "mode", "args", "kwargs", "input", "func", "segments", "x", "cls", "ctx"]
_KEYWORDS = st.dictionaries(
    st.sampled_from(_NAMES), st.sampled_from(["grad", "constant", "thing", "number"]), max_size=4
)


def _keyword_values(kinds: dict[str, str]) -> dict[str, Any]:
    make: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.full((2,), 0.5, requires_grad=True),
        "constant": lambda: torch.full((2,), 0.25),
        "thing": _Equal,
        "number": lambda: 3.5,
    }
    return {name: make[kind]() for name, kind in kinds.items()}


def _uses_keywords(t: torch.Tensor, /, **received: Any) -> torch.Tensor:
    for name in sorted(received):
        if isinstance(received[name], (torch.Tensor, float)):
            t = (t * received[name]).sin()
    return t.exp().sin()


def _assert_keywords(received: dict[str, Any], passed: dict[str, Any], phase: str) -> None:
    assert sorted(received) == sorted(passed), (
        f"{phase}: expected the keywords {sorted(passed)}, observed {sorted(received)}"
    )
    for name, wanted in passed.items():
        if isinstance(wanted, torch.Tensor):
            assert_same(received[name], wanted, f"{phase}: keyword {name}")
            assert received[name].requires_grad == wanted.requires_grad, (
                f"{phase}: keyword {name}: expected requires_grad={wanted.requires_grad}"
            )
        else:
            assert received[name] is wanted, (
                f"{phase}: expected the very object for keyword {name}, observed {received[name]!r}"
            )


@clause("calling/keywords")
@given(kinds=_KEYWORDS)
def test_keywords_reach_the_function(ckpt: Candidate, kinds: dict[str, str]) -> None:
    """Does forward get each of the function's keywords, and nothing else?"""
    passed = _keyword_values(kinds)
    x = torch.full((2,), 0.75, requires_grad=True)
    region = Recorder(_uses_keywords)
    result = ckpt.checkpoint(region, x, use_reentrant=False, **passed)
    reached()
    _assert_keywords(region.runs[0].kwargs, passed, "forward")
    assert_same(result, _uses_keywords(x, **passed), "result")


@clause("calling/keywords")
@given(kinds=_KEYWORDS, positional=st.integers(1, 3))
def test_unknown_keywords_are_refused_by_the_function(
    ckpt: Candidate, kinds: dict[str, str], positional: int
) -> None:
    """Does a keyword that the function does not take raise as in the plain call?"""
    x = torch.ones(2, requires_grad=True)
    region = lambda *args: args[0].sin()
    assert_same(
        ckpt.checkpoint(region, *[x] * positional, use_reentrant=False), x.sin(), "legitimate call"
    )
    reached()
    with pytest.raises(TypeError):
        ckpt.checkpoint(
            region, *[x] * positional, use_reentrant=False, **_keyword_values(kinds), surplus=1
        )


# Names that an implementation is likely to use itself.
_LIKELY_NAMES = [
    "self", "cls", "fn", "func", "f", "args", "kwargs", "inputs", "input", "ctx", "run_function",
    "preserve", "frame", "dummy", "reentrant", "x", "options", "config", "device", "name",
]  # fmt: skip


def _assert_keyword_arrives(wrap: Wrap, name: str) -> None:
    runs: list[dict[str, Any]] = []

    def function(t: torch.Tensor, /, **received: Any) -> torch.Tensor:
        runs.append(received)
        result: torch.Tensor = (t * received[name]).sin().exp()
        return result

    gain = torch.full((2,), 0.5, requires_grad=True)
    result = wrap(function, torch.ones(2, requires_grad=True), **{name: gain})
    result.sum().backward()
    assert len(runs) == 2, f"{name}: expected one recomputation, observed {len(runs) - 1}"
    for phase, received in zip(("forward", "recomputation"), runs, strict=True):
        _assert_keywords(received, {name: gain}, phase)
    assert gain.grad is not None, f"expected a gradient for keyword {name}"


@clause("calling/keyword-names")
@pytest.mark.parametrize("name", _LIKELY_NAMES)
def test_keyword_of_any_name_is_passed(ckpt: Candidate, name: str) -> None:
    """Is a keyword passed on, whatever it is called?"""
    wrap = _direct(ckpt, use_reentrant=False)
    _assert_keyword_arrives(wrap, "scale")
    reached()
    _assert_keyword_arrives(wrap, name)


@clause("decorator/keyword-names")
@pytest.mark.parametrize("name", _LIKELY_NAMES)
def test_keyword_of_any_name_is_passed_by_a_wrapped_function(ckpt: Candidate, name: str) -> None:
    """Does a wrapped function pass a keyword on, whatever it is called?"""
    wrap = _decorated(ckpt, use_reentrant=False)
    _assert_keyword_arrives(wrap, "scale")
    reached()
    _assert_keyword_arrives(wrap, name)


@clause("calling/keywords-recomputed")
@given(kinds=_KEYWORDS, consume=st.booleans(), passes=st.integers(1, 2))
def test_recomputation_gets_the_same_keywords(
    ckpt: Candidate, kinds: dict[str, str], consume: bool, passes: int
) -> None:
    """Is every recomputation called with the keywords of forward?"""
    passed = _keyword_values(kinds)
    x = torch.full((2,), 0.75, requires_grad=True)
    received: list[dict[str, Any]] = []

    def function(t: torch.Tensor, /, **kwargs: Any) -> torch.Tensor:
        received.append(dict(kwargs))
        taken = {name: kwargs.pop(name) if consume else kwargs[name] for name in list(kwargs)}
        return _uses_keywords(t, **taken)

    result = ckpt.checkpoint(function, x, use_reentrant=False, **passed)
    for _ in range(passes):
        result.sum().backward(retain_graph=True)
    assert len(received) == 1 + passes, (
        f"expected {passes} recomputations, observed {len(received) - 1}"
    )
    reached()
    for number, run in enumerate(received):
        _assert_keywords(run, passed, f"run {number}")


@clause("calling/keywords-recomputed")
@given(change=st.sampled_from(["clear", "replace", "add"]))
def test_callers_dictionary_is_not_read_again(ckpt: Candidate, change: str) -> None:
    """Do the keywords stay those of the call when the caller changes its dictionary?"""
    gain = torch.full((2,), 0.5, requires_grad=True)
    keywords: dict[str, Any] = {"gain": gain, "factor": 3.0}
    region = Recorder(lambda t, **received: (t * received["gain"] * received["factor"]).sin().exp())
    x = torch.ones(2, requires_grad=True)
    result = ckpt.checkpoint(region, x, use_reentrant=False, **keywords)
    if change == "clear":
        keywords.clear()
    elif change == "replace":
        keywords.update(gain=torch.zeros(2), factor=0.0)
    else:
        keywords["another"] = 1
    result.sum().backward()
    assert region.count == 2, f"expected one recomputation, observed {region.count - 1}"
    reached()
    _assert_keywords(region.runs[1].kwargs, {"gain": gain, "factor": 3.0}, "recomputation")


def _keyword_program(kinds: dict[str, str], grad_input: bool) -> Any:
    """Program and leaves for a region whose keywords hold leaves and tensors with history."""
    names = sorted(name for name, kind in kinds.items() if kind == "grad")

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        values = _keyword_values(kinds)
        for place, name in enumerate(names):
            values[name] = leaves[1 + place] if place % 2 else leaves[1 + place] * 2
        result: torch.Tensor = wrap(_uses_keywords, leaves[0], **values)
        result.sum().backward()
        return result

    def leaves() -> list[torch.Tensor]:
        return [torch.randn(2).requires_grad_(grad_input), *(_leaf(2) for _ in names)]

    return program, leaves


@clause("calling/keyword-tensors")
@given(kinds=_KEYWORDS, grad_input=st.booleans())
def test_keyword_tensors_get_gradients(
    ckpt: Candidate, kinds: dict[str, str], grad_input: bool
) -> None:
    """Do tensors passed by keyword get the plain run's gradients?"""
    program, leaves = _keyword_program(kinds | {"scale": "grad"}, grad_input)
    assert_equivalent(program, leaves, _direct(ckpt, use_reentrant=False))
    reached()


@clause("calling/reentrant-refuses-keywords")
@given(kinds=_KEYWORDS, extra=st.sampled_from(["grad", "constant", "thing", "number"]))
def test_reentrant_variant_refuses_keywords(
    ckpt: Candidate, kinds: dict[str, str], extra: str
) -> None:
    """Is a reentrant call with keywords for the function refused before the function is run?"""
    x = torch.ones(2, requires_grad=True)
    region = Recorder(_uses_keywords)
    ckpt.checkpoint(region, x, use_reentrant=True).sum().backward()
    assert region.count == 2, "expected the call without keywords to be run and recomputed"
    reached()
    with pytest.raises(Exception):  # noqa: B017 - the class is not promised
        ckpt.checkpoint(region, x, use_reentrant=True, **_keyword_values(kinds | {"gain": extra}))
    assert region.count == 2, "expected the function not to be run by the refused call"


# ---------------------------------------------------------------------------- options

_OPTIONS: dict[str, Callable[[], Any]] = {
    "preserve_rng_state": lambda: False,
    "determinism_check": lambda: "none",
    "debug": lambda: False,
    "early_stop": lambda: False,
    "context_fn": lambda: lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
}


def _known_options(ckpt: Candidate) -> list[str]:
    """Options that the candidate has at all. One that it lacks is another profile's business."""
    known = []
    for option, value in _OPTIONS.items():
        region = Recorder(lambda t, **received: t.sin())
        with contextlib.suppress(Exception):
            ckpt.checkpoint(region, torch.ones(1), use_reentrant=False, **{option: value()})
            if region.runs and not region.runs[0].kwargs:
                known.append(option)
    return known


@clause("calling/options-consumed")
def test_option_names_do_not_reach_the_function(ckpt: Candidate) -> None:
    """Does a parameter called like an option keep its default in a direct call?"""
    seen: list[dict[str, Any]] = []

    def function(
        t: torch.Tensor,
        *,
        use_reentrant: Any = "unset",
        preserve_rng_state: Any = "unset",
        determinism_check: Any = "unset",
        debug: Any = "unset",
        early_stop: Any = "unset",
        context_fn: Any = "unset",
        own: Any = "unset",
    ) -> torch.Tensor:
        seen.append({name: value for name, value in locals().items() if name not in ("t", "seen")})
        return t.sin().exp()

    x = torch.ones(2, requires_grad=True)
    for option in [None, *_known_options(ckpt)]:
        given_option = {option: _OPTIONS[option]()} if option else {}
        seen.clear()
        result = ckpt.checkpoint(function, x, use_reentrant=False, own="mine", **given_option)
        result.sum().backward()
        assert len(seen) == 2, f"{option}: expected one recomputation, observed {len(seen) - 1}"
        reached()
        for phase, received in zip(("forward", "recomputation"), seen, strict=True):
            assert received.pop("own") == "mine", f"{phase}: the function's own keyword is missing"
            leaked = sorted(name for name, value in received.items() if value != "unset")
            assert not leaked, f"{phase}: options reached the function: {leaked}"


@clause("calling/options-keyword-only")
@both_variants
@given(
    leading=st.lists(
        st.sampled_from([True, False, None, "default", "none", 0, 1, contextlib.nullcontext]),
        min_size=1,
        max_size=7,
    )
)
def test_positional_values_are_no_options(
    ckpt: Candidate, use_reentrant: bool, leading: list[Any]
) -> None:
    """Are booleans, strings and callables after the function the function's arguments?"""
    x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    region = Recorder(lambda *args: (args[-1].sin().exp(), torch.is_grad_enabled()))
    result, recording = ckpt.checkpoint(region, *leading, x, use_reentrant=use_reentrant)
    result.sum().backward()
    assert region.count == 2, f"expected forward and one recomputation, observed {region.count}"
    reached()
    assert recording is not use_reentrant, "expected use_reentrant to choose the variant"
    for phase, run in zip(("forward", "recomputation"), region.runs, strict=True):
        received = list(run.args[:-1])
        assert len(received) == len(leading), (
            f"{phase}: expected the arguments {leading}, observed {received}"
        )
        assert all(got is wanted for got, wanted in zip(received, leading, strict=True)), (
            f"{phase}: expected the arguments {leading}, observed {received}"
        )


def _what_rng_does(call: Wrap, **option: Any) -> Any:
    """Whether the gradient belongs to the mask that forward drew."""
    torch.manual_seed(7)
    x = torch.ones(64, requires_grad=True)
    result = call(lambda t: (t * torch.rand(64)).sin().exp(), x, **option)
    torch.manual_seed(8)
    result.sum().backward()
    torch.manual_seed(7)
    (expected,) = torch.autograd.grad((x * torch.rand(64)).sin().exp().sum(), x)
    assert x.grad is not None
    return torch.equal(x.grad, expected)


def _what_early_stop_does(call: Wrap, **option: Any) -> Any:
    """How often the tail behind the last needed tensor runs."""
    tail: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        t = t.sin()
        tail.append(1)
        return t + 1

    call(function, torch.ones(2, requires_grad=True), **option).sum().backward()
    return len(tail)


def _what_determinism_check_does(call: Wrap, **option: Any) -> Any:
    """Whether a saved tensor of another shape is noticed; the gradient formula takes any."""

    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(saved)
            return t * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            assert len(ctx.saved_tensors) == 1
            return gradient * 2, None

    runs: list[int] = []

    def function(t: torch.Tensor) -> Any:
        runs.append(1)
        return Ignores.apply(t, torch.ones(len(runs)))

    try:
        call(function, torch.ones(2, requires_grad=True), **option).sum().backward()
    except RuntimeError:
        return "noticed"
    return "not noticed"


_OBSERVED: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    # option: what shows its effect, its documented default, the other value
    "preserve_rng_state": (_what_rng_does, True, False),
    "early_stop": (_what_early_stop_does, True, False),
    "determinism_check": (_what_determinism_check_does, "default", "none"),
}


@clause("calling/defaults")
@pytest.mark.parametrize("option", sorted(_OBSERVED))
def test_option_left_out_has_its_default(ckpt: Candidate, option: str) -> None:
    """Does leaving an option out do what passing its documented default does?"""
    observe, default, other = _OBSERVED[option]
    call = _direct(ckpt, use_reentrant=False)
    reached()
    if option not in _known_options(ckpt):
        return  # without the option there is nothing to leave out
    usual, unusual = observe(call, **{option: default}), observe(call, **{option: other})
    assert usual != unusual, (
        f"expected {option}={default!r} and {option}={other!r} to differ, observed {usual!r} twice"
    )
    left_out = observe(call)
    assert left_out == usual, (
        f"expected a call without {option} to do what {option}={default!r} does ({usual!r}), "
        f"observed {left_out!r}"
    )


@clause("calling/defaults")
def test_debug_is_off_by_default(ckpt: Candidate) -> None:
    """Does the error of a mismatch name no operators unless they were asked for?"""
    runs: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (t if len(runs) == 1 else t[:2]).lgamma().sum()

    x = torch.full((3,), 1.5, requires_grad=True)
    result = ckpt.checkpoint(function, x, use_reentrant=False)
    with pytest.raises(RuntimeError) as caught:
        result.backward()
    reached()
    assert "lgamma" not in str(caught.value), (
        "expected an error without a trace of operators when debug is left out, "
        f"observed {str(caught.value)[:300]!r}"
    )


@clause("calling/variant-choice")
@given(choices=st.lists(st.booleans(), min_size=2, max_size=5), chained=st.booleans())
def test_each_call_uses_the_variant_it_chose(
    ckpt: Candidate, choices: list[bool], chained: bool
) -> None:
    """Does use_reentrant choose the variant of its own call, whatever the calls before chose?"""
    recording: list[bool] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        recording.append(torch.is_grad_enabled())
        return t.sin().exp().tanh()

    def run(wrap: Callable[[bool], Wrap]) -> tuple[list[bool], Any]:
        x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
        results: list[torch.Tensor] = []
        for choice in choices:
            source = results[-1] if chained and results else x
            results.append(wrap(choice)(function, source))
        observed = list(recording)
        (results[-1] if chained else torch.stack(results)).sum().backward()
        recording.clear()
        return observed, x.grad

    _, expected = run(lambda choice: lambda function, t: function(t))
    observed, gradient = run(lambda choice: _direct(ckpt, use_reentrant=choice))
    reached()
    assert observed == [not choice for choice in choices], (
        f"use_reentrant={choices}: expected grad mode in forward to be "
        f"{[not choice for choice in choices]}, observed {observed}"
    )
    if chained:
        assert_same(gradient, expected, "gradient")


def _without_choice(
    ckpt: Candidate, *args: Any, **explicit: Any
) -> tuple[str, bool | None, int, int]:
    """What a call without a choice does: refused or run, grad mode in forward, number of warnings
    that name the option, number of runs."""
    region = Recorder(lambda t: (t.sin().exp(), torch.is_grad_enabled()))
    with caught_warnings() as seen:
        try:
            result, recording = ckpt.checkpoint(region, *args, **explicit)
        except Exception:  # noqa: BLE001 - refusing is one of the two ways
            return "refused", None, 0, region.count
    named = sum("use_reentrant" in str(warning.message) for warning in seen)
    result.sum().backward()
    return "run", recording, named, region.count


@clause("calling/omitted-choice")
@pytest.mark.parametrize("repeat", [1, 2])
def test_omitted_choice_is_the_reentrant_variant(ckpt: Candidate, repeat: int) -> None:
    """Is a call that does not choose refused, or else run as the reentrant variant?"""
    x = torch.ones(2, requires_grad=True)
    for _ in range(repeat):
        # An explicit choice before it must not stand in for the missing one.
        ckpt.checkpoint(torch.sin, x, use_reentrant=False)
        how, recording, _, runs = _without_choice(ckpt, x)
        reached()
        if how == "refused":
            assert runs == 0, "expected a refused call not to run the function"
        else:
            assert recording is False, (
                "expected a call without use_reentrant to run forward under no_grad "
                "(the reentrant variant), observed grad mode enabled"
            )
            assert runs == 2, f"expected one recomputation, observed {runs - 1}"


@clause("calling/none-is-omitted")
def test_none_does_what_omission_does(ckpt: Candidate) -> None:
    """Does use_reentrant=None do what leaving it out does?"""
    x = torch.ones(2, requires_grad=True)
    omitted = _without_choice(ckpt, x)
    explicit = _without_choice(ckpt, x, use_reentrant=None)
    reached()
    assert explicit == omitted, (
        f"(outcome, grad mode in forward, warnings, runs): expected {omitted} for "
        f"use_reentrant=None as for the omitted option, observed {explicit}"
    )


# ---------------------------------------------------------------------------- where it may stand


@clause("calling/grad-disabled")
@both_variants
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "set_grad_enabled"])
@pytest.mark.parametrize("grad_input", [False, True])
def test_without_grad_mode_nothing_is_recorded(
    ckpt: Candidate, use_reentrant: bool, mode: str, grad_input: bool
) -> None:
    """Is a region under no_grad a plain call that keeps nothing?"""
    x = torch.linspace(0.0, 1.0, 64).requires_grad_(grad_input)
    weight = torch.ones(64, requires_grad=True)
    region = Recorder(lambda t: (t * weight).sin().exp(), keep_arguments=False)
    enter: Any = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    }[mode]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no input requires grad: the reentrant variant may say so
        with enter(), LiveStorages() as live:
            state = AmbientState.capture()
            hidden = x if grad_input else x * 1
            result = ckpt.checkpoint(region, hidden, use_reentrant=use_reentrant)
            expected = (hidden * weight).sin().exp()
            changed = state.difference(AmbientState.capture())
            assert_same(result.clone(), expected.clone(), "result")
            inference = (result.is_inference(), expected.is_inference())
            requires_grad = result.requires_grad
            del hidden, expected
            if live.count() > 1:
                gc.collect()  # a cycle is allowed, and collecting takes its time
            kept = live.count()
    reached()
    assert region.count == region.finished == 1, f"expected 1 run, observed {region.count}"
    assert not requires_grad, "expected a result that does not require grad"
    assert inference[0] == inference[1], (
        f"expected is_inference()={inference[1]} as in the plain run, observed {inference[0]}"
    )
    assert not changed, f"expected the state around the call to stay as it was, changed: {changed}"
    assert kept == 1, f"expected nothing but the result to be alive, observed {kept} storages"


class _Meeting:
    """Lets threads meet at a point. One that waits in vain goes on: an implementation may well run
    regions one at a time."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def wait(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(timeout=0.2)


@clause("calling/concurrent-threads")
@both_variants
@pytest.mark.parametrize("overlap", ["forward", "recomputation", "both"])
def test_overlapping_regions_of_threads_are_exact(
    ckpt: Candidate, use_reentrant: bool, overlap: str
) -> None:
    """Do regions give exact gradients while another thread is inside a region too?"""
    threads = 3
    meetings = [_Meeting(threads) for _ in range(4)]
    gradients: dict[int, list[Any]] = {}
    problems: list[BaseException] = []

    def work(number: int) -> None:
        runs: list[int] = []

        def function(t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            phase = "forward" if len(runs) == 1 else "recomputation"
            t = (t * number).sin()
            if overlap in (phase, "both"):
                meetings[len(runs) - 1].wait()
            for _ in range(number):
                t = t.exp().sin()
            return t.tanh()

        try:
            x = torch.full((3,), 0.1 * number, requires_grad=True)
            result = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
            result.sum().backward()
            plain = (x * number).sin()
            for _ in range(number):
                plain = plain.exp().sin()
            (expected,) = torch.autograd.grad(plain.tanh().sum(), x)
            gradients[number] = [x.grad, expected, len(runs)]
        except BaseException as problem:  # noqa: BLE001 - a thread's failure is the verdict
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(1, threads + 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise problems[0]
    reached()
    for number, (observed, expected, count) in gradients.items():
        assert_same(observed, expected, f"gradient of thread {number}")
        assert count == 2, f"thread {number}: expected 1 recomputation, observed {count - 1}"


@clause("calling/many-regions")
@both_variants
@pytest.mark.parametrize("layout", ["chain", "side by side"])
def test_hundreds_of_regions_work(ckpt: Candidate, use_reentrant: bool, layout: str) -> None:
    """Does backward through hundreds of regions work as the plain run does?"""
    chained = layout == "chain"
    # Python allows 1000 frames: regions that nest in backward, by two frames each, exceed them.
    count = 500

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        (x,) = leaves
        if chained:
            for _ in range(count):
                x = wrap(torch.sin, x)
        else:
            # Whole numbers: the sum of their gradients is exact in any order.
            x = torch.stack([wrap(torch.square, x) for _ in range(count)]).sum(0)
        x.sum().backward()
        return x

    assert_equivalent(
        program,
        lambda: [torch.full((1,), 3.0, requires_grad=True)],
        _direct(ckpt, use_reentrant=use_reentrant),
    )
    reached()


# ---------------------------------------------------------------------------- decorator form


@clause("decorator/returned")
@both_variants
@pytest.mark.parametrize("spelling", ["call", "syntax"])
def test_decorator_is_returned(ckpt: Candidate, use_reentrant: bool, spelling: str) -> None:
    """Does checkpoint without a function return a decorator whose product works?"""
    decorator = ckpt.checkpoint(use_reentrant=use_reentrant)
    assert callable(decorator), f"expected a decorator, observed {decorator!r}"
    x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    if spelling == "syntax":

        @decorator  # type: ignore[untyped-decorator]
        def wrapped(t: torch.Tensor) -> torch.Tensor:
            return t.sin().exp()

    else:
        wrapped = decorator(lambda t: t.sin().exp())
    assert callable(wrapped), f"expected a function, observed {wrapped!r}"
    result = wrapped(x)
    result.sum().backward()
    reached()
    assert_same(result, x.sin().exp(), "result")
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert_same(x.grad, expected, "gradient")


@clause("decorator/none-is-omitted")
@both_variants
@pytest.mark.parametrize("spelling", ["positional", "keyword"])
def test_none_for_the_function_gives_a_decorator(
    ckpt: Candidate, use_reentrant: bool, spelling: str
) -> None:
    """Is None in the place of the function the decorator form?"""
    if spelling == "positional":
        decorator = ckpt.checkpoint(None, use_reentrant=use_reentrant)
    else:
        decorator = ckpt.checkpoint(function=None, use_reentrant=use_reentrant)
    x = torch.linspace(0.0, 1.0, 3, requires_grad=True)
    region = Recorder(lambda t: t.sin().exp())
    result = decorator(region)(x)
    result.sum().backward()
    reached()
    assert_same(result, x.sin().exp(), "result")
    assert region.count == 2, f"expected one recomputation, observed {region.count - 1}"


@clause("decorator/refuses-other-keywords")
@both_variants
@given(
    names=st.sets(
        st.sampled_from(["gain", "args", "reentrant", "preserve_rng", "earlystop", "x", "input"]),
        min_size=1,
        max_size=2,
    ),
    value=st.sampled_from([None, False, 1, "text"]),
)
def test_unknown_keyword_of_the_decorator_is_refused(
    ckpt: Candidate, use_reentrant: bool, names: set[str], value: Any
) -> None:
    """Is a keyword that names no option refused when the decorator is made?"""
    assert callable(ckpt.checkpoint(use_reentrant=use_reentrant)), "expected a decorator"
    reached()
    with pytest.raises(Exception):  # noqa: B017 - the class is not promised
        ckpt.checkpoint(use_reentrant=use_reentrant, **dict.fromkeys(names, value))


@clause("decorator/runs-nothing")
@both_variants
@given(calls=st.integers(0, 3))
def test_decorating_runs_nothing(ckpt: Candidate, use_reentrant: bool, calls: int) -> None:
    """Does the function run only when the wrapped function is called?"""
    region = Recorder(lambda t: t.sin().exp())
    decorator = ckpt.checkpoint(use_reentrant=use_reentrant)
    wrapped = decorator(region)
    decorator(region)
    assert region.count == 0, f"expected no run by decorating, observed {region.count}"
    results = [wrapped(torch.ones(2, requires_grad=True)) for _ in range(calls)]
    assert region.count == calls, f"expected {calls} runs, observed {region.count}"
    for result in results:
        result.sum().backward()
    reached()
    assert region.count == 2 * calls, (
        f"expected {calls} recomputations, observed {region.count - calls}"
    )


@clause("decorator/equals-direct-call")
@both_variants
@given(
    steps=_STEPS,
    count=st.integers(1, 3),
    random_part=st.booleans(),
    things=st.lists(st.sampled_from([None, True, "text", 3]), max_size=3),
)
def test_wrapped_call_is_the_direct_call(
    ckpt: Candidate,
    use_reentrant: bool,
    steps: list[str],
    count: int,
    random_part: bool,
    things: list[Any],
) -> None:
    """Does a wrapped function do all that the direct call does?"""
    received: list[tuple[Any, ...]] = []

    def function(*args: Any) -> torch.Tensor:
        received.append(args[count:])
        total = sum(((k + 1) * t).sin() for k, t in enumerate(args[:count]))
        if random_part:
            total = total * torch.rand(2)
        return _apply(steps, total).exp()

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, *leaves, *things)
        result.sum().backward()
        return result

    def leaves() -> list[torch.Tensor]:
        return [_leaf(2) for _ in range(count)]

    assert_equivalent(program, leaves, _decorated(ckpt, use_reentrant=use_reentrant))
    assert len(received) == 4, (
        f"expected 2 plain runs, forward and recomputation, observed {len(received)} runs"
    )
    reached()
    for rest in received[2:]:
        assert list(rest) == things, f"expected the arguments {things}, observed {list(rest)}"


_OPTION_NAMES = [
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "respect_saved_tensors_hooks",
    "function",
]


@clause("decorator/keywords-kept-apart")
@given(
    names=st.sets(st.sampled_from(_OPTION_NAMES), min_size=1),
    kinds=_KEYWORDS,
)
def test_keywords_of_the_wrapped_function_are_its_own(
    ckpt: Candidate, names: set[str], kinds: dict[str, str]
) -> None:
    """Do keywords called like options reach the function and leave the options alone?"""
    passed: dict[str, Any] = {name: _Equal() for name in names} | _keyword_values(kinds)
    tail: list[int] = []

    def function(t: torch.Tensor, /, **received: Any) -> torch.Tensor:
        result = _uses_keywords(t, **received)
        tail.append(1)
        return result + 1

    region = Recorder(function)
    x = torch.full((2,), 0.75, requires_grad=True)
    result = ckpt.checkpoint(use_reentrant=False)(region)(x, **passed)
    result.sum().backward()
    assert region.count == 2, f"expected one recomputation, observed {region.count - 1}"
    reached()
    for phase, run in zip(("forward", "recomputation"), region.runs, strict=True):
        _assert_keywords(run.kwargs, passed, phase)
    assert len(tail) == 1, "expected the configured early stop to hold"


@clause("decorator/keywords-kept-apart")
@pytest.mark.parametrize("name", ["early_stop", "preserve_rng_state", "use_reentrant"])
def test_keywords_of_the_wrapped_function_configure_nothing(ckpt: Candidate, name: str) -> None:
    """Does a keyword of the function that looks like an option leave the configuration alone?"""
    observed: list[Any] = []

    def check(wrap: Wrap, **keyword: Any) -> tuple[Any, Any]:
        return _what_rng_does(wrap, **keyword), _what_early_stop_does(wrap, **keyword)

    def with_keyword(function: Region, t: torch.Tensor, **keyword: Any) -> Any:
        def takes(t: torch.Tensor, **received: Any) -> Any:
            observed.append(received)
            return function(t)

        return ckpt.checkpoint(use_reentrant=False)(takes)(t, **keyword)

    usual = check(with_keyword)
    unusual = check(with_keyword, **{name: name == "use_reentrant"})
    reached()
    assert unusual == usual, (
        f"(forward's random numbers replayed, runs of the tail): expected {usual} whatever "
        f"keyword {name} the function gets, observed {unusual}"
    )


@clause("decorator/keyword-tensors")
@given(kinds=_KEYWORDS, grad_input=st.booleans())
def test_keyword_tensors_of_the_wrapped_function_get_gradients(
    ckpt: Candidate, kinds: dict[str, str], grad_input: bool
) -> None:
    """Do tensors given to a wrapped function by keyword get the plain gradients?"""
    program, leaves = _keyword_program(kinds | {"scale": "grad"}, grad_input)
    assert_equivalent(program, leaves, _decorated(ckpt, use_reentrant=False))
    reached()


def _method_programs(decorate: Callable[[Region], Region]) -> dict[str, Any]:
    """Programs that call a decorated method in each of the ways a method can be called.

    With the identity as ``decorate`` they are the plain programs.
    """

    class Base:
        factor = 2.0

        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        @decorate
        def method(self, t: torch.Tensor, power: float = 1.0) -> torch.Tensor:
            return (t * self.weight * self.factor * power).sin().exp()

        @staticmethod
        @decorate
        def static(t: torch.Tensor) -> torch.Tensor:
            return t.sin().exp()

        @classmethod
        @decorate
        def of_class(cls, t: torch.Tensor) -> torch.Tensor:
            return (t * cls.factor).sin().exp()

    class Derived(Base):
        factor = 3.0

        def method(self, t: torch.Tensor, power: float = 2.0) -> torch.Tensor:
            result: torch.Tensor = super().method(t, power)
            return result.tanh()

    class Model(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = weight

        @decorate
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return (t * self.weight).sin().exp()

    def replaced(t: torch.Tensor, weight: torch.Tensor) -> Any:
        model = _Module(weight)
        model.forward = decorate(model.forward)  # type: ignore[method-assign]
        return model(t)

    def two_instances(t: torch.Tensor, weight: torch.Tensor) -> Any:
        first, second = Base(weight), Base(weight * 2)
        method = first.method
        return second.method(t) + method(t)

    def through_instance(t: torch.Tensor, weight: torch.Tensor) -> Any:
        return Base(weight).method(t, 2.0)

    return {
        "instance": through_instance,
        "class": lambda t, weight: Base.method(Base(weight), t),
        "two instances": two_instances,
        "inherited": lambda t, weight: Derived(weight).method(t),
        "static": lambda t, weight: Base.static(t) + Base(weight).static(t),
        "class method": lambda t, weight: Derived.of_class(t) + Base(weight).of_class(t),
        "module": lambda t, weight: Model(weight)(t),
        "replaced forward": replaced,
    }


@clause("decorator/methods")
@both_variants
@pytest.mark.parametrize("way", sorted(_method_programs(lambda function: function)))
def test_decorated_method_is_a_method(ckpt: Candidate, use_reentrant: bool, way: str) -> None:
    """Does a decorated method work however it is looked up?"""
    runs: list[int] = []

    def counted(decorate: Callable[[Region], Region]) -> Callable[[Region], Region]:
        def apply(function: Region) -> Region:
            @functools.wraps(function)
            def counting(*args: Any, **kwargs: Any) -> Any:
                runs.append(1)
                return function(*args, **kwargs)

            return decorate(counting)

        return apply

    plain = _method_programs(counted(lambda function: function))[way]
    decorated = _method_programs(counted(ckpt.checkpoint(use_reentrant=use_reentrant)))[way]

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        x, weight = leaves
        result: torch.Tensor = wrap(plain, x * 1.0, weight)
        result.sum().backward()
        return result

    def wrap(function: Region, *args: Any) -> Any:
        runs.clear()
        return decorated(*args)

    assert_equivalent(program, _two_leaves, wrap)
    regions = 2 if way in ("two instances", "static", "class method") else 1
    assert len(runs) == 2 * regions, (
        f"expected each of the {regions} regions to be recomputed once, observed {len(runs)} runs"
    )
    reached()


@clause("decorator/methods")
def test_keywords_reach_a_decorated_method(ckpt: Candidate) -> None:
    """Does a decorated method take its keyword arguments?"""

    class Holder:
        @ckpt.checkpoint(use_reentrant=False)  # type: ignore[untyped-decorator]
        def method(self, t: torch.Tensor, *, gain: torch.Tensor, debug: int = 0) -> torch.Tensor:
            return (t * gain * debug).sin().exp()

    gain = torch.ones(2, requires_grad=True)
    Holder().method(torch.zeros(2), gain=gain, debug=3).sum().backward()
    reached()
    assert gain.grad is not None, "expected the keyword tensor to get a gradient"
    assert gain.grad.tolist() == [0.0, 0.0]


@clause("decorator/every-call")
@both_variants
@given(order=st.sampled_from(_ORDERS), at_once=st.booleans())
def test_every_call_is_a_region(
    ckpt: Candidate, use_reentrant: bool, order: tuple[int, ...], at_once: bool
) -> None:
    """Is each call of a wrapped function recomputed once, from its own arguments?"""
    calls = len(order)
    seen: list[float] = []

    def function(t: torch.Tensor, k: int) -> torch.Tensor:
        seen.append(k)
        return (t * k).sin().exp()

    wrapped = ckpt.checkpoint(use_reentrant=use_reentrant)(function)
    leaves = [torch.full((2,), 0.1 * k, requires_grad=True) for k in range(calls)]
    if at_once:
        results = [wrapped(leaf, k) for k, leaf in enumerate(leaves)]
        for k in order:
            results[k].sum().backward()
        expected_runs = [*range(calls), *order]
    else:
        for k in order:
            wrapped(leaves[k], k).sum().backward()
        expected_runs = [k for k in order for _ in range(2)]
    reached()
    assert seen == expected_runs, f"expected the runs {expected_runs}, observed {seen}"
    for k, leaf in enumerate(leaves):
        (expected,) = torch.autograd.grad((leaf * k).sin().exp().sum(), leaf)
        assert_same(leaf.grad, expected, f"gradient of call {k}")


@clause("decorator/each-option")
@pytest.mark.parametrize("option", sorted(_OBSERVED))
def test_option_of_the_decorator_acts(ckpt: Candidate, option: str) -> None:
    """Does an option of the decorator form act as in the direct call, on each call?"""
    observe, default, other = _OBSERVED[option]
    reached()
    if option not in _known_options(ckpt):
        return
    for settings in ({}, {option: default}, {option: other}):
        expected = observe(_direct(ckpt, use_reentrant=False, **settings))
        observed = observe(_decorated(ckpt, use_reentrant=False, **settings))
        assert observed == expected, (
            f"{settings or 'defaults'}: expected {expected!r} as in the direct call, "
            f"observed {observed!r}"
        )


@clause("decorator/each-option")
@pytest.mark.parametrize("early_stop", [False, True])
def test_option_of_the_decorator_does_not_wear_off(ckpt: Candidate, early_stop: bool) -> None:
    """Does an option still hold at the third call of the wrapped function?"""
    tail: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        t = t.sin()
        tail.append(1)
        return t + 1

    wrapped = ckpt.checkpoint(use_reentrant=False, early_stop=early_stop)(function)
    for call in range(1, 4):
        tail.clear()
        wrapped(torch.ones(2, requires_grad=True)).sum().backward()
        reached()
        assert len(tail) == (1 if early_stop else 2), (
            f"call {call}, early_stop={early_stop}: observed {len(tail)} runs of the tail"
        )


@clause("decorator/reusable")
@both_variants
@given(
    factors=st.lists(st.integers(1, 5), min_size=2, max_size=4, unique=True),
    backwards=st.booleans(),
)
def test_one_decorator_wraps_many_functions(
    ckpt: Candidate, use_reentrant: bool, factors: list[int], backwards: bool
) -> None:
    """Does each function wrapped by one decorator stay its own?"""
    decorator = ckpt.checkpoint(use_reentrant=use_reentrant)

    def make(factor: int) -> Region:
        return lambda t: (t * factor).sin().exp()

    regions = {factor: Recorder(make(factor)) for factor in factors}
    wrapped = {factor: decorator(region) for factor, region in regions.items()}
    x = torch.full((2,), 0.25, requires_grad=True)
    results = {factor: function(x) for factor, function in wrapped.items()}
    reached()
    for factor in reversed(factors) if backwards else factors:
        plain = (x * factor).sin().exp()
        assert_same(results[factor], plain, f"result of function {factor}")
        x.grad = None
        results[factor].sum().backward()
        (expected,) = torch.autograd.grad(plain.sum(), x)
        assert_same(x.grad, expected, f"gradient of function {factor}")
        runs = regions[factor].count
        assert runs == 2, f"function {factor}: expected one recomputation, observed {runs - 1}"


@clause("decorator/any-callable")
@both_variants
@pytest.mark.parametrize("kind", sorted(_CALLABLES))
def test_callable_is_decorated(ckpt: Candidate, use_reentrant: bool, kind: str) -> None:
    """Can every kind of callable be decorated, with the plain result and gradients?"""
    wrap = _decorated(ckpt, use_reentrant=use_reentrant)
    assert_equivalent(_calls_everything(kind), _two_leaves, wrap)
    reached()


@clause("decorator/nested")
@given(depth=st.integers(1, 4), shared=st.booleans())
def test_wrapped_functions_nest(ckpt: Candidate, depth: int, shared: bool) -> None:
    """Do wrapped functions inside wrapped functions give the plain result and gradients?"""

    def build(decorate: Callable[[Region], Region]) -> Region:
        def inner(t: torch.Tensor) -> torch.Tensor:
            return t.sin().exp()

        function: Region = decorate(inner)
        for _ in range(depth - 1):

            def outer(t: torch.Tensor, function: Region = function) -> torch.Tensor:
                result: torch.Tensor = function(function(t.cos()))
                return result.tanh()

            function = decorate(outer)
        return function

    decorator = ckpt.checkpoint(use_reentrant=False)
    plain = build(lambda function: function)
    nested = build(
        decorator if shared else lambda function: ckpt.checkpoint(use_reentrant=False)(function)
    )

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(plain, leaves[0])
        result.sum().backward()
        return result

    assert_equivalent(program, lambda: [_leaf(3)], lambda function, t: nested(t))
    reached()


@clause("decorator/nested")
@given(depth=st.integers(1, 4))
def test_wrapped_function_calls_itself(ckpt: Candidate, depth: int) -> None:
    """Does a recursive wrapped function give the plain result and gradients?"""

    def plain(t: torch.Tensor, left: int) -> torch.Tensor:
        t = t.sin()
        return (plain(t, left - 1) * t).exp().tanh() if left else t.cos()

    @ckpt.checkpoint(use_reentrant=False)  # type: ignore[untyped-decorator]
    def recursive(t: torch.Tensor, left: int) -> torch.Tensor:
        t = t.sin()
        return (recursive(t, left - 1) * t).exp().tanh() if left else t.cos()

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(plain, leaves[0], depth)
        result.sum().backward()
        return result

    assert_equivalent(program, lambda: [_leaf(3)], lambda function, *args: recursive(*args))
    reached()


@clause("decorator/nested")
@given(times=st.integers(2, 4))
def test_decorator_applies_to_a_wrapped_function(ckpt: Candidate, times: int) -> None:
    """Can a wrapped function be decorated again?"""
    decorator = ckpt.checkpoint(use_reentrant=False)

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(_scaled, leaves[0], 2.0)
        result.sum().backward()
        return result

    def wrap(function: Region, *args: Any) -> Any:
        for _ in range(times):
            function = decorator(function)
        return function(*args)

    assert_equivalent(program, lambda: [_leaf(3)], wrap)
    reached()


@contextlib.contextmanager
def _early_stop(ckpt: Candidate, enable: bool | None) -> Iterator[None]:
    with contextlib.nullcontext() if enable is None else ckpt.set_checkpoint_early_stop(enable):
        yield


@clause("decorator/state-at-call")
@given(
    at_decoration=st.sampled_from([None, True, False]),
    at_call=st.lists(st.sampled_from([None, True, False]), min_size=1, max_size=3),
    configured=st.booleans(),
)
def test_early_stop_context_counts_at_the_call(
    ckpt: Candidate,
    at_decoration: bool | None,
    at_call: list[bool | None],
    configured: bool,
) -> None:
    """Does set_checkpoint_early_stop act where the wrapped function is called?"""
    tail: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        t = t.sin()
        tail.append(1)
        return t + 1

    with _early_stop(ckpt, at_decoration):
        wrapped = ckpt.checkpoint(use_reentrant=False, early_stop=configured)(function)
    for number, enable in enumerate(at_call):
        with _early_stop(ckpt, enable):
            result = wrapped(torch.ones(2, requires_grad=True))
        tail.clear()
        result.sum().backward()
        reached()
        stops = configured if enable is None else enable
        assert len(tail) == (0 if stops else 1), (
            f"decorated under {at_decoration}, configured {configured}, call {number} under "
            f"{enable}: expected the recomputation to {'stop early' if stops else 'run whole'}"
        )


@clause("decorator/state-at-call")
@pytest.mark.parametrize("decorated_under", [False, True])
@pytest.mark.parametrize("called_under", [False, True])
def test_grad_mode_and_autocast_count_at_the_call(
    ckpt: Candidate, decorated_under: bool, called_under: bool
) -> None:
    """Does a wrapped function see grad mode and autocast of its call?"""
    region = Recorder(lambda t: t.sin().exp())
    with torch.set_grad_enabled(decorated_under), torch.autocast("cpu", enabled=decorated_under):
        wrapped = ckpt.checkpoint(use_reentrant=False)(region)
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(called_under), torch.autocast("cpu", enabled=called_under):
        expected = AmbientState.capture()
        result = wrapped(x)
    reached()
    observed = region.runs[0].ambient
    differing = {
        name: (getattr(expected, name), getattr(observed, name))
        for name in ("grad_enabled", "autocast")
        if getattr(expected, name) != getattr(observed, name)
    }
    assert not differing, f"expected the function to see the state of its call: {differing}"
    assert result.requires_grad == called_under, (
        f"expected requires_grad={called_under} as in the plain call"
    )


@clause("decorator/contexts-per-call")
@given(calls=st.integers(1, 3), passes=st.integers(1, 2))
def test_context_fn_is_asked_per_call(ckpt: Candidate, calls: int, passes: int) -> None:
    """Does each call of a wrapped function get its own pair of contexts?"""
    events: list[str] = []
    pairs: list[int] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        events.append(name)
        yield

    class Again:
        """A context that can be entered for each recomputation."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            events.append(self.name)

        def __exit__(self, *raised: object) -> None:
            pass

    def context_fn() -> tuple[Any, Any]:
        pairs.append(1)
        return context(f"forward {len(pairs)}"), Again(f"recomputation {len(pairs)}")

    wrapped = ckpt.checkpoint(use_reentrant=False, context_fn=context_fn)(_function)
    assert not pairs, "expected context_fn not to be asked before a call"
    results = [wrapped(torch.ones(2, requires_grad=True)) for _ in range(calls)]
    assert events == [f"forward {k + 1}" for k in range(calls)], (
        f"expected each call to run under a first context of its own, observed {events}"
    )
    events.clear()
    for result in results:
        for _ in range(passes):
            result.sum().backward(retain_graph=True)
    reached()
    assert events == [f"recomputation {k + 1}" for k in range(calls) for _ in range(passes)], (
        f"expected each recomputation to run under its own call's second context, observed {events}"
    )


@clause("decorator/reentrant")
@given(calls=st.integers(1, 3))
def test_reentrant_decorator_gives_reentrant_regions(ckpt: Candidate, calls: int) -> None:
    """Are calls of a function wrapped with use_reentrant=True reentrant regions?"""
    region = Recorder(lambda t: t.sin().exp())
    wrapped = ckpt.checkpoint(use_reentrant=True)(region)
    x = torch.full((2,), 0.5, requires_grad=True)
    result = torch.stack([wrapped(x * k) for k in range(1, calls + 1)])
    assert [run.grad_enabled for run in region.runs] == [False] * calls, (
        "expected forward to run under no_grad"
    )
    result.sum().backward()
    assert region.count == region.finished == 2 * calls, (
        f"expected {calls} whole recomputations, observed {region.finished - calls}"
    )
    reached()
    plain = torch.stack([(x * k).sin().exp() for k in range(1, calls + 1)])
    (expected,) = torch.autograd.grad(plain.sum(), x)
    assert_same(x.grad, expected, "gradient")


@clause("decorator/reentrant-refuses-keywords")
@given(kinds=_KEYWORDS, extra=st.sampled_from(["grad", "constant", "thing"]))
def test_reentrant_wrapped_function_refuses_keywords(
    ckpt: Candidate, kinds: dict[str, str], extra: str
) -> None:
    """Is a call with keywords refused when the decorator is reentrant?"""
    x = torch.ones(2, requires_grad=True)
    region = Recorder(_uses_keywords)
    wrapped = ckpt.checkpoint(use_reentrant=True)(region)
    wrapped(x).sum().backward()
    assert region.count == 2, "expected the call without keywords to be run and recomputed"
    reached()
    with pytest.raises(Exception):  # noqa: B017 - the class is not promised
        wrapped(x, **_keyword_values(kinds | {"gain": extra}))
    assert region.count == 2, "expected the function not to be run by the refused call"
    wrapped(x).sum().backward()
    assert region.count == 4, "expected the wrapped function to work after a refused call"


@clause("decorator/omitted-choice")
@pytest.mark.parametrize("spelling", ["omitted", "none"])
def test_omitted_choice_of_the_decorator_is_announced(ckpt: Candidate, spelling: str) -> None:
    """Is an omitted use_reentrant announced at the latest by the first call?"""
    x = torch.ones(2, requires_grad=True)
    with caught_warnings() as silent:
        ckpt.checkpoint(use_reentrant=False)(torch.sin)(x)
    assert not silent, f"expected no warning for an explicit choice, observed {silent[0].message}"
    reached()
    with caught_warnings() as seen:
        try:
            choice = {} if spelling == "omitted" else {"use_reentrant": None}
            ckpt.checkpoint(**choice)(torch.sin)(x)
        except Exception:  # noqa: BLE001 - refusing is an announcement, too
            return
    assert any("use_reentrant" in str(warning.message) for warning in seen), (
        f"expected a warning that names use_reentrant, observed {[str(w.message) for w in seen]}"
    )


@clause("decorator/looks-like-the-function")
@both_variants
def test_wrapped_function_looks_like_the_function(ckpt: Candidate, use_reentrant: bool) -> None:
    """Does a wrapped function carry name, documentation and signature of the function?"""

    def original(first: torch.Tensor, second: int = 2, *, third: str = "x") -> torch.Tensor:
        """What it does."""
        return first.sin()

    wrapped = ckpt.checkpoint(use_reentrant=use_reentrant)(original)
    x = torch.ones(2, requires_grad=True)
    assert_same(wrapped(x), original(x), "result")
    reached()
    for name in ("__name__", "__doc__", "__module__"):
        expected = getattr(original, name)
        observed = getattr(wrapped, name, None)
        assert observed == expected, f"{name}: expected {expected!r}, observed {observed!r}"
    assert getattr(wrapped, "__wrapped__", None) is original, (
        "expected __wrapped__ to be the function"
    )
    assert inspect.signature(wrapped) == inspect.signature(original), (
        f"expected the signature {inspect.signature(original)}, "
        f"observed {inspect.signature(wrapped)}"
    )
