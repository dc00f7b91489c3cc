"""weft.strategy.pipeline: pipeline parallelism; a model's layers are divided into stages, one or more per rank.

`Schedule` lists the actions of each rank; C++ generates, checks and simulates it, and adds sends and receives
(docs/schedules.md).

Start reading with `pipeline.py` (a step), then `runner.py` (one rank's list of actions), `trunk.py` (a stage's part of
a forward) and `recording.py` (the tensors sent between stages). `stages.py` assigns layers to stages, `choose.py`
chooses cuts if none are named, `target.py` finds the module of a LightningModule to divide, `staged_model.py` removes
the layers of other stages, `backward.py` runs a stage's backward, complete or in two halves.
"""

from weft.strategy._plan import (
    SCHEDULES,
    Action,
    LinearTime,
    MeasuredTime,
    Partition,
    Schedule,
    Simulation,
    Span,
    StageCost,
    StageProfile,
    TunePoint,
    partition,
    tune,
)
from weft.strategy.pipeline.auto_cuts import AutoCuts
from weft.strategy.pipeline.devices import spread_over_devices
from weft.strategy.pipeline.draw import draw
from weft.strategy.pipeline.pipeline import Pipeline
from weft.strategy.pipeline.profile import LayerProfile, balanced_cuts, profile_layers
from weft.strategy.pipeline.staged_model import find_staged, staged_model_of
from weft.strategy.pipeline.tuning import draw_tuning, profile_stages, tuning_table

__all__ = [
    "SCHEDULES",
    "Action",
    "AutoCuts",
    "LayerProfile",
    "LinearTime",
    "MeasuredTime",
    "Partition",
    "Pipeline",
    "Schedule",
    "Simulation",
    "Span",
    "StageCost",
    "StageProfile",
    "TunePoint",
    "balanced_cuts",
    "draw",
    "draw_tuning",
    "find_staged",
    "partition",
    "profile_layers",
    "profile_stages",
    "spread_over_devices",
    "staged_model_of",
    "tune",
    "tuning_table",
]
