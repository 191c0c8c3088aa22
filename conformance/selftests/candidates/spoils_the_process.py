"""Behaves, until its debug switch is touched: then it leaves everything different and raises."""

import random
import sys
import warnings

import torch

from conformance.selftests.candidates._torch import *  # noqa: F403

_kept = []


def set_checkpoint_debug_enabled(enabled=None):
    print("spoiling", file=sys.stdout)
    print("spoiling", file=sys.stderr)
    torch.manual_seed(7)
    random.seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_device("meta")
    torch.autograd.set_detect_anomaly(True)
    guard = torch.autograd.graph.saved_tensors_hooks(lambda t: 1 / 0, lambda t: t)
    guard.__enter__()
    _kept.append(guard)
    warnings.simplefilter("error")
    sys.stdout = None
    raise KeyboardInterrupt("from the candidate")
