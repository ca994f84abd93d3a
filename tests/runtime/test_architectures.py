"""Every architecture that runs computes what transformers' own module does, and its speculation is lossless.

Configurations are drawn at random (tests/specs/architectures.py) and written as checkpoints by transformers.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.errors import CapacityError, CheckpointError, ConfigError
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine, Snapshot
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.launch import launch_ranks
from magicdec.runtime.weights import check_divisible, load_model
from magicdec.specs import families
from magicdec.specs.families import parts
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import why_not_run
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.drafts import DRAFTS, draft_model_for
from tests.specs.architectures import READ_BY_TRANSFORMERS, draw

SEEDS = (0, 1, 2)
PROMPT_LENGTHS = (1, 9, 40)
NUM_TOKENS = 10
TOLERANCE = 1e-4
NARROW = {"max_gamma": 5, "max_back": 5}
"""Of an engine: rings of a window and little more, so that these texts go around in them."""
WEIGHTS = "model.safetensors"
GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def runs(model_type: str) -> bool:
    return (
        why_not_run(
            model_from_hf_config(draw(model_type, 0), name=model_type, where=model_type)
        )
        is None
    )


ATTENDING = ", attending"
"""Behind the name of an architecture whose linear layers are not run: drawn without them."""
RUN = (
    *(name for name in READ_BY_TRANSFORMERS if runs(name)),
    *(
        name + ATTENDING
        for name in (
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "granitemoehybrid",
        )
    ),
)
NOT_RUN = tuple(name for name in READ_BY_TRANSFORMERS if name not in RUN)
MARKS = ([], [pytest.mark.slow], [pytest.mark.exhaustive])
CASES = [pytest.param(name, seed, marks=MARKS[seed]) for name in RUN for seed in SEEDS]
"""One configuration of each is among the fast tests, with one draft in turn; the slow one has two, the exhaustive
one all."""


def drawn(name: str, seed: int) -> dict[str, Any]:
    """A configuration of an architecture of RUN."""
    config = draw(name.removesuffix(ATTENDING), seed)
    if name.endswith(ATTENDING):
        is_granite = name.startswith("granite")
        config["layer_types"] = [
            "attention" if is_granite else "full_attention"
        ] * config["num_hidden_layers"]
        config |= {"num_local_experts": 0} if is_granite else {}
    return config


def randomize(model: Any) -> Any:
    """Gives a module weights that let every part of it matter."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks", "alpha_p", "alpha_n")):
                tensor.normal_(std=0.3)
            elif name.endswith("act_fn.beta"):
                tensor.fill_(0.25)
            elif tensor.dim() > 1:
                tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5)
    return model


def write(directory: Path, config: dict[str, Any], *, seed: int) -> Any:
    """A checkpoint of transformers' own model; the model itself."""
    from tests.specs.test_oracle import their_model

    torch.manual_seed(seed)
    model = randomize(their_model(config, device="cpu").float())
    model.save_pretrained(directory)
    return model


def prompts_for(config: dict[str, Any], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, config["vocab_size"], (n,), generator=generator).tolist()
        for n in PROMPT_LENGTHS
    ]


