"""Chapter 15: compilation, with backends that need no C++ compiler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from conformance.candidate import Candidate
from conformance.observe import assert_same
from conformance.observe.compare import Wrap, plain
from conformance.testing import both_variants, clause, reached

TRACED = ("aot_eager", "aot_eager_decomp_partition")
"""Backends that trace forward and backward."""

traced_backends = pytest.mark.parametrize("backend", TRACED)
every_backend = pytest.mark.parametrize("backend", ["eager", *TRACED])

_OPERATORS = 64
"""More operators than any chain of these tests has, forward and backward together."""

TOLERANCE = _OPERATORS * torch.finfo(torch.float64).eps
"""Each operator of a chain may round once more or less than in eager mode; all are well
conditioned where the tests evaluate them, so errors add up at most linearly."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No compiled code is shared between tests."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _leaf(size: int = 6) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, size, dtype=torch.float64).requires_grad_()


def _assert_close(observed: Any, expected: Any, what: str) -> None:
    assert len(observed) == len(expected)
    for index, (got, wanted) in enumerate(zip(observed, expected, strict=True)):
        assert got is not None, f"{what} {index}: expected a tensor, observed None"
        assert got.shape == wanted.shape, f"{what} {index}: expected shape {wanted.shape}"
        error = float((got - wanted).abs().max())
        allowed = TOLERANCE * float(wanted.abs().max())
        assert error <= allowed, (
            f"{what} {index}: expected {wanted.flatten()[:3].tolist()}…, observed "
            f"{got.flatten()[:3].tolist()}…; largest difference {error:g}, allowed {allowed:g}"
        )


def _matrices() -> list[torch.Tensor]:
    # Square, so that a saved tensor taken for another one fits as well.
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)
    w = torch.linspace(0.1, 0.9, 9, dtype=torch.float64).reshape(3, 3)
    return [x.requires_grad_(), w.requires_grad_()]


def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x @ w) @ w).exp()


def _differentiated(
    function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor] | None = None
) -> list[Any]:
    """Result and gradients of ``function`` at the leaves (the matrices unless given)."""
    leaves = _matrices() if leaves is None else leaves
    y = function(*leaves)
    y.sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


# ---------------------------------------------------------------------------- results


