"""Chapter 6: early stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import AmbientState, Recorder, assert_equivalent
from conformance.observe.switches import Block, Call, both_ways, run_switches, switch_programs
from conformance.testing import clause, reached


def _in_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.sin()
    return x


def _detached(x: torch.Tensor) -> torch.Tensor:
    x.detach().exp()
    return x


# Steps that need something in backward: their input, their result, or both operands.
_NEEDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "square": lambda x: x * x,
    "exp": torch.exp,
}
# Steps that need nothing in backward.
_UNNEEDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shift": lambda x: x + 1,
    "double": lambda x: x * 2,
    "view": lambda x: x.view(-1),
    "clone": torch.clone,
    "no_grad": _in_no_grad,
    "detached": _detached,
}
_heads = st.lists(st.sampled_from(sorted(_NEEDED)), min_size=2, max_size=4)
_tails = st.lists(st.sampled_from(sorted(_UNNEEDED)), min_size=1, max_size=4)


def _leaf() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 3).requires_grad_()


@dataclass
class _Region:
    """``head`` steps that backward needs something of, then ``tail`` steps that it does not.

    ``runs`` counts how often it was begun, ``ends`` how often it came to its end; ``tail_steps``
    the steps of the tail.
    """

    head: list[str] = field(default_factory=lambda: ["sin", "exp"])
    tail: list[str] = field(default_factory=lambda: ["shift"])
    runs: int = 0
    ends: int = 0
    tail_steps: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for name in self.head:
            x = _NEEDED[name](x)
        for name in self.tail:
            self.tail_steps += 1
            x = _UNNEEDED[name](x)
        self.ends += 1
        return x

    def assert_stopped(self, recomputations: int = 1) -> None:
        """Fail unless every recomputation happened and left the tail out."""
        assert self.runs >= 1 + recomputations, (
            f"expected forward and {recomputations} recomputation(s), observed {self.runs} runs"
        )
        reached()
        assert self.tail_steps == len(self.tail), (
            f"expected the {len(self.tail)} steps behind the last needed tensor in forward only, "
            f"observed {self.tail_steps}"
        )
        assert self.ends == 1, f"expected one run to the end, observed {self.ends}"

    def assert_complete(self, recomputations: int = 1) -> None:
        """Fail unless every recomputation happened and ran the function to its end."""
        expected = 1 + recomputations
        assert self.runs == expected, (
            f"expected forward and {recomputations} recomputation(s), observed {self.runs} runs"
        )
        reached()
        assert self.ends == expected, (
            f"expected {expected} runs to the end, observed {self.ends} of {self.runs}"
        )

    def assert_as(self, stops: bool) -> None:
        """Fail unless the one recomputation did what ``stops`` says."""
        if stops:
            self.assert_stopped()
        else:
            self.assert_complete()


def _option(argument: bool | None) -> dict[str, Any]:
    return {} if argument is None else {"early_stop": argument}


def _name(value: bool | None) -> str:
    return "omitted" if value is None else str(value)


# ---------------------------------------------------------------------- what is left out


@clause("early-stop/needed-only")
@given(head=_heads, tail=_tails)
def test_tail_is_not_recomputed(ckpt: Candidate, head: list[str], tail: list[str]) -> None:
    """Are operators behind the last needed tensor left out of the recomputation?"""
    region = _Region(head, tail)
    x = _leaf()
    ckpt.checkpoint(region, x, use_reentrant=False, early_stop=True).sum().backward()
    assert x.grad is not None
    region.assert_stopped()


@clause("early-stop/needed-only")
@given(tail=_tails, outputs=st.integers(1, 3))
def test_tail_of_several_outputs_is_not_recomputed(
    ckpt: Candidate, tail: list[str], outputs: int
) -> None:
    """Is the tail left out where the region returns several tensors in a container?"""
    region = _Region(["sin", "tanh"], tail)

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = region(x)
        return {str(index): y + index for index in range(outputs)}

    result = ckpt.checkpoint(function, _leaf(), use_reentrant=False, early_stop=True)
    torch.stack([value.sum() for value in result.values()]).sum().backward()
    region.assert_stopped()


@clause("early-stop/needed-only")
def test_parameters_of_the_region(ckpt: Candidate) -> None:
    """Does recomputation of a module stop too, where what is needed includes its parameters?"""
    linear = torch.nn.Linear(3, 3)
    region = _Region(["sin"], ["shift", "view"])

    def function(x: torch.Tensor) -> torch.Tensor:
        return region(linear(x).tanh())

    ckpt.checkpoint(
        function, torch.ones(2, 3), use_reentrant=False, early_stop=True
    ).sum().backward()
    assert linear.weight.grad is not None
    region.assert_stopped()


@clause("early-stop/every-backward")
@given(passes=st.integers(2, 4), stops=st.booleans())
def test_each_backward_pass_follows_the_setting(ckpt: Candidate, passes: int, stops: bool) -> None:
    """Does the second and every later recomputation stop, or not stop, like the first?"""
    region = _Region()
    output = ckpt.checkpoint(region, _leaf(), use_reentrant=False, early_stop=stops).sum()
    for _ in range(passes):
        output.backward(retain_graph=True)
    if stops:
        region.assert_stopped(passes)
    else:
        region.assert_complete(passes)


@clause("early-stop/default")
@given(head=_heads, tail=_tails)
def test_on_when_omitted(ckpt: Candidate, head: list[str], tail: list[str]) -> None:
    """Does recomputation stop early where nobody says anything about it?"""
    region = _Region(head, tail)
    ckpt.checkpoint(region, _leaf(), use_reentrant=False).sum().backward()
    region.assert_stopped()


@clause("early-stop/off")
@given(head=_heads, tail=_tails)
def test_whole_function_is_recomputed(ckpt: Candidate, head: list[str], tail: list[str]) -> None:
    """Does early_stop=False recompute the function to its end?"""
    region = _Region(head, tail)
    x = _leaf()
    ckpt.checkpoint(region, x, use_reentrant=False, early_stop=False).sum().backward()
    assert x.grad is not None
    region.assert_complete()
    assert region.tail_steps == 2 * len(tail), (
        f"expected the tail's {len(tail)} steps twice, observed {region.tail_steps}"
    )


@clause("early-stop/nothing-needed")
@given(steps=_tails)
def test_region_that_needs_nothing_is_not_run_again(ckpt: Candidate, steps: list[str]) -> None:
    """Is a region left alone in backward if its gradient formulas need no tensor at all?"""
    needy = _Region(["sin", "exp"], steps)
    ckpt.checkpoint(needy, _leaf(), use_reentrant=False).sum().backward()
    assert needy.runs == 2, f"expected a recomputation where something is needed: {needy}"
    region = _Region([], steps)
    x = _leaf()
    ckpt.checkpoint(region, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    reached()
    assert region.runs == 1, f"expected forward only, observed {region.runs} runs"


@clause("early-stop/module-hooks")
@given(stops=st.booleans(), layers=st.integers(1, 3))
def test_hooks_of_the_last_module(ckpt: Candidate, stops: bool, layers: int) -> None:
    """Is a forward hook behind the last needed tensor called in recomputation exactly if early
    stop is off?"""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(layers)])
    before: list[int] = []
    after: list[int] = []
    model[-1].register_forward_pre_hook(lambda *_: before.append(1))
    model[-1].register_forward_hook(lambda *_: after.append(1))
    region = Recorder(model)
    x = torch.ones(2, 3, requires_grad=True)
    ckpt.checkpoint(region, x, use_reentrant=False, early_stop=stops).sum().backward()
    assert region.count == 2, f"expected one recomputation, observed {region.count} runs"
    reached()
    if stops:
        assert len(after) == 1, f"expected the forward hook once, observed {len(after)}"
        assert len(before) <= 2, f"expected the pre-hook twice at most, observed {len(before)}"
    else:
        assert (len(before), len(after)) == (2, 2), (
            f"expected both hooks twice, observed {len(before)} and {len(after)}"
        )


# ---------------------------------------------------------------------- what does not change


def _linspace(count: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.linspace(0.1, 0.9, count).requires_grad_()]


@clause("early-stop/same-results")
@given(
    steps=st.lists(st.sampled_from(sorted({**_NEEDED, **_UNNEEDED})), min_size=1, max_size=6),
    stops=st.booleans(),
    dropout=st.booleans(),
)
def test_results_do_not_depend_on_it(
    ckpt: Candidate, steps: list[str], stops: bool, dropout: bool
) -> None:
    """Are result, gradients and state those of the plain run, with and without early stop?"""
    every = {**_NEEDED, **_UNNEEDED}

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in steps:
            x = every[name](x)
            if dropout:
                x = torch.dropout(x, 0.5, True)
        return x

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = wrap(function, leaves[0])
        result.sum().backward()
        return result.detach()

    reached()
    assert_equivalent(
        program,
        _linspace(4),
        lambda f, x: ckpt.checkpoint(f, x, use_reentrant=False, early_stop=stops),
    )


@clause("early-stop/same-results")
@given(steps=_heads, tail=_tails, stops=st.booleans())
def test_second_derivatives_do_not_depend_on_it(
    ckpt: Candidate, steps: list[str], tail: list[str], stops: bool
) -> None:
    """Are second derivatives those of the plain run, with and without early stop?"""

    def program(wrap: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
        output = wrap(_Region(steps, tail), leaves[0]).sum()
        (first,) = torch.autograd.grad(output, leaves[0], create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaves[0])
        return first.detach(), second

    reached()
    assert_equivalent(
        program,
        _linspace(4),
        lambda f, x: ckpt.checkpoint(f, x, use_reentrant=False, early_stop=stops),
    )


class _Context:
    """Counts how often it was entered and left."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.left += 1


