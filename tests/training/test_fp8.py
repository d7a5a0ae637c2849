"""A run whose products are of 8 bits: its losses, its checkpoint without them, folders, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from core.models.gpt import llama_config
from core.models.huggingface import from_huggingface
from core.models.huggingface.exporting import export_huggingface
from core.parallel_state import ParallelState
from core.training import RunConfig, initialize
from core.training.config.memory import fullest_rank
from core.training.run.summary import describe
from tests.training.test_begin import fields_of
from tests.training.test_begin import made as made  # the fixture

SMALL = {"model__num_layers": 3, "model__hidden_size": 64, "model__num_attention_heads": 4}
SMALL |= {"model__ffn_hidden_size": 96, "model__huggingface": None, "optimizer__lr": 4e-3}
ZBV = {"parallel__pipeline": 2, "pipeline__schedule": "zb-h1", "training__recompute": "layer"}
FP8 = {"model__fp8": "hybrid"}


def run_of(made, **more):
    return RunConfig.from_dict(fields_of(made, "llama-tied", **SMALL | more)).check(1)


def losses(made, told=None, **more):
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    run = RunConfig.from_dict(fields_of(made, "llama-tied", **SMALL | more))
    model, _, _, loader = initialize(config=run)
    found = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.full)])
def test_a_run_learns_as_one_of_16_bits_does(made, recipe):
    more = {"training__train_steps": 40, "model__bf16": True}
    plain = losses(made, **more)
    found = losses(made, **more | FP8 | {"model__fp8_recipe": recipe})
    assert plain[-1] < plain[0] - 1.5, "something was learnt"
    assert found != plain
    for ours, theirs in zip(found, plain, strict=True):
        assert abs(ours - theirs) < 0.06 * theirs, (found, plain)


def test_two_stages_of_a_split_backward_train_as_one(made, ranks):
    (one,) = ranks(losses, made, world=1, **FP8)
    for found in ranks(losses, made, world=2, **FP8 | ZBV):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(one), rtol=2e-3, atol=0)


def test_a_checkpoint_goes_on_without_and_with(made, tmp_path):
    first = {"checkpoint__directory": str(tmp_path), "model__bf16": True}
    losses(made, **first | FP8)
    for change in ({}, {"model__fp8": "e4m3", "model__fp8_recipe": "rowwise"}):
        more = {"checkpoint__load": f"{tmp_path}/step-00000003", "training__train_steps": 5, "model__bf16": True}
        assert len(losses(made, **more | change)) == 2


def test_a_folder_of_hugging_face_s(made, tmp_path):
    """Beside a folder: 8 bits are no fact of its model. What was trained so is written as any other."""
    run = RunConfig.from_dict(fields_of(made, "llama-tied", **FP8, checkpoint__directory=str(tmp_path))).check(1)
    assert run.model.transformer().fp8 == "hybrid"
    model, _, _, loader = initialize(config=run)
    for batch in loader:
        model.train_step(batch)
    model.close()
    export_huggingface(f"{tmp_path}/step-00000003", f"{tmp_path}/theirs")
    assert from_huggingface(f"{tmp_path}/theirs").config.fp8 is None


def test_memory_and_lines_of_a_run(made):
    """Weights, gradients and states are what they are without; a line says which layers, and of what mfu is."""
    assert fullest_rank(run_of(made).sections()) == fullest_rank(run_of(made, **FP8).sections())
    ends = {"model__first_last_layers_bf16": True, "model__bf16": True}
    corpus, said = SimpleNamespace(num_tokens=(10, 5), train=None, validation_texts={}), []
    describe({0: torch.nn.Linear(2, 2)}, ParallelState.single("cpu"), corpus, run_of(made, **FP8 | ends), said.append)
    (told,) = [line for line in said if line.startswith("8 bits: ")]
    assert "linears of 1 of 3 layers (hybrid, tensorwise); mfu is a share of the peak of bfloat16" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fp8": "e5m2"}, "unknown fp8 'e5m2'; known: e4m3, hybrid"),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed"},
            "fp8_recipe='delayed' is none of tensorwise, rowwise.*use tensor",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, r"'blockwise'.*\(DeepSeek-V3 scales blocks of 128\)"),
        ({"fp8_recipe": "rowwise"}, "fp8_recipe=rowwise is of 8-bit products, and fp8=None.*give fp8=hybrid"),
        ({"fp8_wgrad": False}, "fp8_wgrad=False is of 8-bit products, and fp8=None"),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16=True is of 8-bit products, and fp8=None"),
        ({"fp8": "e4m3", "num_layers_at_end_in_bf16": 2}, "num_layers_at_end_in_bf16=2 says how.*bf16=False"),
        (
            {"fp8": "e4m3", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3},
            "num_layers_at_start_in_bf16=3 and num_layers_at_end_in_bf16=1 leave fp8=e4m3 none of num_layers=4",
        ),
        (
            {"fp8": "e4m3", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": -1},
            "num_layers_at_end_in_bf16=-1 must not be negative",
        ),
    ],
    ids=str,
)
def test_what_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        llama_config(num_layers=4, hidden_size=32, num_attention_heads=4, **change)


def test_what_is_refused_of_a_run(made):
    with pytest.raises(ValueError, match=r"model: unknown fp8 'fp4'|fp8.*e4m3, hybrid"):
        run_of(made, model__fp8="fp4")
    with pytest.raises(ValueError, match="fp8_wgrad=False is of 8-bit products, and fp8=None"):
        run_of(made, model__fp8_wgrad=False)
