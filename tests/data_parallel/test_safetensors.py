"""What docs/troubleshooting.md says of safetensors' `save_model`."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from tests.states import state

safetensors = pytest.importorskip("safetensors.torch")


def saved(zero_stage, file):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    want = {name: t.clone() for name, t in model.state_dict().items()}
    shard = DataParallel(model, state(), zero_stage=zero_stage)
    with warnings.catch_warnings():
        # whole weights of stage 3 are lent
        warnings.simplefilter("ignore")
        weights = model.state_dict()
        if state().rank == 0:
            safetensors.save_file({name: t.clone() for name, t in weights.items()}, file)
            torch.testing.assert_close(safetensors.load_file(file), want, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r"no suitable name to keep .* None is covering the entire storage"):
            safetensors.save_model(model, f"{file}{state().rank}")
        shard.remove()
        safetensors.save_model(model, f"{file}{state().rank}")


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_save_file_is_the_remedy_of_save_model(ranks, tmp_path, zero_stage):
    ranks(saved, zero_stage, str(tmp_path / "weights"))
