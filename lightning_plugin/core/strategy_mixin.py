"""What the strategies for the Trainer and for Fabric have in common.

NOTE on names: `_configure_launcher`, `_launcher`, `_device_mesh`, `_data_parallel_size`, `_tensor_parallel_size`,
`_process_group_backend` and `_get_process_group_backend` are protected members of Lightning's
ModelParallelStrategy, which this is a subclass of; there are no public ones that would do. No private function or
module of Lightning is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import memory
from weft._plugin.batch_check import BatchCheck
from weft._plugin.launcher import guarded
from weft._plugin.process_group import group_made_here, refuse_other_world_size
from weft._plugin.process_guard import guard
from weft._plugin.replicas import (
    has_meta_tensors,
    seed_workers_by_data_rank,
    share_random_state,
    share_values,
    whole_bytes,
)
from weft._plugin.settings import PlanSettings, resolve_sizes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from weft.memory import Watch
    from weft.strategy import StepInBackward

TENSOR_AXIS = "tensor_parallel"
DATA_AXIS = "data_parallel"
_LARGE_BYTES = 10**6

# (default group, device type, sizes) -> mesh. What one run made DTensors of must be the mesh of the next, and each
# new mesh would make process groups that nothing destroys.
_meshes: dict[tuple[dist.ProcessGroup, str, int, int], DeviceMesh] = {}


class StrategyMixin:
    """Goes before a ModelParallelStrategy of Lightning or Fabric. `weft._plugin.factory` sets `fabric_module`."""

    fabric_module: str  # the name of the namespace's Fabric package
    _DEFERRED_PLACE: str  # where users build models without values

    def _init_weft(self, settings: PlanSettings) -> None:
        from weft.strategy import Plan

        settings.validate(type(self).__name__, self._data_parallel_size)
        self._plan = None if settings.plan is None else Plan(settings.plan)
        self._batch_check = BatchCheck(settings.check_batches, settings.check_batches_every)
        self._fused_optimizers = settings.fused_optimizers
        self._empty_init = settings.empty_init
        self._optimizer_in_backward = settings.optimizer_in_backward
        self._activation_checkpointing = settings.activation_checkpointing
        self._activation_offload = settings.activation_offload
        self._stepper: StepInBackward | None = None
        self._fingerprints: dict[Tensor, Tensor] = {}
        self._watch: Watch | None = None

    @property
    def plan(self) -> Any:
        """The `weft.strategy.Plan` that this strategy applies; None: what the user's code applies."""
        return self._plan

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards of one replica, this one among them."""
        return self.device_mesh.get_group(TENSOR_AXIS)

    def _configure_launcher(self) -> None:
        self._check_devices()
        super()._configure_launcher()
        if self._launcher is not None:
            self._launcher = guarded(self._launcher, self._check_devices)

    def _check_devices(self) -> None:
        """Refuse the device count, if it must be refused, before anything is launched."""
        num_processes = self.num_processes * self.num_nodes
        refuse_other_world_size(num_processes)
        resolve_sizes(
            type(self).__name__, self._plan, self._data_parallel_size, self._tensor_parallel_size, num_processes
        )

    def setup_environment(self) -> None:
        """Join the process group, build the mesh, and give the ranks of a tensor-parallel group one random state."""
        self._check_devices()
        self._refuse_offload_on_cpu()
        guard().mark_failed(False)
        guard().watch_signals(self._owns_process_control())
        self._data_parallel_size, self._tensor_parallel_size = resolve_sizes(
            type(self).__name__,
            self._plan,
            self._data_parallel_size,
            self._tensor_parallel_size,
            self.num_processes * self.num_nodes,
        )
        with group_made_here():
            super().setup_environment()
        sizes = (int(self._data_parallel_size), int(self._tensor_parallel_size))
        key = (dist.group.WORLD, self.root_device.type, *sizes)
        self._device_mesh = _meshes.setdefault(key, self._device_mesh)
        share_random_state(self.tensor_parallel_group, self.root_device)
        self._batch_check.restart()

    def _refuse_offload_on_cpu(self) -> None:
        if self._activation_offload and self.root_device.type == "cpu":
            raise ValueError(
                f"{type(self).__name__} got activation_offload=True on CPU devices, whose memory is where activations "
                "would go; pass activation_offload=False."
            )

    def _get_process_group_backend(self) -> str:
        """The user's choice; else ours between CPU ranks, and the stock default elsewhere."""
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return "cpu:weft"
        return super()._get_process_group_backend()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. The stock barrier names the device of an NCCL group only where that is its only part."""
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
        """Have the loader's workers seeded alike on the ranks of a tensor-parallel group."""
        seed = importlib.import_module(f"{self.fabric_module}.utilities.seed")
        data_rank = self.device_mesh.get_local_rank(DATA_AXIS)
        dataloader = super().process_dataloader(dataloader)
        seed_workers_by_data_rank(dataloader, seed.pl_worker_init_function, data_rank)
        return dataloader

    def _share_values(self, module: torch.nn.Module) -> None:
        share_values(module, self.tensor_parallel_group, self.root_device)

    def _deferred_init(self) -> AbstractContextManager[None]:
        """What is built inside gets values when the plan is applied, each rank its shards; without a plan, at once."""
        if self._plan is None or not self._empty_init:
            return nullcontext()
        from weft.strategy import deferred_init

        return deferred_init()

    def _fuse(self, optimizer: Optimizer, module: torch.nn.Module | None) -> None:
        """Fuse an optimizer as the settings say, and say so."""
        if not self._fused_optimizers:
            return
        from weft.strategy import fuse

        was_fused = all(group.get("fused") for group in optimizer.param_groups)
        why_not = fuse(optimizer, module)
        name = type(optimizer).__name__
        if why_not is not None:
            self._log(f"weft leaves {name} as it is: {why_not}.")
        elif not was_fused:
            self._log(f"weft has {name} use its fused kernels, without temporaries; fused_optimizers=False keeps it.")

    def _step_in_backward(self, module: torch.nn.Module, optimizer: Optimizer, clip_value: float | None = None) -> None:
        """Have the optimizer step inside the backward, after what a step's gradients go through."""
        from weft.strategy import StepInBackward, gradient_fingerprint

        def before_step(parameter: Tensor) -> None:
            is_replicated = any(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
            if is_replicated and not self._gradients_checked:
                self._fingerprints[parameter] = gradient_fingerprint(parameter)
            if clip_value is not None:
                getattr(parameter.grad, "_local_tensor", parameter.grad).clamp_(-clip_value, clip_value)

        self._stop_stepping()
        self._stepper = StepInBackward(module, optimizer, before_step)

    def _stop_stepping(self) -> None:
        if self._stepper is not None:
            self._stepper.remove()
        self._stepper = None

    def _check_first_gradients(self, modules: Iterable[torch.nn.Module]) -> None:
        """After a run's first backward: replicated parameters must have got equal gradients on all ranks."""
        if self._plan is None or self._gradients_checked:
            return
        from weft.strategy import check_replicated_gradients

        self._gradients_checked = True
        for module in modules:
            check_replicated_gradients(module, self._fingerprints)
        self._fingerprints.clear()

    def _log(self, text: str) -> None:
        """On the first rank, where Lightning's own messages go."""
        importlib.import_module(f"{self.fabric_module}.utilities.rank_zero").rank_zero_info(text)

    def _watch_memory(self, module: torch.nn.Module, *optimizers: Optimizer) -> None:
        """Where memory is counted, have that of the loop tagged."""
        self._unwatch_memory()
        if memory.is_tracking():
            self._watch = memory.watch(module, *optimizers)

    def _unwatch_memory(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def _apply_plan(self, module: torch.nn.Module) -> bool:
        """Make the ranks' values equal, then shard. Returns whether values are still to come (meta tensors)."""
        from weft.strategy import parallelize

        self._share_values(module)
        waiting = has_meta_tensors(module)
        if self._plan is not None:
            self._advise_on_building(module)
            parallelize(module, self.device_mesh, self._plan)
        self._checkpoint_activations(module)
        return waiting

    def _advise_on_building(self, module: torch.nn.Module) -> None:
        """Say so where every rank has built a whole model, of which it keeps a shard."""
        num_bytes = whole_bytes(module)
        is_worth_a_word = num_bytes >= max(_LARGE_BYTES, sum(p.nbytes for p in module.parameters()) // 2)
        if is_worth_a_word and self.tensor_parallel_group.size() > 1 and self._empty_init:
            self._log(
                f"weft got a model that was built whole, {num_bytes / 1e9:.3f} GB on every rank: build it in "
                f"{self._DEFERRED_PLACE}, and each rank makes its shards only."
            )

    def _checkpoint_activations(self, module: torch.nn.Module) -> None:
        from weft.strategy import checkpoint_activations

        names = checkpoint_activations(module, self._activation_checkpointing, offload=self._activation_offload)
        if names:
            shown = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
            self._log(f"weft computes the activations of {len(names)} modules again in the backward: {shown}.")
