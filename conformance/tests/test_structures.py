"""Chapter 4: structures and detached tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.candidate import Candidate
from conformance.observe import Recorder, assert_equivalent, assert_same, caught_warnings
from conformance.observe.compare import Program, Wrap
from conformance.observe.functions import graph_leaves, graph_nodes
from conformance.testing import clause, reached

# ------------------------------------------------------------------ structures to draw


@dataclasses.dataclass
class Pair:
    """A dataclass of two items."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    """A frozen dataclass of two items."""

    first: Any
    second: Any


class NamedPair(NamedTuple):
    """A named tuple of two items."""

    first: Any
    second: Any


class ListOfPair(list):  # type: ignore[type-arg]
    """A subclass of list."""


class DictOfPair(dict):  # type: ignore[type-arg]
    """A subclass of dict."""


class Plain:
    """An object with attributes."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Callback:
    """An object that hands its items out only through a method."""

    def __init__(self, first: Any, second: Any) -> None:
        self._items = lambda: (first, second)

    def items(self) -> tuple[Any, Any]:
        """Both items."""
        return self._items()


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"first": a, "second": b},
    "dict-of-numbers": lambda a, b: {1: b, 0: a},
    "lone-list": lambda a, b: [[a], {"only": b}],
}
OBJECTS: dict[str, Callable[[Any, Any], Any]] = {
    "dataclass": Pair,
    "frozen-dataclass": FrozenPair,
    "named-tuple": NamedPair,
    "list-subclass": lambda a, b: ListOfPair([a, b]),
    "dict-subclass": lambda a, b: DictOfPair(first=a, second=b),
    "ordered-dict": lambda a, b: OrderedDict(second=b, first=a),
    "object": Plain,
    "slots": Slotted,
    "callback": Callback,
}
MAKERS = {**CONTAINERS, **OBJECTS}
OPAQUE = object()
VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 3,
    "float": lambda: 0.5,
    "string": lambda: "a string",
    "integers": lambda: torch.arange(3),
    "frozen": lambda: torch.linspace(0, 1, 3),
    "object": lambda: OPAQUE,
    "empty-list": list,
    "empty-dict": dict,
}

Shape = Any
"""``"x"`` or ``"w"`` (tensors that require grad), a name of VALUES, or (maker, Shape, Shape)."""


def shapes_of(
    makers: dict[str, Any], values: bool = False, depth: int = 4
) -> st.SearchStrategy[Shape]:
    """Structures that contain a tensor that requires grad, nested up to a few levels deep."""
    items = ["x", "w", *(VALUES if values else ())]
    return st.recursive(
        st.sampled_from(items),
        lambda inner: st.tuples(st.sampled_from(sorted(makers)), inner, inner),
        max_leaves=depth,
    ).map(lambda shape: shape if isinstance(shape, tuple) else (sorted(makers)[0], shape, "x"))


def build(shape: Shape, tensors: dict[str, Any]) -> Any:
    """The structure with the tensors in their places."""
    if isinstance(shape, tuple):
        maker, first, second = shape
        return MAKERS[maker](build(first, tensors), build(second, tensors))
    return tensors[shape] if shape in tensors else VALUES[shape]()


def items(structure: Any) -> list[Any]:
    """What the structure holds, one level down, in an order of its own."""
    if isinstance(structure, dict):
        return list(structure.values())
    if isinstance(structure, (list, tuple)):
        return list(structure)
    if isinstance(structure, Callback):
        return list(structure.items())
    if isinstance(structure, (Pair, FrozenPair, Plain, Slotted)):
        return [structure.first, structure.second]
    return []


def flat(structure: Any) -> Iterator[Any]:
    """Every value at the bottom of the structure."""
    if isinstance(structure, (torch.Tensor, str)) or not items(structure):
        yield structure
        return
    for item in items(structure):
        yield from flat(item)


