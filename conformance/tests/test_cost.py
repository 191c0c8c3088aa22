"""Chapter 14: cost."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import Recorder, assert_same
from conformance.observe.lifetimes import DataStorages, Marks, collector_off, young_heap
from conformance.testing import both_variants, clause, reached

WIDTH = 8
UNIT = WIDTH * 8
"""Bytes of one float64 tensor of WIDTH numbers, what each operator of a counted chain makes."""

WORKING = 4
"""Tensors that backward may hold beside saved ones: the gradient that comes in, the one that goes
out, the factor of the formula, and the seed of the gradient."""

Function = Callable[..., Any]
Tree = list["Tree"]

trees: st.SearchStrategy[Tree] = st.recursive(
    st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
"""Regions inside regions: a region is the list of the regions inside it."""

STEPS: dict[str, Function] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "square": lambda x: x * x,
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (WIDTH,)),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "sum": lambda x: x.cumsum(-1),
    "matmul": lambda x: (x.reshape(1, -1) @ x.reshape(-1, 1)).reshape(()) + x,
    "relu": torch.relu,
}
steps = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)


def _input(**options: Any) -> torch.Tensor:
    return torch.linspace(0.1, 1.0, WIDTH, requires_grad=True, **options)


def _chain(length: int, marks: Marks | None = None) -> Function:
    """``length`` operators, each of which makes one tensor and saves its input."""
    keep: Function = marks or (lambda tensor: tensor)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = keep(x.sin())
        return x

    return function


def _named(names: Sequence[str], marks: Marks) -> Function:
    """The steps one after another, every result marked."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = marks(STEPS[name](x))
        return x

    return function


def _cut(count: int, segments: int) -> list[int]:
    """Lengths of ``segments`` stretches of ``count`` layers, as equal as possible."""
    return [count * (part + 1) // segments - count * part // segments for part in range(segments)]


# ---------------------------------------------------------------- between forward and backward


@clause("cost/intermediates-not-kept")
@both_variants
@given(names=steps, last=st.sampled_from(["sin", "square", "matmul"]), preserve=st.booleans())
def test_intermediates_are_gone_after_forward(
    ckpt: Candidate, use_reentrant: bool, names: list[str], last: str, preserve: bool
) -> None:
    """Are tensors made inside gone when the region has returned, where a plain run keeps some?"""
    plain = Marks()
    body = _named(names, plain)
    kept_plain = (STEPS[last](body(_input())), plain.alive())[1]
    marks = Marks()
    body = _named(names, marks)
    result = ckpt.checkpoint(
        lambda x: STEPS[last](body(x)),
        _input(),
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve,
    )
    assert len(marks) == len(names)
    reached()
    alive = marks.surviving()
    assert alive == 0, (
        f"steps {[*names, last]}: expected no intermediate alive after forward, observed {alive} "
        f"(plain run: {kept_plain})"
    )
    result.sum().backward()


@clause("cost/intermediates-not-kept")
@both_variants
@given(names=steps, results=st.integers(1, 3))
def test_result_is_not_kept(
    ckpt: Candidate, use_reentrant: bool, names: list[str], results: int
) -> None:
    """Is the result gone when the caller has dropped it, though its graph goes on?"""
    marks = Marks()
    body = _named(names, Marks())
    x = _input()
    made = ckpt.checkpoint(
        lambda x: tuple(marks(body(x).exp()) for _ in range(results)),
        x,
        use_reentrant=use_reentrant,
    )
    total = sum(result + 1 for result in made)  # addition saves no tensor
    del made
    reached()
    alive = marks.surviving()
    assert alive == 0, f"expected no dropped result alive, observed {alive} of {results}"
    total.sum().backward()
    assert x.grad is not None


@clause("cost/inputs-kept")
@both_variants
@given(count=st.integers(1, 4), used=st.integers(1, 4))
def test_dropped_inputs_stay_until_backward(
    ckpt: Candidate, use_reentrant: bool, count: int, used: int
) -> None:
    """Are the argument tensors alive until backward, though nobody else holds them?"""

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.exp().sin() for x in inputs[:used]]).sum(0)

    leaves = [_input() for _ in range(count)]
    marks = Marks()
    inputs = [marks(leaf * (index + 1)) for index, leaf in enumerate(leaves)]
    result = ckpt.checkpoint(function, *inputs, use_reentrant=use_reentrant)
    del inputs
    needed = min(count, used)
    alive = [index for index in marks.indices() if index < needed]
    assert len(alive) == needed, (
        f"{needed} argument tensors are needed: observed {len(alive)} alive after forward"
    )
    result.sum().backward()
    reached()
    plain = [_input() for _ in range(count)]
    function(*[leaf * (index + 1) for index, leaf in enumerate(plain)]).sum().backward()
    for index in range(needed):
        assert_same(leaves[index].grad, plain[index].grad, f"gradient of input {index}")


