"""Conformance suite for implementations of activation checkpointing in PyTorch.

Importing this package loads no torch and no candidate; what needs them imports them itself.
"""

__version__ = "0.1.0"
