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
from core.parallel_state.random import generators_of
from core.pipeline.run.checks.plain_loop import BatchWatch
from core.pipeline.run.context_means import ContextMeans
from core.pipeline.run.pipeline import Pipeline
from core.pipeline.run.step import LossFn

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[[Tensor], tuple]]]


class _ProgramsRandomState:
    """The states of torch's generators that a program's forward steps go on with, from one to the next.

    An executor seeds each stage's forward by itself. A loader that shuffles at its first `next`, or noise on inputs,
    would draw other numbers on each stage.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = generators_of(device)
        self._held = [generator.get_state() for generator in self._generators]

    def swap(self) -> None:
        """The stage's states become the program's, or the program's the stage's."""
        for place, generator in enumerate(self._generators):
            state = generator.get_state()
            generator.set_state(self._held[place])
            self._held[place] = state

    def restore(self) -> None:
        """After a step, which has put back the states that it began with."""
        for generator, state in zip(self._generators, self._held, strict=True):
            generator.set_state(state)


class _SeenIterator:
    """A data iterator that remembers the first item of a step."""

    def __init__(self, iterator: Iterator) -> None:
        self._iterator = iterator
        self.first: Any = None

    def __iter__(self) -> "_SeenIterator":
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        if self.first is None:
            self.first = item
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class _StageWithInput:
    """What `forward_step_func` sees as the model: a stage whose first argument is the previous stage's output.

    Megatron's scripts pass the tokens on every rank; on later stages the received activation takes their place.
    """

    def __init__(self, model: nn.Module, received: Any, random: _ProgramsRandomState) -> None:
        self._model = model
        self._received = received
        self._random = random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._random.swap()
        try:
            return self._call(*args, **kwargs)
        finally:
            self._random.swap()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
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
        self.random: _ProgramsRandomState | None = None

    def take(
        self,
        forward_step: ForwardStep,
        iterator: "_SeenIterator | None",
        random: _ProgramsRandomState,
    ) -> None:
        """What the next step runs, and on which data."""
        self.forward_step = forward_step
        self.data_iterator = iterator
        self.random = random

    def forward(self, received: Any = None) -> Any:
        assert self.forward_step is not None and self.random is not None
        self.random.swap()
        try:
            output, self.loss_func = self.forward_step(
                self.data_iterator, _StageWithInput(self.model, received, self.random)
            )
        finally:
            self.random.swap()
        return output

    def loss_of(self, output: Tensor) -> tuple:
        """What that `loss_func` makes of the last stage's output."""
        assert self.loss_func is not None
        return self.loss_func(output)


class _PipelineCache:
    """The pipeline of a model between calls, an attribute of its first chunk; a copy of the model starts without."""

    def __init__(self) -> None:
        self.batch_watch: BatchWatch | None = None
        self.context_means: ContextMeans | None = None
        self.pipeline: Pipeline | None = None
        self.chunks: list[_ForwardStepModule] = []
        self.key: tuple = ()  # the arguments that it was built for

    def step(self, loss_fn: LossFn, loss_scale: float | Tensor, *, are_sums: bool) -> None:
        """are_sums: losses of tokens, which somebody divides after the step; else shares of a mean over microbatches.

        What a grad_sync sums over replicas is the mean over them, too, if each gives its share of it.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        if not are_sums:
            # there is nothing to divide, and nothing to tell
            pipeline.sums_watch.close()
            if not isinstance(pipeline.grad_sync, NullGradSync):
                loss_scale = loss_scale / pipeline.ps.size("dp-cp")
        pipeline.step(None, loss_fn, loss_scale)

    def compare_batches(self, iterator: _SeenIterator | None) -> None:
        """After a step. Warns, once, on all pipeline ranks, where their first items differ."""
        assert self.batch_watch is not None
        self.batch_watch.before_step(iterator.first if iterator is not None else None)
        self.batch_watch.after_step()

    def context_factor(self, outputs: Sequence[Any], losses: Tensor) -> float:
        """Of a loss_func's (loss, report), or (loss, num_tokens, report) whose tokens divide it."""
        assert self.context_means is not None
        return self.context_means.factor(_divided(outputs), losses, is_counted=len(outputs) == 3)

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
        # 0 is no number that was handed on
        if step_index:
            cache.pipeline.step_index = step_index
        cache.batch_watch = BatchWatch(ps)
        cache.context_means = ContextMeans(ps.group("cp"))
    return cache


