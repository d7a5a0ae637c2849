"""Running statistics of norms: a forward that runs a second time must not count its batch a second time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def norms_of(module: nn.Module) -> list[nn.Module]:
    """Every part that keeps running statistics (batch norms, instance norms)."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


@contextmanager
def statistics_kept(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Norms in training mode compute the same inside this context, and leave their statistics alone."""
    training = [norm for norm in norms if norm.training]
    for norm in training:
        norm.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm in training:
            norm.track_running_stats = True  # type: ignore[assignment]
