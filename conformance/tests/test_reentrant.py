"""Chapter 3: the reentrant variant."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.candidate import Candidate
from conformance.observe import (
    AmbientState,
    Recorder,
    assert_equivalent,
    assert_same,
    caught_warnings,
)
from conformance.observe.compare import Program, Wrap, plain
from conformance.observe.functions import (
    KEEPING,
    STEPS,
    chain,
    graph_leaves,
    graph_nodes,
    node_names,
)
from conformance.testing import clause, reached

names = st.lists(st.sampled_from(sorted(STEPS)), max_size=4)
keeping = st.sampled_from(KEEPING)
shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def region(ckpt: Candidate, **options: Any) -> Wrap:
    """``checkpoint`` of the reentrant variant."""
    return functools.partial(ckpt.checkpoint, use_reentrant=True, **options)


def leaves(*shape: int, count: int = 1, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Fresh random leaves that require grad."""
    return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(count)]


def compare(
    ckpt: Candidate, program: Program, make_leaves: Callable[[], list[torch.Tensor]]
) -> None:
    """``assert_equivalent`` with regions of the candidate; counts as reached if there was one."""
    calls = 0

    def wrap(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return ckpt.checkpoint(function, *args, use_reentrant=True)

    assert_equivalent(program, make_leaves, wrap)
    if calls:
        reached()


# ------------------------------------------------------------------ forward and recomputation


@clause("reentrant/forward-no-grad")
@given(around=st.booleans(), fails=st.booleans(), depth=st.integers(1, 3))
def test_forward_records_nothing(ckpt: Candidate, around: bool, fails: bool, depth: int) -> None:
    """Is grad mode off in forward and as before after it, also after an exception?"""
    seen: list[bool] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        if fails and len(seen) == depth:
            raise KeyError("on purpose")
        return t.sin()

    (h,) = leaves(3)
    with caught_warnings(), torch.set_grad_enabled(around), contextlib.suppress(KeyError):
        for _ in range(depth):
            before = torch.is_grad_enabled()
            try:
                h = region(ckpt)(function, h)
            finally:
                after = torch.is_grad_enabled()
                assert after == before, f"grad mode after: expected {before}, observed {after}"
    reached()
    assert seen == [False] * depth, f"grad mode in forward: expected all False, observed {seen}"


@clause("reentrant/no-graph")
@given(steps=names, first=keeping, outputs=st.integers(1, 3), frozen=st.booleans())
def test_graph_leads_straight_to_the_inputs(
    ckpt: Candidate, steps: list[str], first: str, outputs: int, frozen: bool
) -> None:
    """Is no node of the function behind the outputs, and only the inputs among the leaves?"""
    x, z, closed = leaves(2, 3, count=3)
    if frozen:
        z = z.detach()

    def function(t: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = chain([first, *steps])(t) * u * closed
        return tuple(h * (n + 1) for n in range(outputs))

    inside = node_names(function(x, z)) - node_names([x.view_as(x)])
    inside.pop("torch::autograd::AccumulateGrad", None)
    assert inside, "the plain run records nodes"
    observed = region(ckpt)(function, x, z)
    reached()
    recorded = set(inside) & set(node_names(observed))
    assert not recorded, f"nodes of the function are recorded in forward: {sorted(recorded)}"
    wanted = {id(x)} if frozen else {id(x), id(z)}
    assert {id(leaf) for leaf in graph_leaves(observed)} == wanted, (
        "the graph must lead to exactly the inputs that require grad"
    )


@clause("reentrant/recompute-with-grad")
@given(modes=st.lists(st.booleans(), max_size=2), regions=st.integers(1, 3))
def test_recomputation_records(ckpt: Candidate, modes: list[bool], regions: int) -> None:
    """Is grad mode on in the second run, whatever it is around backward, and left as it was?"""
    recorders = [Recorder(lambda t: t.sin().exp()) for _ in range(regions)]
    (x,) = leaves(3)
    h = x
    for recorder in recorders:
        h = region(ckpt)(recorder, h)
    total = h.sum()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(torch.set_grad_enabled(mode))
        before = torch.is_grad_enabled()
        total.backward()
        after = torch.is_grad_enabled()
    reached()
    for recorder in recorders:
        seen = [run.grad_enabled for run in recorder.runs]
        assert seen == [False, True], f"grad mode: expected [False, True], observed {seen}"
    assert after == before, f"grad mode after backward: expected {before}, observed {after}"


@clause("reentrant/full-recompute")
@given(
    head=st.integers(1, 3),
    tail=st.integers(1, 4),
    passes=st.integers(1, 3),
    early_stop=st.sampled_from([None, True, False]),
)
def test_function_runs_to_its_end(
    ckpt: Candidate, head: int, tail: int, passes: int, early_stop: bool | None
) -> None:
    """Does every pass run the whole function once, needed or not?"""
    steps: list[str] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        steps.append("begin")
        for _ in range(head):
            t = t.sin()
        for _ in range(tail):
            t = t + 1
        steps.append("end")
        return t

    (x,) = leaves(3)
    options = {} if early_stop is None else {"early_stop": early_stop}
    total = region(ckpt, **options)(function, x).sum()
    assert steps == ["begin", "end"], f"forward: expected one run, observed {steps}"
    for number in range(passes):
        total.backward(retain_graph=number + 1 < passes)
    reached()
    expected = ["begin", "end"] * (1 + passes)
    assert steps == expected, f"expected {passes} whole runs in backward, observed {steps[2:]}"


@clause("reentrant/not-reached")
@pytest.mark.parametrize("way", ["output-unused", "after"])
def test_region_off_the_path(ckpt: Candidate, way: str) -> None:
    """Is a region left alone into which no gradient flows?"""
    (x,) = leaves(3)
    needed, other = Recorder(lambda t: t.sin().exp()), Recorder(lambda t: t.exp().sin())
    h = region(ckpt)(needed, x)
    region(ckpt)(other, x if way == "output-unused" else h)
    h.sum().backward()
    assert needed.count == 2, f"the region that is needed: expected 2 runs, got {needed.count}"
    reached()
    assert other.count == 1, f"the region that is not needed: expected 1 run, got {other.count}"


KINDS = ["leaf", "non-leaf", "frozen", "integers", "none", "number", "string", "object", "list"]


def _arguments(kinds: list[str]) -> list[Any]:
    """One argument of each kind, in order."""
    made: list[Any] = []
    for number, kind in enumerate(kinds):
        (leaf,) = leaves(3)
        made.append(
            {
                "leaf": leaf,
                "non-leaf": leaf * (number + 1),
                "frozen": leaf.detach(),
                "integers": torch.arange(3) + number,
                "none": None,
                "number": number + 0.5,
                "string": f"argument {number}",
                "object": object(),
                "list": [number, None],
            }[kind]
        )
    return made


def _leaf_gradients(args: list[Any]) -> list[torch.Tensor | None]:
    return [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]


def _product(*args: Any) -> torch.Tensor:
    """A function of any arguments that uses every tensor and every number among them."""
    h = torch.ones(3)
    for argument in args:
        if isinstance(argument, (torch.Tensor, float)):
            h = (h * argument).sin() + argument
    return h


@clause("reentrant/inputs-again")
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=5),
    place=st.integers(0, 5),
    passes=st.integers(1, 2),
)
def test_recomputation_gets_the_same_arguments(
    ckpt: Candidate, kinds: list[str], place: int, passes: int
) -> None:
    """Does every recomputation get arguments like those of forward, in the same places?"""
    kinds.insert(min(place, len(kinds)), "leaf")
    args = _arguments(kinds)
    function = Recorder(_product)
    total = region(ckpt)(function, *args).sum()
    for number in range(passes):
        total.backward(retain_graph=number + 1 < passes)
    reached()
    assert function.count == 1 + passes, f"expected {passes} more runs, got {function.count - 1}"
    for run in function.runs[1:]:
        assert len(run.args) == len(args), f"expected {len(args)} arguments, got {len(run.args)}"
        for number, (got, given_argument) in enumerate(zip(run.args, args, strict=True)):
            if isinstance(given_argument, torch.Tensor):
                assert_same(got, given_argument, f"argument {number}")
                assert got.requires_grad == given_argument.requires_grad, (
                    f"argument {number}: expected requires_grad={given_argument.requires_grad}"
                )
                assert got.grad_fn is None, f"argument {number} has a history in recomputation"
            else:
                assert got is given_argument, (
                    f"argument {number}: expected the caller's {given_argument!r}, got {got!r}"
                )


