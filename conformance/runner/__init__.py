"""Runs the suite against candidates: processes, results as they come, verdicts."""

from conformance.runner.describe import describe_candidate
from conformance.runner.session import resume_run, run_candidate
from conformance.runner.settings import Settings

__all__ = ["Settings", "describe_candidate", "resume_run", "run_candidate"]
