"""newest_checkpoint: finds the checkpoint from which a restarted job goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weft.strategy.checkpoint import open_checkpoint
from weft.strategy.checkpoint.manifest import has_manifest


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint directory in `directory`, or None if there is none.

        path = weft.lightning.newest_checkpoint("checkpoints")
        trainer.fit(module, loader, ckpt_path=path)  # from the start if it is None

    The newest is that of the largest global step, then of the latest time. A directory that a killed save has left
    incomplete, or whose files are missing or have another size, does not count; nor do directories of weft 0.1, and
    files. It does not communicate: call it on all ranks, which must see the same files.

    Args:
        directory: such as the `dirpath` of a `ModelCheckpoint` and of `Preemption`; folders inside are not searched.
    """
    found: list[tuple[int, float, str]] = []
    folder = Path(directory)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(".partial") or not has_manifest(path):
            continue
        try:
            checkpoint: Any = open_checkpoint(path)
        except (ValueError, OSError):
            continue
        step = checkpoint.manifest.rest.get("global_step") if isinstance(checkpoint.manifest.rest, dict) else None
        found.append((step if isinstance(step, int) else -1, path.stat().st_mtime, str(path)))
    return max(found)[2] if found else None
