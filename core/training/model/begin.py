"""The stages of a run with its first weights: drawn from the seed, of a Hugging Face folder, or of one's own."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import nan

import torch
from torch import nn

from core.dist_checkpointing.planning.ranks import from_first
from core.models.gpt import GPTModel, gpt_stages
from core.models.huggingface import load_huggingface
from core.models.lora import apply_lora
from core.parallel_state import Init, ParallelState
from core.parallel_state.modules import named_parameters
from core.pipeline import Pipeline, SingleStage
from core.training.config import ModelConfig, PipelineConfig, RunConfig
from core.training.generation import generate_batch
from core.training.log.metrics import flops_per_token
from core.training.model.own import own_stages
from core.training.model.weights import form_of_weights, load_weights
from core.training.run.build import count_parameters, count_trained
from core.training.sampling import Sampling


def build_stages(
    model: ModelConfig,
    pipeline: PipelineConfig,
    tokens: int,
    sequence_length: int,
    ps: ParallelState,
) -> dict[int, GPTModel]:
    """stage -> model of this rank, its weights drawn from the seed; one whole model where there is one pipeline rank.

    tokens: of the tokenizer. Raises ValueError: more than the model's vocabulary.
    """
    ranks = ps.size("pp")
    return gpt_stages(
        **model.arguments(tokens, sequence_length),
        placement=pipeline.placement(ranks) if ranks > 1 else (0,),
        parallel=ps,
        seed=model.seed,
        parallel_output=True,  # logits stay split over tensor ranks; whoever reads them gathers
    )


def begin(
    run: RunConfig,
    tokens: int,
    ps: ParallelState,
    say: Callable[[str], None] = print,
    *,
    may_be_on_meta: bool = False,
) -> Mapping[int, nn.Module]:
    """stage -> module of this rank, with the weights that the run begins with. Collective.

    A run that goes on from a checkpoint reads and draws no other weights: `Checkpoints.resume` fills them.
    may_be_on_meta: weights that are drawn from the seed are left to `DataParallel`, which fills its buckets with them
    one by one; a rank never has them twice.
    """
    resumes = from_first(run.checkpoint.resumes, ps)
    return first_stages(run, tokens, ps, resumes=resumes, say=say, may_be_on_meta=may_be_on_meta)


def first_stages(
    run: RunConfig,
    tokens: int,
    ps: ParallelState,
    *,
    resumes: bool,
    say: Callable[[str], None] = lambda line: None,
    may_be_on_meta: bool = False,
) -> Mapping[int, nn.Module]:
    """As `begin`, also for one process by itself. Raises ValueError: weights of another model."""
    if run.lora.rank is None:
        return _whole_stages(run, tokens, ps, resumes, say, may_be_on_meta=may_be_on_meta)
    # frozen weights that no checkpoint holds are read again
    in_checkpoint = resumes and run.lora.save_base
    stages = _whole_stages(run, tokens, ps, in_checkpoint, say, may_be_on_meta=False)
    apply_lora(stages, run.lora, say=lambda line: say(f"note: {line}"))
    for stage in stages.values():
        stage.awaits_checkpoint = resumes  # type: ignore[assignment]
    return stages


def _whole_stages(
    run: RunConfig,
    tokens: int,
    ps: ParallelState,
    resumes: bool,
    say: Callable[[str], None],
    *,
    may_be_on_meta: bool,
) -> Mapping[int, nn.Module]:
    """This rank's stages as the checkpoint knows them: the model without adapters."""
    weights = run.checkpoint.weights
    folder = run.model.huggingface
    length = run.data.sequence_length
    # weights that something else fills are not read from the folder first
    if run.model.build is not None or folder is None or weights is not None or resumes:
        stages: Mapping[int, nn.Module]
        if run.model.build is not None:
            stages = own_stages(run, tokens, ps)
        else:
            on_meta = resumes or (may_be_on_meta and weights is None)
            with torch.device("meta") if on_meta else nullcontext():
                stages = built = build_stages(run.model, run.pipeline, tokens, length, ps)
            if resumes:
                leave_undrawn(built, ps.device, on_meta=may_be_on_meta)
        if weights is not None and not resumes:
            load_weights(stages, weights, ps, say, grows=run.lora.rank is None)
        return stages
    return _stages_of_folder(run, folder, tokens, ps)


