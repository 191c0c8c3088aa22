"""The non-reentrant variant: a region of the autograd graph that is recomputed when needed.

While the function runs, autograd hands each tensor that it would save to `Region.pack` and keeps
what it gets back: a `Slot`, which remembers only what the tensor looked like. When backward needs
the tensor, autograd hands the slot to `Region.unpack`. The first slot asked for in a backward pass
makes the region run its function again; this time a `Recomputation` receives the tensors, in the
same order, and puts each into its slot, from which backward then takes them one by one.

Who keeps what alive:

- the autograd graph keeps its slots and, through the unpack hook, the region; the region keeps the
  function, its arguments and the ambient state. When autograd has released the last saved tensor
  of the region, all of this is gone.
- the region knows its slots weakly. A slot that is gone is not needed any more: nothing is
  recomputed for its sake.
- a recomputed tensor is kept by its slot alone, detached (so there are no reference cycles), until
  it is taken, the slot dies or the backward pass ends.

Nesting needs no code of its own. A region inside the function of another one saves its arguments
through the hooks in force, as autograd would; these are the outer region's, so the arguments
become slots of the outer region, and unpacking them recomputes the outer region first.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from reference_impl.ambient import AmbientState
from reference_impl.debug import with_traces
from reference_impl.determinism import Metadata, consumed_error, count_error, metadata_error
from reference_impl.early_stop import StopRecomputation, early_stop_in_force
from reference_impl.graph_exec_group import current_group
from reference_impl.options import Options
from reference_impl.torch_private import (
    at_end_of_backward,
    current_graph_task_id,
    detach,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_in_force,
    set_grad_enabled,
)

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pack and an unpack hook, as for `torch.autograd.graph.saved_tensors_hooks`."""


class Slot:
    """Stands in the autograd graph for one tensor that was not saved.

    `recomputed` holds the tensor, between its recomputation and its use, by the backward pass
    that wanted it: several passes may be under way in different threads.
    """

    __slots__ = ("__weakref__", "metadata", "recomputed")

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.recomputed: dict[object, torch.Tensor] = {}


class SavedTensor:
    """A tensor argument of the function, kept for the recomputation.

    It is saved as autograd would save it: through the hooks in force, noticing changes in place,
    and without its own graph.
    """

    __slots__ = ("packed", "requires_grad", "same_as", "unpack", "version")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None) -> None:
        kept = _without_graph(tensor)
        self.requires_grad = tensor.requires_grad
        self.same_as: SavedTensor | None = None
        self.version = None if tensor.is_inference() else tensor._version
        if hooks is None:
            self.packed, self.unpack = kept, None
        else:
            with torch.no_grad():
                self.packed = hooks[0](kept)
            self.unpack = hooks[1]
            if _owner(hooks) is None:
                self.version = None  # what a user's hook gives back has a history of its own

    def restore(self) -> torch.Tensor:
        """Return the argument for a recomputation: same values, a leaf, same requires_grad."""
        tensor: torch.Tensor = self.packed if self.unpack is None else self.unpack(self.packed)
        if self.version is not None and tensor._version != self.version:
            raise RuntimeError(
                "A tensor argument of a checkpointed function has been modified by an inplace "
                f"operation since the function ran: it is at version {tensor._version}, expected "
                f"version {self.version}. Recomputing from it would give wrong gradients."
            )
        if tensor.requires_grad != self.requires_grad:
            return tensor.detach().requires_grad_(self.requires_grad)
        return tensor


