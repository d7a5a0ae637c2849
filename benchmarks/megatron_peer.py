"""Megatron-Core on a CPU over gloo: its own GPTModel, layers and schedules, stock from the package index.

Megatron-Core names the device "cuda" in its sources. `cpu_in_place_of_cuda` answers these calls with the CPU, only
while Megatron's own code runs, so that the other side's step meets torch as it is.
"""

import warnings
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch
import torch.nn.functional as F

CPU = torch.device("cpu")
FACTORIES = ("zeros", "ones", "empty", "tensor", "full")


def on_the_cpu(factory):
    """A tensor factory that makes on the CPU, unpinned, what it is asked to make on CUDA."""

    @wraps(factory)
    def make(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


# a function of its own for each name: torch._dynamo refuses one that stands for two
ANSWERS = {
    "current_device": lambda: CPU,  # where communication buffers are
    "synchronize": lambda *_: None,  # after batched messages
    "set_device": lambda *_: None,
    "manual_seed": lambda seed: torch.manual_seed(
        seed
    ),  # the tracker of tensor-parallel random states
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}
MADE = {
    name: on_the_cpu(getattr(torch, name)) for name in FACTORIES
}  # the schedules' counts, masks


@contextmanager
def cpu_in_place_of_cuda():
    """Inside, what asks torch for CUDA gets the CPU."""
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name, make in MADE.items():
            stack.enter_context(patch.object(torch, name, make))
        for kind in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(kind, "cuda", lambda self, *_, **__: self))
        yield


def load():
    """Import what is needed of Megatron-Core. Raises ImportError: it is not installed."""
    warnings.simplefilter("ignore")  # of what is not installed beside it
    with cpu_in_place_of_cuda():
        import megatron.core.models.gpt.gpt_model  # noqa: F401  (its modules make tensors while they are imported)
        from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def config_of(shape, style, layout):
    """Megatron's TransformerConfig of a `benchmarks.llama.Shape`; style: gpt or llama; layout: tensor, pipeline."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    facts = {}
    if style == "llama":
        facts = {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.get("tensor", 1),
        pipeline_model_parallel_size=layout.get("pipeline", 1),
        **facts,
    )
    config.variable_seq_lengths = False
    return config


class MegatronSide:
    """One training step of Megatron-Core on this layout; `step()` gives the mean loss on the last pipeline rank."""

    def __init__(self, shape, style, layout, microbatches):
        """microbatches: (tokens, labels), [b, s] each."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.shape, self.microbatches = shape, microbatches
        rows = microbatches[0][0].shape[0]
        self._positions = torch.arange(shape.seq).repeat(rows, 1)
        with cpu_in_place_of_cuda():
            parallel_state.initialize_model_parallel(
                layout.get("tensor", 1), layout.get("pipeline", 1)
            )
            torch.manual_seed(1)
            model_parallel_cuda_manual_seed(1)
            config = config_of(shape, style, layout)
            self.model = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
                vocab_size=shape.vocab,
                max_sequence_length=shape.seq,
                position_embedding_type="rope" if style == "llama" else "learned_absolute",
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
            self._schedule = get_forward_backward_func()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def _forward(self, batches, model):
        tokens, labels = next(batches)

        def loss_of(output):
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

        return model(tokens, self._positions, None, labels=labels), loss_of

    def step(self):
        """Forward, backward and update of all microbatches."""
        with cpu_in_place_of_cuda():
            found = self._schedule(
                forward_step_func=self._forward,
                data_iterator=iter(self.microbatches),
                model=self.model,
                num_microbatches=len(self.microbatches),
                seq_length=self.shape.seq,
                micro_batch_size=self.microbatches[0][0].shape[0],
                forward_only=False,
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(part["loss"].item() for part in found) / len(found) if found else None

    def close(self):
        """Let go of Megatron's process groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
