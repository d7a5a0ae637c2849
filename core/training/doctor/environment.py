"""The machine of a run, for its report: the doctor's checks without those that take time."""

import torch

from core.training.doctor.fast_paths import attention, backends, devices, fused_adamw
from core.training.doctor.machine import machine
from core.training.doctor.packages import packages


def environment(device: torch.device) -> dict[str, str]:
    """Name -> value of every check but the compiler's and the self-test; starts no process, raises nothing."""
    checks = [
        *packages(),
        *machine(),
        devices(device),
        *backends(device),
        attention(device),
        fused_adamw(device),
    ]
    return {check.name: check.value for check in checks}
