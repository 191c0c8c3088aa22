"""Activation checkpointing for PyTorch, written to be read: the specification's second half.

Every public name of ``torch.utils.checkpoint`` at documentation edition 2.14, on torch 2.11 and
later. It imports torch and the standard library, nothing else. One concept a file, in the order
of the specification's chapters; a good order to read them in:

========================  ========================================================================
`calling`, `options`      the direct call, the decorator form, what each argument may be
`reentrant`               the variant that runs autograd inside one backward node
`recomputation`           the other variant: the region, what it saves, how it is run again
`early_stop`              where a recomputation ends
`determinism`             what is compared between the two runs, and the error that says so
`debug`                   the operators of both runs, for the error message
`ambient`                 random state, autocast and default device, replayed
`selective`               operators whose results are kept instead of recomputed
`graph_exec_group`        several backward calls that share one recomputation
`sequential`              the helper for models that are lists of layers
`device_states`           random state of accelerators
`warn`                    warnings that point at the user's line
`torch_private`           every private torch name used here, each with its reason
========================  ========================================================================
"""

from reference_impl.calling import checkpoint
from reference_impl.debug import set_checkpoint_debug_enabled
from reference_impl.determinism import CheckpointError
from reference_impl.device_states import (
    DefaultDeviceType,
    get_device_states,
    set_device_states,
)
from reference_impl.early_stop import set_checkpoint_early_stop
from reference_impl.graph_exec_group import GraphExecGroup
from reference_impl.options import noop_context_fn
from reference_impl.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from reference_impl.selective import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from reference_impl.sequential import checkpoint_sequential

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
