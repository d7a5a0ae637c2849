"""Families with experts: Mixtral and Qwen3-MoE."""

from dataclasses import dataclass
from typing import Any

from core.models.huggingface.facts import Facts
from core.models.huggingface.family.family import Fields, HuggingFaceModel, Rules
from core.models.huggingface.family.llama_like import LlamaLike, Windows


@dataclass(frozen=True, kw_only=True)
class Mixtral(LlamaLike):
    """Llama with experts in every layer: softmax over the chosen ones."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        facts.get("router_aux_loss_coef")  # of a loss that is added with output_router_logits only
        return super().config(facts) | {
            "num_moe_experts": facts.get("num_local_experts", 8),
            "moe_router_topk": facts.get("num_experts_per_tok", 2),
            "moe_ffn_hidden_size": facts["intermediate_size"],
        }

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives, and of the router."""
        yield from super().rules(facts)
        noise = facts.get("router_jitter_noise", 0.0)
        yield not noise, f"router_jitter_noise={noise} is not supported; set it to 0"
        yield from balancing_rules(facts)

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        return super().fields(model) | {
            "intermediate_size": config.moe_ffn,
            "num_local_experts": config.num_moe_experts,
            "num_experts_per_tok": config.moe_router_topk,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(LlamaLike):
    """Qwen3 with experts: the weights of the chosen ones as softmax over all gave them, or over these alone."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        facts.get("router_aux_loss_coef")
        experts = facts.get("num_local_experts") or facts.get("num_experts", 128)
        return super().config(facts) | {
            "num_moe_experts": experts,
            "moe_router_topk": facts.get("num_experts_per_tok", 8),
            "moe_ffn_hidden_size": facts.get("moe_intermediate_size", 768),
            "moe_router_pre_softmax": not facts.get("norm_topk_prob", False),
        }

    def windows(self, facts: Facts) -> Windows:
        """One window for all layers, where `use_sliding_window` says that it counts."""
        slides, window = facts.get("use_sliding_window", False), facts.get("sliding_window", self.sliding_window)
        return (window,) * facts["num_hidden_layers"] if slides and window is not None else None

    def window_fields(self, windows: Windows) -> Fields:
        """The fields of windows."""
        return {"use_sliding_window": windows is not None, "sliding_window": windows[0] if windows else None}

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives; every layer has experts."""
        yield from super().rules(facts)
        step, dense = facts.get("decoder_sparse_step", 1), facts.get("mlp_only_layers") or []
        yield (
            step == 1 and not dense,
            f"decoder_sparse_step={step}, mlp_only_layers={dense}: models of which only some layers have experts are "
            "not read yet; 1 and [] are",
        )
        yield from balancing_rules(facts)

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        return super().fields(model) | {
            "num_experts": config.num_moe_experts,
            "num_experts_per_tok": config.moe_router_topk,
            "moe_intermediate_size": config.moe_ffn,
            "norm_topk_prob": not config.moe_router_pre_softmax,
        }


def balancing_rules(facts: Facts) -> Rules:
    """Their auxiliary loss pools the layers of a model, ours is each layer's own."""
    adds_loss = facts.get("output_router_logits", False)
    yield (
        not adds_loss,
        f"output_router_logits={adds_loss} adds an auxiliary loss over all layers together, which is not ours; set "
        "it to False, and moe_aux_loss_coeff of TransformerConfig",
    )
