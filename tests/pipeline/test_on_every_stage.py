"""Forwards and hooks that a program puts around the layers of a GPTModel: every stage of a pipeline has them."""

import types
import warnings

import pytest
import torch

from core.models.gpt import gpt_stages, llama_spec
from core.pipeline import Pipeline
from core.training import next_token_loss
from tests.models.gpt import VOCAB, config
from tests.states import state


def forward_anew(model):
    """A residual of the first layer's input: on the second stage that is another tensor."""

    def forward(self, x, mask=None, rotary=None):
        first = x
        for layer in self.layers.values():
            x = layer(0.8 * x + 0.2 * first, mask, rotary)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    model.decoder.forward = types.MethodType(forward, model.decoder)


def of_its_class(model):
    """The same for a class, which the last line of the test takes back."""
    own = type(model.decoder).forward
    type(model.decoder).forward = lambda self, x, *rest: own(self, 2.0 * x, *rest)


AROUND = {
    "a forward anew": (forward_anew, "a forward in the place of that of decoder"),
    "a class's forward anew": (of_its_class, "a forward in the place of that of decoder"),
    "a pre-hook that scales": (
        lambda model: model.decoder.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:])),
        "a forward pre-hook of decoder",
    ),
    "a hook that scales": (
        lambda model: model.register_forward_hook(lambda module, args, output: 2 * output),
        "a forward hook of the model",
    ),
    "a hook that looks": (lambda model: model.register_forward_hook(lambda module, args, output: None), ""),
    "a pre-hook that looks": (lambda model: model.decoder.register_forward_pre_hook(lambda module, args: None), ""),
    "a hook on a layer": (
        lambda model: (
            model.decoder.layers[1].register_forward_hook(lambda module, args, output: 2 * output)
            if "1" in model.decoder.layers
            else None
        ),
        "",
    ),
    "a hook on the table": (
        lambda model: (
            model.embedding.register_forward_hook(lambda module, args, output: 2 * output)
            if model.pre_process
            else None
        ),
        "",
    ),
}


def heard(name):
    ps = state(pp=2)
    stages = gpt_stages(config("llama", num_layers=4), llama_spec(), VOCAB, 8, placement=(0, 1), parallel=ps)
    (model,) = stages.values()
    own = type(model.decoder).forward
    AROUND[name][0](model)
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    pipeline = Pipeline(stages, ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            pipeline.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, next_token_loss)
    pipeline.close()
    type(model.decoder).forward = own
    return [str(w.message) for w in found], len(model._forward_hooks) + len(model.decoder._forward_pre_hooks)


@pytest.mark.parametrize("name", AROUND)
def test_what_every_stage_does(ranks, name):
    says = AROUND[name][1]
    for messages, hooks in ranks(heard, name, world=2):
        assert [x for x in messages if "runs on each of 2 pipeline ranks" in x] == messages
        assert len(messages) == bool(says) and (not says or messages[0].startswith(says))
        assert hooks <= 1