def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """After every token of a sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def check(
    directory: Path, reference: Any, prompts: list[list[int]], *, max_len: int = 80
) -> tuple[Engine, Snapshot, list[list[int]]]:
    """A ragged batch, prefilled in parts, its windows in rings: each greedy token is the argmax of transformers' logits
    after the ones before it, and a verification's logits agree with theirs. Returns the engine, its state after the
    prompts, and the tokens."""
    engine = Engine(
        load_model(directory), batch_size=len(prompts), max_len=max_len, **NARROW
    )
    engine.prefill(prompts, chunk=7)
    snapshot = engine.snapshot()
    tokens = greedy(engine, None)
    engine.restore(snapshot)
    ours = engine.forward(
        torch.tensor([[p[-1], *t[:5]] for p, t in zip(prompts, tokens, strict=True)])
    )
    for row, (prompt, generated) in enumerate(zip(prompts, tokens, strict=True)):
        expected = their_logits(reference, prompt + generated)[len(prompt) - 1 :]
        assert generated == expected[:-1].argmax(-1).tolist()
        torch.testing.assert_close(
            ours[row], expected[:6], atol=TOLERANCE, rtol=TOLERANCE
        )
    return engine, snapshot, tokens


def greedy(
    engine: Engine, draft: SpeculationSpec | None, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    drafter = None
    if draft is not None:
        drafter = build_drafter(draft, engine, draft_model_for(draft, engine.model))
    options = DecodeOptions(
        gamma=0 if drafter is None else 3, max_new_tokens=num_tokens
    )
    return decode(engine, drafter, SamplingSpec(), options).tokens


@pytest.mark.parametrize(("model_type", "seed"), CASES)
def test_tokens_and_logits_are_transformers_and_every_draft_is_lossless(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    config = drawn(model_type, seed)
    engine, snapshot, tokens = check(
        tmp_path, write(tmp_path, config, seed=seed), prompts_for(config, seed)
    )
    drafts = list(DRAFTS.values())
    if seed < 2:
        turn = RUN.index(model_type)
        places = ((0,), (3, 7))[seed]
        drafts = [drafts[(turn + place) % len(drafts)] for place in places]
    for draft in drafts:
        engine.restore(snapshot)
        assert greedy(engine, draft) == tokens, draft.draft_method


class KeysOf:
    """A pass that keeps the keys it is given, and attends to nothing."""

    def __init__(self, positions: list[int]) -> None:
        self.positions_BT, self.keys_BKTD = torch.tensor([positions]), torch.empty(0)

    def attend(
        self, layer: int, query_BTAD: torch.Tensor, kv_BTPKD: torch.Tensor, scoring: Any
    ) -> torch.Tensor:
        self.keys_BKTD = kv_BTPKD[:, :, 0].transpose(1, 2).clone()
        return torch.zeros(*query_BTAD.shape[:2], query_BTAD[0, 0].numel())


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "cohere", "llama4_text", "hunyuan_v1_dense"]
)
def test_stored_keys_move_on_as_if_they_had_been_computed_there(
    model_type: str, tmp_path: Path
) -> None:
    """Whether they were normed before or after they were rotated."""
    config = (
        {**draw(model_type, 0), "use_qk_norm": True}
        if model_type == "cohere"
        else draw(model_type, 0)
    )
    write(tmp_path, config, seed=0)
    model = load_model(tmp_path)
    model.reserve(64, longest=64)
    mixer, x = model.layers[0].mixer, torch.randn(1, 3, config["hidden_size"])
    here, there = KeysOf([0, 1, 2]), KeysOf([7, 8, 9])
    for attention in (here, there):
        mixer(
            x,
            0,
            attention,
            [rotary[attention.positions_BT] for rotary in model.rotaries],
        )
    moved = mixer.rotate_keys_(here.keys_BKTD.clone(), model.turns(torch.tensor([[7]])))
    assert not torch.allclose(here.keys_BKTD, there.keys_BKTD, atol=0.01)
    torch.testing.assert_close(moved, there.keys_BKTD, atol=1e-5, rtol=1e-5)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
}
LONGROPE = {
    **{key: value for key, value in draw("phi3", 1).items() if key != "partial_rotary_factor"},
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8, "sliding_window": None,
    "rope_parameters": {**LONG, "long_factor": [2.0, 3.0, 4.0, 5.0]}, "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}),
    "llama3": (
        "qwen3",
        {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": ("llama", YARN),
    "yarn, not truncated": ("qwen2", {**YARN, "truncate": False, "beta_fast": 8.0}),
    "yarn, attention factor": ("qwen3", {**YARN, "attention_factor": 0.7}),
    "yarn, mscales": ("mistral", {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4}),
    "yarn, of a latent's scores": ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}),
    "longrope, short": ("phi3", {**LONG, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 128}),
    "longrope, long": ("phi3", {**LONG, "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_scaling_is_transformers(name: str, tmp_path: Path) -> None:
    model_type, rope = ROPES[name]
    config = {**draw(model_type, 1), "rope_parameters": rope}
    if model_type != "deepseek_v3":
        config |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 32,
            "head_dim": 8,
        }
        config |= {"sliding_window": None, "partial_rotary_factor": 1.0}
    if rope["rope_type"] == "longrope":
        config["original_max_position_embeddings"] = rope[
            "original_max_position_embeddings"
        ]
    prompts = prompts_for(config, 3)
    check(
        tmp_path,
        write(tmp_path, config, seed=3),
        prompts[2:] * 2 if name == "longrope, long" else prompts,
    )


def test_frequencies_that_change_with_the_length_are_not_mixed(tmp_path: Path) -> None:
    """Dynamic ones are run where they do not change; longrope's either below the original length or beyond."""
    rope = ROPES["dynamic"][1]
    dynamic = model_from_hf_config(
        {**draw("llama", 1), "rope_parameters": rope}, name="a", where="a"
    )
    with pytest.raises(
        CapacityError, match="can be planned but not run; run at most that many"
    ):
        Engine(load_model(dynamic, weights="random"), batch_size=1, max_len=300)
    model = load_model(
        model_from_hf_config(LONGROPE, name="b", where="b"), weights="random"
    )
    Engine(model, batch_size=1, max_len=30)
    Engine(model, batch_size=1, max_len=32)
    with pytest.raises(CapacityError, match="load the model again"):
        Engine(model, batch_size=1, max_len=33)
    phimoe = {**draw("phimoe", 1), **LONGROPE, "model_type": "phimoe"}
    phimoe["rope_parameters"] = {
        **phimoe["rope_parameters"],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    }
    with pytest.raises(CapacityError, match="up to its original 32 tokens"):
        Engine(
            load_model(
                model_from_hf_config(phimoe, name="c", where="c"), weights="random"
            ),
            batch_size=1,
            max_len=33,
        )


