"""Chapter 12: sequential models."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import assert_equivalent, assert_same, caught_warnings
from conformance.observe.lifetimes import DataStorages, Marks
from conformance.testing import both_variants, clause, reached

Function = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 4
UNIT = WIDTH * 8  # bytes of one float64 tensor of WIDTH numbers

splits = st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
"""Number of functions and number of segments."""

KINDS = ("linear", "tanh", "sin", "exp", "norm")
kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=7)


class Affine(torch.nn.Module):
    """A layer whose weight is one of the program's leaves."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.tensor = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x @ self.tensor


def _leaves() -> list[torch.Tensor]:
    """The input and weights of the layers."""
    return [torch.randn(3, WIDTH, requires_grad=True)] + [
        (torch.randn(WIDTH, WIDTH) / 2).requires_grad_() for _ in range(8)
    ]


def _functions(names: Sequence[str], leaves: list[torch.Tensor]) -> list[Any]:
    made: list[Any] = []
    for index, name in enumerate(names):
        made.append(
            {
                "linear": Affine(leaves[1 + index]),
                "tanh": torch.nn.Tanh(),
                "sin": torch.sin,
                "exp": lambda x: (-x.abs()).exp(),
                "norm": torch.nn.LayerNorm(WIDTH, elementwise_affine=False),
            }[name]
        )
    return made


class Chain:
    """The functions run one after another: the plain run of a sequential model."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        for function in self.functions:
            x = function(x)
        return x


def _wrap(ckpt: Candidate, segments: int, use_reentrant: bool, **options: Any) -> Any:
    """What runs a Chain through the candidate."""

    def run(chain: Chain, x: torch.Tensor) -> Any:
        return ckpt.checkpoint_sequential(
            chain.functions, segments, x, use_reentrant=use_reentrant, **options
        )

    return run


class Layers:
    """Logged functions: ``runs`` has the index of each run, ``outputs`` and ``inner`` mark what
    forward made (results of the functions; one intermediate of each)."""

    def __init__(self, count: int) -> None:
        self.runs: list[int] = []
        self.grad_modes: list[bool] = []
        self.pointers: list[int] = []
        self.outputs, self.inner = Marks(), Marks()
        self.functions: list[Function] = [self._function(index) for index in range(count)]

    def _function(self, index: int) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            self.runs.append(index)
            self.grad_modes.append(torch.is_grad_enabled())
            self.pointers.append(x.data_ptr())
            return self.outputs(self.inner(x.sin()).cos())

        return function

    def again(self) -> list[list[int]]:
        """Runs after forward, cut where the next index does not follow: the parts recomputed."""
        parts: list[list[int]] = []
        for index in self.runs[len(self.functions) :]:
            if parts and index == parts[-1][-1] + 1:
                parts[-1].append(index)
            else:
                parts.append([index])
        return parts

    def plain_from(self) -> int:
        """First function of the last part, as seen after one backward."""
        return len(set(self.runs[len(self.functions) :]))


def _last_part(count: int, segments: int) -> int:
    """Length of the last part as sequential/split has it."""
    return count - (segments - 1) * (count // segments)


def _input() -> torch.Tensor:
    return torch.linspace(0.1, 1.0, WIDTH, requires_grad=True)


# ---------------------------------------------------------------- results


@clause("sequential/result")
@both_variants
@given(names=kinds, cut=st.integers(0, 6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_result_is_that_of_the_plain_run(
    ckpt: Candidate, use_reentrant: bool, names: list[str], cut: int, dtype: torch.dtype
) -> None:
    """Is the result that of the functions one after another, for every number of segments?"""
    segments = 1 + cut % len(names)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in _leaves()]
    chain = Chain(_functions(names, leaves))
    result = _wrap(ckpt, segments, use_reentrant)(chain, leaves[0])
    reached()
    assert_same(result, chain(leaves[0]), f"result of {len(names)} functions in {segments} parts")
    assert result.requires_grad, "expected a result that requires grad, as the plain run's"


@clause("sequential/order")
@both_variants
@given(split=splits)
def test_functions_run_in_order(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Do forward and each part's recomputation follow the order of the list?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    assert layers.runs == list(range(count)), (
        f"forward: expected the order {list(range(count))}, observed {layers.runs}"
    )
    result.sum().backward()
    reached()
    parts = layers.again()
    assert len(parts) <= segments - 1, (
        f"recomputation of {segments - 1} parts: expected each in ascending order, "
        f"observed {layers.runs[count:]}"
    )


@clause("sequential/gradients")
@both_variants
@given(names=kinds, cut=st.integers(0, 6))
def test_gradients_are_those_of_the_plain_run(
    ckpt: Candidate, use_reentrant: bool, names: list[str], cut: int
) -> None:
    """Are the gradients of the input and of every weight those of the plain run?"""
    segments = 1 + cut % len(names)

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        result = wrap(Chain(_functions(names, leaves)), leaves[0])
        (result * result.detach().cos()).sum().backward()
        reached()
        return result.detach()

    assert_equivalent(program, _leaves, _wrap(ckpt, segments, use_reentrant))


@clause("sequential/functions-forms")
@both_variants
@given(
    names=st.lists(st.sampled_from(("linear", "tanh", "norm")), min_size=1, max_size=6),
    cut=st.integers(0, 5),
)
def test_sequential_and_list_of_modules_agree(
    ckpt: Candidate, use_reentrant: bool, names: list[str], cut: int
) -> None:
    """Do an nn.Sequential and the list of its modules give the plain run's gradients?"""
    segments = 1 + cut % len(names)
    for form in (lambda modules: torch.nn.Sequential(*modules), list):

        def program(wrap: Any, leaves: list[torch.Tensor], form: Any = form) -> Any:
            result = wrap(Chain(form(_functions(names, leaves))), leaves[0])
            result.sum().backward()
            return result.detach()

        assert_equivalent(program, _leaves, _wrap(ckpt, segments, use_reentrant))
    reached()


