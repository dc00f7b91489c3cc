"""The Trainer's steps for a LightningModule whose model is divided into the stages of a pipeline."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft._plugin.deferred_gradients import DeferredGradients
from weft._plugin.in_backward import is_overridden
from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.optimizer_state import FullModel, parameter_names, unwrapped
from weft._plugin.pipeline_mixin import PipelineMixin
from weft._plugin.pipeline_target import PipelineTarget, find_target
from weft._plugin.stage_metrics import StageMetrics, names_of_metrics
from weft._plugin.staged_module import attach_trainer
from weft._plugin.step_logs import StepLogs
from weft._plugin.step_outputs import broadcast_serialized, join_outputs, picklable_error, serialize

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import TrainerMembers
    from weft.strategy.data_parallel import GradientReducer
    from weft.strategy.pipeline.last_stage_modules import LastStageModules
else:
    TrainerMembers = object

_FULL_NAMES = "_weft_full_names"
_STEP_OPTIONS = ("split_batch", "micro_batch_weight")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TrainerPipelineMixin(PipelineMixin, TrainerMembers):
    """Runs the module's own steps once for each micro-batch on every stage, up to the model's call on all but the last.

    The last stage combines the logs and results of the micro-batches and broadcasts them to all stages. The schedule
    runs in `training_step`, including backwards. The Trainer then zeroes gradients and calls its backward, which
    installs the gradients that the schedule has computed.
    """

    def _init_pipeline(self) -> None:
        super()._init_pipeline()
        self._check_options()
        self._target: PipelineTarget | None = None
        self._last_stage_modules: LastStageModules | None = None
        self._full_model: FullModel | None = None
        self._last_stage_reducer: GradientReducer | None = None
        self._step_logs: StepLogs | None = None
        self._deferred_gradients: DeferredGradients | None = None
        self._example: tuple[Any, Any] | None = None
        self._stage_metrics: StageMetrics | None = None

    def _check_options(self) -> None:
        owner, options = type(self).__name__, self._options
        name = options.pipeline_module
        for argument in _STEP_OPTIONS:
            value = getattr(options, argument)
            if value is not None and not callable(value):
                raise TypeError(f"{owner} got {argument}={value!r}, which cannot be called; pass a function.")
        if not options.has_stages:
            given = [n for n in ("pipeline_module", *_STEP_OPTIONS) if getattr(options, n) is not None]
            if given:
                raise ValueError(
                    f"{owner} got {given[0]} without stages; name the first module of each stage but the first in "
                    "pipeline_cuts."
                )
            return
        if name is not None and not isinstance(name, str):
            raise TypeError(
                f"{owner} got pipeline_module={name!r}; pass the name of the module that is cut, such as 'model', '' "
                "for the LightningModule itself, or leave it out."
            )
        if not self._save_distributed_checkpoint:
            raise ValueError(
                f"{owner} got save_distributed_checkpoint=False with pipeline_cuts, where no rank has the full model; "
                "leave it out, and consolidate the directory afterwards."
            )

    def _cut_into_stages(self, module: torch.nn.Module) -> None:
        from weft.strategy.pipeline import find_staged
        from weft.strategy.pipeline.last_stage_modules import LastStageModules, check_not_shared

        assert self._target is not None
        name, cuts = self._target.name, self._target.cuts
        inner = module.get_submodule(name)
        if find_staged(module) is None:
            check_not_shared(module, name)
            inner.__dict__[_FULL_NAMES] = tuple(parameter_names(inner).values())
        if _FULL_NAMES not in module.__dict__:  # once for each module around the one in stages
            module.__dict__[_FULL_NAMES] = _parameter_names_with(module, name, inner.__dict__[_FULL_NAMES])
        with restoring_state(module, has_buffers=False):
            self._cut_module(
                inner,
                self._options.pipeline_cuts if cuts is None else cuts,
                beside=names_of_metrics(module) if name == "" else (),
                forward=self._example_call(module, inner),
            )
        self._full_model = FullModel(module.__dict__[_FULL_NAMES], self.pipeline_group)
        self._last_stage_modules = LastStageModules(module, name, self.pipeline.has_last_stage)

    def _example_call(self, module: Any, inner: torch.nn.Module) -> Callable[[], Any] | None:
        """Return a function that calls a module with its `example_input_array`; None if it has none."""
        from weft.strategy.pipeline.auto_cuts import call_with

        example = module.example_input_array
        if example is None:
            return None
        function = module if is_overridden("forward", module, "LightningModule") else inner

        def call() -> Any:
            with self.precision_plugin.forward_context():
                return call_with(function, self.precision_plugin.convert_input(example))

        return call

    def _convert_before_cutting(self) -> None:
        """Convert the model's dtype before the cut, at which other stages record the dtypes of layers.

        Models with deferred or meta parameters are built in their final dtype.
        """
        from weft.strategy.deferred import is_deferred

        if not any(parameter.is_meta or is_deferred(parameter) for parameter in self.model.parameters()):
            self.model = self.precision_plugin.convert_module(self.model)

    @contextlib.contextmanager
    def _with_groups_of_all_stages(self) -> Iterator[None]:
        """Inside, the user's code that makes optimizers sees a parameter for each one of other stages."""
        if self._pipeline is None:
            yield
            return
        from weft.strategy.sharding.remote_layers import placeholder_parameters

        with placeholder_parameters(self.model, self.root_device) as placeholders:
            yield
        ids = {id(placeholder) for placeholder in placeholders}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
            for placeholder in placeholders:
                optimizer.state.pop(placeholder, None)
            if any(cls.__name__ == "LBFGS" for cls in type(optimizer).__mro__):
                raise ValueError(
                    f"pipeline_cuts: {type(optimizer).__name__} searches along the gradient of all parameters, and "
                    "each stage has some of them; take an optimizer that updates each by itself."
                )

    def _setup_steps(self, module: Any) -> None:
        """Prepare for steps; call it once the module is on its final device.

        `_end_steps` undoes this, except for metrics, whose values stay available on every stage.
        """
        self._end_steps()
        if self._stage_metrics is not None:
            self._stage_metrics.remove()
        if module.example_input_array is not None:  # model summaries would call the model with it
            self._example = (module, module.example_input_array)
            module.example_input_array = None
        self._step_logs = StepLogs(module)
        excluded = [] if self.pipeline.model is module else self.pipeline.model.modules()
        self._stage_metrics = StageMetrics(module, excluded, self._broadcast_from_last_stage)
        if self.pipeline.model is module:
            attach_trainer(module)
        assert self._last_stage_modules is not None
        parameters = list(self._last_stage_modules.parameters.values())
        if parameters and self._is_fitting and self.data_axes.shards_parameters:
            from weft.strategy.data_parallel import GradientReducer

            # FSDP2 shards only the stages; gradients of the parameters beside them are averaged here.
            self._last_stage_reducer = GradientReducer(torch.nn.ParameterList(parameters), self.data_group)

    def _end_steps(self) -> None:
        if self._last_stage_reducer is not None:
            self._last_stage_reducer.remove()
        if self._example is not None:
            self._example[0].example_input_array = self._example[1]
        self._step_logs = self._last_stage_reducer = self._example = self._deferred_gradients = None

    def _run_in_stages(self, kind: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of the module's steps for a batch; return the result that one device would have, on every stage."""
        with self.pipeline.failures.report_failures():
            return self._run_micro_batches(kind, step, args, kwargs)

    def _run_micro_batches(
        self, kind: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_batch_of_stages(kind, args[0])
        options, pipeline = self._options, self.pipeline
        micro_batches = pipeline.split(args[0], options.split_batch)
        run = _MicroBatchStep(self, micro_batches, lambda micro_batch: step(micro_batch, *args[1:], **kwargs))
        loss = None
        step_logs, stage_metrics = self._step_logs, self._stage_metrics
        assert step_logs is not None and stage_metrics is not None
        with step_logs.recording(), stage_metrics.local_only():
            if kind == "training":
                loss = self._run_schedule(run)
            else:
                run.outputs = dict(enumerate(pipeline.evaluate(micro_batches, run, split=run.split)))
        sizes = [_num_samples(micro_batch) for micro_batch in micro_batches]
        # Predictions are not weighted: their batches may lack the entries that micro_batch_weight reads.
        weights = run.weights(None if kind == "prediction" else options.micro_batch_weight, sizes)
        logged, output, dtype = self._broadcast_from_last_stage(
            lambda: (step_logs.combined(weights, sizes), run.joined(sizes, weights), run.loss_dtype)
        )
        step_logs.replay(logged)
        if loss is None:
            return output
        assert self._deferred_gradients is not None
        loss = self._deferred_gradients.attach_to_loss(loss.to(dtype))
        return {"loss": loss, **output} if isinstance(output, dict) else loss

    def _run_schedule(self, run: _MicroBatchStep) -> Tensor:
        module, pipeline = self.lightning_module, self.pipeline
        trainer = module.trainer
        # The Trainer divides the loss by this number; the factor of an overridden backward is unknown.
        scale = None if is_overridden("backward", module, "LightningModule") else 1 / trainer.accumulate_grad_batches
        self._deferred_gradients = DeferredGradients(
            (parameter for parameter in module.parameters() if parameter.requires_grad),
            is_first=trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0,
            keeps_earlier_until_zeroed=_zeroing_is_observed(trainer),
            scale=scale,
        )
        weight = self._options.micro_batch_weight
        options: dict[str, Any] = {} if weight is None else {"weight": weight}
        if scale is not None:
            options["scale"] = scale
        with self._deferred_gradients.computing():
            reducer = self._last_stage_reducer
            with self.data_axes.without_sync(), reducer.paused() if reducer is not None else contextlib.nullcontext():
                loss = pipeline.step(run.micro_batches, run.loss, split=run.split, **options)
            if reducer is not None:
                reducer.finish()
            return loss

    def _broadcast_from_last_stage(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on the last stage only; return its result, or raise its error, on every stage. Collective."""
        serialized = None
        if self.pipeline.has_last_stage:
            try:
                serialized = serialize((compute(), None))
            except Exception as error:
                serialized = serialize((None, picklable_error(error)))
        value, failure = broadcast_serialized(
            serialized, self.pipeline_group, self.pipeline.last_rank, self.root_device
        )
        if failure is not None:
            raise failure
        return value

    def _check_stage_support(self, trainer: Any) -> None:
        """Raise ValueError for settings that stages do not support, before the cut; find the module to cut."""
        from weft.strategy.pipeline.auto_cuts import auto_of, num_stages_of

        self._check_no_scaler()
        module = trainer.lightning_module
        name = type(module).__name__
        if trainer.state.fn == "fit" and not module.automatic_optimization:
            raise ValueError(
                f"pipeline_cuts: {name} optimizes manually, and the schedule decides when a pipeline's backwards run; "
                "let the Trainer optimize (automatic_optimization=True), or use Fabric and its pipeline_step."
            )
        for step in STEPS:
            if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
                raise ValueError(
                    f"pipeline_cuts: {name}.{step} takes a dataloader_iter, and a pipeline cuts batches into "
                    "micro-batches; take (batch, batch_idx)."
                )
        options = self._options
        auto, num_stages = auto_of(options.pipeline_cuts), 0
        if auto is not None:
            num_stages = num_stages_of(auto, options.pipeline_schedule, self.device_mesh[PIPELINE_AXIS].size())
        cuts = None if auto is not None else options.pipeline_cuts
        self._target = find_target(type(self).__name__, module, options.pipeline_module, cuts, num_stages)


class _MicroBatchStep:
    """A module's step as the pipeline calls it, once or more for each micro-batch and stage."""

    def __init__(self, strategy: Any, micro_batches: Sequence[Any], step: Callable[[Any], Any]) -> None:
        self.micro_batches = micro_batches
        self.outputs: dict[int, Any] = {}  # on the last stage: the step's results without losses, by micro-batch
        self.loss_dtype = torch.get_default_dtype()
        self._strategy = strategy
        self._step = step
        self._idx_of = {id(micro_batch): idx for idx, micro_batch in enumerate(micro_batches)}

    def split(self, _batch: Any, _count: int) -> Sequence[Any]:
        return self.micro_batches

    def __call__(self, micro_batch: Any) -> Any:
        strategy, idx = self._strategy, self._idx_of[id(micro_batch)]
        with contextlib.ExitStack() as stack:
            if strategy.pipeline.is_recording:
                stack.enter_context(strategy._last_stage_modules.forbidding_use())
                stack.enter_context(restoring_state(strategy.lightning_module))
            if not strategy.pipeline.runs_last_stage:
                stack.enter_context(strategy._stage_metrics.updates_disabled())
            return strategy._step_logs.run_micro_batch(idx, lambda: self._step(micro_batch))

    def loss(self, micro_batch: Any) -> Any:
        """Run the step; return its loss, and keep the rest of its result in `outputs`."""
        output = self(micro_batch)
        if isinstance(output, dict):
            rest = {key: item for key, item in output.items() if key != "loss"}
            self.outputs[self._idx_of[id(micro_batch)]] = pytree.tree_map_only(Tensor, Tensor.detach, rest)
            output = output.get("loss")
        if not isinstance(output, Tensor) or output.numel() != 1:
            raise TypeError(
                f"pipeline: training_step gave a {type(output).__name__} for a micro-batch; give its loss, a tensor of "
                "one number, or a dict with it as 'loss': no micro-batch can be left out."
            )
        self.loss_dtype = output.dtype
        return output

    def weights(self, weight: Callable[[Any], float] | None, sizes: Sequence[int | None]) -> list[float]:
        """Return the weight of each micro-batch in logged values."""
        if weight is not None:
            return [float(weight(micro_batch)) for micro_batch in self.micro_batches]
        return [1.0 if size is None else float(size) for size in sizes]

    def joined(self, sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
        """Return the step's result for the batch, without the loss."""
        if not self.outputs:
            return None
        return join_outputs([self.outputs[idx] for idx in sorted(self.outputs)], sizes, weights)


@contextlib.contextmanager
def restoring_state(module: Any, has_buffers: bool = True) -> Iterator[None]:
    """Restore the module's own numbers, strings, plain lists and, with `has_buffers`, buffers afterwards."""
    values = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    lists = {key: (value, list(value)) for key, value in vars(module).items() if type(value) is list}
    named_buffers = module._buffers.items() if has_buffers else ()
    buffers = {key: buffer.clone() for key, buffer in named_buffers if buffer is not None}
    originals = dict(module._buffers)
    try:
        yield
    finally:
        vars(module).update(values)
        for key, (own, before) in lists.items():
            own[:] = before
            vars(module)[key] = own
        module._buffers.update(originals)
        with torch.no_grad():
            for key, before in buffers.items():
                if not torch.equal(originals[key], before):
                    originals[key].copy_(before)


def _parameter_names_with(module: torch.nn.Module, name: str, inner: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a module's parameters, in order; `inner`: those in its submodule `name` before the cut."""
    from weft.strategy.recognition.assignments import join

    names: list[str] = []
    for prefix, each in module.named_modules():
        if prefix == name:
            names += [join(name, own) for own in inner]
        elif not prefix.startswith(f"{name}."):
            names += [unwrapped(join(prefix, own)) for own, _ in each.named_parameters(recurse=False)]
    return tuple(dict.fromkeys(names))


def _num_samples(micro_batch: Any) -> int | None:
    from weft.strategy.pipeline.micro_batches import batch_size_of

    try:
        return batch_size_of(micro_batch)
    except ValueError:  # only the user's split_batch knows the samples of such a batch
        return None


def _zeroing_is_observed(trainer: Any) -> bool:
    """Return whether hooks see the gradients before they are zeroed, or the user's code zeroes them."""
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    if any(is_overridden(hook, trainer.lightning_module, "LightningModule") for hook in hooks):
        return True
    return any(is_overridden(hooks[0], callback, "Callback") for callback in trainer.callbacks)
