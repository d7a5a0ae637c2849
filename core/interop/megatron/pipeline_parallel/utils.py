"""Whether a rank is at an end of its pipeline."""

from typing import Any


def is_pp_first_stage(pp_group: Any) -> bool:
    """Whether this process is the group's first."""
    return pp_group.rank() == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    """Whether this process is the group's last."""
    return pp_group.rank() == pp_group.size() - 1