class SavedArguments:
    """The arguments of a call, kept for the recomputation.

    Tensors directly among them are saved; whatever is nested in containers is kept as it is. A
    tensor that stands in two places is saved for each, for a tensor that is the same in one run
    need not be in the other (if it is also in a closure, say), but comes back as one object.
    """

    __slots__ = ("keywords", "values")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Hooks | None) -> None:
        self.values: list[Any] = []
        self.keywords = tuple(kwargs)
        first: dict[int, SavedTensor] = {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                saved = SavedTensor(value, hooks)
                saved.same_as = first.get(id(value))
                if saved.same_as is None:
                    first[id(value)] = saved
                value = saved
            self.values.append(value)

    def restore(self) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for a recomputation."""
        restored: dict[SavedTensor, torch.Tensor] = {}
        values = []
        for value in self.values:
            if isinstance(value, SavedTensor):
                if value.same_as is None:
                    tensor = restored[value] = value.restore()
                else:
                    tensor = restored[value.same_as]
                value = tensor
            values.append(value)
        if not self.keywords:
            return values, {}
        positional = len(values) - len(self.keywords)
        return values[:positional], dict(zip(self.keywords, values[positional:], strict=True))


class Region:
    """One call of a checkpointed function, and how to run it again."""

    __slots__ = (
        "__weakref__",
        "ambient",
        "arguments",
        "compare_metadata",
        "complete",
        "early_stop",
        "forward_context",
        "function",
        "lock",
        "recompute_context",
        "recomputed_for",
        "respect_saved_tensors_hooks",
        "slots",
        "user_hooks",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        forward_context: AbstractContextManager[Any],
        recompute_context: AbstractContextManager[Any],
    ) -> None:
        hooks = saved_tensors_hooks_in_force()
        self.user_hooks = None if hooks is None else user_hooks_in_force()
        self.function = function
        self.arguments = SavedArguments(args, kwargs, hooks)
        self.ambient = AmbientState(args, kwargs, options.preserve_rng_state)
        self.forward_context = forward_context
        self.recompute_context = recompute_context
        self.compare_metadata = options.determinism_check == "default"
        self.early_stop = early_stop_in_force(options.early_stop)
        self.respect_saved_tensors_hooks = options.respect_saved_tensors_hooks
        self.slots: list[weakref.ref[Slot]] = []
        self.complete = False
        self.recomputed_for: set[object] = set()
        self.lock = threading.RLock()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward: call the function, leaving slots in the graph."""
        push_saved_tensors_hooks(self.pack, self.unpack)
        try:
            with self.forward_context:
                result = self.function(*args, **kwargs)
                self.complete = True
        finally:
            pop_saved_tensors_hooks()
        if not self.complete:
            raise suppressed_failure()
        self.ambient.check_after_forward()
        return result

    def pack(self, tensor: torch.Tensor) -> Slot:
        """Forward: give autograd a slot instead of the tensor."""
        slot = Slot((tensor.shape, tensor.dtype, tensor.device))
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: Slot) -> torch.Tensor:
        """Backward: give autograd the tensor that belongs to a slot."""
        task = current_graph_task_id()
        if task == -1:
            return self._peek(slot)
        # group/at-most-once: inside a group all passes count as one.
        wanted_by = current_group() or task
        if wanted_by not in slot.recomputed:
            with self.lock:  # a pass may run on several device threads
                if wanted_by not in self.recomputed_for:
                    if wanted_by is task:
                        at_end_of_backward(
                            functools.partial(_forget_task, weakref.ref(self), wanted_by)
                        )
                    self.recompute(wanted_by)
            if wanted_by not in slot.recomputed:
                raise consumed_error()
        return slot.recomputed.pop(wanted_by)

    def _peek(self, slot: Slot) -> torch.Tensor:
        """Someone reads a saved tensor outside any backward pass, as ``grad_fn._saved_self``."""
        reader = object()
        with self.lock:
            self.recompute(reader)
            tensor = slot.recomputed.pop(reader)
            self.forget(reader)
        return tensor

    def forget(self, wanted_by: object) -> None:
        """Drop what was recomputed for a backward pass and was not taken."""
        self.recomputed_for.discard(wanted_by)
        for reference in self.slots:
            slot = reference()
            if slot is not None:
                slot.recomputed.pop(wanted_by, None)

    def recompute(self, wanted_by: object) -> None:
        """Run the function again and fill the slots that are still alive."""
        args, kwargs = self.arguments.restore()
        self.recomputed_for.add(wanted_by)
        recomputation = Recomputation(self, wanted_by)
        try:
            self.ambient.replay(lambda: recomputation.run(args, kwargs))
            recomputation.check()
        except BaseException:
            self.forget(wanted_by)
            raise