@pytest.mark.parametrize(("length", "generated"), [(8, 24), (33, 12), (32, 1), (30, 8)])
def test_longropes_factors_are_those_that_generate_takes(
    length: int, generated: int, tmp_path: Path
) -> None:
    """Up to the original 32 tokens the short ones, for longer prompts the long ones, alone and with drafts that read
    the model's keys where they are, where they have moved, and through a head; a sequence that would cross, whose
    cache `generate` computes anew, is refused."""
    model = write(tmp_path, LONGROPE, seed=3)
    prompt = torch.randint(
        1, 90, (1, length), generator=torch.Generator().manual_seed(length)
    )
    expected = model.generate(
        prompt, max_new_tokens=generated, do_sample=False, use_cache=True
    )[0, length:].tolist()
    engine = Engine(load_model(tmp_path), batch_size=1, max_len=length + generated)
    if length <= 32 < length + generated:
        with pytest.raises(CapacityError, match="change at 33: let all end before"):
            engine.prefill(prompt.tolist())
        return
    engine.prefill(prompt.tolist())
    snapshot = engine.snapshot()
    for draft in (None, "topk", "streamingllm", "eagle3"):
        engine.restore(snapshot)
        assert greedy(engine, draft and DRAFTS[draft], generated)[0] == expected


@pytest.mark.parametrize("root", ["language_model.model", "model.language_model"])
def test_the_decoder_of_a_model_of_several_modalities_is_read_alone(
    root: str, tmp_path: Path
) -> None:
    """Its tensors under either name, beside those of a vision tower, which text does not pass; any other is refused."""
    config = draw("mistral", 0)
    reference = write(tmp_path, {**config, "tie_word_embeddings": False}, seed=1)
    tensors = load_file(tmp_path / WEIGHTS)
    head = (
        "lm_head.weight"
        if root.startswith("model.")
        else "language_model.lm_head.weight"
    )
    renamed = {
        head if k == "lm_head.weight" else root + k.removeprefix("model"): v
        for k, v in tensors.items()
    }
    save_file(
        {**renamed, "vision_tower.patch_conv.weight": torch.ones(2, 2)},
        tmp_path / WEIGHTS,
    )
    text = json.loads((tmp_path / "config.json").read_text())
    wrapper = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    check(tmp_path, reference, prompts_for(config, 2))
    save_file({**renamed, "vision_gate": torch.ones(2, 2)}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="tensor vision_gate has no place"):
        load_model(tmp_path)


def test_experts_that_a_tool_has_written_apart_are_read(tmp_path: Path) -> None:
    """Llama 4's, one matrix each, outputs first."""
    config = draw("llama4_text", 0)
    reference = write(tmp_path, config, seed=1)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in [name for name in tensors if ".experts." in name]:
        prefix, matrix = name.rsplit(".", 1)
        for index, whole in enumerate(tensors.pop(name)):
            parts = dict(
                zip(("gate_proj", "up_proj"), whole.chunk(2, dim=1), strict=True)
            )
            for part, weight in (
                parts if matrix == "gate_up_proj" else {"down_proj": whole}
            ).items():
                tensors[f"{prefix}.{index}.{part}.weight"] = weight.T.contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    check(tmp_path, reference, prompts_for(config, 2))


