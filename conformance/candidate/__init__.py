"""The implementation under test: how it is found, what it has, what it declares."""

from conformance.candidate.load import Candidate, NotProvided, load_candidate
from conformance.candidate.probe import Capabilities, probe

__all__ = ["Candidate", "Capabilities", "NotProvided", "load_candidate", "probe"]
