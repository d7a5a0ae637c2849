"""After the first step nothing waits for the device: no value of a tensor is read, on any layout."""

from contextlib import nullcontext

import pytest
import torch

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.training import CheckpointConfig, DataConfig, TrainingConfig, next_token_loss
from core.training.run.checkpoint import Checkpoints
from core.training.run.stop import StopFlag
from tests.parity import pipelines
from tests.states import state
from tests.training.host_reads import as_on_an_accelerator, host_reads


def test_reads_are_counted():
    x = torch.ones(3)
    with host_reads() as found:
        assert x.sum().item() == 3
        assert float(x[0]) + int(x[1]) == 2
        assert x.tolist() == [1, 1, 1]
        if x.any():
            x.numpy()
    assert found["tests/training/test_host_reads.py test_reads_are_counted"] >= 6


def steps(zero_stage, pp, schedule="1f1b", recompute="none", directory=None, device=as_on_an_accelerator):
    """What the third step reads."""
    with device():
        ps = ParallelState.build(pipelines.state(pp=pp).config, device="cpu")
        if pp == 1:
            model = GPTModel(
                pipelines.config(num_layers=2), pipelines.spec(), pipelines.VOCAB, pipelines.S, parallel=ps
            )
            stages = {0: model}
        else:
            facts = {"parallel": ps, "placement": (0, 1)}
            config = pipelines.config(num_layers=2)
            stages = pipelines.gpt_stages(config, pipelines.spec(), pipelines.VOCAB, pipelines.S, **facts)
        shard = DataParallel(stages[0] if pp == 1 else stages, ps, zero_stage=zero_stage)
        optimizer = ShardedAdamW(shard, OptimizerConfig(clip_grad=1.0, skip_grad_norm_above=9.0, skip_window=2))
        made = {"ps": ps, "num_microbatches": 2, "grad_sync": shard}
        if pp == 1:
            executor = SingleStage(stages[0], **made)
        else:
            executor = Pipeline(stages, schedule=schedule, recompute=recompute, **made)
        training = TrainingConfig(global_batch_size=2 * ps.size("dp"), micro_batch_size=1, train_steps=9)
        config = CheckpointConfig(directory=directory)
        checkpoints = Checkpoints(config, optimizer, ps, DataConfig(sequence_length=8), training, lambda line: None)

        def step(number):
            optimizer.zero_grad()
            result = executor.step(pipelines.batch(2), next_token_loss, optimizer.loss_scale)
            checkpoints.before_update()
            optimizer.step(num_tokens=result.num_tokens)
            assert not checkpoints.after_step(number, last=False)

        with checkpoints:
            step(1)
            step(2)  # steps 1, 2, 4, 8 compare what ranks were given
            with host_reads() as found:
                step(3)
        ps.destroy()
    return dict(found)


@pytest.mark.parametrize("zero_stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
def test_one_stage_reads_nothing(ranks, zero_stage, tmp_path):
    assert ranks(steps, zero_stage, 1) == [{}] * 2
    assert ranks(steps, zero_stage, 1, directory=str(tmp_path / "run")) == [{}] * 2


@pytest.mark.parametrize("schedule, recompute", [("1f1b", "none"), ("zb-h1", "layer"), ("1f1b", "stage")])
def test_a_pipeline_reads_nothing(ranks, schedule, recompute, tmp_path):
    assert ranks(steps, 1, 2, schedule, recompute) == [{}] * 2
    assert ranks(steps, 1, 2, schedule, recompute, directory=str(tmp_path / "run")) == [{}] * 2


def plain_steps(zero_stage):
    """What the third step of torch's own optimizer reads."""
    with as_on_an_accelerator():
        ps = ParallelState.build(state().config, device="cpu")
        model = GPTModel(pipelines.config(num_layers=2), pipelines.spec(), pipelines.VOCAB, pipelines.S, parallel=ps)
        DataParallel(model, ps, zero_stage=zero_stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)  # AdamW reads its own step, on the host

        def step():
            optimizer.zero_grad()
            batch = pipelines.batch(2)
            model(batch["tokens"], labels=batch["labels"]).mean().backward()
            optimizer.step()

        step()
        step()
        with host_reads() as found:
            step()
        ps.destroy()
    return dict(found)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_torchs_optimizer_around_data_parallel_reads_nothing(ranks, zero_stage):
    assert ranks(plain_steps, zero_stage) == [{}] * 2


def test_one_process_reads_nothing():
    assert steps(1, 1) == {}


def test_on_a_cpu_values_are_looked_at():
    """Where nothing waits, mistakes are told at once: so the counting above could find something."""
    found = steps(1, 1, device=nullcontext)
    assert found["core/optimizer/step/watch.py remember"] and found["core/parallel_state/value_range.py check_range"]


def asked(rank_asked, device):
    """What every step says to a rank that is asked to stop in step 1."""
    ps = state(tp=2)
    with device():
        flag = StopFlag(ps)
        return [flag.look(step >= 1 and ps.rank == rank_asked) for step in range(4)]


@pytest.mark.parametrize("rank_asked", [0, 1])
def test_all_ranks_stop_after_the_same_step(ranks, rank_asked):
    assert ranks(asked, rank_asked, nullcontext) == [[False, True, True, True]] * 2
    assert ranks(asked, rank_asked, as_on_an_accelerator) == [[False, False, True, True]] * 2