def _stages_of_folder(
    run: RunConfig, folder: str, tokens: int, ps: ParallelState
) -> dict[int, GPTModel]:
    # no rank ever holds more than its own part
    with torch.device("meta"):
        stages = build_stages(run.model, run.pipeline, tokens, run.data.sequence_length, ps)
    materialize(stages, ps.device)
    for stage in stages.values():
        load_huggingface(stage, folder)
    return stages


def leave_undrawn(stages: Mapping[int, GPTModel], device: torch.device, *, on_meta: bool) -> None:
    """Of stages on meta: their parameters begin as NaN instead of numbers that a checkpoint overwrites.

    One core draws 8B numbers in some 20 s; NaN, so that what no checkpoint fills is seen. on_meta: they stay there,
    to be filled by `DataParallel`.
    """
    if not on_meta:
        materialize(stages, device)
    drawn = {
        name: init
        for name, p in named_parameters(stages)
        if (init := getattr(p, "initial", None)) is not None
    }
    # with a standard deviation of 0: filled with NaN, and nothing is drawn
    _set_initial(stages, dict.fromkeys(drawn, Init(mean=nan)))
    for stage in stages.values():
        stage.awaits_checkpoint = True
    if not on_meta:
        for stage in stages.values():
            stage.init_weights()
        _set_initial(stages, drawn)


def _set_initial(stages: Mapping[int, GPTModel], initial: Mapping[str, Init]) -> None:
    for name, parameter in named_parameters(stages):
        if name in initial:
            parameter.initial = initial[name]  # type: ignore[attr-defined]


def materialize(stages: Mapping[int, GPTModel], device: torch.device) -> None:
    """Give stages on meta their memory; ends that shared a table share it again."""
    first = stages[min(stages)]
    last = stages[max(stages)]
    # to_empty gives each parameter memory of its own, which separates a table that both ends share
    ends = first.pre_process and last.post_process and first is not last and first.tied
    shared = (
        ends and first.embedding.word_embeddings.weight is last.embedding.word_embeddings.weight
    )
    for stage in stages.values():
        stage.to_empty(device=device)
    if shared:
        last.embedding.word_embeddings.weight = first.embedding.word_embeddings.weight


def began_as(run: RunConfig) -> dict[str, str]:
    """Where the first weights are from, for the manifest of every checkpoint; empty: drawn from the seed.

    form: of weights, the Hugging Face folder that they began as.
    """
    if run.checkpoint.weights is not None:
        form = run.model.huggingface or form_of_weights(run.checkpoint.weights)
        found = {"weights": run.checkpoint.weights}
        return found if form is None else found | {"form": form}
    if run.model.huggingface is not None:
        return {"huggingface": run.model.huggingface}
    return {}


def step_flops_per_token(
    run: RunConfig, stages: Mapping[int, nn.Module], tokens: int, ps: ParallelState
) -> int:
    """Matmul FLOPs of a token's forward and backward; of a model of one's own 6 per parameter. All-gather over pp."""
    adapters = None if run.lora.rank is None else count_trained(stages, ps)
    if run.model.build is not None:
        total, _ = count_parameters(stages, ps)
        return 6 * total
    return flops_per_token(
        run.model.transformer(), run.model.vocabulary(tokens), run.data.sequence_length, adapters
    )


def sample(
    stages: Mapping[int, nn.Module],
    prompt: list[int],
    executor: SingleStage | Pipeline,
    vocab_size: int,
) -> list[int]:
    """`prompt` and 100 tokens of the tokenizer's more; of a model of one's own the prompt alone. Collective."""
    first = stages[min(stages)]
    if not isinstance(first, GPTModel):
        return prompt
    how = Sampling(temperature=0.7, vocab_size=vocab_size)
    (text,) = generate_batch(first, [prompt], new_tokens=100, sampling=how, executor=executor)
    return text
