"""Multi-token prediction from a target's own checkpoint, against transformers' layers.

The reference is written from the publishers' description (DeepSeek-V3, arXiv 2412.19437; the
engines' DeepSeek, GLM-4.5 and Qwen3-Next modules): a decoder layer of the target's own kind, which
transformers computes without a cache, over the projection of the normed embedding and state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.base import ProposalBuilder
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.test_architectures import ATTENDING, drawn, prompts_for, randomize
from tests.specs.test_oracle import their_model

NAMES = (
    "deepseek_v3",
    "glm4_moe",
    *(name + ATTENDING for name in ("qwen3_next", "qwen3_5_text")),
)
GAMMA = 3
DRAFT = SpeculationSpec(draft="mtp", draft_method="mtp", gamma=GAMMA)
TOLERANCE = 1e-4
"""transformers norms and takes softmaxes in 32 bits whatever the model is in."""


class Module:
    """A prediction module: its own weights, and the target's layer."""

    def __init__(self, model: Any, *, is_qwen: bool) -> None:
        self._model = model
        self._is_qwen = is_qwen
        self.layer = model.model.layers[-1]
        size = model.config.hidden_size
        self.weights = {
            "projection": torch.randn(size, 2 * size) * (2 * size) ** -0.5,
            "token_norm": torch.rand(size) + 0.5,
            "state_norm": torch.rand(size) + 0.5,
            "norm": torch.rand(size) + 0.5,
        }

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """By their published names."""
        if self._is_qwen:
            names = (
                "mtp.fc",
                "mtp.pre_fc_norm_embedding",
                "mtp.pre_fc_norm_hidden",
                "mtp.norm",
            )
        else:
            prefix = f"model.layers.{index}"
            ends = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
            names = tuple(f"{prefix}.{end}" for end in ends)
        tensors = zip(names, self.weights.values(), strict=True)
        return {f"{name}.weight": tensor for name, tensor in tensors}

    def widen(self) -> None:
        """Computes in 64 bits from now on."""
        self.layer.double()
        self.weights = {name: tensor.double() for name, tensor in self.weights.items()}

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name] + (1.0 if self._is_qwen else 0.0)
        eps = self._model.config.rms_norm_eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def step(
        self, entries: list[int], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last entry's logits, and what the next step reads of it."""
        inner = self._model.model
        positions = torch.arange(len(entries))[None]
        embedded = inner.embed_tokens(torch.tensor([entries]))
        if not self._is_qwen:
            embedded[:, 0] = 0.0  # as engines do
        both = (
            self._normed(embedded, "token_norm"),
            self._normed(states, "state_norm"),
        )
        hidden = F.linear(torch.cat(both, dim=-1), self.weights["projection"])
        mask = torch.full((len(entries),) * 2, float("-inf"), dtype=hidden.dtype).triu(
            1
        )
        output = self.layer(
            hidden,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=inner.rotary_emb(hidden, positions),
        )
        output = output[0] if isinstance(output, tuple) else output
        normed = self._normed(output, "norm")
        logits = F.linear(normed, self._model.lm_head.weight)[0, -1]
        return logits, (normed if self._is_qwen else output)[:, -1:]


def write(directory: Path, name: str) -> tuple[Any, Module]:
    """A checkpoint whose last layer is its prediction module's; the model and the module."""
    config = drawn(name, 0)
    count = config["num_hidden_layers"]
    longer = {**config, "num_hidden_layers": count + 1}
    if "layer_types" in longer:
        longer["layer_types"] = [*longer["layer_types"], longer["layer_types"][-1]]
    torch.manual_seed(5)
    model = randomize(their_model(longer, device="cpu").float())
    is_qwen = name.startswith("qwen")
    module = Module(model, is_qwen=is_qwen)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    before = f"model.layers.{count}."
    after = "mtp.layers.0." if is_qwen else before
    renamed = {key.replace(before, after): tensor for key, tensor in weights.items()}
    save_file(renamed | module.tensors(count), directory / "model.safetensors")
    key = "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"
    written = json.loads((directory / "config.json").read_text())
    written |= {"num_hidden_layers": count, key: 1}
    if "layer_types" in written:
        written["layer_types"] = written["layer_types"][:count]
    (directory / "config.json").write_text(json.dumps(written))
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    module.widen()
    return model.double(), module


def expected_drafts(
    model: Any, module: Module, prompt: list[int]
) -> list[torch.Tensor]:
    """The logits of each greedy draft after a prompt, by a plain loop."""
    with torch.no_grad():
        text = torch.tensor([prompt[:-1]])
        states = model.model(text, use_cache=False).last_hidden_state
        entries = prompt[1:]
        found = []
        for _ in range(GAMMA):
            logits, state = module.step(entries, states)
            found.append(logits)
            entries = [*entries, int(logits.argmax())]
            states = torch.cat((states, state), dim=1)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_prediction_module_drafts_as_transformers_layers_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposals are equal and logits agree, in 64 bits, where rounding in the target's layers does
    not grow; and greedy decoding with it gives the target's tokens.
    """
    model, module = write(tmp_path, name)
    prompts = [prompt for prompt in prompts_for(drawn(name, 0), 0) if len(prompt) > 1]
    target = load_model(tmp_path, dtype="float64")
    engine = Engine(target, batch_size=len(prompts), max_len=80)
    head = load_head(None, target, target_directory=tmp_path)
    drafter = build_drafter(DRAFT, engine, head)
    assert drafter is not None
    seen: list[torch.Tensor] = []
    choose = ProposalBuilder.choose

    def record(builder: ProposalBuilder, logits_BV: torch.Tensor) -> torch.Tensor:
        seen.append(logits_BV)
        return choose(builder, logits_BV)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(ProposalBuilder, "choose", record)
        engine.prefill(prompts, chunk=7)
        drafter.begin()
        drafted = drafter.propose(GAMMA, None).tokens_BT.tolist()
    for row, prompt in enumerate(prompts):
        expected = torch.stack(expected_drafts(model, module, prompt))
        assert drafted[row] == expected.argmax(-1).tolist()
        ours = torch.stack([logits[row] for logits in seen])
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    snapshot = engine.snapshot()
    plain = decode(
        engine, None, SamplingSpec(), DecodeOptions(max_new_tokens=24)
    ).tokens
    engine.restore(snapshot)
    options = DecodeOptions(gamma=GAMMA, max_new_tokens=24)
    assert decode(engine, drafter, SamplingSpec(), options).tokens == plain