def form(structure: Any) -> Any:
    """Types, keys and contents of the structure, comparable with ``assert_same``."""
    name = type(structure).__name__
    if isinstance(structure, torch.Tensor):
        return structure.detach()
    if isinstance(structure, dict):
        return [name, list(structure), [form(item) for item in items(structure)]]
    if isinstance(structure, str) or not items(structure):
        return [name, None if isinstance(structure, (Plain, Callback)) else structure]
    return [name, [form(item) for item in items(structure)]]


def tensors_of(structure: Any) -> list[torch.Tensor]:
    """The floating-point tensors at the bottom of the structure."""
    return [
        value
        for value in flat(structure)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def total(structure: Any) -> torch.Tensor:
    """A scalar that depends on every floating-point tensor in the structure, in its own way."""
    result = torch.zeros(())
    for number, value in enumerate(tensors_of(structure)):
        result = result + (value * (number + 1)).sum()
    return result


def product(*args: Any) -> torch.Tensor:
    """A function of structures: of every tensor in them, each in its own way."""
    h = torch.ones(3)
    for number, value in enumerate(flat(list(args))):
        if isinstance(value, torch.Tensor):
            h = (h * value).sin() + value * (number + 1)
        elif isinstance(value, (int, float)):
            h = h * value
    return h.exp()


def leaves(count: int = 2) -> list[torch.Tensor]:
    """Fresh random leaves of three numbers that require grad."""
    return [torch.randn(3).requires_grad_() for _ in range(count)]


def named(given_leaves: list[torch.Tensor], history: bool) -> dict[str, Any]:
    """``x`` and ``w``, as leaves or with a history."""
    x, w = given_leaves[:2]
    return {"x": x * 1.5, "w": w.sin()} if history else {"x": x, "w": w}


def region(ckpt: Candidate, use_reentrant: bool = False) -> Wrap:
    """``checkpoint`` of one variant."""
    return functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant)


def compare(
    ckpt: Candidate,
    program: Program,
    make_leaves: Callable[[], list[torch.Tensor]] = leaves,
    *,
    use_reentrant: bool = False,
    **options: Any,
) -> None:
    """``assert_equivalent`` with regions of the candidate; counts as reached if there was one."""
    calls = 0

    def wrap(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return ckpt.checkpoint(function, *args, use_reentrant=use_reentrant, **options, **kwargs)

    assert_equivalent(program, make_leaves, wrap)
    if calls:
        reached()


# ------------------------------------------------------------------ in, non-reentrant


def _structure_in(
    ckpt: Candidate, shape: Shape, direct: bool, keyword: bool, history: bool
) -> None:
    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        structure = build(shape, named(given_leaves, history))
        args = (given_leaves[2],) if direct else ()

        def function(*received: Any, extra: Any = None) -> torch.Tensor:
            return product(*received, extra)

        y = wrap(function, *args, extra=structure) if keyword else wrap(function, *args, structure)
        assert y.requires_grad, "the result does not require grad, although a tensor in it does"
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, lambda: leaves(3))


@clause("structures/containers-in")
@given(
    shape=shapes_of(CONTAINERS), direct=st.booleans(), keyword=st.booleans(), history=st.booleans()
)
def test_tensors_in_containers_get_gradients(
    ckpt: Candidate, shape: Shape, direct: bool, keyword: bool, history: bool
) -> None:
    """Do tensors in nested lists, tuples and dictionaries get the plain gradients?"""
    _structure_in(ckpt, shape, direct, keyword, history)


@clause("structures/objects-in")
@given(shape=shapes_of(OBJECTS), direct=st.booleans(), history=st.booleans())
def test_tensors_in_objects_get_gradients(
    ckpt: Candidate, shape: Shape, direct: bool, history: bool
) -> None:
    """Do tensors in objects of the user's own types get the plain gradients?"""
    _structure_in(ckpt, shape, direct, False, history)


