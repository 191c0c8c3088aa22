"""What can be seen of a checkpoint from outside: runs and phases, operators, saved tensors, live
storages, ambient state, warnings. Uses public autograd and torch APIs only, and never the
candidate's internals."""

from conformance.observe.ambient import AmbientState
from conformance.observe.calls import Recorder, Run
from conformance.observe.compare import (
    Outcome,
    assert_equivalent,
    assert_same,
    gradients,
    observe_program,
)
from conformance.observe.noise import caught_warnings
from conformance.observe.operators import OperatorLog
from conformance.observe.saved import PackLog
from conformance.observe.storages import LiveStorages

__all__ = [
    "AmbientState",
    "LiveStorages",
    "OperatorLog",
    "Outcome",
    "PackLog",
    "Recorder",
    "Run",
    "assert_equivalent",
    "assert_same",
    "caught_warnings",
    "gradients",
    "observe_program",
]
