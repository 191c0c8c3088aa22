"""The non-reentrant variant: recomputation, early stop, checks, ambient state, lifetimes."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from reference_impl import (
    CheckpointError,
    GraphExecGroup,
    checkpoint,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)


def leaf(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1, max(1, torch.Size(shape).numel())).reshape(shape).requires_grad_()


def region(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=False, **options)


def gradient(function, x):
    (grad,) = torch.autograd.grad(function(x).sum(), x)
    return grad


class Counted:
    """A function of two operators and a tail, counting starts and ends."""

    def __init__(self):
        self.starts = self.ends = 0

    def __call__(self, x):
        self.starts += 1
        y = x.sin().exp()
        self.ends += 1
        return y + 1


@pytest.mark.parametrize(
    ("context", "argument", "ends"),
    [(None, None, 1), (None, False, 2), (False, True, 2), (True, False, 1)],
)
def test_early_stop_follows_the_context_then_the_argument(context, argument, ends):
    function = Counted()
    options = {} if argument is None else {"early_stop": argument}
    with set_checkpoint_early_stop(context):
        out = region(function, leaf(3), **options)
    with set_checkpoint_early_stop(not context):
        out.sum().backward()
    assert (function.starts, function.ends) == (2, ends)


def test_a_region_that_saves_nothing_is_not_run_again():
    function = Counted()
    region(lambda x: (function.__call__(x.detach()), x + 1)[1], leaf(3)).sum().backward()
    assert function.starts == 1


def test_only_what_is_still_alive_is_recomputed():
    steps = []

    def function(x):
        a = x.sin()
        steps.append("a")
        b = a.detach().requires_grad_().exp()
        steps.append("b")
        return a, b

    a, b = region(function, leaf(3))
    del b
    a.sum().backward()
    assert steps == ["a", "b"]


@pytest.mark.parametrize("handler", [Exception, BaseException])
@pytest.mark.parametrize("answer", ["more", "nothing", "another error"])
def test_a_handler_around_everything_gives_no_wrong_gradient(handler, answer):
    def function(x):
        try:
            return x.sin().exp()
        except handler as error:
            if answer == "another error":
                raise ValueError("wrapped") from error
            return x.cos() * 3 if answer == "more" else x * 2

    x = leaf(3)
    torch.testing.assert_close(
        gradient(lambda t: region(function, t), x), gradient(lambda t: t.sin().exp(), x)
    )


def test_mismatches_are_reported_with_both_sides():
    runs = []

    def function(x):
        runs.append(None)
        return (x if len(runs) == 1 else x[:2].double()).exp().sum()

    out = region(function, leaf(3))
    with pytest.raises(CheckpointError, match=r"(?s)position 0.*\[3\].*float32.*\[2\].*float64"):
        out.backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_missing_tensors_are_an_error_even_without_a_check(early_stop):
    runs = []

    def function(x):
        runs.append(None)
        return x.sin().exp() if len(runs) == 1 else x.sin()

    out = region(function, leaf(3), determinism_check="none", early_stop=early_stop)
    with pytest.raises(CheckpointError, match="number of tensors"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("context", "argument", "traced"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_debug_adds_the_operators_of_both_runs(context, argument, traced):
    runs = []

    def function(x):
        runs.append(None)
        return x.sin().exp() if len(runs) == 1 else x[:2].cos().exp()

    with set_checkpoint_debug_enabled(context):
        out = region(function, leaf(3), debug=argument)
    with pytest.raises(CheckpointError) as info:
        out.sum().backward()
    text = str(info.value)
    assert ("aten.sin" in text, "aten.cos" in text, __file__ in text) == (traced,) * 3
    assert isinstance(info.value.__cause__, CheckpointError) == traced


def test_the_debug_context_without_an_argument_changes_nothing():
    with set_checkpoint_debug_enabled():
        region(torch.exp, leaf(3)).sum().backward()


def test_random_autocast_and_device_state_are_replayed_and_put_back():
    seen = []

    def function(x):
        seen.append(
            (
                torch.rand(1, device="cpu").item(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
                torch.empty(1).device.type,
            )
        )
        return x.sin().exp()

    x = leaf(3)
    with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.device("meta"):
        out = region(function, x)
    torch.manual_seed(1)
    stream = torch.get_rng_state()
    with torch.device("meta"), torch.device("cpu"), torch.autocast("cpu"):
        out.backward(torch.ones(3, device="cpu"))
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert seen[0] == seen[1]
    assert torch.equal(stream, torch.get_rng_state())
    assert not torch.is_autocast_enabled("cpu")
    assert _get_current_function_mode_stack() == []


def test_looking_at_saved_tensors_leaves_the_default_device():
    x = leaf(3)
    with torch.device("cpu"):
        with torch.device("meta"):
            out = region(lambda t: t.sin().exp(), x)
            for _ in range(2):
                assert torch.equal(out.grad_fn._saved_result, x.sin().exp())
            assert torch.empty(1).device.type == "meta"
        assert torch.empty(1).device.type == "cpu"
    assert torch.equal(out.grad_fn._saved_result, x.sin().exp())
    assert _get_current_function_mode_stack() == []
    out.sum().backward()


def test_modes_are_carried_by_context_fn_and_missed_loudly_otherwise():
    class Half(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out.to(torch.bfloat16) if func is torch.Tensor.sin else out

    def function(t):
        return t.sin().exp()

    region(function, leaf(3), context_fn=lambda: (Half(), Half())).float().sum().backward()
    with Half():
        out = region(function, leaf(3))
    with pytest.raises(CheckpointError, match="bfloat16"):
        out.float().sum().backward()


def test_a_forward_context_that_swallows_the_failure_is_an_error():
    def function(x):
        raise KeyError

    with pytest.raises(RuntimeError, match="suppressed"):
        region(
            function,
            leaf(1),
            context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
        )


def test_a_recompute_context_that_swallows_everything_changes_nothing():
    runs = []

    def function(x):
        runs.append(None)
        y = x.sin()
        if len(runs) == 3:
            raise KeyError
        return y.exp()

    contexts = (contextlib.nullcontext(), contextlib.suppress(BaseException))
    out = region(function, leaf(3), context_fn=lambda: contexts).sum()
    out.backward(retain_graph=True)
    with pytest.raises(CheckpointError):
        out.backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_every_way_of_running_backward(early_stop):
    def function(x, w):
        h = (x * w).sin()
        (inner,) = torch.autograd.grad(h.exp().sum(), h, create_graph=True)
        return h.exp() * inner.cos(), w * h

    def differentiated(call):
        x, w = (
            leaf(4).double().detach().requires_grad_(),
            leaf(4).double().detach().requires_grad_(),
        )
        a, b = call(function, x, w)
        first = torch.autograd.grad(a.sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w), retain_graph=True)
        b.sum().backward(retain_graph=True, inputs=[w])
        (a + b).sum().backward(retain_graph=True)
        (a + b).sum().backward()
        return [*first, *second, x.grad, w.grad]

    def checkpointed(function, *args):
        return region(function, *args, early_stop=early_stop)

    ours, plain = differentiated(checkpointed), differentiated(lambda f, *a: f(*a))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_batched_gradients():
    x = leaf(3)
    out = region(lambda t: t.sin().exp(), x)
    (rows,) = torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(rows, torch.diag(x.detach().cos() * x.detach().sin().exp()))


@pytest.mark.parametrize("variants", ["nn", "rr", "nr", "rn", "nrn", "rnr", "nnnn"])
def test_nesting_in_any_mixture(variants):
    def build(variants):
        if not variants:
            return lambda t: torch.nn.functional.dropout(t.sin().exp(), 0.5) * torch.rand(3)
        inner = build(variants[1:])
        return lambda t: checkpoint(
            lambda s: inner(s.cos() * 2).sin(), t, use_reentrant=variants[0] == "r"
        )

    def run(function):
        torch.manual_seed(3)
        x = leaf(3)
        function(x).sum().backward()
        return x.grad, torch.rand(1)

    def plain(t):
        for _ in variants:
            t = t.cos() * 2
        t = torch.nn.functional.dropout(t.sin().exp(), 0.5) * torch.rand(3)
        for _ in variants:
            t = t.sin()
        return t

    for ours, theirs in zip(run(build(variants)), run(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_each_level_of_nesting_costs_at_most_one_run(early_stop, depth):
    function = Counted()

    def build(depth):
        if not depth:
            return function
        inner = build(depth - 1)
        return lambda t: region(lambda s: inner(s.cos()).sin(), t, early_stop=early_stop)

    build(depth)(leaf(3)).sum().backward()
    if early_stop:
        assert function.starts <= 1 + depth
    else:
        assert function.starts == 1 + depth


def test_a_group_recomputes_once_and_refuses_overlap():
    runs = []

    def function(x, w):
        runs.append(None)
        return x.sin().exp(), w.cos().exp()

    x, w = leaf(3), leaf(3)
    a, b = region(function, x, w)
    group = GraphExecGroup()
    with group:
        a.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError), GraphExecGroup():
            pass
    with group:
        torch.autograd.grad(b.sum(), w, retain_graph=True)
        assert len(runs) == 2
        with pytest.raises(CheckpointError):
            a.sum().backward(retain_graph=True)
    a.sum().backward()
    b.sum().backward()
    assert len(runs) == 4


def test_a_group_after_a_failed_recomputation_tries_again():
    runs = []

    def function(x):
        runs.append(None)
        if len(runs) == 2:
            raise KeyError
        return x.sin().exp()

    x = leaf(3)
    out = region(function, x).sum()
    with GraphExecGroup():
        with pytest.raises(KeyError):
            out.backward(retain_graph=True)
        out.backward()
    torch.testing.assert_close(x.grad, gradient(lambda t: t.sin().exp(), x))


def test_threads_recompute_one_region_side_by_side():
    x = leaf(4)
    out = region(lambda t: (t.sin().exp() * t).cos(), x).sum()
    results, errors = [], []

    def work():
        try:
            for _ in range(10):
                results.append(torch.autograd.grad(out, x, retain_graph=True)[0])
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = gradient(lambda t: (t.sin().exp() * t).cos(), x)
    assert not errors
    assert len(results) == 40
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compiled_code_may_contain_a_region(use_reentrant):
    seen = []

    @torch.compile(backend="eager")
    def compiled(x):
        y = checkpoint(noisy, x + 1, use_reentrant=use_reentrant, preserve_rng_state=False)
        return y * 2

    def noisy(t):
        noise = torch.rand(3)
        seen.append(noise)
        return (t * noise).sin()

    compiled(leaf(3)).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


class Lifetimes:
    """Storages of the tensors that a function makes, by the run that made them."""

    def __init__(self):
        self.runs = []

    def __call__(self, x):
        references = []
        self.runs.append(references)
        for _ in range(3):
            x = x.sin()
            references.append(StorageWeakRef(x.untyped_storage()))
        return x

    def alive(self):
        return [sum(not reference.expired() for reference in run) for run in self.runs]


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}])
def test_everything_dies_by_reference_counting(options):
    class Box:
        pass

    box, function = Box(), Lifetimes()
    reference = weakref.ref(box)
    region(torch.sin, leaf(1), **options).sum().backward()
    out = region(lambda t, box: function(t), leaf(3), box, **options)
    del box
    assert function.alive() == [1]
    out.sum().backward(retain_graph=True)
    assert function.alive()[1] == 0
    out.sum().backward()
    del out
    assert reference() is None
    assert function.alive() == [0, 0, 0]


@pytest.mark.usefixtures("_no_collector")
def test_what_a_partial_backward_did_not_use_is_freed_at_its_end():
    first, second = Lifetimes(), Lifetimes()
    a, b = region(lambda t: (first(t), second(t)), leaf(3))
    a.sum().backward(retain_graph=True)
    assert second.alive()[1] == 0
    b.sum().backward()
    assert second.alive()[1:] == [0, 0]


@pytest.mark.usefixtures("_no_collector")
def test_a_failed_recomputation_keeps_nothing():
    function, runs = Lifetimes(), []

    def failing(t):
        runs.append(None)
        y = function(t)
        if len(runs) == 2:
            raise KeyError
        return y

    out = region(failing, leaf(3), early_stop=False)
    with pytest.raises(KeyError):
        out.sum().backward()
    assert function.alive() == [1, 0]


def test_user_hooks_see_the_arguments_and_nothing_else():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    x = leaf(4)
    h = x * 1
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = region(lambda t: t.pow(2).exp(), h)
    assert len(packed) == 1
    assert torch.equal(packed[0], h)
    out.sum().backward()
    torch.testing.assert_close(x.grad, gradient(lambda t: t.pow(2).exp(), x))


def test_user_hooks_inside_take_what_is_theirs():
    packed, x = [], leaf(4)

    def function(t):
        h = t.sin()
        with saved_tensors_hooks(lambda s: (packed.append(1), s.detach())[1], lambda s: s):
            h = h.exp()
        return h.cos()

    out = region(function, x)
    assert packed == [1]
    out.sum().backward()
    torch.testing.assert_close(x.grad, gradient(lambda t: t.sin().exp().cos(), x))


def test_a_tensor_that_is_an_argument_twice_in_one_run_only():
    v = leaf(3).sin()

    def outer(a):
        return region(lambda s, t: t.sin(), a, v, early_stop=False)

    region(outer, v, early_stop=False).sum().backward()


def test_a_failure_of_the_recompute_context_is_raised():
    @contextlib.contextmanager
    def failing():
        yield
        raise KeyError

    for early_stop in (True, False):
        contexts = (contextlib.nullcontext(), failing())
        out = region(
            lambda t: t.sin().exp(), leaf(3), context_fn=lambda c=contexts: c, early_stop=early_stop
        )
        with pytest.raises(KeyError):
            out.sum().backward()
