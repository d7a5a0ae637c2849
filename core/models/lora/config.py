"""What of a model is adapted, and how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

from core.field_names import tells_names
from core.parallel_state.config import raise_all

# all matrices of a dense layer, for messages
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# what changes the function that a model computes
_OF_THE_MODEL = ("rank", "alpha", "modules", "rslora")


@tells_names("lora", {"target_modules": "give modules, as linear_qkv, linear_fc1"})
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA) beside frozen matrices; names in brackets are peft's.

    Raises ValueError with every rule that is broken.
    """

    rank: int | None = None
    """Rows of A and columns of B (r); default: no adapters, all of the model is trained."""

    alpha: float = 16.0
    """The product B A is multiplied by alpha / rank (lora_alpha)."""

    dropout: float = 0.0
    """Of what A multiplies, while training (lora_dropout)."""

    modules: tuple[str, ...] = ()
    """The linears of every layer that get one, by name or by the end of their path (target_modules); default: all of
    them, which leaves out embeddings, norms, routers and stacked experts."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (use_rslora)."""

    save_base: bool = False
    """Write the frozen weights into every checkpoint, too; else they are read again from where the run began."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(self.modules))
        raise_all("LoraConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        rank = self.rank
        modules = self.modules
        yield (
            rank is None or rank >= 1,
            f"rank={rank} must be at least 1; leave it out for no adapters",
        )
        yield self.alpha > 0, f"alpha={self.alpha} must be above 0"
        yield 0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1"
        yield (
            all(modules),
            f"modules={list(modules)} must be names of linears, such as {', '.join(LINEARS)}; leave it out for all",
        )
        yield (
            len(set(modules)) == len(modules),
            f"modules={list(modules)} names {len(modules) - len(set(modules))} of them twice",
        )

    @property
    def scale(self) -> float:
        """What B A is multiplied by. Raises ValueError: there is no rank."""
        if self.rank is None:
            raise ValueError("LoraConfig: rank=None is no adapter; give a rank, such as 16")
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of its adapters, as JSON values; `of_facts` is the inverse."""
        return {name: getattr(self, name) for name in _OF_THE_MODEL} | {
            "modules": sorted(self.modules),
            "save_base": self.save_base,
        }

    @classmethod
    def of_facts(cls, facts: "dict[str, Any]") -> "LoraConfig":
        """Raises ValueError: facts that this version does not know."""
        try:
            known = {name: facts[name] for name in (*_OF_THE_MODEL, "save_base")}
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"adapters are described in a way that this version does not know: {error!r}"
            ) from error

    def differences(self, facts: "dict[str, Any]") -> list[str]:
        """In what adapters of a checkpoint are others than these, each as "lora.rank=8 (here 16)".

        Modules that are left out are compared once `apply_lora` has found them in the model.
        """
        own_facts = self.facts()
        return [
            f"lora.{name}={facts.get(name)} (here {own_facts[name]})"
            for name in own_facts
            if facts.get(name) != own_facts[name] and (name != "modules" or self.modules)
        ]
