"""Every way in which the suite refuses to go on, each with the exit code it ends in."""

from __future__ import annotations

EXIT_CONFORMS = 0
EXIT_DOES_NOT_CONFORM = 1
EXIT_USAGE = 2
EXIT_CANDIDATE_NOT_LOADED = 3
EXIT_SUITE_FAILED = 4


class ConformanceError(Exception):
    """Base class; its message is one line that a user can act on."""

    exit_code = EXIT_SUITE_FAILED

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details  # shown with --debug, such as a traceback of another process


class UsageError(ConformanceError):
    """The command or its configuration is wrong."""

    exit_code = EXIT_USAGE


class SpecificationError(ConformanceError):
    """A chapter, a clause or the documentation list is malformed."""


class CandidateNotLoaded(ConformanceError):
    """The candidate could not be found, imported or used as one."""

    exit_code = EXIT_CANDIDATE_NOT_LOADED