class Recomputation:
    """One run of a region's function for the sake of the tensors it saves."""

    __slots__ = ("last_needed", "mismatches", "position", "region", "saved_in_forward", "wanted_by")

    def __init__(self, region: Region, wanted_by: object) -> None:
        self.region = region
        self.wanted_by = wanted_by
        self.position = 0
        # early-stop/needed-only: what autograd has released already is not needed.
        self.saved_in_forward = len(region.slots)
        self.last_needed = self.saved_in_forward - 1
        while self.last_needed > 0 and region.slots[self.last_needed]() is None:
            self.last_needed -= 1
        self.mismatches: list[tuple[int, Metadata, Metadata]] = []

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Call the function until it returns or everything needed is there."""
        region = self.region
        surrounding = torch.is_grad_enabled()
        push_saved_tensors_hooks(self.pack, _return_unchanged)
        try:
            set_grad_enabled(True)
            with region.recompute_context:
                try:
                    region.function(*args, **kwargs)
                except StopRecomputation as stop:
                    if stop.args[0] is not self:
                        raise
                except Exception:
                    # A function that answers the stop with its own error has done its work.
                    if not self.stopped():
                        raise
        finally:
            set_grad_enabled(surrounding)
            pop_saved_tensors_hooks()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a recomputed tensor into its slot, if that is still alive."""
        position = self.position
        self.position = position + 1
        kept = _without_graph(tensor)
        if position < self.saved_in_forward:
            slot = self.region.slots[position]()
            if slot is not None:
                if self.region.compare_metadata:
                    metadata = (tensor.shape, tensor.dtype, tensor.device)
                    if metadata != slot.metadata:
                        self.mismatches.append((position, slot.metadata, metadata))
                slot.recomputed[self.wanted_by] = kept
        if position >= self.last_needed and self.region.early_stop:
            raise StopRecomputation(self)
        return kept

    def stopped(self) -> bool:
        """Whether the function was, or could have been, left early: everything needed is there."""
        return self.region.early_stop and self.position > self.last_needed

    def check(self) -> None:
        """Raise CheckpointError unless the run gave back what the forward had saved."""
        region = self.region
        too_many = self.position > self.saved_in_forward and region.complete
        if self.mismatches:
            error = metadata_error(self.mismatches)
        elif not self.stopped() and (self.position < self.saved_in_forward or too_many):
            error = count_error(self.saved_in_forward, self.position)
        else:
            return
        raise with_traces(error, region.forward_context, region.recompute_context)


def suppressed_failure() -> RuntimeError:
    """Build the error for a forward context that swallowed the function's exception."""
    return RuntimeError(
        "The forward context from context_fn suppressed an exception of the checkpointed function, "
        "so there is no result to return."
    )


def user_hooks_in_force() -> Hooks | None:
    """Return the user's saved-tensor hooks that surround this place, looking through regions."""
    hooks = saved_tensors_hooks_in_force()
    owner = _owner(hooks)
    if owner is None:
        return hooks
    return owner.user_hooks if isinstance(owner, Region) else None


def current_region() -> Region | None:
    """Return the region whose forward pass is running, if its hooks are the innermost ones."""
    owner = _owner(saved_tensors_hooks_in_force())
    return owner if isinstance(owner, Region) else None


def _owner(hooks: Hooks | None) -> Region | Recomputation | None:
    """Return whose hooks these are, None for no hooks and for a user's."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, (Region, Recomputation)) else None


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it can never get a graph of its own, else a detached alias.

    Keeping a tensor that has, or gets, a graph which leads back here would be a cycle through
    autograd that no garbage collector sees.
    """
    if tensor.is_leaf and (tensor.requires_grad or type(tensor) is torch.nn.Parameter):
        return tensor
    return detach(tensor)


def _return_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forget_task(reference: weakref.ref[Region], task: object) -> None:
    region = reference()
    if region is not None:
        region.forget(task)