@clause("cost/nested-and-keyword-inputs-kept")
@given(form=st.sampled_from(["list", "tuple", "dict", "deep", "keyword", "keyword list"]))
def test_inputs_in_containers_stay_until_backward(ckpt: Candidate, form: str) -> None:
    """Are tensors in containers and keywords alive until backward, though nobody holds them?"""
    pack: dict[str, Function] = {
        "list": lambda x: (([x],), {}),
        "tuple": lambda x: (((x,),), {}),
        "dict": lambda x: (({"key": x},), {}),
        "deep": lambda x: (([{"key": (1, [x])}],), {}),
        "keyword": lambda x: ((), {"key": x}),
        "keyword list": lambda x: ((), {"key": [x]}),
    }

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        (tensor,) = (
            leaf
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )
        result: torch.Tensor = tensor.exp().sin()
        return result

    leaf, plain, marks = _input(), _input(), Marks()
    args, kwargs = pack[form](marks(leaf * 2))
    result = ckpt.checkpoint(function, *args, use_reentrant=False, **kwargs)
    del args, kwargs
    assert marks.alive() == 1, f"tensor in {form}: expected alive until backward, observed freed"
    result.sum().backward()
    reached()
    (plain * 2).exp().sin().sum().backward()
    assert_same(leaf.grad, plain.grad, "gradient")
    assert marks.surviving() == 0, f"tensor in {form}: expected freed after backward"


@clause("cost/forward-bytes")
@both_variants
@given(regions=st.integers(1, 5), length=st.integers(1, 6), hold=st.booleans())
def test_chain_of_regions_keeps_its_inputs(
    ckpt: Candidate, use_reentrant: bool, regions: int, length: int, hold: bool
) -> None:
    """Are exactly r tensors alive after r regions, whatever is made inside and held outside?"""
    x = _input(dtype=torch.float64)
    held = []
    with DataStorages() as live:
        value = x
        for _ in range(regions):
            value = ckpt.checkpoint(_chain(length), value, use_reentrant=use_reentrant)
            if hold:
                held.append(value)
        observed = live.bytes()
        value.sum().backward()
    assert x.grad is not None
    reached()
    assert observed == regions * UNIT, (
        f"{regions} regions of {length} operators: expected {regions * UNIT} bytes alive after "
        f"forward, observed {observed}"
    )


@clause("cost/forward-bytes")
@both_variants
@given(sharing=st.integers(1, 5), length=st.integers(1, 4))
def test_shared_inputs_and_parameters_cost_nothing(
    ckpt: Candidate, use_reentrant: bool, sharing: int, length: int
) -> None:
    """Do regions over one input, with parameters, keep nothing but their results?"""
    x = _input(dtype=torch.float64)
    weight = torch.eye(WIDTH, dtype=torch.float64).requires_grad_()
    index = torch.arange(WIDTH, dtype=torch.float64)
    with DataStorages() as live:
        results = [
            ckpt.checkpoint(
                lambda x, index: (_chain(length)(x) @ weight).cos() * index,
                x,
                index,
                use_reentrant=use_reentrant,
            )
            for _ in range(sharing)
        ]
        observed = live.bytes()
        torch.stack(results).sum().backward()
    assert weight.grad is not None
    reached()
    assert observed == sharing * UNIT, (
        f"{sharing} regions over one input: expected {sharing * UNIT} bytes alive after forward, "
        f"observed {observed}"
    )


def _tree_function(
    ckpt: Candidate, tree: Tree, options: dict[str, Any], counts: dict[str, int], path: str = ""
) -> Function:
    """A region for ``tree`` with operators around each inner region; counts runs by path."""

    def function(x: torch.Tensor) -> torch.Tensor:
        counts[path] = counts.get(path, 0) + 1
        x = x.sin()
        for index, inner in enumerate(tree):
            region = _tree_function(ckpt, inner, options, counts, f"{path}{index}")
            x = ckpt.checkpoint(region, x, **options).sin()
        return x.sin()

    return function


