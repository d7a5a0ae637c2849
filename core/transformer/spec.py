"""What a layer is made of: a spec names a callable for each part, the config gives the sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, Protocol

from torch import nn

from core.autograd import StageContext
from core.autograd.fp8 import E4M3, E5M2, Fp8
from core.parallel_state import ParallelState
from core.parallel_state.spread import building_device
from core.tensor_parallel import Placement
from core.transformer.precision import in_8_bits
from core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, eq=False)
class Build:
    """Everything a part may need to build itself.

    config: the model's facts. parallel: the ranks. stage: the context of this model's deferred operations.
    seed: of the initial weights. layer: the global number of the layer that the part belongs to (-1 outside
    of layers).
    """

    config: TransformerConfig
    parallel: ParallelState
    stage: StageContext
    seed: int = 0
    layer: int = -1

    @cached_property
    def place(self) -> Placement:
        """Group, dtype and device of the tensor-parallel layers."""
        return Placement(
            group=self.parallel.group("tp"),
            sequence_parallel=self.parallel.config.sequence_parallel,
            dtype=self.config.params_dtype,
            device=building_device(self.parallel.device),
            stage=self.stage,
            filled_by_model=True,
            fp8=self._fp8,
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Only of what is not here: a part in another library's form is built of the configuration itself."""
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in TransformerConfig.__dataclass_fields__:
            text += f": a part is built of a Build, whose config has it: build.config.{name}"
        raise AttributeError(text)

    @property
    def _fp8(self) -> Fp8 | None:
        config = self.config
        if not in_8_bits(config, self.layer):
            return None
        return Fp8(
            gradient_dtype=E5M2 if config.fp8 == "hybrid" else E4M3,
            rowwise=config.fp8_recipe == "rowwise",
            wgrad=config.fp8_wgrad,
        )


class NormPart(Protocol):
    """Builds a normalisation over the last dim."""

    def __call__(self, build: Build, size: int, *, over_heads: bool = False) -> nn.Module:
        """`size`: the last dim. `over_heads`: applied to this rank's heads, not to the residual stream."""
        ...


Part = Callable[[Build], nn.Module]
# (build, max_sequence_length)
PositionPart = Callable[[Build, int], nn.Module]


@dataclass(frozen=True, kw_only=True)
class TransformerLayerSpec:
    """The parts of a layer. Swap one with `dataclasses.replace(spec, mlp=MyMLP)`; no registry, no strings.

    layer(build, spec) -> the layer. Its parts are built by norm(build, size, over_heads=False), size of the last dim,
    attention(build, spec), core_attention(build) and mlp(build); `build` has the config, `place` for linears, the
    layer's number. Given: hidden states [s/tp or s, b, h].
    qk_norm(build, heads) builds the norm of query or key heads [b, a/tp, s, d] where the configuration asks for one;
    default: `norm` of each head by itself.
    positions builds a module that gives position embeddings to add ([s/tp or s, b, h]), rotary one that gives
    tables for the attention; either may be None.
    """

    layer: Callable[[Build, "TransformerLayerSpec"], nn.Module]
    norm: NormPart
    attention: Callable[[Build, "TransformerLayerSpec"], nn.Module]
    core_attention: Part
    mlp: Part
    qk_norm: Callable[[Build, int], nn.Module] | None = None
    positions: PositionPart | None = None
    rotary: PositionPart | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Only of what is not here, Megatron's `submodules` for one."""
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name == "submodules":
            parts = ", ".join(type(self).__dataclass_fields__)
            text += f": its parts are its own fields ({parts}); dataclasses.replace(spec, mlp=...) swaps one"
        raise AttributeError(text)
