"""prepare_accelerator: lets an Accelerator of Hugging Face train a model that is sharded over a mesh.

The class of the object is changed to a subclass that overrides public methods, so that objects which hold the
accelerator keep it. The states in its checkpoints are those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.data_parallel import clip_gradients_by_norm
from weft.strategy.hugging_face.full_states import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
)
from weft.strategy.hugging_face.meshes import TP, check_mesh, check_sharded, size_of
from weft.strategy.pretrained import load_pretrained

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
else:
    Accelerator = AcceleratedOptimizer = object


def prepare_accelerator(accelerator: Any, mesh: DeviceMesh) -> Any:
    """Make an Accelerator train a model that is sharded over `mesh`, in place; call it before `accelerator.prepare`.

    Afterwards,

    - `prepare` wraps the model neither by DistributedDataParallel nor by FSDP, and lets the ranks of a tensor-parallel
      group read the same batches;
    - `clip_grad_norm_` clips by the norm of the full gradients;
    - `gather_for_metrics` has the samples of each tensor-parallel group once;
    - `get_state_dict`, `save_model` and `save_state` have unsharded tensors, on rank 0, so all ranks must call them;
      `load_state` reads states that were saved with any mesh or by one process.

    Args:
        accelerator: an `accelerate.Accelerator` without a ParallelismConfig and without an FSDP plugin.
        mesh: the axes are some of dp_replicate, dp_shard and tp, in this order, over all ranks.

    Returns:
        `accelerator`.

    Raises:
        ValueError: the mesh has other axes or another order of ranks; or the accelerator shards models itself.
    """
    check_mesh(mesh)
    distributed_type = str(accelerator.distributed_type).rpartition(".")[2]
    if accelerator.parallelism_config is not None or distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"prepare_accelerator got an Accelerator that shards models itself ({distributed_type}); make it without "
            "parallelism_config and plugins, because weft has sharded the model."
        )
    accelerator.__class__ = subclass(type(accelerator), ShardedAccelerator)
    accelerator.state.device_mesh = mesh  # the ranks of "tp" read the same batches
    accelerator.gathers_groups_once = False
    accelerator.register_load_state_pre_hook(_load_models)
    return accelerator


def subclass(cls: Any, mixin: Any) -> Any:
    """Return the class of a prepared object of the class `cls`."""
    return type(f"Sharded{cls.__name__}", (mixin, cls), {})


def _load_models(models: list[nn.Module], input_dir: str) -> None:
    """Fill the models of `load_state` by reading their shards, and leave none to Accelerate, which copies full ones."""
    for idx, model in enumerate(models):
        load_pretrained(model, Path(input_dir, f"model_{idx}.safetensors" if idx else "model.safetensors"))
    models.clear()


class ShardedAccelerator(Accelerator):
    """An Accelerator for models that are sharded over `torch_device_mesh`; `subclass` adds the base class."""

    gathers_groups_once: bool

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not evaluation_mode:
            check_sharded(model, self.torch_device_mesh)
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        if not isinstance(prepared, FullStateOptimizer):
            prepared.__class__ = subclass(type(prepared), FullStateOptimizer)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        self.unscale_gradients()
        return clip_gradients_by_norm(
            [parameters] if isinstance(parameters, Tensor) else parameters, max_norm, norm_type
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        return full_state_dict(self.unwrap_model(model) if unwrap else model)

    def gather(self, tensor: Any) -> Any:
        gathered = super().gather(tensor)
        return self._first_of_groups(gathered) if self.gathers_groups_once else gathered

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        is_first = self.torch_device_mesh.get_local_rank(TP) == 0 if size_of(self.torch_device_mesh, TP) > 1 else True
        if use_gather_object and not is_first:
            input_data = []
        with self._gathering_groups_once():
            return super().gather_for_metrics(input_data, use_gather_object)

    @contextlib.contextmanager
    def _gathering_groups_once(self) -> Iterator[None]:
        self.gathers_groups_once = True
        try:
            yield
        finally:
            self.gathers_groups_once = False

    def _first_of_groups(self, gathered: Any) -> Any:
        """Return gathered tensors, of one block of rows per rank, without the blocks of equal ranks."""
        from accelerate.utils import recursively_apply

        num_ranks, group_size = self.num_processes, size_of(self.torch_device_mesh, TP)

        def first(tensor: Tensor) -> Any:
            return tensor.unflatten(0, (num_ranks, -1))[::group_size].flatten(0, 1)

        return recursively_apply(first, gathered) if group_size > 1 else gathered


class FullStateOptimizer(AcceleratedOptimizer):
    """An AcceleratedOptimizer whose state dicts are those of one process; all ranks must call `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return full_optimizer_state(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_full_optimizer_state(self.optimizer, state_dict)
