"""The layers of a decoder: a mixer (specs/mixers.py; None where a block has none) and a
feed-forward (an MLP, a mixture of experts, or None), each behind a norm. No torch, no time.

Adding a kind is a class here or in mixers.py, its operations in perfmodel and, to run it, its
module in runtime/.
Shapes are Hugging Face's: H hidden_size, F width.
"""

from typing import Literal

import msgspec

from magicdec.specs.mixers import Kind, Mixer, Part, Projection, matrices, whole

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai", "xielu"]
"""`relu2` is relu(x)²; `swigluoai` is gpt-oss's clamped (up + 1) · gate · sigmoid(alpha · gate);
`xielu` learns two numbers in each layer (arXiv 2411.13010)."""


class MLP(Kind, frozen=True, kw_only=True, tag="mlp"):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x))) where it is not gated."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    @property
    def active_width(self) -> int:
        return self.width

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that ranks divide."""
        return (self.width,)

    @property
    def num_experts(self) -> int:
        """Routed experts: none."""
        return 0

    @property
    def num_inner(self) -> int:
        """Matrices that lead into the width."""
        if self.gated:
            return 2
        return 1

    def projections(self, hidden_size: int, prefix: str = "") -> tuple[Projection, ...]:
        return (
            Projection(
                f"{prefix}gate_up",
                (Part(self.width, self.num_inner),),
                whole(hidden_size),
            ),
            Projection(f"{prefix}down", (whole(hidden_size),), Part(self.width, 1)),
        )

    def num_parameters(self, hidden_size: int) -> int:
        if self.bias:
            biases = self.num_inner * self.width + hidden_size
        else:
            biases = 0
        learned = 0
        if self.activation == "xielu":
            learned = 2
        return matrices(self.projections(hidden_size)) + biases + learned

    def expert_parameters(self, hidden_size: int) -> int:
        return 0

    def active_parameters(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    @property
    def why_not_run(self) -> str | None:
        if self.activation == "swigluoai" and not self.gated:
            return "feed-forwards of an activation that has a gate, without one"
        is_learned = self.activation == "xielu" and self.gated
        if is_learned:
            return "feed-forwards with xIELU that are gated or experts"
        return None


class MixtureOfExperts(Kind, frozen=True, kw_only=True, tag="mixture_of_experts"):
    """A router that sends each token to `num_experts_per_tok` of `num_experts` MLPs, next to shared
    experts that every token passes (as one MLP of `shared_width` in all)."""

    num_experts: int
    num_experts_per_tok: int
    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    """The shared expert's output is multiplied with sigmoid of a projection to one number."""
    latent_size: int | None = None
    """Where set, the routed experts work on a projection of the token to this size."""
    router_bias: bool = False
    correction_bias: bool = False
    """A bias per expert that takes part in choosing, not in weighting (DeepSeek-V3)."""
    scoring: Literal[
        "softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_input", "sparse_mixer"
    ] = "softmax"
    """How router logits become weights; `sigmoid_of_input` multiplies an expert's input rather than
    its output; `sparse_mixer` chooses one after the other, each among those near the best (arXiv
    2409.12136)."""
    normalized: bool = True
    """The chosen experts' weights are divided by their sum."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Experts are chosen from the best groups only (DeepSeek-V3)."""
    group_score: Literal["top2", "max"] = "top2"
    nearness: float = 0.01
    """Share of the best expert's score, twice which another may be below it and count as near
    (sparse mixers).
    """
    scaling_factor: float = 1.0
    own_norms: bool = False
    """Shared and routed experts have norms of their own around them, and the router scales what it
    reads and each expert's weight (Gemma 4)."""

    @property
    def active_width(self) -> int:
        """The width that one token passes."""
        return self.width * self.num_experts_per_tok + self.shared_width

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that ranks divide."""
        if self.shared_width:
            return (self.width, self.shared_width)
        return (self.width,)

    @property
    def expert(self) -> MLP:
        return MLP(
            width=self.width,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias,
        )

    @property
    def shared(self) -> MLP | None:
        if not self.shared_width:
            return None
        return MLP(
            width=self.shared_width,
            activation=self.activation,
            gated=self.gated,
            bias=False,
        )

    def inner_size(self, hidden_size: int) -> int:
        """Width that an expert reads and writes."""
        if self.latent_size is None:
            return hidden_size
        return self.latent_size

    def projections(self, hidden_size: int) -> tuple[Projection, ...]:
        """Matrices that every token passes; the routed experts are apart."""
        hidden = whole(hidden_size)
        projections = [Projection("router", (whole(self.num_experts),), hidden)]
        if self.latent_size is not None:
            latent = whole(self.latent_size)
            projections += [
                Projection("latent_down", (latent,), hidden),
                Projection("latent_up", (hidden,), latent),
            ]
        if self.shared is not None:
            projections += self.shared.projections(hidden_size, "shared_")
        if self.shared_gate:
            projections.append(Projection("shared_gate", (whole(1),), hidden))
        return tuple(projections)

    def expert_parameters(self, hidden_size: int) -> int:
        """Weights of all routed experts."""
        return self.num_experts * self.expert.num_parameters(
            self.inner_size(hidden_size)
        )

    @property
    def label(self) -> str:
        return f"{self.num_experts_per_tok} of {self.num_experts} experts"

    def num_parameters(self, hidden_size: int) -> int:
        biases = self.num_experts * (self.router_bias + self.correction_bias)
        scales = 0
        if self.own_norms:
            # behind both, before the routed, and of the router's input; one per expert
            scales = 4 * hidden_size + self.num_experts
        return (
            matrices(self.projections(hidden_size))
            + self.expert_parameters(hidden_size)
            + biases
            + scales
        )

    def active_parameters(self, hidden_size: int) -> int:
        """Weights that one token passes."""
        idle = 1.0 - self.num_experts_per_tok / self.num_experts
        return self.num_parameters(hidden_size) - round(
            idle * self.expert_parameters(hidden_size)
        )

    @property
    def why_not_run(self) -> str | None:
        if self.activation == "xielu":
            return "feed-forwards with xIELU that are gated or experts"
        if self.expert.why_not_run:
            return self.expert.why_not_run
        if self.own_norms:
            return "experts with norms of their own"
        if self.latent_size is not None:
            return "experts of a latent"
        return None


FeedForward = MLP | MixtureOfExperts


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixer and a feed-forward; a block may have only one of the two."""

    mixer: Mixer | None = None
    mlp: FeedForward | None = None

    @property
    def num_sublayers(self) -> int:
        return (self.mixer is not None) + (self.mlp is not None)
