"""Text from a model: the prompts run once, then each new token alone; keys and values of earlier ones are kept."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from core.autograd import StageContext
from core.models.gpt import GPTModel
from core.parallel_state.collectives import all_gather_objects
from core.pipeline.run.step import evaluating
from core.training.sampling import Sampling
from core.transformer.attention.kv_cache import KVCache
from core.transformer.layer import TransformerBlock


class ForwardExecutor(Protocol):
    """What generation needs of an executor whose model is spread over pipeline stages."""

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """stage -> module of this rank."""
        ...

    def forward(self, batch: Mapping[str, Tensor], *, microbatches: int) -> Any:
        """Logits on the rank of the last stage, None elsewhere; nothing but activations is sent."""
        ...

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value` of the rank of the last stage, on all of them."""
        ...


def generate(
    model: GPTModel,
    prompt: list[int],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
    executor: ForwardExecutor | None = None,
) -> list[int]:
    """`prompt` and `new_tokens` more, the likeliest each (temperature 0) or drawn; see `generate_batch`."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    (text,) = generate_batch(
        model, [prompt], new_tokens=new_tokens, sampling=sampling, stop=stop, executor=executor
    )
    return text


def generate_batch(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    executor: ForwardExecutor | None = None,
    cache: bool = True,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Each prompt and `new_tokens` more, as it would be alone; a text stops at the model's last position.

    model: the whole model; or any stage of it, with the `Pipeline` of all stages as `executor`.
    prompts: of any lengths; they run as one batch. Prompt number i draws with `sampling.seed + i`.
    stop: tokens that end a text, such as the end of a document; the one that does is the last.
    cache: without it the full prefix runs again for every token, as it does under sequence parallelism and with an
        attention of your own that has no `cache_of_layer`.
    on_token(number of the prompt, token): called for each new token.
    Collective over the tensor and pipeline ranks: every one of them calls it and gets the same tokens. So do context
    ranks, each of which runs whole texts. Under
    sequence parallelism the positions that can be used are a multiple of the tensor ranks.
    Expert ranks need each other's experts for every token: they are given the same texts, data ranks among them too.
    Raises ValueError: an empty prompt, or one longer than the model's positions; other texts on expert ranks.
    """
    _refuse_other_texts(
        model, (list(map(list, prompts)), new_tokens, sampling, sorted(stop), cache)
    )
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens} must be at least 0")
    sampler = sampling if sampling is not None else Sampling()
    texts = [
        _Text(model, prompt, new_tokens, sampler, sampler.seed + i, stop)
        for i, prompt in enumerate(prompts)
    ]
    modules: list[nn.Module] = [model] if executor is None else list(executor.modules.values())
    cached = cache and not model.place.splits_sequence and all(map(_can_cache, modules))
    # without a cache each text runs by itself, with its full prefix
    batches = [[number] for number in range(len(texts))]
    if cached and texts:
        batches = [list(range(len(texts)))]
    for numbers in batches:
        batch = _Batch(
            model, executor, [texts[number] for number in numbers], modules if cached else []
        )
        with batch.running():
            while new := batch.advance():
                for row, token in new.items():
                    if on_token is not None:
                        on_token(numbers[row], token)
    return [text.tokens for text in texts]


def _refuse_other_texts(model: GPTModel, asked: tuple[Any, ...]) -> None:
    """One all-gather over the expert ranks, if the model has some: other numbers of tokens would hang."""
    if model.config.num_moe_experts is None:
        return
    different = len({repr(each) for each in all_gather_objects(asked, model.parallel.group("ep"))})
    if different > 1:
        raise ValueError(
            f"{model.parallel.size('ep')} expert ranks are asked for {different} different sets of texts, and each "
            "needs the others' experts for every token; give all of them the same prompts and options"
        )


def _can_cache(model: nn.Module) -> bool:
    """Whether the attention of every layer takes a cache."""
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    layers = [layer for block in blocks for layer in block.layers.values()]
    return all(any(hasattr(part, "cache_of_layer") for part in layer.modules()) for layer in layers)