@clause("structures/objects-in")
@pytest.mark.parametrize("maker", sorted(OBJECTS))
def test_every_kind_of_object(ckpt: Candidate, maker: str) -> None:
    """Is no kind of object left out, alone and in a list?"""
    _structure_in(ckpt, (maker, "x", "w"), False, False, True)
    _structure_in(ckpt, ("list", (maker, "x", "w"), "x"), False, False, False)


@clause("structures/objects-in")
@given(nested=st.booleans(), frozen=st.booleans())
def test_module_as_argument(ckpt: Candidate, nested: bool, frozen: bool) -> None:
    """Do the parameters of a module given as an argument get the plain gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x = given_leaves[0].detach() if frozen else given_leaves[0]
        layer = torch.nn.Linear(3, 3)

        def function(received: Any, t: torch.Tensor) -> torch.Tensor:
            module = received["layers"][0] if nested else received
            h: torch.Tensor = module(t).sin()
            return h

        wrap(function, {"layers": [layer]} if nested else layer, x).sum().backward()
        return [parameter.grad for parameter in layer.parameters()]

    compare(ckpt, program)


@clause("structures/arguments-as-given")
@given(shape=shapes_of(MAKERS, values=True), twice=st.booleans(), history=st.booleans())
def test_function_gets_the_callers_objects(
    ckpt: Candidate, shape: Shape, twice: bool, history: bool
) -> None:
    """Does forward get the very objects of the caller, and recomputation equal ones?"""
    structure = build(shape, named(leaves(), history))
    (x,) = leaves(1)
    args = (structure, x, structure) if twice else (structure, x)
    function = Recorder(product)
    region(ckpt)(function, *args).sum().backward()
    assert function.count == 2, f"expected one recomputation, observed {function.count - 1}"
    reached()
    first, second = function.runs[0].args, function.runs[1].args
    assert len(first) == len(args), f"forward: expected {len(args)} arguments, got {len(first)}"
    for number, (got, wanted) in enumerate(zip(first, args, strict=True)):
        assert got is wanted, f"forward: argument {number} is not the caller's object"
    for got, wanted in zip(flat(list(first)), flat(list(args)), strict=True):
        assert got is wanted, f"forward: a {type(wanted).__name__} in a container was replaced"
    assert_same(form(list(second)), form(list(args)), "arguments of the recomputation")
    for got, wanted in zip(flat(list(second)), flat(list(args)), strict=True):
        if isinstance(wanted, torch.Tensor):
            assert got.requires_grad == wanted.requires_grad, (
                f"recomputation: expected a tensor with requires_grad={wanted.requires_grad}"
            )
    if twice:
        assert second[0] is second[2], "one object in two places became two objects"


@clause("structures/mixed-values")
@given(
    shape=shapes_of(MAKERS, values=True, depth=6),
    direct=st.lists(st.sampled_from(sorted(VALUES)), max_size=3),
    place=st.integers(0, 3),
)
def test_other_values_among_tensors(
    ckpt: Candidate, shape: Shape, direct: list[str], place: int
) -> None:
    """Do None and other values, anywhere in and out, leave gradients and themselves alone?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        tensors = named(given_leaves, True)
        args: list[Any] = [VALUES[name]() for name in direct]
        args.insert(min(place, len(args)), build(shape, tensors))

        def function(*received: Any) -> Any:
            h = product(*received, given_leaves[2])
            return [*received, build(shape, {"x": h, "w": h.sin()}), h.cos(), None]

        result = wrap(function, *args)
        total(result).backward()
        return form(result)

    compare(ckpt, program, lambda: leaves(3))


# ------------------------------------------------------------------ out, non-reentrant


