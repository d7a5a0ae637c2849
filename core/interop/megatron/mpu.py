"""The other name of `parallel_state`."""

from typing import Any

from core.interop.megatron import parallel_state


def __getattr__(name: str) -> Any:
    return getattr(parallel_state, name)
