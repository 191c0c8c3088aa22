"""Chapter 5: ambient state."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.candidate import Candidate
from conformance.observe import (
    AmbientState,
    Recorder,
    assert_equivalent,
    assert_same,
    caught_warnings,
)
from conformance.observe.compare import Wrap, plain
from conformance.testing import both_variants, clause, reached

# ---------------------------------------------------------------------------- random numbers

_SIZE = 8

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(_SIZE),
    "randn": lambda: torch.randn(_SIZE),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(_SIZE), 0.5),
    "bernoulli": lambda: torch.full((_SIZE,), 0.5).bernoulli(),
    "randperm": lambda: torch.randperm(_SIZE).float(),
    "randint": lambda: torch.randint(1000, (_SIZE,)) / 1000,
    "normal_": lambda: torch.empty(_SIZE).normal_(),
    "multinomial": lambda: torch.multinomial(torch.ones(_SIZE), _SIZE).float(),
    "rand_like": lambda: torch.rand_like(torch.ones(_SIZE)),
    "float64": lambda: torch.rand(_SIZE, dtype=torch.float64).float(),
}

draw_names = st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=3)
variants = st.sampled_from([{}, {"preserve_rng_state": True}])
"""The two ways of asking for a replay."""


class RandomRegion:
    """A function that draws, keeps what it drew per run, and needs every draw for its backward.

    ``tail`` numbers are drawn behind the last saved tensor; with early stop only forward does.
    ``seed`` makes the function seed the generator itself in between.
    """

    def __init__(self, names: Sequence[str], *, tail: int = 0, seed: int | None = None) -> None:
        self.names = names
        self.tail = tail
        self.seed = seed
        self.runs: list[list[torch.Tensor]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the function."""
        drawn: list[torch.Tensor] = []
        self.runs.append(drawn)
        for name in self.names:
            drawn.append(DRAWS[name]())
            x = (x * drawn[-1]).sin()
            if self.seed is not None:
                torch.manual_seed(self.seed)
        if self.tail:
            x = x + torch.rand(self.tail).sum()
        return x

    def assert_replayed(self, at_least: int = 1) -> None:
        """Fail unless every run after the first drew what the first one drew."""
        recomputed = self.runs[1:]
        assert len(recomputed) >= at_least, (
            f"expected at least {at_least} recomputations, observed {len(recomputed)}"
        )
        reached()
        for number, drawn in enumerate(recomputed, 1):
            for name, got, wanted in zip(self.names, drawn, self.runs[0], strict=False):
                assert_same(got, wanted, f"what recomputation {number} drew with {name}")


def _leaf(size: int = _SIZE) -> torch.Tensor:
    return torch.linspace(0.1, 1.0, size).requires_grad_()


def _disturb(seed: int | None, draws: int) -> None:
    """What the surrounding program does with the generator."""
    if seed is not None:
        torch.manual_seed(seed)
    if draws:
        torch.rand(draws)


surroundings = st.builds(
    partial,
    st.just(_disturb),
    st.one_of(st.none(), st.integers(0, 50)),
    st.integers(0, 30),
)


@clause("rng/replayed-by-default")
@both_variants
@given(names=draw_names, between=surroundings)
def test_default_replays_forward(
    ckpt: Candidate, use_reentrant: bool, names: list[str], between: Callable[[], None]
) -> None:
    """Does a recomputation draw forward's numbers when the option is not given?"""
    region = RandomRegion(names)
    y = ckpt.checkpoint(region, _leaf(), use_reentrant=use_reentrant)
    between()
    y.sum().backward()
    region.assert_replayed()


@clause("rng/replayed-when-true")
@both_variants
@given(names=draw_names, between=surroundings)
def test_true_replays_forward(
    ckpt: Candidate, use_reentrant: bool, names: list[str], between: Callable[[], None]
) -> None:
    """Does a recomputation draw forward's numbers with preserve_rng_state=True?"""
    region = RandomRegion(names)
    y = ckpt.checkpoint(region, _leaf(), use_reentrant=use_reentrant, preserve_rng_state=True)
    between()
    y.sum().backward()
    region.assert_replayed()


@clause("rng/false-uses-current-stream")
@both_variants
@given(names=draw_names, seed=st.integers(0, 1000), before=st.integers(0, 20))
def test_false_draws_from_the_stream_at_backward(
    ckpt: Candidate, use_reentrant: bool, names: list[str], seed: int, before: int
) -> None:
    """With preserve_rng_state=False, is the generator used as it stands, and moved on?"""
    region = RandomRegion(names)
    x = _leaf()
    y = ckpt.checkpoint(region, x, use_reentrant=use_reentrant, preserve_rng_state=False)

    torch.manual_seed(seed)
    torch.rand(before)
    expected = RandomRegion(names)
    expected(x.detach())
    state = torch.get_rng_state()

    torch.manual_seed(seed)
    torch.rand(before)
    y.sum().backward()
    assert len(region.runs) == 2, f"expected one recomputation, observed {len(region.runs) - 1}"
    reached()
    for name, got, wanted in zip(names, region.runs[1], expected.runs[0], strict=True):
        assert_same(got, wanted, f"what the recomputation drew with {name}")
    assert torch.equal(torch.get_rng_state(), state), (
        "expected the generator moved on by the recomputation's draws, observed another state"
    )


@clause("rng/stream-undisturbed")
@both_variants
@given(
    regions=st.lists(
        st.builds(
            RandomRegion, draw_names, tail=st.integers(0, 3), seed=st.sampled_from([None, 3])
        ),
        min_size=1,
        max_size=3,
    ),
    options=variants,
    between=surroundings,
)
def test_backward_leaves_the_stream(
    ckpt: Candidate,
    use_reentrant: bool,
    regions: list[RandomRegion],
    options: dict[str, bool],
    between: Callable[[], None],
) -> None:
    """Is the generator in the same state before and after each backward?"""
    x = _leaf()
    regions = [RandomRegion(one.names, tail=one.tail, seed=one.seed) for one in regions]
    outputs = [ckpt.checkpoint(one, x, use_reentrant=use_reentrant, **options) for one in regions]
    for region, output in reversed(list(zip(regions, outputs, strict=True))):
        between()
        before = torch.get_rng_state()
        output.sum().backward()
        assert len(region.runs) == 2, "expected one recomputation"
        reached()
        assert torch.equal(torch.get_rng_state(), before), (
            "expected the generator's state from before backward, observed another"
        )


