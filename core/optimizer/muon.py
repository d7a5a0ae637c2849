"""Muon for the hidden matrices, AdamW for the rest, however both are spread over ranks.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; at scale arXiv 2502.16982): the momentum
M = mu * M + G of a weight matrix is replaced by the nearest orthogonal matrix, U V^T of its singular value
decomposition M = U S V^T, which five Newton-Schulz iterations approximate with matrix products only.
"""

import re
import warnings
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.groups import GroupOptions, adamw_options
from core.optimizer.sharded import ShardedOptimizer
from core.optimizer.state.flat_shard import Decays, default_decays
from core.optimizer.state.kernels import Factor, adamw
from core.optimizer.state.matrices import Matrix, matrices_of, plan_rounds
from core.optimizer.state.state_buffers import StateBuffer
from core.optimizer.step.assembly import change_whole
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.layout import Layout, layout_of
from core.parallel_state.modules import modules_of, named_parameters, named_stacks

# the layer that outputs logits, where no module says so itself
OUTPUT_NAME = re.compile(
    r"(^|\.)(output_layer|lm_head|embed_out|head|heads|classifier|score|fc_out|proj_out|logits)(\.|$)"
)


class ShardedMuon(ShardedOptimizer):
    """Muon orthogonalises the momentum of full matrices; the rest is AdamW's. torch.optim.Muon's numbers.

    Convolutions are matrices [out, in * kernel]; a parameter of three or more dims elsewhere is a stack of matrices
    (experts [E, out, in]; gate and up; the query, key and value of each head). The learning rate is scaled as
    `OptimizerConfig.muon_lr` says.

    Momenta are cut as all states are. Where ZeRO or tensor ranks cut a matrix, a step sends its parts, bfloat16, to
    one rank that orthogonalises it, and brings back each rank's part: `change_whole`, a few matrices per rank at a
    time, spread over the ranks by size.

    Hidden matrices: of at least two dims, no bias, of no embedding and no output layer. Our models state by `stacks`
    which layers are hidden; of others the output layer is what `get_output_embeddings` gives, a known name, or else
    the last linear layer, and a warning names, once, what goes to AdamW. hidden(name, layout) decides it instead.
    Waits for an accelerator once a step. Raises ValueError: main_params=False, a matrix cut over two axes.
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
        if not config.main_params:
            raise ValueError(
                "Muon updates main parameters, but main_params=False; use main_params=True"
            )
        self._hidden = _hidden_matrices(shard, hidden)
        super().__init__(shard, config, decays=decays, groups=groups)
        self._state_buffer_of = {id(state.buffer): state for state in self._state_buffers}
        convolutions = _parameters_of_kind(shard, nn.modules.conv._ConvNd)
        matrices = matrices_of(shard.buffers, self._hidden, convolutions, self.ps)
        self._rounds = plan_rounds(matrices)

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

    def update_rest(self, factor: Factor) -> None:
        """Muon's step on the hidden matrices; one wait for `found_inf`, because what is not finite is not sent.

        Collectives: of each round of matrices that ranks cut those of `change_whole`.
        """
        if not self._rounds or factor.found_inf.item():
            return
        for plan in self._rounds:
            pieces = [self._momentum_of(matrix, factor) for matrix in plan.matrices]
            changed = change_whole(plan, pieces, newton_schulz)
            for matrix, piece in zip(plan.matrices, changed, strict=True):
                self._add(matrix, piece)

    def _own(self, matrix: Matrix) -> tuple[StateBuffer, slice]:
        """Where this rank's piece of a matrix lies."""
        data_ranks = matrix.data_ranks
        first = matrix.buffer.updated_interval[0]
        start, stop = matrix.piece(0 if data_ranks is None else data_ranks.rank)
        return self._state_buffer_of[id(matrix.buffer)], slice(start - first, stop - first)

    def _momentum_of(self, matrix: Matrix, factor: Factor) -> Tensor:
        """Update the momentum; Nesterov's of this rank's piece, flat, in bfloat16 as it is orthogonalised."""
        state_buffer, own = self._own(matrix)
        gradient = state_buffer.gradients[own]
        if gradient.numel() == 0 or matrix.name in self._reached.left_out:
            # zeros fill its place in the message, and are not used
            return torch.zeros_like(gradient, dtype=torch.bfloat16)
        momentum = state_buffer.states["momentum_buffer"][own]
        scale = factor.divisor.reciprocal().to(momentum.dtype)
        gradient = gradient.to(momentum.dtype) * scale
        mu = self._options_of(matrix)["momentum"]
        # torch.optim.Muon's form, (1 - mu) G: what is orthogonalised may have any scale
        momentum.lerp_(gradient, 1 - mu)
        return gradient.lerp_(momentum, mu).bfloat16()

    def _add(self, matrix: Matrix, orthogonal: Tensor) -> None:
        """Decay this rank's piece of the main weights, and subtract the orthogonal matrix's."""
        if orthogonal.numel() == 0 or matrix.name in self._reached.left_out:
            return
        options = self._options_of(matrix)
        number = self._groups.number_of[matrix.name]
        state_buffer, own = self._own(matrix)
        main = state_buffer.updated
        assert main is not None
        lr = float(options["lr"])
        main = main[own]
        if number in self._groups.decay_everything or self._decays(matrix.name, matrix.layout):
            main.mul_(1 - lr * options["weight_decay"])
        main.add_(orthogonal, alpha=-lr * self._rate_share(*matrix.rows_and_columns))

    def _rate_share(self, rows: int, columns: int) -> float:
        """What the learning rate is multiplied by, as in torch.optim.Muon."""
        if self.config.muon_lr == "match_rms_adamw":
            return 0.2 * sqrt(max(rows, columns))
        return sqrt(max(1, rows / columns))

    def _options_of(self, matrix: Matrix) -> dict[str, Any]:
        return self.param_groups[self._groups.number_of[matrix.name]]


def newton_schulz(matrix: Tensor) -> Tensor:
    """[rows, columns] bfloat16 -> about the nearest orthogonal matrix; singular values end between 0.5 and 1.5.

    As torch.optim.Muon, bit for bit: five quintic iterations, a X + (b A + c A^2) X with A = X X^T.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    # so that X X^T is the smaller one of the two products
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        x = matrix.T
    else:
        x = matrix
    # by the Frobenius norm, which bounds the largest singular value: the iterations need it at 1 or below
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


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
            stacklevel=program_level(),
        )
    return set(candidates) - outputs
