"""Chapter 2: the non-reentrant variant."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.candidate import Candidate
from conformance.observe import Recorder, assert_equivalent, assert_same, caught_warnings
from conformance.observe.compare import Program, Wrap, plain
from conformance.observe.functions import (
    KEEPING,
    STEPS,
    chain,
    graph_leaves,
    node_names,
)
from conformance.testing import clause, reached

names = st.lists(st.sampled_from(sorted(STEPS)), max_size=4)
keeping = st.sampled_from(KEEPING)
"""A step of which autograd keeps a tensor: a region with one has something to recompute."""
shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def region(ckpt: Candidate, **options: Any) -> Wrap:
    """``checkpoint`` of the non-reentrant variant, as the oracle's ``wrap``."""
    return functools.partial(ckpt.checkpoint, use_reentrant=False, **options)


def leaves(*shape: int, count: int = 1, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Fresh random leaves that require grad."""
    return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(count)]


def compare(
    ckpt: Candidate,
    program: Program,
    make_leaves: Callable[[], list[torch.Tensor]],
    **options: Any,
) -> None:
    """``assert_equivalent`` with regions of the candidate; counts as reached if there was one."""
    calls = 0

    def wrap(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return ckpt.checkpoint(function, *args, use_reentrant=False, **options, **kwargs)

    assert_equivalent(program, make_leaves, wrap)
    if calls:
        reached()


# ------------------------------------------------------------------ the forward run


@clause("nonreentrant/graph-recorded")
@given(steps=names, first=keeping, outputs=st.integers(1, 3))
def test_nodes_and_leaves_of_the_plain_graph(
    ckpt: Candidate, steps: list[str], first: str, outputs: int
) -> None:
    """Does the graph behind the outputs hold every node of the plain graph and lead to the same
    leaves, before any backward?"""
    x, w, unused = leaves(2, 3, count=3)

    def function(t: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = chain([first, *steps])(t) * w
        return tuple(h * (n + 1) for n in range(outputs))

    expected, observed = function(x, unused), region(ckpt)(function, x, unused)
    reached()
    missing = node_names(expected) - node_names(observed)
    assert not missing, f"nodes of the plain graph missing behind the region's output: {missing}"
    wanted = {id(leaf) for leaf in graph_leaves(expected)}
    assert {id(leaf) for leaf in graph_leaves(observed)} == wanted, (
        "the region's graph does not lead to the same leaves as the plain graph"
    )


@clause("nonreentrant/graph-recorded")
@given(steps=st.lists(keeping, min_size=1, max_size=3), repeats=st.integers(2, 3))
def test_graph_grows_through_regions(ckpt: Candidate, steps: list[str], repeats: int) -> None:
    """Is the graph of a chain of regions the graph of the whole chain?"""
    (x,) = leaves(3)
    expected = observed = x
    for _ in range(repeats):
        expected = chain(steps)(expected)
        observed = region(ckpt)(chain(steps), observed)
    reached()
    missing = node_names([expected]) - node_names([observed])
    assert not missing, f"nodes of the plain graph missing behind the last region: {missing}"


@clause("nonreentrant/forward-grad-mode")
@given(modes=st.lists(st.booleans(), max_size=3), fails=st.booleans())
def test_forward_sees_the_callers_grad_mode(
    ckpt: Candidate, modes: list[bool], fails: bool
) -> None:
    """Does the function find the grad mode that was set around the call, and is it left alone?"""
    seen: list[bool] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        if fails:
            raise KeyError("on purpose")
        return t.sin()

    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(torch.set_grad_enabled(mode))
        expected = modes[-1] if modes else True
        (x,) = leaves(3)
        with contextlib.suppress(KeyError):
            region(ckpt)(function, x)
        after = torch.is_grad_enabled()
    reached()
    assert seen == [expected], f"grad mode expected in forward: {[expected]}, observed: {seen}"
    assert after == expected, f"grad mode after the call: expected {expected}, observed {after}"


@clause("nonreentrant/forward-grad-mode")
def test_forward_sees_inference_mode(ckpt: Candidate) -> None:
    """Is inference mode still on in a region that is called under it?"""
    seen: list[tuple[bool, bool]] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return t.sin()

    with torch.inference_mode():
        result = region(ckpt)(function, torch.ones(2))
    reached()
    assert seen == [(False, True)], f"(grad, inference) expected [(False, True)], observed {seen}"
    assert result.is_inference(), "the plain result is an inference tensor, this one is not"


@clause("nonreentrant/recompute-grad-mode")
@pytest.mark.parametrize("around", [True, False], ids=["grad-on", "grad-off"])
@pytest.mark.parametrize("how", ["backward", "grad", "create-graph", "look"])
def test_recomputation_records(ckpt: Candidate, around: bool, how: str) -> None:
    """Is grad mode on in recomputation, whatever it is around backward, and left as it was?"""
    function = Recorder(lambda t: t.sin().exp())
    (x,) = leaves(3)
    y = region(ckpt)(function, x)
    total = y.sum()
    with torch.set_grad_enabled(around):
        if how == "backward":
            total.backward()
        elif how == "look":
            assert y.grad_fn._saved_result is not None
        else:
            torch.autograd.grad(total, x, create_graph=how == "create-graph")
        after = torch.is_grad_enabled()
    assert function.count == 2, f"expected one recomputation, observed {function.count - 1}"
    reached()
    assert function.runs[1].grad_enabled, "the recomputation ran with gradients switched off"
    assert after == around, f"grad mode after: expected {around}, observed {after}"


@clause("nonreentrant/grad-mode-off")
@given(steps=names, inference=st.booleans())
def test_without_gradients_it_is_a_plain_call(
    ckpt: Candidate, steps: list[str], inference: bool
) -> None:
    """Under no_grad or inference_mode: the plain result, no gradient, one run?"""
    function = Recorder(chain(["sin", *steps]))
    (x,) = leaves(2, 3)
    with torch.inference_mode() if inference else torch.no_grad():
        expected = function.function(x)
        observed = region(ckpt)(function, x)
    reached()
    assert_same(observed, expected, "result")
    assert not observed.requires_grad, "the result requires grad, the plain one does not"
    assert function.count == 1, f"expected 1 run of the function, observed {function.count}"


@clause("nonreentrant/grad-mode-off")
@given(steps=st.lists(keeping, min_size=1, max_size=3))
def test_function_that_switches_gradients_on(ckpt: Candidate, steps: list[str]) -> None:
    """Does a function that enables gradients for itself get the plain gradients under no_grad?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        @torch.enable_grad()
        def function(t: torch.Tensor) -> torch.Tensor:
            return chain(steps)(t)

        with torch.no_grad():
            y = wrap(function, *given_leaves)
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(3))