@clause("reentrant/none-arguments")
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), place=st.integers(0, 5))
def test_arguments_of_every_kind(ckpt: Candidate, kinds: list[str], place: int) -> None:
    """Are gradients the plain ones beside None, numbers, integer tensors, objects, anywhere?"""
    kinds.insert(min(place, len(kinds)), "leaf")

    def program(wrap: Wrap, _: list[torch.Tensor]) -> Any:
        args = _arguments(kinds)
        y = wrap(_product, *args)
        y.sum().backward()
        return y.detach(), [
            a.grad if isinstance(a, torch.Tensor) and a.is_leaf else 0 for a in args
        ]

    compare(ckpt, program, list)


# ------------------------------------------------------------------ what it returns


@clause("reentrant/result-as-plain")
@given(steps=names, outputs=st.integers(0, 3), shape=shapes)
def test_result_has_the_plain_form(
    ckpt: Candidate, steps: list[str], outputs: int, shape: tuple[int, ...]
) -> None:
    """Is one tensor one tensor, and a tuple of n a tuple of n, with the plain values? (0 stands
    for a bare tensor, 1 for a tuple of one.)"""
    (x,) = leaves(*shape)

    def function(t: torch.Tensor) -> Any:
        h = chain(["sin", *steps])(t)
        return tuple(h * (n + 1) for n in range(outputs)) if outputs else h

    expected, observed = function(x), region(ckpt)(function, x)
    reached()
    assert_same(observed, expected, "result")
    for tensor in observed if outputs else [observed]:
        assert tensor.requires_grad, "an output does not require grad, although an input does"


