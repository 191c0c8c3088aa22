"""Chapter 11: graph execution groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import Recorder, assert_equivalent, assert_same
from conformance.observe.compare import plain
from conformance.observe.lifetimes import Marks
from conformance.testing import clause, reached

STREAMS = 4
orders = st.permutations(range(STREAMS))
"""In which order the results of a region with STREAMS results are differentiated."""


def _leaves(count: int = STREAMS) -> list[torch.Tensor]:
    return [torch.linspace(0.1, 1.0 + i, 3).requires_grad_() for i in range(count)]


def _streams(*inputs: torch.Tensor, marks: Marks | None = None) -> tuple[torch.Tensor, ...]:
    """One result for each input; no two share a saved tensor."""
    keep: Callable[[torch.Tensor], torch.Tensor] = marks or (lambda tensor: tensor)
    return tuple(keep(x.exp()).sin() for x in inputs)


def _stages(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results one behind the other: each is made from the one before."""
    first = x.exp().sin()
    second = first.exp().sin()
    third = second.exp().sin()
    return first, second, third


def _stop_early(ckpt: Candidate, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    if enabled or not ckpt.has("set_checkpoint_early_stop"):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = ckpt.set_checkpoint_early_stop(False)
    return context


def _expected_gradients(count: int = STREAMS) -> list[torch.Tensor | None]:
    leaves = _leaves(count)
    for result in _streams(*leaves):
        result.sum().backward()
    return [leaf.grad for leaf in leaves]


@clause("group/at-most-once")
@given(order=orders, calls=st.integers(1, STREAMS), early=st.booleans())
def test_results_share_one_recomputation(
    ckpt: Candidate, order: list[int], calls: int, early: bool
) -> None:
    """Is a region run once for backward calls from several of its results, in any order?"""
    region = Recorder(_streams)
    leaves = _leaves()
    with _stop_early(ckpt, early):
        results = ckpt.checkpoint(region, *leaves, use_reentrant=False)
    with ckpt.GraphExecGroup():
        for index in order[:calls]:
            results[index].sum().backward()
    assert all(leaves[index].grad is not None for index in order[:calls])
    reached()
    assert region.count <= 2, (
        f"{calls} backward calls in one group: expected 1 recomputation, "
        f"observed {region.count - 1}"
    )


@clause("group/at-most-once")
@given(cuts=st.lists(st.booleans(), min_size=2, max_size=2), early=st.booleans())
def test_stages_share_one_recomputation(ckpt: Candidate, cuts: list[bool], early: bool) -> None:
    """Is a region run once for backward calls that go from one inner result to the next?"""
    region = Recorder(_stages)
    (x,) = _leaves(1)
    with _stop_early(ckpt, early):
        first, second, third = ckpt.checkpoint(region, x, use_reentrant=False)
    stops = [stop for stop, cut in zip((second, first), cuts, strict=True) if cut]
    gradient: torch.Tensor = torch.ones_like(third)
    start = third
    with ckpt.GraphExecGroup():
        for stop in [*stops, x]:
            (gradient,) = torch.autograd.grad(start, stop, gradient)
            start = stop
    reached()
    assert region.count <= 2, (
        f"{len(stops) + 1} backward calls in one group: expected 1 recomputation, "
        f"observed {region.count - 1}"
    )
    (leaf,) = _leaves(1)
    (expected,) = torch.autograd.grad(_stages(leaf)[2].sum(), leaf)
    assert_same(gradient, expected, "gradient through all stages")


@clause("group/every-region")
@given(
    regions=st.integers(2, 4), chained=st.booleans(), order=orders, calls=st.integers(2, STREAMS)
)
def test_each_of_several_regions_runs_once(
    ckpt: Candidate, regions: int, chained: bool, order: list[int], calls: int
) -> None:
    """Are several regions each run once, whether in a chain or side by side?"""
    recorders = [Recorder(_streams) for _ in range(regions)]
    unreached = Recorder(_streams)
    leaves = _leaves()
    totals: list[torch.Tensor] = [torch.zeros(()) for _ in leaves]
    inputs: Sequence[torch.Tensor] = leaves
    for recorder in recorders:
        results = ckpt.checkpoint(recorder, *inputs, use_reentrant=False)
        totals = [total + result.sum() for total, result in zip(totals, results, strict=True)]
        inputs = results if chained else leaves
    other = ckpt.checkpoint(unreached, *leaves, use_reentrant=False)
    with ckpt.GraphExecGroup():
        for index in order[:calls]:
            totals[index].backward()
    assert all(recorder.count > 1 for recorder in recorders)
    reached()
    counts = [recorder.count - 1 for recorder in recorders]
    assert max(counts) <= 1, f"expected 1 recomputation of each region, observed {counts}"
    assert unreached.count == 1, "a region that no backward call reached was recomputed"
    del other


@clause("group/nested-regions")
@given(depth=st.integers(2, 4), order=orders, calls=st.integers(2, STREAMS), early=st.booleans())
def test_nested_regions_run_as_for_one_backward(
    ckpt: Candidate, depth: int, order: list[int], calls: int, early: bool
) -> None:
    """Do further backward calls of a group add no run at any depth of a nest?"""
    counts = [0] * depth

    def level(index: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            counts[index] += 1
            results: tuple[torch.Tensor, ...] = _streams(*inputs)
            if index + 1 < depth:
                results = ckpt.checkpoint(level(index + 1), *results, use_reentrant=False)
            return _streams(*results)

        return function

    leaves = _leaves()
    with _stop_early(ckpt, early):
        results = ckpt.checkpoint(level(0), *leaves, use_reentrant=False)
        with ckpt.GraphExecGroup():
            for index in order[:calls]:
                results[index].sum().backward()
    assert counts[0] > 1
    reached()
    allowed = [1 + index + 1 for index in range(depth)]
    assert all(count <= limit for count, limit in zip(counts, allowed, strict=True)), (
        f"runs by depth: expected at most {allowed}, observed {counts}"
    )
    expected = _leaves()
    for index in order[:calls]:
        value = expected[index]
        for _ in range(2 * depth):
            (value,) = _streams(value)
        value.sum().backward()
        assert_same(leaves[index].grad, expected[index].grad, f"gradient of input {index}")


@clause("group/gradients")
@given(
    order=orders,
    calls=st.integers(1, STREAMS),
    nested=st.booleans(),
    regions=st.integers(1, 3),
    retain=st.booleans(),
)
def test_gradients_are_those_of_the_plain_run(
    ckpt: Candidate, order: list[int], calls: int, nested: bool, regions: int, retain: bool
) -> None:
    """Are gradients in a group right to the bit, random operators included, and is nothing left?"""
    dropout = torch.nn.functional.dropout
    recorder = Recorder(lambda inputs: [dropout(x.sin(), 0.5) * x.exp() for x in inputs])

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        def function(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            made = wrap(recorder, inputs) if nested else recorder(inputs)
            return [dropout(x.cos(), 0.3) + x.exp() for x in made]

        values = leaves
        for _ in range(regions):
            values = wrap(function, values)
        group = contextlib.nullcontext() if wrap is plain else ckpt.GraphExecGroup()
        with group:
            for index in order[:calls]:
                values[index].sum().backward(retain_graph=retain)
        return [value.detach() for value in values]

    assert_equivalent(
        program,
        _leaves,
        lambda function, inputs: ckpt.checkpoint(function, inputs, use_reentrant=False),
    )
    # Two plain runs and the checkpointed one: more runs than three mean that some were repeated.
    assert recorder.count > 3 * regions
    reached()


@clause("group/forward-anywhere")
@pytest.mark.parametrize("place", ["before", "inside", "both", "between"])
def test_forward_may_run_before_or_inside(ckpt: Candidate, place: str) -> None:
    """Is a region whose forward ran inside the group treated as one whose forward ran before?"""
    early, late = Recorder(_streams), Recorder(_streams)

    def forward(recorder: Recorder) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        leaves = _leaves(2)
        return leaves, ckpt.checkpoint(recorder, *leaves, use_reentrant=False)

    pairs = [forward(early)] if place in ("before", "both", "between") else []
    with ckpt.GraphExecGroup():
        if place in ("inside", "both"):
            pairs.append(forward(late))
        assert early.count + late.count == len(pairs), "entering the group or forward recomputed"
        for _, results in pairs:
            results[0].sum().backward()
        if place == "between":
            leaves, results = forward(late)
            results[0].sum().backward()
            pairs.append((leaves, results))
        for _, results in pairs:
            results[1].sum().backward()
    assert early.count + late.count > len(pairs)
    reached()
    counts = [recorder.count for recorder in (early, late) if recorder.count]
    assert counts == [2] * len(pairs), f"expected 2 runs of each region, observed {counts}"
    for leaves, _ in pairs:
        assert_same([leaf.grad for leaf in leaves], _expected_gradients(2), "gradients")


def _call_backward(way: str, result: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor | None:
    """Differentiate ``result`` in one of four ways; the gradient of ``leaf``."""
    if way == "backward":
        result.sum().backward()
    elif way == "autograd.backward":
        torch.autograd.backward([result], [torch.ones_like(result)])
    elif way == "inputs":
        result.sum().backward(inputs=[leaf])
    else:
        return torch.autograd.grad(result.sum(), leaf)[0]
    return leaf.grad


@clause("group/autograd-grad")
@given(
    ways=st.lists(
        st.sampled_from(["backward", "autograd.backward", "inputs", "grad"]),
        min_size=2,
        max_size=STREAMS,
    )
)
def test_every_way_of_running_backward_counts(ckpt: Candidate, ways: list[str]) -> None:
    """Do backward calls of different kinds share one recomputation?"""
    region = Recorder(_streams)
    leaves = _leaves()
    results = ckpt.checkpoint(region, *leaves, use_reentrant=False)
    with ckpt.GraphExecGroup():
        gradients = [
            _call_backward(way, result, leaf)
            for way, result, leaf in zip(ways, results, leaves, strict=False)
        ]
    reached()
    assert region.count <= 2, (
        f"{ways} in one group: expected 1 recomputation, observed {region.count - 1}"
    )
    assert_same(gradients, _expected_gradients()[: len(ways)], "gradients")


@clause("group/overlap-refused")
@pytest.mark.parametrize("retain", [False, True], ids=["", "retain_graph"])
@pytest.mark.parametrize("kind", ["same root", "same result", "trunk", "stage", "grad"])
def test_overlap_raises(ckpt: Candidate, kind: str, retain: bool) -> None:
    """Is a second use of a saved tensor in one instance refused, where a disjoint pair works?"""

    def forward() -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        leaves = _leaves(2)
        return leaves, ckpt.checkpoint(
            lambda x, w: (*_stages(x), w.exp().sin()), *leaves, use_reentrant=False
        )

    (x, w), (first, second, third, other) = forward()
    with ckpt.GraphExecGroup():
        third.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=retain)
    assert x.grad is not None
    assert w.grad is not None
    reached()

    (x, w), (first, second, third, other) = forward()
    root = third.sum()
    heads = third.sin().sum(), third.cos().sum()
    with ckpt.GraphExecGroup():
        if kind == "trunk":
            heads[0].backward(retain_graph=True)
        else:
            root.backward(retain_graph=True)
        try:
            if kind == "same root":
                root.backward(retain_graph=retain)
            elif kind == "same result":
                (third * 2).sum().backward(retain_graph=retain)
            elif kind == "trunk":
                heads[1].backward(retain_graph=retain)
            elif kind == "stage":
                first.sum().backward(retain_graph=retain)
            else:
                torch.autograd.grad(second.sum(), x, retain_graph=retain)
        except Exception:  # noqa: BLE001 - which class is the implementation's business
            return
    pytest.fail(
        f"two backward calls of one group used the same saved tensor ({kind}): expected an "
        "exception, observed none"
    )


@clause("group/instances-independent")
@given(
    calls=st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, STREAMS - 1), min_size=1)),
        min_size=2,
        max_size=5,
    )
)
def test_retained_graph_is_usable_in_each_instance(
    ckpt: Candidate, calls: list[tuple[bool, set[int]]]
) -> None:
    """Can a retained graph be used again in other instances and outside, with equal gradients?"""
    leaves = _leaves()
    results = ckpt.checkpoint(_streams, *leaves, use_reentrant=False)
    expected = _expected_gradients()
    instances = []  # Kept, so that a new instance is not mistaken for one that is gone.
    for number, (inside, chosen) in enumerate(calls, 1):
        if inside:
            instances.append(ckpt.GraphExecGroup())
        with instances[-1] if inside else contextlib.nullcontext():
            for index in sorted(chosen):
                (gradient,) = torch.autograd.grad(
                    results[index].sum(), leaves[index], retain_graph=True
                )
                assert_same(
                    gradient,
                    expected[index],
                    f"gradient in visit {number}, {'in' if inside else 'outside'} an instance",
                )
        reached()


