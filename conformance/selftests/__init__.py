"""The suite's tests of itself: small candidates with known faults, and what must be said of them."""
