"""A user's script on several hosts: trains with strategy="weft"; each rank prints a line "RESULT {JSON}".

Arguments: number of hosts, devices per host, folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning_plugin.scripts.plugin_models import Model, fixed_data, weights

import weft.lightning  # noqa: F401


class DataShard(Model):
    """Loads the rows of each batch that belong to its data-parallel rank."""

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        axes = self.trainer.strategy.data_axes
        data = [batch.chunk(axes.size)[axes.rank] for batch in fixed_data().split(4)]
        return torch.utils.data.DataLoader(data, batch_size=None)


def main(num_hosts: int, devices: int, folder: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        num_nodes=num_hosts,
        devices=devices,
        strategy="weft",
        max_epochs=1,
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        logger=False,
    )
    model = DataShard(optimizer="sgd")
    trainer.fit(model)
    strategy = trainer.strategy
    result = {
        "rank": trainer.global_rank,
        "network": os.readlink("/proc/self/ns/net"),
        "mesh": dict(zip(strategy.device_mesh.mesh_dim_names, strategy.device_mesh.shape, strict=True)),
        "tensor_group": dist.get_process_group_ranks(strategy.tensor_parallel_group),
        "launcher": type(strategy.cluster_environment).__name__,
        "weights": {name: value.double().sum().item() for name, value in weights(model).items()},
    }
    # A single write, so that the lines of ranks that share a pipe do not interleave.
    os.write(sys.stdout.fileno(), f"RESULT {json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
