"""Counts parameters, gradients and optimizer states of any model of Hugging Face's transformers, rank by rank.

The model is built on the meta device, the plan assigns its styles as `parallelize` would, and the shards are counted,
without processes and weights. Recognising and verifying layers takes the same time and memory as in training (see
`weft.strategy.recognition.probe`).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from weft.strategy import _plan
from weft.strategy.apply import parameter_dims
from weft.strategy.estimate.config import PIPELINE_AXIS, Training, axis_size
from weft.strategy.estimate.stages import schedule_of
from weft.strategy.optimizers.state_format import LOW_DTYPES, StateFormat, is_small
from weft.strategy.optimizers.state_shards import scale_shape
from weft.strategy.pipeline.auto_cuts import AutoCuts, num_stages_of
from weft.strategy.pipeline.choose import choose_cuts
from weft.strategy.pipeline.staged_model import StagedModel
from weft.strategy.pipeline.stages import ANY_STAGE, Layers, find_layers
from weft.strategy.plan import Plan, Rules
from weft.strategy.verification.evidence import store_rehearsal

_AUTO_MODELS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "AutoModelForCausalLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "AutoModelForSeq2SeqLM",
    "MODEL_FOR_MASKED_LM_MAPPING": "AutoModelForMaskedLM",
}
_CATEGORIES = ("parameters", "gradients", "optimizer_state")


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The result of `state_of_ranks`.

    Attributes:
        num_parameters: elements of the model's parameters; tied parameters count once.
        usages: bytes of "parameters" (with buffers), "gradients" and "optimizer_state" on a data-parallel rank, by
            pipeline rank, then tensor-parallel rank.
    """

    num_parameters: int
    usages: tuple[dict[str, int], ...]


def state_of_ranks(training: Training) -> ModelState:
    """Return the bytes of parameters, buffers, gradients and optimizer states on each rank of a training.

    Raises:
        ValueError: transformers cannot build the model, or the plan or the pipeline's cuts do not fit it.
    """
    assert training.hugging_face is not None
    tp_size, num_pipeline_ranks = axis_size(training.mesh, "tensor_parallel"), axis_size(training.mesh, PIPELINE_AXIS)
    full_model = build_on_meta(training.hugging_face)
    num_parameters = sum(parameter.numel() for parameter in full_model.parameters())
    plan = Plan(cast("Rules", "auto" if training.plan is None else training.plan))
    layers = None
    if training.pipeline is not None:
        assert training.pipeline.cuts is not None
        layers = find_layers(full_model, training.pipeline.cuts)
    costs = _Costs(training)
    usages = []
    for pipeline_rank in range(num_pipeline_ranks):
        model = full_model if pipeline_rank == 0 else build_on_meta(training.hugging_face)
        trunk_parameters: set[int] = set()
        if layers is not None:
            if tp_size > 1:
                store_rehearsal(model)  # as `Pipeline` does
            trunk_parameters = _keep_stages(model, layers, _stages_of(training, pipeline_rank))
        dims = parameter_dims(model, plan.assign(model, tp_size))
        for tp_rank in range(tp_size):
            shards = _Shards(dims, tp_size, tp_rank, axis_size(training.mesh, "data_parallel"), trunk_parameters)
            usages.append(_usage(model, shards, costs))
    return ModelState(num_parameters, tuple(usages))


def with_chosen_cuts(training: Training) -> Training:
    """Return a training whose pipeline has named cuts, chosen as `AutoCuts` without an example chooses them.

    A training that has no pipeline, or whose cuts have names already, is returned unchanged.

    Raises:
        ValueError: transformers cannot build the model, or it has fewer layers with parameters than stages.
    """
    pipeline = training.pipeline
    if pipeline is None or pipeline.cuts is not None:
        return training
    assert training.hugging_face is not None
    num_stages = num_stages_of(AutoCuts(), pipeline.schedule, pipeline.num_ranks)
    cuts = choose_cuts(build_on_meta(training.hugging_face), num_stages).cuts
    return dataclasses.replace(training, pipeline=dataclasses.replace(pipeline, cuts=cuts))


def build_on_meta(config: Mapping[str, Any]) -> nn.Module:
    """Return the model of `build_model` on the meta device."""
    with torch.device("meta"):
        return build_model(config)


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """Return the model that a configuration describes.

    Its class is the first of `architectures`, if transformers has that class; else the first that transformers has for
    the model_type, in this order: causal, sequence-to-sequence, masked language model, model without a head.

    Raises:
        ValueError: transformers is not installed, does not know the model, or cannot build it.
    """
    model_type = config["model_type"]
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"the memory of model_type {model_type!r} is counted on a model of transformers, which is not installed; "
            "install transformers, or give a configuration of llama, mistral or qwen2 without the plan huggingface."
        ) from error
    transformers.logging.set_verbosity_error()  # its warnings concern running the model
    options = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf_config = transformers.AutoConfig.for_model(model_type, **options)
            model: nn.Module = _model_class(transformers, hf_config)(hf_config)
            return model
    except Exception as error:  # transformers' own code may raise anything
        raise ValueError(
            f"transformers {transformers.__version__} cannot build a model of model_type {model_type!r} from the "
            f"configuration ({type(error).__name__}: {' '.join(str(error).split())[:300]}); correct the configuration."
        ) from error


def _model_class(transformers: Any, config: Any) -> Any:
    """Return a function that builds the model of a configuration."""
    names = config.architectures or ()
    if names and isinstance(cls := getattr(transformers, names[0], None), type) and issubclass(cls, nn.Module):
        return cls
    known = (auto for mapping, auto in _AUTO_MODELS.items() if type(config) in getattr(transformers, mapping))
    return getattr(transformers, next(known, "AutoModel")).from_config