@clause("rng/stream-undisturbed")
@both_variants
@given(names=draw_names, count=st.integers(2, 4), seed=st.sampled_from([None, 3]))
def test_stream_between_recomputations(
    ckpt: Candidate, use_reentrant: bool, names: list[str], count: int, seed: int | None
) -> None:
    """Does a hook between two recomputations draw what it draws in a plain backward?"""

    def run(wrap: Wrap) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        drawn: list[torch.Tensor] = []
        regions = [RandomRegion(names, tail=1, seed=seed) for _ in range(count)]
        x = _leaf() * 1
        for region in regions:
            x = wrap(region, x)
            x.register_hook(lambda gradient: drawn.append(torch.rand(2)))  # type: ignore[no-untyped-call]
        torch.manual_seed(2)
        x.sum().backward()
        return drawn, sum(len(region.runs) for region in regions)

    expected, _ = run(plain)
    observed, runs = run(partial(ckpt.checkpoint, use_reentrant=use_reentrant))
    assert runs == 2 * count, f"expected {2 * count} runs, observed {runs}"
    reached()
    assert_same(observed, expected, "what the hooks drew during backward")


@clause("rng/forward-draws-as-plain")
@both_variants
@given(
    names=draw_names,
    tail=st.integers(0, 3),
    options=st.sampled_from([{}, {"preserve_rng_state": True}, {"preserve_rng_state": False}]),
    grad=st.booleans(),
    seed=st.integers(0, 50),
)
def test_forward_draws_and_leaves_the_stream_as_plain(
    ckpt: Candidate,
    use_reentrant: bool,
    names: list[str],
    tail: int,
    options: dict[str, bool],
    grad: bool,
    seed: int,
) -> None:
    """Does forward draw what a plain call draws, and leave the generator as it does?"""

    def run(wrap: Wrap) -> tuple[list[torch.Tensor], torch.Tensor]:
        region = RandomRegion(names, tail=tail)
        torch.manual_seed(seed)
        with torch.set_grad_enabled(grad):
            wrap(region, _leaf())
        return region.runs[0], torch.get_rng_state()

    drawn, state = run(plain)
    got, after = run(partial(ckpt.checkpoint, use_reentrant=use_reentrant, **options))
    reached()
    assert_same(got, drawn, "what forward drew")
    assert torch.equal(after, state), (
        "forward left the generator in another state than a plain call"
    )


@clause("rng/forward-draws-as-plain")
@both_variants
@given(draws=st.integers(1, 20), options=variants)
def test_forward_that_raises_leaves_the_stream_as_plain(
    ckpt: Candidate, use_reentrant: bool, draws: int, options: dict[str, bool]
) -> None:
    """After a forward that raised, does the generator stand where the plain call leaves it?"""

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand(draws)
        raise KeyError("forward")

    def run(wrap: Wrap) -> torch.Tensor:
        torch.manual_seed(7)
        with pytest.raises(KeyError):
            wrap(function, _leaf())
        return torch.get_rng_state()

    expected = run(plain)
    observed = run(partial(ckpt.checkpoint, use_reentrant=use_reentrant, **options))
    reached()
    assert torch.equal(observed, expected), (
        "after a forward that raised the generator is in another state than after a plain call"
    )


@clause("rng/per-region")
@both_variants
@given(
    names=draw_names,
    gaps=st.lists(surroundings, min_size=2, max_size=4),
    chain=st.booleans(),
    reverse=st.booleans(),
)
def test_each_region_replays_its_own_draws(
    ckpt: Candidate,
    use_reentrant: bool,
    names: list[str],
    gaps: list[Callable[[], None]],
    chain: bool,
    reverse: bool,
) -> None:
    """Do several regions of one graph each draw again what they drew themselves?"""
    regions = [RandomRegion(names) for _ in gaps]
    x = _leaf() * 1
    outputs: list[torch.Tensor] = []
    for gap, region in zip(gaps, regions, strict=True):
        gap()
        argument = outputs[-1] if chain and outputs else x
        outputs.append(ckpt.checkpoint(region, argument, use_reentrant=use_reentrant))
    if chain:
        outputs[-1].sum().backward()
    else:
        for output in reversed(outputs) if reverse else outputs:
            output.sum().backward(retain_graph=True)
    for region in regions:
        region.assert_replayed()


@clause("rng/option-per-call")
@both_variants
@given(flags=st.lists(st.sampled_from([None, True, False]), min_size=2, max_size=5))
def test_option_governs_its_own_call(
    ckpt: Candidate, use_reentrant: bool, flags: list[bool | None]
) -> None:
    """Does each region follow the option it was called with, whatever the others were?"""
    x = _leaf() * 1
    regions = [RandomRegion(["rand"]) for _ in flags]
    y = x
    for flag, region in zip(flags, regions, strict=True):
        options = {} if flag is None else {"preserve_rng_state": flag}
        y = ckpt.checkpoint(region, y, use_reentrant=use_reentrant, **options)
    y.sum().backward()
    for position, (flag, region) in enumerate(zip(flags, regions, strict=True)):
        assert len(region.runs) == 2, "expected one recomputation"
        same = torch.equal(region.runs[0][0], region.runs[1][0])
        assert same == (flag is not False), (
            f"region {position} of {flags}: expected "
            f"{'new numbers' if flag is False else 'the same numbers'} in recomputation"
        )
    reached()


@clause("rng/every-recomputation")
@both_variants
@given(names=draw_names, times=st.integers(2, 3), between=surroundings, options=variants)
def test_repeated_backward_replays_each_time(
    ckpt: Candidate,
    use_reentrant: bool,
    names: list[str],
    times: int,
    between: Callable[[], None],
    options: dict[str, bool],
) -> None:
    """Over a retained graph, does every recomputation draw forward's numbers?"""
    region = RandomRegion(names, tail=1)
    x = _leaf()
    y = ckpt.checkpoint(region, x, use_reentrant=use_reentrant, **options).sum()
    gradients: list[torch.Tensor | None] = []
    for _ in range(times):
        between()
        before = torch.get_rng_state()
        x.grad = None
        y.backward(retain_graph=True)
        gradients.append(x.grad)
        assert torch.equal(torch.get_rng_state(), before), "a backward moved the generator"
    region.assert_replayed(at_least=times)
    for gradient in gradients[1:]:
        assert_same(gradient, gradients[0], "gradient of a later backward")


