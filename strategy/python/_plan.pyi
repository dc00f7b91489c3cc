"""The C++ values behind `weft.strategy`: meshes, plans and the arithmetic of shards.

Everything here is a plain value or a pure function: no torch, no processes, no communication. A refusal is a
ValueError of one sentence. Styles travel as the strings in `STYLES`.
"""

from collections.abc import Sequence
from typing import Final, Literal, final

AXIS_NAMES: Final[tuple[str, ...]]
"""The names a mesh axis may have, in the order outer to inner that weft uses itself."""

STYLES: Final[tuple[str, ...]]
"""The styles a rule may name, as listed in docs/styles.md."""

@final
class Mesh:
    """Named axes with sizes, the last one running fastest, as in torch's DeviceMesh; immutable and hashable.

    `Mesh()` has no axes and one rank. ValueError: an unknown or repeated name, a size below 1.
    """

    def __init__(self, axes: Sequence[tuple[str, int]] = ...) -> None: ...
    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads what `str(mesh)` prints: "data_parallel=2,tensor_parallel=4"."""

    @property
    def axes(self) -> list[tuple[str, int]]: ...
    def has_axis(self, axis: str) -> bool: ...
    def size(self, axis: str | None = None) -> int:
        """The number of ranks, or of ranks along one axis. ValueError: this mesh has no such axis."""

    def coordinates(self, global_rank: int) -> list[int]:
        """One coordinate per axis, in axis order. ValueError: the rank lies outside the mesh."""

    def rank(self, coordinates: Sequence[int]) -> int:
        """The global rank at these coordinates: the inverse of `coordinates`."""

    def group(self, axis: str, global_rank: int) -> list[int]:
        """The global ranks, ascending, that differ from this one along `axis` only (itself included)."""

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along `axis`, ordered by their first rank; together they are every rank once."""

    def check_world_size(self, world_size: int) -> None:
        """ValueError, naming sizes that would fit, unless the mesh has exactly this many ranks."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Rule:
    """`pattern` gives `style` to the modules it matches; `heads` names the attribute counting their heads.

    `recompute`: the forward keeps the input alone. `offload`: what is kept for the backward waits in CPU memory.
    `precision`: "float32", "bfloat16" or "float16", which the module and those below compute in. ValueError: an unknown
    style or precision.
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
    """Ordered rules from name patterns to styles; immutable and hashable.

    Rules are given as `Rule`s or as (pattern, style, heads) triples. A rule that repeats an earlier one is
    kept once. ValueError: an unknown style, a malformed pattern, an option that means nothing to the style, one pattern
    with two different values.
    """

    def __init__(self, rules: Sequence[Rule | tuple[str, str, str | None]] = ...) -> None: ...
    @staticmethod
    def parse(text: str) -> Plan:
        """Reads what `str(plan)` prints, one rule a line; YAML and JSON proper are for PyYAML and json."""

    @property
    def rules(self) -> list[Rule]: ...
    def resolve(self, module_names: Sequence[str]) -> list[tuple[str, Rule]]:
        """The rule of each module that has one, in the order of `module_names` ("" is the model itself).

        Where several rules give one module the same style they are one, with the options of all. A module below one
        that a column_row_mlp, attention, sequence_parallel or ignore rule owns is left out when its own style is the
        same. ValueError: a pattern that matches no module; rules that disagree on a module, or with an owner among its
        ancestors.
        """

    def to_json(self) -> str:
        """A compact JSON object, pattern to style or to {"style": ..., "heads": ...} and the like."""

    def __len__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class FeedForwardModel:
    """One MLP for `TrainingSpec`: layers w1, w2 and, if gated, w3; sizes in features."""

    def __init__(self, *, dim: int, hidden_dim: int, gated: bool = True, bias: bool = False) -> None: ...

