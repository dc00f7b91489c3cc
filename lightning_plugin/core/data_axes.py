"""The data-parallel axes of a strategy: sharding of parameters and optimizer states, averaging of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn import Module
from torch.optim import Optimizer

if TYPE_CHECKING:
    from weft._plugin.meshes import Groups

REPLICATE_AXIS = "data_replicate"
DATA_AXIS = "data_parallel"


class DataAxes:
    """The data axes of one mesh, with the modules that are sharded or whose gradients are averaged over these axes.

    mesh: has the axis data_parallel and, if data_replicate_size is not 1, the axis data_replicate before it. The
        context-parallel ranks are in data_parallel; see `Groups`.
    groups: this rank's groups along these axes.
    zero_stage: the ZeRO stage, 0 to 3, which determines the tensors that are sharded over data_parallel.
    """

    def __init__(self, mesh: DeviceMesh, groups: Groups, zero_stage: int) -> None:
        from weft.strategy.data_parallel.replica_groups import ReplicaGroups

        self.mesh = mesh
        self.group = groups.gradients
        self.data_group = groups.data
        self._experts = groups.experts
        self._replicas = ReplicaGroups(self.group, None if self._experts is None else self._experts.gradients)
        self._zero_stage = zero_stage
        self._shard_size = mesh[DATA_AXIS].size()
        self._reducers: dict[Module, Any] = {}
        self._sharded: list[Module] = []

    @property
    def size(self) -> int:
        """Return the number of ranks with different data."""
        return self.data_group.size()

    @property
    def rank(self) -> int:
        """Return the rank in `data_group`; ranks with equal ones get the same data."""
        return self.data_group.rank()

    @property
    def num_gradient_ranks(self) -> int:
        """Return the number of ranks that average gradients, context-parallel ranks included."""
        return self.group.size()

    @property
    def shards_parameters(self) -> bool:
        """Return whether FSDP2 shards parameters over data_parallel, and averages gradients in place of weft."""
        return self._zero_stage >= 2 and self._shard_size > 1

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards (data_parallel) and replicates (data_replicate)."""
        return _sharding_axes(self.mesh)

    @property
    def expert_sharding_mesh(self) -> DeviceMesh | None:
        """Return the mesh over which FSDP2 shards and replicates experts; None: there is one expert-parallel rank."""
        return None if self._experts is None else _sharding_axes(self._experts.mesh)

    def shard(
        self,
        module: Module,
        mp_policy: MixedPrecisionPolicy | None,
        entry_points: Iterable[str] | None = None,
        root_is_unit: bool = True,
        offload_policy: OffloadPolicy | None = None,
    ) -> list[str]:
        """Shard a module's parameters if `shards_parameters`; return the names of the FSDP2 units. See `apply_fsdp`."""
        if not self.shards_parameters:
            return []
        from weft.strategy.data_parallel import apply_fsdp

        names = apply_fsdp(
            module,
            self.sharding_mesh,
            reshard_after_forward=self._zero_stage == 3,
            mp_policy=mp_policy,
            entry_points=entry_points,
            root_is_unit=root_is_unit,
            offload_policy=offload_policy,
            expert_mesh=self.expert_sharding_mesh,
        )
        if module not in self._sharded:
            self._sharded.append(module)
        return names

    def average_gradients_of(self, module: Module) -> None:
        """Average a module's gradients in each later backward; does nothing on one rank or if `shards_parameters`.

        Call this after the parameters are on their final device: moving a DTensor removes its hooks.

        Raises:
            ValueError: `zero_stage` needs unsharded parameters, and an earlier run or the user's code has used FSDP2;
                or at stage 1 a module has sparse gradients.
        """
        if self.num_gradient_ranks == 1 or self.shards_parameters:
            return
        if any(isinstance(inner, FSDPModule) for inner in module.modules()):
            raise ValueError(
                f"zero_stage={self._zero_stage} keeps full parameters on each data-parallel rank, and this "
                f"{type(module).__name__} is fully sharded already; pass zero_stage=3 or 2, or build the model anew."
            )
        from weft.strategy.data_parallel import GradientReducer
        from weft.strategy.data_parallel.sparse_gradients import sparse_parameters

        sparse = next(iter(sparse_parameters(module).values()), None)
        if self._zero_stage == 1 and self._shard_size > 1 and sparse is not None:
            raise ValueError(
                f"zero_stage=1 shards the states of dense gradients, and the gradient of '{sparse}' is sparse "
                "(sparse=True); pass sparse=False to that module, or zero_stage=0."
            )
        if module in self._reducers:
            self._reducers.pop(module).remove()
        self._reducers[module] = GradientReducer(module, self.group, experts=self._replicas.experts)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Make an optimizer use averaged gradients; at zero_stage 1, step only this rank's shards (`ShardedStates`).

        With FSDP2, each optimizer step frees the parameters that are still gathered, because a step makes them stale.
        """
        if not self.shards_parameters and self.num_gradient_ranks > 1:
            optimizer.register_step_pre_hook(lambda *_: self._average_pending())
        if self._sharded:
            from weft.strategy.data_parallel.fully_sharded import free_gathered

            modules = list(self._sharded)

            def free(*_: Any) -> None:
                for module in modules:
                    free_gathered(module)

            optimizer.register_step_post_hook(free)
        if self._zero_stage == 1 and self._shard_size > 1:
            from weft.strategy.data_parallel import ShardedStates, sharded_states_of

            if sharded_states_of(optimizer) is None:  # an optimizer of an earlier run already has ShardedStates
                experts = None if self._experts is None else self._experts.mesh[DATA_AXIS].get_group()
                ShardedStates(optimizer, self.mesh[DATA_AXIS].get_group(), experts=experts)

    def average(self, parameter: Tensor) -> None:
        """Average the complete gradient of a parameter now, unless FSDP2 reduces gradients; collective."""
        if self.num_gradient_ranks > 1 and not self.shards_parameters:
            from weft.strategy.data_parallel.reducer import average_gradient

            average_gradient(parameter, self._replicas.of(parameter))

    def after_backward(self) -> None:
        """Average the gradients that are not yet averaged; wait for reductions in flight."""
        for reducer in self._reducers.values():
            reducer.finish()

    def _average_pending(self) -> None:
        for reducer in self._reducers.values():
            reducer.finish_if_needed()

    @contextlib.contextmanager
    def without_sync(self, modules: Iterable[Module] | None = None) -> Iterator[None]:
        """Inside, no backward reduces the gradients of `modules`; None: of all modules."""
        from weft.strategy.data_parallel.fully_sharded import set_gradient_sync

        chosen = None if modules is None else {inner for module in modules for inner in module.modules()}
        with contextlib.ExitStack() as stack:
            for module, reducer in self._reducers.items():
                if chosen is None or module in chosen:
                    stack.enter_context(reducer.paused())
            for module in self._sharded:
                if chosen is None or module in chosen:
                    set_gradient_sync(module, False)
                    stack.callback(set_gradient_sync, module, True)
            yield

    def release(self) -> None:
        """Stop averaging, and release all modules; sharded parameters stay sharded."""
        for reducer in self._reducers.values():
            reducer.remove()
        self._reducers.clear()
        self._sharded.clear()


def _sharding_axes(mesh: DeviceMesh) -> DeviceMesh:
    axes = (REPLICATE_AXIS, DATA_AXIS) if REPLICATE_AXIS in (mesh.mesh_dim_names or ()) else (DATA_AXIS,)
    return mesh[axes] if len(axes) > 1 else mesh[DATA_AXIS]
