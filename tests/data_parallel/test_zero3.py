"""ZeRO-3: what is whole when, foreign models with torch's own checkpointing, evaluation and sampling, wrong use."""

import copy

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelConfig, ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules
from core.pipeline.schedule.passes import add_gathers
from core.training import next_token_loss
from core.training.generate import generate
from tests.parity.pipelines import SEED, VOCAB, S, batch, config, differences, spec
from tests.parity.shards import norm, whole_gradients
from tests.parity.test_pipeline_meshes import FEW, M, one_process
from tests.states import state


class Watched(DataParallel):
    """Notes which buckets are whole at each moment."""

    def whole(self):
        return {buffer.number for buffer in self.buffers if buffer.gathered}

    def start(self):
        self.log = []
        return self

    def after_input_grad(self, stage, waiting=()):
        assert self.whole(), "I needs the first unit at least"
        super().after_input_grad(stage, waiting)
        self.log.append(("after I", self.whole()))

    def ready(self, param):
        self.log.append(("W", self.whole()))
        taken = [b.number for b in self.buffers if b._grad_storage.has_memory]
        vectors = sum(b.bucket.vector for b in self.buffers)
        assert len(taken) <= 3 + vectors < len(self.buffers), "two under way and this one, not the whole stage"
        super().ready(param)


def stages_of(ps, placement, tied=True):
    made = {"share_embeddings_and_output_weights": tied, "parallel": ps, "placement": placement}
    return gpt_stages(config(num_layers=FEW), spec(), VOCAB, S, **made)


def a_delayed_w(schedule):
    ps = state(pp=2)
    stages = stages_of(ps, schedules.placement("zb-v", 2), tied=False)
    shard = Watched(stages, ps, zero_stage=3, bucket_size=100).start()
    pipeline = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=M, grad_sync=shard, seed=SEED)
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * 2).items()}
    assert shard.whole() == set()
    result = pipeline.step(mine, next_token_loss)
    assert shard.whole() == set()
    assert not differences(
        (whole_gradients(shard), result.loss.item(), norm(shard, result.num_tokens)),
        one_process(2, False, "llama", 0.0, False),
    )
    return shard.log


def test_weights_are_free_in_w_and_gradients_come_bucket_by_bucket(ranks):
    for log in ranks(a_delayed_w, "zb-v", world=4):
        assert {what for what, _ in log} == {"after I", "W"}
        assert all(not whole for _, whole in log), "nothing is whole after I, nor in W"


def test_a_schedule_may_keep_stages_whole(ranks):
    for log in ranks(a_delayed_w, add_gathers(schedules.make("zb-v", 2, M)), world=4):
        assert any(whole for what, whole in log if what == "after I"), "UNSHARD holds what I would have freed"


def tied_language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    facts = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**facts, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model.to(torch.float64)


def checkpointed(zero, reentrant):
    ps, ids = state(), torch.randint(40, (4, 8), generator=torch.Generator().manual_seed(1))
    model, twin = tied_language_model(), tied_language_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    shard = DataParallel(model, ps, zero_stage=zero, bucket_size=2000)
    mine = ids.chunk(ps.size("dp"))[ps.index("dp")]
    model(input_ids=mine, labels=mine).loss.backward()
    shard.finish()
    twin(input_ids=ids, labels=ids).loss.backward()
    found = whole_gradients(shard)
    for name, p in twin.named_parameters():
        error = (found[name] / ps.size("dp") - p.grad).abs().max()
        assert error <= 1e-10 * p.grad.abs().max(), (name, error)
    assert found.keys() == dict(twin.named_parameters()).keys() and not shard.unused()


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_tied_language_model_under_torchs_checkpointing(ranks, zero, reentrant):
    ranks(checkpointed, zero, reentrant, world=2)


def validates_and_samples(zero, pp):
    ps = state(pp=pp)
    placement = schedules.placement("zb-v", 2) if pp == 2 else (0,)
    stages = stages_of(ps, placement)
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=300)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.05))
    facts = {"ps": ps, "num_microbatches": M, "grad_sync": shard, "seed": SEED}
    run = Pipeline(stages, schedule="zb-v", **facts) if pp == 2 else SingleStage(stages[0], **facts)
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * ps.size("dp")).items()}
    losses = []
    for _ in range(2):
        result = run.step(mine, next_token_loss)
        optimizer.step(num_tokens=result.num_tokens)
        optimizer.zero_grad()
        losses += [run.evaluate(mine, next_token_loss).loss.item()]
        assert zero < 3 or not any(buffer.gathered for buffer in shard.buffers), "evaluation leaves nothing behind"
    model = stages[min(stages)]
    return losses, generate(model, [1, 2, 3], new_tokens=4, temperature=0.0, executor=run)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_validation_and_sampling(ranks, pp):
    plain = ranks(validates_and_samples, 0, pp, world=4)
    cut = ranks(validates_and_samples, 3, pp, world=4)
    for (losses, tokens), (others, same) in zip(plain, cut, strict=True):
        assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=1e-6) and tokens == same


class Branches(nn.Module):
    """Data rank 0 goes another way than the others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x, away=False):
        x = self.layers[0](x)
        return self.layers[4](x) if away else self.layers[2](self.layers[1](x))


def some_ranks_only():
    ps = ParallelState.build(ParallelConfig(tensor=2), device="cpu", timeout_s=2.0)  # groups of this test's own
    model = Branches()
    DataParallel(model, ps, zero_stage=3, bucket_size=64)
    try:
        with pytest.raises(RuntimeError) as told:
            model(torch.ones(2, 8), away=ps.index("dp") == 0)
            model(torch.ones(2, 8), away=ps.index("dp") == 0)
    finally:
        ps.destroy()
    return str(told.value)


def test_a_module_that_runs_on_some_ranks_only_is_named(ranks):
    told = ranks(some_ranks_only, world=4)
    for text in told:
        assert "waited in vain for rank" in text and "the gather of layers." in text, text
    assert all("the gather of layers.4" in text for text in told[:2]), "where it stands"


def freed():
    ps = state()
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8)]), "last": nn.Linear(8, 8)})
    before = copy.deepcopy(model.state_dict())
    shard = DataParallel(model, ps, zero_stage=3)
    weight = model["last"].weight
    assert weight.shape == (8, 8) and weight.requires_grad and not any(b.gathered for b in shard.buffers)
    assert weight.main_grad.isnan().all(), "its gradient has no memory either"
    with pytest.warns(UserWarning, match="last.weight was read outside of its module's forward"), torch.no_grad():
        weight.add_(1)
    twin = copy.deepcopy(model)  # told once
    shard.reshard(model)
    assert not any(b.gathered for b in shard.buffers), "the end of all loans"
    shard.remove()
    before["last.weight"] += 1
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[name]) and torch.equal(twin.state_dict()[name], p), name
    assert not hasattr(weight, "main_grad") and type(weight) is nn.Parameter


def test_a_freed_parameter_is_fetched_where_it_is_read(ranks):
    ranks(freed, world=2)


def test_names_that_match_nothing_are_told():
    with pytest.raises(ValueError, match=r"shard_units: 'blocks' matches no module; names here: .*decoder"):
        DataParallel(stages_of(ParallelState.single("cpu"), (0,)), ParallelState.single("cpu"), shard_units="blocks")