class _RandomModel(torch.nn.Module):
    """A layer with dropout, noise and a random permutation of features."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            if part == "dropout":
                x = torch.nn.functional.dropout(x, 0.5)
            elif part == "noise":
                x = x + torch.randn_like(x)
            elif part == "permute":
                x = x[:, torch.randperm(4)]
            elif part == "alpha":
                x = torch.nn.functional.alpha_dropout(x, 0.3, training=True)
            x = self.linear(x).tanh()
        return x


random_models = st.lists(
    st.lists(
        st.sampled_from(["dropout", "noise", "permute", "alpha", "none"]), min_size=1, max_size=3
    ),
    min_size=1,
    max_size=3,
)


@clause("rng/results-as-plain")
@both_variants
@given(models=random_models, seed=st.integers(0, 100), draws_in_between=st.booleans())
def test_random_model_gives_plain_gradients(
    ckpt: Candidate,
    use_reentrant: bool,
    models: list[list[str]],
    seed: int,
    draws_in_between: bool,
) -> None:
    """Does a model with random layers give the results and gradients of the plain run?"""
    runs: list[int] = []

    def make_leaves() -> list[torch.Tensor]:
        return [torch.randn(3, 4, requires_grad=True)]

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        layers = [Recorder(_RandomModel(parts)) for parts in models]
        x = leaves[0]
        for layer in layers:
            x = wrap(layer, x)
            if draws_in_between:
                x = x * torch.rand(4)
        drawn = torch.rand(3)
        x.sum().backward()
        runs.append(sum(layer.count for layer in layers))
        weights = [layer.function.linear.weight.grad for layer in layers]  # type: ignore[attr-defined]
        return x.detach(), drawn, weights, torch.rand(3)

    wrap = partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    assert_equivalent(program, make_leaves, wrap, seed=seed)
    assert runs[-1] == 2 * len(models), "expected every region to be recomputed once"
    reached()


@clause("rng/nested-regions")
@given(
    levels=st.lists(
        st.tuples(draw_names, st.integers(1, 2), st.booleans()), min_size=2, max_size=3
    ),
    seed=st.integers(0, 50),
    before=st.integers(0, 5),
)
def test_nested_regions_replay(
    ckpt: Candidate, levels: list[tuple[list[str], int, bool]], seed: int, before: int
) -> None:
    """Do regions inside regions give the plain gradients, with draws at every level?"""
    innermost: list[int] = []

    def build(wrap: Wrap, depth: int) -> Callable[[torch.Tensor], torch.Tensor]:
        names, repeats, behind = levels[depth]

        def function(x: torch.Tensor) -> torch.Tensor:
            for name in names:
                x = (x * DRAWS[name]()).sin()
            if depth + 1 < len(levels):
                for _ in range(repeats):
                    x = wrap(build(wrap, depth + 1), x)
                    x = x * torch.rand(_SIZE)
            elif wrap is not plain:
                innermost.append(depth)
            if behind:
                x = (x + torch.rand(_SIZE)).cos()
            return x

        return function

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        torch.rand(before)
        y = wrap(build(wrap, 0), leaves[0])
        drawn = torch.rand(2)
        y.sum().backward()
        return y.detach(), drawn

    wrap = partial(ckpt.checkpoint, use_reentrant=False)
    assert_equivalent(program, lambda: [_leaf()], wrap, seed=seed)
    once = math.prod(repeats for _, repeats, _ in levels[:-1])
    assert len(innermost) > once, "expected the innermost region to be recomputed"
    reached()


@clause("rng/restored-after-exception")
@both_variants
@given(draws=st.integers(1, 10), between=surroundings, options=variants, nested=st.booleans())
def test_recomputation_that_raises_leaves_the_stream(
    ckpt: Candidate,
    use_reentrant: bool,
    draws: int,
    between: Callable[[], None],
    options: dict[str, bool],
    nested: bool,
) -> None:
    """After a recomputation that raised, is the generator in the state from before backward?"""
    wrap = partial(ckpt.checkpoint, use_reentrant=use_reentrant, **options)
    runs: list[int] = []

    def failing(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        torch.rand(draws)
        if len(runs) > 1:
            raise KeyError("recomputation")
        return (x * torch.rand(_SIZE)).sin().exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return failing(x * torch.rand(_SIZE)) * 2

    y = wrap(outer if nested else failing, _leaf()).sum()
    between()
    before = torch.get_rng_state()
    with pytest.raises(Exception, match="recomputation"):
        y.backward()
    assert len(runs) == 2, "expected one recomputation"
    reached()
    assert torch.equal(torch.get_rng_state(), before), (
        "expected the generator's state from before backward, observed another"
    )
    region = RandomRegion(["rand"])
    wrap(region, _leaf()).sum().backward()
    assert len(region.runs) == 2
    assert_same(region.runs[1], region.runs[0], "what a later region drew in recomputation")


# ---------------------------------------------------------------------------- autocast


@dataclass(frozen=True)
class Autocast:
    """One ``torch.autocast("cpu", …)`` block."""

    enabled: bool
    dtype: torch.dtype
    cache: bool

    def __call__(self) -> torch.autocast:
        """Enter nothing yet: a context manager."""
        return torch.autocast(
            "cpu", enabled=self.enabled, dtype=self.dtype, cache_enabled=self.cache
        )


autocast_blocks = st.lists(
    st.builds(
        Autocast,
        st.booleans(),
        st.sampled_from([torch.bfloat16, torch.float16]),
        st.booleans(),
    ),
    max_size=2,
)


@contextlib.contextmanager
def _inside(contexts: Sequence[Callable[[], Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _autocast_state() -> tuple[bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled("cpu")
    # The dtype is of no consequence where autocast is off.
    return enabled, torch.get_autocast_dtype("cpu") if enabled else None


class _Probe:
    """A function that notes ``read()`` at the start and the end of each run."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.seen: list[Any] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.read())
        y = (x @ x).sin()
        self.seen.append(self.read())
        return (y @ x).float().exp()  # exp needs its result: the run above it is repeated

    def assert_replayed(self, runs: int) -> None:
        assert len(self.seen) == 2 * runs, f"expected {runs} runs, observed {len(self.seen) / 2:g}"
        reached()
        assert all(state == self.seen[0] for state in self.seen), (
            f"expected {self.seen[0]} in every run, observed {self.seen[::2]}"
        )


def _matrix() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 9).reshape(3, 3).requires_grad_()


@clause("autocast/state-replayed")
@both_variants
@given(forward=autocast_blocks, backward=autocast_blocks, times=st.integers(1, 2))
def test_recomputation_runs_under_forwards_autocast(
    ckpt: Candidate,
    use_reentrant: bool,
    forward: list[Autocast],
    backward: list[Autocast],
    times: int,
) -> None:
    """Is autocast in recomputation as in forward, whatever surrounds backward?"""
    probe = _Probe(_autocast_state)
    with _inside(forward):
        y = ckpt.checkpoint(probe, _matrix(), use_reentrant=use_reentrant)
    y = y.float().sum()
    for _ in range(times):
        # Several backward calls, each under its own blocks.
        with _inside(backward):
            y.backward(retain_graph=True)
        backward = list(reversed(backward))
    probe.assert_replayed(1 + times)


@clause("autocast/cache-flag-replayed")
@both_variants
@given(forward=autocast_blocks, backward=autocast_blocks)
def test_recomputation_runs_with_forwards_cache_flag(
    ckpt: Candidate, use_reentrant: bool, forward: list[Autocast], backward: list[Autocast]
) -> None:
    """Is autocast's cache flag in recomputation as in forward?"""
    probe = _Probe(torch.is_autocast_cache_enabled)
    with _inside(forward):
        y = ckpt.checkpoint(probe, _matrix(), use_reentrant=use_reentrant)
    with _inside(backward):
        y.float().sum().backward()
    probe.assert_replayed(2)


