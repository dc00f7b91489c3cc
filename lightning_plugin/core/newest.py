"""newest_checkpoint: finds the checkpoint from which a restarted job goes on."""

from __future__ import annotations

import os

from weft.strategy.checkpoint import location_of
from weft.strategy.checkpoint import verify as problems_of
from weft.strategy.checkpoint.manifest import Manifest, has_manifest


def newest_checkpoint(directory: str | os.PathLike[str], *, verify: bool = False) -> str | None:
    """Return the path or URL of the newest complete checkpoint directory in `directory`, or None if there is none.

        path = weft.lightning.newest_checkpoint("checkpoints")
        trainer.fit(module, loader, ckpt_path=path)  # from the start if it is None

    The newest is that of the largest global step, then of the latest time. Incomplete directories, directories whose
    files are missing or have another size, those of weft 0.1 and of Lightning, checkpoints of weights only, and files
    do not count. Checksums of tensors are compared when the checkpoint is loaded, or before with `verify`. It does not
    communicate: call it on all ranks, which must see the same files.

    Args:
        directory: such as the `dirpath` of a `ModelCheckpoint` and of `Preemption`; folders inside are not searched.
        verify: read all files of the newest, and take the next one if a checksum differs. Each rank that calls reads
            all of them.
    """
    found: list[tuple[int, float, str]] = []
    folder = location_of(directory)
    for path in folder.inner():
        try:
            if not has_manifest(path):
                continue
            manifest = Manifest.read(path)
            modified = path.modified()
        except (ValueError, FileNotFoundError):
            continue
        except OSError:
            if folder.is_local:  # such as a folder of another user
                continue
            raise
        rest = manifest.rest if isinstance(manifest.rest, dict) else {}
        names = (*manifest.tensors, *manifest.values, *rest)
        if "pytorch-lightning_version" in rest and not any(name.startswith("optimizer_") for name in names):
            continue  # a Trainer has saved weights only, from which training cannot go on
        step = rest.get("global_step")
        found.append((step if isinstance(step, int) else -1, modified, str(path)))
    for _, _, name in sorted(found, reverse=True):
        if not verify or not problems_of(name):
            return name
    return None
