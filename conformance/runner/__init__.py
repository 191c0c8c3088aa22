"""Runs the suite against candidates: processes, results as they come, verdicts."""

from conformance.runner.describe import describe_candidate
from conformance.runner.session import Settings, run_candidate

__all__ = ["Settings", "describe_candidate", "run_candidate"]
