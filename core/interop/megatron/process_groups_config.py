"""Megatron's collection of process groups, read off the current state."""

from dataclasses import dataclass
from typing import Any

from core.interop.megatron.absent import absent_names
from core.parallel_state import current_state
from core.parallel_state.collectives.groups import is_initialized


@dataclass(frozen=True)
class ProcessGroupCollection:
    """torch's groups by axis; None without torch.distributed."""

    tp: Any = None
    pp: Any = None
    cp: Any = None
    dp: Any = None
    dp_cp: Any = None
    ep: Any = None

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: list[str] | None = None
    ) -> "ProcessGroupCollection":
        """Those of the current state."""
        names = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "ep": "ep"}
        if not is_initialized():
            return cls()
        ps = current_state()
        return cls(**{field: ps.torch_group(name).process_group for field, name in names.items()})


__getattr__ = absent_names(__name__)
