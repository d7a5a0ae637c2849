"""What a family is: how its configuration is read and written, what it may not say, the rows of its weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from core.models.huggingface.facts import Facts
from core.models.huggingface.rows import Row
from core.transformer.spec import TransformerLayerSpec
from core.transformer.transformer_config import TransformerConfig

Fields = dict[str, Any]  # of a `config.json`
# (whether it holds, what is said where it does not)
Rules = Iterator[tuple[bool, str]]

# their names of activations -> ours; the first of several is the one that is written
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
    "relu2": "squared_relu",
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What GPTModel(**) needs to be the same model: config, spec, sizes, tying."""

    config: TransformerConfig
    transformer_layer_spec: TransformerLayerSpec
    vocab_size: int
    max_sequence_length: int
    share_embeddings_and_output_weights: bool

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of GPTModel."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    architecture: the class that `AutoModelForCausalLM` makes of it. model: our form of its fields, with a dtype.
    rules: what it may say that cannot be represented here. fields: what it would say of a model of ours; where that
    is not the model, `model` of the fields differs from it. rows: our parameters <- their tensors.
    """

    architecture: str
    model: Callable[[Facts, torch.dtype], HuggingFaceModel]
    rules: Callable[[Facts], Rules]
    fields: Callable[[HuggingFaceModel], Fields]
    rows: tuple[Row, ...]


def activation_name(config: TransformerConfig) -> str:
    """Theirs, of our activation; of a function of the user's own a name that nobody has."""
    ours = str(config.activation_func)
    if ours == "silu":
        return ours
    return next((name for name, of in ACTIVATIONS.items() if of == ours), ours)


def one_dropout(facts: Facts, default: float = 0.0) -> Rules:
    """One hidden_dropout serves the embedding and the residual stream."""
    embedding = facts.get("embd_pdrop", default)
    residual = facts.get("resid_pdrop", default)
    yield (
        embedding == residual,
        f"embd_pdrop={embedding} with resid_pdrop={residual} is not supported: one hidden_dropout serves "
        "both; set them to the same value",
    )
