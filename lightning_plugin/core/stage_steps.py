"""Runs the steps of a LightningModule in stages: once for each micro-batch, on every stage.

Every stage runs the module's own step up to the call of the divided module; only the last stage runs the rest,
combines the logs and results of the micro-batches, and broadcasts them to all stages. The schedule, including
backwards, runs in `training_step`. The Trainer then zeroes gradients and runs the backward of the returned loss, which
installs the gradients that the schedule has computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft._plugin.deferred_gradients import DeferredGradients
from weft._plugin.in_backward import is_overridden
from weft._plugin.stage_metrics import StageMetrics
from weft._plugin.staged_module import attach_trainer
from weft._plugin.step_logs import StepLogs
from weft._plugin.step_outputs import broadcast_serialized, join_outputs, picklable_error, serialize

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft.strategy.data_parallel import GradientReducer
    from weft.strategy.pipeline.last_stage_modules import LastStageModules

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class StageSteps:
    """The steps of one run. Until `end`, `example_input_array` is None, so that model summaries do not call the module.

    engine: the strategy's engine, which has divided the model.
    module: the LightningModule, on its final device.
    last_stage_modules: the modules outside of the divided one.
    is_fitting: whether the run trains; training steps then average the gradients of `last_stage_modules`.
    """

    def __init__(self, engine: Engine, module: Any, last_stage_modules: LastStageModules, is_fitting: bool) -> None:
        self._engine = engine
        self.pipeline = engine.stages.existing_pipeline()
        self.module = module
        self.last_stage_modules = last_stage_modules
        self._example = module.example_input_array
        if self._example is not None:
            module.example_input_array = None
        self.logs = StepLogs(module)
        excluded = [] if self.pipeline.model is module else self.pipeline.model.modules()
        self.metrics = StageMetrics(module, excluded, self._broadcast_from_last_stage)
        if self.pipeline.model is module:
            attach_trainer(module)
        self._deferred_gradients: DeferredGradients | None = None
        self._reducer = self._reducer_outside_stages() if is_fitting else None

    def _reducer_outside_stages(self) -> GradientReducer | None:
        """Return a reducer for parameters outside of the stages, which FSDP2 does not reduce; None: none is needed."""
        parameters = list(self.last_stage_modules.parameters.values())
        if not parameters or not self._engine.data_axes.shards_parameters:
            return None
        from weft.strategy.data_parallel import GradientReducer

        return GradientReducer(torch.nn.ParameterList(parameters), self._engine.data_axes.group)

    def end(self) -> None:
        """End the steps; `compute` of metrics stays replaced until `remove_metrics`."""
        if self._reducer is not None:
            self._reducer.remove()
        if self._example is not None:
            self.module.example_input_array = self._example
        self._reducer = self._example = self._deferred_gradients = None

    def remove_metrics(self) -> None:
        """Restore the metrics' own `compute`."""
        self.metrics.remove()

    def run(self, loop: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step for each micro-batch of a batch; return the combined result, on every stage. Collective.

        Args:
            loop: "training", which also runs backwards, "validation", "test" or "prediction".
            step: the module's step of this loop.
            args, kwargs: the step's arguments; the batch is the first.
        """
        self._engine.stages.check_batch(loop, args[0])
        options, pipeline = self._engine.options, self.pipeline
        micro_batches = pipeline.split(args[0], options.split_batch)
        run = _MicroBatchStep(self, micro_batches, lambda micro_batch: step(micro_batch, *args[1:], **kwargs))
        loss = None
        with self.logs.recording(), self.metrics.local_only():
            if loop == "training":
                loss = self._run_schedule(run)
            else:
                run.outputs = dict(enumerate(pipeline.evaluate(args[0], run, split=run.split)))
        sizes = [_num_samples(micro_batch) for micro_batch in run.micro_batches]
        # Predictions are not weighted: their batches may lack the entries that micro_batch_weight reads.
        weights = run.weights(None if loop == "prediction" else options.micro_batch_weight, sizes)
        logged, output, dtype = self._broadcast_from_last_stage(
            lambda: (self.logs.combine(weights, sizes), run.join_results(sizes, weights), run.loss_dtype)
        )
        self.logs.replay(logged)
        if loss is None:
            return output
        assert self._deferred_gradients is not None
        loss = self._deferred_gradients.attach_to_loss(loss.to(dtype))
        return {"loss": loss, **output} if isinstance(output, dict) else loss

    def _run_schedule(self, run: _MicroBatchStep) -> Tensor:
        module, trainer = self.module, self.module.trainer
        # The Trainer divides the loss by accumulate_grad_batches; an overridden backward may scale it by any factor.
        # With a gradient scaler it is not overridden.
        scale = None
        if not is_overridden("backward", module, "LightningModule"):
            scale = self._engine.loss_scale / trainer.accumulate_grad_batches
        self._deferred_gradients = DeferredGradients(
            (parameter for parameter in module.parameters() if parameter.requires_grad),
            is_first=trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0,
            keeps_earlier_until_zeroed=_zeroing_is_observed(trainer),
            scale=scale,
        )
        weight = self._engine.options.micro_batch_weight
        options: dict[str, Any] = {} if weight is None else {"weight": weight}
        if scale is not None:
            options["scale"] = scale
        stepper = self._engine.in_backward.stepper
        with self._deferred_gradients.computing():
            reducer = self._reducer
            paused = reducer.paused() if reducer is not None else contextlib.nullcontext()
            with self._engine.data_axes.without_sync(), paused:
                loss = self.pipeline.step(run.micro_batches, run.loss, split=run.split, stepper=stepper, **options)
            if reducer is not None:
                reducer.finish()
            if stepper is not None:  # the parameters outside of the stages
                stepper.step_gradients()
            return loss

    def _broadcast_from_last_stage(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on the last stage only; return its result, or raise its error, on every stage. Collective."""
        serialized = None
        if self.pipeline.has_last_stage:
            try:
                serialized = serialize((compute(), None))
            except Exception as error:
                serialized = serialize((None, picklable_error(error)))
        engine = self._engine
        value, failure = broadcast_serialized(serialized, engine.stages.group, self.pipeline.last_rank, engine.device)
        if failure is not None:
            raise failure
        return value


class _MicroBatchStep:
    """A module's step as the pipeline calls it, once or more for each micro-batch on every stage."""

    def __init__(self, steps: StageSteps, micro_batches: Sequence[Any], step: Callable[[Any], Any]) -> None:
        self.micro_batches = micro_batches
        self.outputs: dict[int, Any] = {}  # results by micro-batch, on the last stage only; in training, without losses
        self.loss_dtype = torch.get_default_dtype()
        self._steps = steps
        self._step = step
        self._idx_of = {id(micro_batch): idx for idx, micro_batch in enumerate(micro_batches)}

    def split(self, _batch: Any, _count: int) -> Sequence[Any]:
        return self.micro_batches

    def __call__(self, micro_batch: Any) -> Any:
        if id(micro_batch) not in self._idx_of:  # the full batch, because the step calls generate
            self.micro_batches, self._idx_of = [micro_batch], {id(micro_batch): 0}
        steps, idx = self._steps, self._idx_of[id(micro_batch)]
        with contextlib.ExitStack() as stack:
            if steps.pipeline.is_recording:
                stack.enter_context(steps.last_stage_modules.forbidding_use())
                stack.enter_context(restoring_state(steps.module))
            if not steps.pipeline.runs_last_stage:
                stack.enter_context(steps.metrics.updates_disabled())
            return steps.logs.run_micro_batch(idx, lambda: self._step(micro_batch))

    def loss(self, micro_batch: Any) -> Any:
        """Run the step; return its loss, and store the rest of its result in `outputs`."""
        output = self(micro_batch)
        if isinstance(output, dict):
            rest = {key: item for key, item in output.items() if key != "loss"}
            self.outputs[self._idx_of[id(micro_batch)]] = pytree.tree_map_only(Tensor, Tensor.detach, rest)
            output = output.get("loss")
        if not isinstance(output, Tensor) or output.numel() != 1:
            raise TypeError(
                f"pipeline: training_step returned a {type(output).__name__} for a micro-batch; return its loss, a "
                "tensor of one number, or a dict with the loss as 'loss': no micro-batch can be left out."
            )
        self.loss_dtype = output.dtype
        return output

    def weights(self, weight: Callable[[Any], float] | None, sizes: Sequence[int | None]) -> list[float]:
        """Return the weight of each micro-batch in logged values and in results."""
        if weight is not None:
            return [float(weight(micro_batch)) for micro_batch in self.micro_batches]
        return [1.0 if size is None else float(size) for size in sizes]

    def join_results(self, sizes: Sequence[int | None], weights: Sequence[float]) -> Any:
        """Return the step's result for the batch; in training, without the loss."""
        if not self.outputs:
            return None
        return join_outputs([self.outputs[idx] for idx in sorted(self.outputs)], sizes, weights)


@contextlib.contextmanager
def restoring_state(module: Any, restores_buffers: bool = True) -> Iterator[None]:
    """Afterwards, restore the numbers, strings, plain lists and buffers that are the module's own attributes.

    restores_buffers: whether in-place changes of buffers are undone; replaced buffers are restored in any case.
    """
    values = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    lists = {key: (value, list(value)) for key, value in vars(module).items() if type(value) is list}
    named_buffers = module._buffers.items() if restores_buffers else ()
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


def _num_samples(micro_batch: Any) -> int | None:
    from weft.strategy.pipeline.micro_batches import batch_size_of

    try:
        return batch_size_of(micro_batch)
    except ValueError:  # of a batch that only the user's split_batch can split
        return None


def _zeroing_is_observed(trainer: Any) -> bool:
    """Return whether hooks may read the gradients before they are zeroed, or the user's code zeroes them."""
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    if any(is_overridden(hook, trainer.lightning_module, "LightningModule") for hook in hooks):
        return True
    return any(is_overridden(hooks[0], callback, "Callback") for callback in trainer.callbacks)
