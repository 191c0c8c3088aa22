"""Draws programs of a sub-language. Programs are valid by construction: nothing is drawn and then
thrown away. Everything shrinks towards less: fewer statements, the first operator of the first
category, defaults of options, one region, one backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Choices
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from conformance.programs import model
from conformance.programs.language import Language
from conformance.programs.model import (
    Apply,
    Argument,
    Block,
    Branch,
    Constant,
    Group,
    Hook,
    InnerGrad,
    Item,
    Leaf,
    Loop,
    Module,
    Options,
    Plan,
    Policy,
    Program,
    Region,
    Sequence,
    Statement,
    Step,
    Structure,
    Tensor,
)
from conformance.programs.operators import CATEGORIES, OPERATORS, Operator

_T = TypeVar("_T")

SHAPES: tuple[model.Shape, ...] = ((2,), (2, 3), (3,), (), (1, 2), (2, 2, 3), (1,), (2, 1, 2))

POLICY_OPERATORS = (
    "sin.default",
    "mul.Tensor",
    "mm.default",
    "tanh.default",
    "add.Tensor",
    "sum.dim_IntList",
    "relu.default",
    "cos.default",
    "_softmax.default",
    "max.dim",
    "bmm.default",
    "native_layer_norm.default",
    "t.default",
    "view.default",
    "pow.Tensor_Scalar",
)
RANDOM_OPERATORS = (
    "rand_like.default",
    "randn.default",
    "bernoulli.default",
    "randperm.default",
)
ANSWERS = (
    "MUST_SAVE",
    "PREFER_SAVE",
    "PREFER_RECOMPUTE",
    "MUST_RECOMPUTE",
)

# Kept for shape and dtype and fit to be iterated or to stand in either side of a branch.
_STEADY = ("sin", "cos", "tanh", "sigmoid", "square", "neg", "shift", "scale", "softplus", "abs")

_BLOCKS = {
    "autocast": ("autocast", "no_autocast"),
    "saved hooks": ("saved_hooks", "save_on_cpu"),
    "early stop": ("early_stop_off", "early_stop_on"),
    "debug": ("debug_on", "debug_off"),
}
"""Contexts by kind of statement; for autocast the scope decides which of the two."""

_CONSTANTS = ("None", "3", "'text'", "True", "2.5")


@functools.cache
def _index(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


_MORE = st.integers(0, 3)
_BOOLEAN = st.booleans()


@dataclass(eq=False)
class _Memory:
    """What the names of one storage allow. ``frozen``: must not be changed (a leaf, something a
    region was given, one of several views); ``saved``: autograd may hold it."""

    frozen: bool = False
    saved: bool = False


@dataclass(eq=False)
class _Bound:
    """A tensor in scope."""

    tensor: Tensor
    memory: _Memory
    lane: int = 0
    leaf: bool = False
    local: bool = True
    region_output: bool = False


@dataclass
class _Scope:
    """Names visible at one place, with the modes in force there."""

    bound: list[_Bound] = field(default_factory=list)
    outer: _Scope | None = None
    closures: bool = False
    grad: bool = True
    autocast: bool = False
    reentrant: bool = False
    recorded: bool = True
    random: bool = True
    selective: bool = False
    in_region: bool = False

    def inside(self, **changes: Any) -> _Scope:
        """The same names under other modes: what is bound here is bound there."""
        return replace(self, **changes)

    def visible(self) -> list[_Bound]:
        """Latest first, so that shrinking prefers what was just made."""
        found = list(reversed(self.bound))
        if self.closures and self.outer is not None:
            found += [
                item
                for item in self.outer.visible()
                # A non-leaf tensor of the caller would get its gradient from inside the reentrant
                # variant's own backward call: documented to need all its inputs as arguments.
                if not self.reentrant or item.leaf or not item.tensor.grad
            ]
        return found


class _Builder:
    """Draws one program."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], language: Language) -> None:
        self._draw = draw
        self.language = language
        self.leaves: list[Leaf] = []
        self.modules: list[tuple[Module, str, model.Shape]] = []
        self.count = {"v": 0, "region": 0, "x": 0, "i": 0, "m": 0, "a": 0}
        self.plan_kind = self.pick(language.plans)
        self.twice = self.plan_kind in ("double", "double inputs")
        self.root = _Scope()
        self.region_outputs: list[_Bound] = []

    # ------------------------------------------------------------------ drawing

    def pick(self, options: Choices[_T]) -> _T:
        """One of ``options``; shrinks to the first."""
        if len(options) == 1:
            return options[0]
        index: int = self._draw(_index(len(options)))
        return options[index]

    def chance(self) -> bool:
        return bool(self._draw(_BOOLEAN))

    def more(self, have: int, most: int) -> bool:
        return have < most and self._draw(_MORE) > 0

    def name(self, kind: str) -> str:
        self.count[kind] += 1
        return f"{kind}{self.count[kind]}"

    # ------------------------------------------------------------------ leaves

    def leaf(self, shape: model.Shape, dtype: str, grad: bool, lane: int) -> _Bound:
        integer = dtype == "int64"
        tensor = Tensor(self.name("i" if integer else "x"), shape, dtype, grad and not integer)
        self.leaves.append(Leaf(tensor, "index" if integer else "randn"))
        bound = _Bound(tensor, _Memory(frozen=True), lane, leaf=True)
        self.root.bound.append(bound)
        return bound

    def float_leaf(self, lane: int, grad: bool) -> _Bound:
        return self.leaf(self.pick(SHAPES), self.pick(self.language.dtypes), grad, lane)

    # ------------------------------------------------------------------ statements

    def statements(self, scope: _Scope, most: int, depth: int) -> list[Statement]:
        body: list[Statement] = []
        while self.more(len(body), most):
            body.extend(self.statement(scope, depth))
        return body

    def statement(self, scope: _Scope, depth: int) -> list[Statement]:
        kinds = ["apply", *self.language.statements]
        if depth and scope.in_region and depth < self.language.depth:
            kinds.append("region")
        kind = self.pick(kinds)
        if kind == "in-place":
            return self.in_place(scope)
        if kind == "branch":
            return self.branch(scope)
        if kind == "loop":
            return self.loop(scope)
        if kind == "no_grad":
            return self.without_gradient(scope)
        if kind == "module":
            return self.module(scope)
        if kind == "hook":
            return self.hook(scope)
        if kind == "inner grad":
            return self.inner_grad(scope)
        if kind == "region":
            return [self.region(scope, depth + 1)]
        if kind == "sequence":
            return [self.sequence(scope)]
        if kind in _BLOCKS:
            return self.block(scope, kind, depth)
        return [self.apply(scope)]

    def floats(self, scope: _Scope, lane: int | None = None) -> list[_Bound]:
        return [
            item for item in scope.visible() if item.tensor.is_float and lane in (None, item.lane)
        ]

    def operator(self, scope: _Scope) -> Operator:
        """An operator of the language: first its category, so that small ones are not rare."""
        category = self.pick(self.language.categories)
        once = self.twice or not self.language.once
        names = _names(category, scope.random, scope.autocast, once)
        return OPERATORS[self.pick(names)]

    def apply(self, scope: _Scope, lane: int | None = None) -> Statement:
        """An operator with operands that fit it, or ``sin`` where none does."""
        operator = self.operator(scope)
        operands = self.operands(operator, scope, lane)
        if operands is None:
            operator = OPERATORS["sin"]
            operands = [self.pick(self.floats(scope, lane))]
        return self.bind(operator, operands, scope)

    def operands(
        self, operator: Operator, scope: _Scope, lane: int | None = None
    ) -> list[_Bound] | None:
        chosen: list[_Bound] = []
        tensors: tuple[Tensor, ...] = ()
        for position in range(operator.arity):
            wanted = chosen[0].lane if chosen else lane
            fitting = [
                item
                for item in scope.visible()
                if wanted in (None, item.lane)
                and operator.accepts((*tensors, item.tensor))
                and not (
                    scope.autocast
                    and operator.autocast == "lower"
                    and item.tensor.dtype == "float64"
                )
                # torch.nn.functional.linear changes the result of its own mm in place for a vector;
                # where a policy keeps that result, the documented mutation error follows.
                and not (
                    scope.selective
                    and position == 0
                    and operator.category == "matmul"
                    and len(item.tensor.shape) < 2
                )
            ]
            makers = operator.makes
            fresh = None
            if 0 < position <= len(makers) and self._may_make(scope):
                fresh = makers[position - 1](tensors[0])
            if fitting and (fresh is None or len(fitting) > 1 or not self.chance()):
                item = self.pick(fitting)
            elif fresh is not None:
                item = self.leaf(fresh.shape, fresh.dtype, True, chosen[0].lane)
            else:
                return None
            chosen.append(item)
            tensors = (*tensors, item.tensor)
        return chosen

    def _may_make(self, scope: _Scope) -> bool:
        """A new leaf appears at the start of the program: visible here only through closures."""
        here: _Scope | None = scope
        while here is not None and here.outer is not None:
            if not here.closures:
                return False
            here = here.outer
        return True

    def bind(
        self,
        operator: Operator,
        operands: list[_Bound],
        scope: _Scope,
        names: tuple[str, ...] | None = None,
    ) -> Apply:
        tensors = tuple(item.tensor for item in operands)
        settings = self.pick(operator.settings(tensors))
        self.use(operands, scope)
        results = []
        grad = scope.grad and not operator.detaches and any(item.grad for item in tensors)
        for number, (shape, dtype) in enumerate(operator.results(tensors, settings)):
            if scope.autocast and operator.autocast == "lower" and dtype == "float32":
                dtype = "bfloat16"
            name = names[number] if names else self.name("v")
            memory = _Memory()
            if operator.alias:
                memory = operands[0].memory
                if operator.multi_view or operator.detaches or not scope.grad:
                    memory.frozen = True
            result = Tensor(name, shape, dtype, grad and dtype in model.FLOATS)
            results.append(result)
            scope.bound.append(_Bound(result, memory, operands[0].lane))
            memory.saved |= operator.saves
        if operator.saves:
            for item in operands:
                item.memory.saved = True
        return Apply(
            operator.name,
            tuple(item.tensor.name for item in operands),
            tuple(settings.items()),
            tuple(results),
        )

    def use(self, operands: list[_Bound], scope: _Scope) -> None:
        """What a region takes from outside must not change between forward and backward."""
        if scope.in_region:
            here = {id(item) for item in scope.bound}
            for item in operands:
                if id(item) not in here:
                    item.memory.frozen = True

    def in_place(self, scope: _Scope) -> list[Statement]:
        targets = [
            item
            for item in self.floats(scope)
            if item in scope.bound and not item.memory.frozen and not item.memory.saved
        ]
        if not targets or not scope.grad or scope.autocast or scope.selective:
            return [self.apply(scope)]
        target = self.pick(targets)
        operator = OPERATORS[self.pick(CATEGORIES["in-place"])]
        operands = [target]
        if not operator.accepts((target.tensor,)):
            operator = OPERATORS["mul_"]
        if operator.name == "augmented" and not target.tensor.name.isidentifier():
            operator = OPERATORS["add_"]  # A tuple's item cannot be assigned.
        if operator.arity == 2:
            fitting = [
                item
                for item in scope.visible()
                if item.memory is not target.memory
                and item.lane == target.lane
                and operator.accepts((target.tensor, item.tensor))
                # Otherwise the target would begin to require grad here, and its aliases too.
                and (target.tensor.grad or not item.tensor.grad)
            ]
            if not fitting:
                operator = OPERATORS["mul_"]
            else:
                operands.append(self.pick(fitting))
        self.use(operands[1:], scope)
        if operator.saves:
            for item in operands:
                item.memory.saved = True
        return [Apply(operator.name, tuple(item.tensor.name for item in operands), (), ())]

    def branch(self, scope: _Scope) -> list[Statement]:
        subject = self.pick(self.floats(scope))
        self.use([subject], scope)
        name = subject.tensor.name
        conditions = [f"{name}.sum() > 0", f"{name}.numel() > 2"]
        if scope.recorded:
            # The forward of a reentrant region records no graph: documented, and visible here.
            conditions.append(f"{name}.requires_grad")
        condition = self.pick(conditions)
        target = self.name("v")
        sides = []
        for _ in range(2):
            inner = replace(scope, bound=list(scope.bound))
            sides.append(self.bind(OPERATORS[self.pick(_STEADY)], [subject], inner, (target,)))
        result = sides[0].results[0]
        memory = _Memory(saved=True)
        scope.bound.append(_Bound(result, memory, subject.lane))
        return [Branch(condition, (sides[0],), (sides[1],))]

    def loop(self, scope: _Scope) -> list[Statement]:
        start = self.pick(self.floats(scope))
        self.use([start], scope)
        target = Tensor(self.name("v"), start.tensor.shape, start.tensor.dtype, start.tensor.grad)
        inner = replace(scope, bound=list(scope.bound))
        running = _Bound(target, _Memory(), start.lane)
        body: list[Statement] = []
        while not body or self.more(len(body), 2):
            operator = OPERATORS[self.pick(_STEADY)]
            body.append(self.bind(operator, [running], inner, (target.name,)))
        result = replace(target, grad=target.grad and scope.grad)
        scope.bound.append(_Bound(result, _Memory(saved=True), start.lane))
        start.memory.saved = True
        return [Loop(target.name, start.tensor.name, self.pick((2, 3, 1)), tuple(body))]

    def without_gradient(self, scope: _Scope) -> list[Statement]:
        inner = scope.inside(grad=False)
        body = [self.apply(inner)]
        if self.chance():
            again = scope.inside(grad=True)
            return [Block("no_grad", (*body, Block("enable_grad", (self.apply(again),))))]
        return [Block("no_grad", tuple(body))]

    def context(self, scope: _Scope, kind: str) -> tuple[str, _Scope]:
        """A context of this kind: its name in ``Block`` and the scope inside it."""
        if kind == "autocast":
            name = "no_autocast" if scope.autocast else "autocast"
            return name, scope.inside(autocast=not scope.autocast)
        return self.pick(_BLOCKS[kind]), scope

    def block(self, scope: _Scope, kind: str, depth: int) -> list[Statement]:
        name, inner = self.context(scope, kind)
        body: list[Statement] = []
        if not scope.in_region and self.chance():
            body.append(self.region(inner, 1))
        elif scope.in_region and depth < self.language.depth and self.chance():
            body.append(self.region(inner, depth + 1))
        else:
            body.append(self.apply(inner))
        if self.chance():
            body.append(self.apply(inner))
        return [Block(name, tuple(body))]

    def sequence(self, scope: _Scope) -> Sequence:
        use_reentrant = self.pick(self.language.variants)
        able = [item for item in self.floats(scope) if item.tensor.grad or not use_reentrant]
        operand = self.pick(able)
        operand.memory.frozen = True
        stages: list[str] = []
        while not stages or self.more(len(stages), 5):
            stages.append(self.pick((*_STEADY, "dropout") if scope.random else _STEADY))
        tensor = replace(operand.tensor, name=self.name("v"))
        memory = _Memory(frozen=True, saved=True)
        bound = _Bound(tensor, memory, operand.lane)
        scope.bound.append(bound)
        self.region_outputs.append(bound)
        return Sequence(
            tuple(stages),
            1 + self._draw(_index(len(stages))),
            operand.tensor.name,
            tensor,
            use_reentrant,
            None if "dropout" in stages else self.pick((None, True, False)),
        )

    def hook(self, scope: _Scope) -> list[Statement]:
        # Only on tensors made here: a hook that a region puts on an outer tensor is put there
        # again by every recomputation, which is the program's own doing.
        able = [
            item
            for item in reversed(scope.bound)
            if item.tensor.grad and not item.memory.frozen | (item.leaf and scope.in_region)
        ]
        able += (
            []
            if scope.in_region
            else [item for item in scope.bound if item.leaf and item.tensor.grad]
        )
        if not able or not scope.grad:
            return [self.apply(scope)]
        target = self.pick(able)
        kind = self.pick(("double", "note"))
        target.memory.frozen = True
        return [Hook(target.tensor.name, kind)]

    def inner_grad(self, scope: _Scope) -> list[Statement]:
        able = [item for item in self.floats(scope) if item.tensor.grad and not item.leaf]
        if not able or not scope.grad:
            return [self.apply(scope)]
        output = self.pick(able)
        source = self.pick([item for item in self.floats(scope, output.lane) if item.tensor.grad])
        for item in (output, source):
            item.memory.frozen = True
        result = Tensor(self.name("v"), source.tensor.shape, source.tensor.dtype)
        scope.bound.append(_Bound(result, _Memory(), source.lane))
        return [InnerGrad(output.tensor.name, source.tensor.name, result)]

    # ------------------------------------------------------------------ modules

    def module(self, scope: _Scope) -> list[Statement]:
        able = [
            item
            for item in self.floats(scope)
            if item.tensor.dtype == "float32" and item.tensor.shape
        ]
        if not able or scope.autocast:
            return [self.apply(scope)]
        operand = self.pick(able)
        shape = operand.tensor.shape
        kind = self.pick(
            [
                name
                for name in _MODULES
                if _MODULES[name].fits(shape) and (scope.random or name != "Dropout")
            ]
        )
        recipe = _MODULES[kind]
        source = recipe.source(shape)
        same = [made for made, text, _ in self.modules if text == source]
        if same and self.chance():
            made = self.pick(same)
        else:
            made = Module(self.name("m"), source, recipe.parameters, recipe.buffers)
            self.modules.append((made, source, shape))
        self.use([operand], scope)
        operand.memory.saved = True
        grad = scope.grad and (operand.tensor.grad or bool(recipe.parameters))
        result = Tensor(self.name("v"), recipe.result(shape), "float32", grad)
        scope.bound.append(_Bound(result, _Memory(saved=True), operand.lane))
        return [Apply("module", (made.name, operand.tensor.name), (), (result,))]

    # ------------------------------------------------------------------ regions

    def region(self, scope: _Scope, depth: int) -> Region:
        language = self.language
        options = self.options(scope)
        self.count["region"] += 1
        number = self.count["region"]
        inner = scope.inside(
            bound=[],
            outer=scope,
            closures=language.closures and self.chance(),
            reentrant=options.use_reentrant,
            recorded=scope.recorded and not options.use_reentrant,
            random=scope.random and options.preserve_rng_state is not False,
            selective=scope.selective or options.policy is not None,
            in_region=True,
        )
        arguments = self.arguments(scope, inner, options)
        body = self.statements(inner, language.body, depth)
        if options.use_reentrant and not any(
            item.tensor.grad for item in inner.bound if item not in self._given(inner)
        ):
            given = [item for item in self.floats(inner) if item.tensor.grad]
            body.append(self.bind(OPERATORS["sin"], [self.pick(given)], inner))
        result = f"out{number}"
        returns, outputs = self.returns(inner, options, result, depth)
        for item in outputs:
            scope.bound.append(item)
        if depth == 1:
            self.region_outputs += outputs
        return Region(number, arguments, tuple(body), returns, result, options, depth)

    def _given(self, inner: _Scope) -> list[_Bound]:
        return [item for item in inner.bound if not item.local]

    def arguments(self, scope: _Scope, inner: _Scope, options: Options) -> tuple[Argument, ...]:
        language = self.language
        able = self.floats(scope)
        if options.use_reentrant:
            able = [item for item in able if item.tensor.grad]
        lanes = range(language.lanes)
        chosen = [self.pick([item for item in able if item.lane == lane] or able) for lane in lanes]
        others = scope.visible()
        while self.more(len(chosen), 3):
            chosen.append(self.pick(others))
        arguments: list[Argument] = []
        position = 0
        while position < len(chosen):
            name = self.name("a")
            structured = language.structures and not options.use_reentrant
            if structured and self.chance():
                size = 1 + (position + 1 < len(chosen) and self.chance())
                value, paths = self.structure(chosen[position : position + size], name)
            else:
                size, value, paths = 1, Item(chosen[position].tensor.name), [name]
            for item, path in zip(chosen[position : position + size], paths, strict=True):
                item.memory.frozen = True
                inner.bound.append(
                    _Bound(
                        replace(item.tensor, name=path),
                        _Memory(frozen=True, saved=True),
                        item.lane,
                        local=False,
                    )
                )
            keyword = (
                language.keywords
                and not options.use_reentrant
                and (self.chance() or bool(arguments and arguments[-1].keyword))
            )
            arguments.append(Argument(name, value, keyword))
            position += size
        if language.structures and self.chance():
            keyword = bool(arguments[-1].keyword)
            arguments.append(Argument(self.name("a"), Constant(self.pick(_CONSTANTS)), keyword))
        return tuple(arguments)

    def structure(self, items: list[_Bound], path: str) -> tuple[Structure, list[str]]:
        """Put ``items`` into a container; also gives how each is reached from ``path``."""
        kind = self.pick(("tuple", "list", "dict", "record"))
        places: list[Structure] = [Item(item.tensor.name) for item in items]
        if len(places) < 2 and (kind == "record" or self.chance()):
            places.append(Constant(self.pick(_CONSTANTS)))
        paths = [_reach(path, kind, index) for index in range(len(items))]
        if self.chance() and kind != "record":
            # One level deeper: the first item in a list of its own.
            places[0] = Group("list", (places[0],))
            paths[0] += "[0]"
        return Group(kind, tuple(places)), paths

    def returns(
        self, inner: _Scope, options: Options, result: str, depth: int
    ) -> tuple[Structure, list[_Bound]]:
        language = self.language
        given = self._given(inner)
        able = [item for item in reversed(inner.bound) if item not in given] or given
        if options.use_reentrant:
            # Every output of the reentrant variant is made to require grad, so each must be a
            # differentiable one; and an unused one gets zeros where the plain run has no gradient.
            able = [item for item in able if item.tensor.grad]
        chosen: list[_Bound] = []
        for lane in range(language.lanes):
            fitting = [item for item in able if item.lane == lane]
            fitting = fitting or [item for item in given if item.lane == lane]
            if fitting:
                chosen.append(self.pick(fitting))
        most = 1 if options.use_reentrant and depth > 1 else 3
        while self.more(len(chosen), most):
            item = self.pick(able)
            if item in chosen and options.use_reentrant:
                break
            chosen.append(item)
        if len(chosen) == 1 and not (language.structures and self.chance()):
            structure: Structure = Item(chosen[0].tensor.name)
            paths = [result]
        elif language.structures and not options.use_reentrant and len(chosen) < 3:
            structure, paths = self.structure(chosen, result)
        else:
            structure = Group("tuple", tuple(Item(item.tensor.name) for item in chosen))
            paths = [_reach(result, "tuple", index) for index in range(len(chosen))]
        outputs = []
        for item, path in zip(chosen, paths, strict=True):
            memory = item.memory
            if options.use_reentrant:
                memory = _Memory(frozen=True, saved=True)
            outputs.append(
                _Bound(replace(item.tensor, name=path), memory, item.lane, region_output=True)
            )
        return structure, outputs

    def options(self, scope: _Scope) -> Options:
        language = self.language
        # A reentrant region needs an input that requires grad.
        able = any(item.tensor.grad for item in self.floats(scope)) and scope.grad
        variants = (
            language.variants
            if able
            else tuple(variant for variant in language.variants if not variant) or (False,)
        )
        use_reentrant = self.pick(variants)
        found: dict[str, Any] = {"use_reentrant": use_reentrant}
        names = language.options
        if "preserve_rng_state" in names:
            found["preserve_rng_state"] = self.pick((None, True, False))
        if "early_stop" in names:
            found["early_stop"] = self.pick((None, False, True))
        if use_reentrant:
            return Options(**found)
        if "determinism_check" in names:
            found["determinism_check"] = self.pick((None, "default", "none"))
        if "respect_saved_tensors_hooks" in names:
            found["respect_saved_tensors_hooks"] = self.pick((False, True))
        if "form" in names:
            found["form"] = self.pick(("direct", "decorator", "partial"))
        if "policy" in names and not scope.selective:
            found["policy"] = self.policy(POLICY_OPERATORS)
        elif "random policy" in names:
            found["policy"] = self.policy(RANDOM_OPERATORS)
        elif "contexts" in names and self.chance():
            found["contexts"] = True
        elif "debug" in names:
            # Together with a context_fn it is refused at edition 2.14.
            found["debug"] = self.pick((None, True, False))
        return Options(**found)

    def policy(self, known: tuple[str, ...]) -> Policy:
        form = self.pick(("list", "function", "constant"))
        if form == "constant":
            return Policy(form, answer=self.pick(ANSWERS))
        operators = [self.pick(known)]
        while self.more(len(operators), 4):
            operators.append(self.pick(known))
        answer = self.pick(ANSWERS[:2]) if form == "function" else "MUST_SAVE"
        return Policy(form, tuple(dict.fromkeys(operators)), answer)

    # ------------------------------------------------------------------ the whole

    def program(self) -> Program:
        language = self.language
        for lane in range(language.lanes):
            self.float_leaf(lane, True)
            if self.more(0, 1):
                self.float_leaf(lane, self.chance())
        body = self.statements(self.root, 1, 0)
        count = 0
        while count == 0 or self.more(count, language.regions):
            if language.sequential:
                body.append(self.sequence(self.root))
            else:
                body.append(self.outer_region())
            body += self.statements(self.root, 1, 0)
            count += 1
        outputs = self.outputs(body)
        plan = self.plan(outputs)
        return Program(
            tuple(self.leaves),
            tuple(made for made, _, _ in self.modules),
            tuple(body),
            tuple(item.tensor.name for item in outputs),
            plan,
        )

    def outer_region(self) -> Statement:
        """A region of the program itself, under a context of the language or not."""
        kinds = [kind for kind in self.language.statements if kind in _BLOCKS]
        if not kinds or not self.chance():
            return self.region(self.root, 1)
        name, inner = self.context(self.root, self.pick(kinds))
        return Block(name, (self.region(inner, 1),))

    def outputs(self, body: list[Statement]) -> list[_Bound]:
        """What the program gives: what its regions returned and the last tensors made outside."""
        outputs = list(self.region_outputs)
        for item in reversed(self.root.bound):
            if not item.leaf and not any(item is other for other in outputs):
                outputs.append(item)
                break
        for lane in range(self.language.lanes):
            if not any(item.tensor.grad and item.lane == lane for item in outputs):
                self.apply_to(lane, body, outputs)
        return outputs

    def apply_to(self, lane: int, body: list[Statement], outputs: list[_Bound]) -> None:
        leaf = next(item for item in self.root.bound if item.lane == lane and item.tensor.grad)
        body.append(self.bind(OPERATORS["scale"], [leaf], self.root))
        outputs.append(self.root.bound[-1])

    def plan(self, outputs: list[_Bound]) -> Plan:
        language = self.language
        able = [item for item in outputs if item.tensor.grad]
        names = tuple(item.tensor.name for item in able)
        loss = self.pick(("sum", "square"))
        kind = self.plan_kind
        leaves = [leaf.tensor.name for leaf in self.leaves if leaf.tensor.grad]
        if kind == "none":
            return Plan()
        if kind == "backward":
            if language.variants == (False,) and len(names) > 1 and self.chance():
                names = (self.pick(names),)  # partial: some outputs only
            return Plan((Step("backward", names, loss),))
        if kind == "retained":
            return Plan((Step("backward", names, loss, retain=True),))
        if kind == "inputs":
            return Plan((Step("backward", names, loss, self.some(leaves)),))
        if kind == "grad":
            return Plan((Step("grad", names, loss, self.some(self.asked(leaves, able))),))
        if kind == "repeated":
            steps = [Step("backward", (self.pick(names),), loss, retain=True)]
            while self.more(len(steps), 2):
                steps.append(self.step(names, leaves))
            return Plan((*steps, self.step(names, leaves, last=True)))
        if kind == "double":
            first = Step("grad", names, loss, self.some(leaves), create=True)
            return Plan((first, Step("backward", names, loss)))
        if kind == "double inputs":
            first = Step("grad", names, "square", self.some(leaves), create=True)
            return Plan((first, Step("grad", names, loss, self.some(leaves))))
        if kind in ("lanes", "group"):
            steps = [
                self.step(
                    tuple(item.tensor.name for item in able if item.lane == lane), leaves, True
                )
                for lane in range(language.lanes)
            ]
            return Plan(tuple(steps), kind == "group")
        raise AssertionError(kind)

    def step(self, names: tuple[str, ...], leaves: list[str], last: bool = False) -> Step:
        kind = self.pick(("backward", "grad", "inputs"))
        loss = self.pick(("sum", "square"))
        inputs = None if kind == "backward" else self.some(leaves)
        return Step("grad" if kind == "grad" else "backward", names, loss, inputs, not last)

    def asked(self, leaves: list[str], able: list[_Bound]) -> list[str]:
        return leaves

    def some(self, names: list[str]) -> tuple[str, ...]:
        chosen = [self.pick(names)]
        for name in names:
            if name not in chosen and self.chance():
                chosen.append(name)
        return tuple(chosen)


