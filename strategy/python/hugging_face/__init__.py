"""weft.strategy.hugging_face: lets transformers' Trainer and Accelerate train a sharded model.

The mesh has the axis names of Accelerate: "tp", the innermost axis, and before it "dp_shard" or "dp_replicate".

    weft.parallelize(model, mesh["tp"], "auto")
    apply_fsdp(model, mesh["dp_shard"])  # with data-parallel ranks
    trainer = prepare_trainer(Trainer(model, args, train_dataset=dataset), mesh)
"""

from weft.strategy.hugging_face.accelerator import prepare_accelerator
from weft.strategy.hugging_face.trainer import prepare_trainer

__all__ = ["prepare_accelerator", "prepare_trainer"]