@clause("nonreentrant/in-flight")
@given(data=st.data(), count=st.integers(2, 5), same_shape=st.booleans())
def test_backward_in_any_order(
    ckpt: Candidate, data: st.DataObject, count: int, same_shape: bool
) -> None:
    """Does each of several waiting regions recompute from its own arguments, in any order of the
    backward passes, even if the caller keeps none of the arguments?"""
    order = data.draw(st.permutations(range(count)))

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        weight, *inputs = given_leaves

        def function(t: torch.Tensor, factor: float) -> torch.Tensor:
            return (t * weight).sin() * t.exp() * factor

        results = [wrap(function, t * 1, n + 0.5) for n, t in enumerate(inputs)]
        for n in order:
            results[n].sum().backward()
        return [result.detach() for result in results]

    def make() -> list[torch.Tensor]:
        return leaves(1) + [leaves(2 if same_shape else n + 1)[0] for n in range(count)]

    compare(ckpt, program, make)


# ------------------------------------------------------------------ when it is recomputed


@clause("nonreentrant/recomputed-once")
@given(steps=names, first=keeping, outputs=st.integers(1, 3), regions=st.integers(1, 3))
def test_one_recomputation_per_pass(
    ckpt: Candidate, steps: list[str], first: str, outputs: int, regions: int
) -> None:
    """Is each region run once in forward and once more in one backward pass, for any number of
    saved tensors and of outputs that are roots?"""

    def body(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = chain([first, *steps])(t)
        return tuple((h * (n + 1)).sin() for n in range(outputs))

    recorders = [Recorder(body) for _ in range(regions)]
    (x,) = leaves(2, 3)
    roots: list[torch.Tensor] = []
    h = x
    for recorder in recorders:
        results = region(ckpt)(recorder, h)
        roots.extend(results)
        h = results[0]
    before = [recorder.count for recorder in recorders]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    reached()
    assert before == [1] * regions, f"expected one run each before backward, observed {before}"
    after = [recorder.count for recorder in recorders]
    assert after == [2] * regions, f"expected two runs each after backward, observed {after}"


@clause("nonreentrant/recomputed-if-reached")
@pytest.mark.parametrize("way", ["output-unused", "wanted-behind", "inputs", "before"])
def test_only_what_is_needed_is_recomputed(ckpt: Candidate, way: str) -> None:
    """Is a region left alone by a pass that needs nothing from it?"""
    x, z = leaves(3, count=2)
    needed, other = Recorder(lambda t: t.sin().exp()), Recorder(lambda t: t.exp().sin())
    if way == "output-unused":
        _, h = region(ckpt)(other, x), region(ckpt)(needed, x)
        h.sum().backward()
    elif way == "wanted-behind":
        h = region(ckpt)(other, x)
        torch.autograd.grad(region(ckpt)(needed, h).sum(), h)
    elif way == "inputs":
        a, b = region(ckpt)(other, x), region(ckpt)(needed, z)
        (a + b).sum().backward(inputs=[z])
    else:
        h = region(ckpt)(needed, x)
        region(ckpt)(other, h)
        h.sum().backward()
    assert needed.count == 2, f"the region that is needed: expected 2 runs, got {needed.count}"
    reached()
    assert other.count == 1, f"the region that is not needed: expected 1 run, got {other.count}"


@clause("nonreentrant/nothing-missing")
@pytest.mark.parametrize("step", ["add", "reshape"])
@pytest.mark.parametrize("retain", [False, True])
def test_region_that_saves_nothing_is_not_run_again(
    ckpt: Candidate, step: str, retain: bool
) -> None:
    """Is the function left alone where autograd kept nothing of it?"""
    (x,) = leaves(2, 3)
    saving, nothing = Recorder(chain(["sin"])), Recorder(chain([step, step]))
    y = region(ckpt)(nothing, region(ckpt)(saving, x)).sum()
    y.backward(retain_graph=retain)
    assert_same(x.grad, x.detach().cos(), "gradient")
    assert saving.count == 2, f"the region that saves: expected 2 runs, observed {saving.count}"
    reached()
    assert nothing.count == 1, f"expected no recomputation, observed {nothing.count - 1}"


@clause("nonreentrant/saved-attributes")
@given(
    steps=st.lists(st.sampled_from(["sin", "exp", "tanh", "softmax", "cumsum"]), min_size=1,
                   max_size=3),
    looks=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    between=st.booleans(),
)  # fmt: skip
def test_saved_tensors_can_be_read(
    ckpt: Candidate, steps: list[str], looks: list[int], between: bool
) -> None:
    """Does every look at a node's saved tensors give the plain value, any number of times, and
    backward the plain gradient afterwards?"""

    def nodes(output: torch.Tensor) -> Iterator[Any]:
        node: Any = output.grad_fn
        while node is not None and not hasattr(node, "variable"):
            yield node
            node = node.next_functions[0][0]

    def look(output: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        found = []
        for node in nodes(output):
            for attribute in ("_saved_self", "_saved_result"):
                value = getattr(node, attribute, None)
                if isinstance(value, torch.Tensor):
                    found.append((f"{node.name()}.{attribute}", value.detach().clone()))
        return found

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (x,) = given_leaves
        y = wrap(chain([*steps, "sin"]), x)
        seen = [look(y) for _ in looks]
        gradients: list[torch.Tensor] = []
        if between:
            gradients.extend(torch.autograd.grad(y.sum(), x, retain_graph=True))
            seen.append(look(y))
        y.sum().backward()
        return seen, gradients

    def make() -> list[torch.Tensor]:
        return leaves(2, 3)

    assert program(plain, make())[0][0], "the plain run has saved tensors to look at"
    compare(ckpt, program, make)


# ------------------------------------------------------------------ which gradients there are


@clause("nonreentrant/gradients-as-plain")
@given(
    parts=st.lists(st.tuples(keeping, names), min_size=1, max_size=3),
    shape=shapes,
    double=st.booleans(),
    early_stop=st.booleans(),
)
def test_chains_of_regions(
    ckpt: Candidate,
    parts: list[tuple[str, list[str]]],
    shape: tuple[int, ...],
    double: bool,
    early_stop: bool,
) -> None:
    """Do chains of regions of any steps give the plain results and gradients?"""
    dtype = torch.float64 if double else torch.float32

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        for first, steps in parts:
            x = wrap(lambda t, u, names=(first, *steps): chain(names)(t) * u, x, w)
        x.pow(2).sum().backward()
        return x.detach()

    compare(ckpt, program, lambda: leaves(*shape, count=2, dtype=dtype), early_stop=early_stop)


@clause("nonreentrant/gradients-as-plain")
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64],
    ids=str,
)  # fmt: skip
@given(shape=shapes)
def test_dtypes(ckpt: Candidate, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Are gradients of every floating-point and complex dtype those of the plain run?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        y = wrap(lambda t, u: ((t * u).sin() * t, u.exp().to(dtype)), *given_leaves)
        (y[0].abs().sum() + y[1].abs().sum()).backward()
        return [item.detach() for item in y]

    compare(ckpt, program, lambda: leaves(*shape, count=2, dtype=dtype))


@clause("nonreentrant/gradients-as-plain")
@given(relation=st.sampled_from(["same", "view", "flat-view", "detached-alias", "slice"]))
def test_arguments_that_share_memory(ckpt: Candidate, relation: str) -> None:
    """Are gradients right where two arguments are one tensor or share memory?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (x,) = given_leaves
        base = x * 1
        other = {
            "same": base,
            "view": base.view(2, 2),
            "flat-view": base.view(-1),
            "detached-alias": base.detach(),
            "slice": base[:, 1:],
        }[relation]
        y = wrap(lambda a, b: a.sin() + (b * b).exp().sum(), base, other)
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(2, 2))


@clause("nonreentrant/gradients-as-plain")
@given(outputs=st.integers(1, 4), used=st.lists(st.booleans(), min_size=4, max_size=4))
def test_some_of_several_outputs(ckpt: Candidate, outputs: int, used: list[bool]) -> None:
    """Are gradients right where only some outputs of a region take part in the loss?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = (t * w).sin()
            return tuple((h * (n + 1)).exp() for n in range(outputs))

        results = wrap(function, x)
        chosen = [y for y, use in zip(results, used, strict=False) if use] or [results[-1]]
        torch.stack(chosen).sum().backward()
        return [y.detach() for y in results]

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("nonreentrant/no-grad-requiring-input")
@given(
    kind=st.sampled_from(["frozen", "frozen-keyword", "integers", "number", "nothing"]),
    depth=st.integers(1, 3),
)
def test_parameters_train_without_differentiable_input(
    ckpt: Candidate, kind: str, depth: int
) -> None:
    """Do parameters get the plain gradients where no input requires grad, or there is none?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(*args: Any, scale: Any = 2) -> torch.Tensor:
            h: torch.Tensor = given_leaves[0] * scale
            for argument in args:
                h = h * argument
            for leaf in given_leaves[1:]:
                h = (h * leaf).sin()
            return h.exp()

        frozen = torch.linspace(0, 1, 3)
        if kind == "frozen-keyword":
            y = wrap(function, scale=frozen)
        else:
            arguments = {
                "frozen": (frozen,),
                "integers": (torch.arange(3), torch.tensor([True, False, True])),
                "number": (3, 0.5),
                "nothing": (),
            }
            y = wrap(function, *arguments[kind])
        assert y.requires_grad, "the result does not require grad, although parameters do"
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(3, count=depth))


@clause("nonreentrant/silent-without-grad-input")
@pytest.mark.parametrize("grad_mode", [True, False])
def test_no_warning_for_frozen_inputs(ckpt: Candidate, grad_mode: bool) -> None:
    """Is a region of frozen inputs silent, in forward and backward?"""
    layer = torch.nn.Linear(3, 2)
    with caught_warnings() as seen:
        with torch.set_grad_enabled(grad_mode):
            y = region(ckpt)(layer, torch.ones(4, 3))
        if grad_mode:
            y.sum().backward()
    assert not grad_mode or layer.weight.grad is not None
    reached()
    assert not seen, f"expected no warning, observed {[str(item.message)[:80] for item in seen]}"


class _Holder:
    """An object whose method is the region."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def method(self, t: torch.Tensor) -> torch.Tensor:
        return (t * self.weight).sin() * self.weight

    __call__ = method


def _reaching(way: str, w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of ``t`` that ``w`` reaches otherwise than as an argument of the call."""

    def closure(t: torch.Tensor) -> torch.Tensor:
        return (t * w).sin() * w

    def default(t: torch.Tensor, u: torch.Tensor = w) -> torch.Tensor:
        return (t * u).sin() * u

    def from_store(t: torch.Tensor, store: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return (t * store["k"][0]).sin() * store["k"][0]

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "closure": closure,
        "default": default,
        "partial": functools.partial(default, u=w),
        "store": functools.partial(from_store, store={"k": [w]}),
        "method": _Holder(w).method,
        "callable": _Holder(w),
    }
    return ways[way]


ways_in = st.sampled_from(["closure", "default", "partial", "store", "method", "callable"])


@clause("nonreentrant/closure-leaf")
@given(way=ways_in, regions=st.integers(1, 3), frozen=st.booleans())
def test_leaf_in_a_closure(ckpt: Candidate, way: str, regions: int, frozen: bool) -> None:
    """Does a leaf that is no argument get the plain gradient, once?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        h = x.detach() if frozen else x
        for _ in range(regions):
            h = wrap(_reaching(way, w), h)
        h.sum().backward()
        return h.detach()

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("nonreentrant/closure-non-leaf")
@given(way=ways_in, regions=st.integers(1, 3), outside=st.booleans(), frozen=st.booleans())
def test_tensor_with_history_in_a_closure(
    ckpt: Candidate, way: str, regions: int, outside: bool, frozen: bool
) -> None:
    """Does the gradient flow once into what produced a tensor that is no argument?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, p = given_leaves
        arrived: list[torch.Tensor] = []
        w = p.sin().exp()
        w.register_hook(lambda gradient: arrived.append(gradient.clone()))
        h = x.detach() if frozen else x
        for _ in range(regions):
            h = wrap(_reaching(way, w), h)
        if outside:
            h = h * w.cos()
        h.sum().backward()
        return h.detach(), arrived

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("nonreentrant/shared-parameters")
@given(uses=st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=2, max_size=4))
def test_parameter_used_in_several_places(ckpt: Candidate, uses: list[list[bool]]) -> None:
    """Is a parameter's gradient the plain sum over regions, repeated uses and uses outside?

    Each inner list is one stretch of the model: more than one item is a region that uses the
    parameter so often, a single False a use outside of any region.
    """

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w, b = given_leaves

        def function(t: torch.Tensor, often: int) -> torch.Tensor:
            for _ in range(often):
                t = (t * w + b).sin()
            return t

        h = x
        for use in uses:
            outside = use == [False]
            h = (plain if outside else wrap)(function, h, len(use))
        h.sum().backward()
        return h.detach()

    compare(ckpt, program, lambda: leaves(3, count=3))


@clause("nonreentrant/training-steps")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@given(in_region=st.lists(st.booleans(), min_size=4, max_size=4))
def test_training_leaves_the_same_parameters(
    ckpt: Candidate, optimizer: str, in_region: list[bool]
) -> None:
    """Are the parameters of a trained model, after each of three steps, those of the plain one?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (seed,) = given_leaves
        model = torch.nn.ModuleList(
            [
                torch.nn.Linear(3, 4),
                torch.nn.LayerNorm(4),
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()),
                torch.nn.Linear(4, 1),
            ]
        )
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        method = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **options)
        history = []
        for step in range(3):
            h = seed.detach() + step
            for layer, checkpointed in zip(model, in_region, strict=True):
                h = (wrap if checkpointed else plain)(layer, h)
            method.zero_grad()
            h.pow(2).mean().backward()
            method.step()
            history.append([parameter.detach().clone() for parameter in model.parameters()])
        return history

    compare(ckpt, program, lambda: leaves(2, 3))


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(1.5),
    "add_": lambda t: t.add_(0.5),
    "neg_": lambda t: t.neg_(),
    "sin_": lambda t: t.sin_(),
    "cos_": lambda t: t.cos_(),
    "assign": lambda t: t.__setitem__(0, 0.25),
    "assign-row": lambda t: t.__setitem__((slice(None), 0), 0.5),
    "through-view": lambda t: t.view(-1)[1:].mul_(2),
    "through-transpose": lambda t: t.t().add_(torch.arange(2.0)),
    "zero-part": lambda t: t[1:].zero_(),
    "add-itself": lambda t: t.add_(t),
}
"""In-place changes that invalidate nothing which an earlier one of them keeps."""


