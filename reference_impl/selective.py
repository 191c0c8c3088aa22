"""Selective checkpointing: the results of some operators are kept instead of recomputed.

`create_selective_checkpoint_contexts` makes two dispatch modes that share a `ResultStore`. Under
the first, in the forward pass, each operator is run and the policy asked; the store notes, by
operator and by how often that operator was called before, the result or the decision to recompute.
Under the second the store is read in the same order: a kept result is handed out once, in place
of running the operator.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from reference_impl.ambient import AmbientState, RandomState
from reference_impl.recomputation import Hooks, current_region, user_hooks_in_force
from reference_impl.torch_private import (
    DispatchMode,
    aliased_argument,
    has_ordered_effect,
    restarted_dispatch,
)
from reference_impl.warn import warn_caller


class CheckpointPolicy(enum.Enum):
    """What becomes of an operator's result.

    - ``{MUST,PREFER}_SAVE``: it is kept in the forward pass and not recomputed.
    - ``{MUST,PREFER}_RECOMPUTE``: it is not kept.
    - ``{MUST,PREFER}_CPU_OFFLOAD``: for compilers; eager execution recomputes it (see the
      specification's divergences).

    ``MUST_*`` instead of ``PREFER_*`` says that other subsystems may not decide otherwise. In
    eager execution that matters for operators with ordered effects: they are not repeated unless
    the policy says MUST_RECOMPUTE. Source: documentation 2.14, CheckpointPolicy.
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_CPU_OFFLOAD = 4
    PREFER_CPU_OFFLOAD = 5


class SelectiveCheckpointContext:
    """What a policy function is told besides the operator and its arguments.

    Attributes:
        is_recompute: always False, since a policy is asked in the forward pass only; deprecated.
        op_output: what the operator has returned.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output


Policy = Callable[..., CheckpointPolicy | bool]

_METADATA_OPERATORS = (
    "aten.detach.default",
    "aten.dim.default",
    "aten.is_contiguous.default",
    "aten.is_contiguous.memory_format",
    "aten.is_non_overlapping_and_dense.default",
    "aten.is_strides_like_format.default",
    "aten.numel.default",
    "aten.size.default",
    "aten.storage_offset.default",
    "aten.stride.default",
    "aten.sym_numel.default",
    "aten.sym_size.default",
    "aten.sym_storage_offset.default",
    "aten.sym_stride.default",
    "prim.device.default",
)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


SAC_IGNORED_OPS = {_operator(name) for name in _METADATA_OPERATORS}
"""Bookkeeping operators: run in both passes as they come, never shown to a policy."""


class Traits(NamedTuple):
    """What matters here about an operator itself, whatever it is called with."""

    bookkeeping: bool
    """May be called more often in one run than in the other."""
    cast: bool
    """Is what autocast calls, and may take from its cache instead."""
    random: bool
    """Draws random numbers."""
    alias_of: int | None
    """Position of the argument that its result is an alias of."""


@functools.cache
def traits_of(operator: Any) -> Traits:
    """Return the traits of an operator."""
    return Traits(
        operator in SAC_IGNORED_OPS or getattr(operator, "namespace", None) == "profiler",
        operator is torch.ops.aten._to_copy.default,
        torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()),
        aliased_argument(operator),
    )


_SAVING = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | Sequence[Any], allow_cache_entry_mutation: bool = False
) -> tuple[DispatchMode, DispatchMode]:
    """Return the pair of contexts for `checkpoint`'s `context_fn` that keeps some results.

    Args:
        policy_fn_or_list: a function ``(SelectiveCheckpointContext, OpOverload, *args, **kwargs)
            -> CheckpointPolicy`` (True and False mean MUST_SAVE and PREFER_RECOMPUTE), or a list
            of OpOverloads: MUST_SAVE for these, PREFER_RECOMPUTE for all others.
        allow_cache_entry_mutation: do not raise if a kept tensor was changed in place.

    Raises:
        TypeError: neither a function nor a list.
        ValueError: something in the list is not an OpOverload.

    In backward, RuntimeError is raised if a kept tensor was changed in place, if the recomputation
    runs an operator that the forward did not, or if a region that kept something is recomputed a
    second time. Source: documentation 2.14, create_selective_checkpoint_contexts.
    """
    if isinstance(policy_fn_or_list, (list, tuple)):
        policy = _policy_from_list(policy_fn_or_list)
    elif callable(policy_fn_or_list):
        policy = policy_fn_or_list
    else:
        raise TypeError(
            "expected a policy function or a list of operators, not "
            f"{type(policy_fn_or_list).__name__}"
        )
    store = ResultStore(allow_cache_entry_mutation)
    return RecordingMode(store, policy), ReplayingMode(store)


def _policy_from_list(operators: Sequence[Any]) -> Policy:
    for operator in operators:
        if not isinstance(operator, torch._ops.OpOverload):
            hint = ""
            if isinstance(operator, torch._ops.OpOverloadPacket):
                names = ", ".join(f"{operator}.{name}" for name in operator.overloads())
                hint = f" It stands for several; give a specific OpOverload, one of: {names}"
            raise ValueError(f"the list must hold OpOverloads; {operator!r} is none.{hint}")
    kept = frozenset(operators)

    def policy(_: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> Any:
        save = operator in kept
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class KeptTensor:
    """A tensor kept by selective checkpointing, outside of the autograd graph.

    Args:
        tensor: the tensor.
        source: the argument that it is an alias of, if it is one. Autograd counts the changes of
            both together, but here, below autograd, the tensor does not know it yet.
        hooks: the user's hooks that it goes through, if any; their result is trusted.
    """

    __slots__ = ("hooks", "packed", "version", "watched")

    def __init__(
        self, tensor: torch.Tensor, source: torch.Tensor | None, hooks: Hooks | None
    ) -> None:
        # Detached: the tensor itself will get a graph, which leads back to here. With dispatch
        # restarted, so that autograd lets both share one version counter.
        with restarted_dispatch():
            kept = tensor.detach()
            watched = kept if source is None else source.detach()
        self.hooks = hooks
        if hooks is None:
            self.packed, self.watched = kept, watched
            self.version = None if tensor.is_inference() else watched._version
        else:
            self.packed = hooks[0](kept)  # and nothing else of the tensor is held

    def take(self, allow_mutation: bool) -> torch.Tensor:
        """Return the tensor; cache-mutation/raises: only as it was."""
        if self.hooks is not None:
            return self.hooks[1](self.packed)
        if self.version not in (None, self.watched._version) and not allow_mutation:
            raise RuntimeError(
                "A tensor that selective checkpointing kept has been mutated since. Let its "
                "operator be recomputed, or avoid the mutation; "
                "allow_cache_entry_mutation=True turns this check off."
            )
        kept: torch.Tensor = self.packed
        return kept.detach()


class KeptCall:
    """A call of an operator whose result was kept: the result, with its tensors as `KeptTensor`.

    `random_after` is the random state after a random operator: skipping the operator in the
    recomputation must not leave the generators behind their place (selective/random-mixed).
    """

    __slots__ = ("random_after", "result")

    def __init__(self, result: Any, random_after: RandomState | None) -> None:
        self.result = result
        self.random_after = random_after


class ResultStore:
    """What became of each call of an operator in one region.

    `calls` lists, for each operator, its calls in order: a `KeptCall`, or None if the result was
    not kept.
    """

    __slots__ = ("allow_mutation", "calls", "keeps_something", "recording", "replaying", "used_up")

    def __init__(self, allow_mutation: bool) -> None:
        self.allow_mutation = allow_mutation
        self.calls: dict[Any, list[KeptCall | None]] = {}
        self.keeps_something = False
        self.recording = False
        self.replaying = False
        self.used_up = False


class RecordingMode(DispatchMode):
    """The forward pass: run each operator, ask the policy, keep what it says."""

    def __init__(self, store: ResultStore, policy: Policy) -> None:
        super().__init__()
        self.store = store
        self.policy = policy
        self.respect_hooks: bool | None = None
        self.ambient: AmbientState | None = None

    def __enter__(self) -> RecordingMode:
        region = current_region()
        if region is not None:
            self.respect_hooks = region.respect_saved_tensors_hooks
            self.ambient = region.ambient
        # selective/no-grad: without grad mode there is no backward to keep anything for.
        self.store.recording = torch.is_grad_enabled()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.store.recording = False
        super().__exit__(*exc_info)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        store = self.store
        # A recomputation under way inside the forward is no part of what is recorded.
        if store.replaying or not store.recording:
            return result
        traits = traits_of(func)
        if traits.bookkeeping or (traits.cast and _may_be_cached_cast(args[0])):
            return result
        context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
        decision = self.policy(context, func, *args, **kwargs)
        kept = self._keep(traits, args, result) if _keeps(decision, func) else None
        store.calls.setdefault(func, []).append(kept)
        return result

    def _keep(self, traits: Traits, args: tuple[Any, ...], result: Any) -> KeptCall:
        self.store.keeps_something = True
        hooks = self._hooks()
        position = traits.alias_of
        source = args[position] if position is not None and position < len(args) else None
        return KeptCall(
            _map(torch.Tensor, lambda tensor: KeptTensor(tensor, source, hooks), result),
            self.ambient.random_now() if traits.random and self.ambient is not None else None,
        )

    def _hooks(self) -> Hooks | None:
        """hooks/default-bypasses: kept tensors go through the user's hooks on request only."""
        if self.respect_hooks is False:
            return None
        hooks = user_hooks_in_force()
        if hooks is None or self.respect_hooks:
            return hooks
        self.respect_hooks = False
        warn_caller(
            "Tensors kept by selective checkpointing do not pass through the saved-tensors hooks "
            "in force here; a later release will pass them. Give checkpoint "
            "respect_saved_tensors_hooks=True for that now, or False to keep it as it is.",
            FutureWarning,
        )
        return None


class ReplayingMode(DispatchMode):
    """The recomputation: hand out kept results instead of running their operators."""

    def __init__(self, store: ResultStore) -> None:
        super().__init__()
        self.store = store
        self.seen: dict[Any, int] = {}

    def __enter__(self) -> ReplayingMode:
        store = self.store
        if store.keeps_something and store.used_up:
            raise RuntimeError(
                "This is an extra time that backward goes through a region with selective "
                "checkpointing: what it had kept was used up by the first one."
            )
        store.replaying = True
        # Inside the forward (backward of a part of the region) results are lent, not given away.
        store.used_up = not store.recording
        self.seen = {}
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.store.replaying = False
        super().__exit__(*exc_info)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traits.bookkeeping or (traits.cast and _may_be_cached_cast(args[0])):
            return func(*args, **kwargs)
        store = self.store
        index = self.seen.get(func, 0)
        self.seen[func] = index + 1
        calls = store.calls.get(func, [])
        if index >= len(calls):
            raise RuntimeError(
                f"{func}, call number {index + 1} in the recomputation, was not found among the "
                f"{len(calls)} calls of the forward pass. The function must do the same in both "
                "runs; look for global state and caches."
            )
        kept = calls[index]
        if kept is None:
            return func(*args, **kwargs)
        if store.used_up:
            calls[index] = None
        if kept.random_after is not None:
            kept.random_after.restore()
        return _map(KeptTensor, lambda tensor: tensor.take(store.allow_mutation), kept.result)


def _keeps(decision: CheckpointPolicy | bool, func: Any) -> bool:
    if decision in _SAVING:
        return True
    # selective/ordered-effects: an effect must not happen twice, unless that is asked for.
    return decision is not CheckpointPolicy.MUST_RECOMPUTE and has_ordered_effect(func)


def _may_be_cached_cast(tensor: torch.Tensor) -> bool:
    """selective/autocast-shared-weight: whether autocast may have this cast in its cache.

    Then the forward runs it or not depending on what ran before the region.
    """
    return tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()


def _map(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the objects of one kind in an operator's result."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(kind, function, item) for item in value)
    return value
