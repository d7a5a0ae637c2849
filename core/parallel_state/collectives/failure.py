"""The first failure of a job, told to all through the rendezvous store, which needs no working group."""

from torch.distributed import distributed_c10d as c10d

from core.parallel_state.collectives.groups import is_initialized


def first_failure(key: str, text: str) -> str:
    """Publish `text` unless somebody has published a failure under `key` before; returns the first one's.

    Told before this rank leaves its groups, so whoever fails because of that finds the cause here. Falls back
    to `text` where the store is gone (the rank that hosted it has ended).
    """
    if not is_initialized():
        return text
    try:
        return c10d._get_default_store().compare_set(f"paracore/failure/{key}", "", text).decode()
    except RuntimeError:  # torch.distributed.DistError and its kin
        return text