def _stages_of(training: Training, pipeline_rank: int) -> list[int]:
    assert training.pipeline is not None
    rank_of = schedule_of(training.pipeline, training.pipeline.num_micro_batches).rank_of
    return [stage for stage, rank in enumerate(rank_of) if rank == pipeline_rank]


def _keep_stages(model: nn.Module, layers: Layers, stages: list[int]) -> set[int]:
    """Remove the layers of other stages in place; return the ids of the trunk's parameters, which no layer holds."""
    staged = StagedModel(model, layers, stages, torch.device("cpu"))
    local_layers = [name for name, stage in staged.layers.stage_of.items() if stage == ANY_STAGE or stage in stages]
    in_layers = {id(parameter) for name in local_layers for parameter in model.get_submodule(name).parameters()}
    return {id(parameter) for parameter in model.parameters()} - in_layers


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The shard of each parameter on one rank.

    dims: by the id of a parameter, the dim along which it is sharded over the tensor-parallel ranks; None: replicated.
    trunk_parameters: the ids of parameters that no layer of a pipeline stage holds; FSDP2 does not shard them.
    """

    dims: dict[int, int | None]
    tp_size: int
    tp_rank: int
    dp_size: int
    trunk_parameters: set[int]

    def shape(self, parameter: nn.Parameter) -> list[int]:
        """Return the shape of the shard on the rank, with FSDP2's padding."""
        shape = list(parameter.shape)
        dim = self.dims.get(id(parameter))
        if dim is not None:
            shape[dim] = _plan.shard_range(shape[dim], self.tp_size, self.tp_rank)[1]
        if shape and id(parameter) not in self.trunk_parameters:  # FSDP2 pads every rank's rows to those of the first
            shape[0] = -(-shape[0] // self.dp_size)
        return shape


class _Costs:
    """The bytes of a parameter by category, from the memory model: some for each element, some for each parameter.

    Those of low-precision states and split weights depend on the parameter's shape, and are computed here.
    """

    def __init__(self, training: Training) -> None:
        first, second = (self._parameter_bytes(training, num_elements) for num_elements in (1, 2))
        self._per_element = {name: second[name] - first[name] for name in _CATEGORIES}
        self._per_parameter = {name: first[name] - self._per_element[name] for name in _CATEGORIES}
        self.element_bytes = self._per_element["parameters"]
        options = training.options
        states, weights = (options.get(name, "float32") for name in ("optimizer_state", "master_weights"))
        self._format = StateFormat(states, weights)
        self._num_moments = self._per_element["optimizer_state"] // 4  # the measured parameters are small
        self._splits_small = options.get("precision") == "bf16-true" or axis_size(training.mesh, "data_parallel") > 1

    @staticmethod
    def _parameter_bytes(training: Training, num_elements: int) -> dict[str, int]:
        """Return the bytes of one parameter of `num_elements` by category, as half of an MLP with two parameters."""
        model = _plan.FeedForwardModel(dim=1, hidden_dim=num_elements, gated=False)
        spec = training.spec(model, _plan.Mesh(), activation_checkpointing="none")
        return {name: size // 2 for name, size in spec.predict(0)["step"].items()}

    def num_bytes(self, category: str, parameter: nn.Parameter, shape: Sequence[int]) -> int:
        """Return the bytes of a rank's shard, of this shape, of a parameter."""
        num_elements = math.prod(shape)
        if not self._format.is_usual:
            element_bytes, state_bytes = self._low_precision_bytes(parameter, shape)
            if category == "optimizer_state":
                return state_bytes + self._per_parameter[category]
            has_any = self._per_element[category] > 0  # gradients are not kept by steps in the backward
            return num_elements * element_bytes if has_any else 0
        return self._per_element[category] * num_elements + self._per_parameter[category]

    def _low_precision_bytes(self, parameter: nn.Parameter, shape: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of an element of a parameter, and the bytes of the states of a shard."""
        num_elements = math.prod(shape)
        low_dtype = LOW_DTYPES[self._format.weights]
        is_split = low_dtype is not None and (self._splits_small or not is_small(parameter))
        state_dtype = self._format.state_dtype(parameter)
        moment = num_elements * state_dtype.itemsize
        if state_dtype == torch.int8:
            moment += math.prod(scale_shape(tuple(shape))) * 4 if num_elements else 0
        states = self._num_moments * moment
        if low_dtype is not None and is_split:
            states += num_elements * low_dtype.itemsize
        return 2 if is_split else self.element_bytes, states


def _usage(model: nn.Module, shards: _Shards, costs: _Costs) -> dict[str, int]:
    usage = dict.fromkeys(_CATEGORIES, 0)
    for parameter in model.parameters():
        shape = shards.shape(parameter)
        if parameter.is_floating_point():
            usage["parameters"] += costs.num_bytes("parameters", parameter, shape)
        else:
            usage["parameters"] += math.prod(shape) * parameter.element_size()
        for name in ("gradients", "optimizer_state") if parameter.requires_grad else ():
            usage[name] += costs.num_bytes(name, parameter, shape)
    usage["parameters"] += sum(_buffer_bytes(buffer, costs.element_bytes) for buffer in model.buffers())
    return usage


def _buffer_bytes(buffer: torch.Tensor, parameter_bytes: int) -> int:
    """Return the bytes of a buffer, full on every rank; a floating element has 2 bytes if a parameter's has 2."""
    is_half = buffer.is_floating_point() and parameter_bytes == 2
    return buffer.numel() * (parameter_bytes if is_half else buffer.element_size())
