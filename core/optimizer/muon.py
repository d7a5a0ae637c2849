"""torch.optim.Muon for the hidden matrices, AdamW for the rest, where every rank holds full matrices.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; at scale arXiv 2502.16982): the momentum
M = mu * M + G of a weight matrix is replaced by the nearest orthogonal matrix, U V^T of its singular value
decomposition M = U S V^T, which five Newton-Schulz iterations approximate with matrix products only.
"""

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions, adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays, ParameterShard, default_decays
from core.optimizer.state.kernels import Factor, adamw
from core.optimizer.state.state_buffers import StateBuffer
from core.parallel_state.layout import Layout, layout_of
from core.parallel_state.modules import modules_of, named_parameters, named_stacks

# the layer that outputs logits, where no module says so itself
OUTPUT_NAME = re.compile(
    r"(^|\.)(output_layer|lm_head|embed_out|head|heads|classifier|score|fc_out|proj_out|logits)(\.|$)"
)


class ShardedMuon(ShardedOptimizer):
    """Muon orthogonalises the momentum of full matrices; the rest is AdamW's.

    Convolutions are matrices [out, in * kernel]; a parameter of three or more dims elsewhere is a stack of matrices
    (experts [E, out, in]). The learning rate is scaled as `OptimizerConfig.muon_lr` says.

    Hidden matrices: of at least two dims, no bias, of no embedding and no output layer. Our models state by `stacks`
    which layers are hidden; of others the output layer is what `get_output_embeddings` gives, a known name, or else
    the last linear layer, and a warning names, once, what goes to AdamW. hidden(name, layout) decides it instead.
    Waits for an accelerator once a step. Raises ValueError: zero_stage or tensor parallelism that cuts matrices.
    """

    kernel = staticmethod(adamw)

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        *,
        decays: Decays | None = None,
        groups: GroupOptions = (),
        hidden: Decays | None = None,
    ) -> None:
        tensor = shard.ps.size("tp")
        if shard.zero_stage or tensor > 1:
            raise ValueError(
                f"Muon orthogonalises whole matrices, but zero_stage={shard.zero_stage} and tensor={tensor} may cut "
                "them; use zero_stage=0 and tensor=1, or optimizer='adamw'"
            )
        if not config.main_params:
            raise ValueError(
                "Muon updates main parameters, but main_params=False; use main_params=True"
            )
        self._convolutions = _parameters_of_kind(shard, nn.modules.conv._ConvNd)
        self._hidden = _hidden_matrices(shard, hidden)
        super().__init__(shard, config, decays=decays, groups=groups)
        self._matrices = self._collect_matrices()
        self._inner = self._build_muon() if self._matrices else None

    def hidden(self, name: str, layout: Layout) -> bool:
        """Whether Muon updates it."""
        return name in self._hidden

    def options(self, config: OptimizerConfig) -> dict[str, Any]:
        """AdamW's, and Muon's momentum."""
        return adamw_options(config) | {"momentum": config.first_momentum}

    def kinds_of(self, name: str, layout: Layout) -> tuple[str, ...]:
        """momentum_buffer of hidden matrices, Adam's two moments of others."""
        if self.hidden(name, layout):
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq")

    def fused(self, name: str, layout: Layout) -> bool:
        """All but hidden matrices."""
        return not self.hidden(name, layout)

    def _as_matrices(self, flat: Tensor, shard: ParameterShard) -> list[Tensor]:
        """A parameter's elements as the matrices that are orthogonalised, as views."""
        shape = tuple(shard.parameter.shape)
        if shard.name in self._convolutions:
            return [flat.view(shape[0], -1)]
        return list(flat.view(-1, *shape[-2:]).unbind())

    def _collect_matrices(self) -> list[tuple[list[Tensor], StateBuffer, ParameterShard]]:
        collected = []
        for state_buffer in self._state_buffers:
            for shard in state_buffer.parameter_shards:
                if shard.name in self._hidden:
                    main = state_buffer.updated
                    assert main is not None
                    matrices = self._as_matrices(main[slice(*shard.span)], shard)
                    collected.append((matrices, state_buffer, shard))
        return collected

    def _build_muon(self) -> torch.optim.Muon:
        """torch's own, on views of the main weights, a group per parameter; its states lie in our state buffers."""
        groups = [{"params": matrices} for matrices, _, _ in self._matrices]
        inner = torch.optim.Muon(groups, lr=0.0, adjust_lr_fn=self.config.muon_lr)
        for matrices, state_buffer, shard in self._matrices:
            momenta = self._as_matrices(
                state_buffer.states["momentum_buffer"][slice(*shard.span)], shard
            )
            for matrix, momentum in zip(matrices, momenta, strict=True):
                inner.state[matrix]["momentum_buffer"] = momentum
        return inner

    def update_rest(self, factor: Factor) -> None:
        """Muon's step on the hidden matrices; one wait for `found_inf`, which torch's Muon does not take."""
        if self._inner is None or factor.found_inf.item():
            return
        scale = factor.divisor.reciprocal()
        for muon_group, (matrices, state_buffer, shard) in zip(
            self._inner.param_groups, self._matrices, strict=True
        ):
            number = self._groups.number_of[shard.name]
            options = self.param_groups[number]
            decays = number in self._groups.decay_everything or self._decays(
                shard.name, shard.layout
            )
            muon_group.update(lr=options["lr"], momentum=options["momentum"])
            muon_group["weight_decay"] = options["weight_decay"] if decays else 0.0
            if shard.name in self._reached.left_out:
                # grad stays None, so torch leaves its matrices out
                continue
            dtype = matrices[0].dtype
            gradient = state_buffer.gradients[slice(*shard.span)].to(dtype) * scale.to(dtype)
            for matrix, matrix_gradient in zip(
                matrices, self._as_matrices(gradient, shard), strict=True
            ):
                matrix.grad = matrix_gradient
        try:
            self._inner.step()
        finally:
            self._inner.zero_grad()


