"""Chapter 8: regions inside regions."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import (
    AmbientState,
    Recorder,
    assert_equivalent,
    assert_same,
)
from conformance.observe.lifetimes import DataStorages
from conformance.testing import both_variants, clause, reached

# ---------------------------------------------------------------------- random trees of regions

_Function = Callable[[torch.Tensor], torch.Tensor]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(0.5).sin_()


def _in_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = x.cos()
    return x * factor


_STEPS: dict[str, _Function] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "shift": lambda x: x + 1,
    "fork": lambda x: x * x.cos(),
    "in-place": _in_place,
    "reshape": lambda x: x.view(2, -1).t().reshape(-1),
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "noise": lambda x: x * torch.rand_like(x),
    "no_grad": _in_no_grad,
}
_WEIGHT = "weight"
_RANDOM = ("dropout", "noise")
_names = st.sampled_from([*sorted(_STEPS), _WEIGHT])


@dataclass(frozen=True)
class _Tree:
    """A region: steps by name, and regions inside it, in order."""

    reentrant: bool
    early_stop: bool
    parts: tuple[Any, ...]

    @property
    def depth(self) -> int:
        return 1 + max((p.depth for p in self.parts if isinstance(p, _Tree)), default=0)

    def weights(self) -> int:
        """Number of parameters that the region and those inside it use."""
        return sum(
            part.weights() if isinstance(part, _Tree) else part == _WEIGHT for part in self.parts
        )


@st.composite
def _trees(
    draw: st.DrawFn,
    variants: tuple[bool, ...],
    *,
    at_least: int = 2,
    names: st.SearchStrategy[str] = _names,
    fewest: int = 0,
) -> _Tree:
    """Trees of ``at_least`` to 4 levels; a level may have a second region, beside its first."""
    depth = draw(st.integers(at_least, 4))
    tree: _Tree | None = None
    for _ in range(depth):
        parts: list[Any] = draw(st.lists(names, min_size=fewest, max_size=2))
        if tree is not None:
            parts.append(tree)
            if draw(st.booleans()):
                parts += draw(st.lists(names, max_size=1))
                parts.append(draw(_leaves(variants, names)))
        parts += draw(st.lists(names, min_size=1 if tree is None else 0, max_size=2))
        tree = _Tree(draw(st.sampled_from(variants)), draw(st.booleans()), tuple(parts))
    assert tree is not None
    return tree


def _leaves(variants: tuple[bool, ...], names: st.SearchStrategy[str]) -> st.SearchStrategy[_Tree]:
    parts = st.lists(names, min_size=1, max_size=3).map(tuple)
    return st.builds(_Tree, st.sampled_from(variants), st.booleans(), parts)


class _Region:
    """The function of one region of a tree. Every weight is used in one place only, so that no
    order of additions into a gradient is left open."""

    def __init__(
        self,
        tree: _Tree,
        wrap: Callable[..., Any],
        weights: Iterator[torch.Tensor],
        regions: list[_Region],
        level: int = 1,
    ) -> None:
        self.tree = tree
        self.level = level
        self.runs = 0
        self.ends = 0
        regions.append(self)
        self.stages: list[_Function] = []
        for part in tree.parts:
            if isinstance(part, _Tree):
                inner = _Region(part, wrap, weights, regions, level + 1)
                self.stages.append(functools.partial(wrap, inner))
            elif part == _WEIGHT:
                self.stages.append(functools.partial(torch.mul, next(weights)))
            else:
                self.stages.append(_STEPS[part])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for stage in self.stages:
            x = stage(x)
        self.ends += 1
        return x


_Backward = Callable[[torch.Tensor, list[torch.Tensor]], Any]


def _backward(output: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    output.sum().backward()


def _tree_program(
    tree: _Tree, backward: _Backward, regions: list[_Region] | None = None
) -> Callable[[Callable[..., Any], list[torch.Tensor]], Any]:
    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
        seen: list[_Region] = []
        root = _Region(tree, wrap, iter(leaves[1:]), seen)
        output = wrap(root, leaves[0])
        rest = backward(output, leaves)
        if regions is not None:
            regions[:] = seen
        return output.detach(), rest

    return program


def _stopping(ckpt: Candidate, early_stop: bool) -> dict[str, Any]:
    """The early stop option, for candidates that have it."""
    return {"early_stop": early_stop} if ckpt.has("set_checkpoint_early_stop") else {}


def _checkpointed(ckpt: Candidate) -> Callable[..., Any]:
    """A wrapper that checkpoints a region of a tree as the tree says."""

    def wrap(region: _Region, x: torch.Tensor) -> Any:
        tree = region.tree
        options = {} if tree.reentrant else _stopping(ckpt, tree.early_stop)
        return ckpt.checkpoint(region, x, use_reentrant=tree.reentrant, **options)

    return wrap


def _assert_tree(ckpt: Candidate, tree: _Tree, backward: _Backward = _backward) -> list[_Region]:
    """Fail unless the tree does through the candidate what it does plainly. Returns the regions
    of the checkpointed run."""
    regions: list[_Region] = []

    def make_leaves() -> list[torch.Tensor]:
        return [torch.rand(4).requires_grad_() for _ in range(1 + tree.weights())]

    reached()
    with warnings.catch_warnings():
        # Inside a reentrant region, forward runs without grad, and some implementations remark it.
        warnings.simplefilter("ignore")
        assert_equivalent(_tree_program(tree, backward, regions), make_leaves, _checkpointed(ckpt))
    return regions


@clause("nesting/nonreentrant")
@given(tree=_trees((False,)))
def test_nonreentrant_in_nonreentrant(ckpt: Candidate, tree: _Tree) -> None:
    """Do non-reentrant regions inside non-reentrant regions give the plain run's results?"""
    _assert_tree(ckpt, tree)


