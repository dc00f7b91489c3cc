"""Reads and checks the configuration of `weft estimate`, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.strategy import _plan
from weft.strategy.planning.layout import AUTO, Sizes
from weft.strategy.planning.plan_text import from_mapping, load

PIPELINE_AXIS = "pipeline_parallel"
HUGGING_FACE = "huggingface"  # the value of 'plan' for the plan in the configuration of a transformers model
_AXES = ("data_replicate", "data_parallel", "tensor_parallel")
_CONTEXT_AXIS = "context_parallel"
_KEYS = (
    "model",
    "mesh",
    "layout",
    "batch",
    "plan",
    "precision",
    "optimizer",
    "optimizer_state",
    "master_weights",
    "fused_optimizers",
    "optimizer_in_backward",
    "empty_init",
    "activation_checkpointing",
    "accumulate_grad_batches",
    "zero_stage",
    "sequence_parallel",
    "offload",
    "device",
    "pipeline_cuts",
    "pipeline_schedule",
    "num_micro_batches",
)
_PIPELINE_KEYS = ("pipeline_cuts", "pipeline_schedule", "num_micro_batches")
_MAX_MICRO_BATCHES = 4096
_NOT_OPTIONS = ("model", "mesh", "layout", "plan", "batch", *_PIPELINE_KEYS)
# Values of model_type in Hugging Face configurations that the memory model's decoder describes exactly, except those
# with other biases (see `decoder_of`).
DECODERS = ("llama", "mistral", "qwen2")


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The stages of a pipeline and its schedule.

    Attributes:
        num_ranks: the number of pipeline ranks.
        cuts: for each stage but the first, the name of its first module; None: chosen as in training.
        schedule: one of `SCHEDULES`.
        num_micro_batches: the micro-batches of a step.
    """

    num_ranks: int
    cuts: tuple[str, ...] | None
    schedule: str
    num_micro_batches: int


@dataclasses.dataclass(frozen=True)
class Training:
    """A training that a configuration describes.

    Attributes:
        model: the input of the memory model; None: the memory model does not describe this architecture.
        hugging_face: the configuration of a model of Hugging Face's transformers; None: one MLP.
        mesh: includes the pipeline axis.
        plan: rules; None: "auto"; "huggingface": the plan of the model's configuration.
        batch: "sequences" of each data-parallel rank, and "tokens" of each sequence.
        options: keyword arguments of `TrainingSpec`, as far as the configuration gives them.
        pipeline: None: no pipeline.
    """

    model: _plan.FeedForwardModel | _plan.DecoderModel | None
    hugging_face: Mapping[str, Any] | None
    mesh: _plan.Mesh
    plan: _plan.Plan | str | None
    batch: dict[str, int]
    options: dict[str, Any]
    pipeline: PipelineOptions | None = None

    def spec(self, model: _plan.FeedForwardModel | _plan.DecoderModel, mesh: _plan.Mesh, **changes: Any) -> Any:
        """Return the `TrainingSpec` of a model on a mesh with this training's options and `changes`.

        Raises:
            ValueError: an option has the wrong type, or a name is unknown.
        """
        options = {**self.batch, **self.options, **changes}
        try:
            return _plan.TrainingSpec(model, mesh, **options)
        except TypeError as error:
            raise ValueError(
                f"the options {self.options!r} have a value of the wrong type; give text for names, true or false for "
                "switches."
            ) from error

    def full_spec(self) -> Any:
        """Return the `TrainingSpec` of a training that the memory model describes, with its stages, which have names.

        Raises:
            ValueError: as for `spec`.
        """
        assert self.model is not None and not isinstance(self.plan, str)
        stages: dict[str, Any] = {}
        if self.pipeline is not None:
            assert self.pipeline.cuts is not None
            stages = {
                "first_blocks": [int(cut.rpartition(".")[2]) for cut in self.pipeline.cuts],
                "pipeline_schedule": self.pipeline.schedule,
                "num_micro_batches": min(self.pipeline.num_micro_batches, self.batch["sequences"]),
            }
        return self.spec(self.model, self.mesh, plan=self.plan, **stages)


def axis_size(mesh: _plan.Mesh, axis: str) -> int:
    """Return the number of ranks along an axis; 1 if the mesh does not have the axis."""
    return mesh.size(axis) if mesh.has_axis(axis) else 1


