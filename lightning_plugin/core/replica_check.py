"""The mixin of ReplicaCheck, a callback that finds replicas that differ; `factory.py` adds the base class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weft._plugin.data_axes import DATA_AXIS, REPLICATE_AXIS
from weft._plugin.meshes import PIPELINE_AXIS, TENSOR_AXIS
from weft._plugin.monitors import check_at_least_one, num_steps, ranks_text
from weft._plugin.strategy_mixin import StrategyMixin
from weft.strategy.parameter_names import parameter_names, unwrapped

if TYPE_CHECKING:
    from weft.strategy.faults import Difference, Replica

_AXES = (REPLICATE_AXIS, DATA_AXIS, TENSOR_AXIS, PIPELINE_AXIS)


class ReplicaMixin:
    """Raises RuntimeError on all ranks if weights or optimizer states that ranks replicate are no longer equal.

    Every rank hashes the bytes of its parameters and of the tensors in its optimizers' states that other ranks hold,
    too: those replicated over data-parallel ranks, over tensor-parallel ranks, and parameters that pipeline stages
    share. Experts are compared between the data-parallel ranks that hold the same ones. Sharded tensors have no second
    copy, and are not compared. With `zero_stage=1`, each step gathers the weights
    from their owners, so that a changed weight is overwritten, or spread to all ranks, before most checks. Buffers are
    not compared: running statistics are those of each rank's own data. The error names the first tensor that differs,
    the step and the ranks.

    A check reads each compared tensor once (on a GPU: copies it to the host), and takes one all-gather of at most 16
    numbers of each rank, or two with expert-parallel ranks. Other steps take no time.

    Replicas are equal only if all ranks compute with the same bits: with the same kind of device and number of threads.
    On GPUs, kernels that add in an arbitrary order give tensor-parallel ranks different gradients of replicated
    parameters: use `torch.use_deterministic_algorithms(True)`, or compare over data-parallel axes only.

    Args:
        every_n_steps: the optimizer steps between two checks. The last step is checked, too, at the end of training.
        axes: the mesh axes over which replicas are compared, some of "data_replicate", "data_parallel",
            "tensor_parallel" and "pipeline_parallel"; context-parallel ranks are along "data_parallel". None: all.

    Attributes:
        num_compared: the tensors of this rank that the last check compared with those of other ranks.
    """

    def __init__(self, every_n_steps: int = 100, axes: Sequence[str] | None = None) -> None:
        super().__init__()
        check_at_least_one("ReplicaCheck", "every_n_steps", every_n_steps)
        if axes is not None and (isinstance(axes, str) or not axes or not set(axes) <= set(_AXES)):
            raise ValueError(
                f"ReplicaCheck got axes={axes!r}; pass a list with some of {', '.join(map(repr, _AXES))}, or None."
            )
        self.num_compared = 0
        self._every_n_steps = every_n_steps
        self._axes = frozenset(_AXES if axes is None else axes)
        self._step = self._checked_step = 0
        self._equal_after: int | None = None  # the step of the last check

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise TypeError for a strategy that is not weft's, whose tensors' replicas are unknown."""
        if not isinstance(trainer.strategy, StrategyMixin):
            raise TypeError(
                f"ReplicaCheck got a Trainer with a {type(trainer.strategy).__name__}; pass strategy='weft'."
            )
        self._step = self._checked_step = num_steps(trainer, pl_module)
        self._equal_after = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After every `every_n_steps` optimizer steps, compare; raise RuntimeError if replicas differ. Collective."""
        before, self._step = self._step, num_steps(trainer, pl_module)
        if self._step != before and self._step % self._every_n_steps == 0:
            self._check(trainer.strategy, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare after the last step, unless that is done; raise RuntimeError if replicas differ. Collective."""
        if self._step != self._checked_step:
            self._check(trainer.strategy, pl_module)

    def _check(self, strategy: Any, pl_module: Any) -> None:
        from weft.strategy.faults import compare_replicas

        self._checked_step = self._step
        experts = strategy.groups.experts
        meshes = [strategy.device_mesh] if experts is None else [strategy.device_mesh, experts.mesh]
        self.num_compared, differences = 0, []
        for mesh in meshes:
            replicas = self._replicas(strategy.optimizers, pl_module, mesh)
            comparison = compare_replicas(replicas, mesh, strategy.root_device, PIPELINE_AXIS)
            self.num_compared += comparison.num_compared
            differences += comparison.differences
        if differences:
            raise RuntimeError(self._error_text(differences))
        self._equal_after = self._step

    def _replicas(self, optimizers: Any, pl_module: Any, mesh: Any) -> Iterator[Replica]:
        """Yield this rank's replicated tensors on a mesh: that of experts, or that of all other parameters."""
        from weft.strategy.experts.shards import EXPERT_AXIS, is_expert
        from weft.strategy.faults import Replica, replicas_of

        has_experts = EXPERT_AXIS in mesh.mesh_dim_names
        names = {each: name for each, name in parameter_names(pl_module).items() if is_expert(each) == has_experts}
        tied = _names_on_several_ranks(pl_module)
        stage_axis = PIPELINE_AXIS if PIPELINE_AXIS in mesh.mesh_dim_names else None
        for each in replicas_of(names, optimizers, mesh, stage_axis=stage_axis, tied=tied):
            yield Replica(each.name, each.local, each.axes & self._axes)

    def _error_text(self, differences: Sequence[Difference]) -> str:
        first, num_further = differences[0], len(differences) - 1
        if first.minority:
            where = f"on {ranks_text(first.minority)}, of {ranks_text(first.ranks)}"
        else:
            where = f"between {ranks_text(first.ranks)}"
        further = f", and {num_further} further tensors differ" if num_further > 1 else ""
        further = ", and one further tensor differs" if num_further == 1 else further
        known = (
            "no check came before" if self._equal_after is None else f"all were equal after step {self._equal_after}"
        )
        until = "this step" if self._equal_after is None else f"step {self._equal_after + 1}"
        return (
            f"ReplicaCheck: after step {self._step}, {first.name!r} differs {where}, which should hold equal values"
            f"{further}; {known}: resume from a checkpoint saved before {until}, without a device that is faulty."
        )


def _names_on_several_ranks(module: Any) -> set[str]:
    """Return the names, in checkpoints, of this rank's parameters of which stages of other ranks have copies."""
    from weft.strategy.pipeline import find_staged
    from weft.strategy.recognition.assignments import join

    if (found := find_staged(module)) is None:
        return set()
    prefix, staged = found
    elsewhere = {each.name_on[min(each.name_on)] for each in staged.tied if not each.name_on.keys() <= {*staged.stages}}
    return {unwrapped(join(prefix, first)) for first in staged.names_of_copies().values() if first in elsewhere}
