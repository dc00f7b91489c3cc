"""Measures the layer times of a Llama-like model on one rank, without communication.

weft shards a model of Hugging Face's transformers with one block as in training, over torch's fake process group, whose
collectives send nothing. So the rank runs the operators of a training on its tensor-parallel shards. A step has eight
borders: in the forward and in the backward, those of the step and of the block. The operators before the block in the
forward are the part "embedding"; those after it are the part "head".
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.strategy._plan import DecoderModel
from weft.strategy.apply import parallelize
from weft.strategy.comparison.sharded import JobMesh
from weft.strategy.deferred import deferred_init
from weft.strategy.dry_run.operator_seconds import EVICTING_BYTES
from weft.strategy.dry_run.stages import agreeing_peers
from weft.strategy.estimate.config import Training
from weft.strategy.estimate.state import build_model
from weft.strategy.planning.layout import MeshSizes
from weft.strategy.tuning.entry import read_training
from weft.strategy.tuning.layer_times import LayerSample, MeasuredLayers
from weft.strategy.tuning.request import host_bytes

_TENSOR_SIZES = (1, 2, 4, 8)
_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}
# A point is measured until its steps took that long in total, within these numbers of steps, after a warm-up step.
_TOTAL_SECONDS = 1.0
_LEAST_STEPS, _MOST_STEPS = 3, 15
_GPU_EVICTING_BYTES = 256 << 20
_LOGIT_BYTES = 16  # for each logit: in the precision, in float32, and the gradients of both
_PARTS = ("embedding", "block", "head")
_BLOCK = "model.layers.0"


def profile_layers(
    path: str | Path,
    *,
    tensor_sizes: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> MeasuredLayers:
    """Return the layer times of the model in a configuration of `weft estimate`, in its precision.

    Takes a minute or so for small models, in which the device should do nothing else. This process must have no process
    group, and has none afterwards.

    Args:
        path: of the configuration; its layout and its number of layers do not matter.
        tensor_sizes: numbers of tensor-parallel ranks, whose first one is measured; None: those of 1, 2, 4 and 8 that
            divide the heads.
        rows: tokens of the batches, multiples of the configuration's tokens; None: those of one sequence, of the
            configuration's batch, and of one such batch for each tensor-parallel rank, as far as the logits fit into
            half of the memory.
        device: "cpu", with one thread, or "cuda".
        progress: called with a line before each measurement.

    Raises:
        ValueError: an argument is not valid, the configuration is not one of a Llama-like model with plan: auto, or
            transformers is not installed.
    """
    training = read_training(path)
    model = training.model
    if not isinstance(model, DecoderModel) or training.plan is not None:
        raise ValueError(
            "profile: layer times are measured for llama, mistral and qwen2 with plan: auto; give such a configuration."
        )
    training.full_spec()  # checks names, such as that of the precision
    where = _device_of(device)
    sizes = _tensor_sizes_of(model, tensor_sizes)
    points = [(size, number) for size in sizes for number in _rows_of(training, model, size, rows, where)]
    samples: list[LayerSample] = []
    with _one_thread():
        for size, group in itertools.groupby(points, key=lambda point: point[0]):
            with _played_rank(size):
                layers = _Layers(training, size, where)
                for _, number in group:
                    if progress is not None:
                        done = len(samples) // len(_PARTS)
                        progress(f"{done + 1} of {len(points)}: {size} tensor-parallel ranks, {number} rows")
                    samples += layers.measure(number)
                del layers
            gc.collect()
    return MeasuredLayers(model, _precision_of(training), tuple(samples))


def _precision_of(training: Training) -> str:
    precision: str = training.options.get("precision", "32-true")
    return precision


def _device_of(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"profile: got the device {name!r}; give cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("profile: got the device 'cuda', and torch finds no GPU; give cpu, or install torch for CUDA.")
    return torch.device(name)


def _tensor_sizes_of(model: DecoderModel, given: Sequence[int] | None) -> list[int]:
    def divides(size: int) -> bool:
        return size > 0 and model.num_heads % size == 0 and model.num_kv_heads % size == 0

    if given is None:
        return [size for size in _TENSOR_SIZES if divides(size)]
    for size in given:
        if not divides(size):
            raise ValueError(
                f"profile: got {size} tensor-parallel ranks, which do not divide {model.num_heads} heads and "
                f"{model.num_kv_heads} key-value heads; give numbers that divide both."
            )
    return sorted(set(given))


def _rows_of(
    training: Training, model: DecoderModel, tensor_size: int, given: Sequence[int] | None, device: torch.device
) -> list[int]:
    sequences, tokens = training.batch["sequences"], training.batch["tokens"]
    if given is None:
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
        most = memory // 2 // (model.vocab_size * _LOGIT_BYTES)
        numbers = {tokens * each for each in (1, sequences, sequences * tensor_size)}
        return sorted(number for number in numbers if number <= max(most, tokens))
    for number in given:
        if number < 1 or number % tokens != 0:
            raise ValueError(
                f"profile: got {number} rows for sequences of {tokens} tokens; give multiples of {tokens}, or another "
                "batch in the configuration."
            )
    return sorted(set(given))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _played_rank(num_ranks: int) -> Iterator[None]:
    """Inside, this process is the first of `num_ranks` ranks, the others of which do not exist."""
    if dist.is_initialized():
        raise ValueError("profile: this process has a process group; measure layer times in one that has none.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with agreeing_peers():
            yield
    finally:
        dist.destroy_process_group()


class _Layers:
    """The shards of a model with one block on the first of some tensor-parallel ranks."""

    def __init__(self, training: Training, tensor_size: int, device: torch.device) -> None:
        self._tensor_size = tensor_size
        self._device = device
        self._tokens = training.batch["tokens"]
        kind, _, suffix = _precision_of(training).partition("-")
        self._dtype, self._is_mixed = _DTYPES[kind], suffix == "mixed"
        torch.manual_seed(0)
        with torch.device(device), deferred_init():
            self._model = _one_block(training).to(torch.float32 if self._is_mixed else self._dtype).train()
        job = JobMesh(MeshSizes(1, 1, 1, 1, tensor_size), device.type)
        parallelize(self._model, job.mesh, "auto")
        assert isinstance(training.model, DecoderModel)
        self._vocab_size = training.model.vocab_size
        clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
        self._step = _Step(self._model, self._computing, clock)

    def measure(self, num_rows: int) -> list[LayerSample]:
        """Return the median times of the parts, over steps on random tokens."""
        steps: list[list[float]] = []
        self._step.run(self._random_tokens(num_rows))
        while len(steps) < _LEAST_STEPS or (sum(map(sum, steps)) < _TOTAL_SECONDS and len(steps) < _MOST_STEPS):
            steps.append(self._step.run(self._random_tokens(num_rows)))
        forward, backward = [], []
        for idx in range(len(_PARTS)):
            forward.append(statistics.median(step[idx] for step in steps))
            backward.append(statistics.median(step[-1 - idx] for step in steps))
        return [
            LayerSample(part, self._tensor_size, num_rows, self._tokens, forward[idx], backward[idx])
            for idx, part in enumerate(_PARTS)
        ]

    def _random_tokens(self, num_rows: int) -> Tensor:
        return torch.randint(self._vocab_size, (num_rows // self._tokens, self._tokens), device=self._device)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, a forward computes in the precision, as under Lightning's plugins."""
        if self._is_mixed:
            with torch.autocast(self._device.type, self._dtype):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _one_block(training: Training) -> nn.Module:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "profile: layer times are measured on a model of transformers, which is not installed; install it."
        ) from error
    assert training.hugging_face is not None
    config = {**training.hugging_face, "num_hidden_layers": 1, "use_cache": False}
    config.pop("architectures", None)  # a causal language model, as the search assumes
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:1]
    return build_model(config)