@clause("nonreentrant/in-place-intermediates")
@given(changes=st.lists(st.sampled_from(sorted(IN_PLACE)), min_size=1, max_size=5))
def test_intermediates_changed_in_place(ckpt: Candidate, changes: list[str]) -> None:
    """Are gradients right where the function changes its own tensors in place?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(t: torch.Tensor) -> torch.Tensor:
            h = t * 2
            for change in changes:
                IN_PLACE[change](h)
            return h.exp() * h.clone().mul_(3).sin()

        y = wrap(function, *given_leaves)
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(2, 2))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "view": lambda t: t.view(-1),
    "slice": lambda t: t[:, 1:],
    "transpose": lambda t: t.t(),
    "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "diagonal": lambda t: t.diagonal(),
    "detach": lambda t: t.detach(),
}


@clause("nonreentrant/views")
@given(kinds=st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3))
def test_views_of_an_input_share_its_memory(ckpt: Candidate, kinds: list[str]) -> None:
    """Do outputs that are views of an input share its memory, beside one that is recomputed, and
    pass their gradients on?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x = given_leaves[0] * 1

        def function(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (t.sin().exp(), *(VIEWS[kind](t) for kind in kinds))

        computed, *views = wrap(function, x)
        shared = [y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in views]
        (computed.sum() + sum(y.sin().sum() for y in views)).backward()
        return shared, [y.detach() for y in views], [y.stride() for y in views]

    compare(ckpt, program, lambda: leaves(2, 2))


@clause("nonreentrant/views")
@given(kinds=st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3))
def test_outputs_that_share_memory_with_each_other(ckpt: Candidate, kinds: list[str]) -> None:
    """Do outputs that are views of one intermediate share memory and get the plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(t: torch.Tensor) -> list[torch.Tensor]:
            h = t.exp()
            return [h, *(VIEWS[kind](h) for kind in kinds)]

        base, *views = wrap(function, *given_leaves)
        shared = [
            y.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for y in views
        ]
        (base.sum() + sum(y.sin().sum() for y in views)).backward()
        return shared, [y.detach() for y in views]

    compare(ckpt, program, lambda: leaves(2, 2))


@clause("nonreentrant/output-in-place")
@given(
    changes=st.lists(st.sampled_from(sorted(IN_PLACE)), min_size=1, max_size=3),
    last=st.sampled_from(["sin", "mul", "view"]),
)
def test_output_changed_after_the_call(ckpt: Candidate, changes: list[str], last: str) -> None:
    """May the caller change the output in place where the plain run lets it?"""
    ends: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sin": torch.sin,
        "mul": lambda t: t * 3,
        "view": lambda t: t.cos().view(2, 2),
    }

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        y = wrap(lambda t: ends[last](t.exp()), *given_leaves)
        for change in changes:
            IN_PLACE[change](y)
        y.sin().sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(2, 2))


class _Custom(torch.autograd.Function):
    """Saves what is asked for and logs its backward runs in ``log``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, kept: tuple[str, ...], log: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x * w
        y = inner.exp()
        mask = y > 1
        ctx.mark_non_differentiable(mask)
        values = {"x": x, "w": w, "inner": inner, "none": None, "y": y, "mask": mask}
        ctx.kept, ctx.log = kept, log
        ctx.save_for_backward(*(values[name] for name in kept), x, w, y)
        return y, mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        *extra, x, w, y = ctx.saved_tensors
        ctx.log.append(
            [(name, value) for name, value in zip(ctx.kept, extra, strict=True)],
        )
        return gradient * y * w, gradient * y * x, None, None


