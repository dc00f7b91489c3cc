"""weft.strategy.pipeline: a model's layers in stages, one after another, each on ranks of its own.

`Schedule` says which rank does what when: generated, checked, simulated and lowered by C++ (docs/pipeline.md).
"""

from weft.strategy._plan import (
    SCHEDULES,
    Action,
    LinearTime,
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
from weft.strategy.pipeline.pipeline import Pipeline

__all__ = [
    "SCHEDULES",
    "Action",
    "LinearTime",
    "Partition",
    "Pipeline",
    "Schedule",
    "Simulation",
    "Span",
    "StageCost",
    "StageProfile",
    "TunePoint",
    "partition",
    "tune",
]
