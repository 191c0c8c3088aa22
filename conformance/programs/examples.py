"""Programs that are always tried, before any that is drawn: they show a known fault every time,
so that its record in the expectations is met whatever the seed."""

from __future__ import annotations

from conformance.programs.model import (
    Apply,
    Argument,
    Item,
    Leaf,
    Options,
    Plan,
    Policy,
    Program,
    Region,
    Statement,
    Step,
    Tensor,
)

_VECTOR = Tensor("x1", (2,), "float32", True)


def _value(name: str) -> Tensor:
    return Tensor(name, (2,), "float32", True)


def _one_region(body: tuple[Statement, ...], last: str, options: Options, plan: Plan) -> Program:
    region = Region(1, (Argument("a1", Item("x1")),), body, Item(last), "out1", options)
    return Program((Leaf(_VECTOR),), (), (region,), ("out1",), plan)


DEBUG_TWICE = _one_region(
    (Apply("sin", ("a1",), (), (_value("v1"),)),),
    "v1",
    Options(debug=True),
    Plan((Step("backward", ("out1",), retain=True), Step("backward", ("out1",)))),
)

KEPT_BESIDE_RANDOM = _one_region(
    (
        Apply("noise", ("a1",), (), (_value("v1"),)),
        Apply("normal", ("v1",), (), (_value("v2"),)),
    ),
    "v2",
    Options(policy=Policy("list", ("rand_like.default",))),
    Plan((Step("backward", ("out1",)),)),
)
