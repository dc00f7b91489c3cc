"""Creates the process group once per process, keeps it between runs, and destroys it at a clean exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft._plugin.process_guard import guard


def check_world_size(num_processes: int) -> None:
    """Raise ValueError if this process is already a rank of a default group of another size."""
    if dist.is_initialized() and dist.get_world_size() != num_processes:
        raise ValueError(
            f"this process is a rank of a group of {dist.get_world_size()} and cannot join one of {num_processes}: "
            "run the script once for each number of devices."
        )


@contextmanager
def destroying_group_at_exit() -> Iterator[None]:
    """If the default group is created inside, destroy it at a clean interpreter exit; leave an existing one alone."""
    existed = dist.is_initialized()
    yield
    guard().install_excepthook()
    if not existed and dist.is_initialized():
        made = dist.group.WORLD
        guard().on_clean_exit(lambda: _destroy(made))


def _destroy(group: object) -> None:
    # The user may have destroyed this group and created another.
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
