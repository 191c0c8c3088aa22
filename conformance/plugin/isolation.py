"""Puts the process into a known state before each test and back after it, whatever the candidate
did to it: random streams, grad mode, autocast, default dtype and device, modes and hooks left
active, threads, warning filters, standard streams, working directory."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import warnings
import zlib
from collections.abc import Iterator

import torch

from conformance.observe.ambient import AmbientState
from conformance.plugin.leftovers import Leftovers
from conformance.plugin.loggers import quiet_loggers

_MAX_LEFT = 64  # More contexts than this are never left open by one test.


class Isolation:
    """Remembers the process as it was before the first test."""

    def __init__(self, seed: int, *, silence: bool) -> None:
        self.seed = seed
        self.silence = silence
        self.threads = torch.get_num_threads()
        self.directory = os.getcwd()
        self.leftovers = Leftovers()

    @contextlib.contextmanager
    def around(self, name: str, left: list[str]) -> Iterator[None]:
        """Run one test in the known state; append to ``left`` what it left behind."""
        self._seed(name)
        before = AmbientState.capture()
        with warnings.catch_warnings(), _streams(self.silence), quiet_loggers():
            try:
                yield
            finally:
                after = AmbientState.capture()
                left.extend(sorted(before.difference(after, ignore=("rng", "python_rng"))))
                self._reset(before)
                left.extend(self.leftovers.undo())

    def _seed(self, name: str) -> None:
        # A seed of its own for each test: its verdict cannot depend on the tests before it.
        seed = zlib.crc32(f"{self.seed}:{name}".encode())
        torch.manual_seed(seed)
        random.seed(seed)

    def _reset(self, before: AmbientState) -> None:
        while torch._C._len_torch_dispatch_stack() > before.dispatch_modes:
            torch._C._pop_torch_dispatch_stack()
        while torch._C._len_torch_function_stack() > before.function_modes:
            torch._C._pop_torch_function_stack()
        torch.set_default_device(None)
        for _ in range(_MAX_LEFT):
            if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
                break
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if torch.is_inference_mode_enabled():
            # The guard works as long as it lives.
            self.inference_guard = torch._C._InferenceMode(False)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        for device, enabled, _ in before.autocast:
            torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)
        torch.clear_autocast_cache()
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        gc.enable()


@contextlib.contextmanager
def _streams(silence: bool) -> Iterator[None]:
    """Put back the standard streams, whatever is closed or replaced meanwhile.

    With ``silence`` the block has streams of its own that go nowhere, down to the file
    descriptors, so that closing them harms nobody.
    """
    kept = sys.stdout, sys.stderr
    if not silence:
        try:
            yield
        finally:
            sys.stdout, sys.stderr = kept
        return
    saved = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    with open(os.devnull, "w") as out, open(os.devnull, "w") as err:
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            sys.stdout, sys.stderr = kept
            for descriptor, original in enumerate(saved, 1):
                os.dup2(original, descriptor)
                os.close(original)


def describe(left: list[str]) -> str:
    """One phrase for a report, such as ``left behind: autocast, grad_enabled``."""
    return f"left behind: {', '.join(left)}" if left else ""
