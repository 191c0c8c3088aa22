"""Known faults of a candidate, as strict records."""

from conformance.expectations.load import Expectation, load_expectations, shipped_dir

__all__ = ["Expectation", "load_expectations", "shipped_dir"]