@clause("cost/nested-forward-bytes")
@both_variants
@given(tree=trees)
def test_nested_regions_keep_nothing_inside(
    ckpt: Candidate, use_reentrant: bool, tree: Tree
) -> None:
    """Is the outermost result all that forward of nested regions leaves?"""
    counts: dict[str, int] = {}
    options = {"use_reentrant": use_reentrant}
    x = _input(dtype=torch.float64)
    with DataStorages() as live:
        result = ckpt.checkpoint(_tree_function(ckpt, tree, options, counts), x, **options)
        observed = live.bytes()
    assert set(counts.values()) == {1}
    reached()
    assert observed == UNIT, (
        f"{len(counts)} regions nested as {tree}: expected {UNIT} bytes alive after forward, "
        f"observed {observed}"
    )
    result.sum().backward()
    assert x.grad is not None


class Box:
    """An argument that is no tensor and can be referred to weakly."""


@clause("cost/inputs-released-with-graph")
@both_variants
@given(names=steps, regions=st.integers(1, 3))
def test_dropped_graph_releases_arguments(
    ckpt: Candidate, use_reentrant: bool, names: list[str], regions: int
) -> None:
    """Are tensors and other arguments released when the results are dropped?"""
    marks = Marks()
    value = marks(_input() * 2)
    box = marks(Box())
    for _ in range(regions):
        value = ckpt.checkpoint(
            lambda x, box: _named(names, Marks())(x).exp(), value, box, use_reentrant=use_reentrant
        )
    del box
    assert marks.alive() == 2
    reached()
    del value
    alive = marks.surviving()
    assert alive == 0, f"expected both arguments released with the graph, observed {alive} alive"


@clause("cost/nothing-to-differentiate")
@given(names=steps, grad_leaf=st.booleans())
def test_region_without_gradients_keeps_nothing(
    ckpt: Candidate, names: list[str], grad_leaf: bool
) -> None:
    """Does a result that requires no grad hold nothing of its region?"""
    marks = Marks()
    x = marks(_input().detach() * 2)
    box = marks(Box())
    body = _named(names, marks)
    result = ckpt.checkpoint(lambda x, box: body(x).exp(), x, box, use_reentrant=False)
    assert not result.requires_grad
    del x, box
    reached()
    alive = marks.surviving()
    assert alive == 0, f"expected nothing alive but the result, observed {alive} of {len(marks)}"
    if grad_leaf:
        # The same region with something to differentiate does hold its input.
        leaf, kept = _input(), Marks()
        x = kept(leaf * 2)
        result = ckpt.checkpoint(lambda x: body(x).exp(), x, use_reentrant=False)
        del x
        assert kept.alive() == 1


@clause("cost/no-grad-single-run")
@both_variants
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@given(names=steps, regions=st.integers(1, 3))
def test_without_grad_mode_one_run_and_nothing_kept(
    ckpt: Candidate, use_reentrant: bool, mode: Any, names: list[str], regions: int
) -> None:
    """Does a call without grad mode run once, give the plain result and keep nothing?"""
    marks = Marks()
    weight = torch.ones(WIDTH, requires_grad=True)
    names = [name for name in names if name != "dropout"]
    body = _named(names, marks)
    region = Recorder(lambda x, box: (body(x) * weight).exp(), keep_arguments=False)
    with mode():
        value = marks(_input() * 2)
        box = marks(Box())
        for _ in range(regions):
            value = ckpt.checkpoint(region, value, box, use_reentrant=use_reentrant)
        del box
        reached()
        assert region.count == regions, (
            f"{regions} calls under {mode.__name__}: expected {regions} runs, "
            f"observed {region.count}"
        )
        alive = marks.surviving()
        assert alive == 0, f"under {mode.__name__}: expected nothing alive, observed {alive}"
        expected = _input() * 2
        for _ in range(regions):
            expected = (_named(names, Marks())(expected) * weight).exp()
    assert not value.requires_grad
    assert value.is_inference() == expected.is_inference()
    assert_same(value, expected, "result")


# ---------------------------------------------------------------- work


@clause("cost/no-early-recomputation")
@both_variants
@given(regions=st.integers(1, 4), after=st.lists(st.sampled_from(sorted(STEPS)), max_size=3))
def test_nothing_runs_again_before_backward(
    ckpt: Candidate, use_reentrant: bool, regions: int, after: list[str]
) -> None:
    """Is each function run once until backward, whatever is done with the result?"""
    recorders = [Recorder(_chain(2)) for _ in range(regions)]
    value = x = _input()
    for recorder in recorders:
        value = ckpt.checkpoint(recorder, value, use_reentrant=use_reentrant)
    total = _named(after, Marks())(value).sum()
    float(total), str(value), value.detach().clone(), value.grad_fn
    counts = [recorder.count for recorder in recorders]
    assert counts == [1] * regions, f"before backward: expected one run each, observed {counts}"
    total.backward()
    assert x.grad is not None
    assert recorders[0].count > 1
    reached()


