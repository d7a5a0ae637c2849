"""What torch.optim.Optimizer promises and schedulers, scalers and loops rely on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from core.optimizer.groups import Groups


class _Shown(dict):
    """A look at states that lie in buckets: their tensors may be written to, the mapping may not."""

    def _refused(self, *given: Any, **more: Any) -> NoReturn:
        raise ValueError(
            f"optimizer.state shows {len(self)} entries that lie in buckets: none can be put in or taken out; zero "
            "their tensors, load a state_dict() of before the first step, or make the optimizer anew"
        )

    clear = pop = popitem = setdefault = update = __setitem__ = __delitem__ = __ior__ = _refused


class _States(_Shown):
    """Of all parameters that this rank has a part of."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise KeyError(
            f"a parameter of shape {tuple(parameter.shape)} has no state here: under ZeRO each rank holds the states "
            f"of its own part, this one those of {len(self)} parameters (optimizer.state lists them)"
        )


class TorchFace(torch.optim.Optimizer):
    """isinstance(..., torch.optim.Optimizer), with param_groups of the parameters that a `DataParallel` holds.

    Hooks around steps and states are torch's own. What a state holds is this rank's part.
    """

    _groups: "Groups"
    step_count: int

    def _face(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        # not Optimizer.__init__: it imports torch._dynamo, for seconds
        self.__setstate__(
            {"defaults": defaults, "param_groups": groups, "_warned_capturable_if_run_uncaptured": True}
        )

    def states(self, *, own_mains: bool = True) -> dict[str, dict[str, Any]]:
        raise NotImplementedError

    def load_states(self, states: Any, step_count: int, skipped_steps: int = 0, *, weights: bool = True) -> None:
        raise NotImplementedError

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """parameter -> kind -> this rank's part of it, live where no offload cuts it."""
        named = self.shard.named_parameters()  # type: ignore[attr-defined]
        return _States(
            {
                named[name]: _Shown({kind: part.tensor for kind, part in kinds.items() if kind != "main"})
                for name, kinds in self.states().items()
            }
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError always: states lie in buckets that were laid out when this was made."""
        raise ValueError(
            f"add_param_group: {len(list(param_group.get('params', ())))} parameters after the states of "
            f"{len(self.param_groups)} groups were laid out; give groups=[{{'params': ..., 'lr': ...}}] when the "
            "optimizer is made; for parameters that came later remove() the DataParallel and make both anew"
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything a step depends on but the weights, for torch.save; every rank saves and
        loads its own. Loading it leaves weights as they are, as torch's; float32 copies count where they still round
        to the weights.

        At stage 0, or over one rank, parts are whole, and one rank's file is everybody's. `sharded_state_dict` and
        `dist_checkpointing` write one checkpoint that opens under any layout.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        made: dict[str, Any] = {
            "local": self._counts(),  # type: ignore[attr-defined]
            "states": {
                name: {kind: (part.tensor.detach(), part.interval) for kind, part in kinds.items()}
                for name, kinds in self.states(own_mains=False).items()
            },
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            made = after(self, made) or made
        return made

    def load_local(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave. Raises ValueError, before anything is written: another rank's part."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, dict(state)) or state
        if "local" not in state:
            raise ValueError(
                f"a state with {', '.join(map(repr, list(state)[:3]))} is not one of this optimizer's (torch.optim's "
                "states are whole tensors by number); give what its state_dict() gave, or start its states anew"
            )
        parts, counts = self.states(own_mains=False), state["local"]
        for name, kinds in state["states"].items():
            for kind, (_, interval) in kinds.items():
                mine = parts[name][kind].interval if name in parts and kind in parts[name] else None
                if mine != interval:
                    raise ValueError(
                        f"load_state_dict: {kind} of {name} holds elements {interval}, this rank holds {mine}: that "
                        "is another rank's or another layout's part; save and load state_dict() on every rank, or "
                        "use sharded_state_dict() with core.dist_checkpointing, which opens under any layout"
                    )
        self.shard.take_weights()  # type: ignore[attr-defined]  # a model that was loaded just before
        values = {n: {kind: tensor for kind, (tensor, _) in kinds.items()} for n, kinds in state["states"].items()}
        self.load_states(values, counts["step_count"], counts["skipped_steps"], weights=False)
        if "loss_scale" in counts and self._scaler is not None:  # type: ignore[attr-defined]
            self._scaler.load(counts["loss_scale"])  # type: ignore[attr-defined]
        self._groups.load(state["param_groups"], step=self.step_count)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds buffers and groups of this process, of which 0 can be copied or pickled; "
            "use state_dict()"
        )
