"""Arguments of other libraries' constructors and files, given to ours: each is answered with what there is."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.field_names import UnknownName
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.pipeline.simulate import main as simulate
from core.training.config import RunConfig
from core.training.config.messages.names import unknown
from core.training.config.run import known_fields

PS = ParallelState.single()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Pipeline([nn.Linear(2, 2)], ps=PS, n_microbatches=4), "no n_microbatches: give num_microbatches"),
        (lambda: Pipeline([nn.Linear(2, 2)], ps=PS, loss_fn=print), r"no loss_fn: give it to step\(batch, loss_fn\)"),
        (lambda: DataParallel(nn.Linear(2, 2), PS, replicate=2), r"initialize_model_parallel\(replicate=N\)"),
        (lambda: DataParallel(nn.Linear(2, 2), device_ids=[0]), "no device_ids: leave it out"),
        (
            lambda: OptimizerConfig(max_norm=1.0, fused=True),
            r"no max_norm \(give clip_grad\), no fused \(leave it out",
        ),
    ],
    ids=["pipelining", "pipelining loss", "HSDP", "DDP", "torch.optim"],
)
def test_a_constructor(make, message):
    with pytest.raises(UnknownName, match=message):
        make()


def test_a_memory_limit_that_nothing_searches_below():
    with pytest.warns(UserWarning, match="memory_limit=1e.09 has no effect: only schedule='auto'.*'1f1b' holds"):
        Pipeline([nn.Linear(2, 2)], ps=PS, memory_limit=1e9)


def test_flags_of_the_simulation(capsys):
    with pytest.raises(SystemExit, match="1"):
        simulate(["--schedule", "1f1b", "--pp=4", "--n-microbatches", "8"])
    told = capsys.readouterr().err
    assert told.endswith(
        "; --schedule: it is the first word, without a flag; --pp: give --stages P; "
        "--n-microbatches: give --microbatches M\n"
    )


@pytest.mark.parametrize("name", ["load", "weights"])
def test_a_file_or_torchs_folder_is_no_checkpoint(tmp_path, name):
    torch.save({}, tmp_path / "x.pt")
    (tmp_path / ".metadata").touch()
    for path, remedy in (
        (tmp_path / "x.pt", r"then core.dist_checkpointing.save\(\{'model': model.sharded_state_dict\(\)\}, DIR\)"),
        (tmp_path, f"`python -m core.dist_checkpointing import {tmp_path} DIR` makes one of ours of it"),
    ):
        with pytest.raises(ValueError, match=remedy):
            RunConfig.from_dict({f"checkpoint.{name}": str(path)}).check(1)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("softmax_type", "not here, and a model without it is another one"),
        ("data_sharding", "leave it out: rows are drawn"),
        ("job.config_file", "give --config FILE.toml"),
        ("profiling.enable_profiling", "give training.profile=10:12"),
    ],
)
def test_names_of_megatron_and_torchtitan(name, answer):
    assert unknown(name, known_fields()).startswith(f"unknown {name}; {answer}")