@clause("nesting/nonreentrant")
@given(tree=_trees((False,)))
def test_grad_through_nested_regions(ckpt: Candidate, tree: _Tree) -> None:
    """Does torch.autograd.grad through nested non-reentrant regions give the plain gradients?"""
    _assert_tree(
        ckpt,
        tree,
        lambda output, leaves: torch.autograd.grad(output.sum(), leaves, allow_unused=True),
    )


@clause("nesting/reentrant")
@given(tree=_trees((True,)))
def test_reentrant_in_reentrant(ckpt: Candidate, tree: _Tree) -> None:
    """Do reentrant regions inside reentrant regions give the plain run's results?"""
    _assert_tree(ckpt, tree)


@clause("nesting/mixed")
@given(tree=_trees((False, True)))
def test_variants_mixed(ckpt: Candidate, tree: _Tree) -> None:
    """Do regions of both variants, inside each other in any way, give the plain results?"""
    _assert_tree(ckpt, tree)


@clause("nesting/mixed")
@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("depth", [2, 4, 6])
def test_variants_in_turn(ckpt: Candidate, outermost: bool, depth: int) -> None:
    """Do the variants in turn, level by level, give the plain results?"""
    parts: tuple[Any, ...] = ("sin", "weight")
    for level in reversed(range(depth)):
        parts = ("weight", _Tree(outermost == (level % 2 == 0), True, parts), "tanh")
    (tree,) = (part for part in parts if isinstance(part, _Tree))
    _assert_tree(ckpt, tree)


@clause("nesting/randomness")
@both_variants
@given(data=st.data())
def test_random_operators_at_every_level(
    ckpt: Candidate, use_reentrant: bool, data: st.DataObject
) -> None:
    """Do dropout and noise at every level of nested regions repeat forward's numbers, and is the
    stream afterwards where the plain run leaves it?"""
    names = st.sampled_from([*_RANDOM, "sin", "shift"])

    def has_random(tree: _Tree) -> bool:
        own = any(part in _RANDOM for part in tree.parts if isinstance(part, str))
        return own and all(has_random(part) for part in tree.parts if isinstance(part, _Tree))

    tree = data.draw(_trees((use_reentrant,), names=names, fewest=1))
    _assert_tree(ckpt, _with_randomness(tree))
    assert has_random(_with_randomness(tree))


def _with_randomness(tree: _Tree) -> _Tree:
    parts = [_with_randomness(part) if isinstance(part, _Tree) else part for part in tree.parts]
    return _Tree(tree.reentrant, tree.early_stop, ("dropout", *parts, "noise"))


# ---------------------------------------------------------------------- backward in other ways


