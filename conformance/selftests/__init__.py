"""The suite's tests of itself: candidates with known faults, and their verdicts."""
