"""Families with experts: Mixtral, Qwen3-MoE and GLM-4-MoE."""

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
        # of a loss that is added with output_router_logits only
        facts.get("router_aux_loss_coef")
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
            # softmax over all, then divided by the sum of the chosen, is softmax over the chosen
            "moe_router_pre_softmax": not facts.get("norm_topk_prob", False),
            "moe_layer_freq": self._frequency(facts),
        }

    def _frequency(self, facts: Facts) -> tuple[int, ...]:
        step = facts.get("decoder_sparse_step", 1)
        dense = facts.get("mlp_only_layers") or []
        layers = range(facts["num_hidden_layers"])
        return tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in layers)

    def windows(self, facts: Facts) -> Windows:
        """One window for all layers, where `use_sliding_window` says that it counts."""
        slides = facts.get("use_sliding_window", False)
        window = facts.get("sliding_window", self.sliding_window)
        if slides and window is not None:
            return (window,) * facts["num_hidden_layers"]
        return None

    def window_fields(self, windows: Windows) -> Fields:
        """The fields of windows."""
        return {
            "use_sliding_window": windows is not None,
            "sliding_window": windows[0] if windows else None,
        }

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives, and of the layers that have experts."""
        yield from super().rules(facts)
        step = facts.get("decoder_sparse_step", 1)
        yield isinstance(step, int) and step >= 1, f"decoder_sparse_step={step} must be at least 1"
        yield from balancing_rules(facts)

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        return super().fields(model) | {
            "num_experts": config.num_moe_experts,
            "num_experts_per_tok": config.moe_router_topk,
            "moe_intermediate_size": config.moe_ffn,
            "norm_topk_prob": not config.moe_router_pre_softmax,
            # every layer has experts, but for those that are named below
            "decoder_sparse_step": 1,
            "mlp_only_layers": [
                layer for layer in range(config.num_layers) if not config.has_experts(layer)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(LlamaLike):
    """DeepSeek-V3's routing beside Llama's attention: sigmoid, groups, a bias, shared experts, first layers dense.

    The fields hold where a configuration does not say. may_be_dense: no layer needs experts.
    """

    first_dense: int = 1
    experts: int = 128
    experts_of_token: int = 8
    expert_width: int = 1408
    shared_experts: int = 1
    scaling: float = 1.0
    expert_groups: int = 1
    best_groups: int = 1
    may_be_dense: bool = False

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        # parts that predict more tokens: not of the model
        for name in ("num_nextn_predict_layers", "num_mtp_layers"):
            facts.get(name)
        return (
            super().config(facts)
            | {
                "add_bias_linear": False,
                "add_qkv_bias": bool(facts.get("attention_bias", False)),
                "qk_layernorm": bool(facts.get("use_qk_norm", False)),
            }
            | self.of_experts(facts)
        )

    def of_experts(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig that concern experts."""
        dense = facts.get("first_k_dense_replace", self.first_dense)
        layers = facts["num_hidden_layers"]
        width = facts.get("moe_intermediate_size", self.expert_width)
        shared = facts.get("n_shared_experts", self.shared_experts)
        groups, best = self._groups(facts)
        arguments = {
            "num_moe_experts": self._experts(facts),
            "moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers)),
            "moe_router_topk": facts.get("num_experts_per_tok", self.experts_of_token),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * shared,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            # transformers leaves it as it is; its makers move it in pretraining
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": float(
                facts.get("routed_scaling_factor", self.scaling)
            ),
            # one group of all experts is no restriction
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": best if groups > 1 else None,
        }
        if self.may_be_dense and dense >= layers:
            return {}
        return arguments

    def _groups(self, facts: Facts) -> tuple[int, int]:
        """How many groups of experts there are, and of how many of them experts are chosen."""
        groups = facts.get("n_group", self.expert_groups)
        return groups, facts.get("topk_group", self.best_groups)

    def _experts(self, facts: Facts) -> int:
        count: int = facts.get("n_routed_experts") or facts.get("num_local_experts", self.experts)
        return count

    def _biases(self, facts: Facts) -> tuple[bool, bool]:
        """`attention_bias` is of query, key and value only."""
        return False, False

    def rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives, and of the router."""
        yield from super().rules(facts)
        yield from self.weight_rules(facts)
        chosen = facts.get("num_experts_per_tok", self.experts_of_token)
        groups, best = self._groups(facts)
        experts = self._experts(facts)
        experts_left = best * experts // groups
        yield (
            groups == 1 or chosen <= experts_left,
            f"num_experts_per_tok={chosen}, but topk_group={best} of n_group={groups} groups leave {experts_left} of "
            f"{experts} experts; use fewer experts, or more groups of them",
        )
        dense = facts.get("first_k_dense_replace", self.first_dense)
        layers = facts["num_hidden_layers"]
        yield (
            0 <= dense < layers or self.may_be_dense,
            f"first_k_dense_replace={dense} of num_hidden_layers={layers} leaves no layer with experts; such a model "
            "is a Llama",
        )
        yield (
            facts.get("n_shared_experts", self.shared_experts) >= 1,
            "n_shared_experts=0 is not supported; 1 or more are",
        )
        yield from balancing_rules(facts)

    def weight_rules(self, facts: Facts) -> Rules:
        """Of the weights of a token's experts."""
        divided = facts.get("norm_topk_prob", True)
        chosen = facts.get("num_experts_per_tok", self.experts_of_token)
        yield (
            bool(divided) == (chosen > 1),
            f"norm_topk_prob={divided} with num_experts_per_tok={chosen}: weights of several experts are divided by "
            f"their sum here, that of 1 is not; set norm_topk_prob={chosen > 1}",
        )

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        shared = config.moe_shared_expert_intermediate_size or 0
        with_experts = filter(config.has_experts, range(config.num_layers))
        none = config.num_layers if self.may_be_dense else 0
        return super().fields(model) | {
            "attention_bias": config.add_qkv_bias,
            "use_qk_norm": config.qk_layernorm,
            "n_routed_experts": config.num_moe_experts or config.moe_router_topk,
            "num_experts_per_tok": config.moe_router_topk,
            "moe_intermediate_size": config.moe_ffn,
            "n_shared_experts": max(1, shared // config.moe_ffn),
            "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "norm_topk_prob": config.moe_router_topk > 1,
            "first_k_dense_replace": next(with_experts, none),
            "num_nextn_predict_layers": 0,
        }


def balancing_rules(facts: Facts) -> Rules:
    """Their auxiliary loss pools the layers of a model, ours is each layer's own."""
    adds_loss = facts.get("output_router_logits", False)
    yield (
        not adds_loss,
        f"output_router_logits={adds_loss} adds an auxiliary loss over all layers together, which is not ours; set "
        "it to False, and moe_aux_loss_coeff of TransformerConfig",
    )
