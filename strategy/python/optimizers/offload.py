"""Makes an optimizer keep its states in CPU memory or on a disk."""

from __future__ import annotations

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from weft.strategy.optimizers.host_steps import HostSteps
from weft.strategy.optimizers.low_precision import LowPrecisionAdam, LowPrecisionAdamW, LowPrecisionSGD
from weft.strategy.optimizers.offloaded_states import STATES, OffloadedOptimizer, error_text, why_not

CPU, DISK = "cpu", "disk:"


def directory_of(target: object) -> str | None:
    """Return the directory of a target "disk:/path"; None: the target is "cpu".

    Raises:
        ValueError: another target.
    """
    if target == CPU:
        return None
    if not isinstance(target, str) or not target.startswith(DISK) or target == DISK:
        raise ValueError(
            f"got {target!r} for optimizer states; pass 'cpu', or 'disk:' and a directory, as in 'disk:/scratch'."
        )
    return target.removeprefix(DISK)


def offload_states(optimizer: Optimizer, target: str) -> None:
    """Keep the states of an optimizer in CPU memory, or in files on a disk, from now on.

    Parameters on CUDA are stepped on the CPU: their gradients and weights come to pinned buffers, and the new weights
    go back, while the device goes on (`weft.strategy.optimizers.host_steps`). On the device, a parameter takes no
    memory but its weight and its gradient.

    Each process has files of its own, without names, which disappear with the process. There, states of less than
    64 KiB and sparse ones stay in memory. Call this function after `fuse`, and before `StepInBackward`. The optimizer
    stays the same object, of a subclass of its class, and steps one parameter at a time; the results are those of steps
    on the CPU to the bit. Existing states move.

    Args:
        optimizer: torch's Adam, AdamW, Adagrad or SGD with momentum; or a low-precision variant that `fuse` has made.
        target: "cpu"; or "disk:" and a directory, which is created if it does not exist. A directory of a tmpfs is
            memory.

    Raises:
        ValueError: another optimizer or target.
        OSError: the directory cannot be written to, or has too little space for the states.
    """
    directory = directory_of(target)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("got an optimizer whose states are offloaded already; call offload_states once.")
    base = type(optimizer)
    if base in _VARIANTS:
        reason = why_not(base, optimizer.param_groups)
    else:
        known = ", ".join(each.__name__ for each in STATES)
        reason = f"an optimizer of class {base.__name__}, and only {known} and what `fuse` makes of them offload states"
    wrapper = vars(optimizer).get("step")
    if reason is None and wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched"):
        reason = f"{base.__name__} whose step() is replaced"
    if reason is not None:
        raise ValueError(error_text(reason))
    attributes = set(vars(optimizer))
    optimizer.__class__ = _VARIANTS[base]
    assert isinstance(optimizer, OffloadedOptimizer)
    optimizer._directory = directory
    optimizer._host, optimizer._unfinished = HostSteps(), []
    optimizer._forget()
    try:
        optimizer._forget_others()
        optimizer._move(optimizer._own_parameters())
    except BaseException:
        optimizer.__class__ = base  # type: ignore[assignment]
        for name in vars(optimizer).keys() - attributes:
            del vars(optimizer)[name]
        raise
    if any(optimizer._steps_on_host(p) for group in optimizer.param_groups for p in group["params"]):
        optimizer._step_supports_amp_scaling = False  # a scaler's values are on the device
    vars(optimizer).pop("step", None)  # a scheduler's wrapper; the variant reports its steps itself


class OffloadedAdam(OffloadedOptimizer, Adam):
    """Adam with offloaded states."""

    stepped_class = Adam


class OffloadedAdamW(OffloadedOptimizer, AdamW):
    """AdamW with offloaded states."""

    stepped_class = AdamW


class OffloadedSGD(OffloadedOptimizer, SGD):
    """SGD with offloaded states."""

    stepped_class = SGD


class OffloadedAdagrad(OffloadedOptimizer, Adagrad):
    """Adagrad with offloaded states."""

    stepped_class = Adagrad


class OffloadedLowPrecisionAdam(OffloadedOptimizer, LowPrecisionAdam):
    """Adam with offloaded low-precision states."""

    stepped_class = LowPrecisionAdam


class OffloadedLowPrecisionAdamW(OffloadedOptimizer, LowPrecisionAdamW):
    """AdamW with offloaded low-precision states."""

    stepped_class = LowPrecisionAdamW


class OffloadedLowPrecisionSGD(OffloadedOptimizer, LowPrecisionSGD):
    """SGD with offloaded low-precision states."""

    stepped_class = LowPrecisionSGD


_VARIANTS: dict[type[Optimizer], type[OffloadedOptimizer]] = {
    variant.stepped_class: variant
    for variant in (
        OffloadedAdam,
        OffloadedAdamW,
        OffloadedSGD,
        OffloadedAdagrad,
        OffloadedLowPrecisionAdam,
        OffloadedLowPrecisionAdamW,
        OffloadedLowPrecisionSGD,
    )
}
