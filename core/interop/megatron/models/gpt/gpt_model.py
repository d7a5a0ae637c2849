"""`GPTModel` with Megatron's arguments."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.autograd import apply_recompute
from core.models.gpt import gpt_model as ours
from core.models.gpt.gpt_layer_specs import llama_spec
from core.parallel_state import current_state
from core.pipeline.schedule.partition import even
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig


class GPTModel(ours.GPTModel):
    """Ours. position_embedding_type: "learned_absolute", "rope" or "none"; the spec's positions give way to it.

    pre_process, post_process: default: as the rank, and of a chunk its number, say (Megatron: True).
    vp_stage: which of the rank's chunks this is. recompute_granularity of the configuration: "full" runs every layer
    again, "selective" its core attention. Raises ValueError: what is not here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerLayerSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        vp_stage: int | None = None,
        **more: Any,
    ) -> None:
        # arguments without a meaning here pass; all others must be off
        more.pop("pg_collection", None)
        more.pop("rope_scaling_factor", None)
        unsupported = [name for name, value in more.items() if value not in (None, False)]
        if unsupported or not scatter_embedding_sequence_parallel:
            names = ", ".join(unsupported) or "scatter_embedding_sequence_parallel=False"
            raise ValueError(
                f"GPTModel: {max(1, len(unsupported))} arguments are not here: {names}; leave them out"
            )
        is_latent = config.multi_latent_attention
        if is_latent and position_embedding_type == "learned_absolute":
            raise ValueError(
                "GPTModel: position_embedding_type='learned_absolute' with multi_latent_attention, whose heads "
                "rotate; give 'rope' ('none' rotates nothing)"
            )
        spec = _with_positions(transformer_layer_spec, position_embedding_type)
        # kept, because `replace` returns ours: scripts read Megatron's fields of model.config
        megatron_config = config
        # latent attention rotates as its configuration says
        if position_embedding_type == "rope" and not is_latent:
            config = replace(
                _model_fields(config), rotary_base=float(rotary_base), rotary_percent=rotary_percent
            )
        is_first, is_last = _is_end(vp_stage, megatron_config)
        super().__init__(
            config,
            spec,
            vocab_size,
            max_sequence_length,
            pre_process=is_first if pre_process is None else pre_process,
            post_process=is_last if post_process is None else post_process,
            layers=_virtual_stage_layers(config.num_layers, vp_stage, megatron_config),
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            parallel_output=parallel_output,
        )
        self.config = megatron_config
        # activation checkpointing, which Megatron configures beside the model
        granularity = getattr(megatron_config, "recompute_granularity", None)
        if granularity is not None:
            policy = "layer" if granularity == "full" else granularity
            apply_recompute(self, policy, stage=self.stage)

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Megatron's name of `tied`."""
        return self.tied

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The table of the first stage; of the last its output weight; else None."""
        if self.pre_process or (self.post_process and self.tied):
            return self.embedding.word_embeddings.weight
        return None if self.output_layer is None else self.output_layer.weight

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Nothing for None, as Megatron's schedules give the first stage. Raises ValueError: an activation."""
        given = input_tensor if isinstance(input_tensor, (list, tuple)) else [input_tensor]
        if any(x is not None for x in given):
            raise ValueError(
                "set_input_tensor was given 1 activation, and a stage here is called with it: model(input_tensor, "
                "labels=...); get_forward_backward_func() does so by itself"
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *unused: Any,
        runtime_gather_output: bool | None = None,
        loss_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """As Megatron's: loss per token [b, s], else logits. Raises ValueError: an argument that is not here.

        attention_mask: also what `get_batch_on_this_cp_rank` makes of one, int64 [b, s/cp].
        """
        unsupported = [name for name, value in more.items() if value is not None]
        if decoder_input is not None:
            unsupported.append("decoder_input")
        if any(unused):
            unsupported.append("inference_context")
        if unsupported:
            raise ValueError(
                f"GPTModel.forward: {len(unsupported)} arguments are not here: {', '.join(unsupported)}; leave them "
                "out"
            )
        begin = None
        mask = attention_mask
        if mask is not None and mask.dtype == torch.int64:
            begin = mask
            mask = None
        output = super().forward(input_ids, position_ids, mask, labels, document_begin=begin)
        has_split_logits = labels is None and self.parallel_output and self.post_process
        if runtime_gather_output and has_split_logits:
            return self.gather_logits(output)
        return output


def _model_fields(config: TransformerConfig) -> TransformerConfig:
    """Without the runtime fields of Megatron's class, so that `dataclasses.replace` works."""
    return TransformerConfig(
        **{name: getattr(config, name) for name in TransformerConfig.__dataclass_fields__}
    )


def _with_positions(spec: TransformerLayerSpec, kind: str) -> TransformerLayerSpec:
    if kind == "learned_absolute":
        return spec
    if kind not in ("rope", "none"):
        raise ValueError(
            f"position_embedding_type={kind!r} is none of the 3: learned_absolute, rope, none"
        )
    rotary = llama_spec().rotary if kind == "rope" else None
    return replace(spec, positions=None, rotary=rotary)


def _is_end(vp_stage: int | None, config: Any) -> tuple[bool, bool]:
    """Whether this rank's stage, or chunk, is the pipeline's first, and its last."""
    ps = current_state()
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if vp_stage is None or not chunks:
        return ps.is_first_stage, ps.is_last_stage
    return ps.is_first_stage and vp_stage == 0, ps.is_last_stage and vp_stage == chunks - 1


def _virtual_stage_layers(num_layers: int, vp_stage: int | None, config: Any) -> range | None:
    """The layers of a virtual stage, which is stage `vp_stage * pp + pp_rank`; None without virtual stages."""
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if vp_stage is None or not chunks:
        return None
    ps = current_state()
    stages = even(num_layers, chunks * ps.size("pp"))
    return stages[vp_stage * ps.size("pp") + ps.index("pp")]
