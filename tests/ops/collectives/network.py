"""One rank of a job on hosts that a network joins: `python network.py RANK WORLD_SIZE STORE_ADDRESS INTERFACE`.

Prints a JSON line with its results.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import weft  # noqa: F401  (registers the backend)


def main() -> None:
    rank, world_size, address, interface = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(address, 29500, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "network": os.readlink("/proc/self/ns/net")})
    received = torch.zeros(3)
    works = [dist.isend(torch.full((3,), float(rank)), (rank + 1) % world_size)]
    works.append(dist.irecv(received, (rank - 1) % world_size))
    for work in works:
        work.wait()
    value = torch.full((4,), rank + 1.0, dtype=torch.bfloat16)
    segment = torch.zeros(1, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(segment, value[:1].repeat(world_size))
    print(
        json.dumps(
            {
                "rank": rank,
                "sum": tensor.view(torch.uint8).to(torch.int64).cumsum(0)[-1].item(),
                "bits": tensor[:5].view(torch.int32).tolist(),
                "gathered": gathered,
                "received": received.tolist(),
                "segment": segment.item(),
            }
        ),
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