@clause("autocast/per-region")
@both_variants
@given(
    blocks=st.lists(autocast_blocks, min_size=2, max_size=4),
    outer=autocast_blocks,
    backward=autocast_blocks,
)
def test_each_region_replays_its_own_autocast(
    ckpt: Candidate,
    use_reentrant: bool,
    blocks: list[list[Autocast]],
    outer: list[Autocast],
    backward: list[Autocast],
) -> None:
    """Do regions of one graph each get the autocast state that they ran under?"""
    probes = [_Probe(_autocast_state) for _ in blocks]
    y = _matrix() * 1
    with _inside(outer):
        for block, probe in zip(blocks, probes, strict=True):
            with _inside(block):
                y = ckpt.checkpoint(probe, y, use_reentrant=use_reentrant)
    with _inside(backward):
        y.float().sum().backward()
    for probe in probes:
        probe.assert_replayed(2)


class _Layers(torch.nn.Module):
    """Two linear layers and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).tanh()).sigmoid()
        return y


def _weights(layers: Sequence[torch.nn.Module]) -> list[torch.Tensor | None]:
    return [weight.grad for layer in layers for weight in layer.parameters()]


@clause("autocast/results-as-plain")
@both_variants
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    cache=st.booleans(),
    backward_inside=st.booleans(),
    steps=st.integers(1, 2),
)
def test_model_under_autocast_gives_plain_results(
    ckpt: Candidate,
    use_reentrant: bool,
    kinds: list[bool],
    dtype: torch.dtype,
    cache: bool,
    backward_inside: bool,
    steps: int,
) -> None:
    """Do regions and plain layers under autocast give the plain results and gradients?"""
    kinds = [True, *kinds]  # whether a layer is a region
    runs: list[int] = []

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        layers = [Recorder(_Layers()) for _ in kinds]
        modules = [layer.function for layer in layers]
        results = []
        for _ in range(steps):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=cache))
                x = leaves[0]
                for layer, region in zip(layers, kinds, strict=True):
                    x = wrap(layer, x) if region else layer(x)
                if not backward_inside:
                    stack.close()
                x.float().sum().backward()
            results.append(x.detach())
            with torch.no_grad():
                for module in modules:
                    for weight in module.parameters():  # type: ignore[attr-defined]
                        weight.sub_(weight.grad, alpha=0.1)
        runs.append(sum(layer.count for layer in layers))
        return results, _weights(modules)  # type: ignore[arg-type]

    assert_equivalent(
        program,
        lambda: [torch.randn(2, 4, requires_grad=True)],
        partial(ckpt.checkpoint, use_reentrant=use_reentrant),
    )
    assert runs[-1] == steps * (len(kinds) + sum(kinds)), "expected each region recomputed once"
    reached()


inner_parts = st.lists(
    st.sampled_from(["bfloat16", "float16", "disabled", "uncached", "plain"]),
    min_size=1,
    max_size=4,
)


def _inner_block(part: str) -> Any:
    if part == "plain":
        return contextlib.nullcontext()
    if part == "disabled":
        return torch.autocast("cpu", enabled=False)
    if part == "uncached":
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    return torch.autocast("cpu", dtype=getattr(torch, part))


@clause("autocast/inside-region")
@both_variants
@given(parts=inner_parts, outer=st.booleans(), last_inside=st.booleans())
def test_autocast_opened_inside_a_region(
    ckpt: Candidate, use_reentrant: bool, parts: list[str], outer: bool, last_inside: bool
) -> None:
    """Does a function that opens autocast blocks itself give the plain results?"""
    runs: list[int] = []

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        # A weight of its own for each part: a cast is not shared between dtypes.
        layers = [torch.nn.Linear(4, 4) for _ in parts]

        def function(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            for part, layer in zip(parts, layers, strict=True):
                with _inner_block(part):
                    x = layer(x if torch.is_autocast_enabled("cpu") else x.float()).sin()
            if last_inside:
                # Early stop leaves this block by whatever way the candidate uses.
                with torch.autocast("cpu", dtype=torch.float16):
                    x = x.exp()
                    x = x + 1
            return x

        runs.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
            y = wrap(function, leaves[0])
        y.float().sum().backward()
        return y.detach(), _weights(layers)

    assert_equivalent(
        program,
        lambda: [torch.randn(2, 4, requires_grad=True)],
        partial(ckpt.checkpoint, use_reentrant=use_reentrant),
    )
    assert len(runs) == 2, f"expected one recomputation, observed {len(runs) - 1}"
    reached()


@clause("autocast/shared-weight")
@given(
    kinds=st.lists(st.booleans(), min_size=2, max_size=4).filter(any),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    cache=st.booleans(),
    inside=st.integers(1, 2),
)
def test_weight_shared_by_regions(
    ckpt: Candidate, kinds: list[bool], dtype: torch.dtype, cache: bool, inside: int
) -> None:
    """Does a weight used by several regions and plain parts get the plain gradient?"""
    runs: list[int] = []

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        layer = torch.nn.Linear(4, 4)

        def function(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            for _ in range(inside):
                x = layer(x).tanh()
            return x

        runs.clear()
        x = leaves[0]
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            for region in kinds:
                x = wrap(function, x) if region else function(x)
        x.float().sum().backward()
        return x.detach(), _weights([layer])

    assert_equivalent(
        program,
        lambda: [torch.randn(2, 4, requires_grad=True)],
        partial(ckpt.checkpoint, use_reentrant=False),
    )
    assert len(runs) == len(kinds) + sum(kinds), "expected every region to be recomputed once"
    reached()


@clause("autocast/cache-keeps-gradients")
@both_variants
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    backward_first=st.booleans(),
    clear=st.booleans(),
    forward_outside=st.booleans(),
)
def test_plain_use_behind_a_region_gets_its_gradient(
    ckpt: Candidate,
    use_reentrant: bool,
    dtype: torch.dtype,
    backward_first: bool,
    clear: bool,
    forward_outside: bool,
) -> None:
    """Does plain code of the same block send its gradient to a weight that a region has used?"""
    runs: list[int] = []

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        layer = torch.nn.Linear(4, 4)
        runs.clear()

        def function(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            y: torch.Tensor = layer(x).tanh().exp()
            return y

        def backward(y: torch.Tensor) -> list[torch.Tensor | None]:
            layer.weight.grad = layer.bias.grad = None
            y.float().sum().backward()
            return _weights([layer])

        with torch.autocast("cpu", dtype=dtype, enabled=not forward_outside):
            y = wrap(function, leaves[0] * 1)
            if not forward_outside and not backward_first:
                # Only the plain use is differentiated: what it sends must not be lost.
                z = layer(leaves[0]).sin()
        with torch.autocast("cpu", dtype=dtype):
            if not forward_outside and not backward_first:
                of_plain = backward(z)
                of_region = backward(y)
            else:
                if clear:
                    torch.clear_autocast_cache()
                of_region = backward(y)
                z = layer(leaves[0]).sin()
                of_plain = backward(z)
        return z.detach(), of_region, of_plain

    assert_equivalent(
        program,
        lambda: [torch.randn(2, 4, requires_grad=True)],
        partial(ckpt.checkpoint, use_reentrant=use_reentrant),
    )
    assert len(runs) == 2, f"expected one recomputation, observed {len(runs) - 1}"
    reached()


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16


@clause("autocast/cache-isolated")
@both_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recomputation_does_not_use_the_blocks_casts(
    ckpt: Candidate, use_reentrant: bool, dtype: torch.dtype
) -> None:
    """Is a recomputation free of casts cached by the block that surrounds backward?"""

    def run(wrap: Wrap) -> tuple[torch.Tensor | None, ...]:
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=dtype):
            y = wrap(lambda x: layer(x).sin(), x)
        with torch.autocast("cpu", dtype=_other(dtype)):
            layer(torch.ones(1, 4))  # the block's own cast of the weight
            y.float().sum().backward()
        return layer.weight.grad, layer.bias.grad, x.grad

    expected = run(plain)
    wrap = partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    reached()
    assert_same(run(wrap), expected, "gradients")


@clause("autocast/cache-isolated")
@both_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recomputation_leaves_no_casts_to_the_block(
    ckpt: Candidate, use_reentrant: bool, dtype: torch.dtype
) -> None:
    """Is the block that surrounds backward free of casts cached by the recomputation?"""

    def run(wrap: Wrap) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=dtype):
            y = wrap(lambda x: layer(x).sin(), x)
        with torch.autocast("cpu", dtype=_other(dtype)):
            y.float().sum().backward()
            after = layer(torch.ones(1, 4))
        return (after.detach(),)

    expected = run(plain)
    wrap = partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    reached()
    assert_same(run(wrap), expected, "result of plain code behind backward")


@clause("autocast/restored")
@both_variants
@given(
    outer=autocast_blocks,
    forward=autocast_blocks,
    backward=autocast_blocks,
    raises=st.sampled_from([None, "forward", "recomputation"]),
)
def test_autocast_around_is_left(
    ckpt: Candidate,
    use_reentrant: bool,
    outer: list[Autocast],
    forward: list[Autocast],
    backward: list[Autocast],
    raises: str | None,
) -> None:
    """Is autocast after forward and backward what it was, also after an exception?"""

    def state() -> tuple[Any, ...]:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return enabled, dtype, torch.is_autocast_cache_enabled()

    phases: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        phases.append("recomputation" if phases else "forward")
        y = (x @ x).sin()
        if phases[-1] == raises:
            raise KeyError(raises)
        return y.exp()

    guard = pytest.raises(Exception, match=raises) if raises else contextlib.nullcontext()
    outside = state()
    with _inside(outer):
        around = state()
        with guard:
            with _inside(forward):
                before = state()
                try:
                    y = ckpt.checkpoint(function, _matrix(), use_reentrant=use_reentrant)
                finally:
                    assert state() == before, f"forward left autocast {state()}, was {before}"
            with _inside(backward):
                before = state()
                try:
                    y.float().sum().backward()
                finally:
                    assert state() == before, f"backward left autocast {state()}, was {before}"
        assert state() == around, f"expected autocast {around}, observed {state()}"
    assert phases[-1] == (raises or "recomputation")
    reached()
    assert state() == outside, f"expected autocast {outside}, observed {state()}"


@clause("autocast/restored")
@both_variants
@given(raises=st.booleans(), regions=st.integers(1, 2), inside=st.booleans())
def test_cache_is_emptied_at_the_end_of_the_block(
    ckpt: Candidate, use_reentrant: bool, raises: bool, regions: int, inside: bool
) -> None:
    """Is a weight that changes between two autocast blocks cast anew in the second one?"""
    layer = torch.nn.Linear(3, 3, bias=False)
    runs: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y: torch.Tensor = layer(x).tanh()
        if raises and len(runs) > regions:
            raise KeyError("recomputation")
        return y.exp()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ones(2, 3, requires_grad=True) * 1
        for _ in range(regions):
            y = ckpt.checkpoint(function, y, use_reentrant=use_reentrant)
        if inside:
            with contextlib.suppress(KeyError):
                y.float().sum().backward()
    if not inside:
        with contextlib.suppress(KeyError):
            y.float().sum().backward()
    assert len(runs) > regions, "expected a recomputation"
    reached()
    with torch.no_grad():
        layer.weight.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        observed = layer(torch.ones(2, 3))
    assert not observed.any(), "expected the changed weight, observed a cast from an earlier block"


def _in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in another thread and raise here what it raises there."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - raised again in the test's thread
            raised.append(problem)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@clause("autocast/other-thread")
@both_variants
@given(forward=autocast_blocks, backward=autocast_blocks)
def test_autocast_in_another_thread(
    ckpt: Candidate, use_reentrant: bool, forward: list[Autocast], backward: list[Autocast]
) -> None:
    """Does a backward in another thread recompute under forward's autocast?"""
    probe = _Probe(lambda: (_autocast_state(), torch.is_autocast_cache_enabled()))
    with _inside(forward):
        y = ckpt.checkpoint(probe, _matrix(), use_reentrant=use_reentrant)
    y = y.float().sum()

    def work() -> None:
        with _inside(backward):
            before = _autocast_state(), torch.is_autocast_cache_enabled()
            y.backward()
            after = _autocast_state(), torch.is_autocast_cache_enabled()
        assert after == before, f"the thread's autocast was {before}, is {after}"

    _in_thread(work)
    probe.assert_replayed(2)