@clause("nonreentrant/custom-function")
@given(
    kept=st.lists(st.sampled_from(["x", "w", "inner", "none", "y", "mask"]), max_size=5),
    applications=st.integers(1, 2),
    passes=st.integers(1, 2),
)
def test_custom_function_in_a_region(
    ckpt: Candidate, kept: list[str], applications: int, passes: int
) -> None:
    """Does a custom function read back what it saved, in order, and run its backward once in each
    pass?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        log: list[Any] = []
        masks: list[bool] = []

        def function(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            for _ in range(applications):
                t, mask = _Custom.apply(t.sin(), u, tuple(kept), log)
                masks.append(mask.requires_grad)
            return t.cos()

        y = wrap(function, *given_leaves)
        for number in range(passes):
            y.sum().backward(retain_graph=number + 1 < passes)
        saved = [[(name, v if v is None else v.detach()) for name, v in run] for run in log]
        return y.detach(), saved, masks[:applications]

    compare(ckpt, program, lambda: leaves(3, count=2))


class _Function:
    """A region that holds nothing but remembers, weakly, every storage that it makes."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []
        self.fail_at = 0
        self.runs = 0

    def watch(self, t: torch.Tensor) -> torch.Tensor:
        self.storages.append(StorageWeakRef(t.untyped_storage()))
        return t

    def body(self, t: torch.Tensor, box: Any) -> torch.Tensor:
        self.runs += 1
        a = self.watch(t.sin())
        b = self.watch(a.exp())
        if self.runs == self.fail_at:
            raise KeyError("on purpose")
        return self.watch(b.cos())

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


