"""Recognises the experts that a model has as modules in an nn.ModuleList, which a forward calls one by one.

This is the form of Hugging Face's Transformers before version 5, and of many hand-written layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.strategy._plan import shard_range
from weft.strategy.recognition.assignments import parent_name
from weft.strategy.sharding.state import original_class

STACKED = "stacked"  # the child of a sharded list that has the parameters of its experts


class ExpertList(nn.ModuleList):
    """Marks lists whose experts are sharded; see `list_modules`."""


def find_expert_lists(model: nn.Module) -> list[str]:
    """Return the names of the lists whose modules are experts.

    Such a list is an nn.ModuleList with parameters, the word expert is in its own name, as in `experts`, and its name
    does not begin with `shared`: shared experts get all tokens.
    """
    return [name for name, module in model.named_modules() if is_expert_list(name, module)]


def is_expert_list(name: str, module: nn.Module) -> bool:
    """Return whether a module with this name in the model is a list of experts, sharded or not."""
    own_name = name.rpartition(".")[2].lower()
    if not isinstance(module, nn.ModuleList) or "expert" not in own_name or own_name.startswith("shared"):
        return False
    return any(True for _ in module.parameters())


def caller_name(name: str, module: nn.Module) -> str:
    """Return the name of the module whose forward calls the experts of a list: the list itself, or its parent."""
    return name if original_class(module).forward is not nn.Module.forward else parent_name(name)


def parameters_of(expert: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an expert by name, tied ones under each of their names."""
    return dict(expert.named_parameters(remove_duplicate=False))


def slots_of(expert: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the own name of each parameter of an expert, in the order of `parameters_of`."""
    for module in expert.modules():
        yield from ((module, name) for name, parameter in module._parameters.items() if parameter is not None)


def why_list_not_sharded(model: nn.Module, name: str, num_ranks: int) -> str | None:
    """Return the reason why the experts of a list cannot be sharded over so many ranks; None: they can."""
    module = model.get_submodule(name)
    assert isinstance(module, nn.ModuleList)
    caller = model.get_submodule(caller_name(name, module))
    if original_class(caller).forward is nn.Module.forward or "forward" in caller.__dict__:
        return f"a {type(caller).__name__} has no forward of its own class that calls them; shard it by other rules"
    experts = list(module)
    if shard_range(len(experts), num_ranks, num_ranks - 1)[1] == 0:
        return (
            f"of its {len(experts)} experts, the last of {num_ranks} ranks would hold none; use a number of ranks that "
            "divides the number of experts"
        )
    return (
        _why_not_alike(experts)
        or next((reason for reason in map(_why_not_one_token, experts) if reason), None)
        or _why_tied(model, name, module)
    )


def _why_not_alike(experts: list[nn.Module]) -> str | None:
    """Return why the parameters of experts cannot be stacked; None: they can."""
    described = [
        {name: (tuple(p.shape), p.dtype, p.device, p.requires_grad) for name, p in parameters_of(expert).items()}
        for expert in experts
    ]
    other = next((idx for idx, each in enumerate(described) if each != described[0]), None)
    if other is not None:
        return (
            f"expert {other} has parameters of other names, shapes, dtypes or requires_grad than expert 0; give all "
            "experts the same ones"
        )
    if any(isinstance(parameter, DTensor) for expert in experts for parameter in expert.parameters()):
        return "parameters of its experts are DTensors already; call parallelize_experts before other sharding"
    return None


def _why_not_one_token(expert: nn.Module) -> str | None:
    """Return why an expert does not compute each row of one tensor by itself, as far as this is known."""
    buffer = next((name for name, _ in expert.named_buffers()), None)
    if buffer is not None:
        return f"its experts have the buffer '{buffer}', and buffers of experts are not sharded; make it an attribute"
    try:
        arguments = list(inspect.signature(inspect.unwrap(original_class(expert).forward)).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    required = [each for each in arguments if each.default is each.empty and each.kind not in (2, 4)]
    if len(required) > 1 or not arguments:
        return (
            f"the forward of a {type(expert).__name__} takes {len(required)} arguments, and experts that take one "
            "tensor [..., h] are sharded; multiply by weights outside of the experts"
        )
    return None


def _why_tied(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Return why parameters of the experts belong to another module, too; None: they do not."""
    holders: dict[int, list[str]] = {}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(other)
    own: list[Tensor] = list(module.parameters())
    tied = next((holders[id(p)] for p in own if len(holders[id(p)]) > 1), None)
    return None if tied is None else f"'{tied[0]}' and '{tied[1]}' are one tied parameter; untie them"