@clause("group/sharing-ends")
@pytest.mark.parametrize("places", ["none none", "own own", "own none", "none own"])
def test_calls_that_share_no_instance_recompute_each(ckpt: Candidate, places: str) -> None:
    """Does each backward call recompute where no instance holds them together?"""
    region = Recorder(_streams)
    leaves = _leaves(2)
    results = ckpt.checkpoint(region, *leaves, use_reentrant=False)
    for result, place in zip(results, places.split(), strict=True):
        with ckpt.GraphExecGroup() if place == "own" else contextlib.nullcontext():
            result.sum().backward()
    assert_same([leaf.grad for leaf in leaves], _expected_gradients(2), "gradients")
    reached()
    assert region.count == 3, f"expected 2 recomputations, observed {region.count - 1}"


@clause("group/reentered-instance")
@given(visits=st.lists(st.integers(0, 2), min_size=2, max_size=4), order=orders)
def test_reentered_instance_is_the_same_group(
    ckpt: Candidate, visits: list[int], order: list[int]
) -> None:
    """Do backward calls in several visits of one instance share a recomputation?"""
    region = Recorder(_streams)
    leaves = _leaves()
    results = ckpt.checkpoint(region, *leaves, use_reentrant=False)
    remaining = list(order)
    group = ckpt.GraphExecGroup()
    for calls in visits:
        with group:
            for _ in range(min(calls, len(remaining))):
                results[remaining.pop()].sum().backward()
    with group:
        for index in remaining:
            results[index].sum().backward()
    reached()
    assert region.count == 2, f"expected 1 recomputation, observed {region.count - 1}"
    assert_same([leaf.grad for leaf in leaves], _expected_gradients(), "gradients")


