"""A run that is saved, ended and resumed is the run that never ended, bit for bit; SIGTERM; what to start from."""

import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import read_manifest
from core.optimizer import OptimizerConfig
from core.training import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
    train,
)
from core.training.log.metrics import MetricsLog
from core.training.model.begin import build_stages
from core.training.run.build import build_executor, build_sharded
from core.training.run.checkpoint import Checkpoints
from tests.marks import PRODUCT
from tests.states import state as parallel

VOCABULARY, S, N = 64, 8, 4
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "dropout": 0.2}
OPTIMIZER = OptimizerConfig(
    lr=1e-2, min_lr=1e-4, lr_schedule="cosine", lr_warmup_steps=2, lr_decay_steps=N, weight_decay=0.1
)


class Run:
    """A tiny GPT with dropout and a moving learning rate, on the ranks of this job."""

    def __init__(self, checkpoint, *, tp=1, pp=1, bf16=False, recompute="none", batch=8, zero=1, **model):
        torch.set_default_dtype(torch.float32)
        self.ps = ps = parallel(tp=tp, pp=pp)
        self.training = TrainingConfig(
            train_steps=N, global_batch_size=batch, micro_batch_size=2, recompute=recompute, log_interval=1
        )
        pipeline = PipelineConfig(schedule="1f1b")
        self.stages = build_stages(ModelConfig(**MODEL | {"bf16": bf16} | model), pipeline, VOCABULARY, S, ps)
        shard, self.optimizer = build_sharded(self.stages, DataParallelConfig(zero_stage=zero), OPTIMIZER, ps)
        self.executor = build_executor(self.stages, pipeline, self.training, ps, shard)
        self.said = []
        data = DataConfig(sequence_length=S)
        config = CheckpointConfig(**{"keep_last": N} | checkpoint)
        self.checkpoints = Checkpoints(config, self.optimizer, ps, data, self.training, self.said.append)

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, VOCABULARY, (self.training.global_batch_size, S + 1), generator=generator)
        share = len(rows) // self.ps.size("dp")
        rows = rows[self.ps.index("dp") * share :][:share]
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def go(self, before=lambda step: None):
        """Resumes and runs; what was resumed."""
        start = self.checkpoints.resume()

        def batch_of(step):
            before(step)
            return self.batch(step)

        with self.checkpoints:
            train(
                self.executor,
                self.optimizer,
                batch_of,
                self.training,
                flops_per_token=1,
                log=MetricsLog(None),
                say=lambda line: None,
                checkpoints=self.checkpoints,
                start=start,
            )
        return start

    def digest(self):
        """Of every bit that later steps depend on, on this rank."""
        found = hashlib.sha256()
        for name, kinds in sorted(self.optimizer.states().items()):
            for kind, part in sorted(kinds.items()):
                found.update(f"{name} {kind}".encode() + part.tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for stage in self.stages.values():
            for name, p in stage.named_parameters():
                bits = p.detach().contiguous().view(torch.uint8).numpy().tobytes()
                found.update(name.encode() + bits)
        found.update(repr((self.optimizer.step_count, self.optimizer.learning_rate)).encode())
        return found.hexdigest()


def unbroken_and_resumed(directory, steps, layout):
    """One run saved at every step beside itself; and one begun from each of `steps`, in another process's place."""
    run = Run({"directory": directory, "every": 1}, **layout)
    assert run.go() == 0
    expected = run.digest()
    for k in steps:
        again = Run({"load": f"{directory}/step-{k:08d}"}, **layout)
        assert again.go() == k
        assert again.digest() == expected, k
        assert f"step {k}, next sample {8 * k}, optimizer {k} updates (0 skipped)" in again.said[0]
    return expected


LAYOUTS = [
    pytest.param(1, {"recompute": "none"}, id="none", marks=pytest.mark.full),
    pytest.param(1, {"recompute": "selective", "bf16": True}, id="selective-bf16", marks=pytest.mark.full),
    pytest.param(2, {"tp": 2, "recompute": "layer", "bf16": True}, id="layer-tp2-bf16"),
    pytest.param(2, {"zero": 3, "bf16": True}, id="zero3-bf16"),
    pytest.param(1, {"recompute": "layer"}, id="layer", marks=pytest.mark.full),
    pytest.param(2, {"pp": 2, "recompute": "stage"}, id="stage-pp2", marks=pytest.mark.full),
    pytest.param(2, {"pp": 2, "bf16": True}, id="pp2-bf16", marks=pytest.mark.full),
    pytest.param(2, {"recompute": "selective"}, id="dp2", marks=pytest.mark.full),
    pytest.param(4, {"tp": 2, "pp": 2}, id="tp2-pp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
@pytest.mark.parametrize("steps", [(2,), pytest.param(tuple(range(1, N)), marks=PRODUCT)], ids=["2", "all"])
def test_resumed_at_any_step_it_is_the_same_run(ranks, tmp_path, world, layout, steps):
    digests = ranks(unbroken_and_resumed, str(tmp_path), steps, layout, world=world)
    assert all(digests)
    names = {f"step-{k:08d}" for k in range(1, N + 1)}
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")} == names


def terminated(directory, where):
    """One rank of two gets SIGTERM in the middle of a step."""
    whole = Run({}, tp=2)
    whole.go()
    handler = signal.getsignal(signal.SIGTERM)
    run = Run({"directory": directory}, tp=2)

    def before(step):
        if step == 1 and run.ps.rank == where:
            os.kill(os.getpid(), signal.SIGTERM)

    assert run.go(before) == 0
    assert run.checkpoints.stopped and run.optimizer.step_count == 2
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "terminated: saved step 2 in" in run.said[-1]
    again = Run({"directory": directory, "resume": "must"}, tp=2)
    assert again.go() == 2 and not again.checkpoints.stopped
    assert again.digest() == whole.digest()


@pytest.mark.parametrize("where", [1, pytest.param(0, marks=pytest.mark.full)])
def test_sigterm_on_one_rank_ends_all_at_one_step(ranks, tmp_path, where):
    ranks(terminated, str(tmp_path), where, world=2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == ["step-00000002", "step-00000004"]


def starts(directory):
    """Every policy, without a checkpoint and with one."""
    empty, used = f"{directory}/empty", f"{directory}/used"
    assert Run({"directory": used, "every": 2, "asynchronous": False}, tp=2).go() == 0
    for resume in ("auto", "never"):
        assert Run({"directory": empty, "resume": resume}, tp=2).checkpoints.resume() == 0
    with pytest.raises(FileNotFoundError, match="empty has no checkpoint; start afresh"):
        Run({"directory": empty, "resume": "must"}, tp=2).checkpoints.resume()
    for resume in ("auto", "must"):
        assert Run({"directory": used, "resume": resume}, tp=2).checkpoints.resume() == N
    told = rf"used has step {N}, this run begins at 0: its checkpoints would be the oldest and go first; give another"
    with pytest.raises(ValueError, match=told):
        Run({"directory": used, "resume": "never"}, tp=2).checkpoints.resume()
    with pytest.raises(ValueError, match=f"used has step {N}, this run begins at 2"):
        Run({"directory": used, "load": f"{used}/step-00000002"}, tp=2).checkpoints.resume()
    assert Run({"directory": empty, "load": f"{used}/step-00000002"}, tp=2).checkpoints.resume() == 2
    with pytest.raises(ValueError, match=r"trained with global_batch_size=8 \(here 4\)"):
        Run({"directory": used}, tp=2, batch=4).checkpoints.resume()
    with pytest.raises(ValueError, match=r"of a model with other weights: .*decoder.layers"):
        Run({"directory": used}, tp=2, num_layers=3).checkpoints.resume()
    assert Run({"directory": used}, pp=2).checkpoints.resume() == N, "another layout is the same run"


def test_what_a_run_starts_from(ranks, tmp_path):
    ranks(starts, str(tmp_path), world=2)
    assert not Path(tmp_path / "empty").exists() or not any((tmp_path / "empty").glob("step*"))


def fails_in_the_loop(directory):
    """One rank's batch raises: its error comes out, the save that was under way is committed."""
    run = Run({"directory": directory, "every": 1})

    def before(step):
        if step == 2:
            raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"):
        run.go(before)
    assert run.checkpoints.manager.steps() == [1, 2]
    assert Run({"directory": directory}).go() == 2


def test_an_error_in_the_loop(ranks, tmp_path):
    ranks(fails_in_the_loop, str(tmp_path), world=1)


def writer_dies(directory, on_failure):
    """The writer program is killed in the save of step 2."""
    run = Run({"directory": directory, "every": 1, "on_failure": on_failure})

    def before(step):
        manager = run.checkpoints.manager
        if step == 1:
            manager._wait_for_save()
            os.kill(manager._writer._process.pid, signal.SIGSTOP)
        if step == 2:
            os.kill(manager._writer._process.pid, signal.SIGKILL)

    if on_failure == "raise":
        with pytest.raises(RuntimeError, match=r"save of step 2 failed: the writer program ended"):
            run.go(before)
        assert run.checkpoints.manager.steps() == [1]
        return
    run.go(before)
    assert run.checkpoints.manager.steps() == [1, 3, 4]
    assert sum("the save of step 2 failed" in line and "saving step 3" in line for line in run.said) == 1


@pytest.mark.parametrize(
    "on_failure", ["retry", *(pytest.param(how, marks=pytest.mark.full) for how in ("raise", "warn"))]
)
def test_a_writer_that_dies(ranks, tmp_path, on_failure):
    ranks(writer_dies, str(tmp_path), on_failure, world=1)


def every_save_fails(directory, on_failure):
    run = Run({"directory": directory, "every": 1, "on_failure": on_failure})

    def before(step):
        if step:
            run.checkpoints.manager._wait_for_save()
            run.checkpoints.manager._failure = f"the save of step {step} failed: so the test says"

    if on_failure == "warn":
        run.go(before)
        assert sum(line.startswith("warning: ") and "failed: so the test says" in line for line in run.said) == 3
        return
    with pytest.raises(RuntimeError, match="save of step 2 failed"):
        run.go(before)


@pytest.mark.parametrize("on_failure", ["retry", pytest.param("warn", marks=pytest.mark.full)])
def test_two_failures_in_a_row(ranks, tmp_path, on_failure):
    ranks(every_save_fails, str(tmp_path), on_failure, world=1)


def keeps_the_best(directory):
    Run({"directory": directory, "every": 1, "keep_last": 1, "keep_best": "loss", "keep_best_mode": "max"}).go()


def test_a_run_keeps_its_best_checkpoint(ranks, tmp_path):
    """Of which the loss was largest: the first, before it learned."""
    ranks(keeps_the_best, str(tmp_path), world=1)
    found = {
        step: read_manifest(CheckpointRoot(tmp_path).open(step)).run["metrics"]["loss"]
        for step in CheckpointRoot(tmp_path).steps()
    }
    assert len(found) == 2 and max(found) == N and found[min(found)] >= found[N]
