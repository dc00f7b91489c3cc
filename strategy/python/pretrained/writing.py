"""save_pretrained: writes a model that may be sharded to a directory, with the names and shapes of the unsharded model.

All ranks that hold a tensor assemble it, one tensor at a time, and one of them writes it. Files are spread over the
ranks that hold their tensors, so that these ranks write at the same time; they take turns of one tensor. If other ranks
do not see the files of rank 0, all tensors are sent to rank 0, which writes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.strategy.pretrained.adapters import FILE as ADAPTER_FILE
from weft.strategy.pretrained.adapters import adapter_values, peft_model_in, save_adapter_configuration
from weft.strategy.pretrained.hugging_face import converted_for_saving, pretrained_model_in, save_configuration
from weft.strategy.pretrained.output import OutputDirectory, size_of, split_into_files
from weft.strategy.pretrained.values import LazyTensor
from weft.strategy.sharding.remote_layers import later_copies
from weft.strategy.tensor_files import DTYPES, OutputTensor, TensorFile


@dataclass(frozen=True)
class _TensorSet:
    """Tensors that are written together, by their names in the files.

    Attributes:
        folder: inside of the directory; "": the directory itself.
        only_file: the name of the only file, which rank 0 writes; "": as many files as their largest size demands.
    """

    values: dict[str, LazyTensor]
    folder: str = ""
    only_file: str = ""


@dataclass(frozen=True)
class _PlannedFile:
    """A file: its name, the rank that writes it, and its tensors, each with a rank that has its values."""

    name: str
    writer: int
    tensors: list[tuple[OutputTensor, int]]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's weights to a new directory in the layout of Hugging Face, from any sharding; collective.

    The directory has `model.safetensors`, or several files and `model.safetensors.index.json`, with the names and
    shapes of the unsharded model and each tied parameter once. If the model is one of transformers, or exactly one
    module in it is, that module is written, in the form that `from_pretrained` reads: with config.json, the generation
    config, projections that transformers fuses or splits when it loads in their form on disk, and the files of the
    `tokenizer`, `processor`, `image_processor` or `feature_extractor` that are attributes of the model. In a model with
    adapters of PEFT, only the adapters are written, in PEFT's format.

    A rank holds its shards and one full tensor at a time. The directory is complete or absent: it is written beside its
    name, synchronised with the disk, and renamed.

    Args:
        model: plain, or sharded by `parallelize`, `apply_fsdp` and into pipeline stages; all ranks pass it.
        directory: the same path on all ranks; it must not exist.
        max_shard_size: the largest size of a file, such as "5GB", unless a single tensor is larger. An adapter has one
            file.
        dtype: convert floating-point tensors to this dtype; None: keep their dtypes.

    Raises:
        FileExistsError: `directory` exists.
        ValueError: `max_shard_size` is no size; a tensor is deferred, on the meta device, or of a dtype that
            safetensors lacks.
        RuntimeError: a rank could not write; the error names it and its cause. No incomplete directory is left.
    """
    max_bytes = size_of(max_shard_size)
    adapted = saved = None
    sets: list[_TensorSet] = []
    try:
        adapted = peft_model_in(model)
        saved = pretrained_model_in(model)
        sets = _tensor_sets(model, adapted, saved, dtype)
        sentence = _unsavable(sets)
    except Exception as own:  # other ranks wait for this one
        is_sentence = str(own).startswith("save_pretrained ")
        sentence = str(own) if is_sentence else f"save_pretrained could not list the tensors of rank {_rank()}: {own}."
    _raise_on_all_ranks(sentence)
    _check_all_have(adapted)

    def write_configuration(folder: Path) -> None:
        if adapted is not None:
            save_adapter_configuration(adapted, folder)
        elif saved is not None:
            save_configuration(model, saved, folder, dtype)

    _write(sets, Path(directory), max_bytes, write_configuration)


def _check_all_have(adapted: nn.Module | None) -> None:
    """Raise ValueError if only some ranks have the model with adapters, which is then whole in a pipeline stage."""
    found = _gathered(adapted is not None)
    if any(found) and not all(found):
        ranks = [rank for rank, has in enumerate(found) if has]
        raise ValueError(
            f"save_pretrained found a model with adapters on the ranks {ranks} alone; place pipeline cuts inside of it."
        )


