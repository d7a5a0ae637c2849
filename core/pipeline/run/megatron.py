"""`get_forward_backward_func()` with Megatron's keywords, over `Pipeline`: a training script's step runs as it is."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.autograd import GradSync, NullGradSync
from core.parallel_state import ParallelState, current_state
from core.pipeline.run.pipeline import Pipeline

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[[Tensor], tuple]]]


class _Fed:
    """What `forward_step_func` sees as the model: a stage whose first argument is the previous stage's output."""

    def __init__(self, model: nn.Module, received: Any) -> None:
        self._model, self._received = model, received

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._received is None:
            return self._model(*args, **kwargs)
        if args:
            return self._model(self._received, *args[1:], **kwargs)
        for name in ("input_ids", "tokens"):  # Megatron's name for it, and ours
            kwargs.pop(name, None)
        return self._model(self._received, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Chunk(nn.Module):
    """One stage as the executor calls it. `loss_func` is what the last forward step returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stage = getattr(model, "stage", None)
        self.step: ForwardStep | None = None
        self.data: Any = None
        self.loss_func: Callable[[Tensor], tuple] | None = None

    def forward(self, received: Any = None) -> Any:
        assert self.step is not None
        output, self.loss_func = self.step(self.data, _Fed(self.model, received))
        return output


class _Kept:
    """The pipeline of a model between steps, hung on its first chunk; a copy of the model starts without."""

    def __init__(self) -> None:
        self.pipeline: Pipeline | None = None
        self.chunks: list[_Chunk] = []
        self.facts: tuple = ()

    def __deepcopy__(self, memo: dict) -> "_Kept":
        return _Kept()

    def __reduce__(self) -> tuple:
        return _Kept, ()


def _pipeline(
    models: Sequence[nn.Module],
    num_microbatches: int,
    ps: ParallelState,
    grad_sync: GradSync | None,
    seed: int,
    *,
    forward_only: bool,
) -> _Kept:
    kept = models[0].__dict__.setdefault("_forward_backward", _Kept())
    facts = (tuple(map(id, models)), num_microbatches, id(ps), seed, id(grad_sync))
    if forward_only and kept.facts[:4] == facts[:4]:  # no gradients, whoever collects them
        return kept
    if forward_only and grad_sync is None:
        grad_sync = NullGradSync()
    if kept.facts != facts:
        step = kept.pipeline.step_index if kept.pipeline is not None else 0
        if kept.pipeline is not None:
            kept.pipeline.close()
        kept.chunks, kept.facts = [_Chunk(model) for model in models], facts
        kept.pipeline = Pipeline(
            kept.chunks,
            ps=ps,
            schedule="1f1b" if len(models) == 1 else "interleaved-1f1b",
            num_microbatches=num_microbatches,
            grad_sync=grad_sync,
            seed=seed,
        )
        kept.pipeline.step_index = step
    return kept


def _scaled(outputs: tuple, num_microbatches: int) -> tuple[Tensor, Any]:
    """Megatron's rule: the mean over microbatches of the losses, each divided by its tokens if it told them."""
    if len(outputs) not in (2, 3):
        raise ValueError(
            f"loss_func returned {len(outputs)} values; return (loss, report) or (loss, num_tokens, report)"
        )
    loss, report = outputs[0], outputs[-1]
    if len(outputs) == 3:
        loss = loss / torch.as_tensor(outputs[1], device=loss.device).clamp(min=1)
    return loss / num_microbatches, report


def _tell_of_replicas(models: Sequence[nn.Module], replicas: int) -> None:
    """Warn, once, where gradients stay those of one replica and nothing is there that would sum them."""
    first = models[0]
    summed = isinstance(first, DistributedDataParallel) or hasattr(first, "finish_grad_sync")
    if not summed and not first.__dict__.get("_told_of_replicas"):
        first.__dict__["_told_of_replicas"] = True
        warnings.warn(
            f"forward_backward without grad_sync on {replicas} data ranks: gradients stay each rank's own, and "
            f"{replicas} models are trained; pass grad_sync=DataParallel(...), or wrap the model in "
            "core.interop.megatron.distributed.DistributedDataParallel and call finalize_model_grads",
            stacklevel=3,
        )


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator | Sequence[Iterator | None] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    forward_only: bool = False,
    grad_sync: GradSync | None = None,
    seed: int = 0,
) -> list[Any]:
    """One step: gradients into `main_grad` or `.grad`; returns the last stage's reports, one per microbatch, else [].

    forward_step_func(data_iterator, model) -> (output, loss_func); loss_func(output) -> (loss, report) or
    (loss, num_tokens, report). Losses are averaged as Megatron does it. model: a module, or this rank's chunks in
    the order of their stages (interleaved 1F1B), with one iterator each. seq_length and micro_batch_size are not
    needed: every message tells its shape. grad_sync: as for `Pipeline`; without it nobody sums over replicas.
    Raises ValueError: another number of iterators than chunks; PipelineError: a failure on any rank.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    data = data_iterator if isinstance(data_iterator, (list, tuple)) else [data_iterator] * len(models)
    if len(data) != len(models):
        raise ValueError(f"{len(data)} data iterators for {len(models)} model chunks; give one for each chunk")
    ps = getattr(models[0], "parallel", None)
    ps = ps if isinstance(ps, ParallelState) else current_state()
    if grad_sync is None and not forward_only and ps.size("dp-cp") > 1:
        _tell_of_replicas(models, ps.size("dp-cp"))
    kept = _pipeline(models, num_microbatches, ps, grad_sync, seed, forward_only=forward_only)
    assert kept.pipeline is not None
    for chunk, iterator in zip(kept.chunks, data, strict=True):
        chunk.step, chunk.data = forward_step_func, iterator
    reports: list[Any] = []

    def loss_fn(output: Tensor, microbatch: Any) -> tuple[Tensor, float]:
        loss_func = kept.chunks[-1].loss_func
        assert loss_func is not None
        loss, report = _scaled(loss_func(output), num_microbatches)
        reports.append(report)
        return loss, 1.0

    if forward_only:
        kept.pipeline.evaluate(None, loss_fn)
    else:
        kept.pipeline.step(None, loss_fn)
    return reports


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Megatron's entry point; `forward_backward` serves every layout."""
    return forward_backward