@clause("sequential/functions-forms")
@both_variants
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize(
    "functions",
    [
        [torch.sin, torch.cos, torch.exp],
        [torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Sigmoid()],
        [torch.nn.Tanh(), lambda x: x * x, torch.exp],
        torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sequential(torch.nn.Tanh()), torch.nn.SELU()),
    ],
    ids=["functions", "modules", "both", "nested Sequential"],
)
def test_list_is_left_as_it_was(
    ckpt: Candidate, use_reentrant: bool, segments: int, functions: Any
) -> None:
    """Is each documented form accepted, and is what was passed unchanged after backward?"""
    before = list(functions)
    x, plain = _input(), _input()
    _wrap(ckpt, segments, use_reentrant)(Chain(functions), x).sum().backward()
    Chain(before)(plain).sum().backward()
    reached()
    assert_same(x.grad, plain.grad, "gradient of the input")
    assert list(functions) == before, "the list of functions was changed"


@clause("sequential/repeated-module")
@both_variants
@pytest.mark.parametrize("form", ["list", "Sequential"])
@given(
    places=st.lists(st.booleans(), max_size=4).map(lambda between: [True, *between, True]),
    cut=st.integers(0, 5),
)
def test_module_that_stands_twice_runs_twice(
    ckpt: Candidate, use_reentrant: bool, form: str, places: list[bool], cut: int
) -> None:
    """Does a module that stands in the model several times run at each of its places?"""
    segments = 1 + cut % len(places)

    def make_leaves() -> list[torch.Tensor]:
        # Small whole numbers: their sums are exact, whatever the order of the summands.
        return [
            torch.randint(-2, 3, (2, WIDTH)).double().requires_grad_(),
            torch.randint(-2, 3, (WIDTH, WIDTH)).double().requires_grad_(),
        ]

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        shared = Affine(leaves[1])
        modules = [shared if here else torch.nn.Hardtanh(-100.0, 100.0) for here in places]
        chain = Chain(torch.nn.Sequential(*modules) if form == "Sequential" else modules)
        result = wrap(chain, leaves[0])
        result.sum().backward()
        reached()
        return result.detach()

    assert_equivalent(program, make_leaves, _wrap(ckpt, segments, use_reentrant))


