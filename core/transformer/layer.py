"""One layer of a transformer, and a run of them."""

import linecache
import re
import sys
import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state import mix32, seeded
from core.parallel_state.by_hand.functions import (
    called_by_program,
    frame_of_program,
    line_of_program,
    program_level,
)
from core.transformer.attention.qkv import LayerTables, Tables
from core.transformer.dropout import residual_dropout
from core.transformer.spec import Build, TransformerLayerSpec


class TransformerLayer(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).  [s, b, h] -> [s, b, h], sharded alike."""

    knows_context = True  # rows meet in its attention only

    def __init__(self, build: Build, spec: TransformerLayerSpec) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.input_layernorm = spec.norm(build, size)
        self.self_attention = spec.attention(build, spec)
        self.pre_mlp_layernorm = spec.norm(build, size)
        self.mlp = spec.mlp(build)
        self.attention_dropout = residual_dropout(build, "after attention")
        self.mlp_dropout = residual_dropout(build, "after mlp")
        # Without dropout its modules are not even called: two Python calls less per layer and microbatch.
        self.drops = build.config.hidden_dropout > 0

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, rotary: Tables | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        # Pre-norm: the residual stream itself is never normalised (GPT-2, section 2.3).
        y = self.self_attention(self.input_layernorm(x), attention_mask, rotary)
        x = x + (self.attention_dropout(y) if self.drops else y)
        y = self.mlp(self.pre_mlp_layernorm(x))
        return x + (self.mlp_dropout(y) if self.drops else y)


class PostNormLayer(nn.Module):
    """x + drop(norm(attention(x))), then x + drop(norm(mlp(x))): norms of outputs only (OLMo 2, arXiv 2501.00656).

    [s, b, h] -> [s, b, h], sharded alike.
    """

    knows_context = True

    def __init__(self, build: Build, spec: TransformerLayerSpec) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.self_attention = spec.attention(build, spec)
        self.post_self_attn_layernorm = spec.norm(build, size)
        self.mlp = spec.mlp(build)
        self.post_mlp_layernorm = spec.norm(build, size)
        self.attention_dropout = residual_dropout(build, "after attention")
        self.mlp_dropout = residual_dropout(build, "after mlp")

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, rotary: Tables | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        y = self.post_self_attn_layernorm(self.self_attention(x, attention_mask, rotary))
        x = x + self.attention_dropout(y)
        return x + self.mlp_dropout(self.post_mlp_layernorm(self.mlp(x)))


class SandwichNormLayer(TransformerLayer):
    """x + drop(norm(attention(norm(x)))), then x + drop(norm(mlp(norm(x)))): norms on both sides (Gemma 3)."""

    knows_context = True

    def __init__(self, build: Build, spec: TransformerLayerSpec) -> None:
        super().__init__(build, spec)
        self.post_self_attn_layernorm = spec.norm(build, build.config.hidden_size)
        self.post_mlp_layernorm = spec.norm(build, build.config.hidden_size)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, rotary: Tables | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        y = self.self_attention(self.input_layernorm(x), attention_mask, rotary)
        x = x + self.attention_dropout(self.post_self_attn_layernorm(y))
        y = self.mlp(self.pre_mlp_layernorm(x))
        return x + self.mlp_dropout(self.post_mlp_layernorm(y))


_COUNTED = re.compile(r"\blen\(")
# the place of a layer among those of a stage
_TAKEN = "layers are taken, or counted, by their place in this stage"
# no loop, whose body is the same for each, or a list: `[layer for stage in stages for layer in stage.decoder.layers]`
_LISTED = (
    r"|^(?!.*\bfor\b)\s*\S|\blist\(|\btuple\(|\[\s*\*|\b(\w+)\s+for\s+(?:.*\bfor\s+)?\1\s+in\b"
)
_BY_PLACE = re.compile(r"\benumerate\(|\bzip\(|\bnext\(|[\])]\s*\[" + _LISTED)
# two models' layers are paired by their names
_OF_NAMES = re.compile(
    r"\benumerate\(|\bnext\(|[\])]\s*\[|(?<!: )\b(\w+)\s+for\s+(?:.*\bfor\s+)?\(?\w+\s*,\s*\1\)?\s+in\b"
)
_COUNTER = re.compile(r"\+= 1\b")
_LAST_NUMBER = r"|\bmax\(.*\bint\(.*\.split\("
# of all modules or parameters; numbers of several weights are told where they are put together
_COUNTED_AMONG = re.compile(
    r"^(?!\s*assert\b)(?!.*\.(?:numel|nelement|norm|grad|data|square|pow|abs|sum|item|detach|mean|element_size)\b).*\b(?:sum|len)\("
    + _LAST_NUMBER
)
# in a loop over names: how many, or the last number
_COUNTED_IN_LOOP = re.compile(r"\+= 1\b" + _LAST_NUMBER)
# a layer before or after another, which may be in another stage
_BESIDE = re.compile(r"[-+]\s*\d+\W*(?:not\s+)?in\b")
_NAMED = re.compile(r"^\s*(\w+)\s*=\s*(?:\[|\(|list\(|tuple\()")


class Layers(nn.ModuleDict):
    """By their global numbers, as a string or as a number: `layers["7"]`, `layers[7]`, `layers[-1]`, `layers[:4]`.

    A loop over it, and `values()`, give the layers, as a list's; `items()` their names beside.

    A stage has some of `num_layers`, and a program that counts them, or takes them by their place, is told so, once.
    """

    def __init__(self, layers: Mapping[str, nn.Module], num_layers: int) -> None:
        super().__init__(layers)
        self.num_layers = num_layers
        # what a program adds to them, or leaves out, is the model's
        self.are_all = len(layers) == num_layers
        self._told = False

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            return [self[number] for number in self._numbers()[key]]
        if isinstance(key, int) and key < 0:
            numbers = self._numbers()
            key = numbers[key] if -key <= len(numbers) else key
        if str(key) not in self:
            raise KeyError(f"layer {key}: {self._share()}")
        return super().__getitem__(str(key))

    def __contains__(self, key: Any) -> bool:
        is_here = key in self._modules
        if not is_here and str(key) in map(str, range(self.num_layers)):
            self._look_for(_BESIDE, f"layer {key} is in another stage", sys._getframe(1))
        return is_here

    def _numbers(self) -> list[str]:
        """Of all layers of the model, in their order."""
        if self.are_all:
            return [*self._modules]
        return [str(number) for number in range(self.num_layers)]

    def __len__(self) -> int:
        # `list(layers)` asks for its length as well
        if not self.are_all:
            self._look_for(_COUNTED, "len(layers) is the number of this stage's", sys._getframe(1))
        return super().__len__()

    def values(self) -> ValuesView[nn.Module]:
        """The layers, as a dict's."""
        self._look_for(_BY_PLACE, _TAKEN, sys._getframe(1))
        return super().values()

    def children(self) -> Iterator[nn.Module]:
        """The layers, as a module's."""
        self._look_for(_BY_PLACE, _TAKEN, sys._getframe(1))
        return super().children()

    def named_modules(self, *args: Any, **how: Any) -> Iterator[tuple[str, nn.Module]]:
        """As torch's, of which `modules()` and `parameters()` of a model are made."""
        if not self.are_all:
            frame = sys._getframe(1)
            while (
                frame.f_back is not None and frame.f_globals.get("__name__") == nn.Module.__module__
            ):
                frame = frame.f_back
            self._look_for(_COUNTED_AMONG, "what is counted is this stage's", frame)
        return super().named_modules(*args, **how)

    def keys(self) -> KeysView[str]:
        """Names, which are numbers."""
        self._look_for(_OF_NAMES, _TAKEN, sys._getframe(1))
        return super().keys()

    def items(self) -> ItemsView[str, nn.Module]:
        """Names, which are numbers, and layers."""
        self._look_for(_OF_NAMES, _TAKEN, sys._getframe(1))
        return super().items()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The same, as a module's."""
        self._look_for(_OF_NAMES, _TAKEN, sys._getframe(1))
        return super().named_children()

    def __iter__(self) -> Iterator[nn.Module]:
        """Over the layers, as a list's: `for layer in model.decoder.layers`."""
        self._look_for(_BY_PLACE, _TAKEN, sys._getframe(1))
        return iter(super().values())

    def _look_for(self, use: re.Pattern[str], says: str, frame: Any) -> None:
        """Tell of what the program's line does with a stage's layers."""
        if self._told or self.are_all or not called_by_program(frame):
            return
        line = line_of_program(frame)
        counter = _COUNTED_IN_LOOP if use is _COUNTED_AMONG else _COUNTER
        is_numbered = use is not _COUNTED and _is_numbered(line, frame_of_program(frame), counter)
        if use.search(line) or is_numbered:
            self._told = True
            warnings.warn(
                f"{says}; {self._share()}. The names are the layers' numbers in the whole model, `for number, layer "
                "in layers.items()`; config.num_layers is how many there are",
                stacklevel=program_level(),
            )

    def _share(self) -> str:
        numbers = [*self._modules]
        return f"this stage has {f'{numbers[0]} to {numbers[-1]}' if numbers else 'none'} of {self.num_layers} layers"


