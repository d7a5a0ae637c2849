"""What a checkpoint of a program that writes a file per rank holds."""

from dataclasses import dataclass, field
from typing import Any

from core.dist_checkpointing.tools.foreign.dcp import SavedTensor


@dataclass
class ForeignCheckpoint:
    """As `Import` has it. derived: key -> how a reader gets it from another.

    settings: of a run that begins with its weights, by flat name.
    """

    version: str
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
