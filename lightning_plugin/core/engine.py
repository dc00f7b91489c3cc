"""The engine of a strategy: its options, plan, mesh axes and the parts that set up and train a model.

The strategies for the Trainer and for Fabric override Lightning's methods and call their engine, or one of its parts.
A part uses the engine's public members, and members of the strategy that Lightning defines; it does not call the
overrides.

NOTE on names: `_configure_launcher`, `_launcher`, `_device_mesh`, `_data_parallel_size`, `_tensor_parallel_size`,
`_save_distributed_checkpoint`, `_setup_distributed`, `_timeout`, `_process_group_backend`,
`_get_process_group_backend` and, under Fabric, `_parallelize_fn` and `_backward_sync_control` are protected members of
Lightning's ModelParallelStrategy (the stock strategy), of which weft's strategies are subclasses. Also used are
`LightningModule._device_mesh`, `_after_closure` of precision plugins, `_data_source` of the fit loop, and the Trainer's
`_accelerator_connector`, the only object that stores the argument `use_distributed_sampler`. Lightning has no public
equivalents, except for reading some of these members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft._plugin.batch_check import BatchCheck
from weft._plugin.console import Console
from weft._plugin.data_axes import DataAxes
from weft._plugin.end_summary import EndSummary
from weft._plugin.first_gradients import FirstGradients
from weft._plugin.in_backward_steps import InBackwardSteps
from weft._plugin.memory_watch import MemoryWatch
from weft._plugin.meshes import PIPELINE_AXIS, TENSOR_AXIS, Groups, axis_sizes
from weft._plugin.options import (
    Options,
    check_joined_weights,
    check_offloaded_parameters,
    check_rows_on_one_data_rank,
    resolve_sizes,
)
from weft._plugin.parameter_replacements import ParameterReplacements
from weft._plugin.process_group import check_world_size
from weft._plugin.random_states import RandomStates
from weft._plugin.rank_placement import RankPlacement
from weft._plugin.replicas import broadcast_random_state, broadcast_values, random_state_of_first_rank
from weft._plugin.stages import Stages
from weft._plugin.start_summary import StartSummary

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy
    from torch.optim import Optimizer

    from weft._plugin.stock_strategies import StockStrategy
    from weft.strategy import Plan
    from weft.strategy.pipeline import Pipeline
    from weft.strategy.planning.layout import MeshSizes


class Engine:
    """Sets up and trains models for one strategy.

    Args:
        strategy: a strategy on which the `__init__` of Lightning's ModelParallelStrategy has run.
        options: the options that the user has passed.
        owner: "trainer" or "fabric", the usual variable name of the object that has the strategy, for messages.
        building_context: for messages, the hook or context manager in which users build models with deferred
            parameters.

    Attributes:
        name: the name of the strategy's class, for errors.
        plan: the plan that is applied; None: the user's code shards the model.
        stages: divides the model into the stages of a pipeline, if the options request it.
        batch_check: compares batches between the ranks of `same_data_group`.
        chosen_sizes, chosen_stage: with layout="auto", the sizes of the axes and the ZeRO stage once they are chosen.
        The other attributes are the arguments, and parts that their classes describe.

    Raises:
        ValueError, TypeError: an option that is invalid regardless of the number of devices.
    """

    def __init__(self, strategy: StockStrategy, options: Options, owner: str, building_context: str) -> None:
        from weft.strategy import Plan

        self.strategy = strategy
        self.options = options
        self.owner = owner
        self.building_context = building_context
        self.name = type(strategy).__name__
        self.console = Console(strategy.fabric_module)
        self._sizes = options.validate(self.name, strategy._data_parallel_size, strategy._tensor_parallel_size)
        plan = {} if options.plan is None and options.needs_plan else options.plan
        if plan is not None:
            plan = Plan(plan, sequence_parallel=options.sequence_parallel, verify=options.verify)
        self.plan: Plan | None = plan
        self.batch_check = BatchCheck(options.check_batches, options.check_batches_every)
        self.stages = Stages(self)
        self.first_gradients = FirstGradients(self)
        self.in_backward = InBackwardSteps(self)
        self.memory_watch = MemoryWatch()
        self.random_states = RandomStates(self)
        self.rank_placement = RankPlacement(self)
        self.replacements = ParameterReplacements()
        self.start_summary = StartSummary(self)
        self.end_summary = EndSummary(self)
        self._data_axes: DataAxes | None = None
        self._groups: Groups | None = None
        self.chosen_sizes: MeshSizes | None = None
        self.chosen_stage: int | None = None
        self.predicted_bytes: int | None = None  # of a rank, by the search that chose the sizes
        if options.chooses_layout and owner == "fabric":
            raise ValueError(
                f"{self.name} got layout='auto', and Fabric joins its ranks before it has a model; find the layout by "
                "weft tune, and pass it."
            )

    # ---- devices, mesh and groups --------------------------------------------------------------------------

    @property
    def mesh(self) -> Any:
        return self.strategy.device_mesh

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device

    @property
    def sharding_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.options.sharding_stage if self.chosen_stage is None else self.chosen_stage

    @property
    def precision(self) -> Any:
        """Return Lightning's precision plugin."""
        strategy = self.strategy
        return strategy.precision_plugin if hasattr(strategy, "precision_plugin") else strategy.precision

    @property
    def scaler(self) -> Any:
        """Return the precision's gradient scaler; None: it has none."""
        return getattr(self.precision, "scaler", None)

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the scaler multiplies losses; 1.0 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale(torch.ones((), device=self.device)).item()

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank's group along the axis tensor_parallel, whose ranks get the same data."""
        group: dist.ProcessGroup = self.mesh.get_group(TENSOR_AXIS)
        return group

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Return this rank's group along the data axes, whose ranks get different data."""
        return self.data_axes.data_group

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Return this rank's context-parallel group, whose ranks get the same data; None: it has one rank."""
        return self.groups.context

    @property
    def same_data_group(self) -> dist.ProcessGroup:
        """Return the ranks that get the same data as this rank: of its context- and tensor-parallel groups."""
        return self.groups.same_data

    @property
    def same_data_kind(self) -> str:
        """Return the name of the kind of `same_data_group`, for errors."""
        if self.context_group is None:
            return "tensor-parallel group"
        has_tensor = self.tensor_parallel_group.size() > 1
        return "context- and tensor-parallel group" if has_tensor else "context-parallel group"

    @property
    def data_axes(self) -> DataAxes:
        """Return the axes data_replicate and data_parallel of the mesh; raises RuntimeError before `begin_run`."""
        if self._data_axes is None:
            raise RuntimeError(
                f"{self.name} has no data axes before its process group exists; read them in setup or later."
            )
        return self._data_axes

    @property
    def has_run(self) -> bool:
        """Return whether `begin_run` has run; before it, or without a process group, there are no groups."""
        return self._groups is not None

    @property
    def groups(self) -> Groups:
        """Return the groups of this rank; raises RuntimeError before `begin_run`."""
        if self._groups is None:
            raise RuntimeError(
                f"{self.name} has no groups before its process group exists; read them in setup or later."
            )
        return self._groups

    @property
    def pipeline(self) -> Pipeline | None:
        """Return the pipeline of the model in stages, or None."""
        return self.stages.pipeline

    def about(self) -> dict[str, Any]:
        """Return the versions, the mesh and the plan, as JSON, for checkpoints."""
        import weft

        return {
            "weft": weft.__version__,
            "torch": str(torch.__version__),
            "mesh": axis_sizes(self.mesh, self.groups),
            "plan": str(self.plan),
        }

    def sizes_of_mesh(self) -> MeshSizes | None:
        """Return the sizes of the axes for the strategy's devices.

        None: the stock strategy resolves its own sizes, or a layout is not chosen yet.

        Raises:
            RuntimeError: the sizes do not fit the number of devices.
        """
        if self.options.is_stock:
            return None
        if self.options.chooses_layout:
            return self.chosen_sizes
        return resolve_sizes(self.name, self._sizes, self.strategy.num_processes, self.strategy.num_nodes)

    def check_devices(self) -> None:
        """Raise RuntimeError or ValueError if the options, or an existing process group, do not fit the devices."""
        check_world_size(self.strategy.num_processes * self.strategy.num_nodes)
        sizes = self.sizes_of_mesh()
        if sizes is not None and self.options.optimizer_in_backward == "rows":
            check_rows_on_one_data_rank(self.name, sizes)
        if sizes is not None:
            check_joined_weights(self.name, self.options, sizes)
            check_offloaded_parameters(self.name, self.options, sizes)

    def check_offload_device(self, what: str, is_on: bool) -> None:
        """Raise ValueError if activations are to be offloaded to CPU memory, and the devices are CPUs."""
        if is_on and self.device.type == "cpu":
            raise ValueError(
                f"{self.name} got {what} on CPU devices, whose activations are in CPU memory already; leave it out."
            )

    def begin_run(self, groups: Groups) -> None:
        """Begin a run with these groups; the process group and the mesh must exist. Collective."""
        self._groups = groups
        self._data_axes = DataAxes(self.mesh, groups, self.sharding_stage)
        self.rank_placement.begin()
        self.broadcast_random_state()
        self.batch_check.restart()
        self.stages.batch_check.restart()
        self.first_gradients.restart()

    def end_run(self) -> None:
        """Remove the hooks that tag memory, step in the backward and average; model, mesh and groups stay usable."""
        self.memory_watch.end()
        self.in_backward.stop()
        self.rank_placement.end()
        if self._data_axes is not None:
            self._data_axes.release()

    # ---- equal values on all ranks -------------------------------------------------------------------------

    def broadcast_random_state(self) -> None:
        """Make the ranks that get the same data draw the same random numbers; collective."""
        broadcast_random_state(self.same_data_group, self.device)
        if self.options.has_stages:
            broadcast_random_state(self.stages.group, self.device)

    def broadcast_values(self, module: torch.nn.Module) -> None:
        """Give all ranks the parameters and buffers of the first rank that has them; collective."""
        from weft.strategy.pipeline import find_staged

        is_staged = find_staged(module) is not None  # stages have different parameters
        axes = [name for name in self.mesh.mesh_dim_names or () if name != PIPELINE_AXIS or not is_staged]
        broadcast_values(module, self.mesh, self.device, axes)

    @contextmanager
    def deferred_init(self) -> Iterator[None]:
        """With a plan and `empty_init`, defer parameters created inside; applying the plan materializes them."""
        if self.plan is None or not self.options.empty_init:
            yield
            return
        from weft.strategy import deferred_init

        # An earlier hook may have drawn random numbers on some ranks only; deferred parameters are not broadcast later.
        with contextlib.ExitStack() as stack:
            if self._data_axes is not None:  # the process group exists; before `fit` there is none
                groups = (self.data_group, self.same_data_group)
                stack.enter_context(random_state_of_first_rank(*groups, self.device))
            stack.enter_context(deferred_init())
            yield

    def check_batch(self, loop: str, batch: Any) -> None:
        """Raise ValueError if the ranks of `same_data_group` have different batches; see `BatchCheck.check`."""
        self.batch_check.check(loop, batch, self.same_data_group, self.device, self.same_data_kind)

    # ---- optimizers ----------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Optimizer, module: torch.nn.Module | None) -> None:
        """Adapt an optimizer to sharded parameters and averaged gradients; fuse it if the options say so."""
        self.replacements.update_optimizer(optimizer)
        self._fuse_optimizer(optimizer, module)
        target = (self.options.offload or {}).get("optimizer")
        if target is not None and not (target == "cpu" and self.options.offloads_parameters):
            self._offload_states(optimizer, target)
        if self.plan is not None and self.scaler is not None:
            from weft.strategy import agree_on_overflow

            agree_on_overflow(self.scaler, optimizer)
        self.data_axes.add_optimizer(optimizer)

    def _fuse_optimizer(self, optimizer: Optimizer, module: torch.nn.Module | None) -> None:
        """Fuse an optimizer if the options request it; log the change, or why the optimizer is not changed."""
        options = self.options
        if not options.fused_optimizers or (self.plan is None and not options.has_low_precision):
            return
        from weft.strategy import fuse

        if options.has_low_precision:
            self._check_precision()
            states, weights = options.optimizer_state, options.master_weights
            name = type(optimizer).__name__
            fuse(optimizer, module, optimizer_state=states, master_weights=weights)
            if weights != "float32" and module is not None:
                self.average_gradients_of(module)  # again, because gradients now have another dtype
            self.console.log(f"weft gives {name} states in {states} and weights in {weights}.")
            return
        was_fused = all(group.get("fused") for group in optimizer.param_groups)
        reason = fuse(optimizer, module)  # for leaving the optimizer as it is; None: it is fused
        name = type(optimizer).__name__
        if reason is not None:
            self.console.log(f"weft leaves {name} as it is: {reason}.")
        elif not was_fused:
            self.console.log(
                f"weft makes {name} use its fused kernels, without temporaries; fused_optimizers=False prevents it."
            )

    def _offload_states(self, optimizer: Optimizer, target: str) -> None:
        """Offload the states of an optimizer; an error of one rank is raised on all. Collective."""
        from weft.strategy import offload_states
        from weft.strategy.agreement import on_all_ranks

        name = type(optimizer).__name__
        on_all_ranks(f"keep the states of {name} in {target!r}", lambda: offload_states(optimizer, target))
        self.console.log(f"weft keeps the states of {name} in {target!r}.")

    @property
    def parameter_offload(self) -> OffloadPolicy | None:
        """Return FSDP2's policy for parameters in CPU memory, pinned for CUDA; None: they are on the device."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        if not self.options.offloads_parameters:
            return None
        # In older versions of torch, a step in the backward would read a gradient while it is copied to pinned memory.
        is_pinned = self.device.type == "cuda" and not self.options.optimizer_in_backward
        return CPUOffloadPolicy(pin_memory=is_pinned)

    def settle_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Move offloaded states back that Lightning has moved to the device."""
        if self.options.offload is None:
            return
        from weft.strategy.optimizers.offloaded_states import OffloadedOptimizer, move_to_cpu

        for optimizer in optimizers:
            if isinstance(optimizer, OffloadedOptimizer):
                optimizer.settle()
            else:  # with offloaded parameters
                for states in optimizer.state.values():
                    move_to_cpu(states)

    def _check_precision(self) -> None:
        """Raise ValueError if weights are to be split, and the precision computes with other weights than bfloat16."""
        precision = str(self.precision.precision)
        if self.options.master_weights != "float32" and precision not in ("bf16-mixed", "bf16-true"):
            raise ValueError(
                f"{self.name} got master_weights={self.options.master_weights!r} with precision={precision!r}, which "
                "does not compute with bfloat16 weights; pass precision='bf16-mixed' or 'bf16-true'."
            )

    @contextmanager
    def optimizer_step(self, optimizer: Any) -> Iterator[None]:
        """With a plan, make an optimizer compute as with unsharded parameters, unless its step is elementwise."""
        from weft.strategy import local_parameters
        from weft.strategy.data_parallel import steps_elements_alone

        own = getattr(optimizer, "optimizer", optimizer)
        is_changed = self.options.has_low_precision or "optimizer" in (self.options.offload or {})
        needs_no_context = self.plan is None or is_changed or steps_elements_alone(own)
        with contextlib.nullcontext() if needs_no_context else local_parameters():
            yield

    def average_gradients_of(self, module: torch.nn.Module) -> None:
        """With a plan, average gradients in each later backward, unless the optimizer steps inside the backward."""
        if self.plan is not None and not self.options.optimizer_in_backward:
            self.data_axes.average_gradients_of(module)
