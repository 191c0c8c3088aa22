"""Histories instead of programs: state machines that drive a candidate and know what must be seen.

Each ``…_machine(candidate)`` gives a machine class to run with ``run_state_machine_as_test``.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.observe import assert_same
from conformance.observe.fake_device import fake_accelerator
from conformance.programs.execute import PLAIN, compiled
from conformance.programs.language import ALL_OPERATORS, Language
from conformance.programs.model import Program
from conformance.programs.render import Cut, render
from conformance.programs.strategy import programs
from conformance.testing import reached

RETAINED = Language(
    "retained", plans=("none",), once=False, closures=True, depth=2, dtypes=("float64",)
)
THREADED = Language("threaded", ALL_OPERATORS, plans=("none",), closures=True, depth=2)


class _Leave(Exception):
    """Leaves a context."""


def forward(program: Program, api: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the program up to its plan; its results and leaves that require grad."""
    outputs = program.outputs
    leaves = [leaf.tensor.name for leaf in program.leaves if leaf.tensor.grad]
    cut = Cut("after forward", f"[{', '.join(outputs)}], [{', '.join(leaves)}]")
    rendered = render(program, cut)
    made = compiled(rendered.source)(**{name: getattr(api, name) for name in rendered.names})
    return [item for item in made[0] if item.requires_grad], made[1]


# ---------------------------------------------------------------------- retained graphs


