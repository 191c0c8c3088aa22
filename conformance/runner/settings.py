"""What a user chose for a run, and how it is kept for a resumed one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conformance._files import write_atomically
from conformance.errors import UsageError

FILE = "run.json"


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    ``time_limit`` is in seconds, for one test. ``memory_limit`` is in MiB, for one worker, on top
    of what it has when its first test begins; None sets no limit. ``shard`` is (I, N): the I-th
    of N parts, counted from 1.
    """

    edition: str
    budget: str
    out: Path
    clauses: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    level: str = "must"
    expectations: str = "auto"
    seed: int = 0
    workers: int = 2
    time_limit: float = 60.0
    memory_limit: int | None = None
    fail_fast: bool = False
    device: str = "cpu"
    shard: tuple[int, int] | None = None


def save_header(
    directory: Path, settings: Settings, described: dict[str, Any], started: str, digest: str
) -> None:
    """Keep what a resumed run needs; written before the first test."""
    header = {
        "settings": asdict(settings) | {"out": str(settings.out)},
        "described": described,
        "started": started,
        "digest": digest,
    }
    write_atomically(directory / FILE, json.dumps(header, indent=1) + "\n")


def load_header(directory: Path) -> tuple[Settings, dict[str, Any], str, str]:
    """Settings, candidate, start and specification digest of the run in ``directory``.

    Raises UsageError where there is none or it is damaged.
    """
    path = directory / FILE
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        kept = header["settings"]
        known = {field.name for field in fields(Settings)}
        if set(kept) != known:
            raise UsageError(f"{path}: written by another version of the suite")
        for name in ("clauses", "profiles", "shard"):
            if kept[name] is not None:
                kept[name] = tuple(kept[name])
        settings = Settings(**kept | {"out": directory})
        return settings, header["described"], header["started"], header["digest"]
    except FileNotFoundError:
        raise UsageError(f"{directory} holds no run to resume") from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UsageError(f"{path}: damaged: {problem}") from None
