"""torch.optim.Muon for the hidden matrices, AdamW for the rest, where every rank holds whole matrices."""

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import Given, adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays, ParameterPiece, default_decays
from core.optimizer.state.kernels import Factor, adamw
from core.optimizer.state.parts import StateBuffer
from core.parallel_state.layout import Layout, layout_of
from core.parallel_state.modules import modules_of, named_parameters, named_stacks

# the layer that outputs logits, where no module says so itself
OUTPUT = re.compile(
    r"(^|\.)(output_layer|lm_head|embed_out|head|heads|classifier|score|fc_out|proj_out|logits)(\.|$)"
)


class ShardedMuon(ShardedOptimizer):
    """Muon orthogonalises the momentum of whole matrices; the rest is AdamW's.

    Convolutions are matrices [out, in * kernel]; a parameter of three or more dims elsewhere is a stack of matrices
    (experts [E, out, in]). The learning rate is scaled as `OptimizerConfig.muon_lr` says.

    Hidden matrices: of at least two dims, no bias, of no embedding and no output layer. Our models say by `stacks`
    which layers are hidden; of others the output layer is what `get_output_embeddings` gives, a known name, or else
    the last linear layer, and what goes to AdamW is told, once. hidden(name, layout) says it instead.
    Waits for an accelerator once a step. Raises ValueError: zero_stage or tensor parallelism that cuts matrices.
    """

    kernel = staticmethod(adamw)

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        groups: Given = (),
        hidden: Decays | None = None,
    ) -> None:
        tensor = shard.ps.size("tp")
        if shard.zero_stage or tensor > 1:
            raise ValueError(
                f"Muon orthogonalises whole matrices, but zero_stage={shard.zero_stage} and tensor={tensor} may cut "
                "them; use zero_stage=0 and tensor=1, or optimizer='adamw'"
            )
        if not config.main_params:
            raise ValueError("Muon updates main parameters, but main_params=False; use main_params=True")
        self._convolutions = _of_kind(shard, nn.modules.conv._ConvNd)
        self._hidden = {name for name in _matrices(shard, hidden)}
        super().__init__(shard, config, decays=decays, groups=groups)
        self._matrices = self._build()
        self._inner = self._torchs() if self._matrices else None

    def hidden(self, name: str, layout: Layout) -> bool:
        """Whether Muon updates it."""
        return name in self._hidden

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """AdamW's, and Muon's momentum."""
        return adamw_options(config) | {"momentum": config.first_momentum}

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """momentum_buffer of hidden matrices, both moments of others."""
        return ("momentum_buffer",) if self.hidden(name, layout) else ("exp_avg", "exp_avg_sq")

    def fused(self, name: str, layout: Layout) -> bool:
        """All but hidden matrices."""
        return not self.hidden(name, layout)

    def _as_matrices(self, flat: Tensor, piece: ParameterPiece) -> list[Tensor]:
        """A parameter's elements as the matrices that are orthogonalised."""
        shape = tuple(piece.parameter.shape)
        if piece.name in self._convolutions:
            return [flat.view(shape[0], -1)]
        return list(flat.view(-1, *shape[-2:]).unbind())

    def _build(self) -> list[tuple[list[Tensor], StateBuffer, ParameterPiece]]:
        found = []
        for part in self._parts:
            for piece in part.pieces:
                if piece.name in self._hidden:
                    main = part.updated
                    assert main is not None
                    found.append((self._as_matrices(main[slice(*piece.at)], piece), part, piece))
        return found

    def _torchs(self) -> torch.optim.Muon:
        """torch's own on views of the mains, a group per parameter, with states that lie in the parts."""
        groups = [{"params": matrices} for matrices, _, _ in self._matrices]
        inner = torch.optim.Muon(groups, lr=0.0, adjust_lr_fn=self.config.muon_lr)
        for matrices, part, piece in self._matrices:
            momenta = self._as_matrices(part.states["momentum_buffer"][slice(*piece.at)], piece)
            for matrix, momentum in zip(matrices, momenta, strict=True):
                inner.state[matrix]["momentum_buffer"] = momentum
        return inner

    def update_rest(self, factor: Factor) -> None:
        """Muon's step on the hidden matrices; one wait for `found_inf`, which torch's Muon does not know."""
        if self._inner is None or factor.found_inf.item():
            return
        scale = factor.divisor.reciprocal()
        for group, (matrices, part, piece) in zip(self._inner.param_groups, self._matrices, strict=True):
            number = self._groups.of[piece.name]
            options = self.param_groups[number]
            decays = number in self._groups.decays_all or self._decays(piece.name, piece.layout)
            group.update(lr=options["lr"], momentum=options["momentum"])
            group["weight_decay"] = options["weight_decay"] if decays else 0.0
            if piece.name in self._reached.left_out:
                continue
            gradient = part.gradients[slice(*piece.at)].to(matrices[0].dtype) * scale.to(matrices[0].dtype)
            for matrix, its in zip(matrices, self._as_matrices(gradient, piece), strict=True):
                matrix.grad = its
        try:
            self._inner.step()
        finally:
            self._inner.zero_grad()


def _of_kind(shard: DataParallel, *kinds: type[nn.Module]) -> set[str]:
    """Names of the parameters that modules of these kinds hold themselves."""
    held = {
        id(p)
        for stage in modules_of(shard.module).values()
        for module in stage.modules()
        if isinstance(module, kinds)
        for p in module.parameters(recurse=False)
    }
    return {name for name, p in shard.named_parameters().items() if id(p) in held}


def _outputs(shard: DataParallel, candidates: dict[str, Parameter]) -> set[str]:
    """Of the candidates, those of the layer that outputs logits."""
    said = {
        id(p)
        for stage in modules_of(shard.module).values()
        for module in stage.modules()
        if callable(ask := getattr(module, "get_output_embeddings", None)) and (head := ask()) is not None
        for p in head.parameters()
    }
    found = {name for name, p in candidates.items() if id(p) in said or OUTPUT.search(name)}
    if not found and candidates:
        order = [name for name, _ in named_parameters(shard.module) if name in candidates]
        found = {order[-1]}
    return found


def _matrices(shard: DataParallel, hidden: Decays | None) -> set[str]:
    """The names of hidden matrices; tells which matrices are not, unless the model or `hidden` has said so."""
    named = shard.named_parameters()
    wide = {name: p for name, p in named.items() if default_decays(name, layout_of(p))}
    if hidden is not None:
        return {name for name, p in wide.items() if hidden(name, layout_of(p))}
    tables = _of_kind(shard, nn.Embedding, nn.EmbeddingBag)
    if stacks := tuple(f"{name}." for name in named_stacks(shard.module)):
        return {name for name in wide if name.startswith(stacks) and name not in tables}
    rest = {name: p for name, p in wide.items() if name not in tables}
    outputs = _outputs(shard, rest)
    if aside := sorted((tables & wide.keys()) | outputs):
        warnings.warn(
            f"ShardedMuon: AdamW updates {', '.join(aside)} (embeddings and the output layer) and what has one dim; "
            f"Muon the other {len(wide) - len(aside)} matrices; hidden=lambda name, layout: ... says it otherwise",
            stacklevel=4,
        )
    return set(rest) - outputs
