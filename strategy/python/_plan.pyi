"""The C++ values behind `weft.strategy`: meshes, plans and the arithmetic of shards.

Everything here is a plain value or a pure function: no torch, no processes, no communication. A refusal is a
ValueError of one sentence. Styles travel as the strings in `STYLES`.
"""

from collections.abc import Sequence
from typing import Final, final

AXIS_NAMES: Final[tuple[str, ...]]
"""The names a mesh axis may have, in the order outer to inner that weft uses itself."""

STYLES: Final[tuple[str, ...]]
"""The styles a rule may name, as listed in docs/plans.md."""

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
        optimizer_in_backward: bool = False,
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
