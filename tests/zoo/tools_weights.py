"""Weights that are loaded, replaced, computed or made elsewhere, on a model that ranks share."""

import io

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.models.gpt import gpt
from tests.zoo.case import Case, compared
from tests.zoo.split_model import (
    models,
    only_split,
    train,
    weights,
)

optim = torch.optim


def reloaded(assign, buffer=False):
    def program(model):
        train(model, steps=1)
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        if buffer:
            file = io.BytesIO()
            torch.save(kept, file)
            file.seek(0)
            kept = torch.load(file)
        train(model, steps=1)
        model.load_state_dict(kept, assign=assign)
        train(model, steps=2)

    return program


def global_shapes(variation):
    """What a checkpoint would hold after `assign=True`."""
    split, whole = models(variation, "llama")
    split.load_state_dict({n: p.detach().clone() for n, p in split.named_parameters()}, assign=True)
    shapes = [{n: torch.tensor(t.global_shape) for n, t in m.sharded_state_dict().items()} for m in (split, whole)]
    return compared(*shapes)


def through_meta(model):
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(kept)
    train(model)


def born_on_meta(model):
    with torch.device("meta"):
        other = gpt("llama", parallel=model.parallel)
    assert all(t.is_meta for t in (*other.parameters(), *other.buffers()))
    other.to_empty(device="cpu")
    other.init_weights()
    train(other)
    return other


def meta_and_load(model):
    with torch.device("meta"):
        other = gpt("llama", parallel=model.parallel)
    other.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()}, assign=True)
    train(other)
    return other


def converted(model):
    model.double().float().double()
    train(model)


def overwriting(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    train(model)


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(model)


def replaced(model):
    linear = model.decoder.layers["0"].mlp.linear_fc1
    linear.weight = nn.Parameter(linear.weight.detach() * 2)
    train(model)


def replaced_by_whole(model):
    linear = model.decoder.layers["0"].mlp.linear_fc1
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape[0] * 2, linear.weight.shape[1]))


def vector(model):
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(flat * 1.5, model.parameters())
    train(model)


def applied(model):
    torch.manual_seed(3)

    def init(module):
        for p in module.parameters(recurse=False):
            nn.init.normal_(p, std=0.3) if p.dim() > 1 else nn.init.ones_(p)

    model.apply(init)
    train(model)


def weight_normed(model):
    parametrizations.weight_norm(model.decoder.layers["0"].mlp.linear_fc1)
    train(model)


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5


def parametrized(model):
    parametrize.register_parametrization(model.decoder.layers["0"].mlp.linear_fc1, "weight", Halved())
    train(model)


def pruned(model):
    prune.l1_unstructured(model.decoder.layers["0"].mlp.linear_fc1, "weight", 0.5)
    train(model)


class Branch(nn.Module):
    """LoRA beside a whole part."""

    def __init__(self, inner, size=32, rank=2):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.inner = inner
        self.down = nn.Parameter(torch.randn(rank, size, generator=generator) / 4)
        self.up = nn.Parameter(torch.randn(rank, size, generator=generator) / 4)

    def forward(self, x, *args):
        return self.inner(x, *args) + x @ self.down.t() @ self.up


def lora_beside(model):
    for layer in model.decoder.layers.values():
        layer.mlp = Branch(layer.mlp)
    train(model)


class LoRA(nn.Module):
    """LoRA on a linear that is split; its halves are split alike, or (plain) not at all."""

    def __init__(self, inner, place, plain):
        super().__init__()
        self.inner = inner
        out, size = inner.weight.shape
        generator = torch.Generator().manual_seed(1)
        self.down = nn.Linear(size, 2, bias=False)
        self.up = (
            nn.Linear(2, out, bias=False)
            if plain
            else ColumnParallelLinear(2, out * place.tp, place=place, bias=False)
        )
        with torch.no_grad():
            self.down.weight.copy_(torch.randn(2, size, generator=generator) / 4)
            whole = torch.randn(out * place.tp, 2, generator=generator) / 4
            self.up.weight.copy_(whole[out * place.rank : out * (place.rank + 1)])

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def lora_on(plain):
    def program(model):
        for layer in model.decoder.layers.values():
            layer.mlp.linear_fc1 = LoRA(layer.mlp.linear_fc1, model.place, plain)
        train(model)

    return program


