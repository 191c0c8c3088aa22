"""Calling forms, options, arguments, warnings and the sequential helper."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import reference_impl as candidate
from reference_impl import checkpoint, checkpoint_sequential


def leaf(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1, max(1, torch.Size(shape).numel())).reshape(shape).requires_grad_()


def caught(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


def test_signatures_are_the_documented_ones():
    parameters = inspect.signature(checkpoint).parameters
    defaults = {
        "use_reentrant": None,
        "preserve_rng_state": True,
        "context_fn": candidate.noop_context_fn,
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
        "respect_saved_tensors_hooks": None,
    }
    for name, default in defaults.items():
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(checkpoint_sequential).parameters) == [
        "functions", "segments", "input", "use_reentrant", "kwargs"
    ]  # fmt: skip


def test_every_name_of_torch_is_there():
    assert set(candidate.__all__) >= set(torch.utils.checkpoint.__all__)


def test_an_omitted_choice_warns_at_the_calling_line_and_is_reentrant():
    x, results = leaf(3), []

    def direct():
        results.append(checkpoint(torch.sin, x))

    def decorated():
        results.append(checkpoint()(torch.sin)(x))

    def layers():
        results.append(checkpoint_sequential([torch.sin, torch.cos, torch.sin], 3, x))

    for call in (direct, decorated, layers):
        (warning,) = caught(call)
        assert warning.category is UserWarning
        assert "use_reentrant" in str(warning.message)
        assert warning.filename == __file__
        assert warning.lineno == call.__code__.co_firstlineno + 1
    assert "CheckpointFunction" in type(results[0].grad_fn).__name__


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"use_reentrant": False, "determinism_check": "strict"}, {}),
        ({"use_reentrant": True, "debug": True}, {}),
        ({"use_reentrant": True, "context_fn": lambda: candidate.noop_context_fn()}, {}),
        ({"use_reentrant": True, "respect_saved_tensors_hooks": True}, {}),
        ({"use_reentrant": True}, {"scale": 2}),
        ({"use_reentrant": False, "debug": True, "context_fn": lambda: None}, {}),
    ],
)
def test_what_does_not_fit_is_refused_before_the_function_runs(options, arguments):
    def function(*args, **kwargs):
        raise AssertionError("must not run")

    with pytest.raises(ValueError, match=next(iter(arguments), "")):
        checkpoint(function, leaf(2), **options, **arguments)


def test_the_decorator_keeps_keywords_apart():
    seen = []

    @checkpoint(use_reentrant=False)
    def function(x, *, debug, function, early_stop):
        """Doc."""
        seen.append((debug, function, early_stop))
        return x.sin().exp()

    function(leaf(3), debug=1, function=2, early_stop=3).sum().backward()
    assert seen == [(1, 2, 3)] * 2
    assert (function.__name__, function.__doc__) == ("function", "Doc.")
    with pytest.raises(ValueError, match="other"):
        checkpoint(use_reentrant=False, other=1)
    with pytest.raises(TypeError):
        checkpoint(None, leaf(1), use_reentrant=False)


def test_the_decorator_serves_methods_modules_and_class_methods():
    checkpointed = checkpoint(use_reentrant=False)

    class Layer(torch.nn.Module):
        @checkpointed
        def forward(self, x):
            return self.scale(x).exp()

        @classmethod
        @checkpointed
        def scale(cls, x):
            return x * 2

        @checkpointed
        @staticmethod
        def above(x):
            return x.sin()

    x = leaf(3)
    assert torch.equal(Layer()(x), (x * 2).exp())
    assert torch.equal(Layer.above(x), x.sin())
    linear = torch.nn.Linear(3, 3)
    wrapped = checkpointed(linear)
    wrapped(x).sum().backward()
    assert linear.weight.grad is not None
    assert not hasattr(wrapped, "_parameters")


def test_arguments_come_back_as_they_were():
    runs, marker, frozen = [], object(), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    x, weight = leaf(2) * 1, torch.nn.Parameter(torch.ones(2))

    def function(*args, **kwargs):
        runs.append((args, kwargs))
        return (args[0] * args[2]).sin().exp()

    arguments = (x, marker, weight, None, torch.arange(3), x, frozen)
    checkpoint(function, *arguments, use_reentrant=False, key=x, other=[x]).sum().backward()
    (first, first_keywords), (second, keywords) = runs
    assert first == arguments
    assert second[1] is marker
    assert second[2] is weight
    assert second[6] is frozen
    assert second[0] is second[5] is keywords["key"]
    assert second[0].is_leaf
    assert second[0].requires_grad
    assert torch.equal(second[0], x)
    assert keywords["other"] is first_keywords["other"]


def test_changing_an_argument_afterwards_is_an_error():
    x = leaf(3) * 1
    out = checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_changing_the_argument_of_an_inner_region_is_never_silent():
    def outer(x):
        h = x.sin()
        y = checkpoint(lambda t: t.exp(), h, use_reentrant=False)
        h.mul_(2)
        return y * h

    out = checkpoint(outer, leaf(3), use_reentrant=False, early_stop=False).sum()
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_without_grad_mode_it_is_a_plain_call(use_reentrant):
    entered = []

    class Note:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *exc_info):
            return None

    options = {} if use_reentrant else {"context_fn": lambda: (Note(), Note())}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = checkpoint(torch.sin, leaf(3), use_reentrant=use_reentrant, **options)
        assert not out.requires_grad
        assert out.is_inference() == (mode is torch.inference_mode)
    assert len(entered) == (0 if use_reentrant else 2)


def test_an_inference_tensor_is_an_argument_like_others():
    with torch.inference_mode():
        constant = torch.full((3,), 2.0)
    x = leaf(3)
    checkpoint(lambda t, c: (t + c) * 3, x, constant, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("layers", "segments", "plain"), [(9, 5, 5), (5, 2, 3), (4, 4, 1), (3, 1, 3)]
)
def test_sequential_splits_and_recomputes_all_but_the_last_segment(
    use_reentrant, layers, segments, plain
):
    runs = [0] * layers

    def layer(index):
        def run(x):
            runs[index] += 1
            return x.sin().cos() + 0 * x.exp()

        return run

    functions = [layer(index) for index in range(layers)]
    checkpoint_sequential(
        functions, segments, leaf(2), use_reentrant=use_reentrant
    ).sum().backward()
    assert runs == [2] * (layers - plain) + [1] * plain


@pytest.mark.parametrize(
    ("layers", "segments", "keywords"),
    [(1, 2, {}), (0, 1, {}), (2, 0, {}), (2, -1, {}), (2, 1, {"debug": True})],
)
def test_sequential_refuses(layers, segments, keywords):
    with pytest.raises(ValueError, match=r"segments|debug"):
        checkpoint_sequential([torch.sin] * layers, segments, leaf(2), False, **keywords)