def _structure_out(ckpt: Candidate, shape: Shape, wrapped: bool, use: int) -> None:
    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def function(t: torch.Tensor, u: torch.Tensor) -> Any:
            structure = build(shape, {"x": (t * u).sin().exp(), "w": u.cos()})
            return (t + u, structure) if wrapped else structure

        result = wrap(function, x, w)
        found = tensors_of(result)
        needed = [tensor.requires_grad for tensor in found]
        if use:
            found[use % len(found)].sum().backward()
        else:
            total(result).backward()
        return form(result), needed

    compare(ckpt, program)


@clause("structures/containers-out")
@given(shape=shapes_of(CONTAINERS), wrapped=st.booleans(), use=st.integers(0, 3))
def test_tensors_in_result_containers(
    ckpt: Candidate, shape: Shape, wrapped: bool, use: int
) -> None:
    """Do containers come back in form, with tensors that pass the plain gradients on?"""
    _structure_out(ckpt, shape, wrapped, use)


@clause("structures/objects-out")
@given(shape=shapes_of(OBJECTS), wrapped=st.booleans(), use=st.integers(0, 3))
def test_tensors_in_result_objects(ckpt: Candidate, shape: Shape, wrapped: bool, use: int) -> None:
    """Do the user's objects come back in form, with tensors that pass the plain gradients on?"""
    _structure_out(ckpt, shape, wrapped, use)


@clause("structures/objects-out")
@pytest.mark.parametrize("maker", sorted(OBJECTS))
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in-a-list"])
def test_the_object_itself_comes_back(ckpt: Candidate, maker: str, inside: bool) -> None:
    """Is the caller given the very object that the function made?"""
    made: list[Any] = []

    def function(t: torch.Tensor) -> Any:
        made.append(OBJECTS[maker](t.sin(), t.exp()))
        return [made[-1], None] if inside else made[-1]

    (x,) = leaves(1)
    result = region(ckpt)(function, x)
    observed = result[0] if inside else result
    reached()
    assert observed is made[0], (
        f"expected the function's own {type(made[0]).__name__}, observed another "
        f"{type(observed).__name__}"
    )
    assert all(tensor.requires_grad for tensor in tensors_of(observed))
    total(observed).backward()
    (expected,) = torch.autograd.grad(total(OBJECTS[maker](x.sin(), x.exp())), x)
    assert_same(x.grad, expected, "gradient")


@clause("structures/same-tensor-twice")
@given(
    places=st.lists(st.sampled_from(["direct", "list", "deep", "object"]), min_size=2, max_size=4),
    back=st.lists(st.sampled_from(["direct", "list", "deep"]), min_size=1, max_size=3),
    history=st.booleans(),
)
def test_one_tensor_in_several_places(
    ckpt: Candidate, places: list[str], back: list[str], history: bool
) -> None:
    """Are gradients of all places of one tensor summed, coming in and going out?"""

    def put(place: str, tensor: torch.Tensor) -> Any:
        return {
            "direct": tensor,
            "list": [tensor],
            "deep": {"a": [(tensor, None)]},
            "object": Pair(tensor, 1.0),
        }[place]

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        tensors = named(given_leaves, history)

        def function(*received: Any) -> list[Any]:
            h = product(*received)
            return [put(place, h) for place in back]

        result = wrap(function, *(put(place, tensors["x"]) for place in places))
        total(result).backward()
        return form(result)

    compare(ckpt, program)


# ------------------------------------------------------------------ reentrant


