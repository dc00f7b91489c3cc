"""Adds up the predicted seconds of a training step from its operators and collectives, in their order."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from weft.strategy._plan import Cluster
from weft.strategy.dry_run.operator_seconds import OperatorSeconds, flops_of


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Predicted times of a step of one rank.

    Attributes:
        seconds: "compute", "tensor_parallel" and "data_parallel" (as far as the device waits for these collectives),
            and "optimizer".
        flops: operations of matrix products, convolutions and attention, with those of recomputation.
        sent_bytes: that the rank sends.
        num_operators: calls that are not views.
    """

    seconds: dict[str, float]
    flops: float
    sent_bytes: float
    num_operators: int


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """The predicted times of a pipeline's step on one rank, each as if the rank waited for no other.

    Attributes:
        schedule: of all ranks, as the text of a `Schedule`.
        seconds: of each computation of this rank, by the text of its action, such as "0F3".
        message_bytes: that this rank sends in the step, by the channel of `channel_of`.
    """

    schedule: str
    seconds: dict[str, float]
    message_bytes: dict[int, int]


class StepClock:
    """Follows two timelines: that of the device, and that of the collectives of data-parallel ranks.

    Collectives of tensor-parallel ranks always stop the device. Those of data-parallel ranks do so if the cluster does
    not overlap them, except that replicas on several hosts average gradients while the backward goes on. CPU ranks also
    move and reduce the data of a call between hosts in their memory, which takes as long as on one host.

    If the cluster overlaps them, FSDP2 starts an all-gather when the device begins to compute with the parameters that
    were gathered before, and the device waits for it; a reduction starts when the device has computed the gradients,
    and the device waits for it when the optimizer steps. All of these share one link, one after another.
    """

    def __init__(
        self,
        cluster: Cluster,
        operators: OperatorSeconds,
        num_ranks: int,
        tensor_size: int,
        *,
        has_sharded_parameters: bool = True,
    ) -> None:
        self._cluster = cluster
        self._one_host: Cluster = pickle.loads(pickle.dumps(cluster))
        self._one_host.devices_per_host = 1 << 30
        self._one_host.seconds_per_wait = 0.0
        self._operators = operators
        self._slowdown = cluster.slowdown(num_ranks)
        self._tensor_size = tensor_size
        self._has_sharded_parameters = has_sharded_parameters
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the earlier calls."""
        self._seconds = dict.fromkeys(("compute", "tensor_parallel", "data_parallel", "optimizer"), 0.0)
        self._flops = self._sent_bytes = 0.0
        self._num_operators = 0
        self._now = 0.0  # of the device
        self._message_bytes: dict[int, int] = {}  # by channel
        self._link_is_free = 0.0
        self._prefetch = 0.0  # when the last gathered parameters were available

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str) -> None:
        """Add the call of an operator that is not a view."""
        self._num_operators += 1
        self._flops += flops_of(func, args, kwargs, result)
        alone = self._cluster.seconds_per_kernel + self._operators.of(func, args, kwargs, result)
        if phase == "step":
            self._wait_until(self._link_is_free)
        self._advance("optimizer" if phase == "step" else "compute", self._slowdown * alone)

    def allocation(self, num_bytes: int, phase: str) -> None:
        """Add the first write to an empty tensor, or to a storage with a new size."""
        seconds = self._slowdown * self._operators.first_write(num_bytes)
        self._advance("optimizer" if phase == "step" else "compute", seconds)

    def collective(self, name: str, num_bytes: int, ranks: list[int]) -> None:
        """Add a collective of c10d.

        Args:
            name: of the operator of c10d.
            num_bytes: of the full tensor: what an all-gather returns, or what a reduction takes.
            ranks: global ranks of the group.
        """
        size = len(ranks)
        if size == 1 or name == "barrier":
            return
        stride = ranks[1] - ranks[0]
        is_all_reduce = name.startswith("allreduce")

        def seconds_on(cluster: Cluster) -> float:
            in_group = cluster.all_reduce_seconds if is_all_reduce else cluster.all_gather_seconds
            return in_group(float(num_bytes), size, stride)

        seconds = seconds_on(self._cluster)
        per_host = self._cluster.devices_per_host
        crosses_hosts = ranks[0] // per_host != ranks[-1] // per_host
        near = seconds_on(self._one_host) if crosses_hosts and self._cluster.cores_per_host > 0 else 0.0
        self._sent_bytes += (2 if is_all_reduce else 1) * num_bytes * (size - 1) / size
        if ranks[0] // self._tensor_size == ranks[-1] // self._tensor_size:
            self._advance("tensor_parallel", near + seconds)
        elif not self._cluster.overlaps and is_all_reduce and crosses_hosts and not self._has_sharded_parameters:
            self._advance("data_parallel", near)
            self._link_is_free = max(self._link_is_free, self._now) + seconds
        elif not self._cluster.overlaps:
            is_of_fsdp = self._has_sharded_parameters and ("gather" in name or "reduce_scatter" in name)
            code = self._slowdown * self._operators.sharded_collective if is_of_fsdp else 0.0
            self._advance("data_parallel", near + seconds + code)
        elif "gather" in name:
            self._link_is_free = max(self._link_is_free, self._prefetch) + seconds
            self._wait_until(self._link_is_free)
            self._prefetch = self._now
        else:
            self._link_is_free = max(self._link_is_free, self._now) + seconds

    def message(self, channel: int, num_bytes: int) -> None:
        """Add a message to another stage, whose time is not part of this rank's."""
        self._message_bytes[channel] = self._message_bytes.get(channel, 0) + num_bytes
        self._sent_bytes += num_bytes

    def repeat(self, number: int) -> None:
        """Count everything since `begin_step` as often as given."""
        self._wait_until(self._link_is_free)
        self._seconds = {kind: number * seconds for kind, seconds in self._seconds.items()}
        self._flops *= number
        self._sent_bytes *= number
        self._num_operators *= number
        self._now *= number
        self._link_is_free = self._prefetch = self._now

    @property
    def now(self) -> float:
        """The seconds of the device since `begin_step`."""
        return self._now

    @property
    def message_bytes(self) -> dict[int, int]:
        """The bytes of all messages since `begin_step`, by channel."""
        return dict(self._message_bytes)

    def end_step(self) -> StepTimes:
        """Return the times since `begin_step`."""
        self._wait_until(self._link_is_free)
        return StepTimes(dict(self._seconds), self._flops, self._sent_bytes, self._num_operators)

    def _advance(self, kind: str, seconds: float) -> None:
        self._seconds[kind] += seconds
        self._now += seconds

    def _wait_until(self, time: float) -> None:
        if time > self._now:
            self._advance("data_parallel", time - self._now)
