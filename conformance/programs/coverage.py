"""The coverage account: operators, options, plan kinds and pairs of them that programs reached."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import product

from conformance.programs.model import (
    Apply,
    Block,
    Branch,
    Hook,
    InnerGrad,
    Loop,
    Options,
    Program,
    Sequence,
    walk,
)
from conformance.programs.operators import OPERATORS


@dataclass
class Coverage:
    """How often each thing occurred."""

    programs: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)

    def add(self, program: Program) -> None:
        """Count one program."""
        self.programs += 1
        kinds = program.plan.kinds
        self.plans.update(kinds)
        options: set[str] = set()
        depth = 0
        for item in walk(program.body):
            if isinstance(item, Apply):
                self.operators[item.operator] += 1
            elif isinstance(item, Block):
                self.statements[item.kind] += 1
            elif isinstance(item, (Branch, Loop, Hook, InnerGrad, Sequence)):
                self.statements[type(item).__name__.lower()] += 1
            else:
                options.update(option_values(item.options))
                depth = max(depth, item.depth)
        self.depths[depth] += 1
        self.options.update(options)
        self.pairs.update(product(options, kinds))

    def unreached_operators(self) -> list[str]:
        """Operators of the table that no program used."""
        return [name for name in OPERATORS if not self.operators[name]]

    def unreached_pairs(self) -> list[tuple[str, str]]:
        """Pairs of an option's value and a plan kind that no program had, and should have."""
        return [
            pair
            for pair in product(OPTION_VALUES, PLAN_KINDS)
            if not self.pairs[pair] and pair not in EXCLUDED_PAIRS
        ]

    def summary(self) -> str:
        """A few lines for the end of a run."""
        pairs = len(OPTION_VALUES) * len(PLAN_KINDS) - len(EXCLUDED_PAIRS)
        missing = self.unreached_pairs()
        lines = [
            f"{self.programs} programs, {sum(self.operators.values())} operator calls",
            f"operators: {len(OPERATORS) - len(self.unreached_operators())} of {len(OPERATORS)}",
            f"options: {_counted(self.options)}",
            f"plans: {_counted(self.plans)}",
            f"nesting depth: {_counted(self.depths)}",
            f"option × plan: {pairs - len(missing)} of {pairs}",
        ]
        if missing:
            lines.append("unreached: " + ", ".join(f"{one} × {other}" for one, other in missing))
        return "\n".join(lines)


def option_values(options: Options) -> set[str]:
    """The options as the account counts them: ``name=value`` for each that is written out."""
    found = set()
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name == "policy":
            if value is not None:
                found.add(f"policy={value.form}")
        elif item.name == "contexts":
            if value:
                found.add("context_fn=empty")
        elif value is not None:
            found.add(f"{item.name}={value}")
    return found


def _counted(counter: Counter) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=str))


PLAN_KINDS = (
    "backward",
    "grad",
    "inputs=",
    "retain_graph",
    "repeated",
    "double backward",
    "group",
)
OPTION_VALUES = (
    "use_reentrant=False",
    "use_reentrant=True",
    "preserve_rng_state=True",
    "preserve_rng_state=False",
    "determinism_check=default",
    "determinism_check=none",
    "debug=True",
    "debug=False",
    "early_stop=True",
    "early_stop=False",
    "respect_saved_tensors_hooks=True",
    "respect_saved_tensors_hooks=False",
    "context_fn=empty",
    "policy=list",
    "policy=function",
    "policy=constant",
    "form=decorator",
    "form=partial",
)
EXCLUDED_PAIRS = {
    # The reentrant variant supports backward() without inputs, over a graph that is used once.
    *(("use_reentrant=True", kind) for kind in PLAN_KINDS if kind != "backward"),
    # Kept values of a selective policy serve one backward over the region.
    *(
        (f"policy={form}", kind)
        for form in ("list", "function", "constant")
        for kind in ("repeated", "double backward", "group")
    ),
    # Two parts of a region in one group are two backward calls over the region: a fault of torch
    # that has its own clause, programs/debug-repeated.
    ("debug=True", "group"),
    ("debug=False", "group"),
}

current = Coverage()
"""The account of this process."""