@clause("structures/reentrant-values")
@given(
    shape=shapes_of(MAKERS, values=True),
    out=shapes_of({k: v for k, v in MAKERS.items() if k not in ("tuple", "named-tuple")}),
    beside=st.booleans(),
)
def test_structures_pass_through(ckpt: Candidate, shape: Shape, out: Shape, beside: bool) -> None:
    """Do structures pass in and out with types and values, and leave direct tensors their
    gradients?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves
        structure = build(shape, {"x": x.detach(), "w": w.detach().exp()})

        def function(t: torch.Tensor, received: Any) -> Any:
            h = product(t, received)
            result = build(out, {"x": h.cos(), "w": t * 2})
            return (result, form(received), h) if beside else (h, result, form(received))

        results = wrap(function, w, structure)
        results[2 if beside else 0].sum().backward()
        return [form(result) for result in results]

    compare(ckpt, program, use_reentrant=True)


@clause("structures/reentrant-values")
@pytest.mark.parametrize("maker", sorted(set(MAKERS) - {"tuple", "named-tuple"}))
def test_structure_as_the_whole_result(ckpt: Candidate, maker: str) -> None:
    """Does a structure that is the whole result come back in form?"""
    (x,) = leaves(1)

    def function(t: torch.Tensor) -> Any:
        return MAKERS[maker](t.sin(), t.exp())

    observed = region(ckpt, True)(function, x)
    reached()
    assert_same(form(observed), form(function(x)), "result")


def _paths(outputs: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether the graph behind ``outputs`` leads to ``tensor``."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn in graph_nodes(outputs)
    return any(leaf is tensor for leaf in graph_leaves(outputs))


@clause("structures/reentrant-nested-inputs")
@given(shape=shapes_of(MAKERS), history=st.booleans(), place=st.booleans())
def test_no_path_to_nested_inputs(
    ckpt: Candidate, shape: Shape, history: bool, place: bool
) -> None:
    """Does no path of the graph lead to a tensor in a structure, beside a direct input?"""
    tensors = named(leaves(), history)
    (direct,) = leaves(1)
    args = (direct, build(shape, tensors))
    y = region(ckpt, True)(product, *(args if place else args[::-1]))
    assert _paths([y], direct), "the graph leads to the direct input"
    reached()
    for name in ("x", "w"):
        assert not _paths([y], tensors[name]), "the graph leads to a tensor in a structure"


@clause("structures/reentrant-only-nested-inputs")
@given(shape=shapes_of(MAKERS, values=True), history=st.booleans(), frozen=st.booleans())
def test_only_nested_tensors_require_grad(
    ckpt: Candidate, shape: Shape, history: bool, frozen: bool
) -> None:
    """Do the outputs not require grad if only tensors in structures do?"""
    given_leaves = leaves()
    structure = build(shape, named(given_leaves, history))
    args = (structure, torch.ones(3)) if frozen else (structure,)
    (direct,) = leaves(1)
    assert region(ckpt, True)(product, *args, direct).requires_grad, "a direct input counts"
    with caught_warnings():
        y = region(ckpt, True)(product, *args)
    reached()
    assert_same(y.detach(), product(*args).detach(), "result")
    assert not y.requires_grad, "the output requires grad, although no direct input does"


@clause("structures/reentrant-nested-outputs")
@given(
    shape=shapes_of({k: v for k, v in MAKERS.items() if k not in ("tuple", "named-tuple")}),
    alone=st.booleans(),
)
def test_nested_outputs_do_not_require_grad(ckpt: Candidate, shape: Shape, alone: bool) -> None:
    """Do tensors in a result structure not require grad, beside direct ones that do?"""
    (x,) = leaves(1)

    def function(t: torch.Tensor) -> Any:
        structure = build(shape, {"x": t.sin(), "w": t.exp() * 2})
        return structure if alone else (t.cos(), structure)

    assert region(ckpt, True)(torch.cos, x).requires_grad, "a direct output requires grad"
    observed = region(ckpt, True)(function, x)
    nested = observed if alone else observed[1]
    reached()
    found = tensors_of(nested)
    assert found, "the structure holds tensors"
    for tensor in found:
        assert not tensor.requires_grad, "a tensor in a result structure requires grad"
    if not alone:
        assert observed[0].requires_grad, "the direct output beside it does not require grad"
        observed[0].sum().backward()
        assert_same(x.grad, -x.detach().sin(), "gradient")


# ------------------------------------------------------------------ detached, non-reentrant


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda t: t,
    "detach": lambda t: t.detach(),
    "detach-computed": lambda t: (t * 2).sin().detach(),
    "detach-twice": lambda t: t.detach().exp().detach(),
    "detach-view": lambda t: t.view(-1).detach(),
    "data": lambda t: t.data,
    "item": lambda t: torch.full((3,), float(t.detach().sum())),
}
cuts = st.lists(st.sampled_from(sorted(CUTS)), min_size=1, max_size=4)
directions = st.lists(
    st.sampled_from(["no-grad", "set-off", "set-on", "enable"]), min_size=1, max_size=3
)
MODES: dict[str, Callable[[], Any]] = {
    "no-grad": torch.no_grad,
    "set-off": lambda: torch.set_grad_enabled(False),
    "set-on": lambda: torch.set_grad_enabled(True),
    "enable": torch.enable_grad,
}


def _cut(t: torch.Tensor, u: torch.Tensor, sequence: list[str], other: bool) -> torch.Tensor:
    """Cuts off a copy of the running value at each step and goes on with both."""
    h = t
    for name in sequence:
        cut = CUTS[name](h)
        h = (h.sin() * cut.exp() + cut) if other else (h * cut).sin() * u
    return h * u


@clause("detached/detach-inside")
@given(sequence=cuts, other=st.booleans(), history=st.booleans(), early_stop=st.booleans())
def test_detached_tensors_inside(
    ckpt: Candidate, sequence: list[str], other: bool, history: bool, early_stop: bool
) -> None:
    """Are results and gradients the plain ones with detached tensors anywhere inside?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        tensors = named(given_leaves, history)
        y = wrap(lambda t, u: _cut(t, u, sequence, other), tensors["x"], tensors["w"])
        y.sum().backward()
        return y.detach()

    compare(ckpt, program, early_stop=early_stop)


