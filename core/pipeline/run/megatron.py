"""`get_forward_backward_func()` with Megatron's keywords, over `Pipeline`: a training script's step runs as it is."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.autograd import GradSync, NullGradSync, StageContext
from core.parallel_state import ParallelState, current_state
from core.pipeline.run.pipeline import Pipeline

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[[Tensor], tuple]]]


class _StageWithInput:
    """What `forward_step_func` sees as the model: a stage whose first argument is the previous stage's output.

    Megatron's scripts pass the tokens on every rank; on later stages the received activation takes their place.
    """

    def __init__(self, model: nn.Module, received: Any) -> None:
        self._model = model
        self._received = received

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._received is None:
            return self._model(*args, **kwargs)
        if args:
            return self._model(self._received, *args[1:], **kwargs)
        # Megatron's name for it, and ours
        for name in ("input_ids", "tokens"):
            kwargs.pop(name, None)
        return self._model(self._received, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _ForwardStepModule(nn.Module):
    """A stage as the executor calls it: its forward runs the script's `forward_step_func`.

    loss_func: what the last forward step returned.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.stage = getattr(model, "stage", None)
        self.forward_step: ForwardStep | None = None
        self.data_iterator: Any = None
        self.loss_func: Callable[[Tensor], tuple] | None = None

    def forward(self, received: Any = None) -> Any:
        assert self.forward_step is not None
        output, self.loss_func = self.forward_step(
            self.data_iterator, _StageWithInput(self.model, received)
        )
        return output


class _PipelineCache:
    """The pipeline of a model between calls, an attribute of its first chunk; a copy of the model starts without."""

    def __init__(self) -> None:
        self.pipeline: Pipeline | None = None
        self.chunks: list[_ForwardStepModule] = []
        self.key: tuple = ()  # the arguments that it was built for

    def __deepcopy__(self, memo: dict) -> "_PipelineCache":
        return _PipelineCache()

    def __reduce__(self) -> tuple:
        return _PipelineCache, ()


def _cached_pipeline(
    models: Sequence[nn.Module],
    num_microbatches: int,
    ps: ParallelState,
    grad_sync: GradSync | None,
    seed: int,
    *,
    forward_only: bool,
) -> _PipelineCache:
    """The pipeline of these models, built at the first call and when an argument changes; its step count goes on."""
    cache: _PipelineCache = models[0].__dict__.setdefault("_forward_backward", _PipelineCache())
    # grad_sync last: a call without gradients compares all but that
    key = (tuple(map(id, models)), num_microbatches, id(ps), seed, id(grad_sync))
    if forward_only and cache.key[:-1] == key[:-1]:
        return cache
    if forward_only and grad_sync is None:
        grad_sync = NullGradSync()
    if cache.key != key:
        step_index = 0
        if cache.pipeline is not None:
            step_index = cache.pipeline.step_index
            cache.pipeline.close()
        cache.chunks = [_ForwardStepModule(model) for model in models]
        cache.key = key
        # Megatron's two: several chunks of a model on a rank are its virtual stages
        schedule = "1f1b" if len(models) == 1 else "interleaved-1f1b"
        cache.pipeline = Pipeline(
            cache.chunks,
            ps=ps,
            schedule=schedule,
            num_microbatches=num_microbatches,
            grad_sync=grad_sync,
            seed=seed,
        )
        cache.pipeline.step_index = step_index
        # `loss_func` returns means
        cache.pipeline.sums_watch.close()
    return cache


def _average_like_megatron(outputs: tuple, num_microbatches: int) -> tuple[Tensor, Any]:
    """Megatron's rule: the mean over microbatches of the losses, each divided by its tokens if they were returned.

    Raises ValueError: `loss_func` returned neither 2 nor 3 values.
    """
    if len(outputs) not in (2, 3):
        raise ValueError(
            f"loss_func returned {len(outputs)} values; return (loss, report) or (loss, num_tokens, report)"
        )
    loss = outputs[0]
    report = outputs[-1]
    if len(outputs) == 3:
        loss = loss / torch.as_tensor(outputs[1], device=loss.device).clamp(min=1)
    return loss / num_microbatches, report


def _warn_of_replicas(models: Sequence[nn.Module], replicas: int) -> None:
    """Warn, once, where gradients stay those of one replica and nothing is there that would sum them."""
    first = models[0]
    sums_gradients = isinstance(first, DistributedDataParallel) or hasattr(
        first, "finish_grad_sync"
    )
    if not sums_gradients and not first.__dict__.get("_warned_of_replicas"):
        first.__dict__["_warned_of_replicas"] = True
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
    needed: messages carry their shapes. grad_sync: as for `Pipeline`; without it nobody sums over replicas.
    Raises ValueError: another number of iterators than chunks; PipelineError: a failure on any rank.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if isinstance(data_iterator, (list, tuple)):
        iterators = list(data_iterator)
    else:
        iterators = [data_iterator] * len(models)
    if len(iterators) != len(models):
        raise ValueError(
            f"{len(iterators)} data iterators for {len(models)} model chunks; give one for each chunk"
        )
    model_state = getattr(models[0], "parallel", None)
    ps = model_state if isinstance(model_state, ParallelState) else current_state()
    if grad_sync is None and not forward_only and ps.size("dp-cp") > 1:
        _warn_of_replicas(models, ps.size("dp-cp"))
    cache = _cached_pipeline(
        models, num_microbatches, ps, grad_sync, seed, forward_only=forward_only
    )
    assert cache.pipeline is not None
    for chunk, iterator in zip(cache.chunks, iterators, strict=True):
        chunk.forward_step = forward_step_func
        chunk.data_iterator = iterator
    reports: list[Any] = []

    def loss_fn(output: Tensor, microbatch: Any) -> tuple[Tensor, float]:
        loss_func = cache.chunks[-1].loss_func
        assert loss_func is not None
        loss, report = _average_like_megatron(loss_func(output), num_microbatches)
        reports.append(report)
        # already averaged: Megatron's losses are means, ours are sums over counted tokens
        return (loss, 1.0)

    if forward_only:
        cache.pipeline.evaluate(None, loss_fn)
    else:
        contexts = [chunk.stage for chunk in cache.chunks if isinstance(chunk.stage, StageContext)]
        with _averages(contexts, num_microbatches):
            cache.pipeline.step(None, loss_fn)
    return reports


@contextmanager
def _averages(contexts: Sequence[StageContext], num_microbatches: int) -> Iterator[None]:
    """What the stages add to the loss is averaged as the loss is."""
    for context in contexts:
        context.averaged_over = num_microbatches
    try:
        yield
    finally:
        for context in contexts:
            context.averaged_over = None


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Megatron's entry point; `forward_backward` serves every layout."""
    return forward_backward