class _Box:
    """An argument that is no tensor and can be referred to weakly."""


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Within, the garbage collector looks only at objects made within, and runs only if told."""
    gc.collect(0)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _use_and_forget(ckpt: Candidate, watcher: _Function, scenario: str) -> list[Any]:
    """Use a region as ``scenario`` says, drop everything, and return weak references to the
    function and to the argument."""
    box = _Box()

    def function(t: torch.Tensor, held: _Box) -> torch.Tensor:
        return watcher.body(t, held)

    watched = [weakref.ref(function), weakref.ref(box)]
    x = watcher.watch(torch.ones(3) * 2).requires_grad_()
    y = region(ckpt, early_stop=scenario != "no-early-stop")(function, x, box)
    if scenario == "recomputation-fails":
        watcher.fail_at = watcher.runs + 1
        with contextlib.suppress(KeyError):
            y.sum().backward()
    elif scenario == "looks":
        assert y.grad_fn._saved_self is not None
    elif scenario == "retained":
        y.sum().backward(retain_graph=True)
    elif scenario == "create-graph":
        torch.autograd.grad(y.sum(), x, create_graph=True)
    elif scenario == "double-backward":
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.sum().backward()
    elif scenario != "forward-only":
        y.sum().backward()
    return watched


SCENARIOS = [
    "forward-only", "backward", "no-early-stop", "retained", "create-graph", "double-backward",
    "looks", "recomputation-fails",
]  # fmt: skip


@clause("nonreentrant/released")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_everything_is_collectable(ckpt: Candidate, scenario: str) -> None:
    """Are function, arguments and tensors gone once the results are?"""
    watcher = _Function()
    with _only_new_objects():
        watched = _use_and_forget(ckpt, watcher, scenario)
        gc.collect()
        left = [reference() is not None for reference in watched]
        tensors = watcher.alive()
    reached()
    assert not left[0], f"the function is still alive after {scenario}"
    assert not left[1], f"the argument is still alive after {scenario}"
    assert tensors == 0, f"{tensors} tensors are still alive after {scenario}"


@clause("nonreentrant/released")
@given(early_stop=st.booleans(), passes=st.integers(1, 3), retain=st.booleans())
def test_recomputed_tensors_are_gone_after_backward(
    ckpt: Candidate, early_stop: bool, passes: int, retain: bool
) -> None:
    """Is no recomputed tensor alive after backward while the results, and perhaps the graph,
    still are?"""
    watcher = _Function()
    with _only_new_objects():
        (x,) = leaves(3)
        y = region(ckpt, early_stop=early_stop)(watcher.body, x, None)
        forward = len(watcher.storages)
        for number in range(passes):
            y.sum().backward(retain_graph=retain or number + 1 < passes)
        gc.collect()
        left = sum(not storage.expired() for storage in watcher.storages[forward:])
    reached()
    assert left == 0, f"after backward {left} recomputed tensors are alive, expected none"
    assert y.requires_grad


@clause("nonreentrant/no-reference-cycle")
@pytest.mark.parametrize("scenario", ["forward-only", "backward", "no-early-stop"])
def test_everything_is_freed_at_once(ckpt: Candidate, scenario: str) -> None:
    """Are function, arguments and tensors gone without a run of the garbage collector?"""
    with _only_new_objects():
        _use_and_forget(ckpt, _Function(), scenario)  # what first use sets up is not counted
        watcher = _Function()
        watched = _use_and_forget(ckpt, watcher, scenario)
        left = [reference() is not None for reference in watched], watcher.alive()
    reached()
    assert left == ([False, False], 0), (
        f"alive without garbage collection: (function, argument), tensors = {left}"
    )


# ------------------------------------------------------------------ ways of running backward


@clause("backward/tensor-backward")
@given(shape=shapes, steps=names, scalar=st.booleans(), filled=st.booleans())
def test_tensor_backward(
    ckpt: Candidate, shape: tuple[int, ...], steps: list[str], scalar: bool, filled: bool
) -> None:
    """Does Tensor.backward leave the plain gradients, with and without an explicit gradient, on
    top of what .grad held?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        if filled:
            x.grad, w.grad = torch.full(shape, 0.5), torch.full(shape, 2.0)
        y = wrap(lambda t: chain(["sin", *steps])(t * w), x)
        if scalar:
            y.sum().backward()
        else:
            y.backward(gradient=torch.linspace(-1, 1, y.numel()).view(shape))
        return y.detach()

    compare(ckpt, program, lambda: leaves(*shape, count=2))


@clause("backward/several-roots")
@given(data=st.data(), regions=st.integers(1, 3), outputs=st.integers(1, 3))
def test_several_roots(ckpt: Candidate, data: st.DataObject, regions: int, outputs: int) -> None:
    """Does one pass from several tensors of several regions give the plain gradients?"""
    total = regions * outputs + 1
    chosen = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=total)))
    explicit = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor) -> list[torch.Tensor]:
            h = (t * w).sin()
            return [(h * (n + 1)).exp() for n in range(outputs)]

        made: list[torch.Tensor] = []
        h = x
        for _ in range(regions):
            results = wrap(function, h)
            made.extend(results)
            h = results[-1]
        made.append(x * w)
        roots: list[torch.Tensor] = []
        weights: list[torch.Tensor | None] = []
        for n in chosen:
            if explicit[n]:
                roots.append(made[n])
                weights.append(torch.linspace(0.5, 1.5, 3) * (n + 1))
            else:
                roots.append(made[n].sum())
                weights.append(None)
        torch.autograd.backward(roots, weights)
        return [y.detach() for y in made]

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/inputs")
@given(
    wanted=st.sets(st.sampled_from(["x", "z", "w", "h"]), min_size=1),
    regions=st.integers(1, 2),
    method=st.booleans(),
)
def test_only_the_named_inputs_get_gradients(
    ckpt: Candidate, wanted: set[str], regions: int, method: bool
) -> None:
    """Do exactly the tensors named by ``inputs`` get the plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, z, w = given_leaves
        h = x * 2
        tensors = {"x": x, "z": z, "w": w, "h": h}
        y = h
        for _ in range(regions):
            y = wrap(lambda t, u: (t * w).sin() * u.exp(), y, z)
        inputs = [tensors[name] for name in sorted(wanted)]
        h.retain_grad()
        if method:
            y.sum().backward(inputs=inputs)
        else:
            torch.autograd.backward(y.sum(), inputs=inputs)
        return h.grad

    compare(ckpt, program, lambda: leaves(3, count=3))


@clause("backward/grad")
@given(
    data=st.data(),
    outputs=st.integers(1, 3),
    explicit=st.booleans(),
    materialize=st.booleans(),
    edges=st.booleans(),
)
def test_autograd_grad(
    ckpt: Candidate,
    data: st.DataObject,
    outputs: int,
    explicit: bool,
    materialize: bool,
    edges: bool,
) -> None:
    """Does autograd.grad return the plain gradients for any outputs and inputs, and leave every
    .grad alone?"""
    wanted = data.draw(st.lists(st.sampled_from("xwzh"), min_size=1, max_size=4, unique=True))

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w, z = given_leaves  # z takes no part
        h = x * 2
        tensors = {"x": x, "w": w, "z": z, "h": h}
        results = wrap(lambda t: [(t * w).sin() * (n + 1) for n in range(outputs)], h)
        inputs: list[Any] = [tensors[name] for name in wanted]
        options: dict[str, Any] = {"allow_unused": True}
        if edges:
            inputs = [get_gradient_edge(tensor) for tensor in inputs]
        elif materialize:
            options["materialize_grads"] = True
        if explicit:
            weights = [torch.linspace(1, 2, 3) * (n + 1) for n in range(outputs)]
            return torch.autograd.grad(results, inputs, weights, **options)
        return torch.autograd.grad([y.sum() for y in results], inputs, **options)

    compare(ckpt, program, lambda: leaves(3, count=3))


@clause("backward/inner-tensor")
@given(
    steps=st.lists(keeping, min_size=1, max_size=3),
    way=st.sampled_from(["returned", "stored"]),
    use=st.sampled_from(["grad-with-respect-to", "root", "leaf"]),
)
def test_tensor_made_inside(ckpt: Candidate, steps: list[str], way: str, use: str) -> None:
    """Can a tensor made in the region be differentiated with respect to, or be a root?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        stored: list[torch.Tensor] = []

        def function(t: torch.Tensor) -> Any:
            middle = chain(steps)(t)
            stored.append(middle)
            result = (middle * w).sin()
            return (result, middle) if way == "returned" else result

        result = wrap(function, x)
        y, middle = result if way == "returned" else (result, stored[0])
        if use == "root":
            torch.autograd.backward([middle.sum(), y.sum()])
            return None
        if use == "leaf":
            return torch.autograd.grad(y.sum(), [middle, x, w])
        first = torch.autograd.grad(y.sum(), middle, retain_graph=True)
        return first, torch.autograd.grad(middle.sum(), x)

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/retain-graph")
@given(
    passes=st.lists(st.sampled_from(["backward", "grad", "inputs"]), min_size=2, max_size=4),
    steps=names,
    regions=st.integers(1, 2),
    keep_last=st.booleans(),
)
def test_repeated_passes(
    ckpt: Candidate, passes: list[str], steps: list[str], regions: int, keep_last: bool
) -> None:
    """Does every pass over a retained graph give the plain gradients, with one recomputation?"""
    recorders: list[Recorder] = []

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        recorders.clear()
        y = x
        for _ in range(regions):
            recorder = Recorder(lambda t: chain(["sin", *steps])(t * w).exp())
            recorders.append(recorder)
            y = wrap(recorder, y)
        total = y.sum()
        found = []
        for number, way in enumerate(passes):
            retain = keep_last or number + 1 < len(passes)
            if way == "grad":
                found.append(torch.autograd.grad(total, [x, w], retain_graph=retain))
            elif way == "inputs":
                total.backward(inputs=[w], retain_graph=retain)
            else:
                total.backward(retain_graph=retain)
        return found

    compare(ckpt, program, lambda: leaves(3, count=2))
    for recorder in recorders:
        assert recorder.count == 1 + len(passes), (
            f"{len(passes)} passes: expected as many recomputations, observed {recorder.count - 1}"
        )


