"""Trains the small model that ships with the package (magicdec/data/embedded). Seeded, and scheduled by step.

    python scripts/train_embedded_model.py --output magicdec/data/embedded

Needs the extras [run,dev] (transformers supplies the training-time model). About an hour on two cores with bf16 matrix
instructions. What it is for: a model whose decoding at a context of 4096 is bound by its KV cache, that has learned to
use that context (it recalls a passage seen thousands of tokens earlier), in a file of a few MB.

Three ideas make that cheap:
- most sequences contain passages copied from earlier in them (some of random tokens), which teaches recall;
- short sequences are trained with *gaps in their position ids*, so that recall over distances of thousands of positions
  is learned at the cost of 2048-token attention (PoSE, arXiv 2309.10400);
- Muon for the matrices (https://kellerjordan.github.io/posts/muon), AdamW for embeddings and norms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from magicdec.runtime.prompts import stdlib_documents

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MAX_POSITIONS = 5632
TEST_SAMPLE_BYTES = 18_000_000


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`steps` optimiser steps on `batch_size` sequences of `length` tokens."""

    length: int
    batch_size: int
    steps: int


STAGES = (
    Stage(length=512, batch_size=8, steps=1000),
    Stage(length=2048, batch_size=2, steps=2200),
    Stage(length=4096, batch_size=1, steps=1100),
)


