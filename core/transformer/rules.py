"""Rules between a model and a layout of ranks: pure, so that they are checked before any process group exists."""

from collections.abc import Iterator

from core.parallel_state import ParallelConfig
from core.parallel_state.config import divisors, raise_all
from core.transformer.transformer_config import TransformerConfig


def layout_rules(config: TransformerConfig, parallel: ParallelConfig) -> Iterator[tuple[bool, str]]:
    """(holds, message) for every fact of `config` that a layout of `parallel` divides."""
    tp, pp = parallel.tensor, parallel.pipeline
    heads, groups, ffn = config.num_attention_heads, config.groups, config.ffn
    yield _divides("num_attention_heads", heads, tp, heads)
    yield _divides("num_query_groups", groups, tp, groups)
    yield _divides("ffn_hidden_size", ffn, tp, ffn)
    yield (
        parallel.context == 1,
        f"context={parallel.context}: no layer splits the sequence over context ranks yet; use 1",
    )
    yield from _expert_rules(config, parallel.expert)
    yield (
        config.num_layers >= pp,
        f"num_layers={config.num_layers} cannot fill {pp} pipeline stages; use at most {config.num_layers}",
    )


def _expert_rules(config: TransformerConfig, ranks: int) -> Iterator[tuple[bool, str]]:
    experts = config.num_moe_experts
    if experts is None:
        yield ranks == 1, f"expert={ranks}, and the model has no experts; give num_moe_experts, or use expert=1"
        return
    valid = ", ".join(map(str, divisors(experts)))
    yield experts % ranks == 0, f"num_moe_experts={experts} does not divide over expert={ranks}; valid: {valid}"


def _divides(name: str, size: int, tp: int, limit: int) -> tuple[bool, str]:
    valid = ", ".join(str(d) for d in range(1, 65) if limit % d == 0)
    return size % tp == 0, f"{name}={size} does not divide over tensor_model_parallel_size={tp}; valid: {valid}"


def check_layout(config: TransformerConfig, parallel: ParallelConfig) -> None:
    """Raise one ValueError with everything in `config` that does not fit `parallel`."""
    raise_all("model and parallel layout", layout_rules(config, parallel))
