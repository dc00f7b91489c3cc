"""Reads and writes measured layer times in the file of a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from weft.strategy._plan import DecoderModel, LayerTimes

LAYER_KEYS = ("layers_of", "layers")  # of the file: the model and the precision, and the samples
_SIZES = ("dim", "hidden_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_SWITCHES = ("attention_bias", "tied")
_COUNTS = ("tensor_parallel", "rows", "tokens")
_SECONDS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class LayerSample:
    """The times of one part of a model on one tensor-parallel rank, without communication.

    Attributes:
        part: "embedding", "block", or "head": the final norm, the output layer and the loss.
        tensor_parallel: the number of ranks that share the part.
        rows: tokens of the batch.
        tokens: of each sequence.
        forward, backward: seconds.
    """

    part: str
    tensor_parallel: int
    rows: int
    tokens: int
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class MeasuredLayers:
    """Measured layer times of a model, which a cluster's file can contain.

    Attributes:
        model: its number of layers does not matter.
        precision: that of the Trainer.
        samples: all parts for each tensor-parallel size and number of rows.
    """

    model: DecoderModel
    precision: str
    samples: tuple[LayerSample, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return keys for the content of a cluster's file, with seconds to four digits."""
        model: dict[str, Any] = {name: getattr(self.model, name) for name in (*_SIZES, *_SWITCHES)}
        samples = [dataclasses.asdict(sample) for sample in self.samples]
        for sample in samples:
            sample |= {name: float(f"{sample[name]:.3e}") for name in _SECONDS}
        return {"layers_of": model | {"precision": self.precision}, "layers": samples}

    def __str__(self) -> str:
        """Return YAML."""
        content = self.to_dict()
        lines = [f"layers_of: {_flow(content['layers_of'])}", "layers:"]
        return "\n".join([*lines, *(f"  - {_flow(sample)}" for sample in content["layers"])])


def read_layer_times(cluster: Mapping[str, Any]) -> LayerTimes | None:
    """Return the measured layer times of a cluster's file, in the form that `MeasuredLayers` writes.

    None: the file has none.

    Raises:
        ValueError: they are not valid.
    """
    given = [key for key in LAYER_KEYS if key in cluster]
    if not given:
        return None
    if len(given) == 1:
        raise ValueError(
            f"tune: the cluster has {given[0]!r} alone; give both {' and '.join(map(repr, LAYER_KEYS))}, as weft "
            "profile --config prints them."
        )
    model, precision = _read_model(cluster["layers_of"])
    samples = cluster["layers"]
    if not isinstance(samples, list):
        raise ValueError(f"tune: the cluster has layers = {samples!r}; give a list of samples.")
    fields = [dataclasses.astuple(_read_sample(sample)) for sample in samples]
    return LayerTimes(model, precision=precision, samples=fields)


def _read_model(value: Any) -> tuple[DecoderModel, str]:
    keys = (*_SIZES, *_SWITCHES, "precision")
    is_valid = (
        isinstance(value, Mapping)
        and set(value) == set(keys)
        and all(_is_count(value[name]) for name in _SIZES)
        and all(isinstance(value[name], bool) for name in _SWITCHES)
        and isinstance(value["precision"], str)
    )
    if not is_valid:
        raise ValueError(
            f"tune: the cluster has layers_of = {value!r}; give whole numbers from 1 for {', '.join(_SIZES)}, true or "
            f"false for {' and '.join(_SWITCHES)}, and precision."
        )
    sizes = {name: value[name] for name in (*_SIZES, *_SWITCHES)}
    return DecoderModel(num_layers=1, **sizes), value["precision"]


def _read_sample(value: Any) -> LayerSample:
    names = [field.name for field in dataclasses.fields(LayerSample)]
    is_valid = (
        isinstance(value, Mapping)
        and set(value) == set(names)
        and isinstance(value["part"], str)
        and all(_is_count(value[name]) for name in _COUNTS)
        and all(isinstance(value[name], (int, float)) and not isinstance(value[name], bool) for name in _SECONDS)
    )
    if not is_valid:
        raise ValueError(
            f"tune: the cluster has the layer times {value!r}; give part, whole numbers from 1 for "
            f"{', '.join(_COUNTS)}, and seconds for {' and '.join(_SECONDS)}."
        )
    return LayerSample(**value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**62


def _flow(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in values.items()) + "}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3e}" if isinstance(value, float) else str(value)
