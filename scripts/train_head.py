"""Trains a draft head for a small target: EAGLE-3, multi-token prediction or DFlash. Seeded.

    python scripts/train_head.py eagle3 --target magicdec/data/embedded --output head

The target runs in this package's own runtime, which hands out its states; the head is plain torch,
and is written as the speculators library writes heads. EAGLE-3 and prediction modules learn from
their own outputs, as they will read them (training-time test, arXiv 2503.01840): step j reads the
output of step j - 1 and sees the entries of the text before it. DFlash learns blocks at random
places. The loss is the cross entropy to the target's own distribution.

Positions have gaps at random, so that a head trained on short texts reads long ones (as
scripts/train_embedded_model.py has it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_PROC_BIND", "true")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from magicdec.runtime.engine import Engine
from magicdec.runtime.prefill import PromptPart
from magicdec.runtime.prompts import load_tokenizer, stdlib_documents
from magicdec.runtime.transformer import NORMED, Transformer
from magicdec.runtime.weights import load_model

KINDS = ("eagle3", "mtp", "dflash")
DECAY = 0.8
"""Weight of a drafted position's loss against that of the one before it."""
EPS = 1e-6
THETA = 10_000.0
WARM_UP = 20
LOG_EVERY = 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a head's layers."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    vocab: int


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def rotated(heads_BNTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Rotary embedding of the first and second halves of the dimensions."""
    size = heads_BNTD.shape[-1]
    frequencies = THETA ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions_BT[:, None, :, None] * frequencies
    first, second = heads_BNTD.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def linear(outputs: int, inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def pass_on_last_state(layer: nn.Linear) -> None:
    """Lets a projection begin by passing on the last of the states that it reads."""
    size = layer.weight.shape[0]
    layer.weight.data.mul_(0.1)
    layer.weight.data[:, -size:] += torch.eye(size)


class Attention(nn.Module):
    """Grouped-query attention over given keys and values."""

    def __init__(self, shape: Shape, inputs: int, *, has_norm: bool) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = linear(shape.heads * shape.head_dim, inputs)
        self.k_proj = linear(shape.kv_heads * shape.head_dim, inputs)
        self.v_proj = linear(shape.kv_heads * shape.head_dim, inputs)
        self.o_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        nn.init.zeros_(self.o_proj.weight)
        self.q_norm = Norm(shape.head_dim) if has_norm else nn.Identity()
        self.k_norm = Norm(shape.head_dim) if has_norm else nn.Identity()

    def queries(self, x_BTH: Tensor, positions_BT: Tensor) -> Tensor:
        heads = self.q_proj(x_BTH).unflatten(-1, (self._shape.heads, -1))
        return rotated(self.q_norm(heads).transpose(1, 2), positions_BT)

    def keys_and_values(
        self, x_BTH: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One of each for every query head."""
        shape = self._shape
        keys = self.k_norm(self.k_proj(x_BTH).unflatten(-1, (shape.kv_heads, -1)))
        values = self.v_proj(x_BTH).unflatten(-1, (shape.kv_heads, -1))
        group = shape.heads // shape.kv_heads
        keys = rotated(keys.transpose(1, 2), positions_BT).repeat_interleave(
            group, dim=1
        )
        return keys, values.transpose(1, 2).repeat_interleave(group, dim=1)

    def output(self, mixed_BNTD: Tensor) -> Tensor:
        return self.o_proj(mixed_BNTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.width, shape.hidden)
        self.up_proj = linear(shape.width, shape.hidden)
        self.down_proj = linear(shape.hidden, shape.width)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer; its attention is called from outside."""

    def __init__(
        self, shape: Shape, *, inputs: int | None = None, has_norm: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape, inputs or shape.hidden, has_norm=has_norm)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = MLP(shape)

    def behind(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output, from its attention's."""
        residual = residual + mixed
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Entries:
    """The keys and values that a chain's steps leave: those of the text, and of each later step.

    A query of step j at place t sees the text's entries up to t, and those of the steps between at
    its own place: what is in the cache when j tokens have been drafted from there.
    """

    def __init__(self, length: int) -> None:
        self._hidden_TS = torch.ones(length, length, dtype=torch.bool).triu(1)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._kept.append((keys, values))
        text_keys, text_values = self._kept[0]
        scale = query.shape[-1] ** -0.5
        scores = (query * scale) @ text_keys.transpose(-1, -2)
        scores = scores.masked_fill(self._hidden_TS, float("-inf"))
        own = [
            (query * later * scale).sum(-1, keepdim=True) for later, _ in self._kept[1:]
        ]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        size = scores.shape[-1]
        mixed = weights[..., :size] @ text_values
        for step, (_, later) in enumerate(self._kept[1:]):
            mixed = mixed + weights[..., size + step, None] * later
        return mixed


class Head(nn.Module):
    """A head in training; `loss` is per batch of texts with the target's states."""

    method: str
    reads: tuple[int, ...]

    def loss(self, batch: Batch, tables: Tables) -> tuple[Tensor, list[float]]:
        """The loss, and how often each drafted position is the target's choice."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What a head shares with its target."""

    embedding_VH: Tensor
    output_VH: Tensor
    norm_H: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts: their tokens, [B, T + 1], and at each but the last the target's states and logits."""

    tokens: Tensor
    states: Tensor
    logits: Tensor
    positions: Tensor


def cross_entropy(drafted: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """To the target's distribution, and the rate of equal choices."""
    loss = -(wanted.softmax(-1) * drafted.log_softmax(-1)).sum(-1).mean()
    equal = (drafted.argmax(-1) == wanted.argmax(-1)).float().mean()
    return loss, float(equal)


class ChainHead(Head):
    """A head that drafts token by token."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def fuse(self, states: Tensor) -> Tensor:
        raise NotImplementedError

    def step(
        self, embedded: Tensor, fused: Tensor, positions: Tensor, entries: Entries
    ) -> Tensor:
        raise NotImplementedError

    def drafted(self, output: Tensor, tables: Tables) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Batch, tables: Tables) -> tuple[Tensor, list[float]]:
        length = batch.tokens.shape[1] - self._steps - 1
        entries = Entries(length)
        fused = self.fuse(batch.states[:, :length])
        total = torch.zeros(())
        equal = []
        for step in range(self._steps):
            embedded = F.embedding(
                batch.tokens[:, 1 + step :][:, :length], tables.embedding_VH
            )
            positions = batch.positions[:, step:][:, :length]
            fused = self.step(embedded, fused, positions, entries)
            wanted = batch.logits[:, 1 + step :][:, :length]
            loss, rate = cross_entropy(self.drafted(fused, tables), wanted)
            total = total + DECAY**step * loss
            equal.append(rate)
        return total, equal


class Eagle3(ChainHead):
    """EAGLE-3 with an output layer of its own, which begins as the target's."""

    method = "eagle3"

    def __init__(
        self, shape: Shape, reads: Sequence[int], tables: Tables, steps: int
    ) -> None:
        super().__init__(steps)
        self.reads = tuple(reads)
        self.fc = linear(shape.hidden, len(self.reads) * shape.hidden)
        layer = Layer(shape, inputs=2 * shape.hidden)
        layer.hidden_norm = Norm(shape.hidden)
        self.layers = nn.ModuleList([layer])
        self.norm = Norm(shape.hidden)
        self.lm_head = linear(shape.vocab, shape.hidden)
        self.lm_head.weight.data.copy_(tables.output_VH)
        self.norm.weight.data.copy_(tables.norm_H)
        pass_on_last_state(self.fc)

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def step(
        self, embedded: Tensor, fused: Tensor, positions: Tensor, entries: Entries
    ) -> Tensor:
        layer = self.layers[0]
        x = torch.cat(
            (layer.input_layernorm(embedded), layer.hidden_norm(fused)), dim=-1
        )
        attention = layer.self_attn
        keys, values = attention.keys_and_values(x, positions)
        mixed = entries.attend(attention.queries(x, positions), keys, values)
        return layer.behind(fused, attention.output(mixed))

    def drafted(self, output: Tensor, tables: Tables) -> Tensor:
        return self.lm_head(self.norm(output))


class Prediction(ChainHead):
    """A prediction module of a Qwen3 layer, which drafts by the target's output layer."""

    method = "mtp"
    reads = (NORMED,)

    def __init__(self, shape: Shape, tables: Tables, steps: int) -> None:
        super().__init__(steps)
        layer = Layer(shape, has_norm=True)
        layer.token_layernorm = Norm(shape.hidden)
        layer.hidden_layernorm = Norm(shape.hidden)
        layer.input_proj = linear(shape.hidden, 2 * shape.hidden)
        layer.final_layernorm = Norm(shape.hidden)
        layer.final_layernorm.weight.data.copy_(tables.norm_H)
        pass_on_last_state(layer.input_proj)
        self.mtp_layers = nn.ModuleList([layer])

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def step(
        self, embedded: Tensor, fused: Tensor, positions: Tensor, entries: Entries
    ) -> Tensor:
        layer = self.mtp_layers[0]
        both = (layer.token_layernorm(embedded), layer.hidden_layernorm(fused))
        residual = layer.input_proj(torch.cat(both, dim=-1))
        x = layer.input_layernorm(residual)
        attention = layer.self_attn
        keys, values = attention.keys_and_values(x, positions)
        mixed = entries.attend(attention.queries(x, positions), keys, values)
        return layer.final_layernorm(layer.behind(residual, attention.output(mixed)))

    def drafted(self, output: Tensor, tables: Tables) -> Tensor:
        return F.linear(output, tables.output_VH)


class DFlash(Head):
    """Block diffusion: the states are the context's keys and values, a block is one pass."""

    method = "dflash"

    def __init__(
        self,
        shape: Shape,
        reads: Sequence[int],
        tables: Tables,
        *,
        block: int,
        mask: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.reads = tuple(reads)
        self._block = block
        self._mask = mask
        self.fc = linear(shape.hidden, len(self.reads) * shape.hidden)
        self.hidden_norm = Norm(shape.hidden)
        self.layers = nn.ModuleList(
            [Layer(shape, has_norm=True) for _ in range(layers)]
        )
        self.norm = Norm(shape.hidden)
        self.norm.weight.data.copy_(tables.norm_H)

    def loss(self, batch: Batch, tables: Tables) -> tuple[Tensor, list[float]]:
        context = self.hidden_norm(self.fc(batch.states))
        size, length = self._block, context.shape[1]
        anchors = torch.randperm(length - size)[: length // size].sort().values + 1
        places = (anchors[:, None] + torch.arange(size)).flatten()
        tokens = torch.full((len(batch.tokens), len(places)), self._mask)
        tokens[:, ::size] = batch.tokens[:, anchors]
        x = F.embedding(tokens, tables.embedding_VH)
        positions = batch.positions[:, places.clamp_max(batch.positions.shape[1] - 1)]
        before = torch.arange(length) < anchors.repeat_interleave(size)[:, None]
        blocks = torch.arange(len(places)) // size
        is_seen = torch.cat((before, blocks[:, None] == blocks), dim=1)
        for layer in self.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            far_keys, far_values = attention.keys_and_values(
                context, batch.positions[:, :length]
            )
            near_keys, near_values = attention.keys_and_values(normed, positions)
            mixed = F.scaled_dot_product_attention(
                attention.queries(normed, positions),
                torch.cat((far_keys, near_keys), dim=2),
                torch.cat((far_values, near_values), dim=2),
                attn_mask=is_seen,
            )
            x = layer.behind(x, attention.output(mixed))
        drafted = F.linear(self.norm(x), tables.output_VH).unflatten(1, (-1, size))
        wanted = batch.logits[:, (places - 1).clamp_max(length - 1)].unflatten(
            1, (-1, size)
        )
        total = torch.zeros(())
        equal = []
        for step in range(1, size):
            loss, rate = cross_entropy(drafted[:, :, step], wanted[:, :, step])
            total = total + DECAY ** (step - 1) * loss
            equal.append(rate)
        return total, equal


class States:
    """Collects the target's states of texts, one after the other (prefill.PrefillFollower)."""

    def __init__(self, reads: Sequence[int]) -> None:
        self.reads = (*reads, NORMED)
        self.parts: list[Tensor] = []

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        assert states_NF is not None
        self.parts.append(states_NF)


def states_of(
    target: Transformer, tokens: Tensor, reads: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The states that a head reads, and the logits, of texts [B, T + 1]: both [B, T, ..]; and the
    tokens.
    """
    collected = States(reads)
    engine = Engine(target, batch_size=len(tokens), max_len=tokens.shape[1])
    engine.follow_with(collected)
    engine.prefill(tokens.tolist())
    with torch.inference_mode():
        joined = torch.cat(collected.parts).unflatten(0, (len(tokens), -1))
        normed = joined[..., -target.spec.hidden_size :]
        logits = target.logits_of(normed).float()
        states = (
            normed if tuple(reads) == (NORMED,) else joined[..., : -normed.shape[-1]]
        )
    return states.clone(), logits.clone(), tokens


def spread_positions(length: int, longest: int, rng: random.Random) -> Tensor:
    """0..length-1 with up to two gaps, below `longest`."""
    positions = torch.arange(length)
    slack = longest - length
    if slack <= 0 or rng.random() < 0.4:
        return positions
    for _ in range(rng.randint(1, 2)):
        gap = rng.randint(0, slack)
        slack -= gap
        positions[rng.randint(1, length - 1) :] += gap
    return positions


def rate_factor(step: int, total: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return min(1.0, (total - step) / (0.6 * total))


def optimisers_of(head: nn.Module, scale: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for norms and the output layer."""
    inside = [
        p
        for name, p in head.named_parameters()
        if p.ndim == 2 and "lm_head" not in name
    ]
    others = [
        p for name, p in head.named_parameters() if p.ndim != 2 or "lm_head" in name
    ]
    return [
        torch.optim.Muon(inside, lr=0.012 * scale, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=1e-3 * scale, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    head: Head,
    target: Transformer,
    texts: Sequence[Tensor],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    positions: int,
    scale: float = 1.0,
    log: bool = True,
) -> list[float]:
    """Trains on texts, over and over, in an order of the seed. The last rates of equal choices."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tables = tables_of(target)
    optimisers = optimisers_of(head, scale)
    rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    order: list[int] = []
    started = time.monotonic()
    equal: list[float] = []
    for step in range(steps):
        while len(order) < batch_size:
            order += rng.sample(range(len(texts)), len(texts))
        chosen, order = order[:batch_size], order[batch_size:]
        states, logits, tokens = states_of(
            target, torch.stack([texts[i] for i in chosen]), head.reads
        )
        spread = [spread_positions(tokens.shape[1], positions, rng) for _ in chosen]
        batch = Batch(
            tokens=tokens, states=states, logits=logits, positions=torch.stack(spread)
        )
        loss, equal = head.loss(batch, tables)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * rate_factor(step, steps)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if log and (step % LOG_EVERY == LOG_EVERY - 1 or step == steps - 1):
            shown = " ".join(f"{rate:.3f}" for rate in equal)
            spent = time.monotonic() - started
            print(
                f"step {step + 1} loss {loss.item():.3f} equal {shown} {spent:.0f} s",
                flush=True,
            )
    return equal


def tables_of(target: Transformer) -> Tables:
    weight = target.head.weight
    assert isinstance(weight, Tensor)
    return Tables(
        embedding_VH=target.embedding.weight_VH.clone().float(),
        output_VH=weight.clone().float(),
        norm_H=target.norm.weight.clone().float(),
    )


def layers_config(shape: Shape, kind: str, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }


def config_of(head: Head, shape: Shape, *, block: int, mask: int) -> dict[str, Any]:
    """As the speculators library writes it."""
    layers = len(head.layers) if isinstance(head, DFlash) else 1
    document: dict[str, Any] = {
        "speculators_model_type": head.method,
        "architectures": [f"{head.method}-head"],
        "transformer_layer_config": layers_config(shape, head.method, layers),
        "tie_word_embeddings": False,
        "dtype": "float16",
    }
    if head.method == "mtp":
        return document | {"num_nextn_predict_layers": 1}
    document["draft_vocab_size"] = shape.vocab
    if head.method == "eagle3":
        return document | {"eagle_aux_hidden_state_layer_ids": list(head.reads)}
    return document | {
        "aux_hidden_state_layer_ids": list(head.reads),
        "block_size": block,
        "mask_token_id": mask,
        "sample_from_anchor": False,
    }


def save(
    head: Head, directory: Path, config: dict[str, Any], dtype: torch.dtype
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: p.detach().to(dtype).contiguous() for name, p in head.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def build(
    kind: str, shape: Shape, target: Transformer, arguments: argparse.Namespace
) -> Head:
    count = len(target.layers)
    reads = arguments.reads or sorted({1, (count + 1) // 2, count})
    if kind == "eagle3":
        return Eagle3(shape, reads, tables_of(target), arguments.draft_steps)
    if kind == "mtp":
        return Prediction(shape, tables_of(target), arguments.draft_steps)
    block = arguments.draft_steps + 1
    tables = tables_of(target)
    return DFlash(shape, reads, tables, block=block, mask=arguments.mask, layers=2)


def text_windows(
    checkpoint: Path, vocab_size: int, length: int, seed: int
) -> list[Tensor]:
    """Windows of the standard library's texts, without those kept out."""
    tokenizer = load_tokenizer(checkpoint, vocab_size=vocab_size)
    ids: list[int] = []
    for text in stdlib_documents(held_out=False):
        ids += [*tokenizer.encode(text).ids, 0]
    stream = torch.tensor(ids)
    windows = list(stream[: len(stream) // length * length].view(-1, length))
    random.Random(seed).shuffle(windows)
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=384, help="tokens of a text")
    parser.add_argument("--draft-steps", type=int, default=4)
    parser.add_argument("--reads", type=int, nargs="+", help="layers before each state")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--mask", type=int, default=0, help="token of masked positions")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    target = load_model(arguments.target)
    spec = target.spec
    shape = Shape(
        hidden=spec.hidden_size,
        width=arguments.width,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        positions=spec.max_position_embeddings,
        vocab=spec.vocab_size,
    )
    head = build(arguments.kind, shape, target, arguments)
    texts = text_windows(
        arguments.target, spec.vocab_size, arguments.length, arguments.seed
    )
    started = time.monotonic()
    equal = train(
        head,
        target,
        texts,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        positions=spec.max_position_embeddings,
    )
    config = config_of(
        head, shape, block=arguments.draft_steps + 1, mask=arguments.mask
    )
    save(head, arguments.output, config, torch.float16)
    note = {
        "seed": arguments.seed,
        "steps": arguments.steps,
        "tokens": arguments.steps * arguments.batch_size * arguments.length,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "equal_choices_by_position": [round(rate, 3) for rate in equal],
    }
    (arguments.output / "training.json").write_text(json.dumps(note, indent=1) + "\n")
    print(json.dumps(note))


if __name__ == "__main__":
    main()
