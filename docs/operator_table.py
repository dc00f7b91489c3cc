"""The rows of the tables of docs/operators.md, for each public operator; tests/ops/test_operators_page.py checks them.

Shapes, counts and sizes are expressions of

    n       number of ranks of the group
    rank    this rank in the group
    T       tokens of x on this rank: the product of all dims but the last
    d       features of x
    f, o    rows of weight or w1 on this rank; rows of w2
    v       size of this rank's shard of the vocabulary

A mixture of experts has 2 experts on each rank and 2 for each token, all of which are chosen equally often.

In an expression, the name of a tensor (x, w1, weight, ...; y: the first result) is its number of elements. A message
token is an empty tensor that represents a message between stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Size:
    """A size: the number of elements of the call's dtype, plus bytes of tensors with other dtypes."""

    elements: str = "0"
    num_bytes: str = "0"


@dataclass(frozen=True)
class Form:
    """One way to call an operator, and its memory and communication."""

    tensors: dict[str, str]  # the shape of each tensor argument
    result: str  # the shape of the result; the shapes of several results are separated by semicolons
    options: dict[str, object] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)  # options whose values are expressions
    label: str = ""  # difference from the operator's other forms
    forward: dict[str, str] = field(default_factory=dict)  # collectives, by c10d's names
    backward: dict[str, str] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()  # names of the inputs and results (y, sum) that are kept for the backward
    saved: Size = Size()  # other tensors kept for the backward
    forward_peak: Size = Size("y")
    backward_peak: Size = Size()


@dataclass(frozen=True)
class Operator:
    name: str
    computes: str
    forms: tuple[Form, ...]


MESSAGE_SIDES = ("pipeline_send", "pipeline_recv")  # each has two forms: a message with gradients, one without
INTEGERS = ("input", "target", "seed")
ROUTES = ("counts", "expert_ids", "order", "sent", "received")  # integers of a mixture of experts
GATHER, SCATTER = {"all_gather_into_tensor": "1"}, {"reduce_scatter_tensor": "1"}
ALL_REDUCE, ALL_TO_ALL = {"all_reduce": "1"}, {"all_to_all_single": "1"}

_LINEAR = {"x": "T, d", "weight": "f, d"}
_MLP = {"x": "T, d", "w1": "f, d", "w2": "o, f"}
_GATED = _MLP | {"w3": "f, d"}
_ATTENTION = {"query": "1, 6, T, d", "key": "1, 6, T, d", "value": "1, 6, T, d"}
_SEQUENCE = {
    "tensors": _GATED,
    "result": "T, o",
    "forward": GATHER | SCATTER,
    "backward": {"all_gather_into_tensor": "2"} | SCATTER,
    "keeps": ("x", "w1", "w2", "w3"),
    "forward_peak": Size("max(n*x + 2*n*T*f, 3*n*T*f + (n + 1)*y)"),
}
_CLASSES = {"computed": {"vocab_start": "rank*v", "vocab_size": "n*v"}, "result": "", "forward": GATHER}


def _pair(name: str, computes: str, *, result: str, along_other: str, **costs: object) -> Operator:
    """Return the operator with a form for dim 0 of x, and a form for another dim, which needs transposing copies.

    `along_other` is the result's shape in the second form.
    """
    other = {key: costs.pop(key) for key in ("other_forward_peak", "other_backward_peak")}
    first = Form({"x": "T, d"}, result, {"dim": 0}, label="`dim` 0", backward_peak=Size("x"), **costs)
    peaks = {key.removeprefix("other_"): Size(value) for key, value in other.items()}
    second = Form({"x": "T, d"}, along_other, {"dim": 1}, label="another `dim`", **costs, **peaks)
    return Operator(name, computes, (first, second))


def _norm(name: str, computes: str, *, is_layer: bool = False, is_sum: bool = False) -> Operator:
    """Return the operator of a norm.

    The forward saves one number per token, and two for a layer norm. The backward sums the parameters' gradients in at
    most 64 blocks of tokens. x and residual get the same gradient tensor; because both are leaves here, autograd copies
    the tensor for the second leaf.
    """
    tensors = {"x": "T, d"} | ({"residual": "T, d"} if is_sum else {}) | {"weight": "d"}
    tensors |= {"bias": "d"} if is_layer else {}
    stats, params = ("2*T", "2*d") if is_layer else ("T", "d")
    blocks = f"x + (min(ceil(T/8), 64) + 1)*{params}"
    form = Form(
        tensors,
        "T, d; T, d" if is_sum else "T, d",
        backward=ALL_REDUCE,
        keeps=("sum" if is_sum else "x", "weight"),
        saved=Size(stats),
        forward_peak=Size(f"{'2*y' if is_sum else 'y'} + {stats}"),
        backward_peak=Size(f"max({blocks}, 2*x + {params} - {stats})" if is_sum else blocks),
    )
    return Operator(name, computes, (form,))