def _in_modes(t: torch.Tensor, u: torch.Tensor, sequence: list[str], nested: bool) -> torch.Tensor:
    """Computes under each grad mode in turn, one inside another or one after another."""
    h = t.sin()
    with contextlib.ExitStack() as stack:
        for name in sequence:
            if not nested:
                stack.close()
            stack.enter_context(MODES[name]())
            h = (h * u).sin() + u
    return h * t + (h * u).exp()


@clause("detached/no-grad-inside")
@given(sequence=directions, nested=st.booleans(), history=st.booleans(), regions=st.integers(1, 2))
def test_grad_modes_inside(
    ckpt: Candidate, sequence: list[str], nested: bool, history: bool, regions: int
) -> None:
    """Are results and gradients the plain ones with parts under other grad modes inside?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        tensors = named(given_leaves, history)
        y = tensors["x"]
        for _ in range(regions):
            y = wrap(lambda t, u: _in_modes(t, u, sequence, nested), y, tensors["w"])
        y.sum().backward()
        return y.detach()

    compare(ckpt, program)


OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "computed": lambda t, u: (t * u).sin(),
    "detached": lambda t, u: (t * u).exp().detach(),
    "detached-input": lambda t, u: t.detach(),
    "no-grad": lambda t, u: torch.no_grad()(torch.sin)(t) * 2,
    "integers": lambda t, u: t.argsort(),
    "boolean": lambda t, u: t > 0,
    "constant": lambda t, u: torch.ones(3),
    "parameter": lambda t, u: u,
    "frozen-product": lambda t, u: torch.ones(3) * 2,
}


@clause("detached/requires-grad-as-plain")
@given(
    kinds=st.lists(st.sampled_from(sorted(OUTPUTS)), min_size=1, max_size=5), nested=st.booleans()
)
def test_requires_grad_of_each_output(ckpt: Candidate, kinds: list[str], nested: bool) -> None:
    """Does each output require grad exactly if it does in the plain run?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        def function(t: torch.Tensor, u: torch.Tensor) -> Any:
            outputs = [OUTPUTS[kind](t, u) for kind in kinds]
            return {"outputs": outputs} if nested else tuple(outputs)

        result = wrap(function, *given_leaves)
        outputs = result["outputs"] if nested else result
        flags = [output.requires_grad for output in outputs]
        if any(flags):
            total([output for output in outputs if output.requires_grad]).backward()
        return flags, [output.detach() for output in outputs]

    compare(ckpt, program)


