"""Families whose layers are not Llama's, over tensor ranks, pipelines and recomputation: transformers' numbers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages
from core.models.huggingface import canonical, from_huggingface, load_huggingface
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.modules import named_parameters
from core.pipeline import Pipeline, SingleStage, schedules
from core.training import next_token_loss
from core.training.generate import generate, generate_batch
from tests.marks import FULL, PRODUCT, thinned
from tests.models.huggingface import TODAY, exactly, random_model
from tests.models.test_huggingface import CONFIGS
from tests.parity.shards import whole_gradients
from tests.parity.whole import assembled, assert_same
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

LAYERED = ["gemma3", "gemma3-scaled", "olmo2", "smollm3", "smollm3-window"]
UNLIKE_LLAMA = ["gemma3", "olmo2", "smollm3-window", "deepseek_v3"]
VOCAB, S, ROWS = 101, 12, 4


def in_threes(kind):
    """Heads in 3 groups of 2, for 3 tensor ranks; nothing divides by 2 alone."""
    config = {**CONFIGS, **TODAY}[kind]()
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 97}
    if hasattr(config, "kv_lora_rank"):
        sizes["num_key_value_heads"] = 6
    sizes["hidden_size"] = 48 if kind == "phi3" else 36  # half of a head is rotated there
    sizes |= {"intermediate_size": 45, "moe_intermediate_size": 21}
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def deep(kind):
    """With a layer for each stage of a V over 2 ranks."""
    config = {**CONFIGS, **TODAY}[kind]()
    if config.num_hidden_layers >= 4:
        return config
    said = {name: value for name, value in config.to_dict().items() if name not in ("layer_types", "n_layer")}
    return type(config)(**said | {"num_hidden_layers": 4})


def batch(vocab):
    tokens = torch.randint(vocab, (ROWS, S + 1), generator=torch.Generator().manual_seed(3))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def theirs_of(config):
    """(model, loss, gradient of the summed loss by our names)."""
    model, rows = random_model(config), batch(config.vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        exactly(patch)
        logits = model(rows["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        loss.backward()
    ours = from_huggingface(config).config
    return model, loss.item(), canonical({name: p.grad for name, p in model.named_parameters()}, ours)


def made(config, weights, ps, schedule):
    """stage -> model of this rank."""
    arguments = from_huggingface(config, params_dtype=torch.float64).arguments()
    if ps.size("pp") == 1:
        stages = {0: GPTModel(**arguments, parallel=ps)}
    else:
        stages = gpt_stages(**arguments, parallel=ps, placement=schedules.placement(schedule, ps.size("pp")))
    for stage in stages.values():
        load_huggingface(stage, weights)
    return stages


def one_step(kind, threes, tp, pp, sp, schedule, recompute):
    config = in_threes(kind) if threes else deep(kind)
    theirs, loss, want = theirs_of(config)
    ps = state(tp=tp, pp=pp, sp=sp)
    stages = made(config, theirs.state_dict(), ps, schedule)
    sync = PerParameterGradSync(stages, ps)
    if pp == 1:
        apply_recompute(stages[0], recompute, stage=stages[0].stage)
        executor = SingleStage(stages[0], ps=ps, num_microbatches=2, grad_sync=sync)
    else:
        executor = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=2, recompute=recompute, grad_sync=sync)
    result = executor.step(batch(config.vocab_size), next_token_loss)
    assert abs(result.loss_sum.item() - loss) <= 1e-9 * abs(loss)
    parameters = dict(named_parameters(stages))
    found = {name: parameter.main_grad for name, parameter in parameters.items()}
    layouts = {name: layout_of(parameter) for name, parameter in parameters.items()}
    assert_same(assembled(found, layouts, ps), want, 1e-9)


# tp, pp, sequence parallelism, schedule, recompute
LAYOUTS = [
    (2, 1, True, "", "layer"),
    (1, 2, False, "1f1b", "stage"),
    (2, 2, True, "zb-v", "selective"),
    pytest.param((1, 2, False, "zb-v", "layer"), marks=PRODUCT),
    pytest.param((2, 2, False, "1f1b", "stage"), marks=PRODUCT),
    pytest.param((4, 1, True, "", "none"), marks=pytest.mark.full),
]


def layout_id(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("kind", UNLIKE_LLAMA)
def test_a_step_is_that_of_transformers(ranks, kind, layout):
    tp, pp, *how = layout
    ranks(one_step, kind, False, tp, pp, *how, world=tp * pp)


PIPELINES = [("1f1b", 1), ("zb-v", 2)]
OTHERS = sorted({*CONFIGS, *TODAY} - {*UNLIKE_LLAMA})


@pytest.mark.full
@pytest.mark.parametrize("kind, schedule, tp", thinned([(k, *how) for how in PIPELINES for k in OTHERS], every=2))
def test_a_step_of_every_family_over_a_pipeline(ranks, kind, schedule, tp):
    ranks(one_step, kind, False, tp, 2, False, schedule, "none", world=2 * tp)


@pytest.mark.parametrize(
    "kind",
    ["olmo2", *thinned(sorted({*CONFIGS, *TODAY} - {"olmo2"}), 3, [pytest.mark.full])],
)
def test_three_tensor_ranks(ranks, kind):
    ranks(one_step, kind, True, 3, 1, True, "", "layer", world=3)


def dropped(kind, pp, schedule, recompute, zero):
    """Windows, norms and scales with dropout: one process's step, whatever the pipeline, recomputation and ZeRO."""
    form = from_huggingface(TODAY[kind](), params_dtype=torch.float64)
    config = replace(form.config, hidden_dropout=0.1, attention_dropout=0.2, init_method_std=0.3)
    arguments, rows = form.arguments() | {"config": config, "seed": 2}, batch(VOCAB)
    single = ParallelState.single("cpu")
    model = GPTModel(**arguments, parallel=single)
    executor = SingleStage(
        model, ps=single, num_microbatches=2, seed=4, grad_sync=PerParameterGradSync(model, single)
    )
    loss = executor.step(rows, next_token_loss).loss_sum.item()
    # without the padding of the vocabulary
    want = {name: p.main_grad[tuple(map(slice, layout_of(p).shape))] for name, p in model.named_parameters()}

    ps = state(pp=pp)
    stages = gpt_stages(**arguments, parallel=ps, placement=schedules.placement(schedule, pp) if pp > 1 else (0,))
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=500)
    if pp > 1:
        executor = Pipeline(
            stages, ps=ps, schedule=schedule, num_microbatches=2, recompute=recompute, grad_sync=shard, seed=4
        )
        mine = rows
    else:
        apply_recompute(stages[0], recompute, stage=stages[0].stage)
        executor = SingleStage(stages[0], ps=ps, num_microbatches=1, grad_sync=shard, seed=4)
        mine = {name: tensor[2 * ps.index("dp") :][:2] for name, tensor in rows.items()}
    result = executor.step(mine, next_token_loss)
    assert abs(result.loss_sum.item() - loss) <= 1e-10 * abs(loss)
    found = whole_gradients(shard)
    assert_same(found, want)


