"""The methods of DeepSpeed's engine that training loops rely on."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from core.dist_checkpointing import load, save
from core.dist_checkpointing.planning.ranks import agree, from_first, problem_of
from core.dist_checkpointing.storage.address import below, parse_address
from core.dist_checkpointing.storage.checkpoint_dir import open_dir
from core.models.gpt import GPTModel
from core.optimizer import sharded_state_dict
from core.training.run.checkpoint import Checkpoints
from core.training.run.engine.deepspeed_facts import EngineFacts
from core.training.run.engine.their_methods import ELSEWHERE


class EngineFace(EngineFacts):
    """`loss = engine(x); engine.backward(loss); engine.step()`: an update after every
    `gradient_accumulation_steps()` of these (gradient accumulation), from the mean of their losses over all data
    ranks.

    micro_steps: calls of `step` so far. Other attributes are those of the wrapped module.
    """

    checkpoints: Checkpoints

    def __init__(self) -> None:
        super().__init__()
        self.micro_steps = 0
        # set by the user, instead of counting
        self._boundary: bool | None = None
        self._in_backward = self._in_no_sync = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if not hasattr(self.module, name):
                # a loop of DeepSpeed's that asks for these gets the name that they have here
                if name in ELSEWHERE:
                    raise AttributeError(
                        f"the engine has no {name} here; use {ELSEWHERE[name]}"
                    ) from None
                raise
        return getattr(self.module, name)

    # --- one update ---

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Backward of loss / `gradient_accumulation_steps()` (of loss, without `scale_wrt_gas`), which is returned.

        The loss scale of float16 weights is multiplied in, and taken out by `step`.
        Raises ValueError: no scalar tensor; a batch of the loader that holds several microbatches.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            if isinstance(loss, Tensor):
                kind = f"of shape {tuple(loss.shape)}"
            else:
                kind = f"a {type(loss).__name__}"
            raise ValueError(
                f"backward needs a loss of 1 number in a tensor, this is {kind}; take its mean"
            )
        accumulation = self.gradient_accumulation_steps()
        if accumulation > 1 and self.loader is not None and self.loader.gave_whole:
            raise ValueError(
                f"a batch of the loader holds the rows of all {accumulation} microbatches of an update; write `for "
                "batch in loader.microbatches():`, or train_step(batch)"
            )
        if scale_wrt_gas:
            loss = loss / accumulation
        scale = self.optimizer.loss_scale
        self._in_backward = True
        try:
            # mixed precision with float16: the loss scale keeps small gradients above zero
            if isinstance(scale, Tensor):
                scaled_loss = loss * scale.to(loss.dtype)
            else:
                scaled_loss = loss
            scaled_loss.backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the gradient accumulation boundary: update and zero gradients (collective); otherwise only count.

        Saves nothing by itself: `save_checkpoint` is the loop's. Raises ValueError: inside `no_sync`.
        """
        if self._in_no_sync:
            raise ValueError(
                f"step {self.micro_steps + 1} is inside no_sync; call it after the block"
            )
        if self.is_gradient_accumulation_boundary():
            self.checkpoints.before_update()
            self._last_stats = self.optimizer.step()
            self.optimizer.zero_grad()
            # executors do this themselves; here the loop is the program's
            if isinstance(self.module, GPTModel):
                self.module.end_step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the user says whether the next `step` updates, instead of the count."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `step` has done so after an update."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards inside add up, at every ZeRO stage; call `step` after the block."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    # --- checkpoints ---

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's own, whole at every ZeRO stage; at 3 collective."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> Any:
        """Weights by name, or {"module": these}, as DeepSpeed's checkpoints have them; on every rank."""
        weights = checkpoint.get("module", checkpoint)
        return self.module.load_state_dict(
            checkpoint if isinstance(weights, Tensor) else weights, strict
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write model, optimizer, step and `client_state` (rank 0's) to `save_dir`/`tag`, a directory or URL that
        opens under any layout. Collective.

        tag: the same on all ranks; default: global_step and their number. save_latest: write its name into the file
        `latest`. Raises ValueError, on all ranks: a client_state that JSON does not give back; frozen parameters
        left out.
        """
        if exclude_frozen_parameters:
            raise ValueError(
                "exclude_frozen_parameters=True leaves parameters out, 0 can be; give False"
            )
        ps = self.optimizer.ps
        # DeepSpeed's default tag
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        client_json = from_first(lambda: _client_json(client_state or {}), ps)
        state = self.checkpoints.state(self.global_steps) | {"client": {"state": client_json}}
        address = parse_address(save_dir)
        save(state, below(address, name), ps=ps)
        if save_latest:
            # after the commit: `latest` never names a checkpoint that does not exist
            problem = None
            if ps.rank == 0:
                problem = problem_of(lambda: open_dir(address).write("latest", name.encode()))
            agree(problem, ps)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from `load_dir`/`tag`, saved under any layout, with the loader's next batch: (path, client_state).

        tag: default: the one in the file `latest`; without one `load_dir` itself, if that is a checkpoint, else a
        warning and (None, None). load_module_only: weights alone, updates begin anew. Collective.
        Raises ValueError: another model, another order of the data, states that can only be loaded together.
        """
        all_states = load_optimizer_states and load_lr_scheduler_states
        if custom_load_fn is not None or not (load_module_only or all_states):
            raise ValueError(
                "load_checkpoint loads 2 things: all, or weights alone with load_module_only=True; the rate follows "
                "the optimizer's count, and custom_load_fn has no place here"
            )
        ps = self.optimizer.ps
        # rank 0 looks: storage may show other ranks another state
        path = from_first(lambda: _find_checkpoint(parse_address(load_dir), tag), ps)
        if path is None:
            warnings.warn(
                f"load_checkpoint: {load_dir} has no file `latest` and is no checkpoint; nothing is loaded: give a "
                "tag, or look at the path",
                stacklevel=2,
            )
            return None, None
        if load_module_only:
            # weights alone: the optimizer's main weights are copied from them, and replicas get them
            load(
                {"model": sharded_state_dict(self.optimizer.shard)},
                path,
                ps=ps,
                strict=load_module_strict,
            )
            self.optimizer.reload_parameters()
            self.optimizer.shard.publish()
        else:
            # the step says where the data goes on: the order of samples is a function of it
            step = self.checkpoints.restore(path)
            self.micro_steps = step * self.gradient_accumulation_steps()
            if self.loader is not None:
                self.loader.step = step
        client = load({"client": {"state": "{}"}}, path, ps=ps, strict=False, verify=False)
        return path, json.loads(client["client"]["state"])


def _client_json(client_state: Mapping[str, Any]) -> str:
    """The client state as JSON. Raises ValueError: a value that JSON would not give back."""
    for key, value in client_state.items():
        try:
            # tuples come back as lists, keys as texts: better refused now than found at a resume
            survives = json.loads(json.dumps({key: value})) == {key: value}
        except (TypeError, ValueError):
            survives = False
        if not survives:
            raise ValueError(
                f"client_state[{key!r}] is a {type(value).__name__} that JSON does not give back; save numbers, "
                "texts, lists and dicts with text keys, tensors as .tolist()"
            )
    return json.dumps(client_state)


def _find_checkpoint(address: str, tag: str | int | None) -> str | None:
    """The address of the checkpoint that a tag, or else the file `latest`, names; None where there is none."""
    directory = open_dir(address)
    # DeepSpeed's file, one line with the name of the newest tag
    if tag is None and directory.size("latest") is not None:
        tag = directory.read("latest").decode().strip()
    if tag is not None:
        return below(address, str(tag))
    is_checkpoint = directory.size("manifest.json") is not None
    if is_checkpoint:
        return address
    return None
