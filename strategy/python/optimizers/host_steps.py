"""Steps parameters of a device on the CPU, with states in CPU memory, while the device goes on.

A step of a parameter begins with copies of its weight and its gradient to pinned buffers. A thread waits for them, runs
the optimizer's step on the buffers, and starts the copy of the new weight to the device. Copies run on two streams of
their own, one for each direction, so that the device computes meanwhile, and a step inside the backward overlaps with
the backward of the next layers. There are two sets of buffers: one parameter is stepped while the next one is copied.

The weight is copied to the CPU at each step, although the CPU wrote it last, because other code may change the weight
on the device (loading, averaging of weights), and because a copy that stays would take memory for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class HostSteps:
    """Runs steps on copies of parameters in CPU memory, in the order of `submit`, in a thread.

    Parameters on the CPU are copied, too, so that the same logic runs without a device.
    """

    def __init__(self) -> None:
        self._buffers = (_Buffers(), _Buffers())
        self._num_submitted = 0
        self.num_bytes = 0  # of the largest weight, for which buffers are allocated once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-host-steps")
        self._streams: dict[torch.device, _Streams] = {}

    def submit(self, weight: Tensor, gradient: Tensor, step: Callable[[Tensor], None]) -> None:
        """Start a step; returns while it runs, or after the step before the last one.

        Args:
            weight: this rank's shard of a parameter on its device; has the new values after `wait`. Until then, only
                work that was enqueued before may read it.
            gradient: of the same shape, on the same device; the caller may free it.
            step: called in the thread with a CPU copy of the weight that has its `grad`; changes the copy.

        Raises:
            the error of an earlier step.
        """
        buffers = self._buffers[self._num_submitted % len(self._buffers)]
        self._num_submitted += 1
        buffers.wait()
        streams = self._streams.get(weight.device)
        if streams is None and weight.is_cuda:
            streams = self._streams[weight.device] = _Streams(weight.device)
        twin = buffers.download(weight, gradient, streams, self.num_bytes)
        buffers.job = self._thread.submit(buffers.run, twin, weight, step, streams)

    def wait(self) -> None:
        """Wait until all steps are computed, and make the current stream wait until the weights are on the device.

        Raises:
            the first error of a step.
        """
        errors: list[BaseException] = []
        for buffers in self._buffers:
            try:
                buffers.wait()
            except Exception as error:
                errors.append(error)
        for streams in self._streams.values():
            torch.cuda.current_stream(streams.device).wait_stream(streams.upload)
        if errors:
            raise errors[0]


class _Streams:
    """The streams of the copies from and to a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.download, self.upload = torch.cuda.Stream(device), torch.cuda.Stream(device)


class _Buffers:
    """CPU memory for one weight and its gradient, which grows to the largest ones; pinned if they are on CUDA."""

    def __init__(self) -> None:
        self.job: Future[None] | None = None
        self._weight, self._gradient = (torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._downloaded: torch.cuda.Event | None = None
        self._uploaded: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the step that uses these buffers is computed; raises its error."""
        if self.job is None:
            return
        try:
            self.job.result()
        finally:
            if self.job.done():  # unless the wait was interrupted
                self.job = None

    def download(self, weight: Tensor, gradient: Tensor, streams: _Streams | None, num_bytes: int) -> Tensor:
        """Start to copy a weight and its gradient here; return the copy of the weight, with its `grad`.

        `num_bytes`: the size of a buffer, if the tensor that it is for is not larger.
        """
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the last weight in these buffers, which may be replaced by larger ones
        is_dense = gradient.layout == torch.strided
        self._weight = _grown(self._weight, weight, num_bytes)
        self._gradient = _grown(self._gradient, gradient, num_bytes) if is_dense else self._gradient
        twin = _view(self._weight, weight, weight.dtype)
        # Fused kernels need a gradient with the strides of the weight.
        twin_gradient = _view(self._gradient, weight, gradient.dtype) if is_dense else gradient.cpu()
        pairs = [(twin, weight), (twin_gradient, gradient)] if is_dense else [(twin, weight)]
        if streams is None:
            for copied, original in pairs:
                copied.copy_(original)
        else:
            # Wait for the work that computes the gradient and reads the old weight, but not for the work after it.
            streams.download.wait_stream(torch.cuda.current_stream(streams.device))
            with torch.cuda.stream(streams.download):
                for copied, original in pairs:
                    copied.copy_(original, non_blocking=True)
                self._downloaded = streams.download.record_event()
            if is_dense:
                gradient.record_stream(streams.download)
        twin.grad = twin_gradient
        return twin

    def run(self, twin: Tensor, weight: Tensor, step: Callable[[Tensor], None], streams: _Streams | None) -> None:
        """Step the copy of a weight, and start to copy it back; in the thread."""
        if streams is None:
            step(twin)
            weight.copy_(twin)
            return
        assert self._downloaded is not None
        torch.cuda.set_device(streams.device)  # a thread begins with the first device, on which it would take memory
        self._downloaded.synchronize()
        step(twin)
        with torch.cuda.stream(streams.upload):
            weight.copy_(twin, non_blocking=True)
            self._uploaded = streams.upload.record_event()


def _grown(buffer: Tensor, like: Tensor, num_bytes: int) -> Tensor:
    if buffer.numel() >= like.nbytes and (buffer.is_pinned() or not like.is_cuda):
        return buffer
    return torch.empty(max(like.nbytes, num_bytes), dtype=torch.uint8, pin_memory=like.is_cuda)


def _view(buffer: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the beginning of a buffer as a tensor of the shape and the order of dims of another one."""
    strides = torch.empty_like(like, device="meta").stride()  # dense
    return buffer[: like.numel() * dtype.itemsize].view(dtype).as_strided(like.shape, strides)
