"""One operator: a feed-forward block sharded over 2 processes, compared with the unsharded block.

    python examples/01_one_op.py

Every rank holds a shard of each weight, half of the hidden dim. It calls `weft.ops.column_row_mlp` with its shards and
gets the full result, with one all-reduce in the forward and one in the backward. The script starts its ranks itself and
exits with 1 if the sharded results differ from the unsharded ones.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import weft

NUM_RANKS = 2
DIM, HIDDEN, NUM_TOKENS = 64, 160, 24
TOLERANCE = 1e-10  # float64: only the order of the additions differs


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="weft-example-") as folder:
        mp.spawn(run_rank, (folder,), NUM_RANKS)
        result = json.loads(Path(folder, "result.json").read_text())
    for name, difference in result.items():
        print(f"{name:<7} largest relative difference from the unsharded block: {difference:.1e}")
    return 0 if max(result.values()) <= TOLERANCE else 1


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(minutes=2),
    )
    group = dist.group.WORLD
    assert group is not None

    # All ranks have the same seed: each builds the full block and keeps its shard.
    torch.manual_seed(0)
    x = torch.randn(NUM_TOKENS, DIM, dtype=torch.float64)
    w1, w3 = torch.randn(2, HIDDEN, DIM, dtype=torch.float64) / DIM**0.5
    w2 = torch.randn(DIM, HIDDEN, dtype=torch.float64) / HIDDEN**0.5
    grad_y = torch.randn(NUM_TOKENS, DIM, dtype=torch.float64)

    full = [t.clone().requires_grad_() for t in (x, w1, w2, w3)]
    shard = [
        t.clone().requires_grad_()
        for t in (x, w1.chunk(NUM_RANKS)[rank], w2.chunk(NUM_RANKS, dim=1)[rank], w3.chunk(NUM_RANKS)[rank])
    ]

    expected = F.linear(F.silu(F.linear(full[0], full[1])) * F.linear(full[0], full[3]), full[2])
    y = weft.ops.column_row_mlp(*shard, activation="silu", group_name=group.group_name)
    expected.backward(grad_y)
    y.backward(grad_y)

    x_grad, w1_grad, w2_grad, w3_grad = (tensor.grad for tensor in full)
    pairs = {
        "y": (y, expected),
        "grad x": (shard[0].grad, x_grad),
        "grad w1": (shard[1].grad, w1_grad.chunk(NUM_RANKS)[rank]),
        "grad w2": (shard[2].grad, w2_grad.chunk(NUM_RANKS, dim=1)[rank]),
        "grad w3": (shard[3].grad, w3_grad.chunk(NUM_RANKS)[rank]),
    }
    worst = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs.values()]).detach()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(dict(zip(pairs, worst.tolist(), strict=True))))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
