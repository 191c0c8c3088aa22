"""The specification as data: what ``spec/`` says, without torch and without a candidate."""

from conformance.specification.load import Specification, load_specification, specification_dir
from conformance.specification.model import (
    DEFAULT_EDITION,
    EDITIONS,
    LEVELS,
    ORACLES,
    PROFILES,
    VARIANTS,
    Clause,
    Corner,
    Example,
    Paragraph,
)

__all__ = [
    "DEFAULT_EDITION",
    "EDITIONS",
    "LEVELS",
    "ORACLES",
    "PROFILES",
    "VARIANTS",
    "Clause",
    "Corner",
    "Example",
    "Paragraph",
    "Specification",
    "load_specification",
    "specification_dir",
]
