"""Plans to export, and the words of the commands that are exported for them."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
from samples_reports import changed, plan

from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.schema.plan import GammaTable, Plan, Site

DRAFTS: dict[str, dict[str, Any]] = {
    "sparse-self": {},
    "draft-model": {
        "draft": "llama-3.2-1b", "draft_method": "full", "draft_budget": None, "tp_size": 8, "draft_tp_size": 1,
    },
    "sparse-draft": {"draft": "tinyllama-1.1b", "draft_method": "streamingllm", "draft_budget": 512},
    "ngram": {"draft": "ngram", "draft_method": "ngram", "draft_budget": None},
    "eagle": {"draft": "eagle-head", "draft_method": "eagle", "draft_budget": None},
    "off": {"draft": "none", "draft_method": "none", "draft_budget": None, "gamma": 0, "speedup": 1.0},
}  # fmt: skip


def table(
    batches: list[int], contexts: list[int], gamma: list[list[int]]
) -> GammaTable:
    def cells(value: Any) -> list[list[Any]]:
        return [[value] * len(contexts) for _ in batches]

    return GammaTable(
        tp_size=1, batch_sizes=batches, context_lens=contexts, gamma=gamma, speedup=cells(1.0),
        verdict=cells("unclear"), fits=cells(True), break_even_gen_len=cells(None),
        break_even_context=[None] * len(batches),
    )  # fmt: skip


def sample(name: str) -> Plan:
    """A plan of fixed numbers with the named draft, whose best gamma falls again at the greatest batch."""
    fixed = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
    return plan(
        best=changed(plan().best, **(fixed | DRAFTS[name])),
        gamma_table=table(
            [1, 4, 16, 32, 64], [512, 4096], [[0, 0], [0, 2], [1, 3], [1, 3], [0, 1]]
        ),
    )


SITE = Site(checkpoints={"embedded": "path/to/embedded"}, longest_context=5632)
CPU = msgspec.structs.replace(SITE, is_cpu=True)


def words_of(text: str) -> list[str]:
    """The command as a shell splits it."""
    lines = [
        line.removesuffix("\\")
        for line in text.splitlines()
        if not line.startswith("#")
    ]
    return shlex.split(" ".join(lines))


def planned(engine: str, **asked: Any) -> Plan:
    case: dict[str, Any] = {
        "model": "llama-3.1-8b", "hardware": ("h100-sxm-80gb",), "tp_size": 1, "context_lens": (1024,), "engine": engine
    }  # fmt: skip
    document = make_plan(PlanRequest(**(case | asked)))
    return (
        msgspec.structs.replace(
            document, choice=document.choosing(document.candidates[0])
        )
        if document.candidates
        else document
    )


def spread_plan(model: str, **how: Any) -> Plan:
    case: dict[str, Any] = {
        "context_lens": (4096,),
        "batch_sizes": (32,),
        "hardware": ("h100-sxm-80gb",),
    }
    return make_plan(PlanRequest(model=model, draft="none", **case, **how))