def _is_numbered(line: str, frame: Any, counter: re.Pattern[str]) -> bool:
    """Whether the program takes something by number of the list that the line of this frame names, or counts in its
    loop, as `counter` says."""
    if frame is None:
        return False
    source = linecache.getlines(frame.f_code.co_filename)
    if line.lstrip().startswith("for "):
        deeper = re.compile(rf"\s{{{len(line) - len(line.lstrip()) + 1},}}|\s*$")
        body = takewhile(deeper.match, source[frame.f_lineno :])
        return any(counter.search(each) for each in body)
    if counter is not _COUNTER:
        return False
    named = _NAMED.match(line)
    return named is not None and re.search(rf"\b{named[1]}\[", "".join(source)) is not None


def _refuse_names_of_both_kinds(build: Build, layers: Layers) -> None:
    """A checkpoint has one array of each name, with a row for every layer of the kind that it belongs to."""
    of_kind: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for number, layer in layers.items():
        if isinstance(part := getattr(layer, "mlp", None), nn.Module):
            names = (name for name, _ in part.named_parameters())
            of_kind[build.config.has_experts(int(number))].update(dict.fromkeys(names, number))
    for name in sorted(of_kind[True].keys() & of_kind[False].keys()):
        raise ValueError(
            f"layers {of_kind[False][name]} and {of_kind[True][name]} both have mlp.{name}, and moe_layer_freq="
            f"{build.config.moe_layer_freq} says that the second has experts: no checkpoint could tell them apart; "
            "give the part other names in one kind of layer, or leave num_moe_experts and moe_layer_freq out"
        )


