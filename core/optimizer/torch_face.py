"""What torch.optim.Optimizer promises, and schedulers, scalers and loops rely on."""

import sys
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from core.optimizer.groups import Groups, saved_order
from core.optimizer.state.shown import (
    ReadOnlyStates,
    ShardSums,
    ShownCount,
    StateByParameter,
    shown,
)

if TYPE_CHECKING:
    from core.optimizer.state.sharded_states import OptimizerShard


class TorchFace(torch.optim.Optimizer):
    """isinstance(..., torch.optim.Optimizer), with param_groups of the parameters that a `DataParallel` holds.

    Hooks around steps and states are torch's own. A state holds this rank's shard.
    """

    _groups: Groups
    step_count: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: arguments of torch's optimizers."""
        shard = args[0] if args else kwargs.get("shard")
        is_sharded = hasattr(shard, "ps") and hasattr(shard, "buffers")
        has_config = len(args) > 1 or "config" in kwargs
        # nothing at all: a copy
        if (args or kwargs) and not (is_sharded and has_config):
            name = cls.__name__
            given = "" if is_sharded else f", not {type(shard).__name__}"
            raise TypeError(
                f"{name} takes a DataParallel and a configuration{given}: {name}(DataParallel(model, ps, "
                "zero_stage=1), OptimizerConfig(lr=...)); torch.optim's own, over model.parameters(), work beside a "
                "DataParallel too"
            )
        return super().__new__(cls)

    def _face(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        # not Optimizer.__init__: it imports torch._dynamo, for seconds
        self._sums_of_state = ShardSums()
        self.__setstate__(
            {
                "defaults": defaults,
                "param_groups": groups,
                "_warned_capturable_if_run_uncaptured": True,
            }
        )

    def states(self, *, own_mains: bool = True) -> dict[str, dict[str, Any]]:
        raise NotImplementedError

    def load_states(
        self, states: Any, step_count: int, skipped_steps: int = 0, *, weights: bool = True
    ) -> None:
        raise NotImplementedError

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """parameter -> kind -> this rank's shard of it, live where no offload cuts it and nothing is quantized.

        Adam's "step" is a copy.
        """
        named = self.shard.named_parameters()  # type: ignore[attr-defined]
        state: dict[Tensor, dict[str, Tensor]] = {}
        # copies of what is quantized are inference tensors: a write raises an error, and is not lost
        with torch.inference_mode():
            states = self.states()
        for name, kinds in states.items():
            tensors = {
                kind: self._shown(name, kind, shard)
                for kind, shard in kinds.items()
                if kind != "main"
            }
            # torch's Adam and Adafactor have a "step" in each state, and programs read it
            if tensors.keys() & {"exp_avg", "row_var", "variance"}:
                tensors["step"] = self._updates_of(name)
            state[named[name]] = ReadOnlyStates(tensors)
        return StateByParameter(state)

    @state.setter
    def state(self, value: Any) -> None:
        """Raises ValueError always: states lie in buckets."""
        raise ValueError(
            f"optimizer.state = ...: the states of {len(self.state)} parameters lie in buckets, and no other mapping "
            "can stand for them; load_state_dict() what state_dict() gave, write into their tensors, or begin anew "
            "with a new optimizer"
        )

    def _shown(self, name: str, kind: str, shard: "OptimizerShard") -> Tensor:
        """The state itself where this rank holds all of it, else an alias that tells where it is summed."""
        held = shard.tensor.numel()
        full = prod(shard.layout.shape)
        if held >= full:
            return shard.tensor
        return shown(shard.tensor, self._sums_of_state.telling(kind, name, held, full))

    def _filed(self, shard: "OptimizerShard") -> Tensor:
        """What `state_dict` gives of it: a file of one rank has this rank's part alone."""
        state = shard.tensor.detach()
        is_part = state.numel() < prod(shard.layout.shape)
        return self._sums_of_state.filed(state) if is_part else state

    def _updates_of(self, name: str) -> Tensor:
        """A copy of one parameter's "step", as in torch; a write raises an error: all parameters share a count."""
        updates = self._step.cpu() - self._reached.behind.get(name, 0)  # type: ignore[attr-defined]
        return updates.detach().as_subclass(ShownCount)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError always: states lie in buckets that were laid out when this was made."""
        raise ValueError(
            f"add_param_group: {len(list(param_group.get('params', ())))} parameters after the states of "
            f"{len(self.param_groups)} groups were laid out; give groups=[{{'params': ..., 'lr': ...}}] when the "
            "optimizer is made; for parameters that came later remove() the DataParallel and make both anew"
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of everything a step depends on but the weights, for torch.save; every rank saves and
        loads its own. Loading it leaves weights as they are, as torch's; main weights count where they still round
        to the weights.

        At stage 0, or over one rank, shards are complete, and one rank's file is everybody's.
        `sharded_state_dict` and `dist_checkpointing` write one checkpoint that opens under any layout.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("torch.distributed.checkpoint"):
            raise ValueError(
                f"get_state_dict(model, {type(self).__name__}): states of {len(self.param_groups)} groups lie in "
                "buckets, not by parameter; use optimizer.sharded_state_dict() with core.dist_checkpointing.save, "
                "or get_model_state_dict(model) for the weights alone"
            )
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        states: dict[str, dict[str, Any]] = {}
        for name, kinds in self.states(own_mains=False).items():
            states[name] = {
                kind: (self._filed(shard), shard.interval) for kind, shard in kinds.items()
            }
        param_groups = [dict(group) for group in self.param_groups]
        for group in param_groups:
            # parameters are told by name, not by object
            del group["params"]
        counts = self._counts()  # type: ignore[attr-defined]
        state: dict[str, Any] = {"local": counts, "states": states, "param_groups": param_groups}
        # of earlier versions, which do not say it, it was number 0
        state["rest"] = self._groups.rest
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_local(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave. Raises ValueError, before anything is written: another rank's shard."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = pre_hook(self, dict(state)) or state
        if "local" not in state:
            raise ValueError(
                f"a state with {', '.join(map(repr, list(state)[:3]))} is not one of this optimizer's (torch.optim's "
                "states are whole tensors by number); give what its state_dict() gave; what torch's "
                "optimizer has goes on by dist_checkpointing.save of it and load into this one (docs/from_pytorch.md)"
            )
        local_shards = self.states(own_mains=False)
        counts = state["local"]
        for name, kinds in state["states"].items():
            local_kinds = local_shards.get(name, {})
            for kind, (_, interval) in kinds.items():
                local_interval = None
                if kind in local_kinds:
                    local_interval = local_kinds[kind].interval
                # an interval tells layouts apart that give equal shapes
                if local_interval != interval:
                    raise ValueError(
                        f"load_state_dict: {kind} of {name} holds elements {interval}, this rank holds "
                        f"{local_interval}: that "
                        "is another rank's or another layout's part; save and load state_dict() on every rank, or "
                        "use sharded_state_dict() with core.dist_checkpointing, which opens under any layout"
                    )
        self.shard.take_weights()  # type: ignore[attr-defined]  # a model that was loaded just before
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, kinds in state["states"].items():
            tensors[name] = {kind: tensor for kind, (tensor, _) in kinds.items()}
        self.load_states(tensors, counts["step_count"], counts["skipped_steps"], weights=False)
        if "loss_scale" in counts and self._scaler is not None:  # type: ignore[attr-defined]
            self._scaler.load(counts["loss_scale"])  # type: ignore[attr-defined]
        param_groups = state["param_groups"]
        if "rest" in state:
            param_groups = saved_order(param_groups, state["rest"])
        self._groups.load(param_groups, step=self.step_count)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds buffers and groups of this process, which cannot be copied or pickled; use "
            "state_dict()"
        )
