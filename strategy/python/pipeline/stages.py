"""Assigns each layer of a model to a stage."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from weft.strategy.recognition.assignments import join
from weft.strategy.recognition.shell import is_compile_wrapper

ANY_STAGE = -1  # for layers without parameters and persistent buffers, which run wherever they are called


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a model and their stages.

    trunk: the modules whose forwards call the layers, and the lists and dicts of modules that these hold; they exist on
        every stage, and each stage runs its part of them.
    stage_of: the stage of each layer, or ANY_STAGE, by its name.
    parameter_stages: the stage of each parameter that a module of the trunk holds directly, by its name.
    """

    num_stages: int
    trunk: tuple[str, ...]
    stage_of: dict[str, int]
    parameter_stages: dict[str, int]


def find_layers(
    model: nn.Module,
    cuts: Sequence[str],
    layer_stages: Mapping[str, int] | None = None,
    beside: Collection[str] = (),
) -> Layers:
    """Assign layers to stages that begin at the named modules, in the order in which the model registered its modules.

    Layers are the named modules and all other children of their ancestors; in place of a list or dict of modules, its
    items are layers. A layer is on one stage as a whole. If it has neither parameters nor persistent buffers, and no
    cut names it, it has no stage and runs wherever it is called.

    Args:
        cuts: the first module of each stage but the first, such as ["layer3"] or ["model.layers.4", "model.layers.8"].
        layer_stages: the stages of layers, and of parameters that modules of the trunk hold directly, that the model
            does not use in the order in which it registered them.
        beside: the names of modules inside the model that its forward does not call, such as metrics; they are not
            layers.

    Raises:
        ValueError: a name is unknown, out of order or given twice; a stage does not exist or is empty; one module is on
            two stages.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    check_names(modules, cuts)
    trunk = {""} | {name[: name.rfind(".")] for name in cuts if "." in name}
    trunk |= {".".join(name.split(".")[:i]) for name in trunk for i in range(name.count(".") + 1)}
    layers = [name for name in _layers(model, "", trunk) if name not in beside]
    trunk |= {".".join(name.split(".")[:i]) for name in layers for i in range(name.count(".") + 1)}
    order = {name: position for position, name in enumerate(modules)}
    begins = [order[name] for name in cuts]
    if begins != sorted(begins):
        raise ValueError(
            f"pipeline: the cuts {list(cuts)} are not in the order in which the model has these modules; name them "
            "in that order."
        )
    stage_of = {}
    for name in layers:
        has_state = name in cuts or any(True for _ in modules[name].parameters()) or bool(modules[name].state_dict())
        stage_of[name] = sum(begin <= order[name] for begin in begins) if has_state else ANY_STAGE
    parameter_stages = {
        join(name, parameter): sum(begin <= order[name] for begin in begins)
        for name in sorted(trunk, key=order.__getitem__)
        for parameter, value in modules[name]._parameters.items()
        if value is not None
    }
    for name, stage in (layer_stages or {}).items():
        table = stage_of if name in stage_of else parameter_stages
        if name not in table or stage not in range(len(cuts) + 1):
            raise ValueError(
                f"pipeline: layer_stages puts {name!r} on stage {stage!r}; name one of the layers, such as "
                f"{', '.join(map(repr, list(stage_of)[:3]))}, and a stage from 0 to {len(cuts)}."
            )
        table[name] = stage
    found = Layers(len(cuts) + 1, tuple(sorted(trunk)), stage_of, parameter_stages)
    _check_stages(model, found, cuts)
    first_name: dict[int, str] = {}
    for name, stage in stage_of.items():
        other = first_name.setdefault(id(modules[name]), name)
        if stage_of[other] != stage:
            raise ValueError(
                f"pipeline: '{other}' and '{name}' are one module, on the stages {stage_of[other]} and {stage}; give "
                "each a module of its own, with tied parameters if they are to be shared."
            )
    return found


def check_not_compiled(owner: str, name: str, module: nn.Module) -> None:
    """Raise ValueError for a module that is to be divided, or that contains it, and that the user has compiled."""
    if is_compile_wrapper(module) or module.__dict__.get("_compiled_call_impl") is not None:
        what = f"the compiled module {name!r}" if name else f"a compiled {type(module).__name__}"
        raise ValueError(
            f"{owner} got {what}, and torch.compile cannot trace a forward that is divided into stages; compile its "
            "blocks instead."
        )


def check_names(modules: Collection[str], cuts: Sequence[str]) -> None:
    """Raise ValueError for a cut that is not the name of a module, or that is given twice."""
    for i, name in enumerate(cuts):
        if name not in modules or name == "":
            raise ValueError(
                f"pipeline: stage {i + 1} is to begin at {name!r}, which is not a module of the model; "
                f"{nearest_text(name, modules)}."
            )
        if name in cuts[:i]:
            raise ValueError(f"pipeline: two stages are to begin at {name!r}; name each module once.")


def nearest_text(name: str, names: Iterable[str]) -> str:
    """Return the part of an error message that suggests names for an unknown one."""
    known = [each for each in names if each]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"the nearest name is {near[0]!r}"
    return f"use one of its names, such as {', '.join(map(repr, known[:3]))}"


def _layers(model: nn.Module, prefix: str, trunk: set[str]) -> Iterator[str]:
    for name, child in model._modules.items():
        if child is None:
            continue
        full_name = join(prefix, name)
        # Lists and dicts of modules have no forward: the modules that they hold are called one by one.
        if full_name in trunk or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _layers(child, full_name, trunk)
        else:
            yield full_name


def _check_stages(model: nn.Module, layers: Layers, cuts: Sequence[str]) -> None:
    used = {*layers.stage_of.values(), *layers.parameter_stages.values()}
    for stage in range(layers.num_stages):
        if stage not in used:
            begin = f"{cuts[stage - 1]!r}" if stage > 0 else "the model's beginning"
            raise ValueError(
                f"pipeline: stage {stage}, from {begin} on, would have no parameters; move its cut or use fewer stages."
            )