class Failure(Exception):
    """Raised by the tests' own code."""


@clause("group/ends-on-exception")
@pytest.mark.parametrize("cause", ["caller", "overlap", "recomputation"])
def test_exception_ends_the_group(ckpt: Candidate, cause: str) -> None:
    """Is a group over, and a new one possible, after an exception passed through it?"""
    failing = False

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _streams(*inputs)
        if failing:
            raise Failure
        return (*results, results[0].exp().sin())

    region = Recorder(function)
    leaves = _leaves(2)
    first, second, _ = ckpt.checkpoint(region, *leaves, use_reentrant=False)
    expected = Failure if cause != "overlap" else Exception
    with pytest.raises(expected), ckpt.GraphExecGroup():  # noqa: PT012 - the block is the group
        failing = cause == "recomputation"
        first.sum().backward(retain_graph=True)
        if cause == "overlap":
            first.sum().backward(retain_graph=True)
        raise Failure
    failing = False
    reached()

    for leaf in leaves:
        leaf.grad = None
    before = region.count
    for _ in range(2):  # an overlap, were the group still there
        gradients = torch.autograd.grad(first.sum(), leaves[0], retain_graph=True)
        assert_same(gradients[0], _expected_gradients(2)[0], "gradient after the group")
    assert region.count == before + 2, (
        "backward calls outside a group that was left by an exception: expected 2 "
        f"recomputations, observed {region.count - before}"
    )
    before = region.count
    with ckpt.GraphExecGroup():
        first.sum().backward()
        second.sum().backward()
    assert region.count == before + 1, (
        f"a new group after the exception: expected 1 recomputation, observed "
        f"{region.count - before}"
    )
    assert_same([leaf.grad for leaf in leaves], _expected_gradients(2), "gradients in a new group")


