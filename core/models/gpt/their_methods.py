"""Methods and attributes of transformers' models that a GPTModel has not: what there is instead."""

from typing import NoReturn

_LOAD = (
    "GPTModel(**from_huggingface(FOLDER).arguments()), then load_huggingface(model, FOLDER), of "
    "core.models.huggingface"
)
_SAVE = "save_huggingface(model, FOLDER) of core.models.huggingface"

# name -> what follows "use"
ELSEWHERE = {
    "from_pretrained": _LOAD,
    "from_config": "GPTModel(**from_huggingface(CONFIG).arguments()), of core.models.huggingface",
    "save_pretrained": _SAVE,
    "push_to_hub": f"{_SAVE}, and huggingface-cli upload",
    "generate": "core.training.generate.generate(model, TOKENS, new_tokens=N)",
    "print_trainable_parameters": "sum(p.numel() for p in model.parameters() if p.requires_grad), of this rank",
    "gradient_checkpointing_enable": 'apply_recompute(model, "layer", stage=model.stage) of core.autograd; in a run '
    "training.recompute=layer",
    "gradient_checkpointing_disable": "nothing: without apply_recompute no layer runs twice",
    "enable_input_require_grads": "nothing: recomputation needs no gradient of its input",
    "resize_token_embeddings": "vocab_size of GPTModel",
    "tie_weights": "share_embeddings_and_output_weights=True of GPTModel",
    "get_input_embeddings": "model.embedding.word_embeddings",
    "get_output_embeddings": "model.output_layer",
    "lm_head": "model.output_layer",
    "add_adapter": "apply_lora(model, LoraConfig(rank=8)) of core.models.lora",
    "merge_and_unload": "merge_lora(model) of core.models.lora",
    "generation_config": "core.training.generate.generate(model, TOKENS, temperature=T, ...), whose arguments say it",
    "name_or_path": "the folder that load_huggingface(model, FOLDER) was given",
    "device": "model.parallel.device",
    "dtype": "model.config.params_dtype",
}


def not_here(owner: type, name: str) -> AttributeError:
    """What is raised where somebody asks for one of these."""
    return AttributeError(f"{owner.__name__} has no {name}; use {ELSEWHERE[name]}")


class AbsentMethod:
    """In the place of a classmethod: asking the class for it is told, too; `hasattr` stays False."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise not_here(owner, self._name)