@clause("cost/only-reached-regions")
@both_variants
@given(used=st.lists(st.booleans(), min_size=2, max_size=5))
def test_only_reached_regions_run_again(
    ckpt: Candidate, use_reentrant: bool, used: list[bool]
) -> None:
    """Are regions beside the path of backward left alone?"""
    recorders = [Recorder(_chain(2)) for _ in used]
    x = _input()
    results = [ckpt.checkpoint(recorder, x, use_reentrant=use_reentrant) for recorder in recorders]
    total = x.sum()
    for result, taken in zip(results, used, strict=True):
        total = total + (result if taken else result.detach()).sum()
    total.backward()
    if any(used):
        reached()
    counts = [recorder.count for recorder in recorders]
    expected = [2 if taken else 1 for taken in used]
    assert counts == expected, f"runs of each region: expected {expected}, observed {counts}"


@clause("cost/only-reached-regions")
@given(position=st.integers(0, 3), regions=st.just(4), way=st.sampled_from(["grad", "inputs"]))
def test_backward_to_an_inner_tensor_stops_there(
    ckpt: Candidate, position: int, regions: int, way: str
) -> None:
    """Are regions behind the tensor that is differentiated for not run again?"""
    recorders = [Recorder(_chain(2)) for _ in range(regions)]
    values = [_input()]
    for recorder in recorders:
        values.append(ckpt.checkpoint(recorder, values[-1], use_reentrant=False))
    head = torch.ones(WIDTH, requires_grad=True)
    total = (values[-1] * head).sum()
    if way == "grad":
        torch.autograd.grad(total, [head], retain_graph=True)
    else:
        total.backward(inputs=[head], retain_graph=True)
    counts = [recorder.count for recorder in recorders]
    assert counts == [1] * regions, (
        f"a backward that ends before the regions: expected one run each, observed {counts}"
    )
    torch.autograd.grad(total, [values[position]])
    reached()
    counts = [recorder.count for recorder in recorders]
    expected = [1] * position + [2] * (regions - position)
    assert counts == expected, (
        f"a backward to the input of region {position}: expected runs {expected}, observed {counts}"
    )


@clause("cost/one-recomputation-per-backward")
@both_variants
@given(
    results=st.integers(1, 4),
    length=st.integers(1, 4),
    backwards=st.integers(1, 3),
    regions=st.integers(1, 3),
)
def test_each_backward_recomputes_once(
    ckpt: Candidate, use_reentrant: bool, results: int, length: int, backwards: int, regions: int
) -> None:
    """Is each region run once more per backward, however many results and saved tensors it has?"""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_chain(length)(x * inputs[0]) for x in inputs)

    recorders = [Recorder(function) for _ in range(regions)]
    leaves = [_input() for _ in range(results)]
    values: Sequence[torch.Tensor] = leaves
    for recorder in recorders:
        values = ckpt.checkpoint(recorder, *values, use_reentrant=use_reentrant)
    total = torch.stack(list(values)).sum()
    for number in range(1, backwards + 1):
        total.backward(retain_graph=number < backwards)
        counts = [recorder.count for recorder in recorders]
        assert max(counts) <= 1 + number, (
            f"after {number} backward calls: expected at most {1 + number} runs, observed {counts}"
        )
    assert leaves[0].grad is not None
    if recorders[0].count > 1:
        reached()


@clause("cost/nested-runs")
@both_variants
@given(tree=trees)
def test_runs_by_depth(ckpt: Candidate, use_reentrant: bool, tree: Tree) -> None:
    """Is a function in d nested regions run at most d times by one backward?"""
    counts: dict[str, int] = {}
    x = _input()
    options = {"use_reentrant": use_reentrant}
    result = ckpt.checkpoint(_tree_function(ckpt, tree, options, counts), x, **options)
    result.sum().backward()
    assert x.grad is not None
    assert counts[""] > 1
    reached()
    allowed = {path: 1 + len(path) + 1 for path in counts}
    over = {path: count for path, count in counts.items() if count > allowed[path]}
    assert not over, (
        f"regions nested as {tree}: expected at most {allowed} runs by path, observed {counts}"
    )


