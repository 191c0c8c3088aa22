"""Ten thousand random regions, a tenth of them failing, leave the process as it was."""

from __future__ import annotations

import functools
import gc
import random
import warnings

import pytest
import torch

import reference_impl as candidate
from reference_impl.torch_private import saved_tensors_hooks_in_force

REGIONS = 10_000
BATCH = 100


class Injected(Exception):
    """The failure that some regions are made to have."""


class Program:
    """A random region: a chain of operators, nested regions, and a step at which it may fail.

    `fail_in` says in which run of the function (1 the forward, 2 the recomputation) and `fail_at`
    before which step `Injected` is raised; 0 never.
    """

    def __init__(self, draw: random.Random, depth: int = 0) -> None:
        self.steps = [draw.randrange(8) for _ in range(draw.randint(1, 5))]
        self.inner = Program(draw, depth + 1) if depth < 2 and draw.random() < 0.25 else None
        self.inner_at = draw.randrange(len(self.steps))
        self.fail_in = draw.choice((1, 2)) if depth == 0 and draw.random() < 0.1 else 0
        self.fail_at = draw.randrange(len(self.steps))
        self.options = {
            "use_reentrant": draw.random() < 0.3,
            "preserve_rng_state": draw.random() < 0.8,
        }
        if not self.options["use_reentrant"]:
            self.options["early_stop"] = draw.random() < 0.8
            self.options["determinism_check"] = draw.choice(("default", "none"))
            kind = draw.random()
            if kind < 0.1:
                self.options["debug"] = True
            elif kind < 0.3:
                operators = [torch.ops.aten.mm.default, torch.ops.aten.sin.default]
                self.options["context_fn"] = functools.partial(
                    candidate.create_selective_checkpoint_contexts, operators
                )
        self.under_autocast = draw.random() < 0.2
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for position, step in enumerate(self.steps):
            if self.runs == self.fail_in and position == self.fail_at:
                raise Injected
            if self.inner is not None and position == self.inner_at:
                x = candidate.checkpoint(self.inner, x, **self.inner.options)
            x = OPERATORS[step](x)
        return x

    def forward_and_backward(self) -> None:
        x = torch.full((3, 3), 0.3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.under_autocast):
            out = candidate.checkpoint(self, x * 1, **self.options)
        out.float().sum().backward()
        if x.grad is None:
            raise AssertionError("no gradient")


OPERATORS = (
    torch.sin,
    lambda t: t.exp().tanh(),
    lambda t: t @ t,
    lambda t: t * torch.rand(3, 3),
    lambda t: torch.nn.functional.dropout(t, 0.5),
    lambda t: t.t() + 1,
    lambda t: t * t.detach(),
    lambda t: t.softmax(-1) * t,
)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def ambient() -> tuple:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        saved_tensors_hooks_in_force(),
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_ten_thousand_regions_leave_nothing_behind(capsys):
    draw = random.Random(20260731)
    Program(draw).forward_and_backward()  # whatever torch sets up on first use
    tensors, state, filters = live_tensors(), ambient(), list(warnings.filters)
    done = failed_forward = failed_backward = 0
    for _ in range(REGIONS // BATCH):
        for _ in range(BATCH):
            program = Program(draw)
            try:
                program.forward_and_backward()
                done += 1
            except Injected:
                if program.runs == 1:
                    failed_forward += 1
                else:
                    failed_backward += 1
            del program
        assert ambient() == state
    left = live_tensors() - tensors
    with capsys.disabled():
        print(
            f"\n{REGIONS} regions: {done} done, {failed_forward} failed in forward, "
            f"{failed_backward} in recomputation; {left} tensors left, hooks "
            f"{saved_tensors_hooks_in_force()}, state {'as before' if ambient() == state else '!'}"
        )
    assert done + failed_forward + failed_backward == REGIONS
    assert failed_forward > REGIONS // 50
    assert failed_backward > REGIONS // 100
    assert left == 0
    assert list(warnings.filters) == filters


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_recomputation_leaves_the_random_stream_alone(use_reentrant, fails):
    runs = []

    def function(x):
        runs.append(torch.rand(3))
        if fails and len(runs) == 2:
            raise Injected
        return (x * torch.rand(3)).sin().exp()

    x = torch.ones(3, requires_grad=True)
    out = candidate.checkpoint(function, x, use_reentrant=use_reentrant).sum()
    before = torch.get_rng_state()
    if fails:
        with pytest.raises(Injected):
            out.backward()
    else:
        out.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(runs[0], runs[1])