OTHER_VALUES: dict[str, Any] = {"none": None, "number": 7, "string": "tag", "object": object()}


@clause("reentrant/non-tensor-outputs")
@given(
    kinds=st.lists(st.sampled_from(sorted(OTHER_VALUES)), min_size=1, max_size=3),
    place=st.integers(0, 3),
    second=st.booleans(),
)
def test_values_among_the_outputs(
    ckpt: Candidate, kinds: list[str], place: int, second: bool
) -> None:
    """Do values that are no tensors come back as they are, and tensors keep their gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(t: torch.Tensor, u: torch.Tensor) -> tuple[Any, ...]:
            outputs = [OTHER_VALUES[kind] for kind in kinds]
            outputs.insert(min(place, len(outputs)), (t * u).sin())
            return (*outputs, (t + u).exp()) if second else tuple(outputs)

        results = wrap(function, *given_leaves)
        total = torch.zeros(())
        for number, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                total = total + (result * (number + 1)).sum()
        total.backward()
        return tuple(r.detach() if isinstance(r, torch.Tensor) else r for r in results)

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("reentrant/integer-outputs")
@given(
    kinds=st.lists(st.sampled_from(["argsort", "positive", "count"]), min_size=1, max_size=3),
    place=st.integers(0, 3),
)
def test_outputs_that_cannot_require_grad(ckpt: Candidate, kinds: list[str], place: int) -> None:
    """Do integer and boolean outputs stay without grad and out of the others' way?"""
    makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "argsort": torch.argsort,
        "positive": lambda t: t > 0,
        "count": lambda t: t.new_tensor([t.numel()], dtype=torch.int32),
    }

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = [makers[kind](t) for kind in kinds]
            outputs.insert(min(place, len(outputs)), t.sin().exp())
            return tuple(outputs)

        results = wrap(function, *given_leaves)
        results[min(place, len(kinds))].sum().backward()
        return [(r.detach(), r.requires_grad) for r in results]

    compare(ckpt, program, lambda: leaves(3))


# ------------------------------------------------------------------ which gradients there are


