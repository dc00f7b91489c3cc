"""The memory of each rank of a training, from a configuration: nothing is allocated, and torch is not needed.

The arithmetic is the C++ memory model (weft/strategy/memory_model.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy import _plan
from weft.strategy.plan_text import from_mapping, load

_GB = 1e9
_AXES = ("data_replicate", "data_parallel", "tensor_parallel")
_KEYS = (
    "model",
    "mesh",
    "batch",
    "plan",
    "precision",
    "optimizer",
    "fused_optimizers",
    "optimizer_in_backward",
    "empty_init",
    "activation_checkpointing",
)
# Architectures of Hugging Face that are the decoder of the memory model, in its own operators.
_HF_TYPES = ("llama", "mistral", "qwen2")


@dataclasses.dataclass(frozen=True)
class RankEstimate:
    """Bytes of one rank by phase and category, and how many ranks are like it."""

    rank: int
    num_ranks: int
    phases: dict[str, dict[str, int]]

    @property
    def peak_bytes(self) -> int:
        return max(sum(usage.values()) for usage in self.phases.values())


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What `estimate` has found; prints as a table.

    Attributes:
        num_parameters: of the whole model, tied ones once.
        bytes_per_parameter: of a parameter, its gradient, its optimizer state and its half-precision copies.
        mesh: as `Mesh` prints it.
        ranks: one of each kind of rank.
    """

    num_parameters: int
    bytes_per_parameter: float
    mesh: str
    ranks: tuple[RankEstimate, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_parameters": self.num_parameters,
            "bytes_per_parameter": self.bytes_per_parameter,
            "mesh": self.mesh,
            "ranks": [{**dataclasses.asdict(rank), "peak_bytes": rank.peak_bytes} for rank in self.ranks],
        }

    def __str__(self) -> str:
        whole = self.num_parameters * self.bytes_per_parameter / _GB
        lines = [
            f"{self.num_parameters:,} parameters, {self.bytes_per_parameter:g} bytes each in training: {whole:.2f} GB "
            f"in all; mesh {self.mesh or 'of one rank'}; GB = 1e9 bytes"
        ]
        for rank in self.ranks:
            like = f" and {rank.num_ranks - 1} like it" if rank.num_ranks > 1 else ""
            lines += ["", f"rank {rank.rank}{like}: at most {rank.peak_bytes / _GB:.3f} GB", *_table(rank.phases)]
        return "\n".join(lines)


def _table(phases: Mapping[str, Mapping[str, int]]) -> list[str]:
    categories = list(next(iter(phases.values())))
    header = ["phase", "total", *(name.replace("_", " ") for name in categories)]
    rows = [[phase, *(_gb(size) for size in (sum(usage.values()), *usage.values()))] for phase, usage in phases.items()]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in (header, *rows))
    ]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.3f}" if num_bytes >= 5e5 or num_bytes == 0 else "<0.001"


def estimate(spec: _plan.TrainingSpec, mesh: _plan.Mesh) -> Estimate:
    """The bytes of each kind of rank of a training.

    Raises:
        ValueError: the parts of the training do not fit together.
    """
    num_parameters, bytes_per_parameter = spec.parameter_cost()
    ranks = tuple(RankEstimate(rank, alike, spec.predict(rank)) for rank, alike in spec.distinct_ranks())
    return Estimate(num_parameters, bytes_per_parameter, str(mesh), ranks)


def estimate_file(path: str | Path) -> Estimate:
    """The estimate for a configuration in YAML, as docs/memory.md describes it.

    Raises:
        ValueError: there is no such file, or its content is no such configuration.
    """
    path = Path(path)
    return estimate(*read_config(_load(path), path.parent))


def _load(path: Path) -> Any:
    return load(_read(path), f"file {path}", owner="estimate", key="key", advice="write 'model: ...' and 'mesh: ...'")


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'; give the path of one.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}).") from error


