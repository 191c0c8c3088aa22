"""Makes a failing program smaller: the smallest that still fails in the same way.

Works on programs, not on Hypothesis's choices: an edit keeps the rest of the program as it is, so
a few dozen runs are enough. An edit that makes a program invalid does no harm, because then its
plain run fails and the edit is not taken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from conformance.programs.model import (
    Apply,
    Argument,
    Block,
    Branch,
    Constant,
    Group,
    InnerGrad,
    Item,
    Loop,
    Options,
    Plan,
    Program,
    Region,
    Sequence,
    Statement,
    Step,
    Structure,
    structure_names,
    walk,
)

_T = TypeVar("_T")
Body = tuple[Statement, ...]

LIMIT_SECONDS = 8.0
"""A report is worth waiting this long for, not longer; what was reached by then is reported."""


def reduce(
    program: Program,
    still_fails: Callable[[Program], bool],
    *,
    seconds: float = LIMIT_SECONDS,
) -> Program:
    """The smallest program found for which ``still_fails`` holds."""
    deadline = time.monotonic() + seconds
    tried: set[Program] = {program}
    progress = True
    while progress:
        progress = False
        for edit in _EDITS:
            again = True
            while again:
                again = False
                for smaller in edit(program):
                    if time.monotonic() > deadline:
                        return renumbered(program, still_fails)
                    smaller = clean(smaller)
                    if smaller in tried:
                        continue
                    tried.add(smaller)
                    if still_fails(smaller):
                        program, progress, again = smaller, True, True
                        break
    return renumbered(program, still_fails)


# ---------------------------------------------------------------------- names


_NAME = re.compile(r"\b(?:v|x|i|a|m|out)\d+\b")


def mapped(value: _T, change: Callable[[str], str]) -> _T:
    """``value`` with ``change`` applied to every text in it."""
    return cast(_T, _mapped(value, change))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    result: Any = value
    if isinstance(value, str):
        result = change(value)
    elif isinstance(value, tuple):
        result = tuple(mapped(item, change) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(
            value,
            **{item.name: mapped(getattr(value, item.name), change) for item in fields(value)},
        )
    return result


def substituted(value: _T, old: str, new: str) -> _T:
    """``value`` with the expression ``old`` replaced by ``new``."""
    pattern = re.compile(rf"\b{re.escape(old)}(?!\w)")
    return mapped(value, lambda text: pattern.sub(lambda _: new, text))


def used_names(value: Any) -> set[str]:
    """Every base name that occurs in ``value``."""
    found: set[str] = set()
    mapped(value, lambda text: found.update(_NAME.findall(text)) or text)  # type: ignore[func-returns-value]
    return found


def _made(body: Body) -> set[str]:
    """Names that a body binds at its own level."""
    made: set[str] = set()
    for item in body:
        if isinstance(item, Apply):
            made.update(result.name for result in item.results)
        elif isinstance(item, Block):
            made |= _made(item.body)
        elif isinstance(item, Branch):
            made |= _made(item.then)
        elif isinstance(item, Loop):
            made.add(item.target)
        elif isinstance(item, (InnerGrad, Sequence)):
            made.add(item.result.name)
        elif isinstance(item, Region):
            made.add(item.result)
    return made


def clean(program: Program) -> Program:
    """Drop what nothing mentions any more: leaves, modules, outputs and targets."""
    made = _made(program.body)
    leaf_names = {leaf.tensor.name for leaf in program.leaves}

    def known(name: str) -> bool:
        base = _NAME.findall(name)[:1]
        return bool(base) and (base[0] in made or base[0] in leaf_names)

    outputs = tuple(name for name in program.outputs if known(name))
    steps = []
    for step in program.plan.steps:
        targets = tuple(name for name in step.targets if known(name))
        if targets:
            steps.append(replace(step, targets=targets))
    used = used_names(program.body) | used_names(tuple(steps)) | used_names(outputs)
    leaves = tuple(leaf for leaf in program.leaves if leaf.tensor.name in used)
    kept = {leaf.tensor.name for leaf in leaves}
    steps = [
        replace(step, inputs=tuple(n for n in step.inputs if n in kept) or None)
        if step.inputs is not None and step.kind == "backward"
        else step
        for step in steps
    ]
    return replace(
        program,
        leaves=leaves,
        modules=tuple(module for module in program.modules if module.name in used),
        outputs=outputs,
        plan=replace(program.plan, steps=tuple(steps)),
    )


def renumbered(program: Program, still_fails: Callable[[Program], bool]) -> Program:
    """The same program with names that count from 1, if it still fails."""
    order: dict[str, str] = {}
    counts: dict[str, int] = {}

    def note(text: str) -> str:
        for name in _NAME.findall(text):
            if name not in order and not name.startswith("out"):
                kind = name.rstrip("0123456789")
                counts[kind] = counts.get(kind, 0) + 1
                order[name] = f"{kind}{counts[kind]}"
        return text

    mapped(program, note)
    for number, region in enumerate(program.regions(), 1):
        order[f"out{region.number}"] = f"out{number}"
    named = mapped(program, lambda text: _NAME.sub(lambda m: order.get(m[0], m[0]), text))
    numbers = {region.number: index for index, region in enumerate(program.regions(), 1)}

    def number_regions(body: Body) -> Body:
        return tuple(
            replace(item, number=numbers[item.number]) if isinstance(item, Region) else item
            for item in _deep(body, number_regions)
        )

    named = replace(named, body=number_regions(named.body))
    return named if named != program and still_fails(named) else program


def _deep(body: Body, change: Callable[[Body], Body]) -> Body:
    """``body`` with ``change`` applied to the bodies inside its statements."""
    result: list[Statement] = []
    for item in body:
        if isinstance(item, (Block, Loop, Region)):
            result.append(replace(item, body=change(item.body)))
        elif isinstance(item, Branch):
            result.append(replace(item, then=change(item.then), otherwise=change(item.otherwise)))
        else:
            result.append(item)
    return tuple(result)


# ---------------------------------------------------------------------- edits


def _bodies(body: Body) -> Iterator[tuple[Body, Callable[[Body], Body]]]:
    """Every body in ``body``, outermost first, with how to put another in its place."""
    yield body, lambda new: new
    for index, item in enumerate(body):
        places: list[tuple[Body, str]] = []
        if isinstance(item, (Block, Loop, Region)):
            places = [(item.body, "body")]
        elif isinstance(item, Branch):
            places = [(item.then, "then"), (item.otherwise, "otherwise")]
        for inner, field in places:
            for part, put in _bodies(inner):

                def put_here(
                    new: Body,
                    put: Callable[[Body], Body] = put,
                    index: int = index,
                    item: Any = item,
                    field: str = field,
                ) -> Body:
                    changed = replace(item, **{field: put(new)})
                    return (*body[:index], changed, *body[index + 1 :])

                yield part, put_here


def _statements(
    program: Program,
) -> Iterator[tuple[Statement, Callable[[Body], Program]]]:
    """Every statement with how to put others in its place; last first, outer before inner."""
    for body, put in _bodies(program.body):
        for index in reversed(range(len(body))):

            def replaced(
                new: Body,
                body: Body = body,
                index: int = index,
                put: Callable[[Body], Body] = put,
            ) -> Program:
                return replace(program, body=put((*body[:index], *new, *body[index + 1 :])))

            yield body[index], replaced


def _fewer_steps(program: Program) -> Iterator[Program]:
    plan = program.plan
    for index in range(len(plan.steps)):
        steps = (*plan.steps[:index], *plan.steps[index + 1 :])
        yield replace(program, plan=replace(plan, steps=steps))
    if plan.group:
        yield replace(program, plan=replace(plan, group=False))


def _fewer_statements(program: Program) -> Iterator[Program]:
    for item, put in _statements(program):
        gone = put(())
        yield gone
        if isinstance(item, Apply) and item.results and item.operands:
            # What it gave becomes what it was given.
            for result in item.results:
                gone = substituted(gone, result.name, item.operands[-1])
            yield gone


def _fewer_outputs(program: Program) -> Iterator[Program]:
    for index in range(len(program.outputs)):
        yield replace(program, outputs=(*program.outputs[:index], *program.outputs[index + 1 :]))
    for number, step in enumerate(program.plan.steps):
        for simpler in _simpler_step(step):
            steps = (*program.plan.steps[:number], simpler, *program.plan.steps[number + 1 :])
            yield replace(program, plan=replace(program.plan, steps=steps))


def _simpler_step(step: Step) -> Iterator[Step]:
    if len(step.targets) > 1:
        for name in step.targets:
            yield replace(step, targets=tuple(kept for kept in step.targets if kept != name))
    if step.loss != "sum":
        yield replace(step, loss="sum")
    if step.retain:
        yield replace(step, retain=False)
    if step.create:
        yield replace(step, create=False)
    if step.kind == "grad" and not step.create:
        yield replace(step, kind="backward", inputs=None)
    if step.inputs is not None and step.kind == "backward":
        yield replace(step, inputs=None)
    if step.inputs is not None and len(step.inputs) > 1:
        for name in step.inputs:
            yield replace(step, inputs=tuple(kept for kept in step.inputs if kept != name))


def _unwrapped(program: Program) -> Iterator[Program]:
    """A region, block, branch or loop replaced by what is inside it."""
    for item, put in _statements(program):
        if isinstance(item, Block):
            yield put(item.body)
        elif isinstance(item, Branch):
            yield put(item.then)
        elif isinstance(item, Loop):
            yield put(
                tuple(
                    replace(inner, operands=(item.start,))
                    if isinstance(inner, Apply) and number == 0
                    else inner
                    for number, inner in enumerate(item.body)
                )
            )
        elif isinstance(item, Region):
            result = put(tuple(substituted(item.body, item.result, item.result)))
            for path, inner in _paths(item.returns, item.result):
                result = substituted(result, path, inner)
            for argument in item.arguments:
                for path, outer in _paths(argument.value, argument.name):
                    result = substituted(result, path, outer)
            yield _depths(result)


def _depths(program: Program) -> Program:
    def lowered(body: Body, depth: int) -> Body:
        found: list[Statement] = []
        for item in body:
            if isinstance(item, Region):
                found.append(replace(item, depth=depth, body=lowered(item.body, depth + 1)))
            elif isinstance(item, (Block, Loop)):
                found.append(replace(item, body=lowered(item.body, depth)))
            else:
                found.append(item)
        return tuple(found)

    return replace(program, body=lowered(program.body, 1))


def _paths(structure: Structure, path: str) -> list[tuple[str, str]]:
    """Expressions by which the tensors of a structure are reached, longest first."""
    if isinstance(structure, Item):
        return [(path, structure.name)]
    if isinstance(structure, Group):
        found = []
        for index, item in enumerate(structure.items):
            if structure.kind == "dict":
                step = f"[{'abc'[index]!r}]"
            elif structure.kind == "record":
                step = f".{('first', 'second')[index]}"
            else:
                step = f"[{index}]"
            found += _paths(item, path + step)
        return found
    return []


def _simpler_regions(program: Program) -> Iterator[Program]:
    for item, put in _statements(program):
        if not isinstance(item, Region):
            continue
        names = used_names(item.body) | used_names(item.returns)
        for index, argument in enumerate(item.arguments):
            fewer = (*item.arguments[:index], *item.arguments[index + 1 :])
            if argument.name not in names and fewer:
                yield put((replace(item, arguments=fewer),))
            if argument.keyword:
                plain = replace(argument, keyword=False)
                yield put((_with_argument(item, index, plain),))
            if isinstance(argument.value, Group):
                yield from _flat_argument(item, index, argument, put)
        yield from _simpler_returns(program, item, put)
        for options in _simpler_options(item.options):
            yield put((replace(item, options=options),))


def _with_argument(region: Region, index: int, argument: Argument) -> Region:
    arguments = (*region.arguments[:index], argument, *region.arguments[index + 1 :])
    return replace(region, arguments=arguments)


def _flat_argument(
    region: Region, index: int, argument: Argument, put: Callable[[Body], Program]
) -> Iterator[Program]:
    for path, name in _paths(argument.value, argument.name):
        flat = _with_argument(region, index, replace(argument, value=Item(name)))
        for other, _ in _paths(argument.value, argument.name):
            flat = replace(
                flat,
                body=substituted(flat.body, other, argument.name),
                returns=substituted(flat.returns, other, argument.name),
            )
        if path:
            yield put((flat,))
    value = argument.value
    assert isinstance(value, Group)
    if any(isinstance(part, Constant) for part in value.items):
        kept = tuple(part for part in value.items if not isinstance(part, Constant))
        if kept and value.kind != "record":
            yield put(
                (
                    _with_argument(
                        region, index, replace(argument, value=replace(value, items=kept))
                    ),
                )
            )


def _simpler_returns(
    program: Program, region: Region, put: Callable[[Body], Program]
) -> Iterator[Program]:
    if isinstance(region.returns, Item):
        return
    paths = _paths(region.returns, region.result)
    for name in dict.fromkeys(structure_names(region.returns)):
        changed = put((replace(region, returns=Item(name)),))
        for path, _ in paths:
            changed = substituted(changed, path, region.result)
        yield replace(
            changed,
            outputs=tuple(dict.fromkeys(changed.outputs)),
            plan=replace(
                changed.plan,
                steps=tuple(
                    replace(step, targets=tuple(dict.fromkeys(step.targets)))
                    for step in changed.plan.steps
                ),
            ),
        )
    if isinstance(region.returns, Group) and len(region.returns.items) > 1:
        fewer = replace(region.returns, items=region.returns.items[:-1])
        if region.returns.kind != "record":
            last = _paths(region.returns, region.result)[-1][0]
            gone = put((replace(region, returns=fewer),))
            yield replace(
                gone,
                outputs=tuple(name for name in gone.outputs if name != last),
                plan=replace(
                    gone.plan,
                    steps=tuple(
                        replace(s, targets=tuple(name for name in s.targets if name != last))
                        for s in gone.plan.steps
                    ),
                ),
            )


def _simpler_options(options: Options) -> Iterator[Options]:
    plain = Options(use_reentrant=options.use_reentrant)
    if options != plain:
        yield plain
    for item in fields(Options):
        if item.name != "use_reentrant" and getattr(options, item.name) != item.default:
            default: dict[str, Any] = {item.name: item.default}
            yield replace(options, **default)
    if options.policy is not None and len(options.policy.operators) > 1:
        for name in options.policy.operators:
            kept = tuple(one for one in options.policy.operators if one != name)
            yield replace(options, policy=replace(options.policy, operators=kept))
    if options.policy is not None and options.policy.form == "function":
        yield replace(options, policy=replace(options.policy, form="list", answer="MUST_SAVE"))


def _simpler_operators(program: Program) -> Iterator[Program]:
    for item, put in _statements(program):
        if (
            isinstance(item, Apply)
            and item.operator not in ("sin", "module")
            and len(item.results) == 1
        ):
            yield put((Apply("sin", item.operands[-1:], (), item.results),))
            yield put((Apply("sin", item.operands[:1], (), item.results),))


def _simpler_leaves(program: Program) -> Iterator[Program]:
    for index, leaf in enumerate(program.leaves):
        tensor = leaf.tensor
        for smaller in ((2,), (2, 2)):
            if leaf.kind == "randn" and (len(smaller), smaller) < (
                len(tensor.shape),
                tensor.shape,
            ):
                yield _with_leaf(program, index, replace(tensor, shape=smaller))
        if leaf.kind == "randn" and tensor.dtype != "float32":
            yield _with_leaf(program, index, replace(tensor, dtype="float32"))
    # One leaf instead of two.
    for one in program.leaves:
        for other in program.leaves:
            if one is not other and one.tensor.grad >= other.tensor.grad:
                merged = replace(
                    program,
                    leaves=tuple(leaf for leaf in program.leaves if leaf is not other),
                )
                yield substituted(merged, other.tensor.name, one.tensor.name)


def _with_leaf(program: Program, index: int, tensor: Any) -> Program:
    leaf = replace(program.leaves[index], tensor=tensor)
    return replace(program, leaves=(*program.leaves[:index], leaf, *program.leaves[index + 1 :]))


def _same_leaf(program: Program) -> Iterator[Program]:
    """What a region is given, or an operator works on, replaced by a leaf."""
    leaves = [leaf.tensor.name for leaf in program.leaves if leaf.tensor.grad]
    for item, put in _statements(program):
        if isinstance(item, Region):
            for index, argument in enumerate(item.arguments):
                if isinstance(argument.value, Item) and argument.value.name not in leaves:
                    for name in leaves[:2]:
                        value = replace(argument, value=Item(name))
                        yield put((_with_argument(item, index, value),))


def _plan_of(program: Program) -> Iterator[Program]:
    if program.plan.steps and program.plan != Plan(program.plan.steps[:1]):
        yield replace(program, plan=Plan(program.plan.steps[:1]))


_EDITS: tuple[Callable[[Program], Iterator[Program]], ...] = (
    _plan_of,
    _fewer_steps,
    _fewer_statements,
    _unwrapped,
    _fewer_outputs,
    _simpler_regions,
    _same_leaf,
    _simpler_operators,
    _simpler_leaves,
)

__all__ = ["clean", "mapped", "reduce", "walk"]