@clause("cost/nested-runs")
@both_variants
@given(depth=st.integers(1, 7))
def test_work_grows_by_one_run_per_level(ckpt: Candidate, use_reentrant: bool, depth: int) -> None:
    """Does the innermost of d regions cost d runs in backward, and not two to the power d?"""
    tree: Tree = []
    for _ in range(depth - 1):
        tree = [tree]
    counts: dict[str, int] = {}
    options = {"use_reentrant": use_reentrant}
    x = _input()
    ckpt.checkpoint(_tree_function(ckpt, tree, options, counts), x, **options).sum().backward()
    innermost = max(counts, key=len)
    assert len(innermost) == depth - 1
    reached()
    assert counts[innermost] <= 1 + depth, (
        f"depth {depth}: expected at most {1 + depth} runs of the innermost function, "
        f"observed {counts[innermost]}"
    )


@clause("cost/double-backward-runs")
@given(length=st.integers(1, 4), orders=st.integers(2, 3))
def test_each_order_of_gradient_recomputes_once(ckpt: Candidate, length: int, orders: int) -> None:
    """Does each backward of higher-order gradients add at most one run?"""
    region = Recorder(_chain(length))
    x, plain = _input(), _input()
    value = ckpt.checkpoint(region, x, use_reentrant=False)
    expected: torch.Tensor = _chain(length)(plain)
    for order in range(1, orders + 1):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad(expected.sum(), plain, create_graph=True)
        assert_same(value.detach(), expected.detach(), f"gradient of order {order}")
        reached()
        assert region.count <= 1 + order, (
            f"after {order} backward calls with create_graph: expected at most {1 + order} runs, "
            f"observed {region.count}"
        )


# ---------------------------------------------------------------- during backward


@clause("cost/one-region-at-a-time")
@both_variants
@given(regions=st.integers(2, 5), length=st.integers(4, 8), retain=st.booleans())
def test_bytes_alive_during_backward(
    ckpt: Candidate, use_reentrant: bool, regions: int, length: int, retain: bool
) -> None:
    """Are at most the inputs and one region's intermediates alive at the worst moment?"""
    x = _input(dtype=torch.float64)
    with DataStorages() as live:
        value = x
        for _ in range(regions):
            value = ckpt.checkpoint(_chain(length), value, use_reentrant=use_reentrant)
        total = value.sum()
        del value
        live.peak = 0
        total.backward(retain_graph=retain)
        peak = live.peak
    assert x.grad is not None
    reached()
    allowed = (regions + length + WORKING) * UNIT
    assert peak <= allowed, (
        f"{regions} regions of {length} operators: expected at most {allowed} bytes alive during "
        f"backward, observed {peak}"
    )


@clause("cost/one-region-at-a-time")
@both_variants
@given(regions=st.integers(2, 5), length=st.integers(2, 5), retain=st.booleans())
def test_left_regions_hold_nothing(
    ckpt: Candidate, use_reentrant: bool, regions: int, length: int, retain: bool
) -> None:
    """Are a region's recomputed tensors gone when backward goes on to the region before?"""
    marks = Marks()
    alive: list[int] = []
    value = _input() * 1
    inputs = []
    for _ in range(regions):
        value.register_hook(lambda gradient: alive.append(marks.surviving()))
        inputs.append(value)
        value = ckpt.checkpoint(_chain(length, marks), value, use_reentrant=use_reentrant)
    total = value.sum()
    del value, inputs
    marks.clear()
    total.backward(retain_graph=retain)
    assert len(marks) > 0
    assert len(alive) == regions
    reached()
    assert alive == [0] * regions, (
        f"recomputed tensors alive when backward had left each of {regions} regions of {length} "
        f"operators: expected none, observed {alive}"
    )


