"""Sub-languages: which programs a property draws. Each is graded by one clause of the chapter
``17-any-program.md``. What a language leaves out, and why, stands beside it."""

from __future__ import annotations

from dataclasses import dataclass

PURE = ("elementwise", "reductions", "views", "matmul")
ALL_OPERATORS = (
    "elementwise",
    "views",
    "matmul",
    "indexing",
    "reductions",
    "normalisation",
    "multi-output",
    "convolution",
    "dtypes",
    "factories",
)


@dataclass(frozen=True)
class Language:
    """What may be drawn.

    ``categories`` are operator categories of ``operators.CATEGORIES``, or single operators.
    ``statements`` are the other kinds of statement (in-place, branch, loop, no_grad, hook, inner
    grad, module, autocast, saved hooks, early stop, debug). ``options`` are the options of
    ``checkpoint`` that vary. ``plans`` are names understood by ``strategy``. ``lanes``: 2 gives
    programs of two parts that share no tensor, so that a backward call for each works on its own
    part of the graph. ``counts``, ``memory`` and ``operators`` add the bounds of ``bounds`` to
    what is compared.
    """

    name: str
    categories: tuple[str, ...] = PURE
    statements: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    plans: tuple[str, ...] = ("backward",)
    variants: tuple[bool, ...] = (False,)
    dtypes: tuple[str, ...] = ("float32", "float64")
    closures: bool = False
    structures: bool = False
    keywords: bool = False
    depth: int = 1
    regions: int = 2
    body: int = 4
    lanes: int = 1
    once: bool = True
    """Whether operators that cannot be differentiated twice may be drawn."""
    sequential: bool = False
    counts: bool = False
    memory: bool = False
    operators: bool = False
    warnings: bool = True
    exact: bool = True
    """Whether gradients must agree bit for bit. The reentrant variant sums the gradient of a
    tensor that is used inside and outside of a region in another order than the plain run."""