def read_config(config: Any, folder: Path) -> tuple[_plan.TrainingSpec, _plan.Mesh]:
    """The training that a configuration describes; paths in it are relative to `folder`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {config!r}; give a mapping with {', '.join(_KEYS)}.")
    if missing := [key for key in ("model", "mesh", "batch") if key not in config]:
        raise ValueError(f"the configuration has no {' and no '.join(map(repr, missing))}; give it.")
    if unknown := [key for key in config if key not in _KEYS]:
        raise ValueError(f"the configuration has {', '.join(map(repr, unknown))}; the keys are {', '.join(_KEYS)}.")
    mesh = _mesh(config["mesh"])
    options = {key: value for key, value in config.items() if key not in ("model", "mesh", "plan", "batch")}
    if options.get("optimizer_in_backward") in (True, "rows") and options.get("precision") == "16-mixed":
        raise ValueError(
            "optimizer_in_backward does not go with precision 16-mixed, whose gradient scaler decides after the "
            "backward whether to step; use bf16-mixed, or leave optimizer_in_backward out."
        )
    plan = _plan_of(config.get("plan", "auto"), folder)
    try:
        spec = _plan.TrainingSpec(
            _model(config["model"], folder),
            mesh,
            plan=plan,
            **_sizes("batch", config["batch"], ("sequences", "tokens"), is_whole=True),
            **options,
        )
    except TypeError as error:
        raise ValueError(
            f"the options {options!r} are not all of the right kind: names are text, switches true or false."
        ) from error
    return spec, mesh


def _plan_of(value: Any, folder: Path) -> _plan.Plan | None:
    if value == "auto":
        return None
    if isinstance(value, str):
        value = load(_read(folder / value), f"file {value}")
    if not isinstance(value, Mapping):
        raise ValueError(f"'plan' is {value!r}; give auto, a mapping from pattern to style, or the path of one.")
    return from_mapping(value)


def _mesh(value: Any) -> _plan.Mesh:
    if isinstance(value, Mapping):
        return _plan.Mesh(list(_sizes("mesh", value, _AXES).items()))
    return _plan.Mesh.parse(str(value))


def _sizes(what: str, value: Any, names: tuple[str, ...], is_whole: bool = False) -> dict[str, int]:
    is_fitting = isinstance(value, Mapping) and (set(value) == set(names) if is_whole else set(value) <= set(names))
    if not is_fitting or not all(_is_size(size) for size in value.values()):
        raise ValueError(f"'{what}' is {value!r}; give whole numbers for {', '.join(names)}.")
    return dict(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62


def _model(value: Any, folder: Path) -> _plan.FeedForwardModel | _plan.DecoderModel:
    if isinstance(value, str):
        value = _load(folder / value)  # JSON is YAML
    if isinstance(value, Mapping) and set(value) == {"feed_forward"}:
        sizes = value["feed_forward"]
        try:
            return _plan.FeedForwardModel(**sizes)
        except TypeError as error:
            raise ValueError(
                f"'feed_forward' is {sizes!r}; give dim and hidden_dim, and gated and bias where not true and false."
            ) from error
    if isinstance(value, Mapping) and "hidden_size" in value:
        return _decoder(value)
    raise ValueError(
        f"'model' is {value!r}; give the path of a Hugging Face config.json, its content, or "
        "feed_forward: {dim: ..., hidden_dim: ...}."
    )


def _decoder(config: Mapping[str, Any]) -> _plan.DecoderModel:
    model_type = config.get("model_type", "llama")
    if model_type not in _HF_TYPES:
        raise ValueError(f"model_type is {model_type!r}, and there are predictions for {', '.join(_HF_TYPES)} only.")
    if config.get("mlp_bias") or (model_type == "llama" and config.get("attention_bias")):
        raise ValueError("the model's configuration has mlp_bias or attention_bias, for which there is no prediction.")

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if not _is_size(value) or value < 1:
            raise ValueError(f"the model's configuration has {name} = {value!r}; give a whole number from 1.")
        return value

    heads = size("num_attention_heads")
    return _plan.DecoderModel(
        dim=size("hidden_size"),
        hidden_dim=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        vocab_size=size("vocab_size"),
        attention_bias=model_type == "qwen2",
        tied=bool(config.get("tie_word_embeddings", False)),
    )
