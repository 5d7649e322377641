"""The vocabulary in which a family says where its parts are.

A model is a graph of *spaces* (coordinate systems of its activations: the residual stream, the heads of a layer, the
neurons of
an expert, the vocabulary) and of tensors that map one space to another. A family names the spaces and, for each tensor
of the checkpoint, which space each of its axes lives in. Whoever wants to change coordinates (permute), split or
merge a model needs nothing else: no other module names a weight.

No privacy code, no network and no secrets here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["out", "in"]


# ---- spaces -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Residual:
    """The stream that all layers add to. `rotatable` is false where a norm's own scale lands on the stream
    (post-norm)."""

    name: str
    size: int
    norm: Literal["rms", "layer"]
    rotatable: bool = True
    why_not: str = ""


@dataclass(frozen=True)
class Latent:
    """A low-rank vector behind a norm of its own (multi-head latent attention)."""

    name: str
    size: int


@dataclass(frozen=True)
class Vocabulary:
    """Token ids."""

    name: str
    size: int


@dataclass(frozen=True)
class Elementwise:
    """Coordinates that meet an elementwise function or nothing at all: any order is as good as another."""

    name: str
    size: int


@dataclass(frozen=True)
class Neurons:
    """The inside of a feed-forward block. Gated ones have a second space `name + ".up"` that may also be scaled."""

    name: str
    size: int
    gated: bool


@dataclass(frozen=True)
class Heads:
    """Attention heads of one layer; spaces `.q`, `.k`, `.v` and `.o` (what the output projection reads).

    `rope` tells which coordinates of a head are turned together. `qk_norm` tells whether queries and keys pass a norm
    of their own: "head" (one weight vector for every head) or "all" (one norm over all heads at once).
    """

    name: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope: Literal["none", "half", "fixed"] = "none"
    qk_norm: Literal["none", "head", "all"] = "none"
    clipped: bool = False  # values are clamped coordinate by coordinate: only their order may change


@dataclass(frozen=True)
class LatentHeads:
    """Heads of multi-head latent attention; spaces `.q` [heads x (nope + rope)], `.kv` [heads x (nope + v)], `.k_rope`
    (shared by all heads) and `.o` [heads x v]. Rotary pairs are neighbours in the checkpoint."""

    name: str
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Experts:
    """The experts of one layer. With `groups` > 1 the router picks groups first, so experts stay in their group."""

    name: str
    count: int
    groups: int = 1


Space = Residual | Latent | Vocabulary | Elementwise | Neurons | Heads | LatentHeads | Experts


# ---- tensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A run of consecutive coordinates along an axis; `space` None means that they are left as they are."""

    space: str | None
    size: int


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: the vectors that it writes ("out") or reads ("in"), in segments."""

    side: Side
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Length of the axis."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor of the checkpoint sits in the graph.

    kind: "linear" (weights), "vector" (bias and the like), "norm_weight" and "norm_bias" (foldable norms), "patch" (the
    convolution that turns image patches into vectors).
    norm: the norm, by the prefix of its tensors, whose output a "linear" reads.
    expert: (experts space, index) when the tensor belongs to one expert and its name carries the index.
    stacked: (experts space, one spec per expert) when the first axis counts experts.
    """

    axes: tuple[Axis, ...]
    kind: Literal["linear", "vector", "norm_weight", "norm_bias", "patch"] = "linear"
    norm: str | None = None
    expert: tuple[str, int] | None = None
    stacked: tuple[str, tuple[TensorSpec, ...]] | None = None
    optional: bool = False
    shape_tail: tuple[int, ...] = ()
    router: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have."""
        if self.stacked:
            return (len(self.stacked[1]), *self.stacked[1][0].shape)
        return tuple(axis.size for axis in self.axes) + self.shape_tail


@dataclass
class Layout:
    """A whole model: spaces, tensors and the few names that have a role of their own."""

    family: str
    task: str  # "generate", "embed", "classify", "fill", "vision"
    spaces: dict[str, Space] = field(default_factory=dict)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    residual: str = "residual"  # the stream that the embedding writes to
    embedding: str | None = None  # token table [vocabulary, hidden]
    head: str | None = None  # output weights [vocabulary, hidden]
    head_aliases: dict[str, str] = field(
        default_factory=dict
    )  # tied copies that must exist once untied: new name -> source
    output: str | None = None  # the space that the client must undo: "vocabulary", "labels" or a stream
    patch: str | None = None  # prefix of the patch projection of a vision model
    vision_residual: str | None = None
    ignorable: tuple[str, ...] = ()  # name endings of buffers that carry no information
    max_positions: int = 0
    norm_tensors: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # norm -> (weight, bias or None)
    blocked: dict[str, list[str]] = field(default_factory=dict)  # transform -> reasons against
    notes: list[str] = field(default_factory=list)

    def add(self, *spaces: Space) -> None:
        """Declare spaces."""
        for space in spaces:
            self.spaces[space.name] = space

    def linear(
        self,
        name: str,
        out: Axis | Segment | tuple[Segment, ...],
        into: Axis | Segment | tuple[Segment, ...],
        *,
        norm: str | None = None,
        bias: bool | str = False,
        transposed: bool = False,
        expert: tuple[str, int] | None = None,
        optional: bool = False,
        router: bool = False,
    ) -> None:
        """Declare `name.weight` [out, in] (or [in, out] when `transposed`) and, if there is one, `name.bias`."""
        out_axis, in_axis = _axis("out", out), _axis("in", into)
        axes = (in_axis, out_axis) if transposed else (out_axis, in_axis)
        self.tensors[f"{name}.weight"] = TensorSpec(axes, norm=norm, expert=expert, optional=optional, router=router)
        if bias:
            self.tensors[f"{name}.bias"] = TensorSpec(
                (out_axis,), kind="vector", expert=expert, optional=optional or bias == "optional"
            )

    def vector(self, name: str, *segments: Segment, lead: int = 0, optional: bool = False) -> None:
        """Declare a tensor whose last axis holds vectors of a space: a bias, a class token, a table of positions."""
        axes = tuple(Axis("out", (Segment(None, 1),)) for _ in range(lead))
        self.tensors[name] = TensorSpec((*axes, Axis("out", segments)), kind="vector", optional=optional)

    def table(self, name: str, rows: Segment, columns: Segment, *, optional: bool = False) -> None:
        """Declare a table whose rows are vectors of a space."""
        self.tensors[name] = TensorSpec((Axis("out", (rows,)), Axis("out", (columns,))), optional=optional)

    def norm(self, name: str, segment: Segment, *, bias: bool = False, foldable: bool = True) -> str:
        """Declare a norm over `segment`; returns its name, to be given to the linears that read it."""
        axis = (Axis("out", (segment,)),)
        kinds: tuple[Literal["norm_weight", "vector"], Literal["norm_bias", "vector"]] = (
            ("norm_weight", "norm_bias") if foldable else ("vector", "vector")
        )
        self.tensors[f"{name}.weight"] = TensorSpec(axis, kind=kinds[0])
        if bias:
            self.tensors[f"{name}.bias"] = TensorSpec(axis, kind=kinds[1])
        self.norm_tensors[name] = (f"{name}.weight", f"{name}.bias" if bias else None)
        return name

    def consumers(self, norm: str) -> Iterable[str]:
        """The linears that read the output of `norm`."""
        return (name for name, spec in self.tensors.items() if spec.norm == norm)


def _axis(side: Side, what: Axis | Segment | tuple[Segment, ...]) -> Axis:
    if isinstance(what, Axis):
        return what
    return Axis(side, (what,) if isinstance(what, Segment) else what)
