"""One module, or the several stages of a pipeline that live on this rank, taken alike."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.nn import Parameter

Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]  # a mapping names the stages


def modules_of(modules: Modules) -> dict[int, nn.Module]:
    """stage (or position) -> module, ascending."""
    if isinstance(modules, nn.Module):
        return {0: modules}
    return dict(sorted(modules.items())) if isinstance(modules, Mapping) else dict(enumerate(modules))


def named_parameters(modules: Modules) -> Iterator[tuple[str, Parameter]]:
    """Every parameter once, by its global name.

    Stages of our models have global names (layer 7 is `layers.7` on every stage). Where two different
    parameters of foreign stages have the same name, all names start with `stages.N.`.
    """
    stages = modules_of(modules)
    found: dict[str, Parameter] = {}
    seen: set[Parameter] = set()
    unique = True
    for module in stages.values():
        for name, parameter in module.named_parameters():
            if parameter not in seen:
                unique = unique and name not in found
                found[name] = parameter
                seen.add(parameter)
    if unique:
        yield from found.items()
        return
    seen.clear()
    for number, module in stages.items():
        for name, parameter in module.named_parameters(prefix=f"stages.{number}"):
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter
