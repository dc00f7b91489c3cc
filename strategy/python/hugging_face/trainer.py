"""prepare_trainer: lets transformers' Trainer train a model that is sharded over a mesh."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.strategy.hugging_face.accelerator import prepare_accelerator, subclass
from weft.strategy.hugging_face.meshes import TP, check_mesh, check_sharded, size_of
from weft.strategy.pretrained import load_pretrained

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

# The names of the Trainer and of PEFT.
_OPTIMIZER, _SCHEDULER, _ADAPTER = "optimizer.pt", "scheduler.pt", "adapter_model.safetensors"


def prepare_trainer(trainer: Any, mesh: DeviceMesh) -> Any:
    """Make a Trainer of transformers train a model that is sharded over `mesh`, in place; call it before `train`.

    Afterwards, the ranks of a tensor-parallel group read the same batches, the data-parallel ranks different ones.
    Losses, gradient norms and metrics are those of one process with the same total batch. `save_model` and checkpoints
    are those of one process, too: they resume with any mesh, and with a Trainer that is not prepared. All ranks must
    call `save_model`. Rank 0 holds the unsharded weights and optimizer states in CPU memory while it saves.

    Args:
        trainer: a `transformers.Trainer`, or of a subclass, whose model is sharded by `parallelize` over mesh["tp"]
            and, with several data-parallel ranks, by `apply_fsdp`. Its arguments neither name FSDP or DeepSpeed nor
            a parallelism_config.
        mesh: the axes are some of dp_replicate, dp_shard and tp, in this order, over all ranks.

    Returns:
        `trainer`.

    Raises:
        ValueError: the mesh has other axes or another order of ranks; the model is not sharded over it; or the
            Trainer's arguments shard the model.
    """
    check_mesh(mesh)
    check_sharded(trainer.model, mesh)
    prepare_accelerator(trainer.accelerator, mesh)
    trainer.gather_function = functools.partial(
        trainer.accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
    )
    trainer.__class__ = subclass(type(trainer), ShardedTrainer)
    return trainer


class ShardedTrainer(Trainer):
    """A Trainer for a sharded model; `subclass` adds the base class."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def get_tp_size(self) -> int:
        return size_of(self.accelerator.torch_device_mesh, TP)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer.state_dict()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, _OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, _OPTIMIZER)):
            return
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        self.optimizer.load_state_dict(torch.load(os.path.join(checkpoint, _OPTIMIZER), mmap=True, **options))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), **options))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        _load_weights(self.model, self.state.best_model_checkpoint)


def _load_weights(model: nn.Module, checkpoint: str) -> None:
    """Read this rank's shards of a checkpoint's model, or of its adapter, in whose file PEFT leaves out its name."""
    adapter_file = os.path.join(checkpoint, _ADAPTER)
    if not os.path.isfile(adapter_file):
        load_pretrained(model, checkpoint)
        return
    adapter = str(model.active_adapter)
    names = {name.replace(f".{adapter}", ""): name for name in model.state_dict()}
    load_pretrained(model, adapter_file, rename=names, strict=False)
