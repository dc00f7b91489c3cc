"""Hides optional packages from a process whose PYTHONPATH has this folder; `support.processes` starts such processes.

torchmetrics, which Lightning imports, imports these packages where they are installed. They take a third of the time
that `import weft.lightning` takes, and users of weft need not have them. Without CUDA, triton is hidden, too, which
torch for CPUs does not bring.

If the process runs on the CUDA runtime without a device, the host's versions of CUDA operators are loaded after weft:
see `support.cuda_runtime`.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

HIDDEN = {"matplotlib", "torchvision", "transformers"}

_distribution = importlib.metadata.distribution


class _Finder:
    """Raises the error of a package that is not installed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}, which {__file__} hides", name=name)


def _visible_distribution(name: str) -> Distribution:
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return _distribution(name)


importlib.metadata.distribution = _visible_distribution
importlib.metadata.version = lambda name: _visible_distribution(name).version
sys.meta_path.insert(0, _Finder)

if "WEFT_CUDA_RUNTIME" not in os.environ and not Path("/dev/nvidiactl").exists():
    # `import triton` raises then, and importlib.util.find_spec, by which torch looks for it, returns None.
    sys.modules["triton"] = None  # type: ignore[assignment]

if "WEFT_CUDA_RUNTIME" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from support import cuda_runtime

    cuda_runtime.load_after_weft()