def write_tensors(
    values: dict[str, LazyTensor], directory: Path, max_bytes: int, write_configuration: Callable[[Path], None]
) -> None:
    """Write tensors, by their names, to a new directory, and what `write_configuration` adds; see `save_pretrained`."""
    sets = [_TensorSet(values)]
    _raise_on_all_ranks(_unsavable(sets))
    _write(sets, directory, max_bytes, write_configuration)


def _write(
    sets: list[_TensorSet], directory: Path, max_bytes: int, write_configuration: Callable[[Path], None]
) -> None:
    output = _create(directory)
    error: str | None = None
    try:
        shares_files = all(_gathered(_sees(output)))
        device = _device_of(sets)
        for each in sets:
            files = _planned(each, max_bytes, shares_files)
            error = _write_files(output, files, each.values, device, error)
            if _rank() == 0 and error is None:
                _write_index(output, files)
        if _rank() == 0 and error is None:
            write_configuration(output.temporary)
    except Exception as own:  # other ranks wait for this one in `_finish`
        error = f"{type(own).__name__}: {own}"
    _finish(output, error)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_on_all_ranks(sentence: str | None, error: type[Exception] = ValueError) -> None:
    """Raise the error of the first rank that has one, on all ranks; collective."""
    found = next((each for each in _gathered(sentence) if each is not None), None)
    if found is not None:
        raise error(found)


def _tensor_sets(
    model: nn.Module, adapted: nn.Module | None, saved: nn.Module | None, dtype: torch.dtype | None
) -> list[_TensorSet]:
    """Return the tensors of this rank that are to be written; the same sets on all ranks.

    Args:
        adapted: a PeftModel in `model`, whose adapters alone are written.
        saved: a model of transformers in `model`, which alone is written.
    """
    if adapted is not None:
        state = adapted.state_dict(keep_vars=True)
        values = {name: LazyTensor.of(each, dtype) for name, each in state.items() if isinstance(each, Tensor)}
        return [_TensorSet(own, folder, ADAPTER_FILE) for folder, own in adapter_values(adapted, values).items()]
    values = _values(model if saved is None else saved, dtype)
    return [_TensorSet(values if saved is None else converted_for_saving(saved, values))]


