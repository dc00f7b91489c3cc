"""C++ values of `weft.strategy`: meshes, plans, shards, memory predictions and pipeline schedules.

Everything here is an immutable value or a pure function, without torch, processes or communication. Styles, kinds of
schedules and kinds of actions are strings. Invalid values raise ValueError.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, final

AXIS_NAMES: Final[tuple[str, ...]]
"""The valid names of mesh axes, in their usual order, from the outermost to the innermost."""

STYLES: Final[tuple[str, ...]]
"""The styles that a rule may name; see docs/styles.md."""

@final
class Mesh:
    """The ranks of a job laid out along named axes; the last axis varies fastest, as in torch's DeviceMesh.

    Hashable. `Mesh()` has no axes and one rank. ValueError: an unknown or repeated name, a size below 1, or more than
    2^31 - 1 ranks.
    """

    def __init__(self, axes: Sequence[tuple[str, int]] = ...) -> None: ...
    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads what `str(mesh)` prints: "data_parallel=2,tensor_parallel=4"."""

    @property
    def axes(self) -> list[tuple[str, int]]: ...
    def has_axis(self, axis: str) -> bool: ...
    def size(self, axis: str | None = None) -> int:
        """The number of ranks, in total (None) or along one axis. ValueError: this mesh has no such axis."""

    def coordinates(self, global_rank: int) -> list[int]:
        """One coordinate per axis, in axis order. ValueError: the rank lies outside the mesh."""

    def rank(self, coordinates: Sequence[int]) -> int:
        """The global rank at these coordinates, one per axis; the inverse of the method `coordinates`.

        ValueError: a coordinate outside its axis, or another number of coordinates than of axes.
        """

    def group(self, axis: str, global_rank: int) -> list[int]:
        """The group of `global_rank` along `axis`: the global ranks, ascending, whose other coordinates are equal."""

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along `axis`, ordered by first rank. Every rank is in exactly one group."""

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError, naming meshes that would fit, unless the mesh has exactly `world_size` ranks."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Rule:
    """Gives `style` and options to the modules whose names match `pattern`.

    `heads`: the name of the attribute of the layer's parent module that counts the heads in the layer's output (style
    "row": in its input). `recompute`: the forward saves only the module's input, and the backward recomputes the rest.
    `offload`: tensors saved for the backward are kept in CPU memory. `precision`: "float32", "bfloat16" or "float16",
    the dtype that the module and the modules below it compute in. ValueError: an unknown style or precision.
    """

    def __init__(
        self,
        pattern: str,
        style: str,
        heads: str | None = None,
        recompute: bool = False,
        offload: bool = False,
        precision: str | None = None,
    ) -> None: ...
    @property
    def pattern(self) -> str: ...
    @property
    def style(self) -> str: ...
    @property
    def heads(self) -> str | None: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def offload(self) -> bool: ...
    @property
    def precision(self) -> str | None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Plan:
    """Rules that map name patterns to styles, in the order in which they were given; hashable.

    Rules are given as `Rule`s or as (pattern, style, heads) triples. Equal rules are kept once. ValueError: an unknown
    style, a malformed pattern, an option that the style does not support, or two different rules with the same pattern.
    """

    def __init__(self, rules: Sequence[Rule | tuple[str, str, str | None]] = ...) -> None: ...
    @staticmethod
    def parse(text: str) -> Plan:
        """Reads the output of `str(plan)`: a subset of YAML with one rule per line, not JSON."""

    @property
    def rules(self) -> list[Rule]: ...
    def resolve(self, module_names: Sequence[str]) -> list[tuple[str, Rule]]:
        """The modules to which a rule applies, with their rules, in the order of `module_names` ("": the model itself).

        Rules that give a module the same style are merged into one rule that has the options of all of them. A module
        of the style column_row_mlp, attention, sequence_parallel or ignore owns the modules below it. An owned module
        is left out if its rules give the owner's style, with no options or the owner's options. ValueError: a pattern
        that matches no module; rules that disagree on a module; a rule of an owned module that disagrees with the
        owner's.
        """

    def to_json(self) -> str:
        """A JSON object without blanks: from pattern to style; with options, to {"style": ..., "heads": ...}."""

    def __len__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class FeedForwardModel:
    """One MLP for `TrainingSpec`, module "": layers "w1", "w2" and, if gated, "w3"; sizes in features."""

    def __init__(self, *, dim: int, hidden_dim: int, gated: bool = True, bias: bool = False) -> None: ...

@final
class DecoderModel:
    """A Llama-style language model for `TrainingSpec`; its modules are named as in LlamaForCausalLM.

    `max_tokens`: the rows of the rotary tables, which are buffers. `attention_bias`: whether query, key and value have
    biases. `tied`: whether the output layer and the embedding have one weight.
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        max_tokens: int = 0,
        attention_bias: bool = False,
        tied: bool = False,
    ) -> None: ...
    @property
    def dim(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def tied(self) -> bool: ...

@final
class TrainingSpec:
    """The training of a model on a mesh, for which memory is predicted.

    `plan`: None for "auto". Each batch of a data-parallel rank has `sequences` sequences of `tokens` tokens.
    `precision`: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed". `optimizer`: "SGD", "SGD with momentum",
    "Adam", "AdamW" or "Adagrad". `activation_checkpointing`: "none", "selective", "full" or "full:8". `device`: "cpu"
    or "cuda". `first_blocks`: of a pipeline, the first block of each stage but the first; `num_micro_batches` into
    which it splits a batch. `offload`: "none", or "cpu" for optimizer states in CPU memory. The other options are those
    of the Lightning strategies. ValueError: an unknown precision, optimizer, kind of checkpointing, schedule, device or
    offload.
    """

    def __init__(
        self,
        model: FeedForwardModel | DecoderModel,
        mesh: Mesh,
        *,
        plan: Plan | None = None,
        sequences: int = 1,
        tokens: int = 1,
        precision: str = "32-true",
        optimizer: str = "AdamW",
        optimizer_state: str = "float32",
        master_weights: str = "float32",
        fused_optimizers: bool = True,
        optimizer_in_backward: bool | Literal["rows"] = False,
        empty_init: bool = True,
        activation_checkpointing: str = "none",
        accumulate_grad_batches: int = 1,
        device: str = "cpu",
        zero_stage: int = 3,
        first_blocks: Sequence[int] | None = None,
        pipeline_schedule: str = "1f1b",
        num_micro_batches: int = 1,
        sequence_parallel: bool = False,
        offload: str = "none",
    ) -> None: ...
    def module_names(self) -> list[str]:
        """The names of the model's modules, parents first, which the plan's patterns match."""

    def predict(self, global_rank: int) -> dict[str, dict[str, int]]:
        """{phase: {category: bytes}}: a rank's bytes at the peak of the phases "init", "forward", "backward", "step".

        ValueError: sizes out of range, numbers of heads that the tensor-parallel size does not divide, a plan that does
        not match the model or has a style or option without a prediction, an axis that is not supported, a rank outside
        the mesh, or options that exclude each other.
        """

    def offloaded_bytes(self, global_rank: int) -> int:
        """The bytes of CPU memory that a rank needs with `offload="cpu"`; 0 without. ValueError: as `predict`.

        They are those of its optimizer states, and of four pinned buffers of the size of its largest parameter, rounded
        up to a power of two.
        """

    def distinct_ranks(self) -> list[tuple[int, int]]:
        """(a global rank, number of ranks like it) for each distinct set of local shapes. ValueError: as `predict`."""

    def parameter_cost(self) -> tuple[int, float]:
        """(number of parameter elements of the unsharded model, bytes that training takes for each element).

        The bytes are those of the parameter, its gradient (0 with `optimizer_in_backward`), its optimizer states (0
        with `offload="cpu"`) and autocast's copy of it. Tied parameters count once.
        """

@final
class LayerTimes:
    """Measured times of a decoder's layers, which replace predictions from the rates of a `Cluster`.

    `model`: its `num_layers` and `max_tokens` do not matter. `precision`: as of `TrainingSpec`. A sample is (part,
    tensor-parallel size, rows, tokens of a sequence, seconds of the forward, seconds of the backward) of what one rank
    computes, without communication; parts are "embedding", "block", and "head": the final norm, the output layer and
    the loss. ValueError: an unknown part or precision. `search_layouts` checks the samples.
    """

    def __init__(
        self, model: DecoderModel, *, precision: str, samples: Sequence[tuple[str, int, int, int, float, float]]
    ) -> None: ...
    @property
    def samples(self) -> list[tuple[str, int, int, int, float, float]]: ...

@final
class Cluster:
    """The rates that devices and links attain, from which step times are predicted.

    `Cluster(name)` has the rates of one of `Cluster.names()`; ValueError: another name. `float32_flops` and
    `half_flops`: operations per second of matrix products. `bytes_per_second`: of a device's memory. `overlaps`:
    whether collectives of data-parallel ranks run while the device computes. `host_link` and `network_link`: (seconds
    of a message, bytes per second that a device sends) within a host and across hosts. `seconds_per_wait`: of each
    collective until the last rank calls it, beside the messages. `device_bytes`: the memory of a device.
    `copy_bytes_per_second`: between a device and CPU memory, in each direction at once; `host_bytes_per_second` and
    `host_bytes`: of the CPU memory of a host; all three are 0 for CPU ranks. `cores_per_host`: how many operators run
    on a host at once as fast as one alone, if the devices are processes of a CPU; 0: devices do not slow each other.
    `layer_times`: measured on a device that computes alone; None: the times of layers follow from the rates.
    """

    devices_per_host: int
    cores_per_host: float
    device_bytes: int
    copy_bytes_per_second: float
    host_bytes_per_second: float
    host_bytes: int
    float32_flops: float
    half_flops: float
    bytes_per_second: float
    seconds_per_kernel: float
    overlaps: bool
    host_link: tuple[float, float]
    network_link: tuple[float, float]
    seconds_per_wait: float
    layer_times: LayerTimes | None

    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    @staticmethod
    def names() -> list[str]: ...
    def slowdown(self, num_devices: int) -> float:
        """Return how many times longer operators take than alone, when so many devices compute."""

    def all_gather_seconds(self, num_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather of `num_bytes` in total, or of a reduce-scatter of as many.

        The group has `num_ranks` ranks with the distance `stride`; consecutive ranks are on one host.
        """

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over a group as in `all_gather_seconds`."""

def search_layouts(
    training: TrainingSpec,
    cluster: Cluster,
    *,
    num_devices: int,
    global_sequences: int,
    memory_limit: int,
    pipeline_parallel: int | None = None,
    data_replicate: int | None = None,
    data_parallel: int | None = None,
    tensor_parallel: int | None = None,
    accumulate_grad_batches: int | None = None,
    zero_stages: Sequence[int] = (3, 2, 1),
    activation_checkpointing: Sequence[str] = ("none", "selective", "full"),
    optimizer_in_backward: Sequence[bool] = (False, True),
    sequence_parallel: Sequence[bool] = (False, True),
    offload: Sequence[str] = ("none",),
    max_results: int = 5,
    finds_front: bool = False,
) -> dict[str, Any]:
    """The layouts with the shortest predicted steps that fit into `memory_limit` bytes of each device.

    `training`: its mesh, pipeline, sequences, zero_stage, accumulate_grad_batches, sequence_parallel and offload do not
    matter. `global_sequences`: of a step, over all ranks. A size of an axis that is not None is fixed. The lists are
    the values to try; of `offload`, "cpu" is chosen only where a layout does not fit without it, if "none" is in the
    list, too.

    Returns {"layouts": the fastest first, "num_candidates", "num_above_limit": of those tried, "smallest": the layout
    with the least bytes if none fits, else None, "rejections": [(tensor-parallel size, why the model cannot be sharded
    over it)], "front": with `finds_front`, the layouts with checkpoints of all blocks or none that no other beats in
    both time and memory, whether they fit or not, the fastest first; else []}. A layout is {"mesh", "sequences",
    "accumulate_grad_batches", "activation_checkpointing", "optimizer_in_backward", "sequence_parallel", "offload",
    "zero_stage", "first_blocks" ([] without a pipeline), "pipeline_schedule", "num_micro_batches", "seconds":
    {"compute", "recomputation", "tensor_parallel", "data_parallel", "optimizer", "pipeline"}, "model_flops" and
    "sent_bytes" of a rank, "bytes": {category: bytes} at the peak of the rank with the most}.

    ValueError: a number below 1, no layout is valid, the training or the cluster excludes offload = ["cpu"], or the
    cluster's layer times are not valid or not those of the training (its model, precision, tokens, and the plan
    "auto").
    """

def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a dotted module name.

    `*` matches any number of characters, also none, but no dot; the pattern "" matches the model itself.
    """

def rows_per_block(device: str, num_rows: int, row_bytes: int) -> int:
    """The rows of a weight, of `row_bytes` each, that `optimizer_in_backward="rows"` steps at a time; at least 1.

    `device`: "cpu" or "cuda"; otherwise ValueError.
    """

def cpu_generator_after(state: bytes, count: int) -> bytes:
    """The state of a torch CPU generator, of 5056 bytes, after `count` 32-bit numbers have been drawn.

    ValueError: `state` has another layout.
    """

def check_style(style: str) -> None:
    """Raise ValueError, with the valid styles and the nearest one, unless `style` is in `STYLES`."""

def check_heads(module: str, attribute: str, num_heads: int, tp_size: int) -> None:
    """Raise ValueError unless `num_heads`, the value of `attribute` for `module`, is divisible by `tp_size`."""

def shard_range(dim_size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of a rank's shard of a dim, as in torch.chunk and DTensor's Shard.

    Each rank has ceil(dim_size / num_ranks) indices, the last ranks fewer or none; an empty shard starts at `dim_size`.
    `rank` counts in the group of `num_ranks` ranks.
    """

SCHEDULES: Final[tuple[str, ...]]

def default_stages_per_rank(kind: str) -> int:
    """The stages of a rank for a kind in `SCHEDULES`, if no number is given: 1, or 2 for kinds for several stages."""

def splits_backwards(kind: str) -> bool:
    """Whether schedules of a kind in `SCHEDULES` have backwards in two halves."""

"""The kinds of schedules that `Schedule.generate` supports; see docs/schedules.md."""

@final
class Action:
    """One entry of a pipeline schedule; hashable.

    `kind`: "F" (forward), "B" (full backward), "I" and "W" (the halves of a split backward: gradients of the stage's
    input, then of its weights), "SEND_F" and "RECV_F" (activations), "SEND_B" and "RECV_B" (gradients), each with a
    micro-batch; "UNSHARD" and "RESHARD" without a micro-batch. ValueError: another kind, a negative stage or
    micro-batch, or a micro-batch that is missing or superfluous.
    """

    def __init__(self, stage: int, kind: str, micro_batch: int | None = None) -> None: ...
    @staticmethod
    def parse(text: str) -> Action:
        """Reads what `str(action)` prints: "2F0" is stage 2, forward, micro-batch 0."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def micro_batch(self) -> int | None: ...
    @property
    def computes(self) -> bool:
        """Whether this action is a forward, a backward or half of a backward."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class StageCost:
    """The cost of one stage for one micro-batch. All times are in the same unit, of the caller's choice.

    A full backward takes the sum of its halves. `transfer`: the time from the end of a forward until its output arrives
    at the next stage, and as long for the gradient that is sent back. `activation_bytes` are kept from a forward until
    the end of its backward; `parameter_bytes` (parameters, gradients, optimizer states) are held all the time.
    """

    def __init__(
        self,
        *,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        transfer: float = 0,
        activation_bytes: int = 0,
        parameter_bytes: int = 0,
    ) -> None: ...
    @property
    def forward(self) -> float: ...
    @property
    def backward_input(self) -> float: ...
    @property
    def backward_weight(self) -> float: ...
    @property
    def transfer(self) -> float: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def parameter_bytes(self) -> int: ...

@final
class Span:
    """One computation of a simulated run, in the unit of the stage costs, or of a recorded run, in seconds."""

    def __init__(self, action: Action, start: float, end: float) -> None: ...
    @property
    def action(self) -> Action: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    def __eq__(self, other: object) -> bool: ...

@final
class Simulation:
    """The result of `Schedule.simulate`."""

    @property
    def makespan(self) -> float:
        """The time at which the last computation ends."""

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time in which they are idle."""

    @property
    def ranks(self) -> list[list[Span]]:
        """By rank: the rank's computations, in order."""

    @property
    def in_flight(self) -> list[int]:
        """By stage: the largest number of micro-batches, at one time, whose forward is done and backward is not."""

    @property
    def peak_bytes(self) -> list[int]:
        """By rank: the peak of `StageCost.parameter_bytes` and `activation_bytes` of its stages."""

@final
class Schedule:
    """A pipeline schedule: for each pipeline rank, the list of its actions in order; hashable.

    A rank may have several stages; a stage is on one rank. ValueError: a stage is on two ranks, a stage from 0 to the
    highest is missing, or a rank has no compute actions.
    """

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None: ...
    @staticmethod
    def parse(csv: str) -> Schedule:
        """Reads the CSV that `str(schedule)` prints: one line per rank, actions separated by commas.

        Empty cells are skipped, so files of torch.distributed.pipelining can be read, too.
        """

    @staticmethod
    def generate(kind: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
        """A schedule of a kind in `SCHEDULES`, of compute actions only.

        Stage s is on rank s % num_ranks; for "zbv", "dualpipev", "v_half" and "v_min", rank r has the stages r and
        2 * num_ranks - 1 - r.

        ValueError: a number below 1, several stages per rank for "1f1b" or "zero_bubble", or another number than two
        for the four kinds above.
        """

    @property
    def ranks(self) -> list[list[Action]]: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def rank_of(self) -> list[int]:
        """The rank of each stage."""

    @property
    def has_communication(self) -> bool:
        """Whether the schedule has sends and receives."""

    @property
    def has_backward(self) -> bool:
        """Whether the schedule has backwards, full or split."""

    def check(self, channel_capacity: int = 0) -> None:
        """Raise ValueError unless the schedule is complete and cannot deadlock; most errors name an action.

        `channel_capacity`: the number of messages that each channel (one boundary between stages in one direction)
        buffers before their receives are posted; with 0, a send blocks until its receive is posted.
        """

    def add_communication(self, channel_capacity: int = 0, prefetch: int = 1) -> Schedule:
        """The schedule with sends, and with each receive posted `prefetch` compute actions before its message is used.

        Receives are posted earlier if the ranks would deadlock otherwise. `channel_capacity`: as for `check`.
        ValueError: the schedule has communication already; see also `check`.
        """

    def add_unshards(self, max_unsharded: int = 2) -> Schedule:
        """The schedule with UNSHARD and RESHARD around compute actions.

        A rank never holds the unsharded parameters of more than `max_unsharded` stages at once.
        """

    def merge_backwards(self) -> Schedule:
        """The schedule with adjacent halves of a backward merged into a full backward.

        A backward stays split if the gradient of its stage's input is sent to another rank.
        """

    def forward_only(self) -> Schedule:
        """The forwards only, for an evaluation. ValueError: the schedule has actions that do not compute."""

    def first_micro_batches(self, num_micro_batches: int) -> Schedule:
        """The actions of the first `num_micro_batches` only, in the same order.

        ValueError: a number below 1 or above that of the schedule, or actions that do not compute.
        """

    def simulate(self, costs: Sequence[StageCost] = [StageCost()]) -> Simulation:
        """The times and bytes of a run in which each rank executes its actions as soon as their inputs have arrived.

        Args:
            costs: one for all stages; one for each stage; or one for each micro-batch of each stage, stage by stage,
                where a stage has the `parameter_bytes` of its first micro-batch.

        ValueError: another number of costs, or negative costs; see also `check`.
        """

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Partition:
    """The result of `partition`: layers cut into consecutive stages."""

    @property
    def begins(self) -> list[int]:
        """By stage: the index of its first layer."""

    @property
    def times(self) -> list[float]:
        """By stage: the time of its layers for one micro-batch."""

    @property
    def bytes(self) -> list[int]:
        """By stage: the bytes of its parameters, and of the activations of its micro-batches in flight."""

def partition(
    times: Sequence[float],
    num_stages: int,
    *,
    activation_bytes: Sequence[int] = ...,
    parameter_bytes: Sequence[int] = ...,
    in_flight: Sequence[int] = ...,
    memory_limit: int | None = None,
    memory_weight: float = 0,
) -> Partition:
    """Cuts layers into consecutive stages: minimizes the largest cost of a stage, then the sum of squared costs.

    Args:
        times: by layer, of the forward and backward of one micro-batch; all in the same unit.
        activation_bytes: by layer, of one micro-batch, kept from the forward to the backward. Default: 0.
        parameter_bytes: by layer, of parameters, gradients and optimizer states. Default: 0.
        in_flight: by stage, `Simulation.in_flight` of the schedule to be used. Default: 1.
        memory_limit: the most bytes of a stage. None: no limit.
        memory_weight: the weight of bytes in a stage's cost. 0: the cost is the stage's time. 1: the cost is the
            stage's bytes. Between: the weighted sum of the stage's fractions of the total time and of the total bytes.

    ValueError: fewer layers than stages, numbers out of range, or no cut within the limit, naming the smallest limit
    that would suffice.
    """

@final
class LinearTime:
    """A time that is linear in the number of samples of a micro-batch: fixed + per_sample * num_samples."""

    def __init__(self, fixed: float = 0, per_sample: float = 0) -> None: ...
    @staticmethod
    def fit(num_samples: Sequence[int], times: Sequence[float]) -> LinearTime:
        """Fits a line to measured times by least squares, with neither coefficient below 0.

        With one measured size, the time is proportional to the number of samples. ValueError: no measurements, another
        number of times than of sizes, a size below 1, a negative time.
        """

    @property
    def fixed(self) -> float: ...
    @property
    def per_sample(self) -> float: ...
    def at(self, num_samples: float) -> float:
        """The time for a micro-batch of `num_samples` samples."""

@final
class MeasuredTime:
    """Interpolates measured times linearly between the measured micro-batch sizes, in samples.

    Above the largest size, times continue with the slope between the two largest sizes, or are constant if this slope
    is negative. Below the smallest size, the time is that of the smallest size. With one measured size, the time is
    proportional to the number of samples. ValueError: as `LinearTime.fit`, or sizes that do not ascend.
    """

    def __init__(self, num_samples: Sequence[int], times: Sequence[float]) -> None: ...
    def at(self, num_samples: float) -> float:
        """The time for a micro-batch of `num_samples` samples."""

@final
class StageProfile:
    """The cost of one stage as a function of the number of samples of a micro-batch; fields as in `StageCost`."""

    def __init__(
        self,
        *,
        forward: LinearTime | MeasuredTime,
        backward_input: LinearTime | MeasuredTime,
        backward_weight: LinearTime | MeasuredTime,
        transfer: LinearTime | MeasuredTime = ...,
        activation_bytes_per_sample: int = 0,
        parameter_bytes: int = 0,
    ) -> None: ...
    @property
    def forward(self) -> LinearTime | MeasuredTime: ...
    @property
    def backward_input(self) -> LinearTime | MeasuredTime: ...
    @property
    def backward_weight(self) -> LinearTime | MeasuredTime: ...
    @property
    def transfer(self) -> LinearTime | MeasuredTime: ...
    @property
    def activation_bytes_per_sample(self) -> int: ...
    @property
    def parameter_bytes(self) -> int: ...

@final
class TunePoint:
    """A result of `tune`: the simulation of one schedule with given micro-batch sizes."""

    @property
    def kind(self) -> str: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def micro_batch_sizes(self) -> list[int]:
        """In samples."""

    @property
    def makespan(self) -> float:
        """The time of a training step, in the unit of the stages' times."""

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all ranks' time in which they are idle."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak over the ranks: parameters, gradients, optimizer states, and activations in flight."""

    @property
    def fits(self) -> bool:
        """Whether `peak_bytes` is within the `memory_limit` of `tune`."""

def tune(
    stages: Sequence[StageProfile],
    *,
    batch_size: int,
    num_ranks: int,
    kinds: Sequence[str] = ...,
    micro_batch_counts: Sequence[int] = ...,
    memory_limit: int | None = None,
    tapers: bool = True,
) -> list[TunePoint]:
    """Simulates kinds of schedules with numbers of micro-batches; fastest first, those above the memory limit last.

    For each kind and number there is a point with micro-batches of even sizes. Except for "naive", a second point has
    micro-batches that are smaller towards the ends of the batch, if these are faster, or are within the memory limit
    and even sizes are not.

    Args:
        stages: on the ranks of `Schedule.generate`.
        batch_size: samples of a training step.
        kinds: from `SCHEDULES`. Default: "naive", "gpipe", "1f1b" and "zero_bubble" for one stage per rank; "naive",
            "interleaved" and "looped_bfs" for several; for two, also "zbv", "dualpipev", "v_half" and "v_min".
        micro_batch_counts: the numbers of micro-batches. Default: 1, 2, 3, 4, 6, 8, 12 and so on, up to `batch_size`.
        memory_limit: the most bytes of a rank. None: no limit.
        tapers: whether uneven sizes are tried, too.

    ValueError: a number of stages that is not a multiple of `num_ranks`, numbers out of range, or a kind that does not
    support the number of stages per rank.
    """

def deal_samples(batch_size: int, shares: Sequence[float]) -> list[int]:
    """The number of samples of each micro-batch: at least one, and as nearly proportional to `shares` as possible.

    Among micro-batches with equal shares, the first ones get more samples. ValueError: no shares, fewer samples than
    shares, or a share that is not above 0.
    """
