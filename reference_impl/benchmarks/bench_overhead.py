"""What checkpointing costs with this package and with torch's own module: time, runs and bytes.

    pytest reference_impl/benchmarks/bench_overhead.py -s

Both modules run in one process, on one thread, taking turns step by step, so that whatever else
the machine does hits both alike; the table gives the medians and their ratio.
A step is forward and backward of a small function on 4x4 tensors, where the operators themselves
cost next to nothing. pytest-benchmark records this package's time for later comparison; the goals
are printed, and asserted only where they do not depend on the machine (runs, bytes).
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import reference_impl as candidate

TURNS = 400
SAVED_TENSORS = 200
DEPTHS = range(1, 9)

Function = Callable[[torch.Tensor], torch.Tensor]


def two_operators(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp()


def many_operators(x: torch.Tensor) -> torch.Tensor:
    for _ in range(SAVED_TENSORS):
        x = x.sin()
    return x


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = (x @ x).sin()
    return x


def region(module: Any, function: Function, **options: Any) -> Function:
    return lambda x: module.checkpoint(function, x, **{"use_reentrant": False, **options})


def selective(module: Any, function: Function) -> Function:
    contexts = functools.partial(
        module.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    return region(module, function, context_fn=contexts)


def nested(module: Any, depth: int, function: Function = two_operators) -> Function:
    if depth == 0:
        return function
    inner = nested(module, depth - 1, function)
    return region(module, lambda x: inner(x.cos()))


def step(function: Function, x: torch.Tensor) -> None:
    x.grad = None
    function(x).sum().backward()


def in_turns(functions: list[Function], turns: int = TURNS) -> list[list[float]]:
    """Return µs of each step, for each function; the functions alternate."""
    x = torch.full((4, 4), 0.1, requires_grad=True)
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        for _ in range(5):
            step(function, x)
    gc.collect()
    for _ in range(turns):
        for function, column in zip(functions, times, strict=True):
            start = time.perf_counter()
            step(function, x)
            column.append((time.perf_counter() - start) * 1e6)
    return times


class Table:
    """Rows of the printed table: what, torch, this package, their ratio, the goal."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add(self, what: str, theirs: float, ours: float, ratio: float, goal: str) -> None:
        self.rows.append(f"{what:<34} {theirs:>10.1f} {ours:>10.1f} {ratio:>7.2f}  {goal}")

    def __str__(self) -> str:
        head = f"{'':<34} {'torch':>10} {'reference':>10} {'ratio':>7}  goal"
        return "\n".join(["", f"torch {torch.__version__}", head, *self.rows])


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = Table()
    yield table
    torch.set_num_threads(threads)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(table)


def record(benchmark: Any, function: Function) -> None:
    x = torch.full((4, 4), 0.1, requires_grad=True)
    benchmark.pedantic(step, args=(function, x), rounds=50, iterations=5, warmup_rounds=2)


TIMED: dict[str, tuple[Callable[[Any], Function], str]] = {
    "two operators": (lambda m: region(m, two_operators), "0.50"),
    "two operators, reentrant": (lambda m: region(m, two_operators, use_reentrant=True), "0.80"),
    "two operators, selective": (lambda m: selective(m, product), "0.60"),
    "forty operators, selective": (lambda m: selective(m, products), "0.60"),
    **{
        f"nested {depth} deep": (functools.partial(nested, depth=depth), "1.00") for depth in DEPTHS
    },
}


@pytest.mark.parametrize("what", TIMED)
def test_time(what: str, table: Table, benchmark: Any) -> None:
    make, goal = TIMED[what]
    theirs, ours = map(statistics.median, in_turns([make(torch_checkpoint), make(candidate)]))
    table.add(f"{what} (µs)", theirs, ours, ours / theirs, goal)
    record(benchmark, make(candidate))


def test_each_saved_tensor(table: Table, benchmark: Any) -> None:
    """What each saved tensor of a region costs beyond the plain run."""
    functions = [
        many_operators,
        region(torch_checkpoint, many_operators),
        region(candidate, many_operators),
    ]
    plain, theirs, ours = map(statistics.median, in_turns(functions, turns=100))
    theirs, ours = (theirs - plain) / SAVED_TENSORS, (ours - plain) / SAVED_TENSORS
    table.add("each saved tensor, over plain (µs)", theirs, ours, ours / theirs, "0.55")
    record(benchmark, functions[-1])


def test_runs_of_nested_functions(table: Table) -> None:
    """Nesting: never more runs of the innermost function than with torch."""

    def runs(module: Any, depth: int) -> int:
        count = 0

        def innermost(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return two_operators(x)

        step(nested(module, depth, innermost), torch.ones(2, requires_grad=True))
        return count

    theirs, ours = ([runs(m, d) for d in DEPTHS] for m in (torch_checkpoint, candidate))
    table.add(
        "runs, nested 1 to 8 deep, in all", sum(theirs), sum(ours), sum(ours) / sum(theirs), "1.00"
    )
    assert all(a >= b for a, b in zip(theirs, ours, strict=True))


class PeakBytes(TorchDispatchMode):
    """The most bytes of storage that were alive after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                self.live[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


PEAKS: dict[str, Callable[[Any], Function]] = {
    "chain of 20": lambda m: region(
        m, lambda x: functools.reduce(lambda y, _: y.sin(), range(20), x)
    ),
    "selective": lambda m: selective(m, products),
    "nested 4 deep": lambda m: nested(m, 4),
    "reentrant": lambda m: region(m, many_operators, use_reentrant=True),
}


@pytest.mark.parametrize("what", PEAKS)
def test_peak_bytes(what: str, table: Table) -> None:
    """Peak of live bytes: never above torch's."""

    def peak(module: Any) -> int:
        function, x = PEAKS[what](module), torch.ones(16, 16, requires_grad=True)
        with PeakBytes() as mode:
            step(function, x)
        return int(mode.peak)

    theirs, ours = peak(torch_checkpoint), peak(candidate)
    table.add(f"peak bytes, {what}", theirs, ours, ours / theirs, "1.00")
    assert ours <= theirs