def retained_graph_machine(candidate: Any) -> type[RuleBasedStateMachine]:
    """Backward calls of every kind over one graph, beside the same calls on the plain graph."""

    class RetainedGraph(RuleBasedStateMachine):
        @initialize(program=programs(RETAINED))
        def build(self, program: Program) -> None:
            state = torch.get_rng_state()
            self.pairs = [forward(program, PLAIN), forward(program, candidate)]
            torch.set_rng_state(state)
            self.freed = False

        def both(self, call: Any) -> list[Any]:
            return [call(outputs, leaves) for outputs, leaves in self.pairs]

        def compare(self, what: str, plain: Any, observed: Any) -> None:
            reached()
            assert_same(observed, plain, what)
            for index, (one, other) in enumerate(
                zip(self.pairs[0][1], self.pairs[1][1], strict=True)
            ):
                assert_same(other.grad, one.grad, f"gradient of leaf {index} after {what}")

        @precondition(lambda self: not self.freed)
        @rule(output=st.integers(0, 7), square=st.booleans())
        def backward(self, output: int, square: bool) -> None:
            def call(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
                chosen = outputs[output % len(outputs)]
                loss = chosen.square().sum() if square else chosen.sum()
                loss.backward(retain_graph=True)

            self.compare("backward", *self.both(call))

        @precondition(lambda self: not self.freed)
        @rule(output=st.integers(0, 7), leaf=st.integers(0, 7))
        def backward_to_one(self, output: int, leaf: int) -> None:
            def call(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
                chosen = leaves[leaf % len(leaves)]
                outputs[output % len(outputs)].sum().backward(retain_graph=True, inputs=[chosen])

            self.compare("backward with inputs", *self.both(call))

        @precondition(lambda self: not self.freed)
        @rule(output=st.integers(0, 7), create=st.booleans())
        def grad(self, output: int, create: bool) -> None:
            def call(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
                given = torch.autograd.grad(
                    outputs[output % len(outputs)].square().sum(),
                    leaves,
                    retain_graph=True,
                    create_graph=create,
                    allow_unused=True,
                )
                if create:
                    total = torch.stack(
                        [item.square().sum() for item in given if item is not None]
                    ).sum()
                    again = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
                    return [item.detach() if item is not None else None for item in again]
                return list(given)

            self.compare("grad", *self.both(call))

        @rule()
        def forget(self) -> None:
            def call(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
                for leaf in leaves:
                    leaf.grad = None

            self.both(call)

        @precondition(lambda self: not self.freed)
        @rule()
        def free(self) -> None:
            def call(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
                torch.stack([output.square().sum().double() for output in outputs]).sum().backward()

            self.compare("the last backward", *self.both(call))
            self.freed = True

        @precondition(lambda self: self.freed)
        @rule()
        def backward_over_freed(self) -> None:
            endings = []
            for outputs, _ in self.pairs:
                try:
                    outputs[0].square().sum().backward()
                    endings.append("no exception")
                except RuntimeError:
                    endings.append("RuntimeError")
            assert endings[0] == endings[1], (
                f"backward over a freed graph: expected {endings[0]}, observed {endings[1]}"
            )
            if endings[0] == "no exception":
                self.compare("backward over a graph that saves nothing", None, None)

    return RetainedGraph


# ---------------------------------------------------------------------- switching contexts


@dataclass
class _Called:
    output: torch.Tensor
    leaf: torch.Tensor
    steps: list[str]
    stops: bool


def switch_machine(candidate: Any) -> type[RuleBasedStateMachine]:
    """Early-stop contexts opened and left between calls and backward calls."""

    class Switches(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[tuple[AbstractContextManager[Any], bool]] = []
            self.calls: list[_Called] = []

        @precondition(lambda self: len(self.open) < 4)
        @rule(setting=st.booleans())
        def enter(self, setting: bool) -> None:
            context = candidate.set_checkpoint_early_stop(setting)
            context.__enter__()
            self.open.append((context, setting))

        @precondition(lambda self: self.open)
        @rule(by_exception=st.booleans())
        def leave(self, by_exception: bool) -> None:
            context, _ = self.open.pop()
            if not by_exception:
                context.__exit__(None, None, None)
                return
            error = _Leave()
            try:
                swallowed = context.__exit__(_Leave, error, None)
            except _Leave:
                swallowed = False
            assert not swallowed, "expected the exception to leave the context, observed it gone"

        @rule(option=st.sampled_from([None, True, False]))
        def call(self, option: bool | None) -> None:
            steps: list[str] = []

            def region(a: torch.Tensor) -> torch.Tensor:
                b = a.sin().cos()
                steps.append("behind the last saved tensor")
                return b + 1

            leaf = torch.ones(2, requires_grad=True)
            options = {} if option is None else {"early_stop": option}
            output = candidate.checkpoint(region, leaf, use_reentrant=False, **options)
            # The innermost open context decides; without one, the option.
            stops = self.open[-1][1] if self.open else option is not False
            self.calls.append(_Called(output, leaf, steps, stops))

        @precondition(lambda self: self.calls)
        @rule(index=st.integers(0, 7))
        def backward(self, index: int) -> None:
            called = self.calls.pop(index % len(self.calls))
            called.output.sum().backward()
            wanted = 1 if called.stops else 2
            reached()
            assert len(called.steps) == wanted, (
                f"expected recomputation {'to stop early' if called.stops else 'to the end'}, "
                f"observed the region's end {len(called.steps)} times, forward included"
            )
            ones = torch.ones(2)
            assert_same(called.leaf.grad, -ones.sin().sin() * ones.cos(), "gradient")

        def teardown(self) -> None:
            while self.open:
                self.open.pop()[0].__exit__(None, None, None)

    return Switches


# ---------------------------------------------------------------------- groups


@dataclass
class _Lanes:
    outputs: list[torch.Tensor]
    leaves: list[torch.Tensor]
    runs: list[int]
    left: list[int] = field(default_factory=lambda: [0, 1])
    seen_in: int | None = None


def group_machine(candidate: Any) -> type[RuleBasedStateMachine]:
    """Groups entered and left between backward calls over disjoint parts of regions."""

    class Groups(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.group: AbstractContextManager[Any] | None = None
            self.number = 0
            self.regions: list[_Lanes] = []

        @rule(depth=st.integers(1, 2))
        def call(self, depth: int) -> None:
            runs = [0]

            def region(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                runs[0] += 1
                return a.sin().sin(), b.cos().cos()

            def outer(a: torch.Tensor, b: torch.Tensor) -> Any:
                return candidate.checkpoint(region, a, b, use_reentrant=False)

            leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
            function = region if depth == 1 else outer
            outputs = candidate.checkpoint(function, *leaves, use_reentrant=False)
            lanes = _Lanes(list(outputs), leaves, runs)
            lanes.runs.append(depth)
            self.regions.append(lanes)

        @precondition(lambda self: self.group is None)
        @rule()
        def enter(self) -> None:
            self.group = candidate.GraphExecGroup()
            self.group.__enter__()
            self.number += 1

        @precondition(lambda self: self.group is not None)
        @rule(by_exception=st.booleans())
        def leave(self, by_exception: bool) -> None:
            assert self.group is not None
            group, self.group = self.group, None
            if by_exception:
                assert not group.__exit__(_Leave, _Leave(), None), (
                    "expected the exception to leave the group, observed it gone"
                )
            else:
                group.__exit__(None, None, None)

        @precondition(lambda self: any(lanes.left for lanes in self.regions))
        @rule(which=st.integers(0, 7), lane=st.integers(0, 1))
        def backward(self, which: int, lane: int) -> None:
            able = [lanes for lanes in self.regions if lanes.left]
            lanes = able[which % len(able)]
            part = lanes.left.pop(lane % len(lanes.left))
            before, depth = lanes.runs[0], lanes.runs[1]
            lanes.outputs[part].sum().backward()
            again = lanes.runs[0] - before
            inside = self.number if self.group is not None else None
            repeated = inside is not None and lanes.seen_in == inside
            reached()
            most = 0 if repeated else depth
            assert again <= most, (
                f"expected at most {most} recomputations by this backward "
                f"({'again ' if repeated else ''}{'inside' if inside else 'outside of'} a group), "
                f"observed {again}"
            )
            lanes.seen_in = inside
            ones = torch.ones(2)
            wanted = (
                ones.sin().cos() * ones.cos(),
                ones.cos().sin() * ones.sin(),
            )[part]
            observed = lanes.leaves[part].grad
            assert observed is not None, "expected a gradient, observed none"
            assert torch.allclose(observed, wanted), (
                f"gradient: expected {wanted.tolist()}, observed {observed.tolist()}"
            )

        def teardown(self) -> None:
            if self.group is not None:
                self.group.__exit__(None, None, None)

    return Groups


# ---------------------------------------------------------------------- device states


def device_state_machine(candidate: Any) -> type[RuleBasedStateMachine]:
    """States set for the devices of a stand-in accelerator, by default type and by name."""

    class DeviceStates(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.context = fake_accelerator(candidate, count=3)
            self.device = self.context.__enter__()
            self.model = self.device.states()
            self.default = False

        @rule()
        def make_default(self) -> None:
            candidate.DefaultDeviceType.set_device_type(self.device.type)
            assert candidate.DefaultDeviceType.get_device_type() == self.device.type
            self.default = True

        @rule(
            ids=st.lists(st.integers(0, 2), unique=True, max_size=3),
            value=st.integers(1, 50),
            named=st.booleans(),
            current=st.integers(0, 2),
        )
        def set_states(self, ids: list[int], value: int, named: bool, current: int) -> None:
            states = [torch.full((4,), float(value + index)) for index in range(len(ids))]
            options = {"device_type": self.device.type} if named or not self.default else {}
            self.device.current = current
            candidate.set_device_states(ids, states, **options)
            for index, state in zip(ids, states, strict=True):
                self.model[index] = state.tolist()
            reached()
            assert self.device.states() == self.model, (
                f"expected the states {self.model}, observed {self.device.states()}"
            )
            assert self.device.current == current, "expected the current device to stay"

        @rule(index=st.integers(0, 2))
        def draw(self, index: int) -> None:
            self.device.draw(index)
            self.model[index] = [number + 1 for number in self.model[index]]

        def teardown(self) -> None:
            self.context.__exit__(None, None, None)

    return DeviceStates


# ---------------------------------------------------------------------- threads


def in_threads(made: list[Program], candidate: Any) -> None:
    """Fail unless the programs' backward calls, all at once, each in a thread of its own, give
    the gradients that they give plainly in a thread.

    (In which order the parts of a gradient are added depends on the thread that built the graph
    and the one that built the loss, so the plain calls run in threads too, one by one.)
    """
    state = torch.get_rng_state()
    expected = []
    for program in made:
        outputs, leaves = forward(program, PLAIN)
        _together([outputs])
        expected.append([leaf.grad for leaf in leaves])
    pairs = [forward(program, candidate) for program in made]
    _together([outputs for outputs, _ in pairs])
    torch.set_rng_state(state)
    reached()
    observed = [[leaf.grad for leaf in leaves] for _, leaves in pairs]
    assert_same(observed, expected, "gradients by thread")


def _together(losses: list[list[torch.Tensor]]) -> None:
    """Run backward over each list of outputs in a thread of its own, all at once."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(losses))

    def run(outputs: list[torch.Tensor]) -> None:
        try:
            start.wait(timeout=30)
            _backward(outputs)
        except BaseException as error:  # noqa: BLE001 - it must reach the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(outputs,)) for outputs in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _backward(outputs: list[torch.Tensor]) -> None:
    torch.stack([output.square().sum().double() for output in outputs]).sum().backward()
