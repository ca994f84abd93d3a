"""Whether a draft can be started: by shapes first, by names last."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.standing import AskedDraft, Standing, has_module, standing
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.heads import heads_of
from magicdec.specs.names import named_models
from magicdec.specs.vllm_plugin import TESTED_VERSIONS, is_tested


def found(
    model: str, method: str, *, engine: str = "vllm", **asked: object
) -> Standing:
    given = {"draft": method, "method": method, "reads_files": False} | asked
    return standing(AskedDraft(**given), load_model_spec(model), load_engine(engine))  # type: ignore[arg-type]


def test_only_models_whose_configuration_names_a_module_have_one() -> None:
    """num_nextn_predict_layers and its kin, read without our reader; Qwen3-Next's modules are known
    from vLLM's qwen3_next_mtp alone."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    directory = Path(__file__).parents[2] / "magicdec" / "specs" / "data" / "models"
    for name, row in named_models().items():
        config = json.loads((directory / f"{row.shape or name}.json").read_bytes())
        config = config.get("text_config", config)
        says = any(config.get(key) for key in keys)
        if config["model_type"] == "minimax_m2":  # no published checkpoint has them
            says = False
        assert has_module(load_model_spec(name)) == (
            says or config["model_type"] == "qwen3_next"
        ), name