def load_file(path: Path) -> Any:
    """Return the value of a YAML or JSON file. Raises ValueError if the file does not exist or is neither."""
    return load(_read(path), f"file {path}", owner="estimate", key="key", advice="write 'model: ...' and 'mesh: ...'")


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'; give the path of an existing file.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); give a YAML or JSON file.") from error


def read_config(config: Any, folder: Path, layout: str | None = None) -> Training:
    """Return the training that a configuration describes.

    Args:
        config: the content of the file, a mapping.
        folder: the folder to which paths in `config` are relative.
        layout: replaces the configuration's mesh or layout; None: it does not.

    Raises:
        ValueError: the configuration is not valid.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the configuration is {config!r}; give a mapping with {', '.join(_KEYS)}.")
    if layout is not None:
        config = {**{key: value for key, value in config.items() if key != "mesh"}, "layout": layout}
    given = {"mesh", "layout"} & set(config)
    if unknown := [key for key in config if key not in _KEYS]:
        raise ValueError(f"the configuration has {', '.join(map(repr, unknown))}; the keys are {', '.join(_KEYS)}.")
    if missing := [key for key in ("model", "batch") if key not in config] + ["mesh"] * (not given):
        raise ValueError(f"the configuration has no {' and no '.join(map(repr, missing))}; give it.")
    if len(given) > 1:
        raise ValueError("the configuration has both 'mesh' and 'layout'; give one of them.")
    mesh = _mesh(config["mesh"]) if "mesh" in config else _mesh_of_layout(config["layout"])
    if axis_size(mesh, _CONTEXT_AXIS) > 1:
        raise ValueError(
            f"the mesh '{mesh}' has the axis '{_CONTEXT_AXIS}', for which there is no estimate; leave it out."
        )
    options = {key: value for key, value in config.items() if key not in _NOT_OPTIONS}
    if options.get("optimizer_in_backward") in (True, "rows") and options.get("precision") == "16-mixed":
        raise ValueError(
            "optimizer_in_backward is not supported with precision 16-mixed, whose gradient scaler decides after "
            "the backward whether to step; use bf16-mixed, or leave optimizer_in_backward out."
        )
    if not isinstance(options.get("sequence_parallel", False), bool):
        raise ValueError(f"'sequence_parallel' is {options['sequence_parallel']!r}; give true or false.")
    if not isinstance(options.get("offload", "none"), str):
        raise ValueError(f"'offload' is {options['offload']!r}; give none or cpu.")
    plan = _plan_of(config.get("plan", "auto"), folder)
    pipeline = _pipeline(config, mesh)
    model, hugging_face = _model(config["model"], folder)
    if pipeline is not None and hugging_face is None:
        raise ValueError(
            "'feed_forward' is one MLP, which cannot be divided into pipeline stages; give a model of Hugging Face, or "
            "leave the pipeline out."
        )
    if pipeline is not None and options.get("optimizer_in_backward") == "rows":
        raise ValueError(
            "optimizer_in_backward: rows is not supported with pipelines, whose stages accumulate full gradients over "
            "micro-batches; use true, or leave one of the two out."
        )
    batch = _sizes("batch", config["batch"], ("sequences", "tokens"), needs_all=True)
    return Training(model, hugging_face, mesh, plan, batch, options, pipeline)


def _plan_of(value: Any, folder: Path) -> _plan.Plan | str | None:
    if value == "auto":
        return None
    if value == HUGGING_FACE:
        return HUGGING_FACE
    if isinstance(value, str):
        value = load(_read(folder / value), f"file {value}")
    if not isinstance(value, Mapping):
        raise ValueError(
            f"'plan' is {value!r}; give auto, huggingface, a mapping from pattern to style, or the path of one."
        )
    return from_mapping(value)


def _mesh(value: Any) -> _plan.Mesh:
    if isinstance(value, Mapping):
        return _plan.Mesh(list(_sizes("mesh", value, (PIPELINE_AXIS, *_AXES)).items()))
    return _plan.Mesh.parse(str(value))


def _mesh_of_layout(value: Any) -> _plan.Mesh:
    if not isinstance(value, str):
        raise ValueError(f"'layout' is {value!r}; give text such as 'pp2,dp2,tp2'.")
    sizes = Sizes.parse(value)
    axes = {axis: getattr(sizes, axis) for axis in (PIPELINE_AXIS, *_AXES, _CONTEXT_AXIS)}
    if AUTO in axes.values():
        raise ValueError(
            f"layout {value!r} leaves a size to the number of devices, which an estimate does not have; give numbers."
        )
    if sizes.expert_parallel > 1:
        raise ValueError(
            f"layout {value!r} has expert-parallel ranks, for which there is no estimate of a configuration; leave out "
            "'ep', or estimate the model by its import path (weft estimate --module)."
        )
    return _plan.Mesh([(axis, size) for axis, size in axes.items() if size > 1])


def _pipeline(config: Mapping[str, Any], mesh: _plan.Mesh) -> PipelineOptions | None:
    num_ranks = axis_size(mesh, PIPELINE_AXIS)
    given = [key for key in _PIPELINE_KEYS if key in config]
    if num_ranks == 1:
        if given:
            raise ValueError(
                f"the configuration has {given[0]!r} for one pipeline rank; give a layout with pp, such as 'pp2,tp2', "
                "or leave it out."
            )
        return None
    cuts: Any = config.get("pipeline_cuts")
    is_auto = cuts == AUTO
    if not is_auto and not (isinstance(cuts, list) and all(isinstance(cut, str) for cut in cuts)):
        raise ValueError(
            f"'pipeline_cuts' is {cuts!r} for {num_ranks} pipeline ranks; give auto, or the names of the first module "
            "of each stage but the first, such as [model.layers.16]."
        )
    if not is_auto and (len(cuts) + 1) % num_ranks != 0:
        raise ValueError(
            f"'pipeline_cuts' makes {len(cuts) + 1} stages for {num_ranks} pipeline ranks; give cuts for {num_ranks} "
            "stages or a multiple."
        )
    schedule = config.get("pipeline_schedule", "1f1b")
    if schedule not in _plan.SCHEDULES:
        raise ValueError(f"'pipeline_schedule' is {schedule!r}; give one of {', '.join(_plan.SCHEDULES)}.")
    num_micro_batches = config.get("num_micro_batches", 2 * num_ranks)
    if not _is_size(num_micro_batches) or not 1 <= num_micro_batches <= _MAX_MICRO_BATCHES:
        raise ValueError(
            f"'num_micro_batches' is {num_micro_batches!r}; give a whole number from 1 to {_MAX_MICRO_BATCHES}."
        )
    return PipelineOptions(num_ranks, None if is_auto else tuple(cuts), schedule, num_micro_batches)


def _sizes(what: str, value: Any, names: tuple[str, ...], needs_all: bool = False) -> dict[str, int]:
    is_fitting = isinstance(value, Mapping) and (set(value) == set(names) if needs_all else set(value) <= set(names))
    if not is_fitting or not all(_is_size(size) for size in value.values()):
        raise ValueError(f"'{what}' is {value!r}; give whole numbers for {', '.join(names)}.")
    return dict(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62


def _model(
    value: Any, folder: Path
) -> tuple[_plan.FeedForwardModel | _plan.DecoderModel | None, Mapping[str, Any] | None]:
    """Return (the input of the memory model, the Hugging Face configuration), each None if there is none."""
    if isinstance(value, str):
        value = load_file(folder / value)  # JSON is YAML
    if isinstance(value, Mapping) and set(value) == {"feed_forward"}:
        sizes = value["feed_forward"]
        try:
            return _plan.FeedForwardModel(**sizes), None
        except TypeError as error:
            raise ValueError(
                f"'feed_forward' is {sizes!r}; give dim and hidden_dim, and optionally gated (default: true) and bias "
                "(default: false)."
            ) from error
    if isinstance(value, Mapping) and ("model_type" in value or "hidden_size" in value):
        config = {"model_type": "llama", **value}
        return decoder_of(config), config
    raise ValueError(
        f"'model' is {value!r}; give the path of a Hugging Face config.json, its content, or "
        "feed_forward: {dim: ..., hidden_dim: ...}."
    )


def decoder_of(config: Mapping[str, Any]) -> _plan.DecoderModel | None:
    """Return the memory model's decoder for a configuration of Hugging Face.

    None: another architecture, or the configuration sets `mlp_bias` or, for llama, `attention_bias`.

    Raises:
        ValueError: a size is missing or is not a whole number from 1.
    """
    model_type = config["model_type"]
    has_other_biases = config.get("mlp_bias") or (model_type == "llama" and config.get("attention_bias"))
    if model_type not in DECODERS or has_other_biases:
        return None

    def size(name: str, default: int | None = None) -> int:
        value: int = config.get(name, default)
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