def _parameters_of_kind(shard: DataParallel, *kinds: type[nn.Module]) -> set[str]:
    """Names of the parameters that modules of these kinds hold themselves."""
    ids: set[int] = set()
    for stage in modules_of(shard.module).values():
        for module in stage.modules():
            if isinstance(module, kinds):
                ids.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {name for name, parameter in shard.named_parameters().items() if id(parameter) in ids}


def _output_layer(shard: DataParallel, candidates: dict[str, Parameter]) -> set[str]:
    """Of the candidates, those of the layer that outputs logits."""
    stated_ids: set[int] = set()
    for stage in modules_of(shard.module).values():
        for module in stage.modules():
            # transformers' models have it
            get_output_embeddings = getattr(module, "get_output_embeddings", None)
            head = None
            if callable(get_output_embeddings):
                head = get_output_embeddings()
            if head is not None:
                stated_ids.update(id(parameter) for parameter in head.parameters())
    outputs = {
        name for name, p in candidates.items() if id(p) in stated_ids or OUTPUT_NAME.search(name)
    }
    if not outputs and candidates:
        in_order = [name for name, _ in named_parameters(shard.module) if name in candidates]
        # by convention the last layer outputs logits
        outputs = {in_order[-1]}
    return outputs


def _hidden_matrices(shard: DataParallel, hidden: Decays | None) -> set[str]:
    """Names of hidden matrices; warns which matrices are not, unless the model or `hidden` has decided."""
    named = shard.named_parameters()
    matrices = {name: p for name, p in named.items() if default_decays(name, layout_of(p))}
    if hidden is not None:
        return {name for name, p in matrices.items() if hidden(name, layout_of(p))}
    embeddings = _parameters_of_kind(shard, nn.Embedding, nn.EmbeddingBag)
    # a model of ours says itself which layers are hidden
    if stacks := tuple(f"{name}." for name in named_stacks(shard.module)):
        return {name for name in matrices if name.startswith(stacks) and name not in embeddings}
    candidates = {name: p for name, p in matrices.items() if name not in embeddings}
    outputs = _output_layer(shard, candidates)
    if for_adamw := sorted((embeddings & matrices.keys()) | outputs):
        warnings.warn(
            f"ShardedMuon: AdamW updates {', '.join(for_adamw)} (embeddings and the output layer) and what has one "
            f"dim; Muon the other {len(matrices) - len(for_adamw)} matrices; hidden=lambda name, layout: ... says it "
            "otherwise",
            stacklevel=4,
        )
    return set(candidates) - outputs
