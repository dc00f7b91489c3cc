"""Makes arguments to call a module with: from an example, from a Hugging Face config, or from the first layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.strategy.recognition.linears import features, why_no_linear
from weft.strategy.verification.weightless import drawn

LENGTHS = (7, 11)  # of sequences, in tokens; primes, which hardly ever are a number of heads or features
_POWER_OF_TWO_LENGTHS = (16, 32)  # for code that needs multiples of a power of two
_IMAGE_SIZES = (32, 64, 224)
_BATCH = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def example_of(module: nn.Module) -> Sample | None:
    """Return the call for a LightningModule's `example_input_array`; None if there is none."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return None
    return sample_of(example)


def sample_of(example: Any) -> Sample:
    """Return the call for an example: a tuple or list gives positional arguments, a dict keyword arguments.

    Tensors are moved to the CPU, floating ones converted to float64.
    """
    example = tree_map_only(Tensor, _on_cpu, example)
    if isinstance(example, Mapping):
        return Sample((), dict(example))
    return Sample(tuple(example)) if isinstance(example, (tuple, list)) else Sample((example,))


def _on_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def samples_for(module: nn.Module) -> Iterator[tuple[Sample, Sample]]:
    """Yield pairs of calls that the module may accept, for train and eval mode, of two lengths, the likeliest first.

    An `example_input_array` comes first, as both calls of its pair.
    """
    example = example_of(module)
    if example is not None:
        yield example, example
    config = module.__dict__.get("config")
    if config is not None and hasattr(module, "main_input_name"):
        yield from _of_hugging_face(module, config)
        return
    names = _required_arguments(module)
    if names is None:
        return
    for lengths in (LENGTHS, _POWER_OF_TWO_LENGTHS):
        for kind in _kinds(module):
            first, second = (_make_call(names, kind, length) for length in lengths)
            if first is not None and second is not None:
                yield first, second


def _required_arguments(module: nn.Module) -> list[str] | None:
    """Return the names of the arguments that a module's forward must get; None if it has no forward.

    If all arguments are optional, the first one is given a value, under the name "x".
    """
    if type(module).forward is nn.Module.forward:
        return None
    parameters = inspect.signature(type(module).forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    names = [p.name for p in positional if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not names:
        return ["x"] if takes_any or positional else []
    return names


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of input.

    form: "embedding" (indices), "image", "signal", "tokens" (with a dim of the sequence) or "rows" (without one).
    size: the features, table rows or channels of the layer that takes it.
    image: the side of an image.
    """

    form: str
    size: int
    image: int = 0


def _kinds(module: nn.Module) -> list[_Kind]:
    """Return up to 8 kinds of input that the first layers take, in the order of registration."""
    kinds: list[_Kind] = []
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            kinds.append(_Kind("embedding", layer.num_embeddings))
        elif isinstance(layer, nn.Conv2d):
            sizes = dict.fromkeys((*_image_sizes(module), *_IMAGE_SIZES))
            kinds += [_Kind("image", layer.in_channels, size) for size in sizes]
        elif isinstance(layer, nn.Conv1d):
            kinds.append(_Kind("signal", layer.in_channels))
        elif why_no_linear(layer) is None:
            kinds += [_Kind("tokens", features(layer)[0]), _Kind("rows", features(layer)[0])]
        elif isinstance(layer, nn.MultiheadAttention):
            kinds.append(_Kind("tokens", layer.embed_dim))
        elif isinstance(layer, nn.LayerNorm):
            kinds.append(_Kind("tokens", layer.normalized_shape[-1]))
        if len(dict.fromkeys(kind.form for kind in kinds)) >= 3:
            break
    return list(dict.fromkeys(kinds))[:8]


def _image_sizes(module: nn.Module) -> list[int]:
    """Return the first two image sizes that attributes of modules give."""
    sizes = []
    for inner in module.modules():
        for name in ("img_size", "image_size", "input_size"):
            value = inner.__dict__.get(name)
            value = value[-1] if isinstance(value, Sequence) and not isinstance(value, str) and value else value
            if isinstance(value, int) and 0 < value <= 1024:
                sizes.append(value)
    return sizes[:2]


def _make_call(names: list[str], kind: _Kind, length: int) -> Sample | None:
    """Return a call with a value for each required argument: of `kind` for the first, chosen by name for the others."""
    values: list[Tensor | None] = [_make_input(kind, length)]
    for name in names[1:]:
        lower = name.lower()
        if any(part in lower for part in ("mask", "bias", "cache", "past", "state")):
            values.append(None)
        elif "pos" in lower and "emb" not in lower:
            values.append(torch.arange(length))
        elif any(part in lower for part in ("label", "target", "tgt", "memory", "context", "y", "key", "value", "enc")):
            values.append(_make_input(kind, length + 2 if kind.form == "tokens" else length, seed=1))
        else:
            values.append(_make_input(kind, length, seed=1))
    return Sample(tuple(values[: len(names)]))


def _make_input(kind: _Kind, length: int, seed: int = 0) -> Tensor:
    if kind.form == "embedding":
        return _indices((_BATCH, length), kind.size, seed)
    if kind.form == "image":
        return drawn((_BATCH, kind.size, kind.image, kind.image), seed, 1)
    if kind.form == "signal":
        return drawn((_BATCH, kind.size, 16 * length), seed, 1)
    return drawn((_BATCH, length, kind.size) if kind.form == "tokens" else (_BATCH * length, kind.size), seed, 1)


def _indices(shape: tuple[int, ...], rows: int, seed: int) -> Tensor:
    """Return random indices of a table of `rows` rows."""
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed))


def _of_hugging_face(module: Any, config: Any) -> Iterator[tuple[Sample, Sample]]:
    """Yield pairs of calls with the model's main input; an encoder-decoder also gets decoder_input_ids."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rows = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 0) or 0)
    for lengths in (LENGTHS, _POWER_OF_TWO_LENGTHS):
        calls = []
        for length in lengths:
            values: dict[str, Any] = {}
            names = inspect.signature(type(module).forward).parameters
            if module.main_input_name == "pixel_values" or ("pixel_values" in names and "input_ids" not in names):
                values["pixel_values"] = _pixels(config)
            elif module.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
                values["input_features"] = _sound(config)
            elif rows:
                values["input_ids"] = _indices((_BATCH, length), rows, 0)
            if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
                values["decoder_input_ids"] = _indices((_BATCH, length - 2), rows, 1)
            calls.append(Sample((), values))
        if all(call.kwargs for call in calls):
            yield calls[0], calls[1]


def _sound(config: Any) -> Tensor:
    """Return spectrograms of the only length that speech models with learned positions accept."""
    return drawn((_BATCH, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 1500)), 1)


def _pixels(config: Any) -> Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, Sequence) else (size, size)
    return drawn((_BATCH, getattr(config, "num_channels", 3), height, width), 1)
