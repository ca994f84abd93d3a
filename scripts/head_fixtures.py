"""Writes tiny trained-head checkpoints and what the speculators library computes with them.

    python -m venv .venv-speculators
    .venv-speculators/bin/pip install 'speculators==0.9.0' 'transformers==5.19.0'
    .venv-speculators/bin/python scripts/head_fixtures.py tests/data/heads

Each head is built by the library's own class, seeded, and saved by its own `save_pretrained`: that
is the published format. What it drafts after a prompt is found by a plain loop over the library's
modules without a cache: every step computes all positions anew. The tests of the runtime compare
with that, and need neither this script nor the library.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

VOCAB, HIDDEN, DRAFTED, GAMMA, BLOCK, MASK = 40, 16, 24, 4, 5, 3
PROMPT_LENGTHS = (2, 7, 19)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "rope_theta": 500.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def seeded(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights that let every part matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1:
                parameter.normal_(std=0.3, generator=generator)
            else:
                parameter.normal_(
                    std=1.3 * parameter.shape[-1] ** -0.5, generator=generator
                )
    return module.eval()


def layers_config(kind: type, count: int, **changes: Any) -> Any:
    config = kind(**SIZES, num_hidden_layers=count, **changes)
    config._attn_implementation = "eager"
    return config


def library_config(algorithm: str) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=GAMMA)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def additive(is_seen: Tensor) -> Tensor:
    """A mask of attention, [1, 1, queries, keys], as numbers to add."""
    return torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[None, None]


def causal(length: int, window: int | None = None) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_seen = distance >= 0
    if window is not None:
        is_seen &= distance < window
    return is_seen


class Drafted:
    """The greedy drafts of one prompt, and their logits."""

    def __init__(self, model: Any, target: LlamaForCausalLM) -> None:
        self._model, self._target = model, target
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []

    def choose(self, logits: Tensor) -> int:
        chosen = int(logits.argmax())
        d2t = getattr(self._model, "d2t", None)
        token = chosen if d2t is None else chosen + int(d2t[chosen])
        self.logits.append(logits)
        self.tokens.append(token)
        return token


def fused(model: Any, states: Tensor) -> Tensor:
    if model.input_norm is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        chunks = states.chunk(len(model.fc_norm), dim=-1)
        states = torch.cat(
            [norm(c) for norm, c in zip(model.fc_norm, chunks, strict=True)], -1
        )
    return model.fc(states)


def eagle_layers(model: Any, embedded: Tensor, hidden: Tensor) -> Tensor:
    """All entries' outputs before the norm."""
    length = embedded.shape[1]
    x = torch.cat((embedded, hidden), dim=-1)
    positions = torch.arange(length)[None]
    rotations = model.rotary_emb(x, positions)
    for index, layer in enumerate(model.layers):
        window = model.sliding_window if index in model.sliding_window_indices else None
        x = layer(
            x,
            attention_mask=additive(causal(length, window)),
            position_ids=positions,
            position_embeddings=rotations,
        )
    return x


def draft_eagle3(
    model: Any, states: Tensor, tokens: list[int], drafted: Drafted
) -> None:
    hidden = fused(model, states[None])
    entries = list(tokens)
    for _ in range(GAMMA):
        output = eagle_layers(
            model, model.embed_tokens(torch.tensor([entries])), hidden
        )
        if model.config.norm_output:
            output = model.norm(output)
            logits = model.lm_head(output)
        else:
            logits = model.lm_head(model.norm(output))
        entries.append(drafted.choose(logits[0, -1]))
        hidden = torch.cat((hidden, output[:, -1:]), dim=1)