@clause("nesting/several-backwards")
@given(tree=_trees((False,)), passes=st.integers(2, 3))
def test_retained_graph(ckpt: Candidate, tree: _Tree, passes: int) -> None:
    """Do several backward passes over a retained graph of nested regions give the plain sum?"""

    def backward(output: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        for _ in range(passes):
            output.sum().backward(retain_graph=True)

    _assert_tree(ckpt, tree, backward)


@clause("nesting/several-backwards")
@both_variants
def test_second_pass_needs_a_retained_graph(ckpt: Candidate, use_reentrant: bool) -> None:
    """Is a second backward pass over a graph that was not retained an error, as without
    checkpointing?"""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ckpt.checkpoint(inner, x.cos(), use_reentrant=use_reentrant)
        return y.tanh()

    x = torch.rand(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = ckpt.checkpoint(outer, x, use_reentrant=use_reentrant).sum()
        output.backward()
    assert x.grad is not None
    first = x.grad.clone()
    reached()
    with pytest.raises(RuntimeError):
        output.backward()
    assert_same(x.grad, first, "gradient after the refused pass")


@clause("nesting/double-backward")
@given(tree=_trees((False,)), order=st.integers(2, 3))
def test_higher_derivatives(ckpt: Candidate, tree: _Tree, order: int) -> None:
    """Are higher derivatives through nested non-reentrant regions those of the plain run?"""

    def backward(output: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
        value, found = output.sum(), []
        for _ in range(order):
            if not value.requires_grad:
                break
            gradients = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
            found.append([None if g is None else g.detach().clone() for g in gradients])
            value = sum((g.pow(2).sum() for g in gradients if g is not None), torch.zeros(()))
        return found

    _assert_tree(ckpt, tree, backward)


@clause("nesting/backward-inside")
@given(
    levels=st.integers(1, 2),
    create_graph=st.booleans(),
    early_stop=st.booleans(),
    whole=st.booleans(),
)
def test_backward_of_an_inner_region_inside_an_outer_one(
    ckpt: Candidate, levels: int, create_graph: bool, early_stop: bool, whole: bool
) -> None:
    """Can an outer region's function run backward through a region inside it, and return what
    that gives?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        def innermost(x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp()

        def penalty(function: _Function, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = wrap(function, x * 2)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
            return (slope * x).cos() + y if whole else (slope * x).cos()

        function: _Function = innermost
        for _ in range(levels):
            function = functools.partial(penalty, function)
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result.detach()

    reached()
    assert_equivalent(
        program,
        lambda: [torch.rand(4).requires_grad_()],
        lambda f, x: ckpt.checkpoint(f, x, use_reentrant=False, **_stopping(ckpt, early_stop)),
    )


# ---------------------------------------------------------------------- how often


@clause("nesting/runs")
@both_variants
@pytest.mark.parametrize("depth", [1, 2, 4, 6])
def test_runs_of_a_tower(ckpt: Candidate, use_reentrant: bool, depth: int) -> None:
    """Does the number of runs of a tower of regions grow with the level, and not faster?"""
    parts: tuple[Any, ...] = ("sin", "tanh")
    for _ in range(depth):
        parts = ("sin", _Tree(use_reentrant, False, parts), "tanh")
    (tree,) = (part for part in parts if isinstance(part, _Tree))
    regions = _assert_tree(ckpt, tree)
    assert all(region.runs > 1 for region in regions), (
        f"expected every region to be run again, observed {[r.runs for r in regions]} runs"
    )
    _check_runs(regions)


@clause("nesting/runs")
@both_variants
@given(data=st.data())
def test_runs_of_regions_in_a_tree(
    ckpt: Candidate, use_reentrant: bool, data: st.DataObject
) -> None:
    """Does the bound hold for any tree, of one variant or of both?"""
    _check_runs(_assert_tree(ckpt, data.draw(_trees((False, use_reentrant)))))


def _check_runs(regions: list[_Region]) -> None:
    observed = [(region.level, region.runs) for region in regions]
    for level, runs in observed:
        assert runs <= level + 1, (
            f"expected at most {level + 1} runs of a region at level {level}, observed {runs}; "
            f"(level, runs) of all: {observed}"
        )


@clause("nesting/early-stop")
@given(stops=st.lists(st.booleans(), min_size=2, max_size=5), shifts=st.integers(1, 2))
def test_early_stop_at_every_level(ckpt: Candidate, stops: list[bool], shifts: int) -> None:
    """Does each level leave its tail out, or not, as its own setting says?"""
    parts: tuple[Any, ...] = ("sin", "tanh", *["shift"] * shifts)
    for stop in reversed(stops):
        parts = ("sin", _Tree(False, stop, parts), "tanh", *["shift"] * shifts)
    (tree,) = (part for part in parts if isinstance(part, _Tree))
    regions = _assert_tree(ckpt, tree)
    for region in regions:
        assert region.runs >= 2, f"expected level {region.level} to be recomputed"
        if region.tree.early_stop:
            assert region.ends < region.runs, (
                f"level {region.level}: expected its own recomputation to stop early, observed "
                f"{region.ends} ends of {region.runs} runs"
            )
            assert region.ends <= region.level, (
                f"level {region.level}: expected its end to be reached in forward and in each "
                f"recomputation of the {region.level - 1} around it, observed {region.ends}"
            )
        else:
            assert region.ends == region.runs, (
                f"level {region.level}: expected every run to come to its end, observed "
                f"{region.ends} of {region.runs}"
            )


@clause("nesting/early-stop")
@given(setting=st.booleans(), depth=st.integers(2, 4))
def test_context_manager_reaches_inner_regions(ckpt: Candidate, setting: bool, depth: int) -> None:
    """Do regions inside regions follow a context manager that surrounds forward only?"""
    regions: list[Recorder] = []

    def tower(level: int) -> _Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            if level < depth:
                x = ckpt.checkpoint(regions[level], x, use_reentrant=False, early_stop=not setting)
            return x.exp() + 1

        return function

    regions += [Recorder(tower(level)) for level in range(1, depth + 1)]
    x = torch.rand(3, requires_grad=True)
    with ckpt.set_checkpoint_early_stop(setting):
        output = ckpt.checkpoint(regions[0], x, use_reentrant=False, early_stop=not setting)
    output.sum().backward()
    reached()
    for level, region in enumerate(regions, 1):
        assert region.count >= 2, f"expected level {level} to be recomputed"
        stopped = region.count - region.finished
        if setting:
            assert stopped >= 1, f"level {level}: expected its recomputation to stop early"
        else:
            assert stopped == 0, f"level {level}: expected every run to come to its end"


@clause("nesting/inner-not-entered")
@given(depth=st.integers(2, 5), shifts=st.integers(0, 2))
def test_inner_region_behind_the_last_needed_tensor(
    ckpt: Candidate, depth: int, shifts: int
) -> None:
    """Is each region run only twice where nothing behind the region inside it is needed?"""
    parts: tuple[Any, ...] = ("sin", "tanh", "sin")
    for _ in range(depth):
        parts = ("sin", _Tree(False, True, parts), *["shift"] * shifts)
    (tree,) = (part for part in parts if isinstance(part, _Tree))
    regions = _assert_tree(ckpt, tree)
    observed = [region.runs for region in regions]
    assert all(runs >= 2 for runs in observed), f"expected recomputations, observed {observed}"
    assert all(runs == 2 for runs in observed), (
        f"expected two runs of each region, observed {observed} from the outermost inwards"
    )


# ---------------------------------------------------------------------- memory


@clause("nesting/forward-memory")
@both_variants
@given(
    inner=st.integers(1, 4), steps=st.integers(2, 5), same=st.booleans(), inside_out=st.booleans()
)
def test_nothing_inside_is_kept_after_forward(
    ckpt: Candidate, use_reentrant: bool, inner: int, steps: int, same: bool, inside_out: bool
) -> None:
    """Is nothing alive after forward but the result, whatever the regions inside have made?"""
    variants = [use_reentrant, use_reentrant if same else False]
    if inside_out:
        variants.reverse()
    function = _chain(ckpt, inner, steps, variants[1])
    x = torch.rand(64, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings(), DataStorages() as live:
        warnings.simplefilter("ignore")
        output = ckpt.checkpoint(function, x, use_reentrant=variants[0])
        if live.bytes() > output.nbytes:
            gc.collect()
        alive = live.bytes() // output.nbytes
        output.sum().backward()
    assert x.grad is not None
    reached()
    assert alive == 1, (
        f"{inner} inner regions of {steps} steps: expected the result alone, observed storages of "
        f"{alive} times its size"
    )


def _chain(
    ckpt: Candidate, inner: int, steps: int, use_reentrant: bool, wrapped: bool = True
) -> _Function:
    """A function that calls ``inner`` regions of ``steps`` steps one after another."""

    def segment(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            x = x.sin()
        return x

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(inner):
            x = ckpt.checkpoint(segment, x, use_reentrant=use_reentrant) if wrapped else segment(x)
        return x

    return function


@clause("nesting/backward-memory")
@pytest.mark.parametrize("same", [True, False], ids=["in the same", "in nonreentrant"])
@pytest.mark.parametrize("count", [6, 9])
@both_variants
def test_inner_intermediates_are_not_kept_in_recomputation(
    ckpt: Candidate, use_reentrant: bool, same: bool, count: int
) -> None:
    """Does recomputing an outer region keep the inputs of the regions inside it instead of their
    intermediates?"""
    outer_variant = use_reentrant if same else False
    peaks = []
    for wrapped in (False, True):
        function = _chain(ckpt, count, count, use_reentrant, wrapped)
        x = torch.rand(64, dtype=torch.float64, requires_grad=True)
        with warnings.catch_warnings(), DataStorages() as live:
            warnings.simplefilter("ignore")
            output = ckpt.checkpoint(function, x, use_reentrant=outer_variant)
            live.peak = 0
            output.backward(torch.ones_like(x))
            peaks.append(live.peak // output.nbytes)
        assert x.grad is not None
    reached()
    # Without inner regions all count² intermediates are needed at once. With them: count inputs,
    # count intermediates of the one that is being recomputed, and a few gradients.
    assert peaks[0] >= count**2, "the comparison was meant to need every intermediate at once"
    limit = 3 * count + 4
    assert peaks[1] <= limit, (
        f"{count} inner regions of {count} steps: expected at most {limit} tensors alive at once "
        f"during backward, observed {peaks[1]} ({peaks[0]} without inner regions)"
    )


@clause("nesting/released")
@both_variants
@given(data=st.data())
def test_everything_is_released_after_backward(
    ckpt: Candidate, use_reentrant: bool, data: st.DataObject
) -> None:
    """Is nothing alive after backward but result and gradient?"""
    names = st.sampled_from(["sin", "tanh", "fork", "shift"])
    tree = data.draw(_trees((False, use_reentrant), names=names))
    x = torch.rand(64, dtype=torch.float64, requires_grad=True)
    wrap = _checkpointed(ckpt)
    with warnings.catch_warnings(), DataStorages() as live:
        warnings.simplefilter("ignore")
        output = wrap(_Region(tree, wrap, iter(()), []), x)
        output.sum().backward()
        assert x.grad is not None
        reached()
        if live.bytes() > 2 * x.nbytes:
            gc.collect()
        alive = live.bytes() / x.nbytes
    assert alive <= 2, (
        f"expected result and gradient alone, observed storages of {alive:.1f} times their size"
    )


# ---------------------------------------------------------------------- options of each level


class _Needs(torch.autograd.Function):
    """The identity, whose backward formula needs ``other``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.saved_tensors
        return grads[0], None


@clause("nesting/determinism")
@given(
    checks=st.lists(st.booleans(), min_size=2, max_size=4),
    faulty=st.integers(1, 4),
    early_stop=st.booleans(),
)
@example(checks=[False, True], faulty=2, early_stop=True)
@example(checks=[True, False], faulty=2, early_stop=True)
@example(checks=[True, False, True], faulty=1, early_stop=False)
def test_mismatch_at_any_level_is_reported(
    ckpt: Candidate, checks: list[bool], faulty: int, early_stop: bool
) -> None:
    """Is a function that does not repeat itself an error at whatever level it is, exactly if that
    level's own check is on?"""
    depth = len(checks)
    faulty = min(faulty, depth)
    runs = [0] * (depth + 1)

    def tower(level: int, wrong: int) -> _Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            runs[level] += 1
            y: torch.Tensor = _Needs.apply(
                x.sin(), torch.zeros(runs[level] if level == wrong else 1)
            )
            if level < depth:
                y = region(level + 1, wrong)(y)
            return y.exp()

        return function

    def region(level: int, wrong: int) -> _Function:
        return functools.partial(
            ckpt.checkpoint,
            tower(level, wrong),
            use_reentrant=False,
            determinism_check="default" if checks[level - 1] else "none",
            early_stop=early_stop,
        )

    region(1, 0)(torch.rand(3, requires_grad=True)).sum().backward()
    assert min(runs[1:]) >= 2, f"expected every level to be recomputed, observed {runs[1:]} runs"
    runs[:] = [0] * (depth + 1)
    error = None
    try:
        region(1, faulty)(torch.rand(3, requires_grad=True)).sum().backward()
    except RuntimeError as raised:
        error = raised
    assert runs[faulty] >= 2
    reached()
    assert (error is not None) == checks[faulty - 1], (
        f"level {faulty} of {depth} does not repeat itself, the checks are {checks} from the "
        f"outermost inwards; observed {error!r}"
    )


@clause("nesting/own-randomness")
@given(preserved=st.lists(st.booleans(), min_size=2, max_size=4))
@example(preserved=[False, True])
@example(preserved=[True, False, True])
def test_random_state_is_preserved_level_by_level(ckpt: Candidate, preserved: list[bool]) -> None:
    """Does each level's own preserve_rng_state=True make its random numbers repeat, whatever the
    levels around and inside it say?"""
    drawn: list[list[torch.Tensor]] = [[] for _ in preserved]

    def tower(level: int) -> _Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            drawn[level].append(torch.rand(3))
            x = (x * drawn[level][-1]).sin()
            if level + 1 < len(preserved):
                x = region(level + 1)(x)
            return x.exp()

        return function

    def region(level: int) -> _Function:
        return functools.partial(
            ckpt.checkpoint,
            tower(level),
            use_reentrant=False,
            preserve_rng_state=preserved[level],
        )

    x = torch.rand(3, requires_grad=True)
    region(0)(x).sum().backward()
    reached()
    for level, numbers in enumerate(drawn):
        assert len(numbers) >= 2, f"expected level {level + 1} to be recomputed"
        if preserved[level]:
            different = len({tuple(number.tolist()) for number in numbers})
            assert different < len(numbers), (
                f"level {level + 1} of {preserved}: expected its recomputation to repeat the "
                f"numbers of an earlier run, observed {different} draws in {len(numbers)} runs"
            )
    if preserved[0]:
        for number in drawn[0][1:]:
            assert_same(number, drawn[0][0], "random numbers of the outermost region")
    if all(preserved):
        for level, numbers in enumerate(drawn):
            for number in numbers[1:]:
                assert_same(number, numbers[0], f"random numbers of level {level + 1}")


@clause("nesting/own-contexts")
@given(depth=st.integers(2, 4))
def test_contexts_of_each_level(ckpt: Candidate, depth: int) -> None:
    """Does each level's context_fn surround the runs of its own function: the first context in a
    forward run, the second in its recomputation?"""
    active: list[tuple[int, str]] = []
    seen: list[tuple[int, str]] = []

    class Named:
        def __init__(self, level: int, name: str) -> None:
            self.value = (level, name)

        def __enter__(self) -> None:
            active.append(self.value)

        def __exit__(self, *_: object) -> None:
            active.remove(self.value)

    def tower(level: int) -> _Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            own = [name for of, name in active if of == level]
            assert own, f"level {level} runs outside of both of its contexts"
            seen.append((level, own[-1]))
            x = x.sin()
            if level < depth:
                x = region(level + 1)(x)
            return x.exp()

        return function

    def region(level: int) -> _Function:
        contexts = lambda: (Named(level, "forward"), Named(level, "recomputation"))
        return functools.partial(
            ckpt.checkpoint, tower(level), use_reentrant=False, context_fn=contexts
        )

    x = torch.rand(3, requires_grad=True)
    output = region(1)(x).sum()
    assert seen == [(level, "forward") for level in range(1, depth + 1)], (
        f"expected the first context at every level in forward, observed {seen}"
    )
    assert not active, f"expected every context to be left after forward, observed {active}"
    seen.clear()
    output.backward()
    reached()
    for level in range(1, depth + 1):
        recomputations = seen.count((level, "recomputation"))
        assert recomputations >= 1, (
            f"level {level}: expected a run under its second context, observed {seen}"
        )
    assert not active, f"expected every context to be left after backward, observed {active}"


@clause("nesting/selective")
@given(
    outer=st.sampled_from(["plain", "mm", "sin", "nothing"]),
    inner=st.sampled_from(["plain", "mm", "sin", "nothing"]),
    depth=st.integers(2, 3),
)
def test_selective_regions_inside_each_other(
    ckpt: Candidate, outer: str, inner: str, depth: int
) -> None:
    """Are the results the plain ones where levels keep different operators, or none?"""
    operators = {
        "mm": [torch.ops.aten.mm.default],
        "sin": [torch.ops.aten.sin.default],
        "nothing": [],
    }

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        def tower(level: int, x: torch.Tensor) -> torch.Tensor:
            x = x.sin() @ x
            if level + 1 < depth:
                x = wrap(functools.partial(tower, level + 1), x)
            return (x @ x).sin().exp()

        result: torch.Tensor = wrap(functools.partial(tower, 0), leaves[0])
        result.sum().backward()
        return result.detach()

    def wrap(function: Any, x: torch.Tensor) -> Any:
        (level,) = function.args
        choice = outer if level == 0 else inner
        options: dict[str, Any] = {}
        if choice != "plain":
            options["context_fn"] = functools.partial(
                ckpt.create_selective_checkpoint_contexts, operators[choice]
            )
        return ckpt.checkpoint(function, x, use_reentrant=False, **options)

    reached()
    assert_equivalent(program, lambda: [torch.rand(3, 3).div(4).requires_grad_()], wrap)


# ---------------------------------------------------------------------- what goes in and out


@clause("nesting/shared-tensors")
@given(siblings=st.integers(1, 4), through_argument=st.booleans(), early_stop=st.booleans())
def test_outer_intermediate_used_in_several_inner_regions(
    ckpt: Candidate, siblings: int, through_argument: bool, early_stop: bool
) -> None:
    """Can inner regions side by side use one tensor that the outer region made, handed over or
    through a closure, and one parameter?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        x, weight = leaves

        def outer(x: torch.Tensor) -> torch.Tensor:
            shared = x.sin()
            total = x
            for index in range(siblings):
                if through_argument:
                    total = wrap(lambda t, s, n=index: (t * s * weight).cos() + n, total, shared)
                else:
                    total = wrap(lambda t, n=index: (t * shared * weight).cos() + n, total)
            return total * shared

        result: torch.Tensor = wrap(outer, x)
        result.sum().backward()
        return result.detach()

    reached()
    assert_equivalent(
        program,
        lambda: [torch.rand(4).requires_grad_() for _ in range(2)],
        lambda f, *args: ckpt.checkpoint(
            f, *args, use_reentrant=False, **_stopping(ckpt, early_stop)
        ),
    )


@clause("nesting/shared-tensors")
@given(used=st.sets(st.integers(0, 2), min_size=1), swapped=st.booleans())
def test_outputs_of_an_inner_region(ckpt: Candidate, used: set[int], swapped: bool) -> None:
    """Can the outer region use some of an inner region's outputs and hand others on?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
        def inner(pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
            one, other = pair
            return {"a": one.sin(), "b": [other.exp(), (one * other).tanh()], "n": 3}

        def outer(x: torch.Tensor) -> list[torch.Tensor]:
            pair = (x.cos(), x) if swapped else (x, x.cos())
            result = wrap(inner, pair)
            a, (b, c) = result["a"], result["b"]
            return [a * result["n"], b.sin(), c]

        results = wrap(outer, leaves[0])
        torch.stack([results[index].sum() for index in sorted(used)]).sum().backward()
        return [result.detach() for result in results]

    reached()
    assert_equivalent(
        program,
        lambda: [torch.rand(4).requires_grad_()],
        lambda f, x: ckpt.checkpoint(f, x, use_reentrant=False),
    )


@clause("nesting/recursion")
@given(depth=st.integers(1, 5), early_stop=st.booleans(), branches=st.integers(1, 2))
def test_function_that_checkpoints_itself(
    ckpt: Candidate, depth: int, early_stop: bool, branches: int
) -> None:
    """Can one function be the region at every level?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        def function(x: torch.Tensor, levels: int) -> torch.Tensor:
            x = x.sin()
            for _ in range(branches if levels in (1, 2) else 1):
                if levels > 1:
                    x = wrap(function, x, levels - 1)
            return torch.dropout(x, 0.5, True).exp().sin()

        result: torch.Tensor = wrap(function, leaves[0], depth)
        result.sum().backward()
        return result.detach()

    reached()
    assert_equivalent(
        program,
        lambda: [torch.rand(4).requires_grad_()],
        lambda f, x, n: ckpt.checkpoint(
            f, x, n, use_reentrant=False, **_stopping(ckpt, early_stop)
        ),
    )


class _Block(torch.nn.Module):
    """A module that checkpoints its first part, to be checkpointed itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.second = torch.nn.Linear(4, 4)
        self.wrap: Callable[..., Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.wrap is not None
        y = self.wrap(self.first, x)
        return torch.dropout(self.second(y).tanh(), 0.25, True) + x


@clause("nesting/modules")
@given(blocks=st.integers(1, 3), groups=st.booleans())
@both_variants
def test_checkpointed_blocks_of_checkpointed_modules(
    ckpt: Candidate, use_reentrant: bool, blocks: int, groups: bool
) -> None:
    """Do parameters of modules inside nested regions get the plain gradients?"""
    torch.manual_seed(7)
    blocks_of_model = [_Block() for _ in range(blocks)]
    model = torch.nn.ModuleList(blocks_of_model)

    def run(wrap: Callable[..., Any]) -> list[torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(8)
        x = torch.rand(2, 4, requires_grad=True)

        def everything(x: torch.Tensor) -> torch.Tensor:
            for block in blocks_of_model:
                block.wrap = wrap
                x = wrap(block, x)
            return x

        (wrap(everything, x) if groups else everything(x)).sum().backward()
        return [x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]

    expected = run(lambda f, x: f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observed = run(lambda f, x: ckpt.checkpoint(f, x, use_reentrant=use_reentrant))
    reached()
    assert_same(observed, expected, "gradients of the input and the parameters")


@clause("nesting/no-grad")
@given(steps=st.integers(1, 3), early_stop=st.booleans())
@both_variants
def test_region_inside_a_no_grad_part(
    ckpt: Candidate, use_reentrant: bool, steps: int, early_stop: bool
) -> None:
    """Does a region in a no_grad part of another region act as the plain function there?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            for _ in range(steps):
                x = torch.dropout(x.sin(), 0.5, True)
            return x

        def outer(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                factor: torch.Tensor = wrap(inner, x)
            assert not factor.requires_grad
            return (x * factor).exp()

        result: torch.Tensor = wrap(outer, leaves[0])
        result.sum().backward()
        return result.detach()

    def wrap(function: Any, x: torch.Tensor) -> Any:
        if function.__name__ == "outer":
            return ckpt.checkpoint(function, x, use_reentrant=False, **_stopping(ckpt, early_stop))
        return ckpt.checkpoint(function, x, use_reentrant=use_reentrant)

    reached()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equivalent(program, lambda: [torch.rand(4).requires_grad_()], wrap)


@clause("nesting/sequential")
@given(segments=st.integers(1, 3), layers=st.integers(3, 4), outside=st.booleans())
@both_variants
def test_sequential_and_regions_inside_each_other(
    ckpt: Candidate, use_reentrant: bool, segments: int, layers: int, outside: bool
) -> None:
    """Does checkpoint_sequential work inside a region, and with regions as its functions?"""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x.sin().exp(), 0.25, True)

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(plain, leaves[0])
        result.sum().backward()
        return result.detach()

    def plain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = layer(x)
        return x

    def sequential(functions: list[Any], x: torch.Tensor) -> Any:
        return ckpt.checkpoint_sequential(functions, segments, x, use_reentrant=use_reentrant)

    def checkpointed(_: _Function, x: torch.Tensor) -> Any:
        if outside:
            region = functools.partial(ckpt.checkpoint, layer, use_reentrant=False)
            return sequential([region] * layers, x)
        return ckpt.checkpoint(sequential, [layer] * layers, x, use_reentrant=False)

    reached()
    assert_equivalent(program, lambda: [torch.rand(4).requires_grad_()], checkpointed)


@clause("nesting/decorated")
@given(depth=st.integers(2, 4), early_stop=st.booleans())
def test_decorated_functions_that_call_each_other(
    ckpt: Candidate, depth: int, early_stop: bool
) -> None:
    """Can decorated functions call decorated functions?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        def enclose(function: _Function) -> _Function:
            return lambda x: wrap(function, x.cos()).tanh()

        function: _Function = lambda x: torch.dropout(x.sin(), 0.5, True).exp()
        for _ in range(depth):
            function = enclose(function)
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result.detach()

    decorate = ckpt.checkpoint(use_reentrant=False, **_stopping(ckpt, early_stop))
    decorated: dict[_Function, _Function] = {}

    def wrap(function: _Function, x: torch.Tensor) -> Any:
        return decorated.setdefault(function, decorate(function))(x)

    reached()
    assert_equivalent(program, lambda: [torch.rand(4).requires_grad_()], wrap)


# ---------------------------------------------------------------------- exceptions


class _Planned(Exception):
    """Raised by a region's function in a chosen run."""


@clause("nesting/exceptions")
@given(depth=st.integers(2, 4), data=st.data())
@both_variants
def test_exception_at_any_level_and_run(
    ckpt: Candidate, use_reentrant: bool, depth: int, data: st.DataObject
) -> None:
    """Does an exception of a function at any level, in forward or in any recomputation, reach the
    caller as it is, and do the same regions work afterwards?"""
    level = data.draw(st.integers(1, depth))
    run = data.draw(st.integers(1, level + 1))
    early_stop = data.draw(st.booleans())
    options: dict[str, Any] = {} if use_reentrant else _stopping(ckpt, early_stop)
    counts = [0] * (depth + 1)
    armed = True

    def tower(at: int) -> _Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            counts[at] += 1
            if armed and at == level and counts[at] == run:
                raise _Planned(at)
            x = torch.dropout(x, 0.5, True).sin()
            if at < depth:
                x = ckpt.checkpoint(tower(at + 1), x, use_reentrant=use_reentrant, **options)
            return x.exp()

        return function

    def whole() -> torch.Tensor:
        torch.manual_seed(5)
        x = torch.linspace(0.1, 0.9, 4).requires_grad_()
        output = ckpt.checkpoint(tower(1), x, use_reentrant=use_reentrant, **options)
        output.sum().backward()
        assert x.grad is not None
        return x.grad

    state = AmbientState.capture()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = None
        try:
            whole()
        except _Planned as raised:
            error = raised
        happened = counts[level] >= run
        changed = state.difference(AmbientState.capture(), ignore=("rng", "python_rng"))
        armed = False
        counts[:] = [0] * (depth + 1)
        again = whole()
    assert (error is not None) == happened, (
        f"level {level} raised in its run {run}: expected its exception, observed {error!r}"
    )
    if happened:
        reached()
        assert error is not None
        assert error.args == (level,)
    assert not changed, f"expected the state from before, observed changes {changed}"
    assert_same(again, _plain_tower(depth), "gradient of the next run")


def _plain_tower(depth: int) -> torch.Tensor:
    torch.manual_seed(5)
    x = torch.linspace(0.1, 0.9, 4).requires_grad_()
    y = x
    for _ in range(depth):
        y = torch.dropout(y, 0.5, True).sin()
    for _ in range(depth):
        y = y.exp()
    y.sum().backward()
    assert x.grad is not None
    return x.grad