@clause("early-stop/unwinds")
@given(depth=st.integers(1, 4), passes=st.integers(1, 2))
def test_blocks_open_at_the_stop_are_left(ckpt: Candidate, depth: int, passes: int) -> None:
    """Is every ``with`` and ``finally`` of the function that is open at the stop left again, by
    the end of backward?"""
    contexts = [_Context() for _ in range(depth)]
    finals: list[int] = []
    region = _Region(["sin", "exp"], ["shift"])

    def function(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            try:
                return region(x)
            finally:
                finals.append(1)

    output = ckpt.checkpoint(function, _leaf(), use_reentrant=False, early_stop=True).sum()
    for _ in range(passes):
        output.backward(retain_graph=True)
    region.assert_stopped(passes)
    assert len(finals) == region.runs, (
        f"expected the finally block once per run, observed {len(finals)} in {region.runs} runs"
    )
    for index, context in enumerate(contexts):
        assert context.left == context.entered == region.runs, (
            f"context {index}: expected to be entered and left {region.runs} times, observed "
            f"{context.entered} and {context.left}"
        )


_STATE: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "enable_grad": torch.enable_grad,
    "default device": lambda: torch.device("cpu"),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
}


@clause("early-stop/unwinds")
@given(names=st.lists(st.sampled_from(sorted(_STATE)), min_size=1, max_size=3))
def test_state_set_inside_the_function_is_undone(ckpt: Candidate, names: list[str]) -> None:
    """Is the state of torch after backward what it was before, although the function was left
    in the middle of blocks that change it?"""
    region = _Region(["sin", "exp"], ["shift"])

    def function(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(_STATE[name]())
            return region(x)

    output = ckpt.checkpoint(function, _leaf(), use_reentrant=False, early_stop=True).sum()
    before = AmbientState.capture()
    output.backward()
    after = AmbientState.capture()
    region.assert_stopped()
    changed = before.difference(after)
    assert not changed, f"expected the state before backward, observed changes {changed}"


# ---------------------------------------------------------------------- several regions


@clause("early-stop/per-region")
@given(arguments=st.lists(st.sampled_from([None, True, False]), min_size=2, max_size=5))
def test_each_region_follows_its_own_argument(
    ckpt: Candidate, arguments: list[bool | None]
) -> None:
    """Does each of several regions in one graph stop, or not, as its own argument says?"""
    regions = [_Region() for _ in arguments]
    x = _leaf()
    for region, argument in zip(regions, arguments, strict=True):
        x = ckpt.checkpoint(region, x, use_reentrant=False, **_option(argument))
    x.sum().backward()
    for region, argument in zip(regions, arguments, strict=True):
        region.assert_as(argument is not False)


@clause("early-stop/per-region")
@given(arguments=st.lists(st.booleans(), min_size=2, max_size=4))
def test_one_function_in_several_regions(ckpt: Candidate, arguments: list[bool]) -> None:
    """Is the setting that of the call, and not of the function, where one function is called
    with different settings?"""
    region = _Region()
    x = _leaf()
    outputs = [
        ckpt.checkpoint(region, x, use_reentrant=False, early_stop=argument).sum()
        for argument in arguments
    ]
    for output, argument in zip(outputs, arguments, strict=True):
        runs, ends = region.runs, region.ends
        output.backward()
        assert region.runs == runs + 1, "expected one recomputation in each backward pass"
        reached()
        assert region.ends - ends == (not argument), (
            f"early_stop={argument}: expected the recomputation to "
            f"{'stop early' if argument else 'run to the end'}"
        )


# ---------------------------------------------------------------------- the context manager


@clause("early-stop/context-off")
@pytest.mark.parametrize("argument", [None, True, False], ids=_name)
def test_context_switches_it_off(ckpt: Candidate, argument: bool | None) -> None:
    """Does set_checkpoint_early_stop(False) switch early stop off, whatever the argument says?"""
    region = _Region()
    ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(True)).sum().backward()
    region.assert_stopped()
    region = _Region()
    with ckpt.set_checkpoint_early_stop(False):
        output = ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(argument))
        output.sum().backward()
    region.assert_complete()


