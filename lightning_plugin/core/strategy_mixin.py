"""The methods that the strategies for the Trainer and for Fabric share.

NOTE on names: `_configure_launcher`, `_launcher`, `_device_mesh`, `_data_parallel_size`, `_tensor_parallel_size`,
`_process_group_backend` and `_get_process_group_backend` are protected members of Lightning's
ModelParallelStrategy, of which these classes are subclasses; Lightning has no public equivalents.
`use_distributed_sampler` is the Trainer's argument of that name, which only its `_accelerator_connector` keeps. No
private function or module of Lightning is used.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import memory
from weft._plugin.batch_check import BatchCheck
from weft._plugin.data_axes import DataAxes, mixed_precision_policy
from weft._plugin.error_reports import shared_under_torchrun
from weft._plugin.launcher import guarded
from weft._plugin.meshes import PIPELINE_AXIS, TENSOR_AXIS, cached_mesh
from weft._plugin.metrics import synchronize_metrics_over
from weft._plugin.options import Options, check_rows_without_replicas, resolve_sizes
from weft._plugin.process_group import check_world_size, destroying_group_at_exit
from weft._plugin.process_guard import guard
from weft._plugin.replicas import (
    broadcast_random_state,
    broadcast_values,
    has_meta_tensors,
    materialized_bytes,
    random_state_of_first_rank,
    seed_workers_by_data_rank,
)
from weft._plugin.start_summary import StartSummaryMixin

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from weft.memory import Watch
    from weft.strategy import StepInBackward

_LARGE_BYTES = 10**6


class StrategyMixin(StartSummaryMixin):
    """A mixin in front of a ModelParallelStrategy of Lightning or Fabric; `factory.py` sets `fabric_module`."""

    fabric_module: str  # the name of the namespace's Fabric package
    _DEFERRED_CONTEXT: str  # the place, for messages, where users build models with deferred parameters
    _OWNER: str  # the usual name, for messages, of the object that has the strategy

    def _init_weft(self, options: Options) -> None:
        from weft.strategy import Plan

        self._options = options
        self._sizes = options.validate(type(self).__name__, self._data_parallel_size, self._tensor_parallel_size)
        plan = {} if options.plan is None and options.needs_plan else options.plan
        if plan is not None:
            plan = Plan(plan, sequence_parallel=options.sequence_parallel, verify=options.verify)
        self._plan = plan
        self._batch_check = BatchCheck(options.check_batches, options.check_batches_every)
        self._init_pipeline()
        self._stepper: StepInBackward | None = None
        self._fingerprints: dict[Tensor, Tensor] = {}
        self._watch: Watch | None = None
        self._data_axes: DataAxes | None = None
        self._summarized: torch.nn.Module | None = None
        self._logged_once: set[str] = set()

    @property
    def plan(self) -> Any:
        """Return the `weft.strategy.Plan` that this strategy applies; None: the user's code shards the model."""
        return self._plan

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that hold the shards of one replica, including this rank."""
        return self.device_mesh.get_group(TENSOR_AXIS)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one only along the data axes; they see other data."""
        return self.data_axes.group

    @property
    def data_axes(self) -> DataAxes:
        """Return the axes data_replicate and data_parallel of the mesh."""
        if self._data_axes is None:
            raise RuntimeError(
                f"{type(self).__name__} knows its data axes when its processes have met; ask later, in setup or fit."
            )
        return self._data_axes

    def _configure_launcher(self) -> None:
        self._check_devices()
        super()._configure_launcher()
        if self._launcher is not None:
            self._launcher = guarded(self._launcher, self._check_devices)

    def _check_devices(self) -> None:
        """Raise if the sizes do not fit the number of devices, before any process is launched."""
        check_world_size(self.num_processes * self.num_nodes)
        if not self._options.is_stock:
            sizes = resolve_sizes(type(self).__name__, self._sizes, self.num_processes, self.num_nodes)
            if self._options.optimizer_in_backward == "rows":
                check_rows_without_replicas(type(self).__name__, sizes)

    def setup_environment(self) -> None:
        """Join the process group, build the mesh, and synchronize the random states of ranks with the same data."""
        self._check_devices()
        self._check_offload_device("activation_offload=True", self._options.activation_offload)
        guard().mark_failed(False)
        guard().watch_signals(self._owns_process_control())
        sizes = None
        if not self._options.is_stock:
            sizes = resolve_sizes(type(self).__name__, self._sizes, self.num_processes, self.num_nodes)
            self._data_parallel_size = sizes.pipeline_parallel * sizes.data_replicate * sizes.data_parallel
            self._tensor_parallel_size = sizes.tensor_parallel
        with destroying_group_at_exit():
            super().setup_environment()
        environment = self.cluster_environment
        if type(environment).__name__ == "TorchElasticEnvironment":
            guard().print_errors_once(shared_under_torchrun(environment.local_rank(), environment.node_rank()))
        has_stages = self._options.has_stages
        self._device_mesh, group = cached_mesh(self._device_mesh, sizes, has_stages)
        self._data_axes = DataAxes(self._device_mesh, group, self._options.sharding_stage)
        self._broadcast_random_state()
        self._batch_check.restart()
        self._stages_batch_check.restart()

    def _broadcast_random_state(self) -> None:
        """Make the ranks that see the same data draw the same random numbers."""
        broadcast_random_state(self.tensor_parallel_group, self.root_device)
        if self._options.has_stages:
            broadcast_random_state(self.pipeline_group, self.root_device)

    def _check_offload_device(self, what: str, is_on: bool) -> None:
        if is_on and self.root_device.type == "cpu":
            raise ValueError(
                f"{type(self).__name__} got {what} on CPU devices, whose memory is where activations would go; leave "
                "it out."
            )

    def _get_process_group_backend(self) -> str:
        """Return the user's choice; by default weft's backend for CPU tensors and the stock backend for the device.

        A pipeline on devices needs both: its stages exchange messages in CPU memory.
        """
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return "cpu:weft"
        if self._process_group_backend is None and self._options.has_stages:
            return f"cpu:weft,{self.root_device.type}:{super()._get_process_group_backend()}"
        return super()._get_process_group_backend()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. The stock barrier passes the device only if NCCL is the group's only backend."""
        if not dist.is_initialized():
            return
        on_device = self.root_device.type == "cuda"
        dist.barrier(device_ids=[self.root_device.index] if on_device else None)

    def _owns_process_control(self) -> bool:
        # A cluster's scheduler may send SIGTERM as a warning, long before the end, for the job to react to.
        return self._launcher is not None or type(self.cluster_environment).__name__ in (
            "LightningEnvironment",
            "TorchElasticEnvironment",
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed the loader's workers equally on the ranks of a tensor-parallel group."""
        seed = importlib.import_module(f"{self.fabric_module}.utilities.seed")
        dataloader = super().process_dataloader(dataloader)
        seed_workers_by_data_rank(dataloader, seed.pl_worker_init_function, self.data_axes.rank)
        return dataloader

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Return the arguments of samplers: each data-parallel rank gets a share of the data."""
        return {"num_replicas": self.data_axes.size, "rank": self.data_axes.rank}

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As the stock one, over the data axes by default: each replica counts once.

        A LightningModule passes the world's group if the user gives none, so that group also means the default.
        """
        if group is None or group is dist.group.WORLD:
            group = self.data_group
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks; with all=False, whether it is on any."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def _precision_name(self) -> str:
        plugin = self.precision_plugin if hasattr(self, "precision_plugin") else self.precision
        return str(plugin.precision)

    def _broadcast_values(self, module: torch.nn.Module) -> None:
        names = self.device_mesh.mesh_dim_names or ()
        from weft.strategy.pipeline import find_staged

        is_staged = find_staged(module) is not None  # stages have different parameters
        axes = [name for name in names if name != PIPELINE_AXIS or not is_staged]
        broadcast_values(module, self.device_mesh, self.root_device, axes)

    @contextmanager
    def _deferred_init(self) -> Iterator[None]:
        """With a plan, defer parameters created inside: applying the plan materializes only each rank's shards."""
        if self._plan is None or not self._options.empty_init:
            yield
            return
        from weft.strategy import deferred_init

        # An earlier hook may have drawn on some ranks only, and deferred parameters are not synchronized later.
        with contextlib.ExitStack() as stack:
            if self._data_axes is not None:  # the process group exists; before `fit` there is none
                groups = (self.data_group, self.tensor_parallel_group)
                stack.enter_context(random_state_of_first_rank(*groups, self.root_device))
            stack.enter_context(deferred_init())
            yield

    def _fuse_optimizer(self, optimizer: Optimizer, module: torch.nn.Module | None) -> None:
        """Fuse an optimizer if the settings ask for it, and log the result."""
        if not self._options.fused_optimizers:
            return
        from weft.strategy import fuse

        was_fused = all(group.get("fused") for group in optimizer.param_groups)
        why_not = fuse(optimizer, module)
        name = type(optimizer).__name__
        if why_not is not None:
            self._log(f"weft leaves {name} as it is: {why_not}.")
        elif not was_fused:
            self._log(f"weft has {name} use its fused kernels, without temporaries; fused_optimizers=False keeps it.")

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As the stock one; an optimizer that combines elements of a parameter computes with those of all ranks."""
        from weft.strategy import local_parameters
        from weft.strategy.data_parallel import steps_elements_alone

        is_simple = self._plan is None or steps_elements_alone(getattr(optimizer, "optimizer", optimizer))
        with contextlib.nullcontext() if is_simple else local_parameters():
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _step_in_backward(self, module: torch.nn.Module, optimizer: Optimizer, clip_value: float | None = None) -> None:
        """Make the optimizer step inside the backward, on gradients that are averaged and clipped one by one."""
        from weft.strategy import StepInBackward, gradient_fingerprint

        def before_step(parameter: Tensor) -> None:
            is_replicated = any(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
            if is_replicated and not self._gradients_checked:
                self._fingerprints[parameter] = gradient_fingerprint(parameter)
            self.data_axes.average(parameter)
            if clip_value is not None:
                gradient = parameter.grad
                assert gradient is not None
                getattr(gradient, "_local_tensor", gradient).clamp_(-clip_value, clip_value)

        self._stop_stepping()
        self._stepper = StepInBackward(module, optimizer, before_step, self._options.optimizer_in_backward == "rows")
        if self._options.optimizer_in_backward == "rows":
            names = self._stepper.stepped_by_rows
            self._log(f"weft steps {len(names)} weights of fused MLPs some rows at a time, from '{names[0]}' on.")

    def _stop_stepping(self) -> None:
        if self._stepper is not None:
            self._stepper.remove()
        self._stepper = None

    def _check_first_gradients(self, modules: list[torch.nn.Module]) -> None:
        """After a run's first backward, raise unless replicated parameters have equal gradients on all ranks."""
        if self._plan is None or self._gradients_checked:
            return
        if self.tensor_parallel_group.size() == 1:
            self._gradients_checked = True
            self._fingerprints.clear()
            return
        from weft.strategy import check_replicated_gradients

        parameters = (parameter for module in modules for parameter in module.parameters())
        if not self._fingerprints and all(parameter.grad is None for parameter in parameters):
            return  # FSDP2 does not set `grad` while gradients are only accumulated
        self._gradients_checked = True
        for module in modules:
            check_replicated_gradients(module, self._fingerprints, self.data_axes.group)
        self._fingerprints.clear()

    def _log(self, text: str) -> None:
        """Log on the first rank, as Lightning does."""
        importlib.import_module(f"{self.fabric_module}.utilities.rank_zero").rank_zero_info(text)

    def _log_once(self, text: str) -> None:
        if text not in self._logged_once:
            self._logged_once.add(text)
            self._log(text)

    def _warn(self, text: str) -> None:
        """Warn on the first rank, as Lightning does."""
        importlib.import_module(f"{self.fabric_module}.utilities.rank_zero").rank_zero_warn(text)

    def _watch_memory(self, module: torch.nn.Module, *optimizers: Optimizer) -> None:
        """If memory is counted, tag the memory of the training loop."""
        self._unwatch_memory()
        if memory.is_tracking():
            self._watch = memory.watch(module, *optimizers)

    def _unwatch_memory(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def _apply_plan(self, module: torch.nn.Module, **calls: Any) -> bool:
        """Make the ranks' values equal, then shard; return whether some tensors have no values yet (meta tensors).

        `calls`: how the module is called, as `DataAxes.shard` takes it.
        """
        synchronize_metrics_over(self.data_group, module)
        self._broadcast_values(module)
        has_meta = has_meta_tensors(module)
        if self._plan is not None:
            self._log_building_advice(module)
            self._check_offload_device("a rule of its plan with offload", self._plan.offloads(module))
        if self._options.has_stages:
            self._divide_into_stages(module)
        if self._plan is not None:
            self._shard_layers(module)
        self._checkpoint_activations(module)
        if self._plan is not None:
            self._shard_over_data_axes(module, **calls)
            self._log_start_summary(module)
        return has_meta

    def _divide_into_stages(self, module: torch.nn.Module) -> None:
        from weft.strategy.verification.evidence import store_rehearsal

        if self._plan is not None and self.tensor_parallel_group.size() > 1:
            # The full model is rehearsed: afterwards no rank can call it with the example.
            store_rehearsal(module, self._plan.example)
        self._cut_into_stages(module)

    def _shard_layers(self, module: torch.nn.Module) -> None:
        from weft.strategy import parallelize

        assert self._plan is not None
        stays_plain = self.data_axes.shards_parameters and not self._options.has_stages
        parallelize(module, self.device_mesh, self._plan, keeps_plain_on_one_rank=stays_plain)

    def _shard_over_data_axes(self, module: torch.nn.Module, **calls: Any) -> None:
        policy = mixed_precision_policy(self._precision_name())
        if self._pipeline is None:
            self.data_axes.shard(module, policy, **calls)
        elif self.data_axes.shards_parameters and not self._pipeline.is_fully_sharded:
            self._pipeline.fully_shard(self.data_axes.sharding_mesh, mp_policy=policy)

    def _average_gradients_of(self, module: torch.nn.Module) -> None:
        if self._plan is not None and not self._options.optimizer_in_backward:
            self.data_axes.average_gradients_of(module)

    def _log_building_advice(self, module: torch.nn.Module) -> None:
        """Log advice if every rank has built the full model and keeps only a shard of it."""
        num_bytes = materialized_bytes(module)
        is_worth_logging = num_bytes >= max(_LARGE_BYTES, sum(p.nbytes for p in module.parameters()) // 2)
        num_shards = self.device_mesh.size() if self.data_axes.shards_parameters else self.tensor_parallel_group.size()
        if is_worth_logging and num_shards > 1 and self._options.empty_init:
            self._log(
                f"weft got a model that was built in full, {num_bytes / 1e9:.3f} GB on every rank: build it in "
                f"{self._DEFERRED_CONTEXT}, and each rank makes its shards only."
            )

    def _checkpoint_activations(self, module: torch.nn.Module) -> None:
        from weft.strategy import checkpoint_activations

        names = checkpoint_activations(
            module, self._options.activation_checkpointing, offload=self._options.activation_offload
        )
        if names:
            shown = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
            self._log(f"weft computes the activations of {len(names)} modules again in the backward: {shown}.")
