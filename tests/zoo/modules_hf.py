"""Small random models of transformers, with its own gradient checkpointing."""

from functools import partial

from torch import nn

from tests.zoo.modules_parts import D, Of


def _model(name, checkpointed=True, **more):
    """A body that takes embeddings of width D."""
    import transformers

    sizes = {
        "hidden_size": D,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 16,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    config._experts_implementation = "eager"  # the grouped one knows no float64
    model = getattr(transformers, f"{name}Model")(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


def _stage(name, **how):
    def run(m, x):
        return m.body(inputs_embeds=x).last_hidden_state

    return Of(run, body=_model(name, **how))


def _two(name, **how):
    make = partial(_stage, name, **how)
    return lambda: [make(), make()]


def _routers():
    """Its balancing loss comes from router logits, which hooks collect."""

    def run(m, x):
        out = m.body(inputs_embeds=x, output_router_logits=True)
        return out.last_hidden_state + sum(logits.logsumexp(-1).mean() for logits in out.router_logits)

    body = partial(_model, "Mixtral", checkpointed=False, num_local_experts=3, num_experts_per_tok=2)
    return [Of(run, body=body()), nn.Linear(D, D)]


HF = {
    "Hugging Face Llama, `gradient_checkpointing_enable()`": _two("Llama"),
    "Hugging Face Llama": _two("Llama", checkpointed=False),
    "Hugging Face GPT-2, `gradient_checkpointing_enable()`": _two("GPT2", n_inner=12),
    "Hugging Face BERT, `gradient_checkpointing_enable()`": _two("Bert"),
    "Hugging Face Qwen2, `gradient_checkpointing_enable()`": _two("Qwen2"),
    "Hugging Face Mixtral with `output_router_logits=True`": _routers,
}