class _Watch(torch.autograd.Function):
    """Passes through and calls ``watch`` in backward; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: Callable[[], None]) -> torch.Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.watch()
        return gradient, None


@clause("cost/freed-as-used")
@both_variants
@given(length=st.integers(2, 8), retain=st.booleans())
def test_recomputed_tensors_are_freed_as_backward_goes(
    ckpt: Candidate, use_reentrant: bool, length: int, retain: bool
) -> None:
    """Are at each node no more intermediates alive than in the plain run, plus one?"""

    def profile(run: Function, retain: bool) -> list[int]:
        marks = Marks()
        alive: list[int] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = _Watch.apply(x, lambda: alive.append(marks.alive()))
                x = marks(x.sin())
            return x.sin()

        total = run(function, _input()).sum()
        if run is not plain:
            marks.clear()
        total.backward(retain_graph=retain)
        return alive

    def plain(function: Function, x: torch.Tensor) -> Any:
        return function(x)

    expected = profile(plain, False)
    assert len(expected) == length
    observed = profile(
        lambda function, x: ckpt.checkpoint(function, x, use_reentrant=use_reentrant), retain
    )
    assert len(observed) == length
    reached()
    assert all(got <= wanted + 1 for got, wanted in zip(observed, expected, strict=True)), (
        f"intermediates alive at each of {length} nodes of backward: expected at most "
        f"{[wanted + 1 for wanted in expected]}, observed {observed}"
    )


def _worst_moment(
    ckpt: Candidate, use_reentrant: bool, lengths: Sequence[int], runs: list[int] | None = None
) -> int:
    """Most bytes alive at any operator of forward and backward over regions of ``lengths``."""
    x = _input(dtype=torch.float64)
    live = DataStorages()
    with live:
        value = x
        for length in lengths:
            chain = _chain(length)

            def region(x: torch.Tensor, chain: Function = chain, length: int = length) -> Any:
                if runs is not None:
                    runs.append(length)
                return chain(x)

            value = ckpt.checkpoint(region, value, use_reentrant=use_reentrant)
        total = value.sum()
        del value
        total.backward()
        assert x.grad is not None
        return live.peak


@clause("cost/square-root-memory")
@both_variants
@given(side=st.integers(3, 8))
def test_memory_grows_as_the_square_root(ckpt: Candidate, use_reentrant: bool, side: int) -> None:
    """Does a stack of side² layers in side regions cost about twice side tensors at worst?"""
    peak = _worst_moment(ckpt, use_reentrant, [side] * side)
    reached()
    allowed = (2 * side + WORKING) * UNIT
    assert peak <= allowed, (
        f"{side * side} layers in {side} regions: expected at most {allowed} bytes at the worst "
        f"moment, observed {peak} (all layers: {side * side * UNIT})"
    )


@clause("cost/square-root-memory")
@both_variants
def test_exponent_of_growth(ckpt: Candidate, use_reentrant: bool) -> None:
    """Is the growth exponent of memory over layers, with √n regions, a half?"""
    sides = (4, 8, 16)
    peaks = [_worst_moment(ckpt, use_reentrant, [side] * side) / UNIT for side in sides]
    # The constant share of gradients is taken off first: it would hide the exponent.
    exponent = math.log((peaks[-1] - WORKING) / max(peaks[0] - WORKING, 1.0)) / math.log(
        (sides[-1] / sides[0]) ** 2
    )
    reached()
    # At the bound, 2√n + 4, the exponent is 0.5; at n + 4, 1. A candidate that stays below the
    # bound with a smaller constant for few layers may come out a little higher.
    assert exponent <= 0.75, (
        f"layers {[side * side for side in sides]}, tensors at the worst moment {peaks}: expected "
        f"growth with exponent 0.5, observed {exponent:.2f}"
    )


@clause("cost/work-with-regions")
@both_variants
@given(layers=st.integers(1, 12), cut=st.integers(0, 11))
def test_work_is_two_runs_of_each_layer(
    ckpt: Candidate, use_reentrant: bool, layers: int, cut: int
) -> None:
    """Is each layer run at most twice, however many regions the layers are divided into?"""
    segments = 1 + cut % layers
    runs: list[int] = []
    _worst_moment(ckpt, use_reentrant, _cut(layers, segments), runs)
    assert len(runs) > segments
    reached()
    assert sum(runs) <= 2 * layers, (
        f"{layers} layers in {segments} regions: expected at most {2 * layers} runs of a layer, "
        f"observed {sum(runs)}"
    )


# ---------------------------------------------------------------- after backward


@clause("cost/nothing-after-backward")
@both_variants
@given(names=steps, regions=st.integers(1, 3))
def test_backward_frees_inputs_and_recomputed_tensors(
    ckpt: Candidate, use_reentrant: bool, names: list[str], regions: int
) -> None:
    """Is nothing of the regions alive after backward, though the result is held?"""
    marks = Marks()
    body = _named(names, marks)
    region = Recorder(lambda x: body(x).exp(), keep_arguments=False)
    value = marks(_input() * 2)
    for _ in range(regions):
        value = ckpt.checkpoint(region, value, use_reentrant=use_reentrant)
    assert marks.alive() == 1
    value.sum().backward()
    assert region.count > regions
    reached()
    alive = marks.surviving()
    assert alive == 0, f"after backward: expected nothing alive but the result, observed {alive}"


@clause("cost/nothing-after-retained-backward")
@both_variants
@given(names=steps, regions=st.integers(1, 3), backwards=st.integers(1, 3))
def test_retained_graph_keeps_inputs_only(
    ckpt: Candidate, use_reentrant: bool, names: list[str], regions: int, backwards: int
) -> None:
    """Are recomputed tensors gone after each backward over a retained graph, and inputs there?"""
    inputs, marks = Marks(), Marks()
    body = _named(names, marks)
    leaf = _input()
    value = inputs(leaf * 2)
    for _ in range(regions):
        value = ckpt.checkpoint(lambda x: body(x).sin(), value, use_reentrant=use_reentrant)
    total = value.sum()
    del value
    first = None
    for number in range(1, backwards + 1):
        marks.clear()
        leaf.grad = None
        total.backward(retain_graph=True)
        assert len(marks) > 0
        reached()
        alive = marks.surviving()
        assert alive == 0, (
            f"after backward call {number} with retain_graph: expected no recomputed tensor alive, "
            f"observed {alive} of {len(marks)}"
        )
        assert inputs.alive() == 1, f"after backward call {number}: the region's input was freed"
        first = leaf.grad if first is None else first
        assert_same(leaf.grad, first, f"gradient of backward call {number}")


@clause("cost/no-collector-needed")
@both_variants
@given(
    names=steps,
    backward=st.sampled_from(["none", "free", "retain"]),
    tail=st.booleans(),
    nested=st.booleans(),
)
def test_everything_dies_by_reference_counting(
    ckpt: Candidate, use_reentrant: bool, names: list[str], backward: str, tail: bool, nested: bool
) -> None:
    """With the collector off, does everything of a region die with its graph?"""
    marks = Marks()

    def step(box: Box) -> None:
        body = _named(names, marks)

        def function(x: torch.Tensor, box: Box) -> torch.Tensor:
            if nested:
                x = ckpt.checkpoint(lambda x: body(x).sin(), x, use_reentrant=use_reentrant)
            x = body(x).sin()
            return x + 1 if tail else x  # with a tail, recomputation stops early

        marks(function)
        value = marks(_input() * 2)
        value = ckpt.checkpoint(function, value, box, use_reentrant=use_reentrant)
        total = value.sum()
        if backward != "none":
            total.backward(retain_graph=backward == "retain")

    with collector_off():
        step(marks(Box()))
        alive = marks.alive()
    reached()
    assert alive == 0, (
        f"garbage collector off, backward: {backward}: expected everything freed with the graph, "
        f"observed {alive} of {len(marks)} tensors and objects alive"
    )


@clause("cost/closure-over-result")
@both_variants
@pytest.mark.parametrize("backward", ["free", "retain"])
def test_function_that_refers_to_its_result_can_be_freed(
    ckpt: Candidate, use_reentrant: bool, backward: str
) -> None:
    """Is everything freed, by a collection at the latest, where the function sees its result?"""
    marks = Marks()

    def step() -> None:
        shelf: dict[str, torch.Tensor] = {}
        box = marks(Box())

        def function(x: torch.Tensor) -> Any:
            shelf.get("result"), box
            return marks(x.sin()).exp()

        x = marks(_input() * 2)
        shelf["result"] = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
        shelf["result"].sum().backward(retain_graph=backward == "retain")

    with young_heap():
        step()
        reached()
        alive = marks.surviving()
    if backward == "free":
        assert alive == 0, f"expected everything freed after a collection, observed {alive} alive"
    else:
        # Here the plain run's graph would be in no cycle; the region's is, through the function.
        assert alive <= 2, f"expected no intermediate alive, observed {alive} marks alive"


class Failure(Exception):
    """Raised by the tests' own code."""