def draft_peagle(
    model: Any, states: Tensor, tokens: list[int], drafted: Drafted
) -> None:
    masks = model.mask_hidden[0].expand(GAMMA - 1, -1)
    hidden = fused(model, torch.cat((states, masks))[None])
    entries = [*tokens, *[MASK] * (GAMMA - 1)]
    output = eagle_layers(model, model.embed_tokens(torch.tensor([entries])), hidden)
    for logits in model.lm_head(model.norm(output))[0, len(tokens) - 1 :]:
        drafted.choose(logits)


def block_outputs(model: Any, states: Tensor, pending: int, count: int) -> Tensor:
    """The normed outputs of a block: the pending token, and masks behind it."""
    context = model.hidden_norm(model.fc(states[None]))
    length = len(states)
    x = model.embed_tokens(torch.tensor([[pending, *[MASK] * (count - 1)]]))
    rotations = model.rotary_emb(x, torch.arange(length + count)[None])
    for index, layer in enumerate(model.layers):
        is_seen = torch.ones(count, length + count, dtype=torch.bool)
        if index in model.sliding_window_indices:
            is_seen[:, : max(0, length - model.sliding_window)] = False
            if not model.sliding_window_non_causal:
                is_seen[:, length:] = causal(count)
        x = layer(
            hidden_states=x,
            target_hidden=context,
            attention_mask=additive(is_seen),
            position_embeddings=rotations,
        )
    return model.norm(x)


def draft_dflash(
    model: Any, states: Tensor, tokens: list[int], drafted: Drafted
) -> None:
    output = block_outputs(model, states, tokens[-1], GAMMA + 1)
    for logits in model.lm_head(output)[0, 1:]:
        drafted.choose(logits)


def draft_dspark(
    model: Any, states: Tensor, tokens: list[int], drafted: Drafted
) -> None:
    """Each position's logits are shifted by the token before it, found one after another."""
    output = block_outputs(model, states, tokens[-1], GAMMA)
    plain = model.lm_head(output)
    previous = [tokens[-1]]
    for place in range(GAMMA):
        shift = model.markov_head.block_bias(
            prev_token_ids=torch.tensor([previous]),
            hidden_states=output[:, : place + 1],
        )
        previous.append(drafted.choose(plain[0, place] + shift[0, -1]))


def draft_mtp(model: Any, states: Tensor, tokens: list[int], drafted: Drafted) -> None:
    hidden, entries = states[None], list(tokens)
    for _ in range(GAMMA):
        length = len(entries)
        positions = torch.arange(length)[None]
        embedded = model.embed_tokens(torch.tensor([entries]))
        output = model.mtp_layers[0](
            hidden,
            embedded,
            attention_mask=additive(causal(length)),
            position_ids=positions,
            position_embeddings=model.rotary_emb(embedded, positions),
        )
        entries.append(drafted.choose(model.lm_head(output)[0, -1]))
        hidden = torch.cat((hidden, output[:, -1:]), dim=1)


Draft = Callable[[Any, Tensor, list[int], Drafted], None]


