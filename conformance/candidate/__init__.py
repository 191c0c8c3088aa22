"""The implementation under test: how it is found, what it has, what it declares."""

from conformance.candidate.capabilities import Capabilities
from conformance.candidate.load import Candidate, NotProvided, load_candidate

__all__ = ["Candidate", "Capabilities", "NotProvided", "load_candidate"]