# ---------------------------------------------------------------------------- default device

_DEVICES = ("meta", "cpu")


class _DefaultDevice:
    """``torch.set_default_device`` for a block."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_default_device(self.device)

    def __exit__(self, *raised: object) -> None:
        torch.set_default_device(None)


def _device_context(device: str) -> Callable[[], Any]:
    return lambda: torch.device(device)


@dataclass(frozen=True)
class Devices:
    """Default-device settings, the outermost first; ``base`` is set by set_default_device."""

    base: str | None
    nested: tuple[str, ...]

    def contexts(self) -> list[Callable[[], Any]]:
        """What to enter, the outermost first."""
        base = [partial(_DefaultDevice, self.base)] if self.base else []
        return [*base, *(_device_context(device) for device in self.nested)]


device_settings = st.builds(
    Devices,
    st.sampled_from([None, None, *_DEVICES]),
    st.lists(st.sampled_from(_DEVICES), max_size=3).map(tuple),
)


class _DeviceRegion:
    """A function that notes on which device a new tensor lands, at the start of each run and
    near its end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.empty(1).device.type)
        y = x.sin().exp()
        self.seen.append(torch.zeros(1).device.type)
        return y.tanh()


def _cpu_ones() -> torch.Tensor:
    return torch.ones(3, device="cpu", requires_grad=True)