@clause("group/released-with-graph")
@given(order=orders, calls=st.integers(1, STREAMS - 1), retain=st.booleans(), inside=st.booleans())
def test_unused_tensors_die_with_the_graph(
    ckpt: Candidate, order: list[int], calls: int, retain: bool, inside: bool
) -> None:
    """Are unused recomputed tensors gone with the graph, though the instance lives on?"""
    marks = Marks()
    region = Recorder(lambda *inputs: _streams(*inputs, marks=marks), keep_arguments=False)
    results = ckpt.checkpoint(region, *_leaves(), use_reentrant=False)
    group = ckpt.GraphExecGroup()
    with group:
        for index in order[:calls]:
            results[index].sum().backward(retain_graph=retain)
        if inside:
            del results
            left = marks.surviving()
    if not inside:
        del results
        left = marks.surviving()
    assert region.count > 1
    assert len(marks) == 2 * STREAMS
    reached()
    assert left == 0, (
        f"graph dropped {'inside' if inside else 'after'} the group: expected no recomputed "
        f"tensor alive, observed {left} of {STREAMS - calls} unused ones"
    )
    del group


@clause("group/used-tensors-freed")
@given(order=orders, retain=st.booleans())
def test_used_tensors_are_freed(ckpt: Candidate, order: list[int], retain: bool) -> None:
    """Is a recomputed tensor gone when a backward call of the group has used it?"""
    marks = Marks()
    region = Recorder(lambda *inputs: _streams(*inputs, marks=marks), keep_arguments=False)
    results = ckpt.checkpoint(region, *_leaves(), use_reentrant=False)
    marks.clear()
    with ckpt.GraphExecGroup():
        for number, index in enumerate(order, 1):
            results[index].sum().backward(retain_graph=retain)
            assert len(marks) == STREAMS
            reached()
            alive = marks.surviving(STREAMS - number)
            assert alive <= STREAMS - number, (
                f"after {number} of {STREAMS} backward calls: expected at most "
                f"{STREAMS - number} recomputed tensors alive, observed {alive}"
            )