def _values(source: nn.Module, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Return the tensors of this rank by their names, each tied tensor once."""
    values: dict[str, LazyTensor] = {}
    done = {id(parameter) for parameter in later_copies(source)}
    for name, tensor in source.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in done:
            done.add(id(tensor))
            values[name] = LazyTensor.of(tensor, dtype)
    return values


def _unsavable(sets: list[_TensorSet]) -> str | None:
    for name, value in (item for each in sets for item in each.values.items()):
        if value.has_no_values:
            return (
                f"save_pretrained got {name!r} without values; call parallelize, or read weights into it, before it is "
                "saved."
            )
        if value.dtype not in DTYPES:
            return f"save_pretrained got {name!r} of {value.dtype}, which safetensors lacks; pass dtype=torch.bfloat16."
    return None


def _create(path: Path) -> OutputDirectory:
    """Create the directory under its temporary name, on rank 0; collective."""
    sentence = None
    if _rank() == 0 and os.path.lexists(path):
        sentence = f"save_pretrained got {str(path)!r}, which exists; pass another directory, or remove it first."
    _raise_on_all_ranks(sentence, FileExistsError)
    output = OutputDirectory(path, _gathered(OutputDirectory.new_token())[0])
    failure = None
    if _rank() == 0:
        try:
            output.create()
        except OSError as error:
            failure = f"save_pretrained could not create {str(output.temporary)!r}: {error}; pass another directory."
    _raise_on_all_ranks(failure, OSError)
    return output


def _sees(output: OutputDirectory) -> bool:
    """Return whether this rank sees the directory that rank 0 has created."""
    return output.temporary.is_dir()


def _planned(tensor_set: _TensorSet, max_bytes: int, shares_files: bool) -> list[_PlannedFile]:
    """Return the files of all ranks; the same on each rank, collective."""
    values = tensor_set.values
    tensors: dict[str, OutputTensor] = {}
    holders: dict[str, list[int]] = {}
    own = [OutputTensor(name, value.shape, value.dtype, value.group) for name, value in values.items()]
    for rank, listed in enumerate(_gathered(own)):
        for tensor in listed:
            tensors.setdefault(tensor.name, tensor)
            holders.setdefault(tensor.name, []).append(rank)
    groups: dict[tuple[int, ...], list[OutputTensor]] = {}  # by the ranks that may write the tensors
    for name, ranks in holders.items():
        is_spread = shares_files and not tensor_set.only_file
        groups.setdefault(tuple(ranks) if is_spread else (0,), []).append(tensors[name])
    if tensor_set.only_file:
        max_bytes = sys.maxsize
    split = [(group, each) for group, listed in groups.items() for each in split_into_files(listed, max_bytes)]
    names = [f"model-{number:05}-of-{len(split):05}.safetensors" for number in range(1, len(split) + 1)]
    files = []
    for number, (group, listed) in enumerate(split):
        writer = group[number % len(group)]
        owners = [writer if writer in holders[each.name] else holders[each.name][0] for each in listed]
        name = names[number] if len(split) > 1 else tensor_set.only_file or "model.safetensors"
        files.append(
            _PlannedFile(os.path.join(tensor_set.folder, name), writer, list(zip(listed, owners, strict=True)))
        )
    return files


def _in_turns(files: list[_PlannedFile]) -> Iterator[tuple[_PlannedFile, OutputTensor, int]]:
    """Yield the first tensor of each file, then the second of each, and so on, so that writers work at the same time.

    Each with its file and the rank that has its values. Tensors of one group are not separated.
    """
    rest = [(file, list(file.tensors)) for file in files]
    while rest:
        for file, tensors in rest:
            group = tensors[0][0].group
            yield file, *tensors.pop(0)
            while group and tensors and tensors[0][0].group == group:
                yield file, *tensors.pop(0)
        rest = [(file, tensors) for file, tensors in rest if tensors]


def _write_files(
    output: OutputDirectory,
    files: list[_PlannedFile],
    values: dict[str, LazyTensor],
    device: torch.device,
    error: str | None,
) -> str | None:
    """Write this rank's files, and help to assemble the tensors of others; return the first error of this rank.

    After an error, which may be an earlier one, the rank still takes part in the collectives. `device`: of messages.
    """
    rank = _rank()
    opened: dict[str, TensorFile] = {}
    for file, tensor, owner in _in_turns(files):
        value = values[tensor.name].full() if tensor.name in values else None
        if owner != file.writer and rank in (owner, file.writer):
            value = _sent(value, owner, file.writer, tensor, device)
        if rank != file.writer or error is not None:
            continue
        assert value is not None
        try:
            if file.name not in opened:
                output.create_folder(os.path.dirname(file.name))
                opened[file.name] = TensorFile(output.temporary / file.name, [each for each, _ in file.tensors])
            opened[file.name].write(value)
        except Exception as own:
            error = f"{file.name}: {own}"
    for value_of_rank in values.values():
        value_of_rank.free()
    for name, each in opened.items():
        try:
            each.close()
        except Exception as own:
            error = error or f"{name}: {own}"
    return error


def _device_of(sets: list[_TensorSet]) -> torch.device:
    """Return the device of messages: sender and receiver must agree, but a rank may have no tensors; collective."""
    own = next((value.device.type for each in sets for value in each.values.values()), None)
    return torch.device(next((kind for kind in _gathered(own) if kind is not None), "cpu"))


def _sent(value: Tensor | None, owner: int, writer: int, tensor: OutputTensor, device: torch.device) -> Tensor | None:
    """Send a tensor from the owner to the writer; return it there."""
    if _rank() == owner:
        assert value is not None
        dist.send(value.to(device).contiguous(), writer)
        return None
    received = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.recv(received, owner)
    return received


def _write_index(output: OutputDirectory, files: list[_PlannedFile]) -> None:
    if len(files) > 1:
        total = sum(tensor.num_bytes for file in files for tensor, _ in file.tensors)
        file_of = {tensor.name: file.name for file in files for tensor, _ in file.tensors}
        output.write_json("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


def _finish(output: OutputDirectory, error: str | None) -> None:
    """Rename the directory if no rank has an error; else remove it and raise the first error; collective."""
    errors = [(rank, each) for rank, each in enumerate(_gathered(error)) if each is not None]
    failure = None
    if not errors and _rank() == 0:
        try:
            output.commit()
        except Exception as own:
            failure = str(own)
    errors += [(rank, each) for rank, each in enumerate(_gathered(failure)) if each is not None]
    if errors:
        if _rank() == 0:
            output.discard()
        rank, text = errors[0]
        raise RuntimeError(
            f"save_pretrained: rank {rank} failed to write {str(output.path)!r} ({text}); remove the cause, and "
            "save again: nothing incomplete is left."
        )