@clause("detached/no-gradient-at-all")
@given(
    kind=st.sampled_from(["detached", "no-grad", "frozen", "integers", "no-tensors"]),
    outputs=st.integers(1, 2),
)
def test_region_without_any_gradient(ckpt: Candidate, kind: str, outputs: int) -> None:
    """Does a region of which nothing requires grad work, and is it left alone by backward?"""
    recorders: list[Recorder] = []

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        x, w = given_leaves

        def body(*received: Any) -> Any:
            if kind == "detached":
                h = (received[0].sin() * w).detach()
            elif kind == "no-grad":
                with torch.no_grad():
                    h = received[0].sin() * w
            elif kind == "no-tensors":
                h = torch.full((3,), received[0])
            else:
                h = (received[0] * 2).sin()
            return tuple(h * (n + 1) for n in range(outputs))

        arguments: dict[str, Any] = {
            "detached": x, "no-grad": x, "frozen": x.detach(),
            "integers": torch.arange(3), "no-tensors": 0.5,
        }  # fmt: skip
        recorders.append(Recorder(body))
        results = wrap(recorders[-1], arguments[kind])
        flags = [result.requires_grad for result in results]
        (x.sin() * torch.stack(results).sum(0) * w).sum().backward()
        return flags, results

    compare(ckpt, program)
    runs = recorders[-1].count
    assert runs == 1, f"expected no recomputation of a region without gradient, observed {runs - 1}"


