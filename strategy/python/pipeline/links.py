"""Determines which ranks of a pipeline send to each other, and links their devices."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from weft import pipeline_links


def peers_of(rank: int, rank_of: Sequence[int], tied: Iterable[Iterable[int]]) -> list[int]:
    """Return the ranks that `rank` sends messages to or receives messages from.

    Args:
        rank_of: the rank of each stage.
        tied: for each parameter that several stages share, these stages.
    """
    pairs = set(itertools.pairwise(rank_of))
    for stages in tied:
        ranks = {rank_of[stage] for stage in stages}
        pairs |= {(one, other) for one in ranks for other in ranks}
    peers = {one if other == rank else other for one, other in pairs if rank in (one, other)}
    return sorted(peers - {rank})


def links_enabled() -> bool:
    """Return whether the environment variable WEFT_PIPELINE_LINKS is "always": link CUDA devices of stages by NCCL.

    Without the variable, the value is "never".

    Raises:
        ValueError: the variable is neither "always" nor "never".
    """
    value = os.environ.get("WEFT_PIPELINE_LINKS") or "never"
    if value not in ("always", "never"):
        raise ValueError(f"weft: got WEFT_PIPELINE_LINKS={value}; set it to always or never.")
    return value == "always"


def link_stages(group: dist.ProcessGroup, peers: Sequence[int], device: torch.device) -> None:
    """Link this rank's CUDA device to its peers' by NCCL, if `links_enabled`; each peer must call this, too.

    Without links, CUDA devices' messages are copied through host memory. Ranks that share a device cannot be linked.
    """
    if device.type == "cuda" and links_enabled():
        index = torch.cuda.current_device() if device.index is None else device.index
        pipeline_links.link(group, peers, torch.device("cuda", index))