def _backward(y: torch.Tensor, **options: Any) -> None:
    y.backward(torch.ones(3, device="cpu"), **options)  # type: ignore[no-untyped-call]


@clause("ambient/device-replayed")
@given(forward=device_settings, backward=device_settings, times=st.integers(1, 2))
def test_recomputation_creates_tensors_on_forwards_device(
    ckpt: Candidate, forward: Devices, backward: Devices, times: int
) -> None:
    """Do new tensors land on forward's default device, whatever surrounds backward?"""
    region = _DeviceRegion()
    with _inside(forward.contexts()):
        y = ckpt.checkpoint(region, _cpu_ones(), use_reentrant=False)
    with _inside(backward.contexts()):
        for _ in range(times):
            _backward(y, retain_graph=True)
    assert len(region.seen) > 2, "expected a recomputation"
    reached()
    assert set(region.seen) == {region.seen[0]}, (
        f"expected {region.seen[0]} in every run, observed {region.seen}"
    )


@clause("ambient/device-replayed")
@given(devices=st.lists(st.sampled_from(_DEVICES), min_size=2, max_size=4), chain=st.booleans())
def test_each_region_creates_tensors_on_its_own_device(
    ckpt: Candidate, devices: list[str], chain: bool
) -> None:
    """Do regions of one graph each see the default device that they ran under?"""
    regions = [_DeviceRegion() for _ in devices]
    x = _cpu_ones() * 1
    total = torch.zeros(3)
    y = x
    for device, region in zip(devices, regions, strict=True):
        with torch.device(device):
            y = ckpt.checkpoint(region, y if chain else x, use_reentrant=False)
        total = y if chain else total + y
    _backward(total)
    for device, region in zip(devices, regions, strict=True):
        assert len(region.seen) > 2, "expected a recomputation"
        assert set(region.seen) == {device}, f"expected {device}, observed {region.seen}"
    reached()


class _Named(TorchFunctionMode):
    """A function mode that notes its name in ``log`` for each ``torch.ones_like``."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name = name
        self.log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ones_like:
            self.log.append(self.name)
        return func(*args, **(kwargs or {}))


@clause("ambient/device-not-leaked")
@both_variants
@given(
    outer=st.lists(st.sampled_from(["meta", "cpu", "mode"]), max_size=3),
    inner=st.lists(st.sampled_from(["meta", "cpu", "mode"]), min_size=1, max_size=3),
    where=st.sampled_from(["inside", "between", "outside"]),
    early_exit=st.booleans(),
)
def test_enclosing_contexts_survive(
    ckpt: Candidate,
    use_reentrant: bool,
    outer: list[str],
    inner: list[str],
    where: str,
    early_exit: bool,
) -> None:
    """Are default device and mode stack the same before and after backward, wherever it runs?"""
    log: list[str] = []

    def context(index: int, name: str) -> Callable[[], Any]:
        if name == "mode":
            return lambda: _Named(f"mode {index}", log)
        return _device_context(name)

    def look() -> tuple[str, str, int, tuple[str, ...]]:
        log.clear()
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty(0, device="cpu")
        torch.ones_like(like)
        seen = tuple(log)
        depth = torch._C._len_torch_function_stack()
        return torch.empty(1).device.type, torch.get_default_device().type, depth, seen

    region = _DeviceRegion()

    def function(x: torch.Tensor) -> torch.Tensor:
        if early_exit:
            with torch.device("meta"):  # early stop leaves the run inside of this block
                return region(x) + 0
        return region(x)

    def backward() -> None:
        before = look()
        _backward(y)
        assert len(region.seen) > 2, "expected a recomputation"
        reached()
        after = look()
        assert after == before, (
            f"expected (device of new tensors, default device, depth of the mode stack, modes in "
            f"order) {before} after backward, observed {after}"
        )

    outside = look()
    with _inside([context(index, name) for index, name in enumerate(outer)]):
        between = look()
        with _inside([context(index + 10, name) for index, name in enumerate(inner)]):
            inside = look()
            y = ckpt.checkpoint(function, _cpu_ones(), use_reentrant=use_reentrant)
            assert look() == inside, f"forward changed {inside} to {look()}"
            if where == "inside":
                backward()
        assert look() == between, f"leaving the inner contexts: {look()}, expected {between}"
        if where == "between":
            backward()
    assert look() == outside, f"leaving the outer contexts: {look()}, expected {outside}"
    if where == "outside":
        backward()
    assert look() == outside, f"expected {outside} at the end, observed {look()}"


def _peek(y: torch.Tensor) -> None:
    assert y.grad_fn is not None
    getattr(y.grad_fn, "_saved_result")  # noqa: B009 - an attribute of this kind of node


@clause("ambient/device-after-peek")
@pytest.mark.parametrize("reads", [1, 2])
def test_reading_inside_an_enclosing_context(ckpt: Candidate, reads: int) -> None:
    """Do enclosing contexts close to the right device after saved tensors were read in them?"""
    region = _DeviceRegion()
    seen = []
    with torch.device("cpu"):
        with torch.device("meta"):
            y = ckpt.checkpoint(region, _cpu_ones(), use_reentrant=False)
            for _ in range(reads):
                _peek(y)
            assert len(region.seen) > 2, "expected reading a saved tensor to recompute"
            seen.append(torch.empty(1).device.type)
        seen.append(torch.empty(1).device.type)
    seen.append(torch.empty(1).device.type)
    reached()
    expected = ["meta", "cpu", "cpu"]
    assert seen == expected, f"expected default devices {expected}, observed {seen}"
    depth = torch._C._len_torch_function_stack()
    assert depth == 0, f"expected no function mode left, observed {depth}"


@clause("ambient/device-after-peek")
@pytest.mark.parametrize("reads", [1, 2])
def test_reading_after_the_context_is_closed(ckpt: Candidate, reads: int) -> None:
    """Does the default device stay when saved tensors are read inside and behind the context?"""
    region = _DeviceRegion()
    with torch.device("meta"):
        y = ckpt.checkpoint(region, _cpu_ones(), use_reentrant=False)
        _peek(y)
    assert len(region.seen) > 2, "expected reading a saved tensor to recompute"
    seen = [torch.empty(1).device.type]
    for _ in range(reads):
        _peek(y)
        seen.append(torch.empty(1).device.type)
    reached()
    assert set(seen) == {"cpu"}, f"expected new tensors on cpu, observed {seen}"


# ---------------------------------------------------------------------------- modes


class _FunctionMode(TorchFunctionMode):
    """Doubles what ``Tensor.sin`` returns."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