@pytest.mark.parametrize(
    "model",
    ["llama-3.1-8b", "qwen3-4b-instruct-2507", "llama-4-maverick", "gpt-oss-20b"],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_model_without_a_module_cannot_draft_with_one(
    model: str, exists: bool
) -> None:
    """Whether or not an acceptance rate was given."""
    result = found(model, "mtp", exists=exists)
    assert result.answer == "cannot start"
    assert "no prediction module" in result.reason


@pytest.mark.parametrize("model", ["deepseek-v3", "glm-4.5-air", "qwen3-next-80b-a3b"])
def test_a_model_with_a_module_can(model: str) -> None:
    assert found(model, "mtp", gamma=3).answer == "starts"


@pytest.mark.parametrize(
    ("engine", "model", "starts"),
    [
        ("vllm", "gemma-4-31b", True),
        ("vllm@0.21", "gemma-4-12b", True),
        ("vllm@0.20.1", "gemma-4-31b", False),
        ("sglang", "gemma-4-26b-a4b", True),
        ("sglang@0.5.10", "gemma-4-26b-a4b", False),
        ("trtllm", "gemma-4-31b", True),
        ("trtllm", "gemma-4-12b", False),
    ],
)
def test_gemma_drafts_with_its_assistant(engine: str, model: str, starts: bool) -> None:
    """Its prediction module lies in a checkpoint of its own, which the draft has to name."""
    (head,) = heads_of(model, "mtp")
    name = head.checkpoint.lower()
    result = found(model, "mtp", engine=engine, checkpoint=name, exists=True)
    assert result.starts == starts
    unnamed = found(model, "mtp", engine=engine, exists=True)
    assert unnamed.answer == "cannot start"
    assert head.checkpoint in unnamed.sentence
    other = found("qwen3-8b", "mtp", engine="vllm", checkpoint=name, exists=True)
    assert "hidden size" in other.reason


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_plan_of_gemma_weighs_its_assistant(engine: str) -> None:
    options, _ = draft_options(
        load_model_spec("gemma-4-31b"),
        PlanRequest(model="gemma-4-31b"),
        engine=load_engine(engine),
        context=2048,
    )
    assert "mtp" in {option.method for option in options}


@pytest.mark.parametrize(
    ("model", "checkpoint", "proof"),
    [
        ("llama-3.3-70b", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "hidden size 4096"),
        ("qwen3-32b", "RedHatAI/Qwen3-8B-speculator.eagle3", "hidden size 4096"),
        ("gpt-oss-20b", "AngelSlim/Qwen3-1.7B_eagle3", "hidden size 2048"),
    ],
)
def test_a_head_of_another_shape_cannot_start(
    model: str, checkpoint: str, proof: str
) -> None:
    result = found(model, "eagle3", checkpoint=checkpoint, exists=True)
    assert result.answer == "cannot start"
    assert proof in result.reason


@pytest.mark.parametrize(
    ("model", "checkpoint", "note"),
    [
        ("llama-3.1-8b", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", ""),
        ("hermes-3-llama-3.1-8b", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "whose shape"),
        ("qwen3-8b", "deepseek-ai/eagle3_qwen3_8b_ttt7", ""),
        ("qwen3-vl-8b", "AngelSlim/Qwen3-8B_eagle3", "whose shape"),
        ("qwen3-8b", "someone/my-eagle3", "nothing is known of"),
        ("qwen3-8b", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "vocabulary of 128256"),
        ("qwen3-32b", "someone/EAGLE3-qwen3-8b-tuned", "by its name"),
        ("qwen3-14b", "/srv/qwen3-8b-eagle3-widened-for-14b", "by its name"),
    ],
)
def test_a_head_of_the_same_shape_starts(
    model: str, checkpoint: str, note: str
) -> None:
    """On a fine-tune of its target too, where what it accepts is said not to be known; and a name
    is no proof of another shape."""
    result = found(model, "eagle3", checkpoint=checkpoint, exists=True)
    assert result.answer == "starts"
    assert bool(result.notes) == bool(note)
    assert note in "".join(found.says for found in result.notes)


@pytest.mark.parametrize(
    ("engine", "asked", "checkpoint", "says"),
    [
        (
            "sglang",
            "eagle",
            "lightseekorg/kimi-k2.5-eagle3",
            "it does not load as EAGLE",
        ),
        ("vllm", "eagle", "someone/Kimi-K2.5-EAGLE-3", "by its name"),
        ("vllm", "eagle3", "/data/eagle", "by its name"),
        ("vllm", "dflash", "someone/kimi-k2.5-dspark", "by its name"),
        ("vllm", "eagle3", "lightseekorg/kimi-k2.5-eagle3", ""),
    ],
)
def test_a_checkpoint_of_another_method_does_not_load(
    engine: str, asked: str, checkpoint: str, says: str
) -> None:
    """The table of heads is proof; a name is none, and the draft is priced as it is asked for."""
    result = found(
        "kimi-k2.5", asked, engine=engine, checkpoint=checkpoint, exists=True
    )
    assert says in result.reason + "".join(note.says for note in result.notes)
    assert result.starts == ("does not load" not in says)
    if not result.starts:
        assert result.method not in (None, asked)


@pytest.mark.parametrize(
    ("engine", "method", "checkpoint", "block", "beyond", "below"),
    [
        (
            "vllm",
            "dspark",
            "deepseek-ai/dspark_qwen3_8b_block7",
            7,
            "accepts nothing",
            "starts",
        ),
        (
            "sglang",
            "dspark",
            "deepseek-ai/dspark_qwen3_8b_block7",
            7,
            "cannot start",
            "cannot start",
        ),
        (
            "vllm",
            "dflash",
            "z-lab/Qwen3-8B-DFlash-b16",
            15,
            "accepts nothing",
            "starts",
        ),
        (
            "sglang",
            "dflash",
            "z-lab/Qwen3-8B-DFlash-b16",
            15,
            "accepts nothing",
            "starts",
        ),
    ],
)
def test_another_number_of_drafts_than_the_block(
    engine: str, method: str, checkpoint: str, block: int, beyond: str, below: str
) -> None:
    """SGLang's DSPARK verifies its whole block; elsewhere more than it was trained for starts."""

    def answer(gamma: int) -> str:
        return found(
            "qwen3-8b", method, engine=engine, checkpoint=checkpoint, gamma=gamma
        ).answer

    assert answer(block) == "starts"
    assert answer(block + 1) == beyond
    assert answer(block - 2) == below


def test_a_head_of_one_s_own_drafts_as_many_as_were_measured() -> None:
    assert (
        found("qwen3-8b", "dspark", gamma=12, exists=True, is_measured=True).answer
        == "starts"
    )


def test_a_draft_runs_on_one_rank_or_all() -> None:
    for tp_size in (1, 2, 4, 8):
        for draft_tp_size in (1, 2, 3, 4, 8):
            result = found(
                "qwen3-32b",
                "eagle3",
                tp_size=tp_size,
                draft_tp_size=draft_tp_size,
                exists=True,
            )
            assert result.starts == (draft_tp_size in (1, tp_size))
            on_all = found(
                "qwen3-32b",
                "eagle3",
                engine="sglang",
                tp_size=tp_size,
                draft_tp_size=draft_tp_size,
                exists=True,
            )
            assert on_all.starts == (draft_tp_size == tp_size)


def test_an_engine_runs_what_its_profile_lists() -> None:
    assert not found("llama-3.1-8b", "suffix", engine="sglang").starts
    assert found("llama-3.1-8b", "suffix").starts


@pytest.mark.parametrize(
    ("engine", "model", "method", "starts"),
    [
        ("vllm", "qwen3.6-27b", "mtp", True),
        ("vllm", "glm-4.5", "mtp", True),  # untried
        ("vllm@0.29", "qwen3.6-27b", "mtp", False),
        ("vllm", "qwen3-32b", "dflash", True),
        ("vllm", "gpt-oss-120b", "eagle3", False),
        ("vllm@0.12", "llama-3.1-8b", "eagle3", False),
        ("vllm", "llama-3.1-8b", "ngram", True),  # untried
        ("sglang", "deepseek-v3", "mtp", False),
        ("sglang", "qwen3-32b", "eagle3", False),
        ("trtllm", "qwen3-32b", "eagle3", False),
    ],
)
def test_stages_take_the_drafts_that_an_engine_passes_states_on_for(
    engine: str, model: str, method: str, starts: bool
) -> None:
    """By version and by the target's architecture; what nobody tried is not called impossible."""
    result = found(model, method, engine=engine, pp_size=2, exists=True)
    assert result.starts == starts
    if not starts:
        assert "pp 2" in result.reason


def test_sglang_runs_its_module_in_stages_where_it_is_told_to() -> None:
    """SGLANG_ENABLE_PP_SPEC, of 0.5.23 on; prediction modules and EAGLE alone."""
    asked = {"engine": "sglang", "pp_size": 2, "settings": ["SGLANG_ENABLE_PP_SPEC"]}
    assert found("deepseek-v3", "mtp", **asked).starts  # type: ignore[arg-type]
    assert not found("qwen3-32b", "eagle3", **asked).starts  # type: ignore[arg-type]
    asked["engine"] = "sglang@0.5.20"
    assert not found("deepseek-v3", "mtp", **asked).starts  # type: ignore[arg-type]


def test_a_head_that_nobody_published_is_hypothetical() -> None:
    assert found("gemma-2-9b", "eagle3").answer == "not published"
    assert found("gemma-2-9b", "eagle3", exists=True).answer == "starts"
    request = PlanRequest(model="gemma-2-9b", draft="eagle3")
    model = load_model_spec("gemma-2-9b")
    options, lacking = draft_options(
        model, request, engine=load_engine("vllm"), context=2048
    )
    assert [option.is_hypothetical for option in options] == [True]
    assert "known to magicdec (list of 2026-11)" in lacking[0].reason


@pytest.mark.parametrize(
    "asked",
    [
        {"draft": "mtp"},
        {"draft": "mtp", "acceptance_rate": 0.8},
        {"draft_name": "RedHatAI/Qwen3-32B-speculator.eagle3", "draft": "eagle3"},
        {"draft": "dspark", "gamma": 12},
        {"draft": "dspark", "gamma": 12, "acceptance_rate": 0.8},
        {"draft": "eagle3", "tp_size": 4, "draft_tp_size": 2},
        {"draft": "qwen2.5-0.5b"},
    ],
)
def test_a_plan_refuses_what_cannot_start(asked: dict[str, object]) -> None:
    request = PlanRequest(model="llama-3.1-8b", **asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        draft_options(
            load_model_spec("llama-3.1-8b"),
            request,
            engine=load_engine("vllm"),
            context=2048,
        )


def test_a_plan_searches_no_gamma_beyond_the_block() -> None:
    request = PlanRequest(model="qwen3-8b")
    options, _ = draft_options(
        load_model_spec("qwen3-8b"), request, engine=load_engine("vllm"), context=2048
    )
    most = {option.method: option.acceptance.max_gamma for option in options}
    assert most["dspark"] == 7
    assert most["dflash"] == 15


@pytest.mark.parametrize(
    ("engine", "method", "since"),
    [
        ("vllm@0.11.0", "suffix", "0.11.1"),
        ("vllm@0.12", "suffix", ""),
        ("vllm@0.15", "dflash", "0.20"),
        ("vllm@0.23", "dflash", ""),
        ("vllm@0.15.0", "p-eagle", "0.16"),
        ("vllm@0.24.0", "dspark", "0.25"),
        ("vllm@0.25.1", "dspark", ""),
        ("vllm@0.8.4", "eagle3", "0.8.5"),
        ("sglang@0.5.15", "dspark", "0.5.16"),
        ("sglang@0.5.16", "dspark", ""),
        ("sglang@0.5.10", "dflash", "0.5.11"),
        ("sglang@0.5.13", "dflash", ""),
        ("sglang@0.5.2", "ngram", "0.5.3"),
        ("sglang@0.5.10", "ngram", ""),
        ("trtllm@1.2", "dflash", "1.3"),
        ("trtllm@1.3.0rc27", "dflash", ""),
        ("trtllm@1.2", "suffix", "1.3"),
        ("trtllm@1.3.0rc27", "suffix", ""),
    ],
)
def test_a_version_before_a_method_cannot_start_it(
    engine: str, method: str, since: str
) -> None:
    """Releases in which each method came, by vLLM's pull requests."""
    result = found("qwen3-8b", method, engine=engine, exists=True)
    assert (result.answer == "cannot start") == bool(since)
    assert result.cure == (f"{since} is the first that does" if since else "")


@pytest.mark.parametrize(
    ("version", "starts"),
    [
        ("", True),
        ("@0.11", False),
        ("@0.31.1", False),
        ("@0.32.1", True),
        ("@0.33", False),
    ],
)
def test_a_sparse_self_draft_starts_where_its_plugin_does(
    version: str, starts: bool
) -> None:
    """The plugin takes the versions that it was tested with alone (specs/vllm_plugin.py)."""
    result = found(
        "qwen3-8b", "streamingllm", draft="self", engine=f"vllm{version}", exists=True
    )
    if version:
        assert starts == is_tested(version.removeprefix("@"))
    assert result.starts == starts
    assert result.cure == ("" if starts else f"{TESTED_VERSIONS[0]} alone does")


def test_draft_models_were_gone_in_between() -> None:
    """vLLM issue 31883: 0.13 refuses them; V0 ran them, and V1 does from 0.15 on."""
    draft = load_model_spec("qwen3-0.6b")
    answers = []
    for version in ("0.10", "0.13.0", "0.14.0", "0.15.0", "0.32"):
        asked = AskedDraft(draft="qwen3-0.6b", method="full", model=draft)
        answers.append(
            standing(
                asked, load_model_spec("qwen3-8b"), load_engine(f"vllm@{version}")
            ).starts
        )
    assert answers == [True, False, False, True, True]


def test_drafts_beyond_the_prediction_modules_are_multiples_of_them_in_vllm() -> None:
    """vllm/config/speculative.py: above n_predict, num_speculative_tokens must be divisible by it."""
    one = load_model_spec("glm-4.5-air")
    three = msgspec.structs.replace(one, mtp_layers=one.mtp_layers * 3)
    starts = []
    for gamma in range(1, 8):
        asked = AskedDraft(draft="mtp", method="mtp", gamma=gamma)
        starts.append(standing(asked, three, load_engine("vllm")).starts)
        assert standing(asked, three, load_engine("sglang")).starts
        assert standing(asked, one, load_engine("vllm")).starts
    assert starts == [gamma <= 3 or gamma % 3 == 0 for gamma in range(1, 8)]


def test_an_engine_without_an_architecture_s_modules_says_so() -> None:
    assert found("minimax-m2", "mtp").answer == "cannot start"
    assert found("minimax-m2", "mtp", engine="sglang").answer == "cannot start"


@pytest.mark.parametrize(
    ("model", "longest"),
    [("qwen3.8-27b", 7), ("qwen3-14b", 7), ("qwen3-8b", 15), ("gpt-oss-120b", 15)],
)
def test_a_draft_without_a_name_has_the_block_of_its_targets_heads(
    model: str, longest: int
) -> None:
    """z-lab/Qwen3.8-27B-DFlash2 drafts in blocks of 8 (vLLM recipes, pull request 839), the heads of
    DeepSpec are called "block7", z-lab's of Qwen3-8B "b16"; of gpt-oss-120b's nobody says."""
    assert found(model, "dflash").most_drafts == longest
