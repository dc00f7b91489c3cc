"""One rank's stages of a model, and the skeleton: a copy of the full model with fake tensors (see `recording`)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from weft.strategy.experts.stand_in import leave_out_experts
from weft.strategy.modules.activation_checkpointing import repeated_blocks
from weft.strategy.pipeline.fake_mode import FakeMode, is_recorded
from weft.strategy.pipeline.generation import GenerateCall, Generation
from weft.strategy.pipeline.layer_calls import intercept_calls, run_in_mode
from weft.strategy.pipeline.micro_batches import signature
from weft.strategy.pipeline.random_streams import preserving_random_state
from weft.strategy.pipeline.recording import Recording, record
from weft.strategy.pipeline.stages import ANY_STAGE, Layers
from weft.strategy.pipeline.trunk import ForwardExit, OtherPathError, StageRun
from weft.strategy.recognition.assignments import join
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.remote_layers import RemoteLayer, mark_copy

_KEY = "_weft_staged"
# Classes of attributes that cannot be copied, or are large.
_NOT_COPIED = (DeviceMesh, ProcessGroup, Dataset, DataLoader)


@dataclasses.dataclass(frozen=True)
class TiedParameter:
    """One parameter that several stages hold. `name_on`: one of its names on each of these stages."""

    name_on: dict[int, str]


class StagedModel:
    """Removes the layers of other ranks' stages from a model, in place, and runs its forward one stage at a time.

    model: RemoteLayers replace the layers that are on none of `stages`; names do not change.
    layers: the stage of each layer, and the trunk (the modules that call layers, and their lists and dicts of modules).
    stages: the stages of this rank.
    device: where the parameters will be, if they are not there yet.
    tied: the parameters that several stages share; each rank with one of these stages has its own copy.
    blocks: the names of the repeated blocks of the full model, on all stages.
    """

    def __init__(
        self, model: nn.Module, layers: Layers, stages: Sequence[int], device: torch.device | None = None
    ) -> None:
        self.model = model
        self.layers = layers
        self.stages = tuple(stages)
        self.tied = tied_parameters(model, self.layers)
        self.blocks = tuple(repeated_blocks(model))
        self._fake_mode = FakeMode()
        self._skeleton = _skeleton_of(model, self.layers, self._fake_mode, device)
        # By the ids of fake parameters. The code between layers may compute with any parameter.
        self._stage_of_parameter = {id(p): stage for _, p, stage in _parameters_with_stage(self._skeleton, self.layers)}
        self._local_parameters = [
            (fake, name) for name, fake, stage in _parameters_with_stage(self._skeleton, self.layers) if stage in stages
        ]
        # All layers, with RemoteLayers for those of other ranks' stages; empty until calls are intercepted.
        self._layer_modules: list[nn.Module] = []
        self._task: _Task | None = None
        self.generation: Generation | None = None  # the pipeline's, which sets it
        model.__dict__[_KEY] = self
        _remove_layers(model, self._skeleton, self.layers, stages)
        self._remove_parameters()
        for tied in self.tied:
            for stage in set(stages) & tied.name_on.keys():
                owner, _, name = tied.name_on[stage].rpartition(".")
                mark_copy(model.get_submodule(owner), name, is_first=stage == min(tied.name_on))
        _intercept_layer_calls(self._skeleton, self.layers)

    def stages_of_parameters(self) -> dict[nn.Parameter, set[int]]:
        """Return, for each parameter of this rank's stages, all stages that have it or a copy of it."""
        stages_of: dict[nn.Parameter, set[int]] = {}
        shared = {name: set(tied.name_on) for tied in self.tied for name in tied.name_on.values()}
        for name, parameter, stage in _parameters_with_stage(self.model, self.layers):
            if stage in self.stages:
                stages_of.setdefault(parameter, set()).update(shared.get(name, {stage}))
        return stages_of

    def names_of_copies(self) -> dict[str, str]:
        """Return, by the name of each copy of a tied parameter on this rank, the name of the first stage's copy."""
        return {
            tied.name_on[stage]: tied.name_on[min(tied.name_on)]
            for tied in self.tied
            for stage in self.stages
            if stage in tied.name_on
        }

    def intercept_layer_calls(self) -> None:
        """Intercept the layers' calls, by changing their classes.

        Call it after `parallelize` and `fully_shard`, which depend on the classes.
        """
        _intercept_layer_calls(self.model, self.layers)
        self._layer_modules = [self.model.get_submodule(name) for name in self.layers.stage_of]
        if not isinstance(self.model, _Root):
            self.model.__class__ = _root_class(type(self.model))

    def check_can_be_sharded(self, rank_of: Sequence[int]) -> None:
        """Raise ValueError if FSDP2 cannot shard the layers of a rank; the same on all ranks.

        FSDP2 replaces the parameters of each layer by shards of their own, so that a parameter that another layer of
        the rank or the code between layers has, too, would no longer be the same.

        Args:
            rank_of: the rank of each stage.
        """
        owners: dict[tuple[int, int], str] = {}  # by rank and id of the parameter
        of_layers: dict[int, str] = {}
        for name, stage in self.layers.stage_of.items():
            layer = self._skeleton.get_submodule(name)
            for parameter in layer.parameters() if stage != ANY_STAGE else ():
                of_layers[id(parameter)] = name
                other = owners.setdefault((rank_of[stage], id(parameter)), name)
                if self._skeleton.get_submodule(other) is not layer:
                    raise ValueError(
                        f"pipeline: the layers {other!r} and {name!r} of one rank share a parameter, and FSDP2 shards "
                        "each layer alone; move the cuts, or use a schedule such as '1f1b', so that they are on "
                        "different ranks, or replicate over the data-parallel ranks (zero_stage 0 or 1)."
                    )
        for name in self.layers.parameter_stages:
            layer_name = of_layers.get(id(self._skeleton.get_parameter(name)))
            if layer_name is not None:
                raise ValueError(
                    f"pipeline: the parameter {name!r} is also one of the layer {layer_name!r}, whose parameters FSDP2 "
                    "shards; use it inside of the layer only, or replicate over the data-parallel ranks (zero_stage 0 "
                    "or 1)."
                )

    def record_with(self, policy: MixedPrecisionPolicy) -> None:
        """Make the layers of recordings compute in the dtypes that FSDP2 gives to layers of stages with parameters."""

        def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _as_dtype((args, kwargs), policy.param_dtype)

        for name, stage in self.layers.stage_of.items():
            layer = self._skeleton.get_submodule(name)
            parameters = list(layer.parameters())
            if stage == ANY_STAGE or not parameters:
                continue
            for parameter in parameters if policy.param_dtype is not None else ():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(policy.param_dtype)
            if policy.cast_forward_inputs and policy.param_dtype is not None:
                layer.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)  # as FSDP2 does
            if policy.output_dtype is not None:
                layer.register_forward_hook(lambda module, args, output: _as_dtype(output, policy.output_dtype))

    @property
    def skeleton(self) -> nn.Module:
        """Return the skeleton, whose forward is recorded."""
        return self._skeleton

    @property
    def device(self) -> torch.device:
        """Return the device that this rank's stages compute on."""
        # A rank whose stages have no parameters computes where the skeleton's are.
        parameters = itertools.chain(self.model.parameters(), self._skeleton.parameters())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    @property
    def is_recording(self) -> bool:
        """Return whether a step is running only to record its call of the model, or to compare it with a recording."""
        return self._task is not None and (self._task.run is None or self._task.run.is_probe)

    @property
    def is_generating(self) -> bool:
        """Return whether the model's `generate` is running."""
        return self.generation is not None and self.generation.is_active

    @property
    def running_stage(self) -> int | None:
        """Return the stage whose part of a step is running; None: no step is running, or `is_recording`."""
        run = None if self._task is None else self._task.run
        return None if run is None or self.is_recording else run.stage

    def record(self, step: Any, micro_batch: Any) -> Recording:
        """Record the forward that `step(micro_batch)` calls; see `recording.record` for the errors."""
        task = _Task(None)
        self._sync_skeleton()
        with preserving_random_state(), self._preserving_buffers():
            self._run(task, step, micro_batch)
        assert task.recording is not None
        return task.recording

    def call_signature(self, step: Any, micro_batch: Any) -> Any:
        """Run `step(micro_batch)` up to its call of the model; return a hashable key of that call.

        The key has the arguments' signature, the autocast dtypes, the bool and string attributes of the trunk's
        modules, and each layer's `training`.
        """
        task = _Task(None, is_signature_only=True)
        with preserving_random_state():
            self._run(task, step, micro_batch)
        # Numbers are left out: with a counter among them, each call would have a new key and a new recording.
        modules = [self.model.get_submodule(name) for name in self.layers.trunk]
        flags = [
            (key, value) for module in modules for key, value in _flags(module).items() if type(value) in (bool, str)
        ]
        modes = [layer.training for layer in self._layer_modules]
        return (task.call_key, *flags, *modes)

    def _sync_skeleton(self) -> None:
        """Update the skeleton: the modes of the layers, and the plain attributes and the buffers of the trunk."""
        for name in self.layers.stage_of:
            self._skeleton.get_submodule(name).train(self.model.get_submodule(name).training)
        for name in self.layers.trunk:
            module, copied = self.model.get_submodule(name), self._skeleton.get_submodule(name)
            copied._buffers.update(module._buffers)
            copied.__dict__.update(_flags(module))

    @contextlib.contextmanager
    def _preserving_buffers(self) -> Iterator[None]:
        """Restore the trunk's buffers afterwards: forwards for recording or matching must not change them."""
        buffers = {id(b): b for name in self.layers.trunk for b in self.model.get_submodule(name)._buffers.values()}
        before = [(b, b._version, b.clone()) for b in buffers.values() if b is not None]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, version, value in before:
                    if buffer._version != version:
                        buffer.copy_(value)

    def layers_only_read(self, recording: Recording) -> list[str]:
        """Return the layers, of any stage, whose parameters the code between layers reads and which it never calls."""
        called = {event.callee for event in recording.events}
        return [
            name
            for name in self.layers.stage_of
            if name not in called
            and any(recording.idx_of(p) is not None for p in self._skeleton.get_submodule(name).parameters())
        ]

    def matches(self, recording: Recording, step: Any, micro_batch: Any) -> bool:
        """Return whether `step(micro_batch)` takes the recorded path.

        If the recorded forward read values of tensors between layers, the step runs up to the end of the model's call,
        and only layers without a stage are computed. Otherwise nothing runs: the path does not depend on values.
        """
        if not recording.read_values:
            return True
        probe = StageRun(recording, self.layers.num_stages, None)
        with preserving_random_state(), self._preserving_buffers(), contextlib.suppress(OtherPathError):
            self._run(_Task(probe), step, micro_batch)
        return probe.matches_recording

    def run(
        self,
        recording: Recording,
        stage: int,
        received: Sequence[Tensor],
        step: Any,
        micro_batch: Any,
        before_layers: Callable[[], None],
    ) -> tuple[Any, list[Tensor] | None]:
        """Run one stage's part of `step(micro_batch)`.

        Args:
            received: the values that cross the boundary before the stage.
            before_layers: called before the first layer of the stage.

        Returns:
            (the step's result, None) on the last stage, else (None, the values that cross the boundary after
            the stage).
        """
        run = StageRun(recording, stage, received, before_layers)
        for fake, name in self._local_parameters:
            if recording.idx_of(fake) is not None:
                run.add_value(fake, local_of(self.model.get_parameter(name)))
        result = self._run(_Task(run), step, micro_batch)
        is_last = stage == self.layers.num_stages - 1
        if (run.sent is None) != is_last:
            raise RuntimeError(
                f"pipeline: the step ended on stage {stage} of {self.layers.num_stages} "
                + ("by a call that belongs to a later one." if is_last else "without a call of a later stage's layer.")
            )
        if is_last and any(is_recorded(leaf) for leaf in pytree.tree_leaves(result)):
            raise RuntimeError(
                "pipeline: the step computed, after the call of the model, with a parameter or a "
                "value that is on an earlier stage; compute with it inside the forward, or hold the parameter in a "
                "module that is registered after the layers."
            )
        return result, run.sent

    def _run(self, task: _Task, step: Any, micro_batch: Any) -> Any:
        self._task = task
        try:
            result = step(micro_batch)
        except ForwardExit:
            result = None
        finally:
            self._task = None
        if task.num_calls != 1:
            raise RuntimeError(
                f"pipeline: the step called the model in stages {task.num_calls} times for a micro-batch; call it once."
            )
        return result

    def call(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the model's call: run a stage's part of its forward, or record or compare the call.

        After recording or comparing, ForwardExit ends the step. Outside of a step, a model in one stage runs as usual.
        """
        task = self._task
        if self.generation is not None and self.generation.is_open:
            if task is None:
                return self.generation.call(forward, args, kwargs)
            if task.is_signature_only and task.num_calls == 0:
                raise GenerateCall
            raise RuntimeError(
                "pipeline: the step calls generate after another call of the model, where only the last stage runs it; "
                "call generate first, or in a hook such as on_validation_batch_end."
            )
        if task is None:
            if self.layers.num_stages == 1:
                return forward(*args, **kwargs)
            raise RuntimeError(
                f"pipeline: a {type(self.model).__name__} in {self.layers.num_stages} stages was called outside of a "
                "pipeline's step; call it in a step of the LightningModule, or the function given to step or evaluate."
            )
        task.num_calls += 1
        if task.num_calls > 1:
            raise RuntimeError("pipeline: the step calls the model in stages twice for one micro-batch; call it once.")
        if task.is_signature_only:
            task.call_key = (signature((args, kwargs)), _autocast_dtypes())
            raise ForwardExit
        if task.run is None:
            task.recording = record(
                self._skeleton, self.layers.num_stages, self._fake_mode, self._stage_of_parameter, args, kwargs
            )
            raise ForwardExit
        if signature((args, kwargs)) != task.run.arguments:
            raise OtherPathError(
                "pipeline: the step called the model with other shapes, dtypes or numbers than were recorded for a "
                "micro-batch of these shapes; let them depend only on the shapes of the micro-batch."
            )
        output = run_in_mode(task.run, lambda: forward(*args, **kwargs))
        if task.run.is_probe:
            raise ForwardExit
        return task.run.with_values(output)

    def generate(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the model's `generate`, whose calls of the model run on all ranks."""
        assert self.generation is not None
        return self.generation.run(method, args, kwargs)

    def _remove_parameters(self) -> None:
        """Put fake tensors in place of the trunk's parameters that are on other stages."""
        for name, stage in self.layers.parameter_stages.items():
            if stage not in self.stages:
                module_name, _, parameter_name = name.rpartition(".")
                module = self.model.get_submodule(module_name)
                del module._parameters[parameter_name]
                module.__dict__[parameter_name] = self._skeleton.get_parameter(name)


def staged_model_of(model: nn.Module) -> StagedModel | None:
    """Return the StagedModel of a model; None: the model is not in stages."""
    return model.__dict__.get(_KEY)


def find_staged(module: nn.Module) -> tuple[str, StagedModel] | None:
    """Find a model in stages, which is `module` or inside it; return its name and its StagedModel, or None."""
    for name, inner in module.named_modules():
        if (staged := staged_model_of(inner)) is not None:
            return name, staged
    return None


@dataclasses.dataclass
class _Task:
    """The purpose of a step's call of the model.

    run: the stage to run; None: record the call, or with `is_signature_only` only its signature.
    recording: the result of recording the call.
    call_key: the result of computing only the call's signature.
    num_calls: how often the step has called the model.
    """

    run: StageRun | None
    recording: Recording | None = None
    num_calls: int = 0
    is_signature_only: bool = False
    call_key: Any = None


def _flags(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, on which the path of its forward may depend."""
    kinds = (bool, int, float, str, torch.device, torch.dtype)
    return {key: value for key, value in vars(module).items() if isinstance(value, kinds)}


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))


class _Root:
    """The first base of the class of a model in stages. The model's hooks run around this forward as usual."""


def _root_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a model in stages, with the signatures of the model's own class `cls`."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_KEY].call(functools.partial(cls.forward, self), args, kwargs)

    namespace: dict[str, Any] = {"__module__": cls.__module__, "forward": forward}
    own_generate: Any = getattr(cls, "generate", None)
    if own_generate is not None:

        @functools.wraps(own_generate)
        def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__[_KEY].generate(functools.partial(own_generate, self), args, kwargs)

        namespace["generate"] = generate
    return type(cls.__name__, (_Root, cls), namespace)


def _intercept_layer_calls(model: nn.Module, layers: Layers) -> None:
    for name, stage in layers.stage_of.items():
        intercept_calls(model.get_submodule(name), name, stage)


def _skeleton_of(model: nn.Module, layers: Layers, fake_mode: FakeTensorMode, device: torch.device | None) -> nn.Module:
    """Return a copy in which parameters and the layers' buffers are fake; the trunk's buffers are shared."""
    layer_buffers = [buffer for name in layers.stage_of for buffer in model.get_submodule(name).buffers()]
    skeleton = fake_copy(model, layer_buffers, fake_mode, device)
    leave_out_experts(skeleton)
    return skeleton


def fake_copy(
    model: nn.Module, buffers: Iterable[Tensor], fake_mode: FakeTensorMode, device: torch.device | None = None
) -> nn.Module:
    """Return a copy with fake tensors, on `device`, for parameters and the given buffers; it shares other buffers.

    Raises:
        ValueError: the model cannot be copied.
    """
    replaced = (*model.parameters(), *buffers)
    memo: dict[int, Any] = {id(tensor): fake_like(tensor, fake_mode, device) for tensor in replaced}
    memo |= {id(buffer): buffer for buffer in model.buffers() if id(buffer) not in memo}
    attributes = (value for module in model.modules() for value in vars(module).values())
    memo |= {id(value): value for value in attributes if isinstance(value, _NOT_COPIED)}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"pipeline: {type(model).__name__} cannot be copied ({error}), and every stage needs a copy of it without "
            "values; remove attributes that copy.deepcopy does not support."
        ) from error


def fake_like(tensor: Tensor, fake_mode: FakeTensorMode, device: torch.device | None = None) -> Tensor:
    """Return a fake tensor or parameter of the same shape and dtype on `device`; None: on the device of the tensor."""
    with fake_mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake


def _as_dtype(values: Any, dtype: torch.dtype | None) -> Any:
    """Return nested values with floating-point tensors in a dtype."""
    return pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value, values
    )