class _DispatchMode(TorchDispatchMode):
    """Doubles what ``aten.sin`` returns and makes ``aten.rand`` return halves."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            return result * 2
        return torch.full_like(result, 0.5) if func is torch.ops.aten.rand.default else result


def _sines(x: torch.Tensor) -> torch.Tensor:
    y = (x * torch.rand(3)).sin()
    return (y * x).exp().sin().exp()


@clause("ambient/modes-around")
@both_variants
@given(depth=st.integers(1, 2), regions=st.integers(1, 2), whole_backward=st.booleans())
def test_modes_around_forward_and_backward(
    ckpt: Candidate, use_reentrant: bool, depth: int, regions: int, whole_backward: bool
) -> None:
    """Under a dispatch mode that changes results, are results and gradients the plain ones?"""
    function = Recorder(_sines)

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        contexts = [_DispatchMode] * depth
        with contextlib.ExitStack() as stack:
            stack.enter_context(_inside(contexts))
            y = leaves[0]
            for _ in range(regions):
                y = wrap(function, y)
            if not whole_backward:
                # The same modes, but entered anew.
                stack.close()
                stack.enter_context(_inside(contexts))
            y.sum().backward()
        return y.detach()

    assert_equivalent(
        program,
        lambda: [torch.linspace(0.1, 0.5, 3).requires_grad_()],
        partial(ckpt.checkpoint, use_reentrant=use_reentrant),
    )
    assert function.count == 4 * regions, "expected every region to be recomputed once"
    reached()


@clause("ambient/modes-through-context-fn")
@pytest.mark.parametrize("mode", [_FunctionMode, _DispatchMode])
@pytest.mark.parametrize("backward_in_mode", [False, True])
def test_mode_given_as_both_contexts(ckpt: Candidate, mode: type, backward_in_mode: bool) -> None:
    """Is a mode given as both contexts in force for both runs, and nowhere else?"""
    function = Recorder(_sines)

    def run(wrap: Wrap) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.linspace(0.1, 0.5, 3).requires_grad_()
        torch.manual_seed(0)
        y = wrap(x)
        outside = torch.ones(3).sin()
        assert torch.equal(outside, torch.ones(3).sin()), "the mode is in force behind the region"
        (y * x.cos()).sum().backward()
        return y.detach(), x.grad

    def in_mode(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return _sines(x)

    expected = run(in_mode)
    observed = run(
        lambda x: ckpt.checkpoint(
            function, x, use_reentrant=False, context_fn=lambda: (mode(), mode())
        )
    )
    assert function.count == 2, f"expected one recomputation, observed {function.count - 1}"
    reached()
    assert_same(observed, expected, "result and gradient")


class _Reduced(TorchFunctionMode):
    """Converts what ``Tensor.sin`` returns, or keeps a part of it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.sin:
            return result
        return result[:2] if self.change == "shape" else result.to(torch.bfloat16)


@clause("ambient/mode-mismatch-loud")
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_mode_around_forward_only(ckpt: Candidate, change: str) -> None:
    """Does a mode that changes metadata in forward only lead to an error or to exact gradients?"""

    def run(wrap: Wrap) -> torch.Tensor | None:
        x = torch.linspace(0.1, 0.5, 3).requires_grad_()
        with _Reduced(change):
            y = wrap(lambda x: x.sin().exp(), x)
        y.float().sum().backward()
        return x.grad

    checkpointed = partial(ckpt.checkpoint, use_reentrant=False)
    expected = run(plain)
    # The legitimate case: no mode in either run.
    x = torch.linspace(0.1, 0.5, 3).requires_grad_()
    checkpointed(lambda x: x.sin().exp(), x).sum().backward()
    assert x.grad is not None, "expected a gradient without any mode"
    reached()
    try:
        observed = run(checkpointed)
    except ckpt.CheckpointError:
        return
    assert_same(observed, expected, "gradient, where no CheckpointError was raised")


# ---------------------------------------------------------------------------- everything else


