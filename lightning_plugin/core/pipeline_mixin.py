"""The behaviour of a strategy whose model is divided into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import pipeline_links
from weft._plugin.batch_check import BatchCheck
from weft._plugin.data_axes import DATA_AXIS
from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.process_guard import guard

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import FabricMembers, StrategyMembers
    from weft.strategy.pipeline import AutoCuts, Pipeline
    from weft.strategy.pipeline.choose import Choice
else:
    FabricMembers = StrategyMembers = object

_KEY = "_weft_pipeline"  # a module's attribute: the arguments of its cut, and its pipeline


class PipelineMixin(StrategyMembers):
    """The methods of a strategy that handle stages; call `_init_pipeline` first."""

    def _init_pipeline(self) -> None:
        self._pipeline: Pipeline | None = None
        self._stages_batch_check = BatchCheck(self._options.check_batches, self._options.check_batches_every)

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks with the stages of this rank's replica, including this rank."""
        return self.device_mesh.get_group(PIPELINE_AXIS)

    @property
    def pipeline(self) -> Pipeline:
        """Return the `weft.strategy.pipeline.Pipeline` of the model, for its trace and its schedule.

        Raises:
            RuntimeError: no model has been set up in stages yet.
        """
        if self._pipeline is None:
            raise RuntimeError(
                f"{type(self).__name__} has no model in stages; pass pipeline_cuts=[...], and set up a model with it."
            )
        return self._pipeline

    def _cut_into_stages(self, module: torch.nn.Module) -> None:
        self._cut_module(module, self._options.pipeline_cuts)

    def _cut_module(
        self,
        module: torch.nn.Module,
        cuts: Any,
        *,
        beside: Collection[str] = (),
        forward: Callable[[], Any] | None = None,
    ) -> None:
        """Cut a module at the named or chosen cuts; `beside`, `forward`: see `Pipeline` and `agree_on_cuts`."""
        from weft.strategy.pipeline import Pipeline
        from weft.strategy.pipeline.arguments import shares_of
        from weft.strategy.pipeline.auto_cuts import auto_of
        from weft.strategy.pipeline.links import links_enabled

        if self._pipeline is not None and self._pipeline.model is not module:
            raise ValueError(
                f"{type(self).__name__} has a {type(self._pipeline.model).__name__} in stages already and got a "
                f"{type(module).__name__}; set up one model with a strategy that has pipeline_cuts."
            )
        if self._pipeline is not None:
            return
        options = self._options
        mesh, schedule = self.device_mesh, options.pipeline_schedule
        shares = shares_of(schedule, options.num_micro_batches, options.micro_batch_shares, mesh[PIPELINE_AXIS].size())
        layer_stages: Mapping[str, int] = {}
        if (auto := auto_of(cuts)) is not None:
            if _KEY in module.__dict__:
                cuts = module.__dict__[_KEY][1].cuts
            else:
                choice = self._choose_cuts(module, auto, schedule, len(shares), forward)
                cuts, layer_stages = choice.cuts, choice.layer_stages
                self._log(choice.text)
        cuts = list(cuts)
        if _KEY in module.__dict__ and module.__dict__[_KEY][0] == (mesh, cuts, schedule):  # by an earlier strategy
            self._pipeline = module.__dict__[_KEY][1]
            self._pipeline.micro_batch_shares = shares
            return
        self._pipeline = Pipeline(
            module,
            mesh,
            cuts,
            schedule=schedule,
            micro_batch_shares=shares,
            layer_stages=layer_stages,
            beside=beside,
            device=self.root_device,
            verify="auto" if self._plan is None else self._plan.verify,
        )
        if links_enabled():
            group = self.pipeline_group
            guard().on_clean_exit(lambda: pipeline_links.unlink(group))  # runs before the group is destroyed
        module.__dict__[_KEY] = ((mesh, cuts, schedule), self._pipeline)

    def _choose_cuts(
        self,
        module: torch.nn.Module,
        auto: AutoCuts,
        schedule: Any,
        num_micro_batches: int,
        forward: Callable[[], Any] | None,
    ) -> Choice:
        from weft.strategy.pipeline.auto_cuts import agree_on_cuts

        num_shards = self.tensor_parallel_group.size()
        if self.data_axes.shards_parameters:
            num_shards *= self.device_mesh[DATA_AXIS].size()
        return agree_on_cuts(
            module,
            self.device_mesh,
            auto,
            schedule,
            num_ranks=self.device_mesh[PIPELINE_AXIS].size(),
            num_micro_batches=num_micro_batches,
            device=self.root_device,
            forward=forward,
            parameter_shards=num_shards,
        )

    def _check_batch_of_stages(self, kind: str, batch: Any) -> None:
        """Raise ValueError if the stages have different batches; see `BatchCheck.check`."""
        self._stages_batch_check.check(kind, batch, self.pipeline_group, self.root_device, group_kind="pipeline")

    def _check_no_scaler(self) -> None:
        plugin = self.precision_plugin if hasattr(self, "precision_plugin") else self.precision
        if getattr(plugin, "scaler", None) is not None:
            raise ValueError(
                f"{type(self).__name__} got precision {str(plugin.precision)!r}, whose scaled gradients stages would "
                "have to agree on; take 'bf16-mixed' or '32-true'."
            )


class FabricPipelineMixin(PipelineMixin, FabricMembers):
    """The methods that train and evaluate a pipeline under Fabric."""

    def pipeline_step(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch in micro-batches; average gradients over the data axes. Collective.

        Args:
            batch: the same on every stage of a replica, as Fabric's data loaders return it.
            loss_fn: given the model and a micro-batch, calls the model once and returns its loss, a scalar.
            split, weight: as `weft.strategy.pipeline.Pipeline.step` takes them.

        Returns:
            The weighted mean of the losses over this rank's share of the data, the same on every stage.

        Raises:
            ValueError: the stages have different batches, or the precision scales gradients ("16-mixed").
        """
        pipeline = self.pipeline
        self._check_no_scaler()
        self._check_batch_of_stages("training", batch)
        model = _PrecisionWrapper(self.precision, pipeline.model)
        with pipeline.failures.report_failures():
            with self.data_axes.without_sync([pipeline.model]):
                loss = pipeline.step(
                    batch, lambda micro_batch: loss_fn(model, micro_batch), **_without_none(split=split, weight=weight)
                )
            self.data_axes.after_backward()
        self._check_first_gradients([pipeline.model])
        return loss

    def pipeline_evaluate(
        self, batch: Any, step: Callable[[Any, Any], Any], *, split: Callable[[Any, int], Sequence[Any]] | None = None
    ) -> list[Any]:
        """Run forwards only; return `step(model, micro_batch)` for each micro-batch, [] off the last stage."""
        self._check_batch_of_stages("evaluation", batch)
        model = _PrecisionWrapper(self.precision, self.pipeline.model)
        return self.pipeline.evaluate(batch, lambda micro_batch: step(model, micro_batch), **_without_none(split=split))


class _PrecisionWrapper:
    """Calls a model in a precision plugin's context, like Fabric's wrapper of the model."""

    def __init__(self, precision: Any, model: torch.nn.Module) -> None:
        self._precision = precision
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.convert_input((args, kwargs))
        with self._precision.forward_context():
            output = self._model(*args, **kwargs)
        return self._precision.convert_output(output)


def _without_none(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
