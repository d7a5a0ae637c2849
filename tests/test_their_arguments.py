"""Arguments of other libraries' constructors and files, given to ours: each is answered with what there is."""

import dataclasses
import io

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.field_names import UnknownName
from core.models.huggingface.facts import Facts
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.pipeline.simulate import main as simulate
from core.training import initialize
from core.training.config import RunConfig
from core.training.config.messages.names import unknown
from core.training.config.run import known_fields
from core.transformer.transformer_config import TransformerConfig

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


def test_a_configuration_stays_as_it_was_made():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    for name, remedy in (
        ("hidden_size", "dataclasses.replace"),
        ("use_cache", "Trainer"),
        ("hidden_sise", "hidden_size"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}': .*{remedy}"):
            setattr(config, name, 16)


class LikeTheirDataset:
    """Of Hugging Face's datasets, which have a method of that name."""

    def batch(self, batch_size, drop_last_batch=False):
        raise AssertionError("not called")


def test_batches_with_a_method_of_another_meaning_are_refused():
    with pytest.raises(ValueError, match=r"batches is a LikeTheirDataset with 0 of the 1 method needed: batch\(step"):
        initialize(nn.Linear(2, 2), config={}, batches=LikeTheirDataset(), loss_fn=print)


def test_gradients_go_to_files_and_other_libraries_by_value():
    model = nn.Linear(4, 4)
    DataParallel(model, PS)
    model(torch.ones(2, 4)).sum().backward()
    gradient = model.weight.grad
    file = io.BytesIO()
    torch.save({"weight": gradient}, file)
    file.seek(0)
    for found in (torch.load(file)["weight"], torch.from_dlpack(gradient), torch.from_dlpack(gradient.detach())):
        assert type(found) is torch.Tensor and torch.equal(found, torch.full((4, 4), 2.0))


def test_a_checkpoint_of_ours_is_no_folder_of_hugging_faces(tmp_path):
    (tmp_path / "manifest.json").touch()
    with pytest.raises(
        ValueError, match=rf"a checkpoint of ours: checkpoint.weights={tmp_path} begins a run with its"
    ):
        Facts.of_folder(tmp_path)


def test_what_a_folder_is_taken_for_is_answered_with_what_to_give(tmp_path):
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"give {tmp_path}/checkpoint-10, which has one"):
        Facts.of_folder(tmp_path)
    (tmp_path / "run.toml").touch()
    with pytest.raises(ValueError, match="the output of a run of ours"):
        Facts.of_folder(tmp_path)
