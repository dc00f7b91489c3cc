"""The bindings of ops/bindings/collectives.cpp, documented in <weft/ops/backend.h> and <weft/ops/pipeline.h>."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, Store

def set_error_classes(
    mismatch: type[Exception], peer_lost: type[Exception], timeout: type[Exception], aborted: type[Exception]
) -> None: ...
def make_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    global_ranks: Sequence[int],
    staging_limit_bytes: int,
    make_transport: Callable[[Store, int, int, timedelta], Backend],
) -> Backend: ...
def exit_after(delay: timedelta, status: int) -> None: ...
def leave_all_groups() -> None: ...
def link_pipeline(
    group: ProcessGroup, peer: int, device: torch.device, make: Callable[[int, int], Backend]
) -> None: ...
def pipeline_link_device(group: ProcessGroup, peer: int) -> torch.device | None: ...
def unlink_pipeline(group: ProcessGroup) -> None: ...
