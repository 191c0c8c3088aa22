"""Does to its host what a candidate under development may do, in chosen tests.

``CONFORMANCE_MISBEHAVIOURS`` is a JSON object from the name of a test function to the name of one
of the functions below; in that test every call of ``checkpoint`` begins with it.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

import torch

from conformance.selftests.candidates import _torch
from conformance.selftests.candidates._torch import *  # noqa: F403


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def os_exit():
    os._exit(7)


def system_exit():
    raise SystemExit(5)


def keyboard_interrupt():
    raise KeyboardInterrupt


def base_exception():
    raise BaseException("neither Exception nor exit")


def recurse_for_ever():
    recurse_for_ever()


def sleep_for_ever():
    time.sleep(3600)


def hang_in_native_code():
    # PyDLL keeps the interpreter lock, and no signal ends the wait for a mutex.
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def exhaust_memory():
    kept = []
    while True:
        kept.append(torch.empty(64, 1024, 1024))


def close_stdout():
    sys.stdout.close()
    with contextlib.suppress(OSError):
        os.close(1)


def replace_stdout():
    sys.stdout = None
    sys.stderr = None


def monkeypatch_torch():
    torch.Tensor.backward = None
    torch.sin = None


def seed_and_leave_state():
    torch.manual_seed(0)
    torch.set_autocast_enabled("cpu", True)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.overrides.BaseTorchFunctionMode().__enter__()
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()
    torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()


def endless_thread():
    threading.Thread(target=time.sleep, args=(3600,)).start()


def spawn_children():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


_CHOSEN = json.loads(os.environ.get("CONFORMANCE_MISBEHAVIOURS", "{}"))


def checkpoint(function=None, *args, **kwargs):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].split("[")[0].split(" ")[0]
    if test in _CHOSEN:
        globals()[_CHOSEN[test]]()
    if function is None:
        return _torch.checkpoint(*args, **kwargs)
    return _torch.checkpoint(function, *args, **kwargs)
