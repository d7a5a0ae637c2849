"""The training step of one plain Llama over data-parallel ranks, by ours and by the peers, each with its best plan.

A maker takes the model, returns `step(tokens, labels) -> loss` of this rank's rows. Everywhere: the gradient of the
mean of the ranks' losses, clipped at a global norm of 1.0, then fused AdamW. No weight decay: sides differ in what
they exempt from it, and groups would cost the peers a second call.
"""

import importlib.util
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import count_calls
from benchmarks.llama import Llama, Shape
from core.parallel_state import ParallelConfig, ParallelState

LR, CLIP = 3e-4, 1.0
COMPUTE = Shape(
    hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, seq=128, vocab=4096
)  # 5.3 M, batch 4
COMMUNICATION = Shape(
    hidden=384, layers=4, heads=4, kv_heads=4, ffn=1024, seq=64, vocab=4096
)  # 10.2 M, batch 1


def next_token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)


def torch_step(net, optimizer):
    parameters = list(net.parameters())  # which costs hundreds of Python calls

    def step(tokens, labels):
        loss = next_token_loss(net(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp_module(model, bucket_mb=4, **options):
    """No broadcast of the rotary tables at each forward; buckets in which gloo overlaps best here."""
    return nn.parallel.DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
        broadcast_buffers=False,
        **options,
    )


def ddp(model, **options):
    net = ddp_module(model, **options)
    return torch_step(net, adamw(net.parameters()))


def zero_redundancy(model, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = ddp_module(model)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=LR, weight_decay=0.0, fused=True, **options
    )
    return torch_step(net, optimizer)


def fsdp2(model, **options):
    """A unit per block, and the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    return torch_step(model, adamw(model.parameters()))


def deepspeed_installed():
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed(stage, **options):
    def make(model):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        warnings.filterwarnings("ignore")
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only accumulation reads it
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, **options},
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config
        )

        def step(tokens, labels):
            loss = next_token_loss(engine(tokens), labels)
            engine.backward(loss)
            engine.step()
            return loss

        return step

    return make


def ours(stage, *, executor=False, **options):
    """The plain loop; with `executor`, one microbatch of our own, which lets sums start while backward goes on.

    On two cores two ranks gain nothing by that: a plain loop with `backward_passes=1` takes as long, or longer.
    """

    def make(model):
        from core.data_parallel import DataParallel
        from core.optimizer import OptimizerConfig, ShardedAdamW
        from core.pipeline import SingleStage

        ps = ParallelState.build(ParallelConfig(), device="cpu")
        shard = DataParallel(model, ps, zero_stage=stage, **options)
        optimizer = ShardedAdamW(shard, OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad=CLIP))

        def step(tokens, labels):
            loss = next_token_loss(model(tokens), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if not executor:
            return step
        stages = SingleStage(model, ps=ps, grad_sync=shard)

        def loss_sum(output, batch):
            return F.cross_entropy(
                output.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
            ), output.shape[1]

        def executed(tokens, labels):
            result = stages.step({"tokens": tokens, "labels": labels}, loss_sum)
            optimizer.step(num_tokens=result.num_tokens)
            optimizer.zero_grad()
            return result.loss

        return executed

    return make


SIDES = {
    "ddp": ddp,
    "zero_redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "deepspeed0": deepspeed(0),
    **{
        f"deepspeed{stage}": deepspeed(stage, reduce_bucket_size=4_000_000) for stage in (1, 2)
    },  # 5e8 is slower here
    "deepspeed3": deepspeed(3),
    **{f"zero{stage}": ours(stage) for stage in range(4)},
    **{f"zero{stage}_executor": ours(stage, executor=True) for stage in range(4)},
}


class Engine:
    """A side on fresh weights, equal on all ranks and sides, and the losses of its steps."""

    def __init__(self, make, shape, batch):
        torch.manual_seed(0)
        self._step = make(Llama(shape))
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        data = torch.randint(shape.vocab, (8, batch, shape.seq + 1), generator=generator)
        self._batches = [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in data]
        self.losses = []

    def step(self):
        tokens, labels = self._batches[len(self.losses) % len(self._batches)]
        self.losses.append(self._step(tokens, labels).detach())

    def mean_losses(self):
        """Of all ranks, one number per step so far. One all-reduce."""
        total = torch.stack(self.losses).double()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def python_calls(side, shape, batch=2):
    """Python function calls of the fourth step of a side on this rank."""
    engine = Engine(SIDES[side], shape, batch)
    engine.step()  # DDP rebuilds its buckets after the first
    return count_calls(engine.step)
