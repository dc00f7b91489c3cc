"""The sharded side of a comparison: a model that a plan shards over a mesh, and its training by SGD."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from weft.strategy.apply import parallelize
from weft.strategy.context import carry_through_fsdp, parallelize_context
from weft.strategy.context.groups import context_groups
from weft.strategy.data_parallel import GradientReducer, ShardedStates, apply_fsdp
from weft.strategy.data_parallel.fully_sharded import free_gathered
from weft.strategy.data_parallel.replica_groups import ReplicaGroups
from weft.strategy.experts import parallelize_experts
from weft.strategy.experts.axes import ExpertAxes, expert_axes
from weft.strategy.plan import Plan
from weft.strategy.planning.layout import MeshSizes

_PIPELINE = "pipeline_parallel"
_REPLICAS, _DATA, _TENSOR = "data_replicate", "data_parallel", "tensor_parallel"


class JobMesh:
    """The mesh of a layout, over all ranks of the process group, and its groups.

    The context-parallel ranks are in the axis data_parallel, innermost, so that FSDP2 and ZeRO shard over them, too.

    gradient_group: this rank's group along both data axes, data_replicate and data_parallel together.
    data_group: the ranks of it that get different data: all but the context-parallel ranks.
    context_group: the context-parallel ranks; None: there is one.
    experts: the axes of experts' parameters; None: there is one expert-parallel rank.
    mesh: all axes of the layout; pipeline_parallel only if it has several ranks.
    sharding_mesh: the mesh for FSDP2: data_parallel, or with replicas (data_replicate, data_parallel).
    data_parallel_size: the number of ranks over which each replica is sharded, context-parallel ranks included.
    control_group: all ranks, for exchanging results and errors.
    """

    def __init__(self, sizes: MeshSizes, device_type: str) -> None:
        pipeline = {_PIPELINE: sizes.pipeline_parallel} if sizes.pipeline_parallel > 1 else {}
        self.data_parallel_size = sizes.data_parallel * sizes.context_parallel
        data = {_DATA: sizes.data_replicate * self.data_parallel_size, _TENSOR: sizes.tensor_parallel}
        outer = _mesh_of(device_type, pipeline | data)
        self.gradient_group: dist.ProcessGroup = outer.get_group(_DATA)
        self.mesh: DeviceMesh = outer
        self.sharding_mesh: DeviceMesh = outer[_DATA]
        if sizes.data_replicate > 1:
            data = {_REPLICAS: sizes.data_replicate, _DATA: self.data_parallel_size, _TENSOR: sizes.tensor_parallel}
            self.mesh = _mesh_of(device_type, pipeline | data)
            self.sharding_mesh = self.mesh[_REPLICAS, _DATA]
        self.data_group = self.gradient_group
        self.context_group: dist.ProcessGroup | None = None
        if sizes.context_parallel > 1:
            groups = context_groups(self.mesh.mesh, sizes.context_parallel)
            self.data_group, self.context_group = groups.data, groups.context
        self.experts: ExpertAxes | None = None
        if sizes.expert_parallel > 1:
            names = self.mesh.mesh_dim_names or ()
            shape = dict(zip(names, self.mesh.shape, strict=True))
            self.experts = expert_axes(device_type, shape, sizes.expert_parallel)
        # Not a group of the model, so that ranks can still use it after an error in the model's groups.
        control_group = dist.new_group()
        assert isinstance(control_group, dist.ProcessGroup)
        self.control_group = control_group

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(_TENSOR)

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """Return the group over which ZeRO stage 1 shards optimizer states."""
        return self.mesh.get_group(_DATA)

    @property
    def replica_groups(self) -> ReplicaGroups:
        """Return the groups that average gradients."""
        return ReplicaGroups(self.gradient_group, None if self.experts is None else self.experts.gradients)

    @property
    def expert_sharding_mesh(self) -> DeviceMesh | None:
        """Return the mesh for FSDP2 of experts, with the axes of `sharding_mesh`; None: no experts are sharded."""
        if self.experts is None:
            return None
        has_replicas = _REPLICAS in (self.experts.mesh.mesh_dim_names or ())
        return self.experts.mesh[_REPLICAS, _DATA] if has_replicas else self.experts.mesh[_DATA]

    @property
    def expert_sharding_group(self) -> dist.ProcessGroup | None:
        """Return the group over which ZeRO stage 1 shards optimizer states of experts; None: that of all others."""
        return None if self.experts is None else self.experts.mesh.get_group(_DATA)

    def shard_experts(self, model: nn.Module, keeps_deferred: bool = False) -> None:
        """Shard the experts of a model over the expert-parallel ranks, if there are several; before `parallelize`.

        Raises:
            ValueError: the model has no experts that can be sharded.
        """
        if self.experts is not None:
            tensor = self.mesh[_TENSOR]
            parallelize_experts(model, self.experts.mesh, tensor_mesh=tensor, keeps_deferred=keeps_deferred)

    def abort(self) -> None:
        """Abort the mesh's groups, if their backends can: ranks that wait in a collective of the model then raise."""
        context = () if self.context_group is None else (self.context_group,)
        experts = () if self.experts is None else (self.experts.gradients, *self.experts.mesh.get_all_groups())
        for group in {self.gradient_group, *context, *experts, *self.mesh.get_all_groups()}:
            with contextlib.suppress(RuntimeError):  # raised by backends without abort
                group.abort()


def _mesh_of(device_type: str, axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


class ShardedTraining:
    """A model, sharded in place, and SGD for it.

    Raises:
        ValueError: the plan does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        job: JobMesh,
        plan: Plan,
        zero_stage: int,
        learning_rate: float,
        entry_points: Iterable[str] | None,
    ) -> None:
        is_fully_sharded = zero_stage >= 2 and job.data_parallel_size > 1
        job.shard_experts(model)
        parallelize(model, job.mesh, plan, keeps_plain_on_one_rank=is_fully_sharded)
        if job.context_group is not None:
            parallelize_context(model, job.context_group)
        if is_fully_sharded:
            apply_fsdp(
                model,
                job.sharding_mesh,
                reshard_after_forward=zero_stage == 3,
                entry_points=entry_points,
                expert_mesh=job.expert_sharding_mesh,
            )
            carry_through_fsdp(model)
        needs_reducer = job.gradient_group.size() > 1 and not is_fully_sharded
        self.model = model
        groups = job.replica_groups
        self._reducer = GradientReducer(model, groups.group, experts=groups.experts) if needs_reducer else None
        self._optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        if zero_stage == 1 and job.data_parallel_size > 1:
            ShardedStates(self._optimizer, job.sharding_group, experts=job.expert_sharding_group)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients and average them over the ranks of `gradient_group`; collective."""
        loss.backward()
        if self._reducer is not None:
            self._reducer.finish()

    def step(self) -> None:
        self._optimizer.step()
        free_gathered(self.model)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def unsharded_value(tensor: Any) -> Tensor:
    """Return the unsharded value of a parameter or gradient; collective over the mesh of a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded gradients of parameters that require gradients, by name; zeros for None; collective."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        name: unsharded_value(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in parameters.items()
    }