@clause("backward/freed-graph")
@given(
    first=st.sampled_from(["backward", "grad"]),
    second=st.sampled_from(["backward", "grad", "inputs"]),
    retained=st.integers(0, 2),
)
def test_second_pass_over_a_freed_graph(
    ckpt: Candidate, first: str, second: str, retained: int
) -> None:
    """Is a pass over a graph that was not retained refused, with every .grad as it was?"""

    def run(way: str, total: torch.Tensor, x: torch.Tensor, retain: bool) -> None:
        if way == "backward":
            total.backward(retain_graph=retain)
        elif way == "inputs":
            total.backward(inputs=[x], retain_graph=retain)
        else:
            torch.autograd.grad(total, x, retain_graph=retain)

    (x,) = leaves(3)
    total = region(ckpt)(lambda t: t.sin().exp(), x).sum()
    for _ in range(retained):
        run(first, total, x, True)
    run(first, total, x, False)
    before = None if x.grad is None else x.grad.clone()
    reached()
    with pytest.raises(RuntimeError):
        run(second, total, x, False)
    assert_same(x.grad, before, ".grad after the refused pass")


@clause("backward/sequential-parts")
@given(data=st.data(), outputs=st.integers(2, 4), trunk=st.booleans(), use_grad=st.booleans())
def test_outputs_one_after_another(
    ckpt: Candidate, data: st.DataObject, outputs: int, trunk: bool, use_grad: bool
) -> None:
    """Can outputs be differentiated in separate passes in any order, where they share nothing or
    the graph is retained?"""
    order = data.draw(st.permutations(range(outputs)))

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor) -> list[torch.Tensor]:
            h = t.sin() if trunk else t
            return [((h * (n + 1)).exp() * w).sin() for n in range(outputs)]

        results = wrap(function, x)
        found = []
        for place, n in enumerate(order):
            retain = trunk and place + 1 < outputs
            total = results[n].sum()
            if use_grad:
                found.append(torch.autograd.grad(total, [x, w], retain_graph=retain))
            else:
                total.backward(retain_graph=retain)
        return found

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/sequential-parts")
@given(lower_first_kept=st.booleans(), steps=st.lists(keeping, min_size=1, max_size=2))
def test_upper_part_then_lower_part(
    ckpt: Candidate, lower_first_kept: bool, steps: list[str]
) -> None:
    """Can a pass stop at a tensor made inside and a later one go on from there?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            middle = chain(steps)(t)
            return middle, (middle * w).sin()

        middle, y = wrap(function, x)
        upper = torch.autograd.grad(y.sum(), [middle, w], retain_graph=lower_first_kept)
        lower = torch.autograd.grad(middle, x, upper[0])
        return upper, lower

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/create-graph")
@given(
    order=st.integers(2, 3),
    regions=st.integers(1, 2),
    steps=st.lists(st.sampled_from(["sin", "exp", "square", "tanh", "in-place"]), max_size=2),
    early_stop=st.booleans(),
)
def test_higher_derivatives(
    ckpt: Candidate, order: int, regions: int, steps: list[str], early_stop: bool
) -> None:
    """Are second and third derivatives those of the plain run, for inputs, closures and
    parameters?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w, p = given_leaves
        closed = p.sin()
        y = x
        for _ in range(regions):
            y = wrap(lambda t, u: chain(["sin", *steps])(t * u) * closed.exp(), y, w)
        total = y.sum()
        found = []
        for _ in range(order - 1):
            gradients = torch.autograd.grad(total, [x, w, p], create_graph=True)
            found.append([gradient.detach() for gradient in gradients])
            total = sum((gradient.pow(2).sum() for gradient in gradients), torch.zeros(()))
        total.backward()
        return found

    compare(ckpt, program, lambda: leaves(2, count=3), early_stop=early_stop)


