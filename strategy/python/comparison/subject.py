"""Builds the model to compare (the same on every rank), its batch and its loss."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.strategy.deferred import deferred_init, materialize
from weft.strategy.experts import find_experts
from weft.strategy.full_results import local_parameters
from weft.strategy.modules.activation_checkpointing import repeated_blocks

LossFunction = Callable[[nn.Module, Any], Tensor]
_SEQUENCES, _TOKENS = 4, 16  # of the random batch for a language model
_EXPERTS_OPTION = "_experts_implementation"  # of configurations of Transformers, which have no public name for it
_LOGGING = ("log", "log_dict", "print")  # methods of a LightningModule that are disabled, because they need a Trainer


def build_model(source: Any, dtype: torch.dtype, first_layers: int | None, seed: int) -> nn.Module:
    """Return a new model from `source`, with floating parameters and buffers in `dtype`.

    Args:
        source: a module, which is copied; a callable without arguments that builds one; or the "package.module:name"
            of either.
        first_layers: keep this many blocks of each list of repeated blocks; if `source` is a callable, the other blocks
            are never materialized.
        seed: of torch's and Python's random numbers, which a callable may draw.

    Raises:
        ValueError: `source` does not give a module, or the model has tensors on the meta device.
    """
    source = resolve(source)
    torch.manual_seed(seed)
    random.seed(seed)
    with deferred_init() if first_layers is not None else contextlib.nullcontext():
        model = copy.deepcopy(source) if isinstance(source, nn.Module) else _build(source)
        if is_lightning_module(model) and callable(getattr(model, "configure_model", None)):
            lightning_module: Any = model
            lightning_module.configure_model()
    if first_layers is not None:
        keep_first_layers(model, first_layers)
        materialize(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"compare: the {type(model).__name__} has tensors without values on the device 'meta'; pass a model, or a "
            "function that builds one, with values."
        )
    if dtype == torch.float64:
        _compute_experts_one_by_one(model)
    cast = {torch.float64: model.double, torch.float32: model.float, torch.bfloat16: model.bfloat16}
    return cast.get(dtype, model.half)()


def _compute_experts_one_by_one(model: nn.Module) -> None:
    """Let Hugging Face's experts loop over the experts, because torch's grouped product takes no float64."""
    for name in find_experts(model):
        experts: Any = model.get_submodule(name)
        if getattr(getattr(experts, "config", None), _EXPERTS_OPTION, None) is not None:
            experts.config = copy.deepcopy(experts.config)  # may be the caller's
            setattr(experts.config, _EXPERTS_OPTION, "eager")


def resolve(source: Any) -> Any:
    """Return the object that "package.module:name" names, or anything but a string unchanged.

    Raises:
        ValueError: the string has no such form, or cannot be imported.
    """
    if not isinstance(source, str):
        return source
    module_name, _, name = source.partition(":")
    if not name:
        raise ValueError(f"compare: {source!r} is not the name of an object; write 'package.module:name'.")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"compare: {source!r} cannot be imported ({error}); write 'package.module:name'.") from error
    return found


def _build(source: Any) -> nn.Module:
    model = source() if callable(source) else source
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"compare: a {type(model).__name__} was given as the module; pass an nn.Module, a LightningModule, or a "
            "callable without arguments that builds one."
        )
    return model


def is_lightning_module(model: nn.Module) -> bool:
    """Return whether a model has a `training_step`, as LightningModules do: this layer cannot import Lightning."""
    return callable(getattr(model, "training_step", None))


def keep_first_layers(model: nn.Module, count: int) -> None:
    """Remove all but the first `count` blocks from each list of repeated blocks.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    keys_by_owner: dict[str, list[str]] = {}
    for block in repeated_blocks(model):
        owner, _, key = block.rpartition(".")
        keys_by_owner.setdefault(owner, []).append(key)
    if not keys_by_owner:
        raise ValueError(
            f"compare: first_layers={count} finds no repeated blocks in a {type(model).__name__}, that is, modules "
            "of one class in an nn.ModuleList or nn.Sequential; leave it out, or build a smaller configuration."
        )
    for owner, keys in keys_by_owner.items():
        container: Any = model.get_submodule(owner)
        for key in reversed(keys[count:]):  # removing from the end keeps the earlier keys
            del container[key if isinstance(container, nn.ModuleDict) else int(key)]


