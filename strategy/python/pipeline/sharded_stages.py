"""Stages sharded over data-parallel ranks: parameters are gathered to compute, gradients are reduced once per step."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.strategy.data_parallel.reducer import average_gradient
from weft.strategy.deferred import materialize
from weft.strategy.experts.layer import ShardedExperts
from weft.strategy.pipeline.staged_model import StagedModel
from weft.strategy.pipeline.stages import ANY_STAGE


class ShardedStages:
    """This rank's layers as units of FSDP2, after `parallelize`.

    A schedule's UNSHARD gathers the parameters of all layers of a stage, and RESHARD frees them; forwards and backwards
    in between do neither. Micro-batches accumulate into unsharded gradients, which are reduced at the step's end.

    Args:
        staged: the model in stages.
        mesh: the data-parallel axis, or (replicas, data-parallel) axes.
        mp_policy: dtypes of gathered parameters and reduced gradients; None: the dtypes of the parameters.
        expert_mesh: as `mesh`, of the ranks that hold the same experts; None: no experts are sharded.

    Raises:
        ValueError: fully_shard was applied already.
        RuntimeError: this torch's FSDP2 has no `finalize_backward`.
    """

    def __init__(
        self,
        staged: StagedModel,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        if not hasattr(FSDPModule, "finalize_backward"):
            raise RuntimeError(
                "pipeline: stages cannot be fully sharded with this torch, whose FSDP2 has no finalize_backward; use "
                "torch 2.15 or newer, or replicate over the data-parallel ranks."
            )
        if any(isinstance(module, FSDPModule) for module in staged.model.modules()):
            raise ValueError("pipeline: fully_shard was applied to this model already; use only Pipeline.fully_shard.")
        self._mesh = mesh
        self._units: dict[int, list[FSDPModule]] = {stage: [] for stage in staged.stages}
        self._inner_units: dict[nn.Module, list[FSDPModule]] = {}  # the experts in a unit
        policy = mp_policy or MixedPrecisionPolicy()
        for stage, layer in _layers_with_parameters(staged):
            if not isinstance(layer, FSDPModule):  # a layer may have several names
                inside = [] if expert_mesh is None else [m for m in layer.modules() if isinstance(m, ShardedExperts)]
                for experts in inside:
                    fully_shard(experts, mesh=expert_mesh, reshard_after_forward=False, mp_policy=policy)
                if layer not in inside:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
                self._inner_units[layer] = [cast("FSDPModule", each) for each in inside if each is not layer]
            assert isinstance(layer, FSDPModule)
            self._units[stage].append(layer)
        materialize(staged.model)
        of_layers = {
            id(p) for units in self._units.values() for unit in units for p in cast("nn.Module", unit).parameters()
        }
        # The trunk is the modules above the layers (docs/pipeline_steps.md); its parameters are in no FSDP2 unit.
        self._trunk_parameters = [p for p in staged.model.parameters() if id(p) not in of_layers]

    def begin(self) -> None:
        """Keep gradients unsharded until `finish`; called before a schedule with backwards."""
        for unit in self._all_units():
            unit.set_manual_backward_finalization(True)
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(False)

    def unshard(self, stage: int) -> None:
        # A unit comes before those inside it: the first use of one makes it the root of those.
        handles = [each.unshard(async_op=True) for unit in self._units[stage] for each in self._with_inner(unit)]
        for handle in handles:
            if handle is not None:
                handle.wait()

    def reshard(self, stage: int) -> None:
        for unit in self._units[stage]:
            for each in self._with_inner(unit):
                each.reshard()

    def finish(self) -> None:
        """Average the step's gradients over the data-parallel ranks, and free gathered parameters; collective."""
        for unit in self._all_units():
            unit.set_requires_gradient_sync(True)
            unit.finalize_backward()
            for each in self._with_inner(unit):
                each.reshard()
        for parameter in self._trunk_parameters:
            if parameter.grad is not None:
                for axis in range(self._mesh.ndim):
                    average_gradient(parameter, self._mesh.get_group(axis))

    def _with_inner(self, unit: FSDPModule) -> list[FSDPModule]:
        return [unit, *self._inner_units.get(cast("nn.Module", unit), ())]

    def _all_units(self) -> list[FSDPModule]:
        return list(dict.fromkeys(unit for units in self._units.values() for unit in units))


def _layers_with_parameters(staged: StagedModel) -> list[tuple[int, nn.Module]]:
    """Return (stage, layer) of each layer on this rank that has parameters; each is a unit of FSDP2."""
    found = [
        (stage, staged.model.get_submodule(name))
        for name, stage in staged.layers.stage_of.items()
        if stage != ANY_STAGE and stage in staged.stages
    ]
    return [(stage, layer) for stage, layer in found if any(True for _ in layer.parameters())]