@clause("sequential/signature")
@both_variants
@pytest.mark.parametrize(
    "form", ["position", "mixed", "names", "all by position", "preserve", "no preserve"]
)
def test_arguments_by_position_and_name(ckpt: Candidate, use_reentrant: bool, form: str) -> None:
    """Are the documented names and their order accepted?"""
    run = ckpt.checkpoint_sequential
    layers = Layers(4)
    x = _input()
    if form == "position":
        result = run(layers.functions, 2, x, use_reentrant=use_reentrant)
    elif form == "mixed":
        result = run(layers.functions, segments=2, input=x, use_reentrant=use_reentrant)
    elif form == "names":
        result = run(functions=layers.functions, segments=2, input=x, use_reentrant=use_reentrant)
    elif form == "all by position":
        result = run(layers.functions, 2, x, use_reentrant)
    else:
        result = run(
            layers.functions,
            2,
            x,
            use_reentrant=use_reentrant,
            preserve_rng_state=form == "preserve",
        )
    expected_mode = not use_reentrant
    assert layers.grad_modes[0] is expected_mode, (
        f"use_reentrant={use_reentrant} given ({form}): expected the first part to run with grad "
        f"mode {expected_mode}, observed {layers.grad_modes[0]}"
    )
    result.sum().backward()
    reached()
    plain = _input()
    Chain(layers.functions)(plain).sum().backward()
    assert_same(x.grad, plain.grad, "gradient of the input")


# ---------------------------------------------------------------- segments


