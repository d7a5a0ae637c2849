"""Preference tuning on every layout: losses, rewards and gradients of a plain implementation with a frozen copy."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.datasets import ByteTokenizer, PreferenceBatches, TokenFile, TokenFileWriter
from core.models.gpt import GPTModel
from core.models.lora import LoraConfig, apply_lora
from core.optimizer import OptimizerConfig, build_optimizer
from core.parallel_state import ParallelState, layout_of
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training.config import DPOConfig
from core.training.preferences.loss import DPOLoss
from core.training.preferences.reference import References
from tests.parity.pipelines import SEED, VOCAB, S, build, config, spec
from tests.parity.shards import whole_gradients
from tests.parity.whole import assert_same
from tests.states import state

PAIRS, BATCH, M, LAYERS, LR = 7, 6, 3, 4, 0.5  # pairs in all and in a batch; microbatches of a replica
ADAPTERS = LoraConfig(rank=2, alpha=1.0)
SIGMOID = DPOConfig(beta=0.5, label_smoothing=0.1)
IPO = DPOConfig(beta=0.5, loss_type="ipo")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Prompts of 1 to 3 tokens, responses of 1 to 9: some are longer than a row."""
    prefix = str(tmp_path_factory.mktemp("pairs") / "pairs")
    random = np.random.default_rng(3)
    with TokenFileWriter(prefix, vocab_size=VOCAB, tokenizer=ByteTokenizer(), in_pairs=True) as writer:
        for pair in range(PAIRS):
            prompt = random.integers(0, VOCAB, 1 + pair % 3)
            for _ in range(2):
                response = random.integers(0, VOCAB, random.integers(1, 10))
                tokens = np.concatenate([prompt, response])
                writer.add_conversation(tokens, np.arange(len(tokens)) >= len(prompt))
    return prefix


def batches_of(prefix):
    return PreferenceBatches(token_file=TokenFile(prefix), sequence_length=S, global_batch_size=BATCH, seed=1)


def plain(prefix, dpo, lora):
    """(losses, rewards, gradients) of the second of two steps of SGD: logits, a frozen copy, means over pairs."""
    alone = ParallelState.single("cpu")
    model = GPTModel(config(num_layers=LAYERS), spec(), VOCAB, S, parallel=alone)
    if lora:
        apply_lora(model, ADAPTERS)
    frozen = copy.deepcopy(model).requires_grad_(False)

    def log_probs(model, batch):
        counted = batch["labels"] >= 0
        logits = model(batch["tokens"])[..., :VOCAB]
        per_token = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
        return (per_token * counted).sum(1), counted.sum(1)

    losses = []
    for step in range(2):
        batch = batches_of(prefix).batch(step)
        policy, lengths = log_probs(model, batch)
        reference, _ = log_probs(frozen, batch)
        ratio = policy - reference
        if dpo.loss_type == "ipo":
            ratio = ratio / lengths
            loss = (ratio[0::2] - ratio[1::2] - 1 / (2 * dpo.beta)) ** 2
        else:
            z = dpo.beta * (ratio[0::2] - ratio[1::2])
            loss = F.softplus(-z) * (1 - dpo.label_smoothing) + F.softplus(z) * dpo.label_smoothing
        model.zero_grad()
        loss.mean().backward()
        losses.append(loss.mean().item())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= LR * p.grad
    rewards = dpo.beta * (policy - reference).detach()
    margins = rewards[0::2] - rewards[1::2]
    told = (rewards[0::2].mean(), rewards[1::2].mean(), margins.mean(), (margins > 0).double().mean())
    # without the rows that pad the vocabulary
    whole = {
        n: g[: layout_of(p).shape[0]] for n, p in model.named_parameters() if (g := gradients.get(n)) is not None
    }
    return losses, [float(value) for value in told], whole


def on_ranks(prefix, dpo, schedule="none", zero=0, lora=False, recompute="none", chunk=None, **sizes):
    """The same by the parts that a run is made of."""
    ps = state(**sizes)
    placement = (0,) if schedule == "none" else named.placement(schedule, 2)
    stages, first = build(placement, ps, num_layers=LAYERS)
    first.remove()
    if lora:
        apply_lora(stages, ADAPTERS)
    for stage in stages.values():
        stage.loss_chunk = chunk
    shard = DataParallel(stages, ps, zero_stage=zero)
    plain_sgd = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "lr": LR}
    optimizer = build_optimizer(shard, OptimizerConfig(**plain_sgd))
    facts = {"ps": ps, "num_microbatches": M, "grad_sync": shard, "seed": SEED}
    if schedule == "none":
        apply_recompute(stages[0], recompute, stage=stages[0].stage)
        executor = SingleStage(stages[0], **facts)
    else:
        executor = Pipeline(stages, schedule=schedule, recompute=recompute, **facts)
    batches, loss_fn = batches_of(prefix), DPOLoss(dpo, ps)
    corpus = SimpleNamespace(training=SimpleNamespace(global_batch_size=BATCH), train=batches, validation_texts={})
    references = References(corpus, ps)
    references.compute(executor, lambda line: None)
    losses = []
    for step in range(2):
        loss_fn.begin()
        optimizer.zero_grad()
        batch = references.around(batches).batch(step, ps.index("dp"), ps.size("dp"))
        result = executor.step(batch, loss_fn)
        losses.append(result.loss.item())
        gradients = {n: g / float(result.num_tokens) for n, g in whole_gradients(shard).items()}
        assert int(result.num_tokens) == BATCH
        counted = int((batches.batch(step)["labels"] >= 0).sum())
        assert int(loss_fn.tokens(batch)) == counted
        optimizer.step(num_tokens=result.num_tokens)
    return losses, list(loss_fn.rewards().values()), gradients


full = pytest.mark.full
CASES = [
    (1, SIGMOID, {}),
    (2, SIGMOID, {"tp": 2, "sp": True, "chunk": 5}),
    (2, IPO, {"pp": 2, "schedule": "zb-v", "zero": 1, "recompute": "stage"}),
    (2, SIGMOID, {"zero": 3, "recompute": "layer"}),
    (2, SIGMOID, {"zero": 1, "lora": True}),
    pytest.param(1, IPO, {"chunk": 5}, marks=full),
    pytest.param(2, IPO, {"tp": 2, "lora": True}, marks=full),
    pytest.param(2, SIGMOID, {"pp": 2, "schedule": "zb-h1", "lora": True}, marks=full),
    pytest.param(2, IPO, {"zero": 2}, marks=full),
    pytest.param(4, SIGMOID, {"tp": 2, "sp": True, "pp": 2, "schedule": "zb-v", "lora": True}, marks=full),
    pytest.param(4, SIGMOID, {"pp": 2, "schedule": "1f1b", "zero": 3, "recompute": "stage"}, marks=full),
    pytest.param(4, IPO, {"tp": 2, "sp": True, "zero": 3}, marks=full),
]


@pytest.mark.parametrize(("world", "dpo", "layout"), CASES)
def test_every_layout_computes_what_a_frozen_copy_says(ranks, pairs, world, dpo, layout):
    losses, rewards, gradients = plain(pairs, dpo, layout.get("lora", False))
    assert losses[1] < losses[0]
    for found in ranks(on_ranks, pairs, dpo, world=world, **layout):
        assert found[0] == pytest.approx(losses, abs=1e-12)
        assert found[1] == pytest.approx(rewards, abs=1e-12)
        assert_same(found[2], gradients)
