"""GPTModel: embedding, transformer layers, output layer; whole, or the part of it that one pipeline stage holds."""

from dataclasses import replace

import torch
from torch import Tensor

from core.autograd import StageContext
from core.autograd.gradients import refuse_transforms
from core.context_parallel import Documents, begin_of_rows, visible_mask
from core.context_parallel.rows.sums import RowSums
from core.models.gpt.embedding import GPTEmbedding, OutputLayer, checked_chunk, mask_padding
from core.models.gpt.inputs import (
    FirstInputs,
    check_context,
    check_documents,
    check_optional,
    check_tokens,
    check_values,
    one_of_two,
    refuse_length,
)
from core.models.gpt.layer_numbers import stack_of, stage_layers
from core.models.gpt.weights import ModelWeights
from core.parallel_state import ContextRows, ParallelState, current_state, seeded
from core.parallel_state.collectives import broadcast
from core.parallel_state.environment import check_dtype
from core.parallel_state.random import chosen_seed
from core.parallel_state.spread import keep_layouts
from core.pipeline.run.checks.before_pipeline import listen_before_pipeline
from core.tensor_parallel import (
    gather_from_sequence_region,
    gather_from_tensor_region,
    sum_gradients_of_foreign,
    vocab_parallel_cross_entropy,
)
from core.tensor_parallel.split_activations import SplitActivations
from core.tensor_parallel.watch import split_watch
from core.tensor_parallel.whole_matrices import watch_optimizers
from core.transformer.layer import TransformerBlock
from core.transformer.moe.balance import follow_loss
from core.transformer.own_parts import OwnParts
from core.transformer.rules import check_layout, knows_context
from core.transformer.spec import Build, TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

CPU = torch.device("cpu")