@contextmanager
def _whole_sequences(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, every context rank runs the whole text: a new token has no rows to share."""
    stages = [getattr(module, "stage", None) for module in modules]
    contexts = [stage for stage in stages if isinstance(stage, StageContext)]
    for context in contexts:
        context.whole_sequences = True
    try:
        yield
    finally:
        for context in contexts:
            context.whole_sequences = False


class _Text:
    """One prompt and what was added to it."""

    def __init__(
        self,
        model: GPTModel,
        prompt: Sequence[int],
        new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop: Any,
    ) -> None:
        # sequence parallelism splits the positions over the tensor ranks: their number must divide
        self.multiple = model.place.tp if model.place.splits_sequence else 1
        longest = model.max_sequence_length // self.multiple * self.multiple
        if not 0 < len(prompt) <= longest:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, the model takes 1 to {longest}; shorten it"
            )
        self.tokens = list(prompt)
        self.length = min(len(prompt) + new_tokens, longest)
        self._sampling = sampling
        self._stop = frozenset(stop)
        self._stopped = False
        # of each text its own: what it draws does not depend on the others in the batch
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def is_complete(self) -> bool:
        return self._stopped or len(self.tokens) >= self.length

    def choose(self, logits: Tensor) -> int:
        """The next token by its logits [v]; nothing is added yet."""
        return self._sampling.choose(logits, self._generator)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        # the token that ends a text belongs to it
        self._stopped = token in self._stop


class _Batch:
    """Texts that run together: with `cached_modules` each token once, else one text with its full prefix."""

    def __init__(
        self,
        model: GPTModel,
        executor: ForwardExecutor | None,
        texts: list[_Text],
        cached_modules: list[nn.Module],
    ) -> None:
        self._model = model
        self._executor = executor
        self._texts = texts
        self._cached_modules = cached_modules
        self._device = model.parallel.device
        self._width = max(len(text.tokens) for text in texts)
        # shorter prompts are filled up on the left, so that the next token of all is at the same place
        self._fill = torch.tensor(
            [self._width - len(text.tokens) for text in texts], device=self._device
        )
        # a text is preceded by its padding and ends at its own length
        positions = max(text.length + self._width - len(text.tokens) for text in texts)
        columns = torch.arange(positions, device=self._device)
        padding = None
        if len(texts) > 1 and bool(self._fill.any()):
            padding = columns < self._fill[:, None]
        self._cache = KVCache(len(columns), padding)
        # the same on all ranks: a stage without layers keeps no keys
        self._cached_tokens = 0

    def advance(self) -> dict[int, int]:
        """One more token for each text that is not complete: row -> token."""
        if all(text.is_complete for text in self._texts):
            return {}
        logits = self._forward()
        model = self._model
        chosen = torch.zeros(len(self._texts), dtype=torch.int64, device=self._device)
        if logits is not None:
            if model.parallel_output:
                full_logits = model.gather_logits(logits)
            else:
                full_logits = logits
            if self._cached_modules:
                last = -1
            else:
                last = len(self._texts[0].tokens) - 1
            for row, text in enumerate(self._texts):
                if not text.is_complete:
                    chosen[row] = text.choose(full_logits[row, last])
        # drawn where the logits are, then told to all stages, which embed it next
        if self._executor is not None:
            chosen = self._executor.from_last_stage(chosen)
        new: dict[int, int] = {}
        for row, (text, token) in enumerate(zip(self._texts, chosen.tolist(), strict=True)):
            if not text.is_complete:
                text.add(token)
                new[row] = token
        return new

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all calls of `advance`: the model in eval mode, its attentions with the cache."""
        # the model warns of logits that are split over tensor ranks; here they are gathered
        warns_of_columns = self._model.tells_of_columns
        self._model.tells_of_columns = False
        modules = [self._model] if self._executor is None else [*self._executor.modules.values()]
        try:
            with ExitStack() as stack:
                stack.enter_context(_whole_sequences(modules))
                for module in self._cached_modules:
                    stack.enter_context(self._cache.used_by(module))
                if self._executor is None:
                    stack.enter_context(evaluating(self._model))
                yield
        finally:
            self._model.tells_of_columns = warns_of_columns

    def _forward(self) -> Tensor | None:
        """Logits [b, s or 1, v_padded/tp], None on ranks without the last stage."""
        if self._cached_modules:
            batch = self._new_tokens()
        else:
            batch = self._full_prefix()
        if self._executor is None:
            logits: Tensor | None = self._model(**batch)
        else:  # one microbatch: several would share one cache
            logits = self._executor.forward(batch, microbatches=1)
        return logits

    def _full_prefix(self) -> dict[str, Tensor]:
        (text,) = self._texts
        # on the right: causal attention does not see it
        padding = [0] * (-len(text.tokens) % text.multiple)
        return {"tokens": torch.tensor([text.tokens + padding], device=self._device)}

    def _new_tokens(self) -> dict[str, Tensor]:
        """The prompts at first, then the last token of each text; with their positions."""
        start = self._cached_tokens
        if start == 0:
            rows = [[0] * (self._width - len(text.tokens)) + text.tokens for text in self._texts]
        else:
            rows = [text.tokens[-1:] for text in self._texts]
        tokens = torch.tensor(rows, device=self._device)
        self._cached_tokens += tokens.shape[1]
        columns = torch.arange(start, start + tokens.shape[1], device=self._device)
        positions = columns - self._fill[:, None]
        # padding has no position, and a text that is complete runs on beside the others: neither is looked at
        positions = positions.clamp(0, self._model.max_sequence_length - 1)
        return {"tokens": tokens, "position_ids": positions}
