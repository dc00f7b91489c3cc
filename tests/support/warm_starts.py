"""Import this to start the processes of dry runs and comparisons warm: as forks of one that has imported weft.

That takes a tenth of a second instead of five. Users have the start method "spawn", which a test of dry runs and a test
of the command `weft compare` keep.
"""

from __future__ import annotations

import multiprocessing

from weft.strategy.comparison import launch

SPAWN = launch.START_METHOD
launch.START_METHOD = "forkserver"
multiprocessing.set_forkserver_preload(
    ["weft.lightning", "weft.strategy.comparison.training", "weft.strategy.dry_run.process"]
)