def batch_of(model: nn.Module, given: Any, num_data_ranks: int) -> tuple[Any, bool]:
    """Return (the batch, before its cast to the dtype; whether it is made for the forward, not for a training step).

    Args:
        given: a batch, a callable that makes it, or the "package.module:name" of either; None: the model's
            `example_input_array`, or random tokens for a language model of Hugging Face. These two are for the forward.
        num_data_ranks: the number of data-parallel ranks.
    """
    given = resolve(given)
    if callable(given) and not isinstance(given, (Tensor, Mapping)):
        given = given()
    if given is not None:
        return given, False
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return example, True
    config = getattr(model, "config", None)
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int) and "input_ids" in inspect.signature(model.forward).parameters:
        length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
        num_sequences = num_data_ranks * math.ceil(_SEQUENCES / num_data_ranks)
        tokens = torch.randint(vocab_size, (num_sequences, length), generator=torch.Generator().manual_seed(0))
        has_labels = "labels" in inspect.signature(model.forward).parameters
        return {"input_ids": tokens, **({"labels": tokens} if has_labels else {})}, True
    raise ValueError(
        f"compare: no batch was given, and a {type(model).__name__} has no example_input_array and no configuration of "
        "a language model of Hugging Face; pass batch=... (--batch package.module:function)."
    )


def loss_of(model: nn.Module, given: Any, is_for_forward: bool) -> tuple[LossFunction, str]:
    """Return (the loss function for a model, a description of the loss).

    Args:
        given: the loss function, or its "package.module:name"; None: the default that `compare` documents.
        is_for_forward: the second result of `batch_of`.

    Raises:
        ValueError: the loss would be that of `training_step`, and the LightningModule optimizes manually.
    """
    if given is not None:
        loss_fn = resolve(given)
        return loss_fn, getattr(loss_fn, "__name__", "the function that was given")
    if not is_lightning_module(model) or is_for_forward:
        return _loss_of_forward, "the output's, or a fixed random projection of the output"
    if not getattr(model, "automatic_optimization", True):
        raise ValueError(
            f"compare: the {type(model).__name__} has manual optimization, so its training_step steps its own "
            "optimizers; pass loss_fn=(module, batch) -> loss."
        )
    return _loss_of_training_step, "training_step"


def entry_points_of(loss_fn: LossFunction) -> list[str] | None:
    """Return the methods of the model that a loss function calls in place of the model itself; None: the model."""
    return ["training_step"] if loss_fn is _loss_of_training_step else None


def _loss_of_training_step(model: Any, batch: Any) -> Tensor:
    takes_index = True
    try:  # the method of the class: FSDP2 may have set a wrapper on the instance
        inspect.signature(type(model).training_step).bind(model, batch, 0)
    except TypeError:
        takes_index = False
    with _without_logging(model), local_parameters():
        output = model.training_step(batch, 0) if takes_index else model.training_step(batch)
    return _scalar(output["loss"] if isinstance(output, Mapping) else output, "training_step")


@contextlib.contextmanager
def _without_logging(model: nn.Module) -> Iterator[None]:
    shadowed = [name for name in _LOGGING if callable(getattr(model, name, None)) and name not in model.__dict__]
    model.__dict__.update(dict.fromkeys(shadowed, lambda *_, **__: None))
    try:
        yield
    finally:
        for name in shadowed:
            del model.__dict__[name]


def _loss_of_forward(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return projection(output) if loss is None else _scalar(loss, "the output's loss")


def projection(output: Any) -> Tensor:
    """Return one number, `[]`, from the first floating tensor of an output.

    The number is the mean over the samples (the first dim) of each sample's inner product with fixed random numbers,
    divided by the square root of the number of elements of a sample. A tensor of one element is returned as `[]`.
    """
    tensor = first_tensor(output)
    if tensor is None:
        raise ValueError(
            f"compare: the forward returns a {type(output).__name__} without a floating tensor and without a loss; "
            "pass loss_fn=(module, batch) -> loss (--loss package.module:function)."
        )
    if tensor.numel() == 1:
        return tensor.reshape(())
    shape = tensor.shape[1:]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(tensor)
    return (tensor * numbers).sum() / (tensor.shape[0] * math.sqrt(max(1, shape.numel())))


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating tensor of an output, which may be nested; None: there is none."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return next((found for found in map(first_tensor, values) if found is not None), None)


def _scalar(loss: Any, name: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"compare: {name} is a {type(loss).__name__}; return a tensor of one element.")
    return loss.reshape(())
