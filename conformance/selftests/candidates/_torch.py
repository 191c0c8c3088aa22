"""All public names of torch's own implementation, for adapters that change one thing of it."""

from torch.utils.checkpoint import (  # noqa: F401
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)
