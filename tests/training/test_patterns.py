"""Frozen parameters, rates and decays by patterns of names in a run: as torch does it, on every layout."""

import pytest
import torch

from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelState
from core.training import ModelConfig, RunConfig, initialize
from tests.training.test_model_facts import fields_of
from tests.training.tiny import S, prepared

PLAIN = {"optimizer__lr_schedule": "constant", "optimizer__lr_warmup_fraction": 0.0, "optimizer__clip_grad": 0.0}
PATTERNS = {
    "optimizer__freeze": ["embedding.*", "decoder.layers.0.mlp.*"],
    "optimizer__lr_multipliers": {"decoder.*": 0.5, "*layernorm*": 0.1, "decoder.final_layernorm.*": 0.0},
    "optimizer__weight_decays": {"*linear_proj*": 0.0, "*layernorm*": 0.2},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


def trained(made, fields):
    """(losses, name -> weights after it) of this rank's stages."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields_of(made, **PLAIN | fields)))
    losses = [float(model.train_step(batch).loss) for batch in loader]
    weights = {name: p.detach().clone() for stage in model.stages.values() for name, p in stage.named_parameters()}
    model.close()
    return losses, weights


def by_torch(made):
    """The same three steps by torch.optim.SGD with groups of its own."""
    fields = fields_of(made, **PLAIN)
    *_, loader = initialize(config=RunConfig.from_dict(fields))
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    model = GPTModel(**config.arguments(280, S), parallel=ParallelState.single("cpu"), seed=config.seed)
    groups = []
    for name, parameter in model.named_parameters():
        if name.startswith(("embedding.", "decoder.layers.0.mlp.")):
            parameter.requires_grad_(False)
            continue
        rate, decay = 0.5, 0.1
        if "layernorm" in name:
            rate, decay = 0.0 if "final" in name else 0.1, 0.2
        decay = 0.0 if "linear_proj" in name else decay
        groups.append({"params": [parameter], "lr": fields["optimizer.lr"] * rate, "weight_decay": decay})
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    losses = []
    for step in range(3):
        batch = loader.batch(step)
        loss = model(batch["tokens"], labels=batch["labels"]).sum() / (batch["labels"] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def test_they_are_torchs_groups(made):
    expected_losses, expected = by_torch(made)
    sgd = {"optimizer__optimizer": "sgd", "training__train_steps": 3}
    losses, weights = trained(made, PATTERNS | sgd)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    _, first = trained(made, {"training__train_steps": 1, "optimizer__lr": 0.0})
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name
        is_still = name.startswith(("embedding.", "decoder.layers.0.mlp.")) or "final_layernorm" in name
        assert torch.equal(weight, first[name]) == is_still, name


LAYOUTS = [
    (2, {"parallel__pipeline": 2, "data_parallel__zero_stage": 2}),
    pytest.param(2, {"data_parallel__zero_stage": 3}, marks=pytest.mark.full),
    pytest.param(4, {"parallel__pipeline": 2, "parallel__tensor": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_trains_the_same_parameters(ranks, made, world, layout):
    """A whole stage may be frozen: its rank has nothing to update, and no group of its own."""
    fields = PATTERNS | {"training__train_steps": 3, "optimizer__freeze": ["embedding.*", "decoder.layers.0.*"]}
    fields |= {"model__tie_embeddings": False}
    alone, _ = trained(made, fields)
    for losses, _ in ranks(trained, made, fields | layout, world=world):
        assert losses == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize(
    "more",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.full)
            for more in ({"model__bf16": True}, {"data_parallel__zero_stage": 3})
        ),
    ],
)
def test_a_run_with_patterns_resumes_as_if_it_had_never_ended(made, tmp_path, more):
    unbroken, _ = trained(made, PATTERNS | more | {"training__train_steps": 4})
    kept = PATTERNS | more | {"checkpoint__directory": str(tmp_path)}
    first, _ = trained(made, kept | {"training__train_steps": 2})
    second, _ = trained(made, kept | {"training__train_steps": 4})
    assert first + second == unbroken
    with pytest.raises(ValueError, match=r"another optimizer: only there .* decoder\.layers\.1\.mlp"):
        trained(made, kept | {"training__train_steps": 5, "optimizer__freeze": ["embedding.*"]})


REFUSED = {
    "nothing": (
        {"optimizer__freeze": ["embeding.*"]},
        r"optimizer\.freeze='embeding\.\*' is the name of none of the model's 14 parameters, the first is embed",
    ),
    "two at once": (
        {"optimizer__lr_multipliers": {"head.*": 2}, "optimizer__weight_decays": {"x": 0}},
        r"optimizer\.lr_multipliers='head\.\*' is the name of none.*; optimizer\.weight_decays='x' is the name of",
    ),
    "their names": (
        {"optimizer__freeze": ["model.embed_tokens.*"]},
        r"freeze='model.embed_tokens.\*' is .* none .* 14 parameters; these names .* are embedding.word_embeddings",
    ),
    "everything": (
        {"optimizer__freeze": ["*"]},
        r"optimizer\.freeze leaves none of 14 parameters to train; leave",
    ),
    "negative": ({"optimizer__lr_multipliers": {"*": -1}}, r"lr_multipliers has '\*': -1\.0; a number of at least 0"),
    "a word": (
        {"optimizer__weight_decays": {"*": "none"}},
        r"weight_decays has '\*': 'none'; a number of at",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_patterns_that_do_nothing_are_refused(made, case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        trained(made, fields)


def refused(made, fields, message):
    with pytest.raises(ValueError, match=message):
        trained(made, fields)


def test_a_pattern_of_another_stage_is_no_mistake_and_a_wrong_one_is_told_by_all(ranks, made):
    fields, message = REFUSED["nothing"]
    ranks(refused, made, fields | {"parallel__pipeline": 2}, message, world=2)


def test_a_single_pattern_may_stand_alone():
    assert OptimizerConfig(freeze="embedding.*").freeze == ("embedding.*",)
