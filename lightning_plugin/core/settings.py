"""The strategy's settings: what is accepted, and what is refused before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlanSettings:
    """What weft's strategies take beyond Lightning's own arguments.

    plan: a plan as `weft.parallelize` takes it ("auto", a dict, YAML text or path, a callable, a Plan), or None:
        behave as Lightning's ModelParallelStrategy.
    check_batches: compare this many batches at the start of each stage between the ranks of a tensor-parallel group.
    check_batches_every: compare every N-th batch as well; 0: no others.
    fused_optimizers: whether optimizers of torch become their fused variants.
    empty_init: whether models built where the strategy knows of it get values as shards only.
    optimizer_in_backward: whether each parameter is stepped as soon as its gradient is complete.
    activation_checkpointing: which modules compute their activations again, as `checkpoint_activations` takes it.
    activation_offload: whether what checkpoints keep waits in CPU memory.
    """

    plan: Any
    check_batches: int
    check_batches_every: int
    fused_optimizers: bool
    empty_init: bool
    optimizer_in_backward: bool
    activation_checkpointing: Any
    activation_offload: bool

    def validate(self, owner: str, data_parallel_size: int | str) -> None:
        """Raise ValueError or TypeError for settings that no number of devices could make work."""
        for name in ("check_batches", "check_batches_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{owner} got {name}={value!r}; pass a whole number of batches, 0 for none.")
        for name in ("fused_optimizers", "empty_init", "optimizer_in_backward", "activation_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{owner} got {name}={getattr(self, name)!r}; pass True or False.")
        from weft.strategy.activation_checkpointing import refuse_wrong_kind

        refuse_wrong_kind(owner, self.activation_checkpointing)
        if self.activation_offload and self.activation_checkpointing == "none":
            raise ValueError(
                f"{owner} got activation_offload=True without checkpoints, whose inputs are what is offloaded; "
                "pass activation_checkpointing='full' or 'selective', too."
            )
        if self.plan is None:
            return
        if data_parallel_size not in ("auto", 1):
            raise ValueError(
                f"{owner} got data_parallel_size={data_parallel_size!r} together with a plan, and nothing reduces the "
                "gradients over the data-parallel axis yet: pass data_parallel_size=1, or plan=None and apply "
                "`fully_shard` yourself."
            )


def resolve_sizes(
    owner: str, plan: Any, data_parallel_size: int | str, tensor_parallel_size: int | str, num_processes: int
) -> tuple[int | str, int | str]:
    """(data, tensor) sizes with a plan: all processes are tensor-parallel ranks. Without one: unchanged.

    Raises:
        RuntimeError: as the stock strategy, but before anything is launched.
    """
    if plan is None:
        return data_parallel_size, tensor_parallel_size
    tensor = num_processes if tensor_parallel_size == "auto" else tensor_parallel_size
    if tensor != num_processes:
        raise RuntimeError(
            f"{owner} got tensor_parallel_size={tensor} and {num_processes} "
            f"process{'es' * (num_processes != 1)} (devices x num_nodes): with a plan they must be equal, so pass "
            f"devices={tensor} (on CPU devices='auto' means 1) or tensor_parallel_size='auto'."
        )
    return 1, tensor