@clause("backward/create-graph")
@given(steps=st.lists(keeping, min_size=1, max_size=2))
def test_gradient_penalty(ckpt: Candidate, steps: list[str]) -> None:
    """Does a loss that contains its own gradient train as in the plain run?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        y = wrap(lambda t: chain(steps)(t * w), x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + gradient.pow(2).sum()).backward()
        return gradient.detach()

    compare(ckpt, program, lambda: leaves(3, count=2))


CHECKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda a, b: (a * b).sin().exp() * a,
    "matmul": lambda a, b: (a @ b).tanh(),
    "custom": lambda a, b: torch.nn.functional.softmax(a * b, -1) * b,
}


@clause("backward/gradcheck")
@pytest.mark.parametrize("name", sorted(CHECKED))
@pytest.mark.parametrize("second", [False, True], ids=["gradcheck", "gradgradcheck"])
def test_numerical_checks(ckpt: Candidate, name: str, second: bool) -> None:
    """Do the numerical checks accept a region?"""
    function = CHECKED[name]
    inputs = leaves(2, 2, count=2, dtype=torch.float64)
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    assert check(function, inputs, fast_mode=True), "the plain function passes its own check"
    reached()
    assert check(lambda a, b: region(ckpt)(function, a, b), inputs, fast_mode=True)


HELPERS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
    "jacobian-vectorized": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "jacobian-of-two": lambda f, x: torch.autograd.functional.jacobian(
        lambda a, b: f(a * b), (x, x + 1)
    ),
    "hessian": lambda f, x: torch.autograd.functional.hessian(lambda a: f(a).sum(), x),
    "hessian-vectorized": lambda f, x: torch.autograd.functional.hessian(
        lambda a: f(a).sum(), x, vectorize=True
    ),
    "vjp": lambda f, x: torch.autograd.functional.vjp(f, x, torch.ones_like(x)),
    "jvp": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: torch.autograd.functional.vhp(lambda a: f(a).sum(), x, torch.ones_like(x)),
    "hvp": lambda f, x: torch.autograd.functional.hvp(lambda a: f(a).sum(), x, torch.ones_like(x)),
}


@clause("backward/functional")
@pytest.mark.parametrize("helper", sorted(HELPERS))
def test_functional_helpers(ckpt: Candidate, helper: str) -> None:
    """Do the helpers of torch.autograd.functional give the plain results?"""
    x = torch.linspace(-1, 1, 3)
    recorder = Recorder(lambda t: t.sin().exp() * t)
    expected = HELPERS[helper](recorder.function, x)
    observed = HELPERS[helper](lambda t: region(ckpt)(recorder, t), x)
    reached()
    assert_same(observed, expected, helper)


@clause("backward/batched-gradients")
@given(
    batch=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["sin", "exp", "square", "tanh", "softmax"]), max_size=3),
    regions=st.integers(1, 2),
    create_graph=st.booleans(),
)
def test_batched_gradients(
    ckpt: Candidate, batch: int, steps: list[str], regions: int, create_graph: bool
) -> None:
    """Does a batched call of autograd.grad give the plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        y = x
        for _ in range(regions):
            y = wrap(lambda t: chain(["sin", *steps])(t * w), y)
        weights = torch.linspace(-1, 1, batch * 3).view(batch, 3)
        found = torch.autograd.grad(
            y, [x, w], weights, is_grads_batched=True, create_graph=create_graph
        )
        return [gradient.detach() for gradient in found]

    compare(ckpt, program, lambda: leaves(3, count=2))


AROUND: dict[str, Callable[[], Any]] = {
    "no-grad": torch.no_grad,
    "set-grad-enabled": lambda: torch.set_grad_enabled(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "enable-grad": torch.enable_grad,
}


@clause("backward/grad-mode-around")
@given(around=st.lists(st.sampled_from(sorted(AROUND)), min_size=1, max_size=3), steps=names)
def test_modes_around_backward(ckpt: Candidate, around: list[str], steps: list[str]) -> None:
    """Are gradients the plain ones in whatever grad mode backward is called?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        total = wrap(lambda t: chain(["sin", *steps])(t * w), x).sum()
        with contextlib.ExitStack() as stack:
            for name in around:
                stack.enter_context(AROUND[name]())
            total.backward()

    with caught_warnings():  # anomaly mode announces itself
        compare(ckpt, program, lambda: leaves(3, count=2))


def _in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run each job in a thread of its own, all at once; results in order, or the first error."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        try:
            start.wait(timeout=10)
            results[number] = jobs[number]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    if errors:
        raise errors[0]
    return results


@clause("backward/other-thread")
@given(count=st.integers(1, 4), regions=st.integers(1, 2), whole=st.booleans())
def test_backward_in_threads(ckpt: Candidate, count: int, regions: int, whole: bool) -> None:
    """Are gradients the plain ones where backward (or the whole program) runs in other threads,
    several at a time, all with the same function?"""

    def function(t: torch.Tensor, factor: float) -> torch.Tensor:
        return (t * factor).sin().exp() * t

    def forward(wrap: Wrap, t: torch.Tensor, factor: float) -> torch.Tensor:
        for _ in range(regions):
            t = wrap(function, t, factor)
        return t.sum()

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        jobs: list[Callable[[], Any]]
        if whole:
            jobs = [
                functools.partial(lambda t, n: forward(wrap, t, n + 0.5).backward(), t, n)
                for n, t in enumerate(given_leaves)
            ]
        else:
            totals = [forward(wrap, t, n + 0.5) for n, t in enumerate(given_leaves)]
            jobs = [total.backward for total in totals]
        _in_threads(jobs)

    compare(ckpt, program, lambda: leaves(3, count=count))


@clause("backward/inside-region")
@given(
    how=st.sampled_from(["create-graph", "freed", "own-leaf", "twice", "parameter"]),
    steps=st.lists(keeping, max_size=2),
    early_stop=st.booleans(),
    after=st.booleans(),
)
def test_backward_inside_the_function(
    ckpt: Candidate, how: str, steps: list[str], early_stop: bool, after: bool
) -> None:
    """May the function differentiate what it has recorded and go on with the result?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor) -> torch.Tensor:
            energy = (chain(["sin", *steps])(t) * w).sum()
            if how == "create-graph":
                (gradient,) = torch.autograd.grad(energy, t, create_graph=True)
            elif how == "freed":
                (gradient,) = torch.autograd.grad(energy, t)
            elif how == "twice":
                (first,) = torch.autograd.grad(energy, t, create_graph=True)
                (gradient,) = torch.autograd.grad(first.pow(2).sum(), t, create_graph=True)
            elif how == "parameter":
                (gradient,) = torch.autograd.grad(energy, w, create_graph=True)
            else:
                own = t.detach().clone().requires_grad_()
                chain(["sin", *steps])(own).sum().backward()
                assert own.grad is not None
                gradient = own.grad
            return gradient * (t * w).exp() if after else gradient + t.sin() * w

        y = wrap(function, x * 1)
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(3, count=2), early_stop=early_stop)


