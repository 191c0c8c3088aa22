"""What a candidate has, as plain data that travels between processes. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Capabilities:
    """What was found: ``profiles`` and ``variants`` map a name to None (present) or to the reason
    why it is missing; ``declared`` is what the adapter itself says it lacks."""

    profiles: dict[str, str | None] = field(default_factory=dict)
    variants: dict[str, str | None] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)

    def missing(self, profile: str, variant: str = "any") -> str | None:
        """Why a clause of ``profile`` and ``variant`` cannot be graded, or None if it can."""
        if profile in self.declared:
            return f"declared unsupported: {self.declared[profile]}"
        if (reason := self.profiles.get(profile)) is not None:
            return reason
        if variant == "any":
            return None
        if variant in self.declared:
            return f"declared unsupported: {self.declared[variant]}"
        return self.variants.get(variant)

    def as_dict(self) -> dict[str, Any]:
        """As plain data; ``Capabilities(**data)`` reads it back."""
        return asdict(self)