@clause("group/reentrant-unaffected")
@given(calls=st.integers(1, 3), results=st.integers(1, 3))
def test_reentrant_regions_do_not_know_the_group(ckpt: Candidate, calls: int, results: int) -> None:
    """Do reentrant regions run and differentiate in a group as outside one?"""

    def run(context: contextlib.AbstractContextManager[Any]) -> tuple[list[int], list[Any]]:
        region = Recorder(_streams)
        leaves = _leaves(results)
        made = ckpt.checkpoint(region, *leaves, use_reentrant=True)
        counts = []
        with context:
            for _ in range(calls):
                for result in made:
                    result.sum().backward(retain_graph=True)
                    counts.append(region.count)
        return counts, [leaf.grad for leaf in leaves]

    outside = run(contextlib.nullcontext())
    assert outside[0][-1] > 1
    reached()
    inside = run(ckpt.GraphExecGroup())
    assert inside[0] == outside[0], (
        f"runs of a reentrant region after each backward call: expected {outside[0]} as without "
        f"a group, observed {inside[0]}"
    )
    assert_same(inside[1], outside[1], "gradients")


@clause("group/plain-unaffected")
@given(calls=st.integers(2, 4), beside=st.booleans())
def test_plain_graph_can_be_used_again(ckpt: Candidate, calls: int, beside: bool) -> None:
    """Can backward run over a part without checkpoints as often as wanted, in a group too?"""

    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        x, w = _leaves(2)
        root = x.exp().sin().sum()
        (region,) = ckpt.checkpoint(_streams, w, use_reentrant=False)
        with context:
            for number in range(calls):
                root.backward(retain_graph=True)
                if beside and number == 0:
                    region.sum().backward()
        return x.grad, w.grad

    expected = run(contextlib.nullcontext())
    reached()
    assert_same(run(ckpt.GraphExecGroup()), expected, "gradients")