@clause("backward/inside-backward")
@given(
    where=st.sampled_from(["custom-function", "hook"]),
    outer=st.booleans(),
    steps=st.lists(keeping, min_size=1, max_size=2),
    inner_regions=st.integers(1, 2),
)
def test_region_used_during_backward(
    ckpt: Candidate, where: str, outer: bool, steps: list[str], inner_regions: int
) -> None:
    """Do regions work that are called and differentiated while a backward pass is running?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def slope(t: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                start = y = t.detach().requires_grad_()
                for _ in range(inner_regions):
                    y = wrap(chain(steps), y)
                return torch.autograd.grad(y.sum(), start)[0]

        class Sloped(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(t)
                return t.sin()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                (t,) = ctx.saved_tensors
                return gradient * slope(t)

        def function(t: torch.Tensor) -> torch.Tensor:
            h = t.cos()
            if where == "custom-function":
                h = Sloped.apply(h)
            else:
                h.register_hook(lambda gradient: gradient * slope(gradient))
            return h.exp()

        (x,) = given_leaves
        y = (wrap if outer else plain)(function, x)
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(3))


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(())),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap-of-grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
}


@clause("backward/function-transforms")
@pytest.mark.parametrize("transform", [*sorted(TRANSFORMS), "vmap-then-backward"])
def test_transforms_are_exact_or_refused(ckpt: Candidate, transform: str) -> None:
    """Does a function transform around a region give the exact result or raise?"""

    def function(t: torch.Tensor) -> torch.Tensor:
        return (t.sin() * t.exp()).sum()

    def apply(wrap: Wrap) -> Any:
        x = torch.linspace(0.1, 1, 6).view(2, 3)
        if transform == "vmap-then-backward":
            x.requires_grad_()
            torch.func.vmap(lambda t: wrap(function, t))(x).sum().backward()
            return x.grad
        return TRANSFORMS[transform](lambda t: wrap(function, t), x)

    (x,) = leaves(3)
    region(ckpt)(function, x).backward()
    assert x.grad is not None, "without a transform the region has a gradient"
    expected = apply(plain)
    reached()
    try:
        with caught_warnings():
            observed = apply(region(ckpt))
    except Exception:  # noqa: BLE001 - refusing is allowed, whatever it is called
        return
    torch.testing.assert_close(observed, expected)


# ------------------------------------------------------------------ hooks


@clause("backward/tensor-hooks")
@given(
    places=st.sets(st.sampled_from(["leaf", "input", "inner", "output"]), min_size=1),
    effect=st.sampled_from(["look", "replace"]),
    retain=st.booleans(),
    passes=st.integers(1, 2),
)
def test_hooks_around_a_region(
    ckpt: Candidate, places: set[str], effect: str, retain: bool, passes: int
) -> None:
    """Do hooks on inputs, outputs and leaves fire once in each pass with the plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        log: list[tuple[str, torch.Tensor]] = []
        h = x * 2
        middle, y = wrap(lambda t: ((m := (t * w).sin()), m.exp()), h)
        tensors = {"leaf": w, "input": h, "inner": middle, "output": y}

        def hook(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
            log.append((name, gradient.clone()))
            return gradient * 2 if effect == "replace" else None

        handles = [
            tensors[name].register_hook(functools.partial(hook, name)) for name in sorted(places)
        ]
        kept = [h, middle, y] if retain else []
        for tensor in kept:
            tensor.retain_grad()
        for number in range(passes):
            y.sum().backward(retain_graph=number + 1 < passes)
        for handle in handles:
            handle.remove()
        return log, [tensor.grad for tensor in kept]

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/hooks-inside")
@given(
    factor=st.sampled_from([0.0, 0.5, 3.0]),
    hooks=st.integers(1, 2),
    early_stop=st.booleans(),
    node=st.booleans(),
    passes=st.integers(1, 2),
)
def test_hooks_registered_by_the_function(
    ckpt: Candidate, factor: float, hooks: int, early_stop: bool, node: bool, passes: int
) -> None:
    """Does a hook that the function registers act exactly once in each pass?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        fired: list[int] = []

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            fired.append(1)
            return gradient * factor

        def function(t: torch.Tensor) -> torch.Tensor:
            h = (t * w).sin()
            for _ in range(hooks):
                if node:
                    assert h.grad_fn is not None
                    h.grad_fn.register_hook(lambda _, outputs: (scale(outputs[0]),))
                else:
                    h.register_hook(scale)
            return h.exp() * 2

        y = wrap(function, x)
        for number in range(passes):
            y.sum().backward(retain_graph=number + 1 < passes)
        return y.detach(), len(fired)

    compare(ckpt, program, lambda: [leaves(3)[0], leaves(3)[0]], early_stop=early_stop)


@clause("backward/parameter-hooks")
@given(
    inside=st.integers(1, 3),
    outside=st.booleans(),
    kind=st.sampled_from(["post-accumulate", "node"]),
    passes=st.integers(1, 2),
)
def test_parameter_hooks_fire_once(
    ckpt: Candidate, inside: int, outside: bool, kind: str, passes: int
) -> None:
    """Is a shared parameter's gradient announced once in each pass, when it is complete?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        announced: list[torch.Tensor | None] = []

        def note(*_: Any) -> None:
            announced.append(None if w.grad is None else w.grad.clone())

        if kind == "post-accumulate":
            w.register_post_accumulate_grad_hook(note)
        else:
            node = w.view_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(note)  # type: ignore[union-attr]
        h = x
        for _ in range(inside):
            h = wrap(lambda t: (t * w).sin() * w, h)
        if outside:
            h = h * w
        for number in range(passes):
            h.sum().backward(retain_graph=number + 1 < passes)
        assert len(announced) == passes, (
            f"expected {passes} calls of the parameter's hook, observed {len(announced)}"
        )
        return announced

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("backward/module-hooks")
@given(
    whole=st.booleans(),
    on=st.lists(st.booleans(), min_size=3, max_size=3),
    pre=st.booleans(),
    replace=st.booleans(),
    frozen_input=st.booleans(),
)
def test_module_backward_hooks(
    ckpt: Candidate, whole: bool, on: list[bool], pre: bool, replace: bool, frozen_input: bool
) -> None:
    """Do full backward hooks of modules in a region fire once, in order, with the plain
    gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (x,) = given_leaves
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        log: list[Any] = []

        def note(name: str, gradients: Any) -> None:
            log.append((name, [None if g is None else g.clone() for g in gradients]))

        def after(number: int, _: Any, grad_input: Any, grad_output: Any) -> Any:
            note(f"{number} input", grad_input)
            note(f"{number} output", grad_output)
            if replace:
                return tuple(None if g is None else g * 2 for g in grad_input)
            return None

        def before(number: int, _: Any, grad_output: Any) -> None:
            note(f"{number} before", grad_output)

        for number, (layer, hooked) in enumerate(zip(model, on, strict=True)):
            if hooked:
                layer.register_full_backward_hook(functools.partial(after, number))
                if pre:
                    layer.register_full_backward_pre_hook(functools.partial(before, number))
        h = x.detach() if frozen_input else x
        if whole:
            h = wrap(model, h)
        else:
            for layer in model:
                h = wrap(layer, h)
        h.pow(2).sum().backward()
        return log, [parameter.grad for parameter in model.parameters()]

    with caught_warnings():  # torch warns about a full hook on a module without gradient inputs
        compare(ckpt, program, lambda: leaves(2, 2))