class _Fails(torch.autograd.Function):
    """Passes through; its backward formula raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Failure


@clause("cost/exception-leaves-nothing")
@both_variants
@pytest.mark.parametrize("place", ["forward", "recomputation", "formula"])
@given(names=steps, regions=st.integers(1, 3))
def test_failed_region_leaves_nothing(
    ckpt: Candidate, use_reentrant: bool, place: str, names: list[str], regions: int
) -> None:
    """Is nothing of a failed region alive once the exception and the graph are dropped?"""
    marks = Marks()
    body = _named(names, marks)
    failing = False

    def function(x: torch.Tensor, box: Box) -> Any:
        x = body(x).sin()
        if failing and place != "formula":
            raise Failure
        if place == "formula":
            x = _Fails.apply(x)
        return body(x).sin()

    def step(box: Box) -> None:
        nonlocal failing
        value = marks(_input() * 2)
        for number in range(regions):
            failing = place == "forward" and number == regions - 1
            value = ckpt.checkpoint(function, value, box, use_reentrant=use_reentrant)
        failing = True
        value.sum().backward()

    with pytest.raises(Failure) as raised:
        step(marks(Box()))
    del raised
    reached()
    alive = marks.surviving()
    assert alive == 0, (
        f"exception in {place}: expected nothing alive, observed {alive} of {len(marks)} "
        "tensors and objects"
    )


@clause("cost/many-regions")
@both_variants
def test_steps_accumulate_no_objects(ckpt: Candidate, use_reentrant: bool) -> None:
    """Do many steps leave the number of Python objects and tensors as it was?"""
    repeats, made = 100, Marks()

    def step() -> None:
        x = made(_input() * 2)
        ckpt.checkpoint(_chain(2), x, use_reentrant=use_reentrant).sum().backward()

    for _ in range(20):  # caches of the first steps
        step()
    made.clear()
    with young_heap():
        for _ in range(repeats):
            step()
        alive = made.surviving()
        own = len(made)
        made.clear()  # the marks themselves are objects
        gc.collect()
        grown = len(gc.get_objects())
    reached()
    assert alive == 0, f"{repeats} steps: expected no tensor alive, observed {alive} of {own}"
    # One object left per step would be `repeats`; half of that leaves room for other threads.
    assert grown < repeats // 2, (
        f"{repeats} steps: expected no growth, observed {grown} new objects"
    )


@clause("cost/many-regions")
@both_variants
@pytest.mark.parametrize("shape", ["side by side", "chain"])
def test_a_graph_of_a_thousand_regions(ckpt: Candidate, use_reentrant: bool, shape: str) -> None:
    """Do a thousand regions in one graph work and leave nothing?"""
    # A chain of reentrant regions is deep for the engine; its limit is not this clause's matter.
    count = 1000 if shape == "side by side" else 100
    marks = Marks()
    # Powers of two and sums of products of them are exact, whatever the order of the summands.
    leaf = (2.0 ** torch.arange(-2, 3, dtype=torch.float64)).requires_grad_()
    if shape == "chain":
        value = leaf
        for _ in range(count):
            value = ckpt.checkpoint(
                lambda x: marks(x * 2) * marks(x / 4) / x, value, use_reentrant=use_reentrant
            )
        total = value.sum()
        expected = torch.full_like(leaf, 2.0**-count)
    else:
        total = torch.stack(
            [
                ckpt.checkpoint(lambda x: marks(x * 2) * x, leaf, use_reentrant=use_reentrant)
                for _ in range(count)
            ]
        ).sum()
        expected = leaf.detach() * 4 * count
    value = leaf
    total.backward()
    assert leaf.grad is not None
    reached()
    assert_same(leaf.grad, expected, f"gradient of {count} regions {shape}")
    del total
    alive = marks.surviving()
    assert alive == 0, f"{count} regions: expected nothing alive, observed {alive} of {len(marks)}"


@contextlib.contextmanager
def _no_log_capture() -> Iterator[None]:
    """Take pytest's log capture away: it keeps records, and with them the tensors they name."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    taken = [
        (logger, handler)
        for logger in loggers
        for handler in logger.handlers
        if type(handler).__module__.startswith("_pytest")
    ]
    for logger, handler in taken:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for logger, handler in taken:
            logger.addHandler(handler)