@clause("compile/results")
@both_variants
@every_backend
def test_compiled_region_gives_eager_results(
    ckpt: Candidate, use_reentrant: bool, backend: str
) -> None:
    """Does a compiled function with two regions give the eager results and gradients?"""

    def model(wrap: Wrap, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = wrap(_block, x, w).tanh()
        y: torch.Tensor = wrap(_block, h, w * 2) + h
        return y

    def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return model(functools.partial(ckpt.checkpoint, use_reentrant=use_reentrant), x, w)

    expected = _differentiated(functools.partial(model, plain))
    observed = _differentiated(torch.compile(checkpointed, backend=backend))
    reached()
    _assert_close(observed, expected, "result and gradients")


@clause("compile/called-again")
@traced_backends
def test_compiled_region_called_again(ckpt: Candidate, backend: str) -> None:
    """Do later calls, with other values, weights and grad modes, give the eager results?"""
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(layer(x)).exp()

    def region(x: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(function, x, use_reentrant=False) * 2  # type: ignore[no-any-return]

    def eager(x: torch.Tensor) -> torch.Tensor:
        return function(x) * 2

    def weights() -> list[torch.Tensor | None]:
        found = [layer.weight.grad, layer.bias.grad]
        layer.weight.grad = layer.bias.grad = None
        return found

    compiled = torch.compile(region, backend=backend)
    for step in range(2):
        x = torch.full((2, 3), 0.1 * (step + 1), dtype=torch.float64)
        with torch.no_grad():
            _assert_close([compiled(x)], [eager(x)], "result without grad mode")
        expected = _differentiated(eager, [x.clone().requires_grad_()]) + weights()
        observed = _differentiated(compiled, [x.clone().requires_grad_()]) + weights()
        _assert_close(observed, expected, f"call {step}: result and gradients")
        first, second = x.clone().requires_grad_(), (x + 1).requires_grad_()
        y, z = compiled(first), compiled(second)
        y.sum().backward()
        z.sum().backward()
        both = weights()
        alike = [x.clone().requires_grad_(), (x + 1).requires_grad_()]
        for leaf in alike:
            eager(leaf).sum().backward()
        _assert_close(
            [first.grad, second.grad, *both],
            [alike[0].grad, alike[1].grad, *weights()],
            "gradients of two calls in flight",
        )
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(0.9)
    reached()


@clause("compile/graph-break")
@pytest.mark.parametrize("where", ["start", "middle", "value"])
def test_graph_break_inside_a_region(ckpt: Candidate, where: str) -> None:
    """Does a region that breaks the graph give the eager results and gradients?"""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if where == "start":
            torch._dynamo.graph_break()
        h = torch.sin(x @ w)
        if where == "middle":
            torch._dynamo.graph_break()
        if where == "value" and h.sum().item() > 1000:
            h = h * 2
        return (h @ w).exp()

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(function, x, w, use_reentrant=False) * 2  # type: ignore[no-any-return]

    compiled = torch.compile(model, backend="aot_eager")
    expected = _differentiated(lambda x, w: function(x, w) * 2)
    for _ in range(2):
        observed = _differentiated(compiled)
        reached()
        _assert_close(observed, expected, "result and gradients")


@clause("compile/nested")
@pytest.mark.parametrize(("depth", "backend"), [(2, TRACED[1]), (3, TRACED[0])])
def test_nested_regions(ckpt: Candidate, depth: int, backend: str) -> None:
    """Do regions inside regions give the eager results and gradients in compiled code?"""

    def model(wrap: Wrap, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def level(number: int) -> Callable[..., torch.Tensor]:
            if number == depth:
                return _block
            return lambda x, w: wrap(level(number + 1), x.tanh(), w).sin()

        y: torch.Tensor = wrap(level(1), x, w)
        return y

    def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return model(functools.partial(ckpt.checkpoint, use_reentrant=False), x, w)

    expected = _differentiated(functools.partial(model, plain))
    observed = _differentiated(torch.compile(checkpointed, backend=backend))
    reached()
    _assert_close(observed, expected, "result and gradients")


@clause("compile/autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_region_under_autocast(ckpt: Candidate, dtype: torch.dtype) -> None:
    """Does a compiled region under autocast give what it gives without checkpointing?"""

    def run(wrap: Wrap) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()

        def model(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = wrap(lambda x: torch.sin(layer(x)), x)
            return y

        compiled = torch.compile(model, backend="aot_eager")
        with torch.autocast("cpu", dtype=dtype):
            y = compiled(x)
        y.float().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    expected = run(plain)
    assert expected[0].dtype is dtype
    observed = run(functools.partial(ckpt.checkpoint, use_reentrant=False))
    reached()
    assert_same(observed, expected, "result and gradients")


@clause("compile/decorator-form")
@traced_backends
@pytest.mark.parametrize("compiled", ["caller", "wrapper"])
def test_decorator_form_in_compiled_code(ckpt: Candidate, backend: str, compiled: str) -> None:
    """Does a decorated function give the eager results and gradients in compiled code?"""
    decorated = ckpt.checkpoint(use_reentrant=False)(_block)
    _assert_close(_differentiated(decorated), _differentiated(_block), "without compiling")
    if compiled == "caller":
        function = torch.compile(lambda x, w: decorated(x, w), backend=backend)
    else:
        function = torch.compile(decorated, backend=backend)
    reached()
    observed = _differentiated(function)
    _assert_close(observed, _differentiated(_block), "result and gradients")


@clause("compile/inside-region")
@both_variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_compiled_function_inside_a_region(
    ckpt: Candidate, use_reentrant: bool, backend: str, whole: bool
) -> None:
    """Does an eager region that runs compiled code give the eager results and gradients?"""
    compiled = torch.compile(_block, backend=backend)

    def part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return compiled(x.tanh(), w).sin()

    def eager(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _block(x, w) if whole else _block(x.tanh(), w).sin()

    expected = _differentiated(eager)
    for _ in range(2):
        observed = _differentiated(
            lambda x, w: ckpt.checkpoint(
                compiled if whole else part, x, w, use_reentrant=use_reentrant
            )
        )
        reached()
        _assert_close(observed, expected, "result and gradients")


# ---------------------------------------------------------------------------- random numbers


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rand_like(x)).sin()


def _assert_gradient_belongs_to_mask(y: torch.Tensor, x: torch.Tensor) -> None:
    """For y = sin(x * mask) and x = 1, the gradient is mask * cos(mask) with mask = asin(y)."""
    mask = y.detach().asin()
    expected = mask * mask.cos()
    assert x.grad is not None
    error = float((x.grad - expected).abs().max())
    # asin is well conditioned for mask < 1 except near it, where it loses 1 / cos(1) < 2.
    allowed = 2 * TOLERANCE
    assert error <= allowed, (
        f"expected the gradient of the numbers drawn in forward, {expected[:3].tolist()}…, "
        f"observed {x.grad[:3].tolist()}…"
    )


flags = pytest.mark.parametrize("preserve", [None, False], ids=["default", "false"])


def _options(preserve: bool | None) -> dict[str, bool]:
    return {} if preserve is None else {"preserve_rng_state": preserve}


def _check_random_region(
    ckpt: Candidate, use_reentrant: bool, backend: str, preserve: bool | None
) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(  # type: ignore[no-any-return]
            _noisy, x, use_reentrant=use_reentrant, **_options(preserve)
        )

    compiled = torch.compile(region, backend=backend)
    for seed in (0, 1):
        x = torch.ones(16, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(seed)
        y = compiled(x)
        torch.manual_seed(99)  # the surrounding program goes its own way
        before = torch.get_rng_state()
        y.sum().backward()
        reached()
        _assert_gradient_belongs_to_mask(y, x)
        assert torch.equal(torch.get_rng_state(), before), "backward has moved the generator"


@clause("compile/rng-preserved")
@both_variants
@traced_backends
@flags
def test_random_state_is_preserved(
    ckpt: Candidate, use_reentrant: bool, backend: str, preserve: bool | None
) -> None:
    """Do gradients of compiled random regions belong to forward's numbers, for every flag?"""
    _check_random_region(ckpt, use_reentrant, backend, preserve)


@clause("compile/rng-preserved-any-backend")
@both_variants
@flags
def test_random_state_is_preserved_by_the_eager_backend(
    ckpt: Candidate, use_reentrant: bool, preserve: bool | None
) -> None:
    """Do gradients belong to forward's numbers with the debugging backend too?"""
    _check_random_region(ckpt, use_reentrant, "eager", preserve)


@clause("compile/rng-inside-region")
@both_variants
@pytest.mark.parametrize("preserve", [None, True], ids=["default", "true"])
def test_random_compiled_function_inside_a_region(
    ckpt: Candidate, use_reentrant: bool, preserve: bool | None
) -> None:
    """Do gradients of an eager region around random compiled code belong to forward's numbers?"""
    compiled = torch.compile(_noisy, backend="aot_eager")
    for seed in (0, 1):
        x = torch.ones(16, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(seed)
        y = ckpt.checkpoint(compiled, x, use_reentrant=use_reentrant, **_options(preserve))
        torch.manual_seed(99)
        y.sum().backward()
        reached()
        _assert_gradient_belongs_to_mask(y, x)


# ---------------------------------------------------------------------------- policies


class _Counter:
    """How often the suite's own operator has run."""

    runs = 0


@functools.cache
def _counted() -> Any:
    """An operator that doubles its input and counts its runs; opaque to every compiler."""

    @torch.library.custom_op("conformance_compilation::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        _Counter.runs += 1
        return x * 2

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda ctx, gradient: gradient * 2)
    return torch.ops.conformance_compilation.counted.default


def _runs_in_forward_and_backward(
    ckpt: Candidate, backend: str, policy: str, *, as_list: bool = False
) -> list[tuple[int, int]]:
    """Runs of the counted operator in forward and in backward, for two calls of a compiled
    region whose policy for it is ``policy``. Gradients are checked on the way."""
    counted = _counted()

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = counted(x.sin()).exp().sin()  # exp's result needs counted's
        return y

    def policy_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is counted:
            return ckpt.CheckpointPolicy[policy]
        return ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(
        ckpt.create_selective_checkpoint_contexts, [counted] if as_list else policy_function
    )

    def region(x: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(  # type: ignore[no-any-return]
            function, x, use_reentrant=False, context_fn=contexts
        )

    compiled = torch.compile(region, backend=backend)
    seen = []
    for _ in range(2):
        _Counter.runs = 0
        x = _leaf()
        y = compiled(x)
        forward = _Counter.runs
        y.sum().backward()
        seen.append((forward, _Counter.runs - forward))
        _assert_close([y.detach(), x.grad], _differentiated(function, [_leaf()]), "gradient")
    return seen


@clause("compile/must-save")
@traced_backends
@pytest.mark.parametrize("as_list", [False, True], ids=["policy", "list"])
def test_must_save_is_not_run_again(ckpt: Candidate, backend: str, as_list: bool) -> None:
    """Is an operator with MUST_SAVE run in forward only?"""
    seen = _runs_in_forward_and_backward(ckpt, backend, "MUST_SAVE", as_list=as_list)
    reached()
    assert seen == [(1, 0)] * 2, f"expected (1, 0) runs (forward, backward), observed {seen}"


@clause("compile/must-recompute")
@traced_backends
def test_must_recompute_is_run_again(ckpt: Candidate, backend: str) -> None:
    """Is an operator with MUST_RECOMPUTE run once in forward and once for backward?"""
    seen = _runs_in_forward_and_backward(ckpt, backend, "MUST_RECOMPUTE")
    reached()
    assert seen == [(1, 1)] * 2, f"expected (1, 1) runs (forward, backward), observed {seen}"


@clause("compile/prefer-is-advice")
@pytest.mark.parametrize("backend", TRACED[1:])
@pytest.mark.parametrize("policy", ["PREFER_SAVE", "PREFER_RECOMPUTE"])
def test_prefer_policies_keep_gradients(ckpt: Candidate, backend: str, policy: str) -> None:
    """Whatever is made of a PREFER_ policy, are the gradients right and the work bounded?"""
    seen = _runs_in_forward_and_backward(ckpt, backend, policy)
    reached()
    for forward, backward in seen:
        assert (forward, backward) in ((1, 0), (1, 1)), (
            f"expected one run in forward and at most one for backward, observed {seen}"
        )