@final
class DecoderModel:
    """A Llama-like language model for `TrainingSpec`; its modules have the names of LlamaForCausalLM.

    `max_tokens`: rows of the rotary tables that are buffers. `attention_bias`: of query, key and value.
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

@final
class TrainingSpec:
    """A model in training on a mesh, whose memory is to be predicted.

    `plan` None: "auto". A batch of `sequences` times `tokens` goes to each data-parallel rank. `precision`: "32-true",
    "bf16-true", "16-true", "bf16-mixed", "16-mixed". `optimizer`: "SGD", "SGD with momentum", "Adam", "AdamW",
    "Adagrad". `activation_checkpointing`: "none", "selective", "full". The other options are the strategies'.
    ValueError: an unknown name.
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
        fused_optimizers: bool = True,
        optimizer_in_backward: bool | Literal["rows"] = False,
        empty_init: bool = True,
        activation_checkpointing: str = "none",
    ) -> None: ...
    def module_names(self) -> list[str]:
        """The names that the plan's patterns are held against."""

    def predict(self, global_rank: int) -> dict[str, dict[str, int]]:
        """Bytes by category at the peak of each phase: init, forward, backward and step.

        ValueError: sizes below one, heads that do not divide, a plan that does not fit, an axis without a prediction,
        a rank outside the mesh.
        """

    def distinct_ranks(self) -> list[tuple[int, int]]:
        """(rank, how many ranks are like it) of each set of local shapes. ValueError: as `predict`."""

    def parameter_cost(self) -> tuple[int, float]:
        """(parameters of the model, bytes that each costs: itself, gradient, states, half-precision copies)."""

def matches(pattern: str, name: str) -> bool:
    """Whether a dotted module name fits a pattern: `*` is one level or a part of one, "" the model itself."""

def check_style(style: str) -> None:
    """ValueError, with the valid styles and the nearest one, unless `style` is in `STYLES`."""

def check_heads(module: str, attribute: str, num_heads: int, tp_size: int) -> None:
    """ValueError unless `num_heads` heads, read from `attribute`, divide over `tp_size` ranks."""

