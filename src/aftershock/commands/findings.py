"""What the doctor says: one thing that was looked at, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["supported", "approximated", "refused", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what it means for an answer."""

    subject: str
    level: Level
    text: str
