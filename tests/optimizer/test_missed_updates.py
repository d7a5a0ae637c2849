"""Updates that parameters missed are in a checkpoint for all pipeline stages."""

import pytest

from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages, llama_spec
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.training import next_token_loss
from tests.models.gpt import POSITIONS, VOCAB, batch, config, gpt
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

NAME = "decoder.layers.{}.mlp.linear_fc1.weight"


def missed():
    """Each stage freezes its own layer for one of two steps."""
    ps = state(pp=2)
    stages = gpt_stages(config("llama"), llama_spec(), VOCAB, POSITIONS, placement=(0, 1), parallel=ps)
    shard = DataParallel(stages, ps)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-3))
    pipeline = Pipeline(stages, ps=ps, num_microbatches=2, grad_sync=shard)
    tokens, labels = batch()
    mine = dict(stages[ps.rank].named_parameters())[NAME.format(ps.rank)]
    for frozen in (True, False):
        mine.requires_grad_(not frozen)
        result = pipeline.step({"tokens": tokens, "labels": labels}, next_token_loss)
        optimizer.step(num_tokens=result.num_tokens)
        optimizer.zero_grad()
    count = optimizer.sharded_state_dict()["step_count"].data
    optimizer.load_state_dict({"step_count": count, "skipped_steps": 0})
    return count, optimizer.sharded_state_dict()["step_count"].data


def test_a_checkpoint_holds_those_of_all_stages(ranks):
    first, second = ranks(missed)
    assert first == second
    before, after = first
    assert before == after and before["steps"] == 2
    assert before["behind"] == {NAME.format(0): 1, NAME.format(1): 1}


def test_an_optimizer_of_one_count_refuses_them():
    ps = ParallelState.single("cpu")
    model = gpt(parallel=ps)
    optimizer = AdamW(model, ps, OptimizerConfig(), grad_sync=PerParameterGradSync(model, ps))
    with pytest.raises(ValueError, match="1 parameters of this checkpoint missed updates"):
        optimizer.load_state_dict({"step_count": {"steps": 3, "behind": {"a": 1}, "groups": []}, "skipped_steps": 0})
