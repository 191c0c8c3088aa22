"""The suite's tests, one file per chapter of the specification."""