@clause("early-stop/context-on")
@pytest.mark.parametrize("argument", [None, True, False], ids=_name)
def test_context_switches_it_on(ckpt: Candidate, argument: bool | None) -> None:
    """Does set_checkpoint_early_stop(True) switch early stop on, whatever the argument says?"""
    region = _Region()
    ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(False)).sum().backward()
    region.assert_complete()
    region = _Region()
    with ckpt.set_checkpoint_early_stop(True):
        output = ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(argument))
        output.sum().backward()
    region.assert_stopped()


@clause("early-stop/context-forward-only")
@given(
    setting=st.booleans(),
    argument=st.sampled_from([None, True, False]),
    around_backward=st.sampled_from(["nothing", "same", "opposite"]),
    regions=st.integers(1, 3),
)
def test_context_need_not_surround_backward(
    ckpt: Candidate,
    setting: bool,
    argument: bool | None,
    around_backward: str,
    regions: int,
) -> None:
    """Does a region called under the context manager follow it when backward runs outside?"""
    chain = [_Region() for _ in range(regions)]
    x = _leaf()
    with ckpt.set_checkpoint_early_stop(setting):
        for region in chain:
            x = ckpt.checkpoint(region, x, use_reentrant=False, **_option(argument))
    later: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if around_backward != "nothing":
        later = ckpt.set_checkpoint_early_stop(setting == (around_backward == "same"))
    with later:
        x.sum().backward()
    for region in chain:
        region.assert_as(setting)