OPERATORS = (
    Operator(
        "column_row_mlp",
        "act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ, summed over the group, + b2",
        (
            Form(
                _MLP,
                "T, o",
                {"activation": "gelu"},
                forward=ALL_REDUCE,
                backward=ALL_REDUCE,
                keeps=("x", "w1", "w2"),
                saved=Size("T*f"),
                forward_peak=Size("y + 2*T*f"),
                backward_peak=Size("max(3*T*f, 2*T*f + x + w2)"),
            ),
            Form(
                _GATED,
                "T, o",
                {"activation": "silu"},
                label="with `w3`",
                forward=ALL_REDUCE,
                backward=ALL_REDUCE,
                keeps=("x", "w1", "w2", "w3"),
                saved=Size("2*T*f"),
                forward_peak=Size("y + 3*T*f"),
                backward_peak=Size("max(4*T*f, 3*T*f + x + w2)"),
            ),
            Form(
                _GATED,
                "T, o",
                {"activation": "silu", "recompute": True},
                label="with `w3`, `recompute`",
                forward=ALL_REDUCE,
                backward=ALL_REDUCE,
                keeps=("x", "w1", "w2", "w3"),
                forward_peak=Size("y + 3*T*f"),
                backward_peak=Size("max(6*T*f, 3*T*f + x + w2)"),
            ),
            Form(
                options={"activation": "silu", "sequence_dim": 0},
                label="with `w3`, `sequence_dim`",
                saved=Size("2*n*T*f"),
                backward_peak=Size("n*y + max(4*n*T*f + n*x, 3*n*T*f + (2*n + 1)*x + w2)"),
                **_SEQUENCE,
            ),
            Form(
                options={"activation": "silu", "sequence_dim": 0, "recompute": True},
                label="with `w3`, `sequence_dim`, `recompute`",
                backward_peak=Size("n*y + max(6*n*T*f + n*x, 3*n*T*f + (2*n + 1)*x + w2)"),
                **_SEQUENCE,
            ),
        ),
    ),
    Operator(
        "column_linear",
        "x weightᵀ + bias",
        (Form(_LINEAR, "T, f", backward=ALL_REDUCE, keeps=("x", "weight"), backward_peak=Size("x + weight")),),
    ),
    Operator(
        "row_linear",
        "x weightᵀ summed over the group, + bias",
        (Form(_LINEAR, "T, f", forward=ALL_REDUCE, keeps=("x", "weight"), backward_peak=Size("x + weight")),),
    ),
    Operator(
        "all_gather_linear",
        "gather(x) weightᵀ + bias, x sharded along `gather_dim`",
        (
            Form(
                _LINEAR,
                "n*T, f",
                {"gather_dim": 0},
                forward=GATHER,
                backward=GATHER | SCATTER,
                keeps=("x", "weight"),
                forward_peak=Size("y + n*x"),
                backward_peak=Size("(2*n + 1)*x + weight"),
            ),
        ),
    ),
    Operator(
        "linear_reduce_scatter",
        "this rank's shard along `scatter_dim` of x weightᵀ summed over the group, + bias",
        (
            Form(
                _LINEAR,
                "T/n, f",
                {"scatter_dim": 0},
                forward=SCATTER,
                backward=GATHER,
                keeps=("x", "weight"),
                forward_peak=Size("(n + 1)*y"),
                backward_peak=Size("n*y + x + weight"),
            ),
        ),
    ),
    Operator(
        "sharded_linear",
        "x weightᵀ + bias, for a different x on each rank; weight is fully sharded, as with FSDP",
        (
            Form(
                _LINEAR,
                "T, n*f",
                forward={"broadcast": "n"},
                backward={"broadcast": "n", "reduce": "n"},
                keeps=("x", "weight"),
                forward_peak=Size("y + min(n - 1, 2)*weight"),
                backward_peak=Size("x + min(n, 3)*weight"),
            ),
            Form(
                _LINEAR | {"bias": "f"},
                "T, n*f",
                label="with `bias`",
                forward={"broadcast": "n"} | GATHER,
                backward={"broadcast": "n", "reduce": "n"} | SCATTER,
                keeps=("x", "weight"),
                forward_peak=Size("y + min(n - 1, 2)*weight"),
                backward_peak=Size("x + min(n, 3)*weight"),
            ),
        ),
    ),
    Operator(
        "vocab_parallel_embedding",
        "rows of an embedding table that is sharded over the group by rows",
        (
            Form(
                {"input": "T", "weight": "v, d"},
                "T, d",
                computed={"vocab_start": "rank*v", "vocab_size": "n*v"},
                forward=ALL_REDUCE,
                keeps=("input",),
                forward_peak=Size("y", "9*T"),
                backward_peak=Size("y + weight", "9*T"),
            ),
        ),
    ),
    Operator(
        "vocab_parallel_cross_entropy",
        "the cross-entropy of classes that are sharded over the group",
        (
            Form(
                {"logits": "T, v", "target": "T"},
                keeps=("logits", "target"),
                saved=Size("2*T"),
                forward_peak=Size("0", "(24*n + 8)*T"),
                backward_peak=Size("logits", "4*T"),
                **_CLASSES,
            ),
        ),
    ),
    Operator(
        "vocab_parallel_linear_cross_entropy",
        "the cross-entropy of the logits x weightᵀ, whose classes are sharded over the group; logits are computed for "
        "one chunk of tokens at a time",
        (
            Form(
                {"x": "T, d", "weight": "v, d", "target": "T"},
                backward=ALL_REDUCE,
                keeps=("x", "weight", "target"),
                saved=Size("2*T"),
                forward_peak=Size("min(T*v, 2**23)", "16*T"),
                backward_peak=Size("min(T*v, 2**23) + x + weight"),
                **_CLASSES,
            ),
        ),
    ),
    _norm("rms_norm", "x / rms(x) [* weight], over the last dim; the tokens of x are sharded over the group"),
    _norm(
        "layer_norm",
        "(x - mean(x)) / std(x) [* weight + bias], over the last dim; the tokens of x are sharded over the group",
        is_layer=True,
    ),
    _norm("add_rms_norm", "(rms_norm(x + residual), x + residual)", is_sum=True),
    _norm("add_layer_norm", "(layer_norm(x + residual), x + residual)", is_layer=True, is_sum=True),
    Operator(
        "dropout",
        "x / (1 - p), or 0 with probability p, by position in the full tensor",
        (
            Form(
                {"x": "T, d", "seed": "1"},
                "T, d",
                {"p": 0.5, "dim": 0},
                keeps=("seed",),
                backward_peak=Size("x"),
            ),
        ),
    ),
    Operator(
        "ring_attention",
        "torch's scaled_dot_product_attention of a sequence whose tokens are sharded over the group; keys and values "
        "move around the ring of ranks",
        (
            Form(
                _ATTENTION,
                "1, 6, T, d",
                forward={"send": "n - 1", "recv": "n - 1"},
                backward={"send": "2*(n - 1)", "recv": "2*(n - 1)"},
                keeps=("query", "key", "value", "y"),
                saved=Size("6*T"),
                forward_peak=Size("6*query + 6*T + min(n - 2, 1)*(38*T + 32*d + 64)"),
                backward_peak=Size("(10 + 4*min(n - 2, 1))*query + 64*T + 32"),
            ),
        ),
    ),
    Operator(
        "ulysses_attention",
        "the same, computed by heads; each rank computes its heads for the full sequence",
        (
            Form(
                _ATTENTION,
                "1, 6, T, d",
                forward={"all_to_all_single": "2"},
                backward={"all_to_all_single": "2"},
                saved=Size("4*query + 6*T"),
                forward_peak=Size("11*query + 6*T"),
                backward_peak=Size("11*query - 6*T"),
            ),
        ),
    ),
    Operator(
        "grouped_linear",
        "x weightᵀ + bias with the weight of the expert of each row of x; rows are sorted by expert",
        (
            Form(
                {"x": "T, d", "weight": "2, f, d", "counts": "2"},
                "T, f",
                keeps=("x", "weight", "counts"),
                backward_peak=Size("x + weight"),
            ),
        ),
    ),
    Operator(
        "moe_dispatch",
        "each token of x, sent to the experts that are chosen for it; and the rows of each of this rank's experts, the "
        "order of the sent rows, and the numbers of rows to and from each rank",
        (
            Form(
                {"x": "T, d", "expert_ids": "T, 2"},
                "2*T, d; 2; 2*T; n; n, 2",
                computed={"num_experts": "2*n"},
                forward={"all_to_all_single": "2"},
                backward=ALL_TO_ALL,
                saved=Size("0", "16*T + 24*n"),
                forward_peak=Size("2*y", "32*T + 24*n + 16"),
                backward_peak=Size("2*y", "24*T"),
            ),
        ),
    ),
    Operator(
        "moe_combine",
        "for each token, the sum of the results of its experts, times weights; the rows return to the token's rank",
        (
            Form(
                {"rows": "2*T, d", "weights": "T, 2", "order": "2*T", "sent": "n", "received": "n, 2"},
                "T, d",
                forward=ALL_TO_ALL,
                backward=ALL_TO_ALL,
                keeps=("weights", "order", "sent", "received"),
                saved=Size("2*y"),
                forward_peak=Size("4*y", "24*T"),
                backward_peak=Size("4*y", "16*T"),
            ),
        ),
    ),
    Operator(
        "copy_to_group",
        "x; its gradient is summed over the group",
        (Form({"x": "T, d"}, "T, d", backward=ALL_REDUCE, backward_peak=Size("x")),),
    ),
    Operator(
        "reduce_from_group",
        "x summed over the group; the backward is the identity",
        (Form({"x": "T, d"}, "T, d", forward=ALL_REDUCE, backward_peak=Size("x")),),
    ),
    _pair(
        "scatter_to_group",
        "this rank's shard of x along `dim`",
        result="T/n, d",
        along_other="T, d/n",
        backward=GATHER,
        other_forward_peak="y",
        other_backward_peak="2*x",
    ),
    _pair(
        "gather_from_group",
        "the full tensor along `dim`, for a use that is the same on all ranks: the backward takes this rank's shard of "
        "the gradient",
        result="n*T, d",
        along_other="T, n*d",
        forward=GATHER,
        other_forward_peak="2*y",
        other_backward_peak="x",
    ),
    _pair(
        "gather_from_sequence",
        "the full tensor along `dim`, for a use that differs between ranks: the backward reduce-scatters the gradient",
        result="n*T, d",
        along_other="T, n*d",
        forward=GATHER,
        backward=SCATTER,
        other_forward_peak="2*y",
        other_backward_peak="y + x",
    ),
    _pair(
        "reduce_scatter_to_sequence",
        "this rank's shard along `dim` of the sum of x",
        result="T/n, d",
        along_other="T, d/n",
        forward=SCATTER,
        backward=GATHER,
        other_forward_peak="x + y",
        other_backward_peak="2*x",
    ),
    Operator(
        "all_to_all",
        "x, full along `split_dim` and sharded along `cat_dim` -> sharded along `split_dim` and full along `cat_dim`",
        (
            Form(
                {"x": "T, d"},
                "T/n, n*d",
                {"split_dim": 0, "cat_dim": 1},
                label="`split_dim` 0",
                forward=ALL_TO_ALL,
                backward=ALL_TO_ALL,
                forward_peak=Size("2*x"),
                backward_peak=Size("4*x"),
            ),
            Form(
                {"x": "T, d"},
                "n*T, d/n",
                {"split_dim": 1, "cat_dim": 0},
                label="`cat_dim` 0",
                forward=ALL_TO_ALL,
                backward=ALL_TO_ALL,
                forward_peak=Size("4*x"),
                backward_peak=Size("2*x"),
            ),
        ),
    ),
    Operator(
        "pipeline_send",
        "a token; starts to send the tensors. The token's backward waits for the gradients from the peer",
        (
            Form(
                {"x": "T, d"},
                "0",
                label="one tensor",
                forward={"send": "2"},
                backward={"recv": "2"},
                forward_peak=Size("0", "64"),
                backward_peak=Size("x", "64"),
            ),
            Form(
                {"x": "T, d"},
                "0",
                label="one tensor without gradient",
                forward={"send": "2"},
                forward_peak=Size("0", "64"),
            ),
        ),
    ),
    Operator(
        "pipeline_recv",
        "a token for `pipeline_wait`; starts to receive tensors with the shapes and dtypes of `like`",
        (
            Form(
                {"like": "T, d"},
                "T, d",
                label="and `pipeline_wait`, one tensor",
                forward={"recv": "2"},
                backward={"send": "2"},
                saved=Size("0", "64"),
                forward_peak=Size("y", "64"),
                backward_peak=Size("0", "64"),
            ),
            Form(
                {"like": "T, d"},
                "T, d",
                label="and `pipeline_wait`, one tensor without gradient",
                forward={"recv": "2"},
                saved=Size("0", "64"),
                forward_peak=Size("y", "64"),
            ),
        ),
    ),
    Operator(
        "pipeline_wait",
        "for the token of a receive: the received tensors, whose backward sends their gradients; for the token of a "
        "send: an empty list, once the sent tensors may be overwritten",
        (),
    ),
    Operator("pipeline_flush", "nothing; waits until all sends of this rank in the group have completed", ()),
    Operator(
        "join",
        "a copy of x, whose backward also runs the backwards of the tokens of `pipeline_send`",
        (Form({"x": "T, d"}, "T, d", {"tokens": []}, backward_peak=Size("x")),),
    ),
    Operator("adam_step_", "one step of Adam or AdamW in place; no group, no gradient", ()),
    Operator("momentum_step_", "one step of SGD with momentum in place; no group, no gradient", ()),
    Operator("split_float", "float32 as bfloat16 and lower bits, for `adam_step_` and `momentum_step_`", ()),
    Operator("join_float", "the float32 numbers of bfloat16 and lower bits", ()),
    Operator("quantize_blocks", "8-bit codes and one scale per 256 elements of a row, rounded to nearest", ()),
    Operator("dequantize_blocks", "the float32 numbers of codes and scales", ()),
)