class _default_dtype:
    """``torch.set_default_dtype`` for a block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *raised: object) -> None:
        torch.set_default_dtype(self.before)


@clause("ambient/default-dtype")
@both_variants
@given(
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]), size=st.integers(1, 4)
)
def test_default_dtype_other_than_float32(
    ckpt: Candidate, use_reentrant: bool, dtype: torch.dtype, size: int
) -> None:
    """Under another default dtype, are results and gradients those of the plain run?"""

    def function(x: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(0.5, 1.5, size)
        return (x * weights).sin() * torch.tensor(0.5)

    recorder = Recorder(function)

    def program(wrap: Wrap, leaves: list[torch.Tensor]) -> Any:
        with _default_dtype(dtype):
            y = wrap(recorder, leaves[0])
            y.sum().backward()
            assert torch.get_default_dtype() is dtype, "the default dtype has changed"
        return y.detach()

    assert_equivalent(
        program,
        lambda: [torch.linspace(0.1, 1.0, size, dtype=dtype).requires_grad_()],
        partial(ckpt.checkpoint, use_reentrant=use_reentrant),
    )
    assert recorder.count == 4, "expected one recomputation"
    reached()


class _Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *raised: object) -> None:
        torch.use_deterministic_algorithms(False)


def _no_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _anomaly() -> Any:
    # Entering warns that it is slow; that is not the candidate's doing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autograd.detect_anomaly(check_nan=False)


_SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "float64": lambda: _default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "function mode": _FunctionMode,
    "dispatch mode": _DispatchMode,
    "deterministic": _Deterministic,
    "anomaly": _anomaly,
    "hooks": _no_hooks,
}

_OPENED: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "meta": lambda: torch.device("meta"),
    "function mode": _FunctionMode,
    "dispatch mode": _DispatchMode,
    "enable_grad": torch.enable_grad,
    "float64": lambda: _default_dtype(torch.float64),
}


def _named(table: dict[str, Callable[[], Any]], names: Sequence[str]) -> list[Callable[[], Any]]:
    return [table[name] for name in names]


around = st.lists(st.sampled_from(sorted(_SURROUNDINGS)), max_size=3, unique=True)
opened = st.lists(st.sampled_from(sorted(_OPENED)), max_size=3, unique=True)


@clause("ambient/undisturbed")
@both_variants
@given(forward=around, backward=around, inside=opened, no_grad_around=st.booleans())
def test_forward_and_backward_leave_ambient_state(
    ckpt: Candidate,
    use_reentrant: bool,
    forward: list[str],
    backward: list[str],
    inside: list[str],
    no_grad_around: bool,
) -> None:
    """Is all ambient state the same before and after forward, and before and after backward?"""
    runs: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        with torch.no_grad():
            x.detach().cos()
        y = x.sin()
        with _inside(_named(_OPENED, inside)):
            y = y.exp()
            return y + 1  # behind the last saved tensor, inside the contexts

    start = AmbientState.capture()
    with _inside(_named(_SURROUNDINGS, forward)):
        before = AmbientState.capture()
        y = ckpt.checkpoint(function, _cpu_ones(), use_reentrant=use_reentrant)
        changed = before.difference(AmbientState.capture())
        assert not changed, f"forward changed {changed}"
    # The same contexts again: a recomputation must make the tensors that forward made.
    again = [*forward, *(name for name in backward if name in _HARMLESS)]
    with _inside(_named(_SURROUNDINGS, again)), torch.set_grad_enabled(not no_grad_around):
        before = AmbientState.capture()
        _backward(y)
        after = AmbientState.capture()
    assert len(runs) == 2, f"expected one recomputation, observed {len(runs) - 1}"
    reached()
    changed = before.difference(after)
    assert not changed, f"backward changed {changed}"
    changed = start.difference(AmbientState.capture())
    assert not changed, f"after leaving all contexts these have changed: {changed}"


_HARMLESS = ("deterministic", "anomaly", "autocast", "no cache")
"""Surroundings of backward alone that change nothing in the recomputed tensors."""


@clause("ambient/restored-after-exception")
@both_variants
@given(
    phase=st.sampled_from(["forward", "recomputation"]),
    forward=around,
    backward=around,
    inside=opened,
    kind=st.sampled_from([KeyError, RuntimeError, ValueError]),
)
def test_exception_leaves_ambient_state(
    ckpt: Candidate,
    use_reentrant: bool,
    phase: str,
    forward: list[str],
    backward: list[str],
    inside: list[str],
    kind: type[Exception],
) -> None:
    """After a forward or a recomputation that raised, is all ambient state as before the call?"""
    runs: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append("recomputation" if runs else "forward")
        with _inside(_named(_OPENED, inside)):
            y = x.sin()
            if runs[-1] == phase:
                raise kind(f"raised in {phase}")
            return y.exp()

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ckpt.checkpoint(function, x, use_reentrant=use_reentrant)
        return result

    def raises_and_restores(contexts: list[str], work: Callable[[], Any]) -> None:
        with _inside(_named(_SURROUNDINGS, contexts)):
            before = AmbientState.capture()
            with pytest.raises(Exception, match=f"raised in {phase}"):
                work()
            changed = before.difference(AmbientState.capture())
        assert not changed, f"the {phase} that raised left changed: {changed}"

    start = AmbientState.capture()
    if phase == "forward":
        raises_and_restores(forward, lambda: call(_cpu_ones()))
    else:
        with _inside(_named(_SURROUNDINGS, forward)):
            y = call(_cpu_ones())
        raises_and_restores(backward, lambda: _backward(y))
    assert runs[-1] == phase
    reached()
    changed = start.difference(AmbientState.capture())
    assert not changed, f"after leaving all contexts these have changed: {changed}"

    region = Recorder(lambda x: x.sin().exp())
    x = torch.ones(3, requires_grad=True)
    ckpt.checkpoint(region, x, use_reentrant=use_reentrant).sum().backward()
    assert region.count == 2, "expected the next region to be recomputed once"
    expected = torch.ones(3, requires_grad=True)
    expected.sin().exp().sum().backward()
    assert_same(x.grad, expected.grad, "gradient of the next region")


@clause("ambient/other-thread")
@given(forward=device_settings, thread=device_settings, grad=st.booleans())
def test_backward_in_another_thread(
    ckpt: Candidate, forward: Devices, thread: Devices, grad: bool
) -> None:
    """Does a backward in another thread see forward's device and leave that thread's state?"""
    region = _DeviceRegion()
    with _inside(forward.contexts()):
        y = ckpt.checkpoint(region, _cpu_ones(), use_reentrant=False)
    here = AmbientState.capture()

    def work() -> None:
        with _inside(thread.contexts()), torch.set_grad_enabled(grad):
            before = AmbientState.capture()
            _backward(y)
            changed = before.difference(AmbientState.capture())
        assert not changed, f"backward changed its thread's {changed}"

    _in_thread(work)
    assert len(region.seen) > 2, "expected a recomputation"
    reached()
    assert set(region.seen) == {region.seen[0]}, (
        f"expected {region.seen[0]} in every run, observed {region.seen}"
    )
    changed = here.difference(AmbientState.capture())
    assert not changed, f"backward in another thread changed this one's {changed}"


@clause("ambient/meta-tensors")
@both_variants
@given(
    rows=st.integers(0, 3),
    columns=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    default=st.booleans(),
    preserve=st.booleans(),
)
def test_meta_tensors(
    ckpt: Candidate,
    use_reentrant: bool,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    default: bool,
    preserve: bool,
) -> None:
    """Do regions on the meta device give outputs and gradients of the plain run's metadata?"""
    runs: list[int] = []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(1)
        y = (x @ x.t()).sin()
        return torch.nn.functional.dropout(y, 0.5), x.sum(0).exp()

    def run(wrap: Wrap) -> list[torch.Tensor | None]:
        context = torch.device("meta") if default else contextlib.nullcontext()
        x = torch.empty(rows, columns, device="meta", dtype=dtype, requires_grad=True)
        with context:
            first, second = wrap(function, x)
        (first.sum() + second.sum()).backward()
        return [first, second, x.grad]

    expected = run(plain)
    runs.clear()
    observed = run(
        partial(ckpt.checkpoint, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    )
    assert len(runs) == 2, f"expected one recomputation, observed {len(runs) - 1}"
    reached()
    assert_same(observed, expected, "outputs and gradient")


@clause("ambient/quiet")
@both_variants
@given(
    contexts=st.lists(st.sampled_from(["autocast", "no cache", "meta", "float64"]), max_size=2),
    options=variants,
    random=st.booleans(),
)
def test_no_warnings(
    ckpt: Candidate,
    use_reentrant: bool,
    contexts: list[str],
    options: dict[str, bool],
    random: bool,
) -> None:
    """Does a region on CPU warn of nothing that the plain run does not warn of?"""
    runs: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if random:
            x = torch.nn.functional.dropout(x, 0.5)
        return x.sin().exp()

    def run(wrap: Wrap) -> set[str]:
        with caught_warnings() as seen:
            with _inside(_named(_SURROUNDINGS, contexts)):
                y = wrap(function, _cpu_ones())
            _backward(y)
        return {f"{warning.category.__name__}: {warning.message}" for warning in seen}

    expected = run(plain)
    runs.clear()
    observed = run(partial(ckpt.checkpoint, use_reentrant=use_reentrant, **options))
    assert len(runs) == 2, f"expected one recomputation, observed {len(runs) - 1}"
    reached()
    assert observed <= expected, f"expected no warnings, observed {sorted(observed - expected)}"
