"""Builds and registers one strategy class for each installed `Flavour`; builds callback classes, too.

Lightning's code is installed under several import names, the namespaces: `lightning` has `lightning.pytorch` and
`lightning.fabric`; `pytorch-lightning` installs `pytorch_lightning` and `lightning_fabric`. Their classes are distinct:
a Trainer of `lightning.pytorch` does not accept a strategy of `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from weft._plugin.batch_size_finder import BatchSizeMixin
from weft._plugin.expert_balance import BalanceMixin
from weft._plugin.expert_monitor import ExpertMixin
from weft._plugin.fabric_mixin import FabricMixin
from weft._plugin.health_monitor import HealthMixin
from weft._plugin.memory_monitor import MemoryMixin
from weft._plugin.non_finite_check import NonFiniteMixin
from weft._plugin.preemption import PreemptionMixin
from weft._plugin.pretrained_checkpoint import PretrainedCheckpointMixin
from weft._plugin.process_guard import watch_launcher
from weft._plugin.replica_check import ReplicaMixin
from weft._plugin.run_report import ReportMixin
from weft._plugin.signatures import checked_init, doc_of_options, init_of_options
from weft._plugin.throughput_monitor import ThroughputMixin
from weft._plugin.trainer_mixin import TrainerMixin

CLASS_NAME = "WeftModelParallelStrategy"
CALLBACKS: dict[str, type] = {
    "ThroughputMonitor": ThroughputMixin,
    "MemoryMonitor": MemoryMixin,
    "ExpertMonitor": ExpertMixin,
    "ExpertBalance": BalanceMixin,
    "HealthMonitor": HealthMixin,
    "Preemption": PreemptionMixin,
    "PretrainedCheckpoint": PretrainedCheckpointMixin,
    "ReplicaCheck": ReplicaMixin,
    "NonFiniteCheck": NonFiniteMixin,
    "Report": ReportMixin,
    "BatchSizeFinder": BatchSizeMixin,
}
# The sizes for each registered name; the plan is "auto", which recognises the model.
PRESETS: dict[str, dict[str, Any]] = {
    "weft": {},
    "weft_tp": {"data_parallel_size": 1},
    "weft_fsdp": {"tensor_parallel_size": 1},
    "weft_2d": {"tensor_parallel_size": 2},
}
_DESCRIPTIONS = {
    "weft": "weft: tensor parallelism inside each host, fully sharded data parallelism between hosts",
    "weft_tp": "weft: tensor parallelism over all devices",
    "weft_fsdp": "weft: fully sharded data parallelism over all devices",
    "weft_2d": "weft: tensor parallelism over pairs of devices, fully sharded data parallelism over the pairs",
}


@dataclass(frozen=True)
class Flavour:
    """One namespace's strategy class: its base class, registry and mixin, and the module from which users import it."""

    package: str  # the top-level package; the flavour is installed if this package can be imported
    strategies: str  # the module with ModelParallelStrategy and the registry
    registry: str  # the name of the strategy registry in `strategies`
    fabric: str  # the namespace's Fabric package
    mixin: type[TrainerMixin] | type[FabricMixin]
    public_module: str

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


LIGHTNING_TRAINER = Flavour(
    "lightning", "lightning.pytorch.strategies", "StrategyRegistry", "lightning.fabric", TrainerMixin, "weft.lightning"
)
LIGHTNING_FABRIC = Flavour(
    "lightning",
    "lightning.fabric.strategies",
    "STRATEGY_REGISTRY",
    "lightning.fabric",
    FabricMixin,
    "weft.lightning.fabric",
)
PYTORCH_LIGHTNING = Flavour(
    "pytorch_lightning",
    "pytorch_lightning.strategies",
    "StrategyRegistry",
    "lightning_fabric",
    TrainerMixin,
    "weft.pytorch_lightning",
)
FABRIC_ALONE = Flavour(
    "lightning_fabric",
    "lightning_fabric.strategies",
    "STRATEGY_REGISTRY",
    "lightning_fabric",
    FabricMixin,
    "weft.lightning_fabric",
)
FLAVOURS = (LIGHTNING_TRAINER, LIGHTNING_FABRIC, PYTORCH_LIGHTNING, FABRIC_ALONE)


@functools.cache
def strategy_class(flavour: Flavour) -> type:
    """Return the strategy class of a flavour; the same one at every call.

    Raises:
        ImportError: the namespace is not installed.
    """
    _check_installed(flavour)
    stock = importlib.import_module(flavour.strategies).ModelParallelStrategy
    mixin = flavour.mixin
    namespace: dict[str, Any] = {
        "__module__": flavour.public_module,
        "__doc__": doc_of_options(mixin.__doc__ or "", mixin.OPTION_GROUPS, mixin.OMITTED_OPTIONS),
        "__init__": init_of_options(CLASS_NAME, mixin._construct, mixin.OPTION_GROUPS, mixin.OMITTED_OPTIONS),
        "fabric_module": flavour.fabric,
    }
    return type(CLASS_NAME, (mixin, stock), namespace)


@functools.cache
def callback_class(flavour: Flavour, name: str) -> type:
    """Return the class `name` of `CALLBACKS` for a Trainer's flavour; the same one at every call.

    Raises:
        ImportError: the namespace is not installed.
    """
    _check_installed(flavour)
    stock = importlib.import_module(flavour.strategies.removesuffix("strategies") + "callbacks").Callback
    mixin = CALLBACKS[name]
    namespace = {
        "__module__": flavour.public_module,
        "__doc__": mixin.__doc__,
        "__init__": checked_init(name, vars(mixin)["__init__"]),
    }
    return type(name, (mixin, stock), namespace)


def _check_installed(flavour: Flavour) -> None:
    if not flavour.is_installed:
        raise ImportError(
            f"{flavour.public_module} needs the package {flavour.package.replace('_', '-')}, which is not "
            f"installed: run `pip install {flavour.package.replace('_', '-')}`."
        )


def register_installed() -> None:
    """Register the names of `PRESETS` in every installed namespace's registry; a second call changes nothing.

    Raises:
        ValueError: a name is registered for another strategy.
    """
    watch_launcher()  # as early as possible: rank 0 may die while this rank starts
    for flavour in FLAVOURS:
        if not flavour.is_installed:
            continue
        registry = getattr(importlib.import_module(flavour.strategies), flavour.registry)
        made = strategy_class(flavour)
        for name, sizes in PRESETS.items():
            if name not in registry:
                registry.register(name, made, description=_DESCRIPTIONS[name], plan="auto", **sizes)
            elif registry[name]["strategy"] is not made:
                raise ValueError(
                    f"the strategy name {name!r} is registered in {flavour.strategies} already, for "
                    f"{registry[name]['strategy']!r}; register that one under another name."
                )
