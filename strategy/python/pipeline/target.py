"""Finds which module of a LightningModule is to be divided into stages, and the names of the cuts inside that module.

A cut is the name of the first module of a stage; the first stage needs none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from weft.strategy.pipeline.choose import candidates
from weft.strategy.pipeline.staged_model import find_staged
from weft.strategy.pipeline.stages import check_names, check_not_compiled, nearest_text
from weft.strategy.recognition.shell import is_compile_wrapper


@dataclasses.dataclass(frozen=True)
class PipelineTarget:
    """The name of the divided module, "" for the LightningModule itself, and its cuts; None: weft chooses them."""

    name: str
    cuts: tuple[str, ...] | None


def find_target(
    owner: str, module: Any, given: str | None, cuts: Sequence[str] | None, num_stages: int
) -> PipelineTarget:
    """Return the name of the module to divide and its cuts, the same on every rank; changes nothing.

    Cuts are names in the divided module, or in the LightningModule. Without `given`, the divided module is the child
    that has a forward of its own and contains all cuts. It is the LightningModule itself if no child contains all cuts,
    or if the LightningModule's forward can call layers that are registered before that child. If weft chooses the cuts,
    the divided module needs at least `num_stages` layers.

    Args:
        owner: the name of the strategy, for errors.
        module: the LightningModule, built.
        given: `pipeline_module`; "": the LightningModule itself.
        cuts: names; None: weft chooses them.
        num_stages: the number of stages, if weft chooses the cuts.

    Raises:
        ValueError: a module or cut is unknown, or no module contains all cuts, or several do.
    """
    if given is None and (found := find_staged(module)) is not None:  # an earlier run has divided the module
        given = found[0]
    _check_compiled_children(owner, module, given, cuts)
    if given is None:
        given = _infer_name(owner, module, cuts, num_stages)
    try:
        inner = module.get_submodule(given)
    except AttributeError:
        children = ", ".join(repr(child) for child, _ in module.named_children())
        raise ValueError(
            f"{owner} got pipeline_module={given!r}, which {type(module).__name__} does not have; name one of its "
            f"modules: {children}."
        ) from None
    for name in _with_ancestors(given):
        check_not_compiled(owner, name, module.get_submodule(name))
    if given == "" and not has_own_forward(module):
        raise ValueError(
            f"{owner} is to divide {type(module).__name__} itself, which has no forward of its own; write a forward "
            "that calls its layers, and call self(...) in its steps."
        )
    if cuts is None:
        return PipelineTarget(given, None)
    names = _names(inner)
    relative = tuple(_name_inside(given, cut, names) for cut in cuts)
    check_names(names, relative)
    return PipelineTarget(given, relative)


def _check_compiled_children(owner: str, module: nn.Module, given: str | None, cuts: Sequence[str] | None) -> None:
    """Raise ValueError if the cuts are in a child that `torch.compile` wraps, and whose names therefore differ."""
    for name, child in module.named_children():
        names = [inner.replace("_orig_mod.", "") for inner in _names(child)]
        if given in (None, name) and cuts and is_compile_wrapper(child) and _contains_all(name, cuts, names):
            check_not_compiled(owner, name, child)


def _with_ancestors(name: str) -> list[str]:
    """Return the names of a module and of the modules around it, "" first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _infer_name(owner: str, module: Any, cuts: Sequence[str] | None, num_stages: int) -> str:
    """Return the name of the module to divide; raises ValueError if no module, or several, are possible."""
    children = dict(_callable_children(module))
    if cuts:
        holders = [name for name, child in children.items() if _contains_all(name, cuts, _names(child))]
        module_contains_all = has_own_forward(module) and set(cuts) <= set(_names(module))
        cuts_have_prefix = len(holders) == 1 and all(cut.startswith(f"{holders[0]}.") for cut in cuts)
    else:
        holders = [name for name, child in children.items() if len(candidates(child)) >= max(num_stages, 1)]
        if not holders and len(children) == 1:  # with too few layers: `choose_cuts` raises the error
            holders = list(children)
        module_contains_all, cuts_have_prefix = has_own_forward(module), True
    if len(holders) == 1 and not module_contains_all:
        return holders[0]
    if len(holders) == 1 and cuts_have_prefix:
        return "" if _has_layers_before(module, holders[0]) else holders[0]
    if module_contains_all and (not holders or not cuts):
        return ""
    raise ValueError(_why_not_inferred(owner, module, cuts, [""] * module_contains_all + holders))


def _why_not_inferred(owner: str, module: Any, cuts: Sequence[str] | None, holders: list[str]) -> str:
    name = type(module).__name__
    shown = "pipeline_cuts='auto'" if cuts is None else f"pipeline_cuts={list(cuts)}"
    if holders:
        places = " and in ".join(
            f"{name} itself (pipeline_module='')" if each == "" else repr(each) for each in holders
        )
        return f"{owner} got {shown}, which may be in {places}; pass one of these as pipeline_module."
    if not cuts:
        return (
            f"{owner} got {shown}, and no module of {name} has a forward of its own and as many layers with parameters "
            "as stages; pass the name of the module to divide as pipeline_module, or use fewer stages."
        )
    in_children = {cut for _, child in module.named_children() for cut in cuts if cut in _names(child)}
    unknown = next((cut for cut in cuts if cut not in _names(module) and cut not in in_children), None)
    if unknown is not None:
        return f"{owner} got {shown}, and {name} has no module {unknown!r}; {nearest_text(unknown, _names(module))}."
    return (
        f"{owner} got {shown}, and neither a forward of {name} itself nor that of one of its modules calls all of "
        "these; pass the name of the module to divide as pipeline_module."
    )


def _name_inside(name: str, cut: str, names: Collection[str]) -> str:
    """Return `cut` as one of the `names` inside the module `name`: without the prefix `name.`, if `cut` has it."""
    return cut if cut in names or not name else cut.removeprefix(f"{name}.")


def _contains_all(name: str, cuts: Sequence[str], names: Collection[str]) -> bool:
    """Return whether the module `name` contains all cuts; `names`: of the modules inside it."""
    return all(cut and _name_inside(name, cut, names) in names for cut in cuts)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules(remove_duplicate=False)]


def has_own_forward(module: Any) -> bool:
    """Return whether a LightningModule has a forward of its own, not that of Lightning's class or of nn.Module."""
    own: Any = type(module)
    bases = [cls for cls in own.__mro__ if cls is nn.Module or cls.__name__ == "LightningModule"]
    return "forward" in vars(module) or all(own.forward is not base.forward for base in bases)


def _callable_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children with parameters and a forward of their own, which lists and dicts of modules do not have."""
    for name, child in module.named_children():
        if type(child).forward is not nn.Module.forward and any(True for _ in child.parameters()):
            yield name, child


def _has_layers_before(module: nn.Module, name: str) -> bool:
    """Return whether modules with parameters were registered before the child `name`; a forward may call them first."""
    for other, child in module.named_children():
        if other == name:
            return False
        if any(True for _ in child.parameters()):
            return True
    return False