def shard_range(dim_size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of a rank's shard of a dim, as torch.chunk and DTensor's Shard cut it.

    Chunks have the size ceil(dim_size / num_ranks); later ones are smaller or empty, an empty one starting at
    `dim_size`. `rank` counts within the group of `num_ranks`.
    """

SCHEDULES: Final[tuple[str, ...]]
"""What `Schedule.generate` makes, as listed in docs/schedules.md."""

@final
class Action:
    """One entry of a pipeline's schedule; immutable and hashable.

    `kind`: "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B" for a micro-batch, "UNSHARD", "RESHARD" without
    one. ValueError: another kind, or a number that is negative.
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
        """Whether it is a forward or any part of a backward."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class StageCost:
    """What one stage takes for one micro-batch: times in any one unit, bytes.

    A whole backward takes the sum of its halves. `transfer`: to the next stage, and as long back. `activation_bytes`
    are kept from a forward until the end of its backward, `parameter_bytes` all the time.
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
    """One computation of a simulated or recorded run."""

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
    """How a schedule runs, given what its stages cost."""

    @property
    def makespan(self) -> float:
        """The time of the last end."""

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they wait."""

    @property
    def ranks(self) -> list[list[Span]]:
        """Each rank's computations, in order."""

    @property
    def in_flight(self) -> list[int]:
        """By stage: the most micro-batches between their forward and the end of their backward."""

    @property
    def peak_bytes(self) -> list[int]:
        """By rank: the most bytes of parameters and activations at once."""

@final
class Schedule:
    """What each rank of a pipeline does, in order; immutable and hashable.

    Generate one, or read CSV, which the files of torch.distributed.pipelining are, too. The other methods give new
    schedules. ValueError: a stage on two ranks, a gap in the stages, a rank that computes nothing.
    """

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None: ...
    @staticmethod
    def parse(csv: str) -> Schedule:
        """Reads what `str(schedule)` prints: a line for each rank, actions separated by commas."""

    @staticmethod
    def generate(kind: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
        """A schedule of one of `SCHEDULES`, of arithmetic alone; stage s is on rank s % num_ranks.

        ValueError: numbers below 1; several stages a rank for "1f1b" and "zero_bubble".
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
    def has_communication(self) -> bool: ...
    @property
    def has_backward(self) -> bool: ...
    def check(self, channel_capacity: int = 0) -> None:
        """ValueError, naming the action, unless the schedule is complete and ranks never wait in a circle.

        With sends and receives, `channel_capacity` messages of a channel may be sent before their receives are posted.
        """

    def add_communication(self, channel_capacity: int = 0, prefetch: int = 1) -> Schedule:
        """The same with sends, and with receives posted `prefetch` computations ahead; see docs/schedules.md."""

    def add_unshards(self, max_unsharded: int = 2) -> Schedule:
        """The same with UNSHARD and RESHARD, no rank holding more than `max_unsharded` stages' whole parameters."""

    def merge_backwards(self) -> Schedule:
        """The same with whole backwards where two halves follow each other."""

    def forward_only(self) -> Schedule:
        """The forwards alone, for an evaluation."""

    def first_micro_batches(self, num_micro_batches: int) -> Schedule:
        """The same order for the first micro-batches alone. ValueError: more than there are, not arithmetic alone."""

    def simulate(self, costs: Sequence[StageCost] = [StageCost()]) -> Simulation:
        """Runs it on paper.

        Args:
            costs: one for all, one for each stage, or one for each stage's every micro-batch, stage by stage; bytes of
                parameters are those of a stage's first.

        ValueError: another number of costs, negative ones; see `check`.
        """

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Partition:
    """Stages that follow each other: each one's first layer, time and bytes."""

    @property
    def begins(self) -> list[int]: ...
    @property
    def times(self) -> list[float]: ...
    @property
    def bytes(self) -> list[int]: ...

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
    """Cuts layers into stages such that the slowest is as fast as can be; of several such cuts, the most even.

    Args:
        times: of each layer, forward and backward of one micro-batch.
        activation_bytes: of each layer, kept between them. Default: none.
        parameter_bytes: of each layer, with gradients and optimizer states. Default: none.
        in_flight: of each stage, `Simulation.in_flight` of the schedule to be used. Default: 1.
        memory_limit: the most bytes of a stage.
        memory_weight: 0 balances time, 1 bytes, between them both.

    ValueError: fewer layers than stages, numbers out of range, or no cut within the limit (names one that would do).
    """

@final
class LinearTime:
    """A time that grows with the samples of a micro-batch: fixed + per_sample * samples."""

    def __init__(self, fixed: float = 0, per_sample: float = 0) -> None: ...
    @staticmethod
    def fit(num_samples: Sequence[int], times: Sequence[float]) -> LinearTime:
        """The line through measurements by least squares; all per sample where they have one size."""

    @property
    def fixed(self) -> float: ...
    @property
    def per_sample(self) -> float: ...
    def at(self, num_samples: float) -> float: ...

@final
class MeasuredTime:
    """Times as they were measured, straight between the sizes, and beyond the largest on as between the last two.

    Fewer samples than were measured take as long as the smallest; of one size, times are in proportion.

    ValueError: as many times as sizes are wanted, and sizes that ascend.
    """

    def __init__(self, num_samples: Sequence[int], times: Sequence[float]) -> None: ...
    def at(self, num_samples: float) -> float: ...

@final
class StageProfile:
    """What one stage takes, by the samples of a micro-batch."""

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
    """One schedule with micro-batches of certain sizes, simulated."""

    @property
    def kind(self) -> str: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def micro_batch_sizes(self) -> list[int]:
        """In samples."""

    @property
    def makespan(self) -> float:
        """The time of a step, in the unit of the stages' times."""

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they wait."""

    @property
    def peak_bytes(self) -> int:
        """The bytes of the rank with the most: parameters, gradients, optimizer states, and activations in flight."""

    @property
    def fits(self) -> bool:
        """Whether the rank with most bytes is within the limit."""

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
    """Simulates schedules over numbers of micro-batches; fastest first, those above the limit last.

    Each number as even as can be and, where that is faster, in the best of sizes that are smaller towards the ends of
    the batch.

    Args:
        stages: stage s is on rank s % num_ranks.
        batch_size: samples of a step.
        kinds: of `SCHEDULES`. Default: all that take the stages a rank has.
        micro_batch_counts: Default: 1, 2, 3, 4, 6, 8, 12 and so on, up to `batch_size`.
        memory_limit: the most bytes of a rank.
        tapers: whether other sizes than even ones are tried.

    ValueError: stages that the ranks do not divide, numbers out of range, kinds that do not take several stages a rank.
    """

def deal_samples(batch_size: int, shares: Sequence[float]) -> list[int]:
    """The samples of each micro-batch, at least one, in proportion to `shares`; of equal shares the first are larger.

    ValueError: fewer samples than shares, a share that is not above 0.
    """
