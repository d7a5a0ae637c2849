"""Rules between preferences and the other parts of a run."""

from collections.abc import Iterable, Iterator

from core.datasets import TokenFile, open_blend
from core.datasets.corpus.build import TextFiles
from core.datasets.corpus.cached import is_text
from core.datasets.corpus.conversations import are_conversations
from core.datasets.corpus.hub import is_hub_name
from core.datasets.corpus.preferences import are_preferences
from core.datasets.shards.manifest import is_list
from core.parallel_state.config import ParallelConfig
from core.training.config.data import DataConfig
from core.training.config.parts import CheckpointConfig, TrainingConfig
from core.training.model.config import ModelConfig

Rules = Iterator[tuple[bool, str]]


def objective_rules(training: TrainingConfig, data: DataConfig) -> Rules:
    """Every token file holds what the objective learns from; text is looked at when it is prepared."""
    objective = training.objective
    yield (
        objective != "dpo" or bool(data.train),
        "training.objective=dpo learns from pairs of responses, data.train names 0 files; give JSON lines of prompt, "
        "chosen and rejected",
    )
    sets = [(f"valid_sets.{name}", (prefix,)) for name, prefix in data.valid_sets.items()]
    for name, blend in (("train", data.train), ("valid", data.valid), *sets):
        for prefix in _prefixes(blend):
            holds = not is_list(prefix) and TokenFile(prefix).holds_preferences
            yield (
                objective != "dpo" or holds,
                f"data.{name}={prefix} holds no preferences, which training.objective=dpo learns from; prepare JSON "
                "lines of prompt, chosen and rejected, or use another objective",
            )
            yield (
                objective == "dpo" or not holds,
                f"data.{name}={prefix} holds preferences (chosen, rejected), which only training.objective=dpo "
                "learns from; use that, or give text, chats, or prompts with a response",
            )


def preferences_in(blends: Iterable[tuple[str, ...]]) -> str | None:
    """The first of some texts, prepared or not, that holds preferences; None: none that can be read does."""
    for blend in blends:
        for prefix in _prefixes(blend):
            if not is_list(prefix) and TokenFile(prefix).holds_preferences:
                return prefix
        try:
            for _, name in open_blend(blend) if blend else ():
                if not is_text(name) or is_hub_name(name):
                    continue
                sources = TextFiles(inputs=(name,)).sources
                # rows that are chats as well are read as chats
                if are_preferences(sources) and not are_conversations(sources):
                    return name
        except (ValueError, OSError, ImportError):  # told when they are prepared
            continue
    return None


def _prefixes(blend: tuple[str, ...]) -> Iterator[str]:
    """The token files and lists of shards of a blend; those that cannot be read are told by other rules."""
    if not blend or "" in blend:
        return
    try:
        for _, prefix in open_blend(blend):
            if not is_text(prefix):
                if not is_list(prefix):
                    TokenFile(prefix)
                yield prefix
    except (ValueError, OSError):
        return


def dpo_rules(
    training: TrainingConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    checkpoint: CheckpointConfig,
) -> Rules:
    """What a loss per pair, relative to the first weights, does not go with."""
    if training.objective != "dpo":
        return
    yield (
        parallel.context == 1,
        f"parallel.context={parallel.context} cuts sequences, training.objective=dpo sums over each of them; use "
        "context=1",
    )
    yield (
        training.ramp is None,
        f"rampup_batch_size={' '.join(training.rampup_batch_size)} cuts validation batches anywhere, and "
        "training.objective=dpo needs both responses of a pair in 1 microbatch; use one batch size",
    )
    yield (
        checkpoint.keep_best != "validation.bits_per_byte",
        "checkpoint.keep_best=validation.bits_per_byte is of text, training.objective=dpo has none; use "
        "keep_best=loss",
    )
    try:
        balances = model.build is None and model.transformer().balances_experts
    except ValueError:  # told by the rules of the model
        return
    yield (
        not balances,
        "moe_aux_loss_coeff and moe_z_loss_coeff weigh losses per token, training.objective=dpo divides by pairs; "
        "use 0 for both",
    )
