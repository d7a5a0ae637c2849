"""DeepSeek-V3, which Kimi-K2 is as well, and DeepSeek-V2: latent attention, a router over groups of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.models.gpt.gpt_layer_specs import mla_spec
from core.models.huggingface.facts import Facts
from core.models.huggingface.family.experts import Glm4Moe
from core.models.huggingface.family.family import Fields, HuggingFaceModel, Rules
from core.models.huggingface.family.rope import SCALINGS, rope_kind, whole_rope
from core.transformer.spec import TransformerLayerSpec

# of the latents' norms, whatever the configuration says
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Glm4Moe):
    """GLM-4-MoE's router and experts beside latent attention, with YaRN that also scales the scores."""

    spec: Callable[[], TransformerLayerSpec] = mla_spec
    first_dense: int = 3
    experts: int = 256
    expert_width: int = 2048
    scaling: float = 2.5
    expert_groups: int = 8
    best_groups: int = 4
    may_be_dense: bool = True
    scalings: tuple[str, ...] = (*SCALINGS, "yarn")
    # by the names of files: the rule of the scores, and of the choice
    scores: str = "sigmoid"
    choices: tuple[str, ...] = ("noaux_tc",)

    def config(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig."""
        # of how a model was trained, or runs: no numbers of it
        for name in ("aux_loss_alpha", "seq_aux", "ep_size"):
            facts.get(name)
        epsilon = facts.get("rms_norm_eps", self.epsilon)
        return super().config(facts) | {
            "num_query_groups": None,
            "kv_channels": None,
            "add_qkv_bias": False,
            "qk_layernorm": True,
            "multi_latent_attention": True,
            "q_lora_rank": facts.get("q_lora_rank", 1536),
            "kv_lora_rank": facts.get("kv_lora_rank", 512),
            "qk_head_dim": facts.get("qk_nope_head_dim", 128),
            "qk_pos_emb_head_dim": facts.get("qk_rope_head_dim", 64),
            "v_head_dim": facts.get("v_head_dim", 128),
            "latent_layernorm_epsilon": None if epsilon == _EPSILON else _EPSILON,
            "rotary_interleaved": self._interleaves(facts),
        }

    def _interleaves(self, facts: Facts) -> bool:
        return bool(facts.get("rope_interleave", True))

    def rules(self, facts: Facts) -> Rules:
        """Those of GLM-4-MoE; what latent attention has not; what only the code in the authors' folders reads."""
        yield from super().rules(facts)
        yield from self._size_rules(facts)
        biased = facts.get("attention_bias", False)
        yield (
            not biased,
            f"attention_bias={biased} is not supported: latent attention has no biases here; set it to False",
        )
        scores = facts.get("scoring_func", self.scores)
        yield (
            scores == self.scores,
            f"scoring_func={scores!r} is not this family's; {self.scores} is",
        )
        choice = facts.get("topk_method", self.choices[0])
        yield (
            choice in self.choices,
            f"topk_method={choice!r} is not this family's; {', '.join(self.choices)} is",
        )
        frequency = facts.get("moe_layer_freq", 1)
        yield (
            frequency == 1,
            f"moe_layer_freq={frequency}: transformers puts experts into every layer from first_k_dense_replace on; "
            "set it to 1",
        )

    def _size_rules(self, facts: Facts) -> Rules:
        """Fields that say a size again."""
        heads = facts["num_attention_heads"]
        groups = facts.get("num_key_value_heads") or heads
        yield (
            groups == heads,
            f"num_key_value_heads={groups} with num_attention_heads={heads}: every head has a key and a value; "
            "set both to the same number",
        )
        rotated = facts.get("qk_rope_head_dim", 64)
        whole = facts.get("qk_nope_head_dim", 128) + rotated
        for name, size in (("head_dim", rotated), ("qk_head_dim", whole)):
            said = facts.get(name) or size
            yield (
                said == size,
                f"{name}={said} contradicts qk_nope_head_dim and qk_rope_head_dim={rotated}, which make it {size}; "
                "remove it",
            )

    def rotary_rules(self, facts: Facts) -> Rules:
        """Those of Llama's relatives; of YaRN what transformers reads in a way of its own."""
        yield from super().rotary_rules(facts)
        rope = {name: value for name, value in whole_rope(facts).items() if value}
        kind = rope_kind(rope)
        one = rope.get("mscale")
        other = rope.get("mscale_all_dim")
        alike = (one is None) == (other is None) or (one == 1 and other is None)
        yield (
            kind != "yarn" or alike or "attention_factor" in rope,
            f"rope_parameters: mscale={one} with mscale_all_dim={other} has several readings; give both, or none",
        )
        yield (
            kind in ("yarn", "default") or other is None,
            f"rope_parameters: mscale_all_dim={other} with rope_type={kind!r} is not supported; remove it",
        )
        yield (
            kind != "yarn" or bool(whole_rope(facts).get("truncate", True)),
            "rope_parameters: truncate=False is not supported: yarn's ramp begins and ends at whole pairs of dims; "
            "remove it",
        )

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        config = model.config
        fields = super().fields(model)
        # of GLM-4-MoE's attention
        for name in ("use_qk_norm", "partial_rotary_factor"):
            fields.pop(name, None)
        return fields | {
            "q_lora_rank": config.q_lora_rank,
            # where the attention is another one, any size: the model differs anyway
            "kv_lora_rank": config.kv_lora_rank or 1,
            "qk_nope_head_dim": config.qk_head_dim or 1,
            "qk_rope_head_dim": config.rotary_size,
            "head_dim": config.rotary_size,
            "v_head_dim": config.value_size,
            "rope_interleave": config.rotary_interleaved,
        }


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DeepseekV3):
    """Softmax over all experts, whose chosen ones keep their weights; a group counts by its best expert."""

    first_dense: int = 0
    experts: int = 64
    expert_width: int = 1407
    shared_experts: int = 2
    scaling: float = 1.0
    expert_groups: int = 1
    best_groups: int = 1
    scores: str = "softmax"
    choices: tuple[str, ...] = ("greedy", "group_limited_greedy")

    def of_experts(self, facts: Facts) -> dict[str, Any]:
        """The arguments of TransformerConfig that concern experts."""
        arguments = super().of_experts(facts)
        if not arguments:
            return {}
        return arguments | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": False,
            "moe_router_group_score_topk": 1 if arguments["moe_router_num_groups"] else 2,
        }

    def _groups(self, facts: Facts) -> tuple[int, int]:
        """Groups count with one way of choosing only."""
        groups = facts.get("n_group") or 1
        best = facts.get("topk_group") or 1
        if facts.get("topk_method", "greedy") == "greedy":
            return 1, 1
        return groups, best

    def _interleaves(self, facts: Facts) -> bool:
        return True

    def weight_rules(self, facts: Facts) -> Rules:
        """Of the weights of a token's experts."""
        divided = facts.get("norm_topk_prob", False)
        yield (
            not divided,
            f"norm_topk_prob={divided} is not supported: transformers does not divide this family's weights; set it "
            "to False",
        )
        biased = facts.get("mlp_bias", False)
        yield not biased, f"mlp_bias={biased} is not supported; set it to False"

    def fields(self, model: HuggingFaceModel) -> Fields:
        """What the family would say of a model of ours."""
        fields = super().fields(model) | {"norm_topk_prob": False}
        fields.pop("rope_interleave")
        grouped = model.config.moe_router_num_groups is not None
        return fields | {"topk_method": "group_limited_greedy" if grouped else "greedy"}