@clause("reentrant/gradients-as-plain")
@given(
    parts=st.lists(st.tuples(keeping, names), min_size=1, max_size=3),
    shape=shapes,
    double=st.booleans(),
    inputs=st.integers(1, 3),
)
def test_chains_of_regions(
    ckpt: Candidate,
    parts: list[tuple[str, list[str]]],
    shape: tuple[int, ...],
    double: bool,
    inputs: int,
) -> None:
    """Do chains of regions of any steps give the plain gradients of inputs, parameters and
    leaves in closures?"""
    dtype = torch.float64 if double else torch.float32

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, *rest = given_leaves
        closed = rest[inputs - 1 :]
        for number, (first, steps) in enumerate(parts):

            def function(
                t: torch.Tensor,
                *others: torch.Tensor,
                names: list[str] = [first, *steps],  # noqa: B006 - never changed
                weight: torch.Tensor = closed[number],
            ) -> torch.Tensor:
                for other in others:
                    t = t * other
                return chain(names)(t * weight) * weight

            # A tensor that several regions use is summed in another order than in the plain run.
            x = wrap(function, x, *(rest[: inputs - 1] if number == 0 else ()))
        x.pow(2).sum().backward()
        return x.detach()

    compare(ckpt, program, lambda: leaves(*shape, count=inputs + len(parts), dtype=dtype))


@clause("reentrant/gradients-as-plain")
@given(layers=st.integers(1, 3), norm=st.booleans())
def test_modules(ckpt: Candidate, layers: int, norm: bool) -> None:
    """Do modules train in regions as without, over several steps?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (x,) = given_leaves
        model = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(3, 3), torch.nn.LayerNorm(3) if norm else torch.nn.Tanh()
            )
            for _ in range(layers)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            h = x
            for layer in model:
                h = wrap(layer, h)
            optimizer.zero_grad()
            h.pow(2).mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    compare(ckpt, program, lambda: leaves(2, 3))


@clause("reentrant/one-input-suffices")
@given(
    kinds=st.lists(st.sampled_from(["frozen", "integers", "none", "number"]), max_size=3),
    place=st.integers(0, 3),
    used=st.booleans(),
)
def test_parameters_train_beside_one_differentiable_input(
    ckpt: Candidate, kinds: list[str], place: int, used: bool
) -> None:
    """Do parameters get their gradients if any one argument requires grad, used or not, and inputs
    that do not require grad none?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        w, b = given_leaves
        (handle,) = leaves(3)
        args = _arguments(kinds)
        args.insert(min(place, len(args)), handle)

        def function(*received: Any) -> torch.Tensor:
            h = w.sin()
            for argument in received:
                is_handle = isinstance(argument, torch.Tensor) and argument.requires_grad
                if isinstance(argument, (torch.Tensor, float)) and (used or not is_handle):
                    h = h * argument
            return (h + b).exp()

        y = wrap(function, *args)
        assert y.requires_grad, "the output does not require grad"
        y.sum().backward()
        gradients = [a.grad for a in args if isinstance(a, torch.Tensor) and not a.requires_grad]
        return y.detach(), gradients

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("reentrant/needs-input")
@given(
    kinds=st.lists(st.sampled_from(["frozen", "integers", "none", "number"]), max_size=3),
    outputs=st.integers(0, 2),
)
def test_no_gradients_without_differentiable_input(
    ckpt: Candidate, kinds: list[str], outputs: int
) -> None:
    """Without an argument that requires grad: plain values, and no output requires grad?"""
    (w,) = leaves(3)
    args = _arguments(kinds)

    def function(*received: Any) -> Any:
        h = _product(*received) * w
        return tuple(h * (n + 1) for n in range(outputs)) if outputs else h

    (handle,) = leaves(3)
    assert region(ckpt)(lambda t: t * w, handle).requires_grad, "one input that does suffices"
    with caught_warnings():
        observed = region(ckpt)(function, *args)
    reached()
    assert_same(observed, function(*args), "result")
    for tensor in observed if outputs else [observed]:
        assert not tensor.requires_grad, "an output requires grad, although no input does"
        assert not graph_nodes([tensor]), "a graph is recorded, although no input requires grad"


@clause("reentrant/warns-without-grad-input")
@given(
    kinds=st.lists(st.sampled_from(["frozen", "integers", "none", "number"]), max_size=3),
    place=st.integers(0, 3),
)
def test_warning_where_all_gradients_are_lost(
    ckpt: Candidate, kinds: list[str], place: int
) -> None:
    """Does a call warn where no input requires grad, and is it silent where one does?"""
    args = _arguments(kinds)
    args.insert(min(place, len(args)), torch.ones(3))
    with caught_warnings() as without:
        region(ckpt)(_product, *args)
    args[min(place, len(kinds))] = leaves(3)[0]
    with caught_warnings() as with_one:
        region(ckpt)(_product, *args)
    reached()
    assert without, "no input requires grad: expected a warning, observed none"
    assert not with_one, (
        f"one input requires grad: expected no warning, observed {str(with_one[0].message)[:80]}"
    )