def test_layers_of_prediction_heads_stored_behind_the_model_are_not_run(
    tmp_path: Path,
) -> None:
    config = draw("deepseek_v3", 0)
    reference = write(tmp_path, config, seed=1)
    tensors = load_file(tmp_path / WEIGHTS)
    extra = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    save_file({**tensors, extra: torch.ones(2, 2)}, tmp_path / WEIGHTS)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**written, "num_nextn_predict_layers": 0})
    )
    with pytest.raises(CheckpointError, match="eh_proj"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**written, "num_nextn_predict_layers": 1})
    )
    check(tmp_path, reference, prompts_for(config, 2))


def test_the_row_that_the_guide_adds_is_read_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the architecture is not known; with it, tokens and logits are transformers'."""
    config = draw("olmo2", 3)
    reference = write(tmp_path, config, seed=3)
    monkeypatch.delitem(families.ARCHITECTURES, "olmo2")
    with pytest.raises(ConfigError, match="olmo2"):
        load_model(tmp_path)
    (block,) = re.findall(
        r'```python\n("olmo2": .*?)```',
        GUIDE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    rows = eval(f"{{{block}}}", vars(parts))
    monkeypatch.setitem(families.ARCHITECTURES, "olmo2", rows["olmo2"])
    check(tmp_path, reference, prompts_for(config, 3))


def decode_all(
    tp: TensorParallel, directories: dict[str, Path], *, is_alone: bool
) -> dict[str, list[list[int]]]:
    """Greedy tokens of each checkpoint on this rank's shard: alone, or with one draft of its own, two in turn."""
    found = {}
    for turn, (name, directory) in enumerate(directories.items()):
        engine = Engine(
            load_model(directory, tp=tp),
            batch_size=len(PROMPT_LENGTHS),
            max_len=80,
            **NARROW,
        )
        engine.prefill(
            prompts_for({"vocab_size": engine.model.spec.vocab_size}, 5), chunk=16
        )
        draft = None if is_alone else DRAFTS[("streamingllm", "topk")[turn % 2]]
        found[name] = greedy(engine, draft, num_tokens=6)
    return found


def divisible(model_type: str) -> dict[str, Any]:
    """The first drawn configuration that two ranks can share."""
    for seed in range(40):
        config = drawn(model_type, seed)
        try:
            check_divisible(
                model_from_hf_config(config, name=model_type, where=model_type), 2
            )
        except ConfigError:
            continue
        return config
    raise AssertionError(f"no configuration of {model_type} can be divided")


DIVIDED = (
    "llama", "qwen3", "olmo2", "qwen3_moe", "phi3", "gemma3_text", "minicpm3", "cohere2", "glm4_moe", "gpt_oss",
    "llama4_text", "nemotron", "deepseek_v3", "qwen2_moe", "apertus", "qwen3_next, attending",
    "granitemoehybrid, attending",
)  # fmt: skip
"""Of RUN: between them they have every part that ranks divide in a way of its own."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(DIVIDED, marks=pytest.mark.slow, id="each part"),
        pytest.param(RUN, marks=pytest.mark.exhaustive, id="all"),
    ],
)
def test_two_ranks_decode_the_same_tokens_as_one(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    directories = {}
    for name in names:
        directories[name] = tmp_path / name
        write(directories[name], divisible(name), seed=7)
    expected = decode_all(TensorParallel(), directories, is_alone=True)
    drafted = partial(decode_all, directories=directories, is_alone=False)
    assert launch_ranks(drafted, 2) == expected


@pytest.mark.parametrize("model_type", NOT_RUN)
def test_what_is_not_run_is_refused_in_one_line_that_says_that_it_is_planned(
    model_type: str,
) -> None:
    spec = model_from_hf_config(draw(model_type, 0), name=model_type, where=model_type)
    with pytest.raises(
        ConfigError, match="which can be planned but not run"
    ) as refusal:
        load_model(spec, weights="random")
    assert len(str(refusal.value).splitlines()) == 1
