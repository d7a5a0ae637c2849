"""Other places for records: what reaches them, and what is said where they are not installed."""

import importlib.util
import json
import subprocess
import sys
import types

import pytest

from core.training.log.metrics import OF_ALL_LAYERS, MetricsLog, StepRecord
from core.training.log.sinks import SCALAR_NAMES, TensorBoardSink, WandbSink, open_sinks
from core.transformer.moe.load import ExpertLoad


def record(step, **more):
    facts = {"loss": 2.5 / step, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_s": 9.0, "tflops_per_s": 0.1}
    return StepRecord(step=step, step_ms=10.0, tokens=64, **facts | more)


def test_every_number_of_a_record_has_a_name_and_what_is_not_known_is_left_out():
    load = ExpertLoad(layer=3, busiest=1.5, idlest=0.25, received=64, aux=1.25, z=4.0)
    full = record(1, mfu=0.4, memory_mib=7.0, skipped=2, tokens_seen=64, experts=(load,)).scalars()
    of_layer = {f"experts/layer_003_{name}": value for name, value in vars(load).items() if name != "layer"}
    assert set(full) == set(SCALAR_NAMES.values()) | set(of_layer) and full.items() >= of_layer.items()
    assert set(SCALAR_NAMES) | {"step", "tokens", "time", "experts", "rewards"} == {
        *StepRecord.__annotations__,
        *OF_ALL_LAYERS,
    }
    assert full["train/loss"] == 2.5 and full["memory/peak_mib"] == 7 and full["train/skipped"] == 2
    assert record(1, rewards={"rewards/margins": 0.5}).scalars()["train/rewards/margins"] == 0.5
    without = record(1).scalars()
    unknown = {"speed/mfu", "memory/peak_mib", "train/tokens_seen", *of_layer}
    unknown |= {SCALAR_NAMES[name] for name in OF_ALL_LAYERS}
    assert set(full) - set(without) == unknown


@pytest.fixture
def blocked(monkeypatch):
    """As on a machine without the extra."""

    def block(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return block


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_extra_is_told_before_training_on_every_rank(blocked, tmp_path, rank):
    blocked("tensorboard", "torch.utils.tensorboard", "wandb")
    with pytest.raises(ImportError, match=r"tensorboard and wandb are not installed: pip install tensorboard wandb"):
        open_sinks(tmp_path, tensorboard=True, wandb_project="p", rank=rank)
    with pytest.raises(ImportError, match=r"^wandb is not installed: pip install wandb"):
        WandbSink("p", tmp_path, {})
    with pytest.raises(ImportError, match=r"^tensorboard is not installed: pip install"):
        TensorBoardSink(tmp_path)
    assert open_sinks(tmp_path, rank=rank) == (), "nobody asked"
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_open_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("core.training.log.sinks._is_installed", lambda name: True)
    assert open_sinks(tmp_path, tensorboard=True, wandb_project="p", rank=1) == ()
    assert list(tmp_path.iterdir()) == []


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.asked, self.told = {}, []
        self.Settings = dict

    def init(self, **asked):
        self.asked = asked
        return types.SimpleNamespace(
            log=lambda values, step: self.told.append((step, values)), finish=lambda: self.told.append("finished")
        )


def test_wandb_is_offline_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("core.training.log.sinks._is_installed", lambda name: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with MetricsLog(tmp_path, sinks=open_sinks(tmp_path, wandb_project="gpt", config={"optimizer.lr": 0.1})) as log:
        log.add(record(1))
        log.add(record(2))
    assert fake.asked["mode"] == "offline" and fake.asked["project"] == "gpt" and fake.asked["dir"] == str(tmp_path)
    assert fake.asked["config"] == {"optimizer.lr": 0.1} and fake.asked["group"] == tmp_path.name
    assert fake.told == [(1, record(1).scalars()), (2, record(2).scalars()), "finished"]
    monkeypatch.setenv("WANDB_MODE", "online")
    WandbSink("gpt", tmp_path, {})
    assert fake.asked["mode"] == "online"


# torch.utils.tensorboard and wandb warn at import, and start threads: in processes of their own
TENSORBOARD = """
import math, sys
from tests.training.test_sinks import record
from core.training.log.sinks import open_sinks
for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    (sink,) = open_sinks(sys.argv[1], tensorboard=True, start=start)
    for step in steps:
        sink.add(record(step, grad_norm=math.inf if step == 2 else 0.5, mfu=0.01 * start or None))
    sink.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1] + "/tensorboard")
read.Reload()
print(*((e.step, round(e.value, 4)) for e in read.Scalars("train/loss")), sep=";")
print(*((e.step, e.value) for e in read.Scalars("train/grad_norm")), sep=";")
print(*((e.step, round(e.value, 4)) for e in read.Scalars("speed/mfu")), sep=";")
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written_and_a_resumed_run_goes_on(tmp_path):
    said = subprocess.run([sys.executable, "-c", TENSORBOARD, str(tmp_path)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    loss, norm, mfu = said.stdout.splitlines()
    assert loss == "(1, 2.5);(2, 1.25);(3, 0.8333);(4, 0.625)", "step 3 of the killed run is hidden"
    assert norm == "(1, 0.5);(2, inf);(3, 0.5);(4, 0.5)" and mfu == "(3, 0.02);(4, 0.02)"


WANDB = """
import sys
from tests.training.test_sinks import record
from core.training.log.sinks import open_sinks
(sink,) = open_sinks(sys.argv[1], wandb_project="gpt", config={"optimizer.lr": 0.25})
print("a line of ours")
for step in (1, 2):
    sink.add(record(step))
sink.close()
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said = subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    assert said.stdout == "a line of ours\n", "nothing of theirs"
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"optimizer.lr" in content and json.dumps(1.25).encode() in content