@clause("sequential/parts")
@both_variants
@given(split=splits)
@example(split=(6, 5))
def test_there_are_as_many_parts_as_segments(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Is the number of parts, seen by the tensors kept between them, that of segments?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    layers.outputs.surviving(segments - 1 + _last_part(count, segments))
    kept = layers.outputs.indices()
    result.sum().backward()
    reached()
    start = layers.plain_from()
    between = [index for index in kept if index < start]
    assert len(between) == segments - 1, (
        f"{count} functions in {segments} segments: expected {segments - 1} tensors kept between "
        f"checkpointed parts, observed those behind functions {between} of {start} checkpointed"
    )
    assert segments == 1 or between[-1] == start - 1, (
        f"expected the last part's input to be kept, observed {between}"
    )


@clause("sequential/last-part-plain")
@both_variants
@given(split=splits)
@example(split=(5, 4))
def test_last_part_is_not_recomputed(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Are the functions of the last part run once, and all before it run again?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    inner_kept = layers.inner.indices()
    result.sum().backward()
    reached()
    again = sorted(layers.runs[count:])
    start = len(again)
    assert again == list(range(start)), (
        f"expected every function of a first stretch to be recomputed once, observed {again}"
    )
    assert start < count, "expected the last part to run once, observed it recomputed"
    assert start >= segments - 1, (
        f"{segments} segments: expected at least {segments - 1} functions recomputed, "
        f"observed {start}"
    )
    assert segments > 1 or start == 0, f"one segment: expected no recomputation, observed {again}"
    assert set(range(start, count)) <= set(inner_kept), (
        "expected the last part's intermediates to be kept as in a plain run"
    )


@clause("sequential/split")
@both_variants
@given(split=splits)
@example(split=(5, 3))
def test_parts_are_even_and_the_last_takes_the_rest(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Are all checkpointed parts n // segments long?"""
    count, segments = split
    size = count // segments
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    kept = layers.outputs.indices()
    result.sum().backward()
    reached()
    start = (segments - 1) * size
    assert layers.plain_from() == start, (
        f"{count} functions in {segments} segments: expected the last part to begin at function "
        f"{start}, observed {layers.plain_from()}"
    )
    expected = [size * part - 1 for part in range(1, segments)]
    assert [index for index in kept if index < start] == expected, (
        f"expected cuts behind functions {expected}, observed {kept}"
    )


@clause("sequential/segments-out-of-range")
@both_variants
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("excess", ["none", "one more", "many more"])
def test_impossible_numbers_of_segments_raise(
    ckpt: Candidate, use_reentrant: bool, count: int, excess: str
) -> None:
    """Are 0 segments, and more than there are functions, refused before anything runs?"""
    layers = Layers(count)
    _wrap(ckpt, count, use_reentrant)(Chain(layers.functions), _input())
    assert layers.runs == list(range(count))
    layers.runs.clear()
    segments = {"none": 0, "one more": count + 1, "many more": 10 * count}[excess]
    reached()
    with pytest.raises(Exception):  # noqa: B017 - which class is left open
        _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    assert layers.runs == [], f"functions {layers.runs} ran before the call was refused"


# ---------------------------------------------------------------- memory and work


@clause("sequential/intermediates-not-kept")
@both_variants
@given(split=splits)
def test_checkpointed_parts_keep_no_intermediates(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Are tensors made inside the checkpointed parts gone after forward?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    layers.inner.surviving(_last_part(count, segments))
    kept = layers.inner.indices()
    result.sum().backward()
    start = layers.plain_from()
    if start:
        reached()
    early = [index for index in kept if index < start]
    assert not early, f"intermediates of checkpointed functions {early} were kept after forward"


@clause("sequential/inputs-kept")
@both_variants
@given(split=splits.filter(lambda split: split[1] > 1))
def test_inputs_of_the_parts_are_kept(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]
) -> None:
    """Is each part recomputed from its own kept input, and is that released by backward?"""
    count, segments = split
    layers = Layers(count)
    marks = Marks()
    x = marks(_input() * 2)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), x)
    del x
    assert marks.alive() == 1, "the model's input was not kept until backward"
    forward = layers.pointers[:count]
    result.sum().backward()
    first_runs = {part[0] for part in layers.again()}
    assert first_runs
    reached()
    for position, index in enumerate(layers.runs[count:], count):
        if index in first_runs:
            assert layers.pointers[position] == forward[index], (
                f"the part that begins with function {index}: expected recomputation from the very "
                "tensor that forward had, observed other memory"
            )
    left = marks.surviving() + layers.outputs.surviving(1)
    assert left == 1, f"expected only the result alive after backward, observed {left} tensors"


@clause("sequential/memory")
@both_variants
@given(split=st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
@example(split=(20, 5))  # enough parts that keeping more than one of them shows
def test_bytes_alive(ckpt: Candidate, use_reentrant: bool, split: tuple[int, int]) -> None:
    """Are bytes alive after forward, and at the worst moment of backward, within the bounds?"""
    count, segments = split
    runs: list[int] = []

    def layer(index: int) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            runs.append(index)
            return x.sin()

        return function

    x = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    functions = [layer(index) for index in range(count)]
    with DataStorages() as live:
        result = _wrap(ckpt, segments, use_reentrant)(Chain(functions), x)
        after_forward = live.bytes()
        live.peak = 0
        result.sum().backward()
        peak = live.peak
    again = runs[count:]
    lengths = [1]
    for before, index in itertools.pairwise(again):
        lengths = [*lengths[:-1], lengths[-1] + 1] if index == before + 1 else [*lengths, 1]
    last = count - len(set(again))
    reached()
    allowed = (segments - 1 + last) * UNIT
    assert after_forward <= allowed, (
        f"{count} functions, {segments} segments, {last} in the last part: expected at most "
        f"{allowed} bytes alive after forward, observed {after_forward}"
    )
    allowed += (max(lengths) + 4) * UNIT
    assert peak <= allowed, (
        f"{count} functions, {segments} segments, longest part {max(lengths)}: expected at most "
        f"{allowed} bytes alive in backward, observed {peak}"
    )


@clause("sequential/one-recomputation")
@both_variants
@given(split=splits, backwards=st.integers(1, 3))
def test_one_recomputation_per_backward(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int], backwards: int
) -> None:
    """Does each backward run each checkpointed function once more, and nothing before it?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, use_reentrant)(Chain(layers.functions), _input())
    total = result.sum()
    assert layers.runs == list(range(count)), f"before backward: observed runs {layers.runs}"
    for number in range(1, backwards + 1):
        total.backward(retain_graph=number < backwards)
        counts = [layers.runs.count(index) for index in range(count)]
        assert max(counts) <= 1 + number, (
            f"after {number} backward calls: expected at most {1 + number} runs of each function, "
            f"observed {counts}"
        )
    if segments == 1 or counts[0] > 1:
        reached()


# ---------------------------------------------------------------- options


@clause("sequential/rng-preserved")
@both_variants
@given(
    split=splits, preserve=st.sampled_from([None, True]), probability=st.sampled_from([0.3, 0.5])
)
def test_random_numbers_are_replayed(
    ckpt: Candidate,
    use_reentrant: bool,
    split: tuple[int, int],
    preserve: bool | None,
    probability: float,
) -> None:
    """Are dropout masks replayed in every part, by default and when asked for?"""
    count, segments = split
    options = {} if preserve is None else {"preserve_rng_state": preserve}

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        functions = [
            lambda x, weight=leaf: torch.nn.functional.dropout(x @ weight, probability).sin()
            for leaf in leaves[1 : 1 + count]
        ]
        result = wrap(Chain(functions), leaves[0])
        between = torch.rand(2)
        result.sum().backward()
        reached()
        return result.detach(), between, torch.rand(2)

    assert_equivalent(program, _leaves, _wrap(ckpt, segments, use_reentrant, **options))


@clause("sequential/rng-not-preserved")
@both_variants
@given(split=splits.filter(lambda split: split[1] > 1), seed=st.integers(0, 1000))
def test_random_numbers_are_new(
    ckpt: Candidate, use_reentrant: bool, split: tuple[int, int], seed: int
) -> None:
    """Does recomputation draw from the stream as it stands with preserve_rng_state=False?"""
    count, segments = split
    drawn: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(WIDTH))
        return (x * drawn[-1]).sin()

    result = _wrap(ckpt, segments, use_reentrant, preserve_rng_state=False)(
        Chain([function] * count), _input()
    )
    torch.manual_seed(seed)
    result.sum().backward()
    again = drawn[count:]
    assert again
    reached()
    after = torch.rand(WIDTH)
    torch.manual_seed(seed)
    expected = [torch.rand(WIDTH) for _ in again]
    assert_same(again, expected, "numbers drawn by recomputation")
    assert_same(after, torch.rand(WIDTH), "random stream after backward")


@clause("sequential/autograd-grad")
@given(names=kinds, cut=st.integers(0, 6), way=st.sampled_from(["grad", "inputs", "create_graph"]))
@example(names=["linear", "tanh", "sin"], cut=2, way="grad")
def test_autograd_grad_works(ckpt: Candidate, names: list[str], cut: int, way: str) -> None:
    """Do autograd.grad and backward(inputs=…) give the plain run's gradients?"""
    segments = 1 + cut % len(names)

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        result = wrap(Chain(_functions(names, leaves)), leaves[0])
        reached()
        if way == "inputs":
            result.sum().backward(inputs=leaves[:1])
            return None
        (gradient,) = torch.autograd.grad(
            (result * result).sum(), leaves[0], create_graph=way == "create_graph"
        )
        if way == "create_graph":
            return torch.autograd.grad(gradient.sum(), leaves[0], allow_unused=True)
        return gradient

    assert_equivalent(program, _leaves, _wrap(ckpt, segments, False))


@clause("sequential/reentrant-backward-only")
@pytest.mark.parametrize("way", ["grad", "inputs"])
@pytest.mark.parametrize("split", [(2, 2), (4, 2), (5, 3)], ids=str)
def test_reentrant_refuses_autograd_grad(ckpt: Candidate, split: tuple[int, int], way: str) -> None:
    """Does autograd.grad through the reentrant variant raise, where backward works?"""
    count, segments = split
    x, plain = _input(), _input()
    chain = Chain([torch.sin] * count)
    _wrap(ckpt, segments, True)(chain, x).sum().backward()
    chain(plain).sum().backward()
    assert_same(x.grad, plain.grad, "gradient by backward()")
    reached()
    result = _wrap(ckpt, segments, True)(chain, x).sum()
    with pytest.raises(Exception):  # noqa: B017, PT012 - which class is chapter 3's matter
        if way == "grad":
            torch.autograd.grad(result, x)
        else:
            result.backward(inputs=[x])


@clause("sequential/reentrant-no-grad")
@given(split=splits)
def test_reentrant_parts_run_under_no_grad(ckpt: Candidate, split: tuple[int, int]) -> None:
    """Do all parts but the last run with grad mode off, and recomputation with it on?"""
    count, segments = split
    layers = Layers(count)
    result = _wrap(ckpt, segments, True)(Chain(layers.functions), _input())
    modes = layers.grad_modes[:count]
    result.sum().backward()
    reached()
    start = layers.plain_from()
    assert start >= segments - 1, f"expected recomputation, observed {layers.runs[count:]}"
    expected = [False] * start + [True] * (count - start)
    assert modes == expected, f"grad modes in forward: expected {expected}, observed {modes}"
    again = layers.grad_modes[count:]
    assert all(again), f"grad modes in recomputation: expected on, observed {again}"


@clause("sequential/nonreentrant-records-graph")
@given(split=splits)
def test_nonreentrant_parts_run_with_grad_mode(ckpt: Candidate, split: tuple[int, int]) -> None:
    """Is grad mode on in every run of every function?"""
    count, segments = split
    layers = Layers(count)
    _wrap(ckpt, segments, False)(Chain(layers.functions), _input()).sum().backward()
    assert len(layers.runs) >= count + segments - 1
    reached()
    assert all(layers.grad_modes), (
        f"grad modes of runs of functions {layers.runs}: expected on, observed {layers.grad_modes}"
    )


@clause("sequential/frozen-input")
@given(count=st.integers(1, 6), cut=st.integers(0, 5), requires_grad=st.booleans())
def test_parameters_are_trained_with_a_frozen_input(
    ckpt: Candidate, count: int, cut: int, requires_grad: bool
) -> None:
    """Do parameters of all parts get gradients though the input requires none?"""
    segments = 1 + cut % count

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        x = leaves[0].detach().requires_grad_(requires_grad)
        wrap(Chain(_functions(["linear"] * count, leaves)), x).sum().backward()
        assert all(leaf.grad is not None for leaf in leaves[1 : 1 + count])
        reached()
        return x.grad

    assert_equivalent(program, _leaves, _wrap(ckpt, segments, False))


@clause("sequential/early-stop-context")
@given(
    split=splits.filter(lambda split: split[1] > 1), enabled=st.sampled_from([None, True, False])
)
@example(split=(4, 2), enabled=None)
def test_early_stop_context_applies(
    ckpt: Candidate, split: tuple[int, int], enabled: bool | None
) -> None:
    """Do the parts stop early by default and run to their end under the context?"""
    count, segments = split
    begun: list[int] = []
    ended: list[int] = []

    def layer(index: int) -> Function:
        def function(x: torch.Tensor) -> torch.Tensor:
            begun.append(index)
            y = x.sin()  # saves the last tensor that is needed, if this function ends a part
            ended.append(index)
            return y + 1

        return function

    functions = [layer(index) for index in range(count)]
    context = (
        contextlib.nullcontext() if enabled is None else ckpt.set_checkpoint_early_stop(enabled)
    )
    with context:
        result = _wrap(ckpt, segments, False)(Chain(functions), _input())
    assert ended == list(range(count))
    result.sum().backward()
    again, ends = len(begun) - count, len(ended) - count
    assert again >= segments - 1
    reached()
    expected = again if enabled is False else again - (segments - 1)
    assert ends == expected, (
        f"early stop {'by default' if enabled is None else enabled}, {segments - 1} checkpointed "
        f"parts of {again} functions: expected {expected} functions recomputed to their end, "
        f"observed {ends}"
    )


@clause("sequential/nesting")
@both_variants
@given(
    names=kinds,
    cut=st.integers(0, 6),
    place=st.sampled_from(["inside", "functions", "sequential", "all"]),
)
def test_sequential_in_regions_and_regions_in_functions(
    ckpt: Candidate, use_reentrant: bool, names: list[str], cut: int, place: str
) -> None:
    """Are gradients right with the model inside a region and regions inside its functions?"""
    segments = 1 + cut % len(names)
    options = {"use_reentrant": use_reentrant}

    def run(chain: Chain, x: torch.Tensor) -> Any:
        functions = list(chain.functions)
        if place in ("functions", "all"):
            functions = [
                lambda x, function=function: ckpt.checkpoint(function, x, **options)
                for function in functions
            ]
        if place in ("sequential", "all"):
            functions = [
                lambda x, function=function: ckpt.checkpoint_sequential(
                    [function, torch.sin], 2, x, **options
                )
                for function in functions
            ]
        if place in ("inside", "all"):
            return ckpt.checkpoint(
                lambda x: ckpt.checkpoint_sequential(functions, segments, x, **options),
                x,
                **options,
            )
        return ckpt.checkpoint_sequential(functions, segments, x, **options)

    def program(wrap: Any, leaves: list[torch.Tensor]) -> Any:
        functions = _functions(names, leaves)
        if wrap is not run and place in ("sequential", "all"):
            functions = [Chain([function, torch.sin]) for function in functions]
        result = wrap(Chain(functions), leaves[0])
        result.sum().backward()
        reached()
        return result.detach()

    assert_equivalent(program, _leaves, run)


# ---------------------------------------------------------------- wrong calls and warnings


@clause("sequential/one-input")
@both_variants
@pytest.mark.parametrize("more", [2, 3])
def test_several_inputs_are_refused(ckpt: Candidate, use_reentrant: bool, more: int) -> None:
    """Are further input tensors refused before a function runs?"""
    layers = Layers(2)
    _wrap(ckpt, 2, use_reentrant)(Chain(layers.functions), _input())
    assert layers.runs == [0, 1]
    layers.runs.clear()
    reached()
    extra = [_input() for _ in range(more)]
    with pytest.raises(Exception):  # noqa: B017 - TypeError in torch, by the signature
        ckpt.checkpoint_sequential(layers.functions, 2, _input(), *extra)
    assert layers.runs == [], f"functions {layers.runs} ran before the call was refused"


@clause("sequential/unknown-keyword")
@both_variants
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("keyword", [{"scale": 2.0}, {"foo": None, "preserve_rng_state": True}])
def test_unknown_keyword_is_not_ignored(
    ckpt: Candidate, use_reentrant: bool, segments: int, keyword: dict[str, Any]
) -> None:
    """Is an unknown keyword refused before a function runs, or else given to every function?"""
    received: list[set[str]] = []

    def function(x: torch.Tensor, **options: Any) -> torch.Tensor:
        received.append(set(options))
        return x.sin()

    run = _wrap(ckpt, segments, use_reentrant, **keyword)
    _wrap(ckpt, segments, use_reentrant)(Chain([function] * 3), _input())
    assert received == [set()] * 3
    received.clear()
    reached()
    try:
        run(Chain([function] * 3), _input())
    except Exception:  # noqa: BLE001 - which class is left open
        assert received == [], f"{len(received)} functions ran before the call was refused"
    else:
        names = set(keyword) - {"preserve_rng_state"}
        assert received == [names] * 3, (
            f"keyword {sorted(names)}: expected an exception, or that each of 3 functions gets it; "
            f"observed {received}"
        )


def _refused(ckpt: Candidate, options: dict[str, Any]) -> bool:
    """Whether a call that leaves use_reentrant out raises, as the documentation announces."""
    layers = Layers(2)
    with caught_warnings():
        try:
            ckpt.checkpoint_sequential(layers.functions, 2, _input(), **options)
        except Exception:  # noqa: BLE001 - which class is left open
            assert layers.runs == [], f"functions {layers.runs} ran before the call was refused"
            return True
    return False


def _mentions(seen: list[Any]) -> list[Any]:
    return [warning for warning in seen if "use_reentrant" in str(warning.message)]


@clause("sequential/omitted-variant-warns")
@pytest.mark.parametrize("given", ["omitted", None, False, True], ids=str)
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_one_warning_per_call(ckpt: Candidate, segments: int, given: Any) -> None:
    """Does a call that leaves use_reentrant out warn once, and one that passes it never?"""
    options = {} if given == "omitted" else {"use_reentrant": given}
    expected = 1 if given in ("omitted", None) else 0
    for attempt in ("first", "second"):
        x = _input()
        if expected and _refused(ckpt, options):
            reached()
            return
        with caught_warnings() as seen:
            ckpt.checkpoint_sequential([torch.sin] * 4, segments, x, **options).sum().backward()
        reached()
        found = [str(warning.message) for warning in _mentions(seen)]
        assert len(found) == expected, (
            f"{attempt} call with {segments} segments: expected {expected} warnings about "
            f"use_reentrant, observed {len(found)}: {found}"
        )
        plain = _input()
        Chain([torch.sin] * 4)(plain).sum().backward()
        assert_same(x.grad, plain.grad, "gradient of the input")


@clause("sequential/omitted-variant-reentrant")
@pytest.mark.parametrize("given", ["omitted", None], ids=str)
@pytest.mark.parametrize("split", [(2, 2), (5, 2), (4, 4)], ids=str)
def test_default_is_reentrant(ckpt: Candidate, split: tuple[int, int], given: Any) -> None:
    """Does a call without use_reentrant run its parts as the reentrant variant does?"""
    count, segments = split
    options = {} if given == "omitted" else {"use_reentrant": given}

    def modes(**options: Any) -> list[bool]:
        layers = Layers(count)
        with caught_warnings():
            result = ckpt.checkpoint_sequential(layers.functions, segments, _input(), **options)
        result.sum().backward()
        return layers.grad_modes

    expected = modes(use_reentrant=True)
    assert False in expected
    reached()
    if _refused(ckpt, options):
        return
    observed = modes(**options)
    assert observed == expected, (
        f"grad modes of all runs: expected {expected} as with use_reentrant=True, "
        f"observed {observed}"
    )


def _current_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@clause("sequential/warning-location")
@pytest.mark.parametrize("place", ["here", "in a helper", "in a method"])
def test_warning_points_to_the_call(ckpt: Candidate, place: str) -> None:
    """Are file and line of the warning those of the call?"""
    functions = [torch.sin, torch.cos]
    lines: list[int] = []
    if _refused(ckpt, {}):
        reached()
        return

    def helper() -> None:
        lines.append(_current_line() + 1)
        ckpt.checkpoint_sequential(functions, 2, _input())

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            lines.append(_current_line() + 1)
            return ckpt.checkpoint_sequential(functions, 2, x)

    with caught_warnings() as seen:
        if place == "here":
            lines.append(_current_line() + 1)
            ckpt.checkpoint_sequential(functions, 2, _input())
        elif place == "in a helper":
            helper()
        else:
            Model()(_input())
    found = _mentions(seen)
    assert found, "expected a warning about use_reentrant"
    reached()
    places = [(warning.filename, warning.lineno) for warning in found]
    assert places == [(__file__, lines[0])], (
        f"expected the warning at {(__file__, lines[0])}, observed {places}"
    )
