"""A model whose hooks are listened to over context ranks is copied as if nobody listened."""

import copy
import pickle

import torch

from core.context_parallel.rows.hooks import Listener
from core.parallel_state import context_batch
from tests.models.gpt import VOCAB, gpt
from tests.states import state

S = 16


def keep(module, args, output):
    """As a program's."""


def listening(model):
    hooks = [hook for part in model.modules() for hook in part._forward_hooks.values()]
    return sum(isinstance(hook, Listener) and hook.listens for hook in hooks)


def copies():
    ps = state(cp=2)
    model = gpt("llama", parallel=ps)
    model.decoder.layers[0].register_forward_hook(keep)
    tokens = torch.randint(VOCAB, (2, S), generator=torch.Generator().manual_seed(0))
    batch = context_batch({"tokens": tokens, "labels": tokens}, ps)
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    losses.mean().backward()
    copied = copy.deepcopy(model)
    found = [listening(one) for one in (model, copied)]
    same = copied(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    return found, torch.equal(same, losses)


def test_copies(ranks):
    for (count, of_copy), is_same in ranks(copies, world=2):
        assert count > 0 and of_copy == 0
        assert is_same


def test_a_file():
    assert not pickle.loads(pickle.dumps(Listener(print))).listens
