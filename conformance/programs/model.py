"""What a program is: leaves, statements, regions, a plan of backward calls. Plain data, no torch.

Names inside a program are Python expressions of the rendered source (``v3``, ``items[0]``), so a
statement can be read without a symbol table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Settings = tuple[tuple[str, Any], ...]

FLOATS = ("float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program. ``shape`` and ``dtype`` are what running the source gives;
    ``grad`` says whether it requires grad there."""

    name: str
    shape: Shape
    dtype: str
    grad: bool = False

    @property
    def is_float(self) -> bool:
        """Whether its dtype is a floating one."""
        return self.dtype in FLOATS

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Leaf:
    """A tensor made at the start. ``kind``: ``randn`` (floating), ``index`` (integers below 2)."""

    tensor: Tensor
    kind: str = "randn"
    hook: str | None = None  # post-accumulate hook, by name in render


@dataclass(frozen=True)
class Module:
    """A module made at the start; ``source`` is the expression that makes it. ``parameters`` and
    ``buffers`` are attribute paths of what is observed of it."""

    name: str
    source: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()


# ---------------------------------------------------------------------- structures


@dataclass(frozen=True)
class Item:
    """A tensor inside a structure, by its name."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor; ``source`` is its literal."""

    source: str


@dataclass(frozen=True)
class Group:
    """A container. ``kind``: tuple, list, dict (keys a, b, …), record (a dataclass, two fields)."""

    kind: str
    items: tuple[Structure, ...]


Structure = Item | Constant | Group


def structure_names(structure: Structure) -> list[str]:
    """The tensors of a structure, in order."""
    if isinstance(structure, Item):
        return [structure.name]
    if isinstance(structure, Group):
        return [name for item in structure.items for name in structure_names(item)]
    return []


# ---------------------------------------------------------------------- statements


@dataclass(frozen=True)
class Apply:
    """``results = operator(operands, settings)``; ``in_place`` operators have no results."""

    operator: str
    operands: tuple[str, ...]
    settings: Settings
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Block:
    """``body`` inside a context. ``kind``: no_grad, enable_grad, autocast, no_autocast,
    saved_hooks, early_stop_on, early_stop_off, debug_on."""

    kind: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Branch:
    """An ``if`` on a Python condition; both sides assign the same names."""

    condition: str
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop:
    """``target = start`` and then ``body`` (which assigns ``target`` anew) ``times`` times."""

    target: str
    start: str
    times: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Hook:
    """A hook registered on a tensor. ``kind``: see ``render.HOOKS``."""

    tensor: str
    kind: str


@dataclass(frozen=True)
class InnerGrad:
    """A backward inside forward: ``result`` is the gradient of ``output``'s sum by ``source``,
    detached from any graph, zeros where there is none."""

    output: str
    source: str
    result: Tensor


@dataclass(frozen=True)
class Argument:
    """One argument of a region: the callee's name for it and what the caller passes."""

    name: str
    value: Structure
    keyword: bool = False


@dataclass(frozen=True)
class Policy:
    """A selective policy: operators kept, as a list or a function, or a constant answer."""

    form: str  # list, function, constant
    operators: tuple[str, ...] = ()
    answer: str = "MUST_SAVE"
    mutation: bool = False


@dataclass(frozen=True)
class Options:
    """Options of ``checkpoint`` as they are written; None: the option is left out."""

    use_reentrant: bool = False
    preserve_rng_state: bool | None = None
    determinism_check: str | None = None
    debug: bool | None = None
    early_stop: bool | None = None
    respect_saved_tensors_hooks: bool | None = None
    contexts: bool = False  # a context_fn of two empty context managers
    policy: Policy | None = None
    form: str = "direct"  # direct, decorator, partial


@dataclass(frozen=True)
class Region:
    """A function defined and called through ``checkpoint``; ``result`` names what it returns."""

    number: int
    arguments: tuple[Argument, ...]
    body: tuple[Statement, ...]
    returns: Structure
    result: str
    options: Options
    depth: int = 1


@dataclass(frozen=True)
class Sequence:
    """``checkpoint_sequential`` over small functions; ``stages`` are operator names or modules."""

    stages: tuple[str, ...]
    segments: int
    operand: str
    result: Tensor
    use_reentrant: bool
    preserve_rng_state: bool | None


Statement = Apply | Block | Branch | Loop | Hook | InnerGrad | Region | Sequence


# ---------------------------------------------------------------------- backward


@dataclass(frozen=True)
class Step:
    """One backward call.

    ``kind``: ``backward`` or ``grad``. ``targets`` are summed to a loss (``loss``: sum or square).
    ``inputs`` None: all leaves (only for ``backward``). ``create`` (grad only): its results are
    differentiated again by the next step.
    """

    kind: str
    targets: tuple[str, ...]
    loss: str = "sum"
    inputs: tuple[str, ...] | None = None
    retain: bool = False
    create: bool = False


@dataclass(frozen=True)
class Plan:
    """Backward calls in order, possibly inside one graph execution group."""

    steps: tuple[Step, ...] = ()
    group: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names under which the coverage account counts this plan."""
        found = []
        for step in self.steps:
            found.append(step.kind)
            if step.kind == "backward" and step.inputs is not None:
                found.append("inputs=")
            if step.create:
                found.append("double backward")
            if step.retain:
                found.append("retain_graph")
        if len(self.steps) > 1:
            found.append("repeated")
        if self.group:
            found.append("group")
        return tuple(dict.fromkeys(found)) or ("none",)


@dataclass(frozen=True, repr=False)
class Program:
    """A whole program."""

    leaves: tuple[Leaf, ...]
    modules: tuple[Module, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    plan: Plan
    seed: int = field(default=0)

    def __repr__(self) -> str:
        from conformance.programs.render import render

        return f"<program>\n{render(self).source}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # What Hypothesis prints for a failing example.

    def regions(self) -> list[Region]:
        """Every region, outer before inner."""
        return [item for item in walk(self.body) if isinstance(item, Region)]


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, outer before inner, in program order."""
    for item in body:
        yield item
        if isinstance(item, (Block, Loop, Region)):
            yield from walk(item.body)
        elif isinstance(item, Branch):
            yield from walk(item.then)
            yield from walk(item.otherwise)
