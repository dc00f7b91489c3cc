"""load_pretrained: fills a model with weights from files; each rank reads only the bytes of its shards.

A parameter that is still deferred stays so: a copy from the file is recorded, and sharding the model reads the shard.
A parameter that is sharded already gets the region that this rank holds of the full tensor. In both cases the file is
mapped into memory and its dtype is converted during the copy, so that no rank has the full tensor in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.strategy.deferred import is_deferred
from weft.strategy.deferred.files import FileTensor, Region, deferred_of
from weft.strategy.experts.lists import ExpertList
from weft.strategy.pretrained.conversions import names_in_model
from weft.strategy.pretrained.files import open_tensors
from weft.strategy.pretrained.progress import expect_reads

Rename = Mapping[str, str | None] | Callable[[str], str | None]
_MAX_NAMES = 10  # in an error


@dataclass(frozen=True)
class PretrainedReport:
    """The tensors that `load_pretrained` did and did not load.

    Attributes:
        loaded: names in the model.
        missing: names in the model that the files lack; these keep the values that the model's code gave them.
        unexpected: names in the files that the model lacks, or that `rename` maps to None.
        mismatched: (name, shape in the files, shape in the model).
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, rename: Rename | None = None, strict: bool = True
) -> PretrainedReport:
    """Fill a model's parameters and persistent buffers with the weights of files; each rank reads only its shards.

    Call it on a model that is built inside `deferred_init`, before `parallelize`, which then reads the shards; or on
    a sharded model. It does not communicate: every rank calls it. A model that is divided into pipeline stages has not
    all layers on a rank, so call it before the division.

        with weft.strategy.deferred_init():
            model = Model()
        weft.load_pretrained(model, "weights.safetensors")
        weft.parallelize(model, mesh, plan)

    Args:
        model: its parameters keep their dtypes. If none of the names is in the model, but exactly one module inside has
            all of them, that module is filled.
        path: a file of safetensors or, read with `weights_only=True`, of torch.save; an index of several; or
            a directory with one of these, named as transformers names them.
        rename: the name in the model for each name in the files, as a mapping (a name that it lacks stays) or
            a function; None as a name: the tensor is not loaded. If `rename` is None, models of transformers get the
            renames that transformers applies, and a model whose tensors it would fuse or split raises ValueError.
        strict: raise an error if a tensor is missing, unexpected or of another shape. False: only report it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: tensors do not fit the model and `strict` is set, two tensors have the same name in the model, or
            a parameter is on the meta device. The model is unchanged.
    """
    try:
        found = open_tensors(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"load_pretrained: {error}") from None
    names, skipped = _renamed(model, found, rename)
    targets = _targets(model)
    if rename is None and not names.keys() & targets.keys():
        names, skipped, targets = _inside(model, found, names, skipped, targets)
    mismatched = {
        name: (found[name_in_file].shape, tuple(targets[name].shape))
        for name, name_in_file in names.items()
        if name in targets and found[name_in_file].shape != tuple(targets[name].shape)
    }
    loaded = [name for name in names if name in targets and name not in mismatched]
    filled = {id(targets[name]) for name in (*loaded, *mismatched)}  # a tied parameter is in the files once
    missing = [name for name, target in targets.items() if id(target) not in filled]
    unexpected = [name_in_file for name, name_in_file in names.items() if name not in targets]
    if strict and (missing or unexpected or mismatched):
        raise ValueError(_explain(path, missing, unexpected, mismatched))
    _check_not_meta(targets, loaded)
    # Each target once: a tied parameter has several names.
    sources: dict[int, tuple[Tensor, FileTensor]] = {}
    for name in loaded:
        sources.setdefault(id(targets[name]), (targets[name], found[names[name]]))
    expect_reads(source for target, source in sources.values() if _is_read_now(target))
    with torch.no_grad():
        for target, source in sources.values():
            _fill(target, source)
    return PretrainedReport(
        tuple(loaded),
        tuple(missing),
        (*unexpected, *skipped),
        tuple((name, *shapes) for name, shapes in mismatched.items()),
    )


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by name, each tied parameter under all of its names."""
    _check_no_sharded_lists(model)
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _check_no_sharded_lists(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ExpertList):
            raise ValueError(
                f"load_pretrained got a model whose list of experts '{name}' is sharded, and reads into tensors of "
                "single experts; call it before the model is set up, as in configure_model."
            )


def _renamed(model: nn.Module, found: Iterable[str], rename: Rename | None) -> tuple[dict[str, str], list[str]]:
    """Return (the name in the files by the name in the model, the names in the files that are not to be loaded)."""
    if rename is None:
        renamed: dict[str, str | None] = dict(names_in_model(model, found))
    elif isinstance(rename, Mapping):
        renamed = {name: rename.get(name, name) for name in found}
    else:
        renamed = {name: rename(name) for name in found}
    names: dict[str, str] = {}
    for name_in_file, name in renamed.items():
        if name is None:
            continue
        if name in names:
            raise ValueError(
                f"load_pretrained got two tensors for {name!r}: {names[name]!r} and {name_in_file!r}; give each "
                "another name in rename, or None to leave it out."
            )
        names[name] = name_in_file
    return names, [name_in_file for name_in_file, name in renamed.items() if name is None]


def _inside(
    model: nn.Module,
    found: Mapping[str, FileTensor],
    names: dict[str, str],
    skipped: list[str],
    targets: dict[str, Tensor],
) -> tuple[dict[str, str], list[str], dict[str, Tensor]]:
    """Return the names and targets of the only module inside that has all tensors of the files; else the given ones.

    A module inside another that has them does not count.
    """
    holders: list[tuple[dict[str, str], list[str], str]] = []
    for prefix, module in model.named_modules():
        if prefix and not any(prefix.startswith(f"{outer}.") for *_, outer in holders):
            inner_names, inner_skipped = _renamed(module, found, None)
            inner = _targets(module)
            if inner_names and inner_names.keys() <= inner.keys():
                holders.append((inner_names, inner_skipped, prefix))
    if len(holders) != 1:
        return names, skipped, targets
    [(inner_names, inner_skipped, prefix)] = holders
    # Parameters outside of this module are not expected in the files.
    chosen = {name: target for name, target in targets.items() if name.startswith(f"{prefix}.")}
    return {f"{prefix}.{name}": file for name, file in inner_names.items()}, inner_skipped, chosen


def _explain(
    path: str | os.PathLike[str],
    missing: list[str],
    unexpected: list[str],
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> str:
    shapes = [f"{name} {ours} instead of {theirs}" for name, (ours, theirs) in mismatched.items()]
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    return (
        f"load_pretrained got {os.fspath(path)!r}, whose tensors do not fit the model ({'; '.join(parts)}); pass "
        "rename with the names in the model, or strict=False to keep the model's own values."
    )


def _listed(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _check_not_meta(targets: Mapping[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        if _local(targets[name]).is_meta:
            raise ValueError(
                f"load_pretrained got the parameter {name!r} on the meta device, which has no memory to read into; "
                "build the model inside weft.strategy.deferred_init instead."
            )


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def _is_read_now(target: Tensor) -> bool:
    return not is_deferred(target) and _local(target).numel() > 0


def _fill(target: Tensor, source: FileTensor) -> None:
    local = _local(target)
    if is_deferred(target):
        target.copy_(deferred_of(source, target.tape))
    elif _is_read_now(target):
        local.detach().copy_(source.read(_region(target)))


def _region(tensor: Tensor) -> Region:
    """Return the region that this rank holds of a full tensor."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((first, first + size) for first, size in zip(offset, shape, strict=True))
