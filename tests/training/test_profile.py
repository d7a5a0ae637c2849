"""`training.profile`: traces with a named range for each action, on every rank; nothing where nobody profiles."""

import json
from pathlib import Path

import pytest

from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline.run.ranges import named, profiled
from core.training import TrainingConfig, next_token_loss
from core.training.log.profile import StepProfiler
from tests.parity import pipelines
from tests.parity.pipelines import state


def config(output, **facts):
    return TrainingConfig(train_steps=4, global_batch_size=2, micro_batch_size=1, output=str(output), **facts)


def ranges_of(path):
    events = json.loads(Path(path).read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def profiled_steps(output, pp, recompute):
    """What the trace of steps 1 and 2, of four, names; and whether anything was profiled in each step."""
    ps, said, seen = state(pp=pp), [], []
    if pp == 1:
        model, sync = pipelines.build((0,), ps, num_layers=1)
        executor = SingleStage(model[0], ps=ps, num_microbatches=2, grad_sync=sync)
    else:
        stages, sync = pipelines.build((0, 1), ps, num_layers=2)
        executor = Pipeline(stages, ps=ps, num_microbatches=2, grad_sync=sync, recompute=recompute)
    with StepProfiler(config(output, profile="1:3"), ps, said.append) as profiler:
        for step in range(4):
            profiler.before(step)
            seen.append(profiled())
            sync.zero_grad()
            executor.step(pipelines.batch(2), next_token_loss)
            with named("optimizer"):
                pass
    if pp > 1:
        executor.close()
    return ranges_of(Path(output) / "profile" / f"rank-{ps.rank:05d}.json"), seen, said


def test_a_pipeline_names_every_action(ranks, tmp_path):
    (first, seen, said), (last, _, _) = ranks(profiled_steps, str(tmp_path), 2, "stage")
    assert seen == [False, True, True, False]
    assert said == [f"profile of steps 1 to 2: {tmp_path}/profile (open in ui.perfetto.dev)"]
    for names, stage in ((first, 0), (last, 1)):
        for kind in "FIW":
            for microbatch in range(2):
                assert names.count(f"{kind}{stage}.{microbatch}") == 2, "once in each of two steps"
        assert names.count("sums") == names.count("optimizer") == 2
    assert first.count("R0.1") == first.count("SEND_F0.0") == last.count("RECV_F1.0") == 2


def test_one_stage_names_forward_and_backward(tmp_path):
    names, _, _ = profiled_steps(str(tmp_path), 1, "none")
    for name in ("F0.0", "F0.1", "B0.0", "B0.1", "sums"):
        assert names.count(name) == 2


def test_a_run_that_ends_within_its_profile_writes_it(tmp_path, single):
    with StepProfiler(config(tmp_path, profile="3:4"), single, lambda line: None) as profiler:
        profiler.before(3)
    assert (tmp_path / "profile" / "rank-00000.json").exists()
    with StepProfiler(config(tmp_path), single, lambda line: None) as profiler:
        profiler.before(3)
        assert not profiled()


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"profile": "20:25"}, r"profile=20:25 ends after the run's train_steps=4"),
        ({"profile": "2"}, r"profile='2' must be start:stop"),
        ({"profile": "3:3"}, r"profile='3:3' must be start:stop"),
        ({"profile_nvtx": True}, r"profile_nvtx needs profile=start:stop"),
    ],
)
def test_a_range_outside_of_the_run_is_refused(tmp_path, facts, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **facts)


def test_nvtx_needs_cuda(tmp_path):
    facts = config(tmp_path, profile="1:2", profile_nvtx=True)
    with pytest.raises(ValueError, match="profile_nvtx needs CUDA, this rank's device is cpu"):
        StepProfiler(facts, ParallelState.single("cpu"), print)