@functools.cache
def _names(category: str, random: bool, autocast: bool, once: bool) -> tuple[str, ...]:
    """The operators of a category that may be drawn; elementwise ones where it has none."""
    found = tuple(
        name
        for name in CATEGORIES.get(category, (category,))
        if (random or not OPERATORS[name].random)
        and not (autocast and OPERATORS[name].autocast == "avoid")
        and not (once and not OPERATORS[name].double)
    )
    return found or _names("elementwise", random, autocast, once)


def _reach(path: str, kind: str, index: int) -> str:
    if kind == "dict":
        return f"{path}[{'abc'[index]!r}]"
    if kind == "record":
        return f"{path}.{('first', 'second')[index]}"
    return f"{path}[{index}]"


@dataclass(frozen=True)
class _Recipe:
    fits: Callable[[model.Shape], bool]
    source: Callable[[model.Shape], str]
    result: Callable[[model.Shape], model.Shape]
    parameters: tuple[str, ...] = ("weight", "bias")
    buffers: tuple[str, ...] = ()


def _same(shape: model.Shape) -> model.Shape:
    return shape


_MODULES = {
    "Linear": _Recipe(
        lambda shape: True,
        lambda shape: f"torch.nn.Linear({shape[-1]}, 2)",
        lambda shape: (*shape[:-1], 2),
    ),
    "LayerNorm": _Recipe(
        lambda shape: True, lambda shape: f"torch.nn.LayerNorm({shape[-1]})", _same
    ),
    "PReLU": _Recipe(lambda shape: True, lambda shape: "torch.nn.PReLU()", _same, ("weight",)),
    "Dropout": _Recipe(lambda shape: True, lambda shape: "torch.nn.Dropout(0.5)", _same, ()),
    "BatchNorm1d": _Recipe(
        lambda shape: len(shape) in (2, 3) and shape[0] * (shape[2] if shape[2:] else 1) > 1,
        lambda shape: f"torch.nn.BatchNorm1d({shape[1]})",
        _same,
        buffers=("running_mean", "running_var", "num_batches_tracked"),
    ),
    "Sequential": _Recipe(
        lambda shape: True,
        lambda shape: f"torch.nn.Sequential(torch.nn.Linear({shape[-1]}, 3), torch.nn.Tanh())",
        lambda shape: (*shape[:-1], 3),
        ("[0].weight", "[0].bias"),
    ),
    "GRUCell": _Recipe(
        lambda shape: len(shape) in (1, 2),
        lambda shape: f"torch.nn.GRUCell({shape[-1]}, 2)",
        lambda shape: (*shape[:-1], 2),
        ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
    ),
}


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any], language: Language) -> Program:
    """Programs of ``language``."""
    return _Builder(draw, language).program()
