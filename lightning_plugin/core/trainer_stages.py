"""Divides a LightningModule, or a module in it, into pipeline stages; adapts optimizers, state dicts and steps."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from weft._plugin.in_backward import is_overridden
from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.optimizer_state import FullModel
from weft._plugin.stage_metrics import names_of_metrics
from weft._plugin.stage_steps import STEPS, StageSteps, restoring_state
from weft._plugin.staged_module import without_step_state
from weft.strategy.parameter_names import parameter_names, unwrapped

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from weft._plugin.engine import Engine
    from weft._plugin.stock_strategies import StockTrainerStrategy
    from weft.strategy.pipeline.last_stage_modules import LastStageModules
    from weft.strategy.pipeline.target import PipelineTarget

_FULL_NAMES = "_weft_full_names"
_STEP_OPTIONS = ("split_batch", "micro_batch_weight")


class TrainerStages:
    """Divides the model of a Trainer with the engine's `stages`, and runs the model's steps.

    The divided module is the LightningModule, or a module in it. Modules outside of it are on the last stage.

    Attributes:
        full_model: the names of the unsharded LightningModule's parameters, and the pipeline's group, for checkpoints;
            None: no module has been divided.

    Raises:
        ValueError, TypeError: an option that is invalid regardless of the number of devices.
    """

    def __init__(self, engine: Engine, strategy: StockTrainerStrategy) -> None:
        self._engine = engine
        self._strategy = strategy
        self._check_options()
        self.full_model: FullModel | None = None
        self._target: PipelineTarget | None = None
        self._last_stage_modules: LastStageModules | None = None
        self._steps: StageSteps | None = None

    def _check_options(self) -> None:
        owner, options = self._engine.name, self._engine.options
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
                f"{owner} got pipeline_module={name!r}; pass the name of the divided module, such as 'model', or '' "
                "for the LightningModule itself, or leave it out."
            )
        if not self._strategy._save_distributed_checkpoint:
            raise ValueError(
                f"{owner} got save_distributed_checkpoint=False with pipeline_cuts, where no rank has the full model; "
                "leave it out, and consolidate the directory afterwards."
            )

    def find_target(self, trainer: Any) -> None:
        """Find the module to divide; raise ValueError for settings of the Trainer that stages do not support."""
        from weft.strategy.pipeline.auto_cuts import auto_of, num_stages_of
        from weft.strategy.pipeline.target import find_target

        module = trainer.lightning_module
        name = type(module).__name__
        if self._engine.scaler is not None and is_overridden("backward", module, "LightningModule"):
            raise ValueError(
                f"pipeline_cuts: {name} overrides backward, and the precision scales losses, which pipelines do "
                "before it; use 'bf16-mixed' or '32-true', or leave out the override."
            )
        if trainer.state.fn == "fit" and not module.automatic_optimization:
            raise ValueError(
                f"pipeline_cuts: {name} optimizes manually, and the schedule decides when a pipeline's backwards run; "
                "let the Trainer optimize (automatic_optimization=True), or use Fabric and its pipeline_step."
            )
        for step in STEPS:
            if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
                raise ValueError(
                    f"pipeline_cuts: {name}.{step} takes a dataloader_iter, and a pipeline splits batches into "
                    "micro-batches; let the step take (batch, batch_idx)."
                )
        options = self._engine.options
        auto, num_stages = auto_of(options.pipeline_cuts), 0
        if auto is not None:
            num_stages = num_stages_of(auto, options.pipeline_schedule, self._engine.mesh[PIPELINE_AXIS].size())
        cuts = None if auto is not None else options.pipeline_cuts
        self._target = find_target(self._engine.name, module, options.pipeline_module, cuts, num_stages)

    def convert_before_division(self, model: nn.Module) -> nn.Module:
        """Return the model in its final dtype: at the division, each stage records the dtypes of other stages' layers.

        A model with meta parameters is returned unchanged: its parameters have the final dtype.
        """
        from weft.strategy.deferred import is_deferred

        if any(parameter.is_meta and not is_deferred(parameter) for parameter in model.parameters()):
            return model
        converted: nn.Module = self._engine.precision.convert_module(model)
        return converted

    def divide(self, module: nn.Module) -> None:
        """Divide the module that `find_target` has found in the LightningModule."""
        from weft.strategy.pipeline import find_staged
        from weft.strategy.pipeline.last_stage_modules import LastStageModules, check_not_shared

        assert self._target is not None
        name, cuts = self._target.name, self._target.cuts
        inner = module.get_submodule(name)
        if find_staged(module) is None:
            check_not_shared(module, name)
            inner.__dict__[_FULL_NAMES] = tuple(parameter_names(inner).values())
        if _FULL_NAMES not in module.__dict__:  # once for each LightningModule with this divided module
            module.__dict__[_FULL_NAMES] = _parameter_names_around(module, name, inner.__dict__[_FULL_NAMES])
        stages = self._engine.stages
        with restoring_state(module, restores_buffers=False):
            stages.divide(
                inner,
                cuts,
                beside=names_of_metrics(module) if name == "" else (),
                forward=self._example_call(module, inner),
            )
        self.full_model = FullModel(module.__dict__[_FULL_NAMES], stages.group)
        self._last_stage_modules = LastStageModules(module, name, stages.existing_pipeline().has_last_stage)

    def _example_call(self, module: Any, inner: nn.Module) -> Callable[[], Any] | None:
        """Return a function that runs a forward on the LightningModule's `example_input_array`; None: it has none.

        The forward is the LightningModule's or, if it defines none, that of the divided module `inner`.
        """
        from weft.strategy.pipeline.auto_cuts import call_with

        example = module.example_input_array
        if example is None:
            return None
        function = module if is_overridden("forward", module, "LightningModule") else inner
        precision = self._engine.precision

        def call() -> Any:
            with precision.forward_context():
                return call_with(function, precision.convert_input(example))

        return call

    @contextlib.contextmanager
    def placeholders_of_other_stages(self) -> Iterator[None]:
        """Inside, the model has a placeholder for each parameter of other stages; used while optimizers are created.

        Every stage thus builds the same parameter groups. Afterwards the placeholders are removed from the optimizers.
        Does nothing without a pipeline.

        Raises:
            ValueError: an optimizer of a pipeline's model is LBFGS.
        """
        if self._engine.pipeline is None:
            yield
            return
        from weft.strategy.sharding.remote_layers import placeholder_parameters

        with placeholder_parameters(self._strategy.model, self._engine.device) as placeholders:
            yield
        for optimizer in self._strategy.optimizers:
            _remove_placeholders(optimizer, placeholders)
            if any(cls.__name__ == "LBFGS" for cls in type(optimizer).__mro__):
                raise ValueError(
                    f"pipeline_cuts: {type(optimizer).__name__} searches along the gradient of all parameters, and "
                    "each stage has only some of them; use an optimizer that updates each parameter separately."
                )

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of `state` that this rank saves: all on the last stage, or without a pipeline.

        Other stages leave out the modules outside of the divided one. If the LightningModule itself is divided,
        other stages leave out its own buffers and metrics.
        """
        pipeline = self._engine.pipeline
        if pipeline is None or pipeline.has_last_stage:
            return state
        assert self._target is not None
        if self._target.name == "":
            return without_step_state(self._strategy.lightning_module, state)
        prefix = f"{self._target.name}."
        return {name: value for name, value in state.items() if name.startswith(prefix)}

    # ---- steps ---------------------------------------------------------------------------------------------

    def begin_steps(self, module: Any, is_fitting: bool) -> None:
        """Prepare the LightningModule for steps; call it once the module is on its final device."""
        assert self._last_stage_modules is not None
        if self._steps is not None:
            self._steps.end()
            self._steps.remove_metrics()
        self._steps = StageSteps(self._engine, module, self._last_stage_modules, is_fitting)

    def end_steps(self) -> None:
        """Undo `begin_steps`, except for metrics, whose values stay available on every stage."""
        if self._steps is not None:
            self._steps.end()

    def run_step(self, loop: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of the module's steps for a batch; return, on every stage, the result of an unsharded step."""
        assert self._steps is not None
        with self._engine.stages.existing_pipeline().failures.report_failures():
            return self._steps.run(loop, step, args, kwargs)


def _remove_placeholders(optimizer: Optimizer, placeholders: Sequence[nn.Parameter]) -> None:
    ids = {id(placeholder) for placeholder in placeholders}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
    for placeholder in placeholders:
        optimizer.state.pop(placeholder, None)


def _parameter_names_around(module: nn.Module, name: str, inner: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a module's parameters, in order.

    `inner`: the names of the parameters of its submodule `name`, in that submodule, before the division into stages.
    """
    from weft.strategy.recognition.assignments import join

    names: list[str] = []
    for prefix, each in module.named_modules():
        if prefix == name:
            names += [join(name, own) for own in inner]
        elif not prefix.startswith(f"{name}."):
            names += [unwrapped(join(prefix, own)) for own, _ in each.named_parameters(recurse=False)]
    return tuple(dict.fromkeys(names))
