"""Writes a program as torch source: a function ``program(checkpoint, …, note)``.

The names of the implementation that it uses are its parameters, so the same source runs with and
without checkpointing. ``note(name, value)`` marks what is observed, ``note.state(phase)`` where
ambient state is. Cut at one observation, the function returns that value instead: the form that a
failing script has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from conformance.programs.model import (
    Apply,
    Block,
    Branch,
    Constant,
    Group,
    Hook,
    InnerGrad,
    Item,
    Leaf,
    Loop,
    Options,
    Policy,
    Program,
    Region,
    Sequence,
    Statement,
    Step,
    Structure,
    walk,
)
from conformance.programs.operators import OPERATORS

_STEP = "    "

_BLOCKS = {
    "no_grad": "with torch.no_grad():",
    "enable_grad": "with torch.enable_grad():",
    "autocast": 'with torch.autocast("cpu", dtype=torch.bfloat16):',
    "no_autocast": 'with torch.autocast("cpu", enabled=False):',
    "saved_hooks": "with torch.autograd.graph.saved_tensors_hooks("
    "lambda t: t.detach().clone(), lambda t: t):",
    "save_on_cpu": "with torch.autograd.graph.save_on_cpu():",
    "early_stop_off": "with set_checkpoint_early_stop(False):",
    "early_stop_on": "with set_checkpoint_early_stop(True):",
    "debug_on": "with set_checkpoint_debug_enabled(True):",
    "debug_off": "with set_checkpoint_debug_enabled(False):",
}
_BLOCK_NAMES = {
    "early_stop_off": "set_checkpoint_early_stop",
    "early_stop_on": "set_checkpoint_early_stop",
    "debug_on": "set_checkpoint_debug_enabled",
    "debug_off": "set_checkpoint_debug_enabled",
}


@dataclass
class Rendered:
    """The source of ``program``, the candidate's names that it takes and the definitions that it
    needs (keys of ``prelude.DEFINITIONS``)."""

    source: str
    names: tuple[str, ...]
    definitions: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """Where a script stops: at the observation ``name`` (returning ``expression``), or at the
    state of ``phase``."""

    name: str
    expression: str
    finish: bool = False


class _Done(Exception):
    """The cut was written."""


@dataclass
class _Writer:
    cut: Cut | None = None
    lines: list[str] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    definitions: dict[str, None] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)

    def add(self, depth: int, text: str) -> None:
        self.lines.append(_STEP * depth + text)

    def note(self, depth: int, name: str, expression: str) -> None:
        if self.cut is None:
            self.add(depth, f'note("{name}", {expression})')
        elif self.cut.name == name:
            self.add(depth, f"return {self.cut.expression or expression}")
            raise _Done

    def state(self, depth: int, phase: str) -> None:
        if self.cut is None:
            self.add(depth, f'note.state("{phase}")')
        elif self.cut.name == phase:
            self.add(depth, f"return {self.cut.expression}")
            raise _Done

    # ------------------------------------------------------------------ statements

    def statement(self, item: Statement, depth: int) -> None:
        if isinstance(item, Apply):
            self.apply(item, depth)
        elif isinstance(item, Block):
            if item.kind in _BLOCK_NAMES:
                self.names[_BLOCK_NAMES[item.kind]] = None
            self.add(depth, _BLOCKS[item.kind])
            self.body(item.body, depth + 1)
        elif isinstance(item, Branch):
            self.add(depth, f"if {item.condition}:")
            self.body(item.then, depth + 1)
            self.add(depth, "else:")
            self.body(item.otherwise, depth + 1)
        elif isinstance(item, Loop):
            self.add(depth, f"{item.target} = {item.start}")
            self.add(depth, f"for _ in range({item.times}):")
            self.body(item.body, depth + 1)
        elif isinstance(item, Hook):
            self.hook(item, depth)
        elif isinstance(item, InnerGrad):
            self.add(
                depth,
                f"({item.result.name},) = torch.autograd.grad({item.output}.sum(), {item.source}, "
                "retain_graph=True, materialize_grads=True)",
            )
        elif isinstance(item, Region):
            self.region(item, depth)
        elif isinstance(item, Sequence):
            self.sequence(item, depth)

    def body(self, body: tuple[Statement, ...], depth: int) -> None:
        for item in body:
            self.statement(item, depth)
        if not body and not self.lines[-1].lstrip().startswith("def "):
            self.add(depth, "pass")

    def apply(self, item: Apply, depth: int) -> None:
        if item.operator == "module":
            self.add(depth, f"{item.results[0].name} = {item.operands[0]}({item.operands[1]})")
            return
        operator = OPERATORS[item.operator]
        if operator.needs:
            self.definitions[operator.needs] = None
        text = operator.template.format(*item.operands, **dict(item.settings))
        if item.results:
            text = f"{', '.join(result.name for result in item.results)} = {text}"
        self.add(depth, text)

    def hook(self, item: Hook, depth: int) -> None:
        if item.kind == "double":
            # One of several results of an operator may get no gradient at all: None.
            doubled = "lambda grad: grad if grad is None else grad * 2"
            self.add(depth, f"{item.tensor}.register_hook({doubled})")
            return
        name = f"hook on {item.tensor}"
        self.hooks.append(name)
        if self.cut is None:
            self.add(depth, f'{item.tensor}.register_hook(lambda grad: note("{name}", grad))')
        elif self.cut.name == name:
            self.add(depth, f"{item.tensor}.register_hook(lambda grad: seen.append(grad))")

    # ------------------------------------------------------------------ regions

    def region(self, item: Region, depth: int) -> None:
        parameters = ", ".join(argument.name for argument in item.arguments)
        self.names["checkpoint"] = None
        function = f"region_{item.number}"
        options = self.options(item.options)
        if item.options.policy is not None and item.options.policy.form == "function":
            self.policy_function(item.options.policy, item.number, depth)
        self.add(depth, f"def {function}({parameters}):")
        self.body(item.body, depth + 1)
        self.add(depth + 1, f"return {self.structure(item.returns)}")
        passed = ", ".join(
            f"{argument.name}={self.structure(argument.value)}"
            if argument.keyword
            else self.structure(argument.value)
            for argument in item.arguments
        )
        if item.options.policy is not None:
            options += f", context_fn={self.policy(item.options.policy, item.number)}"
        if item.options.form == "decorator":
            call = f"checkpoint({options})({function})({passed})"
        elif item.options.form == "partial":
            call = f"functools.partial(checkpoint, {function}, {options})({passed})"
        else:
            call = f"checkpoint({function}, {passed}, {options})"
        self.add(depth, f"{item.result} = {call}")

    def options(self, options: Options) -> str:
        parts = [f"use_reentrant={options.use_reentrant}"]
        for name in (
            "preserve_rng_state",
            "determinism_check",
            "debug",
            "early_stop",
            "respect_saved_tensors_hooks",
        ):
            value = getattr(options, name)
            if value is not None:
                parts.append(f"{name}={value!r}".replace("'", '"'))
        if options.contexts:
            self.definitions["nothing"] = None
            parts.append("context_fn=nothing")
        return ", ".join(parts)

    def policy(self, policy: Policy, number: int) -> str:
        self.names["create_selective_checkpoint_contexts"] = None
        create = "create_selective_checkpoint_contexts"
        if policy.form == "list":
            operators = ", ".join(f"torch.ops.aten.{name}" for name in policy.operators)
            return f"lambda: {create}([{operators}])"
        self.names["CheckpointPolicy"] = None
        if policy.form == "function":
            return f"lambda: {create}(policy_{number})"
        return f"lambda: {create}(lambda *_, **__: CheckpointPolicy.{policy.answer})"

    def policy_function(self, policy: Policy, number: int, depth: int) -> None:
        operators = ", ".join(f"torch.ops.aten.{name}" for name in policy.operators)
        self.add(depth, f"def policy_{number}(context, operator, *args, **kwargs):")
        self.add(depth + 1, f"if operator in [{operators}]:")
        self.add(depth + 2, f"return CheckpointPolicy.{policy.answer}")
        self.add(depth + 1, "return CheckpointPolicy.PREFER_RECOMPUTE")

    def sequence(self, item: Sequence, depth: int) -> None:
        self.names["checkpoint_sequential"] = None
        stages = ", ".join(
            stage
            if stage not in OPERATORS
            else f"lambda v: {OPERATORS[stage].template.format('v')}"
            for stage in item.stages
        )
        preserve = (
            ""
            if item.preserve_rng_state is None
            else f", preserve_rng_state={item.preserve_rng_state}"
        )
        self.add(
            depth,
            f"{item.result.name} = checkpoint_sequential([{stages}], {item.segments}, "
            f"{item.operand}, use_reentrant={item.use_reentrant}{preserve})",
        )

    def structure(self, structure: Structure) -> str:
        if isinstance(structure, Item):
            return structure.name
        if isinstance(structure, Constant):
            return structure.source
        items = [self.structure(item) for item in structure.items]
        if structure.kind == "list":
            return f"[{', '.join(items)}]"
        if structure.kind == "dict":
            pairs = (f"{key!r}: {item}" for key, item in zip("abc", items, strict=False))
            return "{" + ", ".join(pairs) + "}"
        if structure.kind == "record":
            self.definitions["Record"] = None
            return f"Record({', '.join(items)})"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    # ------------------------------------------------------------------ the whole

    def leaf(self, leaf: Leaf) -> None:
        tensor = leaf.tensor
        sizes = ", ".join(map(str, tensor.shape))
        if leaf.kind == "index":
            self.add(1, f"{tensor.name} = torch.arange({tensor.shape[0]}).flip(0)")
            return
        dtype = "" if tensor.dtype == "float32" else f", dtype=torch.{tensor.dtype}"
        grad = ", requires_grad=True" if tensor.grad else ""
        self.add(1, f"{tensor.name} = torch.randn({sizes or '()'}{dtype}{grad})")

    def step(self, step: Step, number: int, previous: Step | None, depth: int) -> None:
        if step.loss == "square":
            parts = [f"{name}.square().sum()" for name in step.targets]
        else:
            parts = [f"{name}.sum()" for name in step.targets]
        if previous is not None and previous.create:
            parts.append(f"sum(g.square().sum() for g in grads{number - 1} if g is not None)")
        loss = " + ".join(parts)
        options = []
        if step.retain:
            options.append("retain_graph=True")
        if step.create:
            options.append("create_graph=True")
        inputs = "" if step.inputs is None else f"[{', '.join(step.inputs)}]"
        if step.kind == "grad":
            options = [inputs, *options, "allow_unused=True"]
            self.add(depth, f"grads{number} = torch.autograd.grad({loss}, {', '.join(options)})")
            self.note(depth, f"grads{number}", f"grads{number}")
        else:
            if inputs:
                options.append(f"inputs={inputs}")
            self.add(depth, f"({loss}).backward({', '.join(options)})")

    def program(self, program: Program) -> None:
        self.add(1, f"torch.manual_seed({program.seed})")
        for leaf in program.leaves:
            self.leaf(leaf)
        for module in program.modules:
            self.add(1, f"{module.name} = {module.source}")
        if self.cut is not None and self.cut.name.startswith("hook on "):
            self.add(1, "seen = []")
        self.body(program.body, 1)
        for number, name in enumerate(noted(program), 1):
            self.note(1, f"output {number}", name)
        self.state(1, "after forward")
        depth = 1
        if program.plan.group:
            self.names["GraphExecGroup"] = None
            self.add(1, "with GraphExecGroup():")
            depth = 2
        previous = None
        for number, step in enumerate(program.plan.steps, 1):
            self.step(step, number, previous, depth)
            previous = step
        if self.cut is not None and self.cut.name.startswith("hook on "):
            self.add(1, f"return {self.cut.expression}")
            raise _Done
        for leaf in program.leaves:
            if leaf.tensor.grad:
                self.note(1, f"{leaf.tensor.name}.grad", f"{leaf.tensor.name}.grad")
        outside = _outer_modules(program)
        for module in program.modules:
            for path in module.parameters:
                place = f"{module.name}{path if path[0] == '[' else '.' + path}"
                self.note(1, f"{place}.grad", f"{place}.grad")
            # A region's module updates its buffers in every run of the region, so only the
            # buffers of modules outside of regions must be the plain run's.
            for path in module.buffers if module.name in outside else ():
                self.note(1, f"{module.name}.{path}", f"{module.name}.{path}")
        self.state(1, "after backward")


def noted(program: Program) -> list[str]:
    """What is observed after forward: whole results of regions, and other outputs."""
    results = [item.result for item in _top(program.body) if isinstance(item, Region)]
    others = [
        name
        for name in program.outputs
        if not any(
            name == result or name.startswith((f"{result}[", f"{result}.")) for result in results
        )
    ]
    return results + others


def _top(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Statements outside of regions."""
    for item in body:
        yield item
        if isinstance(item, Block):
            yield from _top(item.body)


def _outer_modules(program: Program) -> set[str]:
    """Modules that no region calls."""
    inside = {
        item.operands[0]
        for region in program.regions()
        for item in walk(region.body)
        if isinstance(item, Apply) and item.operator == "module"
    }
    return {module.name for module in program.modules} - inside


def render(program: Program, cut: Cut | None = None) -> Rendered:
    """The program's source; with ``cut``, ending in a return of that observation."""
    writer = _Writer(cut)
    try:
        writer.program(program)
        if cut is not None:
            writer.add(1, f"return {cut.expression}")
    except _Done:
        pass
    names = tuple(writer.names)
    parameters = (*names, "note") if cut is None else names
    head = f"def program({', '.join(parameters)}):"
    return Rendered("\n".join([head, *writer.lines]) + "\n", names, tuple(writer.definitions))


__all__ = ["Cut", "Group", "Rendered", "noted", "render"]