class TransformerBlock(nn.Module):
    """The layers `numbers` (global numbers: layer 7 is `layers.7` on every stage) and, at the end, a norm.

    [s, b, h] -> [s, b, h], [s/tp, b, h] each way under sequence parallelism.
    """

    def __init__(
        self, build: Build, spec: TransformerLayerSpec, numbers: range, *, final_norm: bool
    ) -> None:
        super().__init__()

        def layer(number: int) -> nn.Module:
            seed = mix32(build.seed, "parts of layer", number)
            # a part that draws its own initial values draws the same ones on every rank and layout
            with seeded(torch.device("cpu"), seed), seeded(build.parallel.device, seed):
                return spec.layer(replace(build, layer=number), spec)

        self._first = numbers.start
        self.layers = Layers({str(n): layer(n) for n in numbers}, build.config.num_layers)
        _refuse_names_of_both_kinds(build, self.layers)
        self.final_layernorm = spec.norm(build, build.config.hidden_size) if final_norm else None

    def __setattr__(self, name: str, value: Any) -> None:
        # a model that a program made deeper, or shorter: the names stay numbers
        if name == "layers" and isinstance(value, nn.ModuleList):
            numbered = {str(self._first + place): layer for place, layer in enumerate(value)}
            of_others = self.layers.num_layers - len(self.layers)
            value = Layers(numbered, len(value) + of_others * (not self.layers.are_all))
        super().__setattr__(name, value)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        rotary: Tables | LayerTables | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        # past `items`, which listens to programs
        for number, layer in self.layers._modules.items():
            x = layer(
                x, attention_mask, rotary[int(number)] if isinstance(rotary, list) else rotary
            )
        if self.final_layernorm is None:
            return x
        # only the last stage normalises: the stages before hand the residual stream on as it is
        return self.final_layernorm(x)
