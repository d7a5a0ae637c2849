"""The blocks of a transformer, assembled from a spec of typed callables.

Names are loaded at first use: a configuration is read without the code that trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.transformer.spec import Build as Build
    from core.transformer.spec import TransformerLayerSpec as TransformerLayerSpec
    from core.transformer.transformer_config import TransformerConfig as TransformerConfig

_HOME = {
    "Build": "spec",
    "TransformerLayerSpec": "spec",
    "TransformerConfig": "transformer_config",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