class _Clock(Protocol):
    def now(self) -> Any:
        """Return this moment, for `seconds`."""

    def evict(self) -> None:
        """Write many bytes, so that the caches hold few others, as in a training with many layers."""

    def seconds(self, begin: Any, end: Any) -> float: ...


class _CpuClock:
    def __init__(self) -> None:
        self._evicting = torch.zeros(EVICTING_BYTES // 4)

    def now(self) -> float:
        return time.perf_counter()

    def evict(self) -> None:
        self._evicting.add_(1)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _CudaClock:
    """The moments are events of the current stream. Evicting keeps the device busy while the host calls kernels."""

    def __init__(self, device: torch.device) -> None:
        self._evicting = torch.zeros(_GPU_EVICTING_BYTES // 4, device=device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def evict(self) -> None:
        self._evicting.add_(1)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000


class _Step:
    """Forward and backward of a model with one block, with times at the borders of its parts."""

    def __init__(
        self, model: nn.Module, computing: Callable[[], contextlib.AbstractContextManager[None]], clock: _Clock
    ) -> None:
        self._model, self._computing, self._clock = model, computing, clock
        self._borders: list[tuple[Any, Any]] = []  # the end of what is before each border, the begin of what follows
        block = model.get_submodule(_BLOCK)
        block.register_forward_pre_hook(self._block_begins)
        block.register_forward_hook(self._block_ends)

    def run(self, tokens: Tensor) -> list[float]:
        """Return the seconds of the forward of each part, and of the backward of each in the reverse order."""
        self._borders = []
        self._cross()
        with self._computing():
            loss: Tensor = self._model(input_ids=tokens, labels=tokens).loss
        self._cross()
        self._model.zero_grad()  # as under Lightning, whose closure does so between forward and backward
        self._cross()
        loss.backward()
        self._cross()
        seconds = [self._clock.seconds(begin, end) for (_, begin), (end, _) in itertools.pairwise(self._borders)]
        assert len(seconds) == 2 * len(_PARTS) + 1, "each border is crossed once"
        del seconds[len(_PARTS)]  # what is between forward and backward
        return seconds

    def _cross(self, _gradient: Tensor | None = None) -> None:
        end = self._clock.now()
        self._clock.evict()
        self._borders.append((end, self._clock.now()))

    def _block_begins(self, _block: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].register_hook(self._cross)
        self._cross()

    def _block_ends(self, _block: nn.Module, _args: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(self._cross)
        self._cross()