@clause("reentrant/grad-mode-off")
@given(steps=names, outputs=st.integers(1, 2))
def test_without_gradients_it_is_a_plain_call(
    ckpt: Candidate, steps: list[str], outputs: int
) -> None:
    """Under no_grad: the plain values, no gradient, one run?"""
    body = chain(["sin", *steps])
    function = Recorder(lambda t: tuple(body(t) * (n + 1) for n in range(outputs)))
    (x,) = leaves(2, 3)
    with torch.no_grad():
        expected = function.function(x)
        observed = region(ckpt)(function, x)
    reached()
    assert_same(observed, expected, "result")
    assert not any(y.requires_grad for y in observed), "an output requires grad under no_grad"
    assert function.count == 1, f"expected 1 run of the function, observed {function.count}"


@clause("reentrant/shared-parameters")
@given(uses=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_parameter_used_in_several_places(ckpt: Candidate, uses: list[int]) -> None:
    """Is a parameter's gradient the sum over all places? (0 is a use outside of any region, n a
    region that uses the parameter n times.)"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor, often: int) -> torch.Tensor:
            for _ in range(often):
                t = t * w + w
            return t

        h = x * 1
        for often in uses:
            h = wrap(function, h, often) if often else function(h, 1)
        h.sum().backward()
        return h.detach()

    def make() -> list[torch.Tensor]:
        # Small integers: sums and products are exact in any order.
        return [torch.tensor([1.0, -1.0, 2.0]).requires_grad_() for _ in range(2)]

    compare(ckpt, program, make)


# ------------------------------------------------------------------ how backward is run


@clause("reentrant/backward")
@given(
    data=st.data(),
    outputs=st.integers(1, 3),
    regions=st.integers(1, 2),
    method=st.booleans(),
    thread=st.booleans(),
)
def test_backward_without_inputs(
    ckpt: Candidate, data: st.DataObject, outputs: int, regions: int, method: bool, thread: bool
) -> None:
    """Does backward() work from one root or several, from some of the outputs, with and without
    explicit gradients, in this thread or another?"""
    used = sorted(data.draw(st.sets(st.integers(0, outputs - 1), min_size=1)))
    explicit = data.draw(st.booleans())

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, *factors = given_leaves
        h = x
        results: Any = ()
        for factor in factors:
            results = wrap(
                lambda t, u: tuple((t * u * (n + 1)).sin() for n in range(outputs)), h, factor
            )
            h = results[used[0]]
        chosen = [results[n] for n in used]
        if method:
            total = torch.stack(chosen)
            weights = torch.linspace(0.5, 1.5, total.numel()).view_as(total)
            act: Callable[[], None] = (
                functools.partial(total.backward, weights) if explicit else total.sum().backward
            )
        elif explicit:
            act = functools.partial(
                torch.autograd.backward, chosen, [torch.linspace(1, 2, 3) * (n + 1) for n in used]
            )
        else:
            act = functools.partial(torch.autograd.backward, [y.sum() for y in chosen])
        if thread:
            errors: list[BaseException] = []

            def work() -> None:
                try:
                    act()
                except BaseException as error:  # noqa: BLE001 - raised again below
                    errors.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join(timeout=30)
            if errors:
                raise errors[0]
        else:
            act()
        return [y.detach() for y in results]

    compare(ckpt, program, lambda: leaves(3, count=1 + regions))


@clause("reentrant/retain-graph")
@given(
    passes=st.integers(2, 4), steps=st.lists(keeping, min_size=1, max_size=2),
    regions=st.integers(1, 2),
)  # fmt: skip
def test_repeated_passes(ckpt: Candidate, passes: int, steps: list[str], regions: int) -> None:
    """Does each pass over a retained graph give the same gradients, and is one too many refused?"""
    recorders: list[Recorder] = []
    totals: list[torch.Tensor] = []

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, *weights = given_leaves
        recorders.clear()
        h = x
        for weight in weights:
            recorders.append(Recorder(lambda t, u: chain(steps)(t * u)))
            h = wrap(recorders[-1], h, weight)
        total = h.sum()
        totals[:] = [total]
        for number in range(passes):
            total.backward(retain_graph=number + 1 < passes)

    compare(ckpt, program, lambda: leaves(3, count=1 + regions))
    for recorder in recorders:
        assert recorder.count == 1 + passes, (
            f"{passes} passes: expected as many recomputations, observed {recorder.count - 1}"
        )
    with pytest.raises(RuntimeError):
        totals[0].backward()


def _grad(total: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    torch.autograd.grad(total, wanted)


def _grad_retained(total: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)


def _method_inputs(total: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    total.backward(inputs=wanted)


def _function_inputs(total: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    torch.autograd.backward([total], inputs=wanted)


def _refused(
    ckpt: Candidate,
    act: Callable[[torch.Tensor, list[torch.Tensor]], None],
    wanted: str,
    regions: int,
    filled: bool,
) -> None:
    """``act`` through reentrant regions must raise and leave every ``.grad`` alone."""
    x, w, z = leaves(3, count=3)

    def function(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (t * u).sin() * w

    def build(wrap: Wrap) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y = h = x * 2
        for _ in range(regions):
            y = wrap(function, y, z)
        return y.sum(), {"leaf": [x], "direct": [z], "history": [h], "both": [x, z]}[wanted]

    act(*build(plain))  # the plain run does it
    build(region(ckpt))[0].backward()  # and so does the documented way
    total, inputs = build(region(ckpt))
    for leaf in (x, w, z):
        leaf.grad = torch.full((3,), 0.5) if filled else None
    reached()
    with pytest.raises(Exception):  # noqa: B017 - refused, whatever it is called
        act(total, inputs)
    for name, leaf in (("x", x), ("w", w), ("z", z)):
        before = torch.full((3,), 0.5) if filled else None
        assert_same(leaf.grad, before, f"{name}.grad after the refused call")


@clause("reentrant/grad-refused")
@pytest.mark.parametrize("act", [_grad, _grad_retained])
@given(
    wanted=st.sampled_from(["leaf", "direct", "history", "both"]),
    regions=st.integers(1, 2),
    filled=st.booleans(),
)
def test_autograd_grad_is_refused(
    ckpt: Candidate,
    act: Callable[[torch.Tensor, list[torch.Tensor]], None],
    wanted: str,
    regions: int,
    filled: bool,
) -> None:
    """Is autograd.grad through a region refused, without a trace in any .grad?"""
    _refused(ckpt, act, wanted, regions, filled)


@clause("reentrant/inputs-refused")
@pytest.mark.parametrize("act", [_method_inputs, _function_inputs])
@given(
    wanted=st.sampled_from(["leaf", "direct", "history", "both"]),
    regions=st.integers(1, 2),
    filled=st.booleans(),
)
def test_backward_with_inputs_is_refused(
    ckpt: Candidate,
    act: Callable[[torch.Tensor, list[torch.Tensor]], None],
    wanted: str,
    regions: int,
    filled: bool,
) -> None:
    """Is backward(inputs=…) through a region refused, without a trace in any .grad?"""
    _refused(ckpt, act, wanted, regions, filled)


class _Planned(Exception):
    """Raised by a test's own function."""


FAILURES = ["grad", "inputs", "forward", "recomputation", "all-detached"]


def _fail(ckpt: Candidate, how: str, x: torch.Tensor, w: torch.Tensor) -> None:
    """One use of a region that must end in an exception."""
    runs = 0

    def function(t: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if how == "forward" or (how == "recomputation" and runs == 2):
            torch.rand(3)
            raise _Planned
        return t.detach() if how == "all-detached" else (t * w).sin()

    try:
        total = region(ckpt)(function, x).sum()
        if how == "grad":
            torch.autograd.grad(total, x)
        elif how == "inputs":
            total.backward(inputs=[x])
        else:
            total.backward()
    except Exception:  # noqa: BLE001 - what is raised is for other clauses
        return
    raise AssertionError(f"{how}: expected an exception, observed none")


@clause("reentrant/usable-after-refusal")
@given(
    failures=st.lists(st.sampled_from(FAILURES), min_size=1, max_size=3),
    use_reentrant=st.booleans(),
)
def test_nothing_is_left_behind(ckpt: Candidate, failures: list[str], use_reentrant: bool) -> None:
    """Do regions work after refused and failed passes, in an unchanged ambient state?"""
    x, w = leaves(3, count=2)
    before = AmbientState.capture()
    for how in failures:
        _fail(ckpt, how, x, w)
    after = AmbientState.capture()
    reached()
    # The function of a failed forward may draw from the random stream; nothing else may change.
    changed = before.difference(after, ignore=("rng",) if "forward" in failures else ())
    assert not changed, f"the ambient state changed over {failures}: {changed}"

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        y = wrap(lambda t: (t * w).sin(), x)
        y.sum().backward()
        return y.detach()

    wrap = functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)
    assert_equivalent(program, lambda: leaves(3, count=2), wrap)


@clause("reentrant/hooks")
@given(
    places=st.sets(st.sampled_from(["leaf", "input", "output", "frozen-side"]), min_size=1),
    replace=st.booleans(),
    passes=st.integers(1, 2),
    retain=st.booleans(),
)
def test_hooks_around_a_region(
    ckpt: Candidate, places: set[str], replace: bool, passes: int, retain: bool
) -> None:
    """Do hooks on direct inputs and on outputs fire once in each pass with plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, z = given_leaves
        log: list[tuple[str, torch.Tensor]] = []
        h = x * 2
        side, y = wrap(lambda t, u: (t.cos() * u, (t * u).sin()), h, z)
        tensors = {"leaf": z, "input": h, "output": y, "frozen-side": side}

        def hook(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
            log.append((name, gradient.clone()))
            return gradient * 2 if replace else None

        handles = [
            tensors[name].register_hook(functools.partial(hook, name)) for name in sorted(places)
        ]
        if retain:
            h.retain_grad()
        for number in range(passes):
            (y.sum() + side.sum()).backward(retain_graph=number + 1 < passes)
        for handle in handles:
            handle.remove()
        return sorted(log, key=lambda entry: entry[0]), h.grad if retain else None

    compare(ckpt, program, lambda: leaves(3, count=2))


@clause("reentrant/many-regions")
@pytest.mark.parametrize("arrangement", ["side-by-side", "chain"])
def test_hundreds_of_regions(ckpt: Candidate, arrangement: str) -> None:
    """Do hundreds of regions work side by side and in a chain?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        (x,) = given_leaves
        if arrangement == "chain":
            y = x
            for _ in range(400):
                y = wrap(torch.sin, y)
        else:
            y = torch.stack([wrap(torch.sin, x * n) for n in range(400)])
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(2))


