"""weft.strategy.dry_run: predicts a rank's memory by training the real module on tensors without values.

Start reading with `entry.py`, which runs `training.py` in a new process. `counting_mode.py` sees each operator and
holds the storages that it makes in the ledger of `ledger.py`; `temporaries.py` measures the memory inside operators,
and `staging.py` follows the shared memory of collectives. `stages.py` and `messages.py` are for pipelines.
docs/decisions/0031 says why.
"""

from weft.strategy.dry_run.entry import DryRunEstimate, estimate_module
from weft.strategy.dry_run.request import Request

__all__ = ["DryRunEstimate", "Request", "estimate_module"]