@clause("cost/debug-leaves-nothing")
@pytest.mark.parametrize("how", ["option", "context"])
def test_debug_mode_keeps_nothing(ckpt: Candidate, how: str) -> None:
    """Does debug mode drop intermediates, give the same gradients and leave nothing?"""
    names = ["exp", "square"]
    marks = Marks()
    body = _named(names, marks)
    plain = _input()
    (_named(names, Marks())(plain * 2)).sin().sum().backward()
    for _ in range(2):
        leaf, box = _input(), marks(Box())
        switch = (
            ckpt.set_checkpoint_debug_enabled(True)
            if how == "context"
            else contextlib.nullcontext()
        )
        options = {"debug": True} if how == "option" else {}
        with _no_log_capture(), switch:
            result = ckpt.checkpoint(
                lambda x, box: body(x).sin(),
                marks(leaf * 2),
                box,
                use_reentrant=False,
                **options,
            )
        del box
        alive = marks.surviving(2)
        assert alive <= 2, (
            f"debug by {how}: expected only the two arguments alive after forward, observed {alive}"
        )
        with _no_log_capture():
            result.sum().backward()
        assert_same(leaf.grad, plain.grad, "gradient")
        reached()
        del result
        alive = marks.surviving()
        assert alive == 0, (
            f"debug by {how}: expected nothing alive after backward, observed {alive}"
        )