@clause("early-stop/context-not-in-backward")
@given(setting=st.booleans(), argument=st.sampled_from([None, True, False]))
def test_context_around_backward_changes_nothing(
    ckpt: Candidate, setting: bool, argument: bool | None
) -> None:
    """Does a region called outside keep its own setting when backward runs under the context
    manager?"""
    region = _Region()
    output = ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(argument))
    with ckpt.set_checkpoint_early_stop(setting):
        output.sum().backward()
    region.assert_as(argument is not False)


def _follow(ckpt: Candidate, program: tuple[Call | Block, ...]) -> None:
    """Run ``program`` with a region at each call, all backward passes last, and fail unless every
    region followed the innermost setting, or its argument outside of every block."""
    made: list[tuple[_Region, bool, torch.Tensor]] = []

    def call(argument: bool | None, settings: tuple[bool | None, ...]) -> None:
        region = _Region()
        output = ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(argument))
        stops = settings[-1] if settings else argument
        made.append((region, stops is not False, output.sum()))

    run_switches(program, ckpt.set_checkpoint_early_stop, call)
    for region, stops, output in made:
        output.backward()
        region.assert_as(stops)


@clause("early-stop/context-nests")
@given(program=switch_programs([True, False], raises=False))
@example(program=both_ways(raises=False))
def test_innermost_context_counts(ckpt: Candidate, program: tuple[Call | Block, ...]) -> None:
    """Does the innermost of nested context managers count, and does leaving one bring back what
    was in force before it?"""
    _follow(ckpt, program)


@clause("early-stop/context-after-exception")
@given(program=switch_programs([True, False], raises=True))
@example(program=both_ways(raises=True))
def test_exception_leaves_contexts_in_order(
    ckpt: Candidate, program: tuple[Call | Block, ...]
) -> None:
    """Is the setting from before brought back where a block is left by an exception, and does
    the exception go on?"""
    _follow(ckpt, program)


@clause("early-stop/context-after-exception")
@pytest.mark.parametrize("setting", [True, False])
def test_exception_passes_through_several_contexts(ckpt: Candidate, setting: bool) -> None:
    """Is the default back after one exception has left two nested blocks, the inner of them
    while a region was being run?"""

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("forward")

    with (
        pytest.raises(KeyError),
        ckpt.set_checkpoint_early_stop(not setting),
        ckpt.set_checkpoint_early_stop(setting),
    ):
        ckpt.checkpoint(fails, _leaf(), use_reentrant=False)
    for argument in (None, True, False):
        region = _Region()
        ckpt.checkpoint(region, _leaf(), use_reentrant=False, **_option(argument)).sum().backward()
        region.assert_as(argument is not False)


# ---------------------------------------------------------------------- the reentrant variant


@clause("early-stop/reentrant-ignores")
@given(
    argument=st.sampled_from([None, True, False]),
    setting=st.sampled_from([None, True, False]),
    tail=_tails,
)
def test_reentrant_variant_always_runs_to_the_end(
    ckpt: Candidate, argument: bool | None, setting: bool | None, tail: list[str]
) -> None:
    """Does the reentrant variant recompute the whole function, whatever argument and context
    manager say?"""
    region = _Region(["sin", "exp"], tail)
    x = _leaf()
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if setting is not None:
        context = ckpt.set_checkpoint_early_stop(setting)
    with context:
        ckpt.checkpoint(region, x, use_reentrant=True, **_option(argument)).sum().backward()
    assert x.grad is not None
    region.assert_complete()
