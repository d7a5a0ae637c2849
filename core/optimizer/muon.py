"""torch.optim.Muon for the hidden matrices, AdamW for the rest, where every rank holds whole matrices."""

import re

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.flat_shard import Decays, default_decays
from core.optimizer.kernels import Factor, Kernel, adamw
from core.optimizer.parts import Part
from core.optimizer.sharded import ShardedOptimizer
from core.parallel_state.layout import Layout
from core.parallel_state.modules import named_stacks

OUTER = re.compile(r"embed|wte|wpe|output_layer|lm_head")  # in models that do not name their stacks of layers


class ShardedMuon(ShardedOptimizer):
    """Muon orthogonalises the momentum of whole matrices; weights of more dims are taken as [all but the last, last].

    Hidden matrices: at least two dims, no bias, in one of the model's stacks of layers; in a model without stacks,
    those whose names do not look like an embedding or an output. The learning rate is scaled by 0.2 sqrt(max(rows,
    columns)), so that one rate serves AdamW's parameters too. Waits for an accelerator once a step.

    Raises ValueError: zero_stage or tensor parallelism that cuts matrices.
    """

    def __init__(self, shard: DataParallel, config: OptimizerConfig, *, decays: Decays | None = None) -> None:
        tensor = shard.ps.size("tp")
        if shard.zero_stage or tensor > 1:
            raise ValueError(
                f"Muon orthogonalises whole matrices, but zero_stage={shard.zero_stage} and tensor={tensor} may cut "
                "them; use zero_stage=0 and tensor=1, or optimizer='adamw'"
            )
        if not config.main_params:
            raise ValueError("Muon updates main parameters, but main_params=False; use main_params=True")
        self._stacks = tuple(f"{name}." for name in named_stacks(shard.module))
        super().__init__(shard, config, decays=decays)
        self._inner, self._matrices = self._build(decays if decays is not None else default_decays)

    def hidden(self, name: str, layout: Layout) -> bool:
        """Whether Muon updates it."""
        inside = name.startswith(self._stacks) if self._stacks else OUTER.search(name) is None
        return inside and default_decays(name, layout)

    def kernel(self, config: OptimizerConfig) -> Kernel:
        """AdamW's, for the rest."""
        return adamw(config)

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """momentum_buffer of hidden matrices, both moments of others."""
        return ("momentum_buffer",) if self.hidden(name, layout) else ("exp_avg", "exp_avg_sq")

    def fused(self, name: str, layout: Layout) -> bool:
        """All but hidden matrices."""
        return not self.hidden(name, layout)

    def _build(self, decays: Decays) -> tuple[torch.optim.Muon | None, list[tuple[Tensor, Part, slice]]]:
        matrices, groups = [], []
        for part in self._parts:
            for piece in part.pieces:
                if not self.hidden(piece.name, piece.layout):
                    continue
                main, at = part.updated, slice(*piece.at)
                assert main is not None
                matrix = main[at].view(-1, piece.layout.shape[-1])
                decay = self.config.weight_decay if decays(piece.name, piece.layout) else 0.0
                groups.append({"params": [matrix], "weight_decay": decay})
                matrices.append((matrix, part, at))
        if not groups:
            return None, []
        momentum = self.config.momentum
        inner = torch.optim.Muon(groups, lr=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        for matrix, part, at in matrices:
            inner.state[matrix]["momentum_buffer"] = part.states["momentum_buffer"][at].view_as(matrix)
        return inner, matrices

    def update_rest(self, factor: Factor) -> None:
        """Muon's step on the hidden matrices; one wait for `found_inf`, which torch's Muon does not know."""
        if self._inner is None or factor.found_inf.item():
            return
        for group in self._inner.param_groups:
            group["lr"] = factor.rate
        scale = factor.divisor.reciprocal()
        for matrix, part, at in self._matrices:
            matrix.grad = (part.gradients[at].to(matrix.dtype) * scale.to(matrix.dtype)).view_as(matrix)
        try:
            self._inner.step()
        finally:
            for matrix, _, _ in self._matrices:
                matrix.grad = None
