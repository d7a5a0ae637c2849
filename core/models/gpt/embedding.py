"""Tokens to the residual stream, and the residual stream to logits over the vocabulary."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd import deferred_linear
from core.models.gpt.head_loss import head_loss
from core.parallel_state import Init
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import VocabParallelEmbedding
from core.tensor_parallel.embedding import vocab_layout
from core.tensor_parallel.split_activations import SplitActivations
from core.transformer.dropout import residual_dropout
from core.transformer.spec import Build, TransformerLayerSpec


class GPTEmbedding(nn.Module):
    """tokens [b, s] -> [s, b, h] ([s/tp, b, h] under sequence parallelism), scaled, positions added, dropped out.

    With `spec` None only the table exists: the copy that a tied last stage multiplies by.
    """

    def __init__(
        self,
        build: Build,
        spec: TransformerLayerSpec | None,
        vocab_size: int,
        max_sequence_length: int,
        *,
        tied_across_stages: bool,
    ) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            build.config.hidden_size,
            place=build.place,
            init=Init(std=build.config.init_method_std),
            # its gradient is a part of the sum over the two copies of the table
            partial=frozenset({"embedding"}) if tied_across_stages else frozenset(),
            is_padded=True,
        )
        self.position_embeddings = (
            spec.positions(build, max_sequence_length) if spec and spec.positions else None
        )
        config = build.config
        # rounded to the dtype of the weights, as those who trained the models did
        self.multiplier = float(
            torch.tensor(config.embedding_multiplier, dtype=config.params_dtype, device="cpu")
        )
        self.dropout = residual_dropout(build, "embedding") if spec else None

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        # from here on the sequence comes first, as in Megatron: sequence parallelism cuts the outermost dim
        x = self.word_embeddings(tokens.t().contiguous())
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(tokens.shape[1], position_ids)
        if self.dropout is None:
            return x
        return self.dropout(x)


class OutputLayer(SpreadModule):
    """x [s, b, h] ([s/tp, b, h] under sequence parallelism) -> logits [s, b, v_padded/tp].

    Its own weight [v_padded/tp, h], or (tied) the embedding's, which is passed in. Forward: all-gather of x (sequence
    parallelism only). Backward: all-gather of x again (the same), all-reduce (reduce-scatter) of dx.
    """

    split_output = 0

    def __init__(self, build: Build, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        place = build.place
        config = build.config
        layout = vocab_layout(vocab_size, config.hidden_size, place.tp, is_padded=True)
        if tied:
            self.weight = None
        else:
            self.weight = place.parameter(layout, Init(std=config.init_method_std))
        self.stage = place.stage
        self.comm = place.column_comm()
        self.group = place.group
        self.columns = layout.padded_shape()[0] // place.tp
        self.tells_of_columns = place.tp > 1
        self._columns: SplitActivations | None = None

    def forward(
        self, x: Tensor, weight: Parameter | None = None, *, within_model: bool = False
    ) -> Tensor:
        # a tied table lives in the embedding; it is passed in each time, so that it has one owner
        table = self.weight if weight is None else weight
        assert table is not None
        logits = deferred_linear(x, table, stage=self.stage, comm=self.comm)
        if not within_model and self.tells_of_columns:
            self._follow_columns(logits, at_once=torch.compiler.is_compiling())
        return logits

    @torch.compiler.disable
    def _follow_columns(self, logits: Tensor, *, at_once: bool) -> None:
        """In the first calls by hand: whoever takes the logits for all of the vocabulary is told."""
        if self._columns is None:
            message = (
                f"output_layer by hand gives logits of this tensor rank's {self.columns} columns of the padded "
                "vocabulary: a softmax, an argmax or a loss over them is of a part. GPTModel.gather_logits(logits"
                ".transpose(0, 1)) gives all, [b, s, v]"
            )
            assert self.group is not None
            self._columns = SplitActivations(self.group, message=message)
        self.tells_of_columns = self._columns.mark_columns(logits, at_once=at_once)

    def loss_in_chunks(
        self, x: Tensor, weight: Parameter | None, labels: Tensor, vocab_size: int, chunk: int
    ) -> Tensor:
        """Loss per token [s, b] of labels [s, b], from logits of `chunk` tokens at a time; see `head_loss`."""
        table = self.weight if weight is None else weight
        assert table is not None
        how: dict[str, Any] = {"stage": self.stage, "comm": self.comm, "group": self.group}
        return head_loss(x, table, labels, vocab_size=vocab_size, chunk=chunk, **how)


def checked_chunk(chunk: int | None) -> int | None:
    """Raise ValueError for fewer than one token."""
    if chunk is not None and chunk < 1:
        raise ValueError(
            f"loss_chunk={chunk} must be at least 1 token; None computes all logits at once"
        )
    return chunk


def mask_padding(logits: Tensor, vocab_size: int, rank: int, tp: int) -> Tensor:
    """logits [..., v_padded/tp]: at tp 1 exactly the vocabulary's columns, else padding at the dtype's minimum."""
    if tp == 1:
        return logits[..., :vocab_size]
    size = logits.shape[-1]
    valid = max(0, min(size, vocab_size - rank * size))
    if valid == size:
        return logits
    # the minimum instead of -inf: arithmetic on it gives no NaN
    padding = torch.arange(size, device=logits.device) >= valid
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min)