def _loss_like_megatron(
    outputs: Any, averaged_over: int | None
) -> tuple[Tensor, Tensor | float, Any]:
    """(loss, its tokens, report). Megatron's rule: the mean over microbatches of the losses, each divided by its
    tokens if they were returned; that is as of 1 token. averaged_over None: the sums, and the tokens, as returned.

    Raises ValueError: `loss_func` returned neither 2 nor 3 values, or a loss that is not 1 number; None: not 3.
    """
    is_sequence = isinstance(outputs, (tuple, list))
    if not is_sequence or len(outputs) not in (2, 3):
        returned = f"{len(outputs)} values" if is_sequence else type(outputs).__name__
        raise ValueError(
            f"loss_func returned {returned}; return (loss, report) or (loss, num_tokens, report)"
        )
    loss = outputs[0]
    report = outputs[-1]
    if loss.numel() != 1:
        raise ValueError(
            f"loss_func returned losses of shape {list(loss.shape)}, not 1 number: return (their mean over the "
            "tokens that the mask leaves, report), as in `(losses * mask).sum() / mask.sum()`, or (their sum, "
            "num_tokens, report)"
        )
    if averaged_over is None:
        if len(outputs) != 3:
            raise ValueError(
                "calculate_per_token_loss=True: loss_func returned 2 values; return (sum of the losses, num_tokens, "
                "report), or leave it False"
            )
        return loss, outputs[1], report
    # already averaged: Megatron's losses are means, ours are sums over counted tokens
    return _divided(outputs) / averaged_over, 1.0, report


def _divided(outputs: Sequence[Any]) -> Tensor:
    """The loss of a `loss_func`, over its tokens where it returned them."""
    loss: Tensor = outputs[0]
    if len(outputs) == 3:
        loss = loss / torch.as_tensor(outputs[1], device=loss.device).clamp(min=1)
    return loss


def _state_of(model: nn.Module) -> ParallelState:
    """The state that a model was built with; the current one of a model that has none."""
    model_state = getattr(model, "parallel", None)
    return model_state if isinstance(model_state, ParallelState) else current_state()


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


def _one_each(data_iterator: Any, chunks: int) -> list[Iterator | None]:
    """The iterator of each chunk. Raises ValueError: another number of them."""
    if isinstance(data_iterator, (list, tuple)):
        iterators = list(data_iterator)
    else:
        iterators = [data_iterator] * chunks
    if len(iterators) != chunks:
        raise ValueError(
            f"{len(iterators)} data iterators for {chunks} model chunks; give one for each chunk"
        )
    return iterators


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
    step_index: int | None = None,
    calculate_per_token_loss: bool = False,
    loss_scale: float | Tensor = 1.0,
) -> list[Any]:
    """One step: gradients into `main_grad` or `.grad`; returns the last stage's reports, one per microbatch, else [].

    forward_step_func(data_iterator, model) -> (output, loss_func); loss_func(output) -> (loss, report) or
    (loss, num_tokens, report). Losses are averaged as Megatron does it (context ranks: `ContextMeans`). model: a
    module, or this rank's chunks in the order of their stages (interleaved 1F1B), with one iterator each. seq_length,
    micro_batch_size: messages have shapes. grad_sync: as for `Pipeline`, its sums are means over replicas here;
    without it nobody sums. step_index: of this step, of which random numbers are a function: the iteration of a
    script that goes on (default: counted from 0). calculate_per_token_loss: losses and num_tokens are added up, by a
    grad_sync over replicas too; `optimizer.step(num_tokens=...)` divides. loss_scale: gradients, of experts'
    auxiliary losses too, are multiplied by it; reports are not.
    Raises ValueError: another number of iterators than chunks; PipelineError: a failure on any rank.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    iterators = _one_each(data_iterator, len(models))
    ps = _state_of(models[0])
    if grad_sync is None and not forward_only and ps.size("dp-cp") > 1:
        _warn_of_replicas(models, ps.size("dp-cp"))
    cache = _cached_pipeline(
        models, num_microbatches, ps, grad_sync, seed, forward_only=forward_only
    )
    assert cache.pipeline is not None
    if step_index is not None:
        cache.pipeline.step_index = step_index
    random = _ProgramsRandomState(ps.device)
    seen = [None if iterator is None else _SeenIterator(iterator) for iterator in iterators]
    for chunk, iterator in zip(cache.chunks, seen, strict=True):
        chunk.take(forward_step_func, iterator, random)
    averaged_over = None if calculate_per_token_loss else num_microbatches
    reports: list[Any] = []

    def loss_fn(output: Tensor, microbatch: Any) -> tuple[Tensor, Tensor | float]:
        outputs = cache.chunks[-1].loss_of(output)
        loss, tokens, report = _loss_like_megatron(outputs, averaged_over)
        reports.append(report)
        return (loss * cache.context_factor(outputs, output), tokens)

    if forward_only:
        cache.pipeline.evaluate(None, loss_fn)
    else:
        with _averages(cache.chunks, averaged_over):
            cache.step(loss_fn, loss_scale, are_sums=calculate_per_token_loss)
        cache.compare_batches(seen[0])
    random.restore()
    return reports


@contextmanager
def _averages(chunks: Sequence[_ForwardStepModule], num_microbatches: int | None) -> Iterator[None]:
    """What the stages add to the loss is averaged as the loss is; None: it is added up as the loss is."""
    contexts = [chunk.stage for chunk in chunks if isinstance(chunk.stage, StageContext)]
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