def training_texts() -> list[str]:
    texts = list(stdlib_documents(held_out=False))
    total = 0
    for text in stdlib_documents(held_out=False, tests=True):
        total += len(text)
        if total > TEST_SAMPLE_BYTES:
            break
        texts.append(text)
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """One long stream of token ids: each document followed by the end-of-text token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids
        ids.append(0)
    return torch.tensor(ids, dtype=torch.long)


def copy_passages(sequence: Tensor, rng: random.Random) -> None:
    """Overwrites one to three later places of the sequence with a passage from earlier in it."""
    length = len(sequence)
    for _ in range(rng.randint(1, 3)):
        size = rng.randint(24, min(256, length // 5))
        source = rng.randint(0, length - 2 * size - 1)
        target = rng.randint(source + size, length - size)
        if rng.random() < 0.15:
            sequence[source : source + size] = torch.tensor(
                [rng.randrange(1, VOCAB_SIZE) for _ in range(size)]
            )
        sequence[target : target + size] = sequence[source : source + size].clone()


def positions_with_gaps(length: int, rng: random.Random) -> Tensor:
    """Position ids of `length` tokens spread over MAX_POSITIONS: 0..length-1 with up to two gaps."""
    slack = MAX_POSITIONS - length
    positions = torch.arange(length)
    if rng.random() < 0.4:
        return positions
    for _ in range(rng.randint(1, 2)):
        gap = rng.randint(0, slack)
        slack -= gap
        positions[rng.randint(1, length - 1) :] += gap
    return positions


def make_batch(
    stream: Tensor, stage: Stage, rng: random.Random
) -> tuple[Tensor, Tensor]:
    sequences, positions = [], []
    for _ in range(stage.batch_size):
        start = rng.randrange(len(stream) - stage.length)
        sequence = stream[start : start + stage.length].clone()
        if rng.random() < 0.7:
            copy_passages(sequence, rng)
        sequences.append(sequence)
        positions.append(positions_with_gaps(stage.length, rng))
    return torch.stack(sequences), torch.stack(positions)


def learning_rate_factor(
    step: int, total: int, *, warmup: int = 40, decay_from: float = 0.4
) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (total - step) / (total * (1 - decay_from)))


@torch.inference_mode()
def token_nll(model: LlamaForCausalLM, sequence: Tensor) -> Tensor:
    """Negative log-likelihood (nats) of each token but the first, [length - 1]."""
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="none")


def bits_per_byte(
    model: LlamaForCausalLM,
    stream: Tensor,
    bytes_per_token: float,
    length: int,
    count: int,
) -> float:
    stride = max(1, (len(stream) - length) // count)
    windows = [stream[i * stride : i * stride + length] for i in range(count)]
    nll = (
        torch.stack([token_nll(model, window).mean() for window in windows])
        .mean()
        .item()
    )
    return nll / math.log(2) / bytes_per_token


def recall(
    model: LlamaForCausalLM,
    stream: Tensor,
    distance: int,
    count: int = 24,
    size: int = 64,
) -> tuple[float, float]:
    """Mean nll (nats per token) of a passage whose copy stands `distance` tokens earlier, and of the same passage
    after the same text without that copy."""
    length = distance + size
    rng = random.Random(7)
    with_copy, without = [], []
    for _ in range(count):
        start = rng.randrange(len(stream) - 2 * length)
        plain = stream[start : start + length].clone()
        other = rng.randrange(len(stream) - size)
        plain[-size:] = stream[other : other + size]
        copied = plain.clone()
        copied[:size] = plain[-size:]
        # The first quarter of the passage tells the model which copy it is in; the rest is what is recalled.
        tail = size - size // 4
        with_copy.append(token_nll(model, copied)[-tail:].mean().item())
        without.append(token_nll(model, plain)[-tail:].mean().item())
    return sum(with_copy) / count, sum(without) / count


def evaluate(
    model: LlamaForCausalLM, stream: Tensor, bytes_per_token: float
) -> dict[str, object]:
    model.eval()
    result: dict[str, object] = {
        "held_out_bits_per_byte": {
            length: round(
                bits_per_byte(model, stream, bytes_per_token, length, count), 3
            )
            for length, count in ((512, 64), (2048, 24), (4096, 16), (5120, 12))
        },
        "repeated_passage_nll": {
            distance: [round(x, 3) for x in recall(model, stream, distance)]
            for distance in (256, 1024, 2048, 3072, 3968)
        },
    }
    model.train()
    return result


def save(
    model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path, note: dict[str, object]
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    state = model.half()
    state.save_pretrained(output)
    model.float()
    (output / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "training.json").write_text(json.dumps(note, indent=1) + "\n")


def build_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=6,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            rope_theta=100_000.0,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps-scale",
        type=float,
        default=1.0,
        help="scales every stage's steps (for a trial run)",
    )
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument(
        "--stop-after",
        type=int,
        help="stop at this step of the schedule (the shipped weights: 3500)",
    )
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    texts, held_out_texts = training_texts(), list(stdlib_documents(held_out=True))
    tokenizer = train_tokenizer(texts)
    stream, held_out = (
        encode_all(tokenizer, texts),
        encode_all(tokenizer, held_out_texts),
    )
    bytes_per_token = sum(len(text.encode()) for text in held_out_texts) / len(held_out)
    print(
        f"{len(stream)} training tokens, {len(held_out)} held out, {bytes_per_token:.2f} bytes per token",
        flush=True,
    )

    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    ]
    others = [
        p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name
    ]
    optimisers = [
        torch.optim.Muon(matrices, lr=0.012, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=2.4e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    base_rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    stages = [(stage, round(stage.steps * arguments.steps_scale)) for stage in STAGES]
    total = sum(steps for _, steps in stages)
    print(f"{parameters} parameters, {total} steps", flush=True)

    step, tokens, started, running = 0, 0, time.monotonic(), 0.0
    note: dict[str, object] = {}
    for stage, steps in stages:
        for _ in range(steps):
            factor = learning_rate_factor(step, total)
            for optimiser, rate in zip(optimisers, base_rates, strict=True):
                optimiser.param_groups[0]["lr"] = rate * factor
            batch, positions = make_batch(stream, stage, rng)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(
                    input_ids=batch, position_ids=positions, use_cache=False
                ).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten()
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + batch.numel()
            running += (loss.item() - running) / min(step, 50)
            if step % 50 == 0:
                print(
                    f"step {step} length {stage.length} loss {running:.3f} {time.monotonic() - started:.0f} s",
                    flush=True,
                )
            if step % arguments.save_every == 0 or step in (
                total,
                arguments.stop_after,
            ):
                note = {
                    "seed": arguments.seed,
                    "steps": step,
                    "tokens": tokens,
                    "parameters": parameters,
                    "bytes_per_token": round(bytes_per_token, 3),
                    **evaluate(model, held_out, bytes_per_token),
                }
                save(model, tokenizer, arguments.output, note)
                print(json.dumps(note), flush=True)
            if step == arguments.stop_after:
                return


if __name__ == "__main__":
    main()
