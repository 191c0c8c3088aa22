"""Selective checkpointing."""

from __future__ import annotations

import functools
import gc
import warnings

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
SAVE_ALL = lambda context, operator, *args, **kwargs: CheckpointPolicy.MUST_SAVE


def matrix() -> torch.Tensor:
    return torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()


def selective(function, *args, keep, mutation=False, **options):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep, mutation)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **options)


def gradient(function):
    x = matrix()
    function(x).float().sum().backward()
    return x.grad


class Executed(TorchDispatchMode):
    """Counts the operators that run below every mode entered later."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False])
def test_what_each_answer_means(answer):
    def policy(context, operator, *args, **kwargs):
        return answer if operator is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = matrix()
    with Executed() as executed:
        selective(lambda t: (t @ t).sin(), x, keep=policy).sum().backward()
    runs = executed.operators.count(aten.mm.default) - 2  # two belong to the gradient formula
    kept = answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)
    assert runs == (1 if kept else 2)
    assert torch.equal(x.grad, gradient(lambda t: (t @ t).sin()))


def test_a_policy_is_told_everything_and_only_in_forward():
    calls = []

    def policy(context, operator, *args, **kwargs):
        assert isinstance(context, SelectiveCheckpointContext)
        assert context.is_recompute is False
        with torch.no_grad():
            assert torch.equal(context.op_output, operator(*args, **kwargs))
        calls.append(operator)
        return CheckpointPolicy.PREFER_SAVE

    selective(lambda t: (t @ t).detach().sin() * t.exp(), matrix(), keep=policy).sum().backward()
    assert calls == [aten.mm.default, aten.sin.default, aten.exp.default, aten.mul.Tensor]
    assert aten.detach.default in SAC_IGNORED_OPS


def test_lists_are_checked():
    for entry, text in ((aten.mm, r"specific OpOverload.*\.default"), (torch.mm, "OpOverload")):
        with pytest.raises(ValueError, match=text):
            create_selective_checkpoint_contexts([entry])
    with pytest.raises(TypeError):
        create_selective_checkpoint_contexts(5)


def test_results_of_every_shape_come_back():
    def function(t):
        values, indices = t.view(9).view(3, 3).transpose(0, 1).max(1)
        a, _, b = torch.nn.functional.layer_norm(t, (3,)).split(1)
        return values.sin().sum() + (a * b).exp().sum() + t.reshape(-1)[indices].cos().sum()

    assert torch.equal(
        gradient(lambda t: selective(function, t, keep=SAVE_ALL)), gradient(function)
    )


def test_kept_results_are_matched_by_call_number():
    def policy(context, operator, *args, **kwargs):
        if operator is not aten.mm.default:
            return False
        policy.calls += 1
        return policy.calls % 2 == 0

    policy.calls = 0

    def function(t):
        for _ in range(5):
            t = (t @ t).sin()
        return t

    assert torch.equal(gradient(lambda t: selective(function, t, keep=policy)), gradient(function))


@pytest.mark.parametrize("preserve", [True, False])
def test_a_kept_random_result_leaves_the_stream_in_place(preserve):
    runs = []

    def function(t):
        kept = torch.rand(3, 3)
        repeated = torch.randn(3, 3)
        runs.append((kept, repeated))
        return (t * kept * repeated).sin()

    x = matrix()
    out = selective(function, x, keep=[aten.rand.default], preserve_rng_state=preserve)
    stream = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1]) == preserve
    assert torch.equal(stream, torch.get_rng_state()) == preserve


def test_other_operators_in_the_recomputation_are_an_error():
    def run(first, later):
        runs = []

        def function(t):
            runs.append(None)
            for operator in first if len(runs) == 1 else later:
                t = operator(t)
            return t.sin()

        selective(function, matrix(), keep=[aten.neg.default, aten.exp.default]).sum().backward()

    with pytest.raises(RuntimeError, match=r"aten\.exp.*not found"):
        run([torch.neg], [torch.exp])
    with pytest.raises(RuntimeError, match=r"aten\.neg.*not found"):
        run([torch.neg], [torch.neg, torch.neg])


def test_profiler_ranges_may_differ():
    runs = []

    def function(t):
        runs.append(None)
        for _ in runs:
            with torch.profiler.record_function("range"):
                pass
        return (t @ t).sin()

    want = gradient(lambda t: (t @ t).sin())
    assert torch.equal(gradient(lambda t: selective(function, t, keep=SAVE_ALL)), want)


@pytest.mark.parametrize("keep", [[], [aten.addmm.default], [aten._to_copy.default], SAVE_ALL])
def test_regions_share_a_weight_under_autocast(keep):
    def run(wrap):
        torch.manual_seed(0)
        linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = wrap(linear, wrap(linear, x))
        out.float().sum().backward()
        return linear.weight.grad, x.grad

    ours, plain = run(lambda f, t: selective(f, t, keep=keep)), run(lambda f, t: f(t))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_ordered_effects_happen_once():
    effects = pytest.importorskip("torch._higher_order_ops.effects")
    runs = []

    @torch.library.custom_op("reference_tests::note", mutates_args=())
    def note(t: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return t.clone()

    operator = torch.ops.reference_tests.note.default
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)

    def count(answer):
        runs.clear()
        selective(
            lambda t: (t.sin() * operator(t.detach())).exp(),
            matrix(),
            keep=lambda context, op, *args, **kwargs: answer,
        ).sum().backward()
        return len(runs)

    policy = CheckpointPolicy
    answers = (policy.PREFER_RECOMPUTE, policy.MUST_RECOMPUTE, policy.MUST_SAVE)
    assert [count(answer) for answer in answers] == [1, 2, 1]


@pytest.mark.parametrize("change", ["result", "alias"])
def test_changing_a_kept_result_is_an_error_unless_allowed(change):
    def function(t):
        y = t @ t
        torch.selu_(y if change == "result" else y.view(-1))
        return y.exp()

    keep = [aten.mm.default]
    with pytest.raises(RuntimeError, match="mutated"):
        gradient(lambda t: selective(function, t, keep=keep))
    gradient(lambda t: selective(function, t, keep=keep, mutation=True))


@pytest.mark.parametrize("inplace", [torch.Tensor.zero_, torch.Tensor.mul_])
def test_changing_the_base_of_a_kept_view_is_an_error(inplace):
    def function(t):
        base = t.sin()
        view = base[0]
        inplace(*((base,) if inplace is torch.Tensor.zero_ else (base, 2)))
        return view.exp() * t.sum()

    with pytest.raises(RuntimeError, match="mutated"):
        gradient(lambda t: selective(function, t, keep=[aten.select.int]))


def test_one_backward_only_where_something_is_kept():
    for keep, again in (([aten.mm.default], False), ([], True)):
        out = selective(lambda t: (t @ t).sin().exp(), matrix(), keep=keep).sum()
        out.backward(retain_graph=True)
        if again:
            out.backward()
        else:
            with pytest.raises(RuntimeError, match="extra time"):
                out.backward()


def test_backward_of_a_part_inside_the_region():
    def function(t):
        y = (t @ t).sin()
        (inner,) = torch.autograd.grad(y.exp().sum(), y, create_graph=True)
        return inner * y

    ours = gradient(lambda t: selective(function, t, keep=[aten.mm.default]))
    assert torch.equal(ours, gradient(function))


@pytest.mark.parametrize("outer", [None, [], [aten.mm.default], [aten.sin.default]])
@pytest.mark.parametrize("inner", [None, [], [aten.mm.default], [aten.sin.default], SAVE_ALL])
def test_nesting(outer, inner):
    def wrap(keep, function):
        if keep is None:
            return lambda t: checkpoint(function, t, use_reentrant=False)
        return lambda t: selective(function, t, keep=keep)

    def product(t):
        return (t @ t).sin().exp()

    nested = wrap(inner, product)
    ours = gradient(wrap(outer, lambda t: (nested(t.sin()) @ t).sin()))
    assert torch.equal(ours, gradient(lambda t: (product(t.sin()) @ t).sin()))


def test_nothing_is_kept_without_grad_mode():
    calls = []

    def policy(*args, **kwargs):
        calls.append(args)
        return True

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            selective(lambda t: t @ t, matrix(), keep=policy)
    assert not calls


@pytest.mark.parametrize("option", [None, True, False])
def test_hooks_around_kept_results(option):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.clone())
        return packed[-1]

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    x = matrix()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with saved_tensors_hooks(pack, unpack):
            out = selective(
                lambda t: (t @ t).sin().exp(),
                x,
                keep=[aten.mm.default],
                respect_saved_tensors_hooks=option,
            )
        out.sum().backward()
    assert [w.category for w in found] == ([FutureWarning] if option is None else [])
    assert all(w.filename == __file__ for w in found)
    assert len(packed) == len(unpacked) == (2 if option else 1)
    assert torch.equal(x.grad, gradient(lambda t: (t @ t).sin().exp()))


def test_hooks_see_through_a_region_between():
    packed = []
    hooks = saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t)

    def inner(t):
        return selective(
            lambda s: (s @ s).sin(), t, keep=[aten.mm.default], respect_saved_tensors_hooks=True
        )

    with hooks:
        out = checkpoint(lambda t: inner(t.cos()), matrix(), use_reentrant=False)
    assert len(packed) == 2  # the outer region's argument and the inner region's kept product
    out.sum().backward()


def test_save_on_cpu():
    x = matrix()
    with save_on_cpu():
        out = selective(lambda t: (t @ t).sin(), x, keep=SAVE_ALL, respect_saved_tensors_hooks=True)
    out.sum().backward()
    assert torch.equal(x.grad, gradient(lambda t: (t @ t).sin()))


@pytest.mark.parametrize("backward", [True, False])
def test_kept_results_die_with_the_graph(backward):
    references = []

    def function(t):
        y = t @ t
        references.append(StorageWeakRef(y.untyped_storage()))
        return y.sin().exp()

    gc.collect()
    gc.disable()
    try:
        out = selective(function, matrix(), keep=[aten.mm.default])
        assert not references[0].expired()
        if backward:
            out.sum().backward()
        del out
        assert all(reference.expired() for reference in references)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_inside_are_seen():
    seen = []

    def policy(context, operator, *args, **kwargs):
        seen.append(operator)
        return operator is aten.mm.default

    compiled = torch.compile(lambda t: (t @ t).sin(), backend="aot_eager")
    want = gradient(lambda t: (t @ t).sin())
    for _ in range(2):
        seen.clear()
        assert torch.equal(gradient(lambda t: selective(compiled, t, keep=policy)), want)
        assert seen == [aten.mm.default, aten.sin.default]