@clause("detached/frozen-parts")
@given(
    inputs=st.lists(st.booleans(), min_size=1, max_size=3),
    parameters=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_frozen_inputs_and_parameters(
    ckpt: Candidate, inputs: list[bool], parameters: list[bool]
) -> None:
    """Do exactly the inputs and parameters that require grad get gradients, the plain ones?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        for leaf, trained in zip(given_leaves, inputs + parameters, strict=True):
            leaf.requires_grad_(trained)
        args, weights = given_leaves[: len(inputs)], given_leaves[len(inputs) :]

        def function(*received: torch.Tensor) -> torch.Tensor:
            h = torch.ones(3)
            for tensor in (*received, *weights):
                h = (h * tensor).sin() + tensor
            return h

        y = wrap(function, *args)
        if y.requires_grad:
            y.sum().backward()
        return y.detach(), y.requires_grad

    compare(ckpt, program, lambda: leaves(len(inputs) + len(parameters)))


# ------------------------------------------------------------------ detached, reentrant


@clause("detached/reentrant-outputs-require-grad")
@given(
    kinds=st.lists(
        st.sampled_from(["computed", "detached", "detached-input", "no-grad", "constant"]),
        min_size=1, max_size=4,
    ),
    double=st.booleans(),
)  # fmt: skip
def test_outputs_are_made_to_require_grad(ckpt: Candidate, kinds: list[str], double: bool) -> None:
    """Does every direct floating-point output require grad, detached or not?"""
    x, w = leaves()

    def function(t: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [OUTPUTS[kind](t, u) for kind in kinds]
        return tuple(output.double() if double else output for output in outputs)

    observed = region(ckpt, True)(function, x, w)
    reached()
    assert_same([y.detach() for y in observed], [y.detach() for y in function(x, w)], "outputs")
    flags = [y.requires_grad for y in observed]
    without = [kind for kind, flag in zip(kinds, flags, strict=True) if not flag]
    assert not without, f"expected every output to require grad, these do not: {without}"


@clause("detached/reentrant-all-detached-raises")
@given(
    kinds=st.lists(
        st.sampled_from(["detached", "detached-input", "no-grad", "constant"]),
        min_size=1, max_size=3,
    ),
    regions=st.integers(1, 2),
    bare=st.booleans(),
)  # fmt: skip
def test_backward_through_detached_outputs_raises(
    ckpt: Candidate, kinds: list[str], regions: int, bare: bool
) -> None:
    """Does backward raise where the function left no output with a gradient?"""
    x, w = leaves()

    def function(chosen: list[str], t: torch.Tensor, u: torch.Tensor) -> Any:
        outputs = tuple(OUTPUTS[kind](t, u) for kind in chosen)
        return outputs[0] if bare else outputs

    def first(result: Any) -> torch.Tensor:
        return result if bare else torch.stack(result).sum(0)

    legitimate = functools.partial(function, ["computed", *kinds])
    first(region(ckpt, True)(legitimate, x, w)).sum().backward()
    assert x.grad is not None, "with one output that has a gradient, backward works"
    x.grad = w.grad = None
    y = x
    for _ in range(regions):
        y = first(region(ckpt, True)(functools.partial(function, kinds), y, w))
    reached()
    with pytest.raises(RuntimeError):
        y.sum().backward()
    assert x.grad is None, f"a gradient was made up for the input: {x.grad}"
    assert w.grad is None, f"a gradient was made up for the other input: {w.grad}"


@clause("detached/reentrant-exact-or-raises")
@given(
    sequence=cuts,
    modes=directions,
    nested=st.booleans(),
    kinds=st.lists(st.sampled_from(["detached", "no-grad", "integers"]), max_size=2),
    place=st.integers(0, 2),
)
def test_detached_tensors_beside_others(
    ckpt: Candidate,
    sequence: list[str],
    modes: list[str],
    nested: bool,
    kinds: list[str],
    place: int,
) -> None:
    """With detached intermediates and outputs beside others: plain gradients or an error?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        place_of_loss = min(place, len(kinds))

        def function(t: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = [OUTPUTS[kind](t, u) for kind in kinds]
            h = _cut(t, u, sequence, True)
            # The modes end on a part that is recorded, or nothing would require grad.
            outputs.insert(place_of_loss, _in_modes(h, u, modes, nested))
            return tuple(outputs)

        results = wrap(function, *given_leaves)
        results[place_of_loss].sum().backward()
        return [result.detach() for result in results]

    x, w = leaves()
    region(ckpt, True)(lambda t, u: (t * u).sin(), x, w).sum().backward()
    assert x.grad is not None, "without detached tensors backward works"
    try:
        compare(ckpt, program, use_reentrant=True)
    except RuntimeError:  # what the documentation announces
        reached()


@clause("detached/reentrant-detach-outside")
@given(
    before=st.lists(st.booleans(), min_size=1, max_size=3),
    after=st.sampled_from(["nothing", "detach", "no-grad"]),
    outputs=st.integers(1, 3),
)
def test_detaching_around_a_region(
    ckpt: Candidate, before: list[bool], after: str, outputs: int
) -> None:
    """Are gradients the plain ones with inputs detached before and outputs detached after?"""

    def program(wrap: Wrap, given_leaves: list[torch.Tensor]) -> Any:
        direct, *rest = given_leaves
        args = [t.detach() if cut else t for t, cut in zip(rest, before, strict=True)]

        def function(*received: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = torch.ones(3)
            for tensor in received:
                h = (h * tensor).sin() + tensor
            return tuple((h * (n + 1)).exp() for n in range(outputs))

        results = wrap(function, direct, *args)
        if after == "detach":
            side = results[-1].detach().sin()
        else:
            with torch.set_grad_enabled(after == "nothing"):
                side = results[-1].sin()
        (results[0] * side).sum().backward()
        return [result.detach() for result in results], side.requires_grad

    compare(ckpt, program, lambda: leaves(1 + len(before)), use_reentrant=True)
