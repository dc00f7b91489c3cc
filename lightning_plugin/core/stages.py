"""Divides the model of a strategy into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import pipeline_links
from weft._plugin.batch_check import BatchCheck
from weft._plugin.data_axes import DATA_AXIS
from weft._plugin.meshes import PIPELINE_AXIS
from weft._plugin.process_guard import guard

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft.strategy.pipeline import AutoCuts, Pipeline
    from weft.strategy.pipeline.choose import Choice

_KEY = "_weft_pipeline"  # a module's attribute: ((mesh, cuts, schedule), pipeline)


class Stages:
    """Divides one model into stages, and checks that the stages have equal batches.

    Attributes:
        pipeline: the model in stages; None before `divide`, and without pipeline_cuts.
        batch_check: compares batches between the stages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pipeline: Pipeline | None = None
        options = engine.options
        self.batch_check = BatchCheck(options.check_batches, options.check_batches_every)

    @property
    def group(self) -> dist.ProcessGroup:
        """Return this rank's group along the axis pipeline_parallel: the ranks that together have all stages."""
        group: dist.ProcessGroup = self._engine.mesh.get_group(PIPELINE_AXIS)
        return group

    def existing_pipeline(self) -> Pipeline:
        """Return the pipeline; raises RuntimeError before a model has been divided."""
        if self.pipeline is None:
            raise RuntimeError(
                f"{self._engine.name} has no model in stages; pass pipeline_cuts=[...] to it, and set up a model."
            )
        return self.pipeline

    def divide(
        self,
        module: torch.nn.Module,
        cuts: Any = None,
        *,
        beside: Collection[str] = (),
        forward: Callable[[], Any] | None = None,
    ) -> None:
        """Divide a module at cuts, by default those of the options.

        If an earlier strategy has divided the module for the same cuts, mesh and schedule, the pipeline is reused.
        `beside`: see `Pipeline`; `forward`: see `agree_on_cuts`.
        """
        from weft.strategy.pipeline import Pipeline
        from weft.strategy.pipeline.arguments import shares_of
        from weft.strategy.pipeline.auto_cuts import auto_of
        from weft.strategy.pipeline.links import links_enabled

        engine, options = self._engine, self._engine.options
        if self.pipeline is not None and self.pipeline.model is not module:
            raise ValueError(
                f"{engine.name} has divided a {type(self.pipeline.model).__name__} into stages and got a "
                f"{type(module).__name__}; set up only one model with a strategy that has pipeline_cuts."
            )
        if self.pipeline is not None:
            return
        cuts = options.pipeline_cuts if cuts is None else cuts
        mesh, schedule = engine.mesh, options.pipeline_schedule
        shares = shares_of(schedule, options.num_micro_batches, options.micro_batch_shares, mesh[PIPELINE_AXIS].size())
        layer_stages: Mapping[str, int] = {}
        if (auto := auto_of(cuts)) is not None:
            if _KEY in module.__dict__:
                cuts = module.__dict__[_KEY][1].cuts
            else:
                choice = self._choose_cuts(module, auto, schedule, len(shares), forward)
                cuts, layer_stages = choice.cuts, choice.layer_stages
                engine.console.log(choice.text)
        cuts = list(cuts)
        # An earlier strategy may have divided the module.
        if _KEY in module.__dict__ and module.__dict__[_KEY][0] == (mesh, cuts, schedule):
            self.pipeline = module.__dict__[_KEY][1]
            self.pipeline.micro_batch_shares = shares
            return
        self.pipeline = Pipeline(
            module,
            mesh,
            cuts,
            schedule=schedule,
            micro_batch_shares=shares,
            layer_stages=layer_stages,
            beside=beside,
            device=engine.device,
            verify="auto" if engine.plan is None else engine.plan.verify,
        )
        if links_enabled():
            group = self.group
            guard().on_clean_exit(lambda: pipeline_links.unlink(group))  # runs before the group is destroyed
        module.__dict__[_KEY] = ((mesh, cuts, schedule), self.pipeline)

    def _choose_cuts(
        self,
        module: torch.nn.Module,
        auto: AutoCuts,
        schedule: Any,
        num_micro_batches: int,
        forward: Callable[[], Any] | None,
    ) -> Choice:
        from weft.strategy.pipeline.auto_cuts import agree_on_cuts

        engine = self._engine
        num_shards = engine.tensor_parallel_group.size()
        if engine.data_axes.shards_parameters:
            num_shards *= engine.mesh[DATA_AXIS].size()
        return agree_on_cuts(
            module,
            engine.mesh,
            auto,
            schedule,
            num_ranks=engine.mesh[PIPELINE_AXIS].size(),
            num_micro_batches=num_micro_batches,
            device=engine.device,
            forward=forward,
            parameter_shards=num_shards,
        )

    def check_batch(self, loop: str, batch: Any) -> None:
        """Raise ValueError if the stages have different batches; see `BatchCheck.check`."""
        self.batch_check.check(loop, batch, self.group, self._engine.device, group_kind="pipeline")