class _Storages:
    """Remembers, weakly, the storages shown to it."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []

    def watch(self, t: torch.Tensor) -> torch.Tensor:
        self.seen.append(StorageWeakRef(t.untyped_storage()))
        return t

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.seen)


class _Box(dict):  # type: ignore[type-arg]
    """Something that a closure holds and that can be referred to weakly."""


def _use_and_forget(ckpt: Candidate, storages: _Storages, scenario: str) -> weakref.ref[_Box]:
    """Use a region as ``scenario`` says and drop everything but a weak reference to what the
    function holds."""
    box = _Box()
    runs = 0

    def function(t: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        box["runs"] = runs
        h = storages.watch(t.sin())
        if runs == 2 and scenario == "recomputation-fails":
            raise _Planned
        return storages.watch(h.exp())

    x = storages.watch(torch.ones(3) * 2).requires_grad_()
    y = region(ckpt)(function, x)
    if scenario == "cycle":
        box["result"] = y
    if scenario == "refused":
        with contextlib.suppress(Exception):
            torch.autograd.grad(y.sum(), x)
    elif scenario != "forward-only":
        with contextlib.suppress(_Planned):
            y.sum().backward(retain_graph=scenario == "retained")
    return weakref.ref(box)


@clause("reentrant/released")
@pytest.mark.parametrize(
    "scenario",
    ["forward-only", "backward", "retained", "cycle", "recomputation-fails", "refused"],
)
def test_everything_is_collectable(ckpt: Candidate, scenario: str) -> None:
    """Are the function, what it holds, and all tensors gone once the results are?"""
    storages = _Storages()
    gc.collect(0)
    gc.freeze()
    gc.disable()
    try:
        held = _use_and_forget(ckpt, storages, scenario)
        gc.collect()
        left = held() is not None, storages.alive()
    finally:
        gc.enable()
        gc.unfreeze()
    reached()
    assert not left[0], f"what the function holds is still alive after {scenario}"
    assert left[1] == 0, f"{left[1]} tensors are still alive after {scenario}"


# ------------------------------------------------------------------ the public helpers


@clause("reentrant/function-apply")
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=3),
    place=st.integers(0, 3),
    preserve=st.booleans(),
)
def test_checkpoint_function_applied_directly(
    ckpt: Candidate, kinds: list[str], place: int, preserve: bool
) -> None:
    """Is CheckpointFunction.apply(function, preserve_rng_state, *args) a region of the args?"""
    kinds.insert(min(place, len(kinds)), "leaf")
    function = Recorder(_product)

    def program(wrap: Wrap, _: list[torch.Tensor]) -> Any:
        args = _arguments(kinds)
        y = wrap(function, *args)
        y.sum().backward()
        return y.detach(), [
            a.grad if isinstance(a, torch.Tensor) and a.is_leaf else 0 for a in args
        ]

    def apply(region_function: Callable[..., Any], *args: Any) -> Any:
        return ckpt.CheckpointFunction.apply(region_function, preserve, *args)

    assert_equivalent(program, list, apply)
    reached()
    observed = [run.grad_enabled for run in function.runs[-2:]]
    assert observed == [False, True], (
        f"grad mode in forward and recomputation: expected [False, True], observed {observed}"
    )


@clause("reentrant/function-apply")
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint_function_replays_randomness_if_told(ckpt: Candidate, preserve: bool) -> None:
    """Does the second argument say whether recomputation draws the numbers of forward?"""
    drawn: list[torch.Tensor] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(8))
        return t * drawn[-1]

    (x,) = leaves(8)
    y = ckpt.CheckpointFunction.apply(function, preserve, x)
    torch.rand(3)
    y.sum().backward()
    assert len(drawn) == 2, f"expected one recomputation, observed {len(drawn) - 1}"
    reached()
    same = torch.equal(drawn[0], drawn[1])
    assert same == preserve, (
        f"preserve_rng_state={preserve}: both runs drew the same numbers: {same}"
    )


@clause("reentrant/detach-variable")
@given(kinds=st.lists(st.sampled_from(KINDS), max_size=5))
def test_detach_variable(ckpt: Candidate, kinds: list[str]) -> None:
    """Does detach_variable detach each tensor, keep memory and requires_grad, and pass on the
    rest?"""
    inputs = tuple(_arguments(kinds))
    histories = [t.grad_fn if isinstance(t, torch.Tensor) else None for t in inputs]
    outputs = ckpt.detach_variable(inputs)
    reached()
    assert isinstance(outputs, tuple), f"expected a tuple, observed a {type(outputs).__name__}"
    assert len(outputs) == len(inputs), f"expected {len(inputs)} items, observed {len(outputs)}"
    for number, (got, given_input) in enumerate(zip(outputs, inputs, strict=True)):
        if not isinstance(given_input, torch.Tensor):
            assert got is given_input, f"item {number}: expected the same object, got {got!r}"
            continue
        assert got.grad_fn is None, f"item {number} still has a history"
        assert got is not given_input, f"item {number} is not detached but the input itself"
        assert got.data_ptr() == given_input.data_ptr(), f"item {number} was copied"
        assert got.requires_grad == given_input.requires_grad, (
            f"item {number}: expected requires_grad={given_input.requires_grad}"
        )
        assert given_input.grad_fn is histories[number], f"input {number} was changed"


@clause("reentrant/check-backward-validity")
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=4),
    as_tuple=st.booleans(),
)
def test_check_backward_validity(ckpt: Candidate, kinds: list[str], as_tuple: bool) -> None:
    """Does it warn exactly if no tensor among the inputs requires grad?"""
    kinds = [kind for kind in kinds if kind not in ("leaf", "non-leaf")]
    without = _arguments(["frozen", *kinds])
    with_one = [*without, leaves(3)[0]]
    kind: Callable[[list[Any]], Any] = tuple if as_tuple else list
    with caught_warnings() as silent:
        ckpt.check_backward_validity(kind(with_one))
    with caught_warnings() as seen:
        ckpt.check_backward_validity(kind(without))
    reached()
    assert not silent, "one input requires grad: expected no warning"
    assert seen, "no input requires grad: expected a warning"
