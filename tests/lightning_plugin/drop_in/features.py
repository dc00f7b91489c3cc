"""The features of docs/drop_in_features.md, and their outcomes: the only source of the page's table and of its test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_plugin.drop_in import generation_runs, module_runs, trainer_runs
from lightning_plugin.drop_in.models import LAYOUTS

Function = Callable[..., dict[str, Any]]

OWN_PARAMETERS = "with pipeline_cuts a rank has only the parameters of its own stages"
ONE_STAGE = "with pipeline_cuts it gets only the parameters of this rank's own stages"
TIED_LATER = "was tied to 'model.tok_embeddings.weight' after the strategy had sharded the model"
ADDED_ENTRY = "which a hook has added and no module has"
SPARSE_STATES = "zero_stage=1 shards the states of dense gradients"
SPARSE_UNITS = "FSDP2 reduces dense gradients"
# For the page: the reason, and what to do instead.
REASONS = {
    OWN_PARAMETERS: "ValueError: a rank has only the parameters of its own stages; use the optimizer's `weight_decay`.",
    ONE_STAGE: (
        "A warning: `parameters()` gives those of this rank's own stages; `gradient_clip_val` clips by the norm of all "
        "gradients, and logs it."
    ),
    ADDED_ENTRY: "ValueError: add the entry in `on_save_checkpoint`, or make it a buffer.",
    TIED_LATER: "ValueError: FSDP2 has listed the parameters by then; tie in `__init__`, `setup` or `configure_model`.",
    SPARSE_STATES: "ValueError: stage 1 shards the states of dense gradients; pass `zero_stage=0`.",
    SPARSE_UNITS: "ValueError: FSDP2 reduces dense gradients; pass `zero_stage=0`.",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature that one function of a run covers.

    Attributes:
        name: in the page, and in the function's result.
        function: runs on each rank of a layout, and on one device.
        refused: for each layout on which the feature is not supported: a text in the error, or in the warning.
        needs: a package without which the feature is not tested.
        left_out: layouts for which the feature has no meaning.
    """

    name: str
    function: Function
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def layouts(self) -> list[str]:
        return [layout for layout in LAYOUTS if layout not in self.left_out]


def _of(function: Function, *names: str, **options: Any) -> list[Feature]:
    return [Feature(name, function, **options) for name in names]


_EVERYWHERE = dict.fromkeys(LAYOUTS, ADDED_ENTRY)
FEATURES = (
    *_of(trainer_runs.loaders, "IterableDataset", "CombinedLoader"),
    *_of(trainer_runs.loaders, "StatefulDataLoader", "StatefulDataLoader of an IterableDataset", needs="torchdata"),
    *_of(trainer_runs.loaders, "LearningRateFinder", "Tuner.lr_find"),
    *_of(trainer_runs.monitors, "GradientAccumulationScheduler", "LearningRateMonitor", "ModelSummary", "Timer"),
    *_of(trainer_runs.monitors, "DeviceStatsMonitor", needs="psutil"),
    *_of(trainer_runs.monitors, "TQDMProgressBar", "RichProgressBar", "CSVLogger"),
    *_of(trainer_runs.monitors, "TensorBoardLogger", needs="tensorboard"),
    *_of(trainer_runs.monitors, "SimpleProfiler", "AdvancedProfiler"),
    *_of(trainer_runs.modes, "PyTorchProfiler", "detect_anomaly", "fast_dev_run"),
    *_of(trainer_runs.monitors, "overfit_batches"),
    *_of(trainer_runs.modes, "inference_mode", "trainer.should_stop", "KeyboardInterrupt"),
    *_of(module_runs.parameters, "L2 term over self.parameters()", refused={"pp2": OWN_PARAMETERS}),
    *_of(module_runs.parameters, *module_runs.FEATURES_OF_HOOKS, refused={"pp2": ONE_STAGE}),
    *_of(module_runs.state, "register_buffer", "on_save_checkpoint, on_load_checkpoint"),
    *_of(module_runs.state, "state_dict hooks that keep the entries"),
    *_of(module_runs.state, "state_dict hooks that add entries", refused=_EVERYWHERE),
    *_of(module_runs.state, "forward and backward hooks of modules", left_out=("pp2",)),
    *_of(module_runs.state, "weight tying in setup"),
    *_of(module_runs.state, "weight tying in on_fit_start", refused={"dp2,tp2": TIED_LATER}, left_out=("pp2",)),
    *_of(generation_runs.generation, *generation_runs.FEATURES, needs="transformers"),
    *_of(module_runs.dtypes, "torch.autocast in a module", "torch.set_float32_matmul_precision"),
    *_of(module_runs.dtypes, "nn.Embedding(sparse=True), zero_stage=0"),
    *_of(
        module_runs.dtypes,
        "nn.Embedding(sparse=True), zero_stage=1",
        refused={"dp2,tp2": SPARSE_STATES},
        left_out=("tp2", "pp2"),
    ),
    *_of(
        module_runs.dtypes,
        "nn.Embedding(sparse=True), zero_stage=3",
        refused={"dp2,tp2": SPARSE_UNITS},
        left_out=("tp2", "pp2"),
    ),
)