class GPTModel(ModelWeights):
    """A decoder-only language model, split over the tensor ranks of a parallel state.

    config: the model's facts. transformer_layer_spec: the parts of its layers.
    vocab_size: true size; rows are padded in memory only. max_sequence_length: positions.
    pre_process, post_process: whether this stage embeds tokens, and whether it ends in logits or loss;
        default: as the pipeline rank says. layers: the global numbers of the stage's layers; default: an even
        share. A stage builds only its own layers.
    share_embeddings_and_output_weights: one table for both (tied). ends_share_a_rank: whether the first and the
        last stage are on one rank, so that it is one parameter; tied_with: that first stage, for the last one.
    parallel_output: whether logits stay split over the tensor ranks; where it is not given, they do, with a warning.
    loss_chunk: tokens whose logits exist at once where labels are given (core/models/gpt/head_loss.py); default: all.
    parallel: the layout of ranks; default: the current state (a single process needs none).
    seed: of the initial weights, which are the same on every layout; default: that of `torch.manual_seed`, which
        must then be one on all ranks that share a model; 1234 where nobody called it.
    Inside `with torch.device("meta")` nothing is allocated: `to_empty`, then `init_weights` or `load_state_dict`.

    Raises ValueError: a config that does not fit the layout of ranks (all reasons at once), or a dtype that the
    device does not compute in.
    """

    _columns: SplitActivations | None = None  # follows split logits

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerLayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        *,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        layers: range | None = None,
        share_embeddings_and_output_weights: bool = False,
        ends_share_a_rank: bool = False,
        tied_with: "GPTModel | None" = None,
        parallel_output: bool | None = None,
        loss_chunk: int | None = None,
        parallel: ParallelState | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.parallel = ps = parallel if parallel is not None else current_state()
        # both before anything is allocated
        check_layout(config, ps.config, transformer_layer_spec)
        check_dtype(ps.device, config.params_dtype)
        self.config = config
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.pre_process = ps.is_first_stage if pre_process is None else pre_process
        self.post_process = ps.is_last_stage if post_process is None else post_process
        self.tied = share_embeddings_and_output_weights
        self.loss_chunk = checked_chunk(loss_chunk)
        self.parallel_output = parallel_output is not False
        self.tells_of_columns = parallel_output is None
        self.stage = StageContext()
        self.transformer_layer_spec = spec = transformer_layer_spec
        # names are global, whatever the stage
        self.stacks = {"decoder.layers": stack_of(config)}
        self.seed = seed if seed is not None else chosen_seed(1234)
        build = Build(config, ps, self.stage, self.seed)
        # of adapters, which come when all else is filled
        self.place = replace(build.place, filled_by_model=False)
        self._build_embedding(build, ends_share_a_rank, tied_with)
        # Every stage has the rotary tables: they are computed, not stored, and attention is on every stage.
        self.rotary = spec.rotary(build, max_sequence_length) if spec.rotary is not None else None
        numbers = layers if layers is not None else stage_layers(config.num_layers, ps)
        self.decoder = TransformerBlock(build, spec, numbers, final_norm=self.post_process)
        self.output_layer = (
            OutputLayer(build, vocab_size, tied=self.tied) if self.post_process else None
        )
        self.draws = config.hidden_dropout > 0 or config.attention_dropout > 0
        self._follow_use()
        self._initialize()
        if self._watch is not None:
            # until the first forward: initial values by hand, sizes read for a rule of one's own
            self._watch.observe(self)
        self.before_pipeline = listen_before_pipeline(ps, self)

    def _build_embedding(
        self, build: Build, ends_share_a_rank: bool, tied_with: "GPTModel | None"
    ) -> None:
        # Tied ends on two pipeline ranks are two copies: their gradients are summed over an "embedding" group.
        one_rank_has_both = ends_share_a_rank or (self.pre_process and self.post_process)
        if not (self.pre_process or (self.tied and self.post_process)):
            return
        self.embedding = GPTEmbedding(
            build,
            # a tied last stage has a copy of the table only
            self.transformer_layer_spec if self.pre_process else None,
            self.vocab_size,
            self.max_sequence_length,
            tied_across_stages=self.tied and not one_rank_has_both,
        )
        if tied_with is not None and self.tied:
            self.embedding.word_embeddings.weight = tied_with.embedding.word_embeddings.weight

    def _follow_use(self) -> None:
        """What tells the user, in the first steps, of mistakes that raise no error; and layouts of foreign parts."""
        ps, place = self.parallel, self.place
        # Under sequence parallelism each rank sees its share of the rows, so replicated parameters of a user's own
        # modules have partial gradients, too; ours say so in their layouts.
        if place.splits_sequence:
            sum_gradients_of_foreign(self, place.group)
        self._first_inputs = FirstInputs()
        self._row_sums = RowSums(ps, splits_vocabulary=self.parallel_output)
        self._own_parts = OwnParts(ps, splits_sequence=place.splits_sequence)
        experts = None
        if self.config.num_moe_experts is not None:
            experts = ps.group("ep")
        self._watch = split_watch(place.group, experts, sums_foreign=place.splits_sequence)
        keep_layouts(self)
        watch_optimizers(self)

    def forward(
        self,
        tokens: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        document_begin: Tensor | None = None,
    ) -> Tensor:
        """Per-token loss [b, s] with labels (already shifted; -100 gives loss 0), else logits.

        tokens (or input_ids, its name elsewhere): int64 [b, s]; on a stage that does not embed, the previous stage's
        output [s, b, h].
        position_ids: [b, s], default 0 .. s-1. attention_mask: None is causal, else bool [b, 1, s, s], True =
        masked out. document_begin: int64 [b, s] instead of a mask, the row where each token's document begins:
        attention stays inside documents.
        Logits are [b, s, v_padded/tp], padded columns at the dtype's minimum; at tp 1, or without
        `parallel_output`, exactly [b, s, v]. A stage that does not end returns [s, b, h], or
        [s/tp, b, h] under sequence parallelism where another stage follows.
        Over context ranks s is s/cp everywhere: this rank's rows of each sequence, as `context_batch` cuts them, with
        their `position_ids`; document_begin counts rows of the whole sequence.
        Raises ValueError: more positions than `max_sequence_length`, an input of another shape or dtype; a token,
        position or label out of range (on an accelerator: an asynchronous assertion).
        """
        if self.before_pipeline is not None:
            self.before_pipeline.end()
            self.before_pipeline = None
        tokens = one_of_two("tokens", tokens, "input_ids", input_ids)
        s = self._check(tokens, position_ids, attention_mask, labels, document_begin is not None)
        mask: Tensor | Documents | None = attention_mask
        if document_begin is not None:
            mask = self._documents(document_begin, tokens, attention_mask)
        if self._watch is not None:
            if torch.compiler.is_exporting():
                raise ValueError(
                    f"torch.export would hold 1 of the {self.place.tp} tensor ranks' parts (experts: of "
                    f"{self.parallel.size('ep')}), and none of the messages between them; load the checkpoint into a "
                    "model of tensor_model_parallel_size=1 and export that"
                )
            batch = (tokens if self.pre_process else None, position_ids, attention_mask, labels)
            self._watch.check_before(self, batch)
        if is_eager := not torch.compiler.is_compiling():
            shares = (s, s // self.place.tp if self.place.splits_sequence else s)
            given = (tokens, labels, position_ids)
            self._row_sums.look_inside(self, shares, given, self.stage)
            self._own_parts.attach(self, s, is_whole=self.stage.whole_sequences)
        # Driven by an executor, dropout's seed is a function of (seed, step, microbatch). In a plain loop it is drawn
        # once per forward from torch's generator, so that `torch.manual_seed` and torch's checkpoint work as usual.
        if self.draws and self.training and not self.stage.driven:
            self.stage.drawn = True
            with seeded(CPU, self._drawn_seed()):  # where dropout reads it (see Dropout.seed)
                output = self._run_layers(s, tokens, position_ids, mask, labels)
        else:
            output = self._run_layers(s, tokens, position_ids, mask, labels)
        if is_eager:
            self._follow_output(output, is_loss=labels is not None)
        return output

    def _follow_output(self, output: Tensor, *, is_loss: bool) -> None:
        """After a forward: what a program does with its output and, until the next one, by hand."""
        self._row_sums.end_look(self)
        self._own_parts.detach()
        # an executor sums over the ranks by itself; in a loop of the user's own, mistakes are looked for
        rows_dim, holds_all_layers = int(self.post_process), self.parallel.size("pp") == 1
        if self.stage.driven or not output.requires_grad:
            if self.post_process or holds_all_layers:
                self._row_sums.follow(output, rows_dim, sums_are_given=self.stage.driven)
            if self._watch is not None and not self.stage.driven:
                self._watch.listen_again()
            return
        if self.config.balances_experts:
            follow_loss(output, self.stage, is_models=is_loss)
        if self._watch is not None:
            replicated = self._output_is_replicated(is_loss)
            self._watch.follow_after(self, [output], are_replicated=replicated)
        if holds_all_layers:
            self._row_sums.follow(output, rows_dim)

    def end_step(self) -> None:
        """After `optimizer.step()` in a loop of your own: expert biases move, counts of experts' rows begin again.

        On all ranks that train together: an all-reduce over ep and one over edp. SingleStage and Pipeline call it.
        """
        self.stage.end_step()

    def _run_layers(
        self,
        s: int,
        tokens: Tensor,
        position_ids: Tensor | None,
        attention_mask: "Tensor | Documents | None",
        labels: Tensor | None,
    ) -> Tensor:
        # On a later pipeline stage `tokens` is the residual stream that the stage before handed over.
        x = self.embedding(tokens, position_ids) if self.pre_process else tokens
        rotary = self.rotary(s, position_ids) if self.rotary is not None else None
        x = self.decoder(x, attention_mask, rotary)
        if self.output_layer is None:
            return self._gather_for_foreign_head(x)
        table = self.embedding.word_embeddings.weight if self.tied else None
        if labels is not None and self.loss_chunk is not None:
            loss = self.output_layer.loss_in_chunks(
                x, table, labels.t(), self.vocab_size, self.loss_chunk
            )
            return loss.t().contiguous()
        logits = self.output_layer(x, table, within_model=True)
        if labels is not None:
            # The loss comes from split logits, which it overwrites with their gradient: no rank ever holds [s, b, v].
            target = labels.t().contiguous()
            group = self.place.group
            loss = vocab_parallel_cross_entropy(
                logits, target, group, vocab_size=self.vocab_size, inplace=True
            )
            return loss.t().contiguous()
        logits = mask_padding(logits, self.vocab_size, self.place.rank, self.place.tp).transpose(
            0, 1
        )
        if self.parallel_output and self.tells_of_columns and self.place.tp > 1:
            self._follow_columns(logits, at_once=torch.compiler.is_compiling())
        if self.parallel_output:
            return logits
        return self.gather_logits(logits)

    @torch.compiler.disable
    def _follow_columns(self, logits: Tensor, *, at_once: bool) -> None:
        """In the first two forwards that return logits: whoever takes them for all of the vocabulary is told.

        at_once: nobody sees what compiled code does with them.
        """
        if self._columns is None:
            message = (
                f"logits are this tensor rank's {logits.shape[-1]} columns of the padded vocabulary, as Megatron's: "
                "a softmax, an argmax, a loss over them or columns by number are of a part. gather_logits(logits) or "
                f"GPTModel(parallel_output=False) gives all {self.vocab_size}; parallel_output=True says it is meant"
            )
            assert self.place.group is not None
            self._columns = SplitActivations(
                self.place.group, message=message, compares_factors=True
            )
        self.tells_of_columns = self._columns.mark_columns(logits, at_once=at_once)

    def _gather_for_foreign_head(self, x: Tensor) -> Tensor:
        """A stage's output: sequence shards for the next stage, the full sequence for a head of a user's own."""
        headless = self.pre_process and len(self.decoder.layers) == self.config.num_layers
        if (
            headless
            and self.place.splits_sequence
            and self.parallel.size("pp") == 1
            and not self.stage.driven
        ):
            return gather_from_sequence_region(x, self.place.group, to_tensor_region=False)
        return x

    def _output_is_replicated(self, is_loss: bool) -> bool:
        """Whether each tensor rank has all of `forward`'s result."""
        if self.output_layer is None:
            return not self.place.splits_sequence
        return is_loss or not self.parallel_output

    def gather_logits(self, logits: Tensor) -> Tensor:
        """[b, s, v_padded/tp] -> [b, s, v] on every tensor rank, exactly the vocabulary. All-gather over tp."""
        gathered = gather_from_tensor_region(logits, self.place.group)[..., : self.vocab_size]
        self._row_sums.mark_gathered(gathered, logits, self.place.group)
        return gathered

    def _check(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        packed: bool,
    ) -> int:
        """Shapes, dtypes and ranges, without waiting for a device; returns the sequence length."""
        if not torch.compiler.is_compiling():
            refuse_transforms("a GPTModel")
        tp = self.place.tp if self.place.splits_sequence else 1
        if self.pre_process:
            check_tokens(tokens, self.vocab_size)
            b, s = tokens.shape
        else:
            if tokens.dtype != self.config.params_dtype or tokens.dim() != 3:
                raise ValueError(
                    f"a stage that does not embed takes the previous stage's output, [s, b, h] of "
                    f"{self.config.params_dtype}, got {tuple(tokens.shape)} of {tokens.dtype}"
                )
            s, b = tokens.shape[0] * tp, tokens.shape[1]
        ranks = 1 if self.stage.whole_sequences else self.parallel.size("cp")
        if s * ranks > self.max_sequence_length:
            refuse_length(s, ranks, self.max_sequence_length)
        if s % tp:
            raise ValueError(
                f"sequence length {s} does not divide over {tp} tensor-parallel ranks; pad it to {-(-s // tp) * tp}, "
                "or turn sequence_parallel off"
            )
        check_optional(b, s, position_ids, attention_mask, labels)
        if ranks > 1:
            check_context(s, ranks, position_ids, attention_mask)
            if (
                self.pre_process
                and not torch.compiler.is_compiling()
                and (group := self.parallel.group("cp"))
            ):
                assert position_ids is not None
                rows = ContextRows.of_state(self.parallel)
                self._first_inputs.check_context(tokens, position_ids, packed, group, rows)
        check_values(position_ids, self.max_sequence_length, labels, self.vocab_size)
        if not self._first_inputs.done and not torch.compiler.is_exporting():
            self._first_inputs.check_first(
                tokens if self.pre_process else None, attention_mask, labels, packed
            )
        return s

    @torch.compiler.disable
    def _documents(
        self, document_begin: Tensor, tokens: Tensor, attention_mask: Tensor | None
    ) -> "Documents | Tensor":
        """What the layers take of document_begin [b, s/cp]; parts that do not know it get a bool mask."""
        ps, spec = self.parallel, self.transformer_layer_spec
        tp = self.place.tp if self.place.splits_sequence else 1
        shape = tuple(tokens.shape) if self.pre_process else (tokens.shape[1], tokens.shape[0] * tp)
        check_documents(document_begin, shape, ps, attention_mask)
        if all(map(knows_context, (spec.layer, spec.attention, spec.core_attention))):
            return begin_of_rows(document_begin, ps)
        return visible_mask(document_begin.to(ps.device))

    @torch.compiler.disable
    def _drawn_seed(self) -> int:
        """Plain use with dropout: a seed from torch's own CPU generator, the same on all tensor ranks."""
        seed = torch.randint(2**31, (1,))
        if self.place.group is not None:
            seed = broadcast(seed.to(self.parallel.device), self.place.group)
        return int(seed.item())
