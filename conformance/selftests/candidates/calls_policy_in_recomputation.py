"""Asks the policy again, with ``is_recompute=True``, whenever a region is recomputed."""

from torch.utils._python_dispatch import TorchDispatchMode

from conformance.selftests.candidates import _torch
from conformance.selftests.candidates._torch import *  # noqa: F403


class _Asks(TorchDispatchMode):
    def __init__(self, policy, inner):
        super().__init__()
        self.policy, self.inner = policy, inner

    def __enter__(self):
        self.inner.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        return self.inner.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in _torch.SAC_IGNORED_OPS:
            context = _torch.SelectiveCheckpointContext(is_recompute=True)
            self.policy(context, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation=False):
    forward, recompute = _torch.create_selective_checkpoint_contexts(
        policy_fn_or_list, allow_cache_entry_mutation
    )
    if isinstance(policy_fn_or_list, list):
        return forward, recompute
    return forward, _Asks(policy_fn_or_list, recompute)
