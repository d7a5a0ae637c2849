"""What a ds_config.json means is what DeepSpeed makes of it: defaults, decay, Muon, schedules, monitors, Hjson."""

import json
import math
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from core.interop.deepspeed import from_deepspeed
from core.optimizer import OptimizerConfig
from core.training import initialize

pytestmark = pytest.mark.filterwarnings("ignore:.*(keys are unsupported|has no gradient_clipping)")


def optimizer_of(config, **more):
    return from_deepspeed(config, data_ranks=1, **more).onto(OptimizerConfig())


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [  # what torch.optim and DeepSpeed's own Adam begin with
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, 0.01),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.0}, 0.0),
        ("AdamW", {}, 0.0),
        ("SGD", {}, 0.0),
    ],
)
def test_a_decay_that_is_not_given_is_what_it_is_there(kind, params, decay):
    found = optimizer_of({"optimizer": {"type": kind, "params": params}})
    assert found.weight_decay == decay and found.weight_decay_of == ("all" if decay else "matrices")


def test_decay_reaches_every_parameter():
    """Biases too, as DeepSpeed's optimizers have it; the same groups, so the same numbers."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}, "gradient_clipping": 0}
    net, twin = (nn.Linear(3, 2).double() for _ in range(2))
    twin.load_state_dict(net.state_dict())
    model, optimizer, *_ = initialize(net, from_deepspeed(config, data_ranks=1).fields | {"device": "cpu"})
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        x = torch.full((4, 3), 1.0 + step, dtype=torch.float64)
        for each, its in ((model, optimizer), (twin, theirs)):
            each(x).square().mean().backward()
            its.step()
            its.zero_grad()
    torch.testing.assert_close(net.bias, twin.bias, rtol=1e-12, atol=0)
    torch.testing.assert_close(net.weight, twin.weight, rtol=1e-12, atol=0)


def test_muon_is_deepspeeds():
    """Its scale of the rate, momentum, and what the Adam beside it begins with (0.19.8)."""
    found = from_deepspeed({"optimizer": {"type": "Muon", "params": {"lr": 0.02}}})
    made = found.onto(OptimizerConfig())
    assert (made.optimizer, made.lr, made.muon_lr, made.momentum) == ("muon", 0.02, "original", 0.95)
    assert (made.adam_beta1, made.adam_beta2, made.adam_eps) == (0.9, 0.95, 1e-10) and not found.unsupported
    two = from_deepspeed({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.001}}})
    assert two.fields["optimizer"]["lr"] == 0.02 and "1 rate for all, 0.02; for 0.001" in two.unsupported[0].words
    none = from_deepspeed({"optimizer": {"type": "Muon", "params": {}}})
    assert none.fields["optimizer"]["lr"] == 0.02 and "for 0.0003 beside it" in none.unsupported[0].words
    divided = from_deepspeed(
        {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 2}}
    )
    assert divided.fields["data_parallel"]["zero_stage"] == 2 and not divided.unsupported


def test_a_decaying_schedule_without_a_largest_rate():
    """0.001 whatever the optimizer's is, as in DeepSpeed; Trainer's "auto" is the optimizer's, also a later one."""
    steps = {"total_num_steps": 10, "warmup_num_steps": 2}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}
    params = {"type": "WarmupDecayLR", "params": steps}
    assert optimizer_of(config | {"scheduler": params}).learning_rate.at(3) == 0.001
    left_open = {"type": "WarmupDecayLR", "params": steps | {"warmup_max_lr": "auto"}}
    found = optimizer_of(config | {"scheduler": left_open})
    assert found.learning_rate.at(3) == 3e-5 and replace(found, lr=0.5).learning_rate.at(3) == 0.5
    assert optimizer_of({"scheduler": left_open}).learning_rate.at(3) == OptimizerConfig().lr


def test_curves_and_lines_go_where_the_file_says():
    config = {
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "a"},
        "wandb": {"enabled": True, "project": "mine", "team": None},
        "steps_per_print": math.inf,
    }
    found = from_deepspeed(config)
    assert found.fields["training"] == {"tensorboard": True, "wandb_project": "mine", "log_interval": 10**9}
    assert not found.unsupported and not from_deepspeed({"tensorboard": {"enabled": False}}).fields.get("training")
    assert from_deepspeed({"wandb": {"enabled": True}}).fields["training"] == {"wandb_project": "deepspeed"}


HJSON = """# of a cluster
{
  // sizes
  train_batch_size: 8,
  "steps_per_print": Infinity, /* never */
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 0,},
}
"""


def test_hjson_is_read_and_the_package_is_named_where_it_lacks(tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text(HJSON.replace("Infinity", "7"))
    found = from_deepspeed(path, data_ranks=2)
    assert found.fields["training"] == {"micro_batch_size": 4, "global_batch_size": 8, "log_interval": 7}
    assert found.fields["data_parallel"] == {"zero_stage": 3, "bucket_size": 1}
    path.write_text("\ufeff" + json.dumps({"steps_per_print": math.inf}))
    assert from_deepspeed(path).fields["training"] == {"log_interval": 10**9}, "as accelerate writes it"
    path.write_text(HJSON.replace("train_batch_size: 8", "a: 1, a: 2"))
    with pytest.raises(ValueError, match="'a' is there 2 times"):
        from_deepspeed(path)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match="pip install hjson"):
        from_deepspeed(path)


def test_a_clip_that_the_file_does_not_give_is_told():
    with pytest.warns(
        UserWarning, match='clipped at a norm of 1.0.*say "gradient_clipping": 1.0, or 0 for none'
    ) as told:
        from_deepspeed({"train_batch_size": 8})
    assert len(told) == 1
    for given in (
        {"gradient_clipping": 0},
        {"gradient_clipping": "auto"},
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}},
    ):
        with warnings.catch_warnings(action="error"):
            from_deepspeed(given)