def tied_parameters(model: nn.Module, layers: Layers) -> list[TiedParameter]:
    """Return the parameters that several stages hold."""
    names_on_stages: dict[int, dict[int, str]] = {}  # by the parameter's id
    for name, parameter, stage in _parameters_with_stage(model, layers):
        if stage != ANY_STAGE:
            names_on_stages.setdefault(id(parameter), {}).setdefault(stage, name)
    return [TiedParameter(name_on) for name_on in names_on_stages.values() if len(name_on) > 1]


def _parameters_with_stage(model: nn.Module, layers: Layers) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield (name, parameter, stage) for the parameters of layers, under all their names, and of the trunk."""
    for layer, stage in layers.stage_of.items():
        for name, parameter in model.get_submodule(layer).named_parameters(remove_duplicate=False):
            yield join(layer, name), parameter, stage
    for name, stage in layers.parameter_stages.items():
        yield name, model.get_parameter(name), stage


def _remove_layers(model: nn.Module, skeleton: nn.Module, layers: Layers, stages: Sequence[int]) -> None:
    """Replace the layers that are on none of `stages` by RemoteLayers, in place."""
    for name, stage in layers.stage_of.items():
        if stage != ANY_STAGE and stage not in stages:
            parent_name, _, child_name = name.rpartition(".")
            parent = model.get_submodule(parent_name)
            parent._modules[child_name] = RemoteLayer(name, stage, skeleton.get_submodule(name))
