"""What a checkpoint holds that is no array."""

from typing import Any

from core.dist_checkpointing.publish.manifest import TAGGED
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.leaves import decode


def decoded(stored: StoredCheckpoint, key: str) -> Any:
    """A value of the checkpoint. Raises ValueError: of a type that is not registered in this program."""
    value = stored.objects[key]
    try:
        if stored.format >= TAGGED:
            return decode(value)
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{stored.directory.url}: {key}: {error}") from error
