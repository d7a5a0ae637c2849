"""Rules between a model and a layout of ranks: pure, so that they are checked before any process group exists."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.parallel_state import ParallelConfig
from core.parallel_state.config import divisors, raise_all
from core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from core.transformer.spec import TransformerLayerSpec


def layout_rules(config: TransformerConfig, parallel: ParallelConfig) -> Iterator[tuple[bool, str]]:
    """(holds, message) for every fact of `config` that a layout of `parallel` divides."""
    tp = parallel.tensor
    pp = parallel.pipeline
    heads = config.num_attention_heads
    groups = config.groups
    yield _divides_rule("num_attention_heads", heads, tp, heads)
    yield _divides_rule("num_query_groups", groups, tp, groups)
    # experts are whole on each tensor rank
    if not all(map(config.has_experts, range(config.num_layers))):
        yield _divides_rule("ffn_hidden_size", config.ffn, tp, config.ffn)
    if (shared := config.moe_shared_expert_intermediate_size) is not None:
        yield _divides_rule("moe_shared_expert_intermediate_size", shared, tp, shared)
    yield from _context_rules(config, parallel)
    yield from _expert_rules(config, parallel.expert)
    yield (
        config.num_layers >= pp,
        f"num_layers={config.num_layers} cannot fill {pp} pipeline stages; use at most {config.num_layers}",
    )


def _expert_rules(config: TransformerConfig, ranks: int) -> Iterator[tuple[bool, str]]:
    experts = config.num_moe_experts
    if experts is None:
        yield (
            ranks == 1,
            f"expert={ranks}, and the model has no experts; give num_moe_experts, or use expert=1",
        )
        return
    valid = ", ".join(map(str, divisors(experts)))
    yield (
        experts % ranks == 0,
        f"num_moe_experts={experts} does not divide over expert={ranks}; valid: {valid}",
    )


def _context_rules(
    config: TransformerConfig, parallel: ParallelConfig
) -> Iterator[tuple[bool, str]]:
    context = parallel.context
    ulysses = parallel.ulysses_ranks
    tp = parallel.tensor
    yield (
        context == 1 or config.attention_dropout == 0,
        f"attention_dropout={config.attention_dropout} with context={context}: no kernel drops out of attention that "
        "is computed block by block; use attention_dropout=0 (hidden_dropout works)",
    )
    for name, size in (
        ("num_attention_heads", config.num_attention_heads),
        ("num_query_groups", config.groups),
    ):
        # else another rule refuses it
        local = size // tp if size % tp == 0 else 0
        valid = ", ".join(str(d) for d in range(1, local + 1) if local % d == 0)
        yield (
            local % ulysses == 0,
            f"{name}={size} over tensor={tp} ranks leaves {local} on each, which do not divide over the {ulysses} "
            f"context ranks that exchange heads; valid: {valid}, or cp_comm_type=p2p or all_gather, which have no "
            "such limit",
        )


def part_rules(
    spec: "TransformerLayerSpec", parallel: ParallelConfig
) -> Iterator[tuple[bool, str]]:
    """(holds, message): parts in which rows of a sequence meet must know that other ranks hold some of them."""
    if parallel.context == 1:
        return
    for name in ("layer", "attention", "core_attention"):
        part = getattr(spec, name)
        yield (
            knows_context(part),
            f"{name}={getattr(part, '__name__', part)} does not say that it knows context={parallel.context} ranks, "
            f"and would see 1/{parallel.context} of each sequence; set knows_context = True on it if it treats rows "
            "one by one or through core.context_parallel, or use context=1",
        )


def knows_context(part: object) -> bool:
    """Whether a part says so itself: what a derived class overrides, its base class cannot speak for."""
    return bool(getattr(part, "__dict__", {}).get("knows_context", False))


def _divides_rule(name: str, size: int, tp: int, limit: int) -> tuple[bool, str]:
    valid = ", ".join(str(d) for d in range(1, 65) if limit % d == 0)
    return (
        size % tp == 0,
        f"{name}={size} does not divide over tensor_model_parallel_size={tp}; valid: {valid}",
    )


def check_layout(
    config: TransformerConfig, parallel: ParallelConfig, spec: "TransformerLayerSpec | None" = None
) -> None:
    """Raise one ValueError with everything in `config`, and in the parts of `spec`, that does not fit `parallel`."""
    if callable(spec):
        name = getattr(spec, "__name__", "the spec")
        raise ValueError(f"the layer spec is the function {name}; call it: {name}()")
    of_parts = part_rules(spec, parallel) if spec is not None else ()
    raise_all("model and parallel layout", [*layout_rules(config, parallel), *of_parts])