class RowLoRA(nn.Module):
    def __init__(self, inner, place):
        super().__init__()
        self.inner = inner
        out, size = inner.weight.shape
        generator = torch.Generator().manual_seed(1)
        self.down = RowParallelLinear(size * place.tp, 2, place=place, bias=False)
        self.up = nn.Linear(2, out, bias=False)
        with torch.no_grad():
            whole = torch.randn(2, size * place.tp, generator=generator) / 4
            self.down.weight.copy_(whole[:, size * place.rank : size * (place.rank + 1)])
            self.up.weight.copy_(torch.randn(out, 2, generator=generator) / 4)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def row_lora(model):
    for layer in model.decoder.layers.values():
        layer.mlp.linear_fc2 = RowLoRA(layer.mlp.linear_fc2, model.place)
    train(model)


@torch.no_grad()
def add_products(model):
    size = model.config.hidden_size
    whole = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).double() / 8
    for layer in model.decoder.layers.values():
        layer.mlp.linear_fc1.weight += layer.mlp.linear_fc1.weight @ whole
        layer.mlp.linear_fc2.weight += whole @ layer.mlp.linear_fc2.weight


def with_products(model):
    for _ in range(2):
        train(model)
        add_products(model)


CASES = [
    Case("`load_state_dict`", weights(reloaded(assign=False))),
    Case("`load_state_dict(assign=True)`", weights(reloaded(assign=True))),
    Case(
        "`torch.save`, `torch.load`, `load_state_dict(assign=True)` of a rank's own file",
        weights(reloaded(assign=True, buffer=True)),
        "told",
        "a file gets .*a file per rank",
        "a file per rank is right",
        elsewhere={"1 rank": ("right", "")},
    ),
    Case("A checkpoint after `load_state_dict(assign=True)`", global_shapes),
    Case('`to("meta")`, `to_empty`, `load_state_dict`', weights(through_meta, style="llama")),
    Case('`with torch.device("meta")`, `to_empty`, `init_weights`', weights(born_on_meta, style="llama")),
    Case('`with torch.device("meta")`, `load_state_dict(assign=True)`', weights(meta_and_load, style="llama")),
    Case("`model.float()`, `model.double()`", weights(converted, style="llama")),
    Case("`set_overwrite_module_params_on_conversion(True)`", weights(overwriting)),
    Case("`set_swap_module_params_on_conversion(True)`", weights(swapped)),
    Case("`module.weight = nn.Parameter(...)` of this rank's part", weights(replaced)),
    Case(
        "`module.weight = nn.Parameter(...)` of another shape",
        weights(replaced_by_whole),
        "refused",
        "give every rank its own part",
        remedy="whole tensors: `dist_checkpointing.load`",
    ),
    Case("`parameters_to_vector`, `vector_to_parameters`", weights(vector)),
    Case(
        "`model.apply(init)` with `nn.init`",
        weights(applied),
        remedy="GPTModel's own initial weights (`seed`, `init_method_std`), the same on every layout",
        elsewhere=only_split("refused", "model.apply"),
    ),
    Case(
        "`parametrizations.weight_norm` on a linear",
        weights(weight_normed),
        remedy="tensor_model_parallel_size=1, or around the module",
        elsewhere=only_split("refused", "weight_norm"),
    ),
    Case(
        "A parametrization of a weight",
        weights(parametrized),
        remedy="elementwise ones are right",
        elsewhere=only_split("told", "Elementwise ones are right"),
    ),
    Case(
        "`torch.nn.utils.prune`",
        weights(pruned),
        remedy="thresholds are of a rank's part",
        elsewhere=only_split("told", "thresholds of the whole matrix"),
    ),
    Case("LoRA beside a part (`layer.mlp = Branch(layer.mlp)`), after the model was made", weights(lora_beside)),
    Case(
        "LoRA on a column-parallel linear, its halves `nn.Linear` and `ColumnParallelLinear`",
        weights(lora_on(plain=False)),
        elsewhere=only_split("told", "buffers of that shape are right"),  # it reads `weight.shape`
    ),
    Case(
        "LoRA on a row-parallel linear, its halves `RowParallelLinear` and `nn.Linear`",
        weights(row_lora),
        elsewhere=only_split("told", "buffers of that shape are right"),
    ),
    Case("Products of a part and a whole that are added to a weight, as adapters are merged", weights(with_products)),
    Case(
        "LoRA on a column-parallel linear with two plain `nn.Linear`",
        weights(lora_on(plain=True)),
        remedy="one half is `ColumnParallelLinear(rank, out, place=model.place)`",
        elsewhere=only_split("refused", "split alike"),
    ),
]