@pytest.mark.parametrize(
    "pp, schedule, recompute, zero",
    [(2, "zb-v", "stage", 0), (1, "", "layer", 3), pytest.param(2, "1f1b", "layer", 1, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("kind", ["gemma3", "olmo2"])
def test_with_dropout_a_step_is_one_process_s(ranks, kind, pp, schedule, recompute, zero):
    ranks(dropped, kind, pp, schedule, recompute, zero, world=2)


@pytest.mark.parametrize("groups, tied", [(1, True), (2, False), (8, True)])
@pytest.mark.parametrize("kind", ["gemma3", "olmo2", "smollm3"])
def test_heads_in_other_groups(kind, groups, tied):
    config = TODAY[kind]()
    config.num_key_value_heads, config.tie_word_embeddings, config.vocab_size = groups, tied, 89
    theirs, _, want = theirs_of(config)
    ps = ParallelState.single("cpu")
    model = GPTModel(**from_huggingface(config, params_dtype=torch.float64).arguments(), parallel=ps)
    load_huggingface(model, theirs.state_dict())
    rows = batch(89)
    model(rows["tokens"], labels=rows["labels"]).sum().backward()
    found = {name: p.grad[tuple(map(slice, layout_of(p).shape))] for name, p in model.named_parameters()}
    assert_same(found, {name: gradient for name, gradient in want.items() if name in found}, 1e-9)


PROMPTS = [[5, 100, 3], [9, 9, 1, 2, 4, 77, 31, 8]]


@pytest.mark.parametrize("kind", UNLIKE_LLAMA)
def test_prompts_of_one_batch_are_as_alone_and_as_without_a_cache(kind):
    ps, weights = ParallelState.single("cpu"), random_model(TODAY[kind]())
    model = made(weights.config, weights.state_dict(), ps, "")[0]
    together = generate_batch(model, PROMPTS, new_tokens=12)
    assert together == [generate(model, prompt, new_tokens=12) for prompt in PROMPTS]
    assert together == generate_batch(model, PROMPTS, new_tokens=12, cache=False)


def their_texts(kind):
    theirs = random_model(deep(kind)).eval()
    options = transformers.GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    with pytest.MonkeyPatch.context() as patch:
        exactly(patch)
        return [theirs.generate(torch.tensor([p]), generation_config=options)[0].tolist() for p in PROMPTS]


def our_texts(kind, tp, pp):
    theirs, ps = random_model(deep(kind)), state(tp=tp, pp=pp)
    stages = made(theirs.config, theirs.state_dict(), ps, "zb-v")
    executor = Pipeline(stages, ps=ps, schedule="zb-v", num_microbatches=1) if pp > 1 else None
    model = stages[min(stages)]
    return [generate(model, prompt, new_tokens=12, executor=executor) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "tp, pp", [pytest.param(1, 2, marks=pytest.mark.full), (2, 1), pytest.param(4, 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", UNLIKE_LLAMA)
def test_greedy_tokens_on_a_layout_are_those_of_transformers(ranks, kind, tp, pp):
    assert ranks(our_texts, kind, tp, pp, world=tp * pp) == [their_texts(kind)] * (tp * pp)


@pytest.mark.parametrize(
    "kind, tp, pp", thinned([(kind, *how) for how in ((1, 2), (2, 1), (4, 1)) for kind in OTHERS], 4, [FULL])
)
def test_greedy_tokens_of_every_family_are_those_of_transformers(ranks, kind, tp, pp):
    assert ranks(our_texts, kind, tp, pp, world=tp * pp) == [their_texts(kind)] * (tp * pp)
