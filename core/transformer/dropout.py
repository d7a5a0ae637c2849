"""Dropout whose mask is a function of (seed, step, global microbatch, layer, site), so that it can be run again."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.parallel_state import mix32, seeded
from core.transformer.spec import Build


class Dropout(nn.Module):
    """Drops with probability `p` while training. `site` tells the places of one layer apart.

    Where every tensor rank holds other elements (`sharded`: heads, sequence shards) each draws its own mask;
    replicated tensors get the same one. Context ranks hold other tokens: each has its own mask.
    """

    def __init__(self, build: Build, p: float, site: str, *, sharded: bool) -> None:
        super().__init__()
        self.p = p
        self.stage = build.stage
        # Another mask per layer, per site in the layer and, where ranks hold other elements, per tensor rank.
        self.key: tuple[int | str, ...] = (
            build.layer + 1,
            site,
            build.place.rank if sharded else 0,
        )
        if build.parallel.size("cp") > 1:
            self.key += ("context", build.parallel.index("cp"))

    def seed(self) -> int:
        """The seed of this site in the current microbatch.

        In plain use it is the seed of torch's own generator, as the model's forward began with: that travels with
        the call, as `torch.utils.checkpoint` restores it.
        """
        stage = self.stage
        if stage.drawn and not stage.driven:
            return mix32(torch.default_generator.initial_seed(), *self.key)
        stage.used_step = True
        return mix32(stage.seed, stage.step, stage.microbatch, *self.key)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        # Seeding around the call makes the mask a function of the key: recomputation draws the same one.
        with seeded(x.device, self.seed()):
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def residual_dropout(build: Build, site: str) -> Dropout:
    """Dropout of what is added to the residual stream, which sequence parallelism shards."""
    return Dropout(build, build.config.hidden_dropout, site, sharded=build.place.splits_sequence)
