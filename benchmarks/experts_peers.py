"""MoE layers of Megatron-Core and DeepSpeed for `benchmarks.experts`, stock from the package index, on CPUs and gloo.

Neither needs anything compiled. Megatron-Core takes its SequentialMLP, what it has without Transformer Engine and
grouped_gemm, and its all-to-all dispatcher; `megatron_peer` answers its calls of CUDA. DeepSpeed takes its top-2
gate, and any module for its experts: here one of two plain matmuls.
"""

import importlib
import importlib.util
from contextlib import contextmanager, nullcontext, redirect_stdout
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import megatron_peer

INSTALL = {
    "megatron": 'pip install --no-deps megatron-core==0.16.1 && pip install einops "torch=={torch}"',
    "deepspeed": 'pip install deepspeed==0.19.8 "torch=={torch}"',
}
MODULES = {"megatron": "megatron.core", "deepspeed": "deepspeed"}


def is_installed(name):
    top = MODULES[name].split(".")[0]
    return (
        importlib.util.find_spec(top) is not None
        and importlib.util.find_spec(MODULES[name]) is not None
    )


def installed(say=print):
    """The peers that are installed here; of each other one a line that says how to install it."""
    for name in MODULES:
        if not is_installed(name):
            how = INSTALL[name].format(torch=torch.__version__.split("+")[0])
            say(
                f"{name} is not installed here and left out. In an environment of its own, above this one: {how}"
            )
    return [name for name in MODULES if is_installed(name)]


@contextmanager
def group_of_one():
    """Both peers ask for their process groups even in one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class NoStream:
    """What Megatron's dispatcher waits for when it copies its counts to the host: here they are on the host."""

    def record_event(self):
        return self

    def synchronize(self):
        pass


class MegatronBlock:
    """Megatron-Core's MoELayer; `forward` and the backward of its output run `inside` its substitute for CUDA."""

    def __init__(self, shape, dtype, state, experts):
        """state: the weights of all experts; experts: the slice of them that this rank holds."""
        megatron_peer.load()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.spec_utils import build_module

        moe_utils.te_general_gemm = None  # asked for where it was not imported
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = NoStream()
        with self.inside():
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.initialize_model_parallel(
                    expert_model_parallel_size=dist.get_world_size()
                )
            config = megatron_config(shape, dtype)
            self.layer = build_module(
                get_moe_module_spec(use_te=False, num_experts=shape["experts"]), config
            )
        with torch.no_grad():
            self.layer.router.weight.copy_(state["router"])
            held = zip(
                self.layer.experts.local_experts,
                state["fc1"][experts],
                state["fc2"][experts],
                strict=True,
            )
            for expert, fc1, fc2 in held:
                expert.linear_fc1.weight.copy_(fc1.flatten(0, 1))
                expert.linear_fc2.weight.copy_(fc2)

    @contextmanager
    def inside(self):
        from megatron.core.transformer.moe import token_dispatcher

        stream = token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
        with (
            megatron_peer.cpu_in_place_of_cuda(),
            patch.object(torch.cuda, "current_stream", lambda *_: stream),
            patch.object(torch.cuda, "stream", on_stream),
            patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_the_host),
        ):
            yield

    def forward(self, x):
        y, _ = self.layer(x)
        return y


@contextmanager
def on_stream(_):
    yield


def on_the_host(tensor, as_numpy=False, record_stream=False):
    """Megatron moves only what is on a GPU, but needs the numbers of what it sends in numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def megatron_config(shape, dtype):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=shape["hidden"],
        num_attention_heads=4,
        ffn_hidden_size=shape["ffn"],
        moe_ffn_hidden_size=shape["ffn"],
        num_moe_experts=shape["experts"],
        moe_router_topk=shape["top_k"],
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",  # as ours
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,  # torch.compile of SwiGLU: no faster here, and it wants a C++ compiler
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )


class SwiGLU(torch.nn.Module):
    """An expert of DeepSpeed's layer."""

    def __init__(self, hidden, ffn):
        super().__init__()
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn, bias=False)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


class DeepSpeedBlock:
    """DeepSpeed's MoE. It drops no tokens, else its results were others: it pads each expert to the fullest one."""

    inside = nullcontext

    def __init__(self, shape, dtype, state, experts):
        import deepspeed
        from deepspeed.moe.layer import MoE

        backend = importlib.import_module("deepspeed.comm.torch")
        with patch.object(backend, "build_shm_op", lambda: None):  # it would compile an all-reduce
            deepspeed.init_distributed(
                "gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False
            )
        expert = SwiGLU(shape["hidden"], shape["ffn"])
        self.layer = MoE(
            shape["hidden"],
            expert,
            shape["experts"],
            ep_size=dist.get_world_size(),
            k=shape["top_k"],
            drop_tokens=False,
            top2_2nd_expert_sampling=False,  # the second expert is the second best one, not a drawn one
        )
        with redirect_stdout(None):  # every rank says that it makes its group
            self.layer.set_deepspeed_parallelism()
        self.layer.to(dtype)
        with torch.no_grad():
            inner = self.layer.deepspeed_moe
            inner.gate.wg.weight.copy_(state["router"])
            held = zip(
                inner.experts.deepspeed_experts,
                state["fc1"][experts],
                state["fc2"][experts],
                strict=True,
            )
            for expert, fc1, fc2 in held:
                expert.fc1.weight.copy_(fc1.flatten(0, 1))
                expert.fc2.weight.copy_(fc2)

    def forward(self, x):
        y, _, _ = self.layer(x)
        return y
