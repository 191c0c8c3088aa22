"""The sub-languages that the clauses of ``spec/17-any-program.md`` are graded with.

Each leaves out what the specification says a checkpoint need not do; the reason stands with it.
Common to all: a tensor that a region was given, or takes from outside, is not changed between
forward and backward (the recomputation would see the change: the caller's obligation), and a hook
that a region registers goes on a tensor made in that region (one on an outer tensor would be
registered again by every recomputation).
"""

from __future__ import annotations

from dataclasses import replace

from conformance.programs.language import ALL_OPERATORS, PURE, Language

PLANS = ("backward", "grad", "inputs", "repeated", "retained", "double", "double inputs")

PLAIN = Language(
    "plain",
    ALL_OPERATORS,
    ("in-place", "branch", "loop"),
    closures=True,
    dtypes=("float32", "float64", "bfloat16"),
)
DETACHED = Language(
    "detached", (*PURE, "detached", "factories"), ("no_grad", "in-place"), closures=True
)
STRUCTURES = Language("structures", PURE, structures=True, keywords=True, closures=True)
MODULES = Language("modules", PURE, ("module", "module", "in-place"), closures=True)
FUNCTIONS = Language(
    "custom functions",
    ("functions", *PURE),
    ("in-place",),
    plans=("backward", "grad", "repeated", "double"),
    closures=True,
)
BACKWARD_CALLS = Language("backward calls", PURE, plans=PLANS, closures=True, depth=2)
HOOKS = Language(
    "hooks",
    PURE,
    ("hook", "saved hooks"),
    closures=True,
    depth=2,
    plans=("backward", "grad", "repeated"),
)
# No hooks: an inner backward runs them, and a recomputation runs the inner backward again.
BACKWARD_INSIDE = Language(
    "backward in forward",
    (*PURE, "multi-output"),
    ("inner grad", "branch"),
    closures=True,
    depth=2,
    plans=("backward", "grad", "repeated"),
)
EARLY_STOP = Language(
    "early stop",
    PURE,
    ("early stop",),
    options=("early_stop",),
    plans=PLANS,
    closures=True,
    depth=2,
)
DETERMINISM = Language(
    "determinism check",
    (*PURE, "multi-output"),
    options=("determinism_check",),
    plans=PLANS,
    closures=True,
)
# One backward over a region: more of them are a clause of their own, ``programs/debug-repeated``.
DEBUG = Language(
    "debug",
    PURE,
    ("debug",),
    options=("debug",),
    plans=("backward", "grad", "inputs", "retained"),
    closures=True,
    depth=2,
)
DEBUG_REPEATED = replace(DEBUG, name="debug, repeated", plans=("repeated", "double"))
CONTEXTS = Language(
    "context_fn",
    PURE,
    options=("contexts", "preserve_rng_state"),
    plans=PLANS,
    closures=True,
    depth=2,
)
# Two parts, so that every plan is possible, a group too.
DECORATED = Language(
    "decorated",
    PURE,
    structures=True,
    keywords=True,
    lanes=2,
    plans=(*PLANS, "group"),
    options=(
        "form",
        "early_stop",
        "determinism_check",
        "preserve_rng_state",
        "respect_saved_tensors_hooks",
    ),
)
# A region with preserve_rng_state=False draws nothing at random.
RANDOM = Language(
    "random",
    ("random", *PURE),
    options=("preserve_rng_state",),
    plans=PLANS,
    closures=True,
    depth=2,
)
AUTOCAST = Language(
    "autocast",
    ("matmul", "matmul", *PURE, "dtypes"),
    ("autocast", "branch"),
    dtypes=("float32", "bfloat16"),
    closures=True,
    depth=2,
    plans=("backward", "grad", "repeated"),
)
NESTED = Language(
    "nested",
    (*PURE, "multi-output", "indexing"),
    ("branch", "loop"),
    closures=True,
    depth=4,
    plans=("backward", "grad", "repeated", "double"),
)
# What the documentation grants the reentrant variant: tensors as direct arguments, at least one
# of which requires grad, outputs that all require grad, nothing detached inside, backward() once
# and without inputs. Leaves may come in through closures, other tensors that require grad may not.
# Several outputs all take part in the loss: an unused one gets zeros where the plain run has none.
REENTRANT = Language(
    "reentrant",
    (*ALL_OPERATORS, "functions"),
    ("branch", "loop", "module", "in-place"),
    variants=(True,),
    closures=True,
    exact=False,
)
REENTRANT_RANDOM = replace(
    REENTRANT,
    name="reentrant, random",
    categories=("random", *PURE),
    statements=(),
    options=("preserve_rng_state", "early_stop"),
)
REENTRANT_AUTOCAST = replace(
    REENTRANT,
    name="reentrant, autocast",
    categories=("matmul", "matmul", *PURE, "dtypes"),
    statements=("autocast",),
    dtypes=("float32", "bfloat16"),
)
# Inside a reentrant region forward records nothing, so an inner reentrant region may warn there
# that none of its inputs require grad: additional warnings are no difference.
MIXED = Language(
    "mixed variants",
    (*PURE, "multi-output", "random"),
    ("branch",),
    variants=(False, True),
    closures=True,
    exact=False,
    warnings=False,
    depth=4,
)
# One backward over a region and no in-place operators: what a policy keeps may be used once and
# must not be changed. Random operators are a clause of their own.
SELECTIVE = Language(
    "selective",
    (*PURE, "multi-output", "normalisation", "indexing", "functions"),
    ("branch", "loop", "no_grad"),
    options=("policy",),
    plans=("backward", "grad", "inputs", "retained"),
    closures=True,
    depth=3,
    structures=True,
)
# Dropout is left out: torch makes it of in-place operators, which change what a policy keeps.
SELECTIVE_RANDOM = Language(
    "selective, random",
    ("noise", "normal", "permuted", "rand_like", "elementwise"),
    options=("random policy",),
    plans=("backward", "grad"),
    closures=True,
)
RESPECTED_HOOKS = Language(
    "respected hooks",
    PURE,
    ("saved hooks",),
    closures=True,
    options=("policy", "respect_saved_tensors_hooks"),
    plans=("backward", "grad", "inputs", "retained"),
)
GROUPS = Language(
    "groups",
    (*PURE, "multi-output"),
    lanes=2,
    plans=("group",),
    counts=True,
    depth=3,
    options=("early_stop", "preserve_rng_state", "determinism_check", "contexts"),
)
LANES = Language("disjoint backward calls", (*PURE, "multi-output"), lanes=2, plans=("lanes",))
SEQUENTIAL = Language("sequential", PURE, sequential=True)
SEQUENTIAL_REENTRANT = replace(
    SEQUENTIAL, name="sequential, reentrant", variants=(True,), exact=False
)
# What a recomputation dispatches: a beginning of what forward did, and nothing that a policy keeps.
RECOMPUTED = Language(
    "recomputed operators",
    (*PURE, "multi-output", "normalisation"),
    ("branch", "loop"),
    operators=True,
    closures=True,
    plans=("backward", "grad"),
    options=("early_stop",),
)
KEPT = replace(RECOMPUTED, name="kept operators", options=("policy",))
RUNS = Language(
    "runs",
    (*PURE, "multi-output"),
    ("branch",),
    counts=True,
    depth=4,
    closures=True,
    plans=("backward", "grad", "repeated", "double"),
    options=("early_stop",),
)
# No closures: a function that is kept keeps what it closes over, an outer intermediate too.
MEMORY = Language("memory", (*PURE, "multi-output"), memory=True, depth=3)
EVERYTHING = Language(
    "everything",
    (*ALL_OPERATORS, "random", "functions", "detached"),
    ("in-place", "branch", "loop", "no_grad", "module", "hook", "saved hooks"),
    options=("preserve_rng_state",),
    closures=True,
    structures=True,
    keywords=True,
    depth=4,
    plans=("backward", "grad", "inputs", "repeated"),
    dtypes=("float32", "float64", "bfloat16"),
    body=5,
    regions=3,
)

LANGUAGES: dict[str, Language] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Language)
}