def heads() -> dict[str, tuple[type, Any, Draft]]:
    eagle = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "draft_vocab_size": DRAFTED}
    block = {
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }
    windowed = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    }
    llama, qwen = LlamaConfig, Qwen3Config

    def eagle3(layers: Any, **changes: Any) -> tuple[type, Any, Draft]:
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            speculators_config=library_config("eagle3"),
            **{**eagle, **changes},
        )
        return Eagle3DraftModel, config, draft_eagle3

    def dspark(layers: Any, **changes: Any) -> tuple[type, Any, Draft]:
        config = DSparkSpeculatorConfig(
            transformer_layer_config=layers,
            speculators_config=library_config("dspark"),
            draft_vocab_size=DRAFTED,
            markov_rank=6,
            **block,
            **changes,
        )
        return DSparkDraftModel, config, draft_dspark

    def dflash(layers: Any, **changes: Any) -> tuple[type, Any, Draft]:
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            speculators_config=library_config("dflash"),
            **{"draft_vocab_size": VOCAB, **block, **changes},
        )
        return DFlashDraftModel, config, draft_dflash

    peagle = PEagleSpeculatorConfig(
        transformer_layer_config=layers_config(llama, 2),
        speculators_config=library_config("peagle"),
        mask_token_id=MASK,
        **eagle,
    )
    mtp = MTPSpeculatorConfig(
        transformer_layer_config=layers_config(qwen, 1),
        speculators_config=library_config("mtp"),
    )
    return {
        "eagle3": eagle3(layers_config(llama, 1)),
        "eagle3-normed": eagle3(
            layers_config(llama, 2),
            norm_before_residual=True,
            fc_norm=True,
            norm_output=True,
        ),
        "eagle3-qwen": eagle3(
            layers_config(qwen, 1), norm_before_fc=True, draft_vocab_size=VOCAB
        ),
        "p-eagle": (PEagleDraftModel, peagle, draft_peagle),
        "mtp": (MTPDraftModel, mtp, draft_mtp),
        "dflash": dflash(layers_config(qwen, 2)),
        "dflash-windowed": dflash(
            layers_config(qwen, 2, **windowed), draft_vocab_size=DRAFTED
        ),
        "dspark": dspark(layers_config(qwen, 2)),
    }


def give_target_tables(model: Any, target: LlamaForCausalLM, seed: int) -> None:
    """What a head does not store is its target's; a smaller vocabulary is a choice of its own."""
    with torch.no_grad():
        if model.use_draft_vocab:
            chosen = torch.randperm(
                VOCAB, generator=torch.Generator().manual_seed(seed)
            )
            chosen = chosen[: model.draft_vocab_size].sort().values
            model.d2t.copy_(chosen - torch.arange(len(chosen)))
            model.t2d.zero_()
            model.t2d[chosen] = True
        if isinstance(model, MTPDraftModel | DFlashDraftModel):
            model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
            if not model.use_draft_vocab:
                model.lm_head.weight.copy_(target.lm_head.weight)


def target_states(
    target: LlamaForCausalLM, tokens: list[int], layers: list[int] | None
) -> Tensor:
    """The states of all tokens but the pending one, side by side; None: the normed last one."""
    with torch.no_grad():
        states = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    if layers is None:
        return states.last_hidden_state[0]
    return torch.cat([states.hidden_states[layer][0] for layer in layers], dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    target = seeded(
        LlamaForCausalLM(layers_config(LlamaConfig, 4, tie_word_embeddings=False)), 1
    )
    assert isinstance(target, LlamaForCausalLM)
    target.save_pretrained(output / "target")
    (output / "target" / "generation_config.json").unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]
    for seed, (name, (kind, config, draft)) in enumerate(heads().items()):
        model = seeded(kind(config), 10 + seed)
        give_target_tables(model, target, 20 + seed)
        directory = output / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        if isinstance(
            model, MTPDraftModel
        ):  # the class keeps it, and its own loading drops it
            weights = load_file(directory / "model.safetensors")
            weights.pop("verifier_lm_head.weight", None)
            save_file(
                weights, directory / "model.safetensors", metadata={"format": "pt"}
            )
        layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        layers = layers or getattr(config, "aux_hidden_state_layer_ids", None)
        expected: dict[str, Tensor] = {}
        rows: list[dict[str, list[int]]] = []
        for number, prompt in enumerate(prompts):
            drafted = Drafted(model, target)
            with torch.no_grad():
                draft(model, target_states(target, prompt, layers), prompt[1:], drafted)
            rows.append({"prompt": prompt, "drafted": drafted.tokens})
            expected[f"logits.{number}"] = torch.stack(drafted.logits)
        save_file(expected, directory / "expected.safetensors")
        (directory / "expected.json").write_text(json.dumps(rows) + "\n")
        (directory / "config.py").unlink(
            missing_ok=True
        )  # the class's source, which it copies
        print(name, rows[-1]["drafted"])


if __name__ == "__main__":
    main()
