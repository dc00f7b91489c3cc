"""The methods of Lightning's strategies that weft overrides for the Trainer and for Fabric alike; see `Engine`."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft._plugin.collective_groups import named_group
from weft._plugin.engine import Engine
from weft._plugin.error_reports import shared_under_torchrun
from weft._plugin.launcher import guarded
from weft._plugin.meshes import Groups, cached_mesh
from weft._plugin.process_group import destroying_group_at_exit
from weft._plugin.process_guard import guard
from weft._plugin.replicas import seed_workers_by_data_rank
from weft.strategy.checkpoint import background

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from weft._plugin.data_axes import DataAxes
    from weft._plugin.stock_strategies import StockStrategy
    from weft.strategy import Plan
    from weft.strategy.pipeline import Pipeline
else:
    StockStrategy = object


class StrategyMixin(StockStrategy):
    """A mixin in front of a ModelParallelStrategy of Lightning or Fabric; `factory.py` sets `fabric_module`."""

    _engine: Engine

    @property
    def plan(self) -> Plan | None:
        """Return the `weft.strategy.Plan` that this strategy applies; None: the user's code shards the model."""
        return self._engine.plan

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's group along the axis tensor_parallel, whose ranks get the same data."""
        return self._engine.tensor_parallel_group

    @property
    def context_parallel_group(self) -> dist.ProcessGroup | None:
        """Return this rank's context-parallel group, whose ranks get the same data; None: it has one rank."""
        return self._engine.context_group

    @property
    def groups(self) -> Groups:
        """Return the groups of this rank that are not those of one axis of the mesh."""
        return self._engine.groups

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Return this rank's group along the data axes, whose ranks get different data."""
        return self._engine.data_group

    @property
    def data_axes(self) -> DataAxes:
        """Return the axes data_replicate and data_parallel of the mesh."""
        return self._engine.data_axes

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Return this rank's group along the axis pipeline_parallel: the ranks that together have all stages."""
        return self._engine.stages.group

    @property
    def pipeline(self) -> Pipeline:
        """Return the `weft.strategy.pipeline.Pipeline` of the model, for its trace and its schedule.

        Raises:
            RuntimeError: no model has been set up in stages yet.
        """
        return self._engine.stages.existing_pipeline()

    @property
    def start_summary(self) -> tuple[str, ...]:
        """Return the sentences that rank 0 has logged about the layout, the sharding and the memory of the model."""
        return tuple(self._engine.start_summary.lines)

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted peak of a rank's memory, in bytes, if layout="auto" or BatchSizeFinder has predicted it."""
        return self._engine.predicted_bytes

    @predicted_bytes.setter
    def predicted_bytes(self, num_bytes: int | None) -> None:
        self._engine.predicted_bytes = num_bytes

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a module's weights to a new directory in the layout of Hugging Face: see `weft.save_pretrained`.

        Collective over all ranks. `module`: None: the Trainer's LightningModule; under Fabric, pass the module.

        Raises:
            ValueError: there is no module.
        """
        from weft.strategy import save_pretrained

        module = getattr(self, "lightning_module", None) if module is None else module
        if module is None:
            raise ValueError(f"{self._engine.name}.save_pretrained got no module; pass the module that was set up.")
        save_pretrained(module, directory, max_shard_size=max_shard_size, dtype=dtype)

    def wait_for_checkpoints(self, *, raises: bool = True) -> None:
        """With async_save, wait until the last checkpoint is on the disk; collective.

        Raises:
            Exception: it could not be written; on all ranks. With `raises` False, a warning says so.
        """
        background.wait(raises=raises)

    def _configure_launcher(self) -> None:
        self._engine.check_devices()
        super()._configure_launcher()
        if self._launcher is not None:
            self._launcher = guarded(self._launcher, self._engine.check_devices)

    def setup_environment(self) -> None:
        """Join the process group, build the mesh, and synchronize the random states of ranks with the same data."""
        engine, options = self._engine, self._engine.options
        engine.check_devices()
        engine.check_offload_device("activation_offload=True", options.activation_offload)
        guard().mark_failed(False)
        guard().watch_signals(self._owns_process_control())
        self._set_sizes()
        with destroying_group_at_exit():
            super().setup_environment()
        if not dist.is_initialized():
            return  # a subclass joins no process group: there are no other ranks to agree with
        sizes = engine.sizes_of_mesh()
        environment = self.cluster_environment
        if type(environment).__name__ == "TorchElasticEnvironment":
            guard().print_errors_once(shared_under_torchrun(environment.local_rank(), environment.node_rank()))
        self._device_mesh, groups = cached_mesh(self._device_mesh, sizes, options.has_stages)
        background.wait(raises=False)  # for a save of a run that an error has ended
        engine.begin_run(groups)

    def _set_sizes(self) -> None:
        """Set the sizes from which the stock strategy makes its mesh, if they are known."""
        sizes = self._engine.sizes_of_mesh()
        if sizes is not None:
            num_data = sizes.data_replicate * sizes.data_parallel * sizes.context_parallel
            self._data_parallel_size = sizes.pipeline_parallel * num_data
            self._tensor_parallel_size = sizes.tensor_parallel

    def _owns_process_control(self) -> bool:
        # A cluster's scheduler may send SIGTERM as a warning, to which the job reacts, long before the job must end.
        return self._launcher is not None or type(self.cluster_environment).__name__ in (
            "LightningEnvironment",
            "TorchElasticEnvironment",
        )

    def _get_process_group_backend(self) -> str:
        """Return the user's choice; the default is weft's backend on CPUs, and the stock backend on other devices.

        A pipeline on other devices needs both, because its stages exchange messages in CPU memory. So do offloaded
        parameters, because the norm of their gradients is reduced there.
        """
        options = self._engine.options
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return "cpu:weft"
        if self._process_group_backend is None and (options.has_stages or options.offloads_parameters):
            return f"cpu:weft,{self.root_device.type}:{super()._get_process_group_backend()}"
        return super()._get_process_group_backend()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Unlike the stock barrier, pass the device also if NCCL is one of two backends."""
        if not dist.is_initialized():
            return
        on_device = self.root_device.type == "cuda"
        dist.barrier(device_ids=[self.root_device.index] if on_device else None)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Run the stock method, then seed the loader's workers by data rank; see `seed_workers_by_data_rank`."""
        seed = importlib.import_module(f"{self.fabric_module}.utilities.seed")
        dataloader = super().process_dataloader(dataloader)
        seed_workers_by_data_rank(dataloader, seed.pl_worker_init_function, self.data_axes.rank)
        return dataloader

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Return the arguments of samplers, which give each data-parallel rank different samples."""
        return {"num_replicas": self.data_axes.size, "rank": self.data_axes.rank}

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of any shape from the ranks of a group; the result has a new first dimension, of the ranks.

        Args:
            tensor: of the same shape on all ranks of the group.
            group: a process group, an axis of the mesh or "world", as in `named_group`. None: with a plan, the data
                axes, so that ranks with the same data count once; without one, all ranks, as in the stock method. A
                LightningModule passes the world's group if the user gives none, so that group means None.
            sync_grads: the gradient passes through the gathering.
        """
        if group is None or group is dist.group.WORLD:
            group = group if self.plan is None else self.data_group
        return super().all_gather(tensor, group=named_group(self._engine, group), sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks; with all=False, whether it is true on any rank."""
        if self.plan is None:
            return super().reduce_boolean_decision(decision, all)
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Like the stock method, inside `Engine.optimizer_step`."""
        with self._engine.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)
