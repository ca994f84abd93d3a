"""Several ranks compute what one does, and fail together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from magicdec.errors import ConfigError
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.launch import RankDiedError, RankError, launch_ranks
from magicdec.runtime.sampling import sample
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.runtime.conftest import started, tiny_spec
from tests.runtime.drafts import DRAFTS, HEADS, TakesTurns
from tests.runtime.heads import random_head

PROMPTS = [[5], [1, 2, 3, 4] * 4, [9, 60, 33] * 7]
SAMPLINGS = {
    "greedy": SamplingSpec(),
    "temperature": SamplingSpec(temperature=0.9, seed=4),
    "top-k": SamplingSpec(temperature=1.0, top_k=5, seed=5),
    "top-p": SamplingSpec(temperature=1.0, top_p=0.7, seed=6),
}
ONE_RANK_DRAFT = SpeculationSpec(
    draft="small", draft_method="full", gamma=1, draft_tp_size=1
)
CASES = {
    **{f"{draft}, greedy": (DRAFTS[draft], SAMPLINGS["greedy"]) for draft in DRAFTS},
    **{
        f"streamingllm, {name}": (DRAFTS["streamingllm"], SAMPLINGS[name])
        for name in ("top-k", "top-p")
    },
    "draft model, temperature": (DRAFTS["model"], SAMPLINGS["temperature"]),
    **{f"{head}, greedy": (HEADS[head], SAMPLINGS["greedy"]) for head in HEADS},
    **{
        f"{head}, top-p": (HEADS[head], SAMPLINGS["top-p"])
        for head in ("p-eagle", "dspark")
    },
    "eagle3, temperature": (HEADS["eagle3"], SAMPLINGS["temperature"]),
    "draft on one rank, greedy": (ONE_RANK_DRAFT, SAMPLINGS["greedy"]),
    "draft on one rank, temperature": (ONE_RANK_DRAFT, SAMPLINGS["temperature"]),
    "autoregressive": (SpeculationSpec(), SAMPLINGS["temperature"]),
}
PLAIN = tiny_spec(
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=64,
    attention_bias=True,
    mlp_bias=True,
)
LAYER = replace(PLAIN.layers[0], mixer=replace(PLAIN.attention, qk_norm="head"))
SPEC = replace(PLAIN, layers=(LAYER,) * 2)
SHARED = tiny_spec(num_attention_heads=4, num_key_value_heads=1, vocab_size=64)
"""With a KV head that two ranks both have."""
DRAFT_SPEC = tiny_spec(
    name="small", hidden_size=16, num_hidden_layers=1, intermediate_size=32
)


def decode_cases(
    tp: TensorParallel, spec: ModelSpec, every: int
) -> dict[str, list[list[int]]]:
    """The tokens of one case of so many, on this rank's shard."""
    model = load_model(spec, weights="random", seed=3, tp=tp)
    engine = started(model, PROMPTS, 90)
    snapshot = engine.snapshot()
    draft_groups = {1: tp.first(1), tp.size: tp}
    tokens = {}
    for name in list(CASES)[::every]:
        draft, sampling = CASES[name]
        engine.restore(snapshot)
        group = draft_groups[draft.draft_tp_size or tp.size]
        draft_model: Transformer | Head | None = None
        if draft.draft_method in HEADS:
            draft_model = random_head(draft.draft_method, model)
        elif group is not None and not draft.is_self:
            draft_model = load_model(DRAFT_SPEC, weights="random", seed=9, tp=group)
        drafter = build_drafter(draft, engine, draft_model)
        options = DecodeOptions(
            gamma=0 if drafter is None else 3, max_new_tokens=[7, 4, 9], fences=True
        )
        result = decode(engine, drafter, sampling, options)
        assert tp.size == 1 or len(result.phases["collectives"]) == result.num_steps
        tokens[name] = result.tokens
    return tokens


def decode_queue(tp: TensorParallel) -> list[list[list[int]]]:
    """A queue, whose prompts come in chunks, at gammas that change: tokens of each draft, one of them on one rank."""
    found = []
    draft_group = tp.first(1)
    for draft in (DRAFTS["streamingllm"], DRAFTS["ngram"], ONE_RANK_DRAFT):
        engine = started(
            load_model(SPEC, weights="random", seed=3, tp=tp), PROMPTS[1:], 90
        )
        draft_model = (
            load_model(DRAFT_SPEC, weights="random", seed=9, tp=draft_group)
            if draft_group
            else None
        )
        drafter = build_drafter(draft, engine, None if draft.is_self else draft_model)
        options = DecodeOptions(
            gamma=3,
            max_new_tokens=[5, 9, 4, 6],
            queue=[[4, 5], [6] * 30],
            prefill_tokens=7,
            policy=TakesTurns(),
        )
        found.append(decode(engine, drafter, SAMPLINGS["greedy"], options).tokens)
    return found


def decode_all(
    tp: TensorParallel, every: dict[str, int]
) -> tuple[list[dict[str, list[list[int]]]], list[list[list[int]]]]:
    specs = {"divided": SPEC, "shared": SHARED}
    return [decode_cases(tp, specs[k], n) for k, n in every.items()], decode_queue(tp)


@pytest.mark.parametrize(
    ("tp_size", "every"),
    [
        (2, {"divided": 5}),
        pytest.param(2, {"divided": 1, "shared": 3}, marks=pytest.mark.slow),
        pytest.param(4, {"divided": 1}, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_decode_the_same_tokens_as_one(
    tp_size: int, every: dict[str, int]
) -> None:
    """One in so many of every draft and way of sampling, with KV heads divided and shared (by 4 ranks both), and a
    draft on one rank; and a queue, at gammas that change."""
    assert launch_ranks(decode_all, tp_size, every) == decode_all(
        TensorParallel(), every
    )


def fail_on(
    tp: TensorParallel, *, rank: int, how: str, others: str, told: Path
) -> None:
    """The rank fails, once it has told when; the others would be busy for minutes."""
    if tp.rank == rank:
        told.write_text(str(time.monotonic()))
        if how == "user":
            raise ConfigError("no such thing")
        if how == "bug":
            raise ZeroDivisionError("a bug")
        os.kill(os.getpid(), signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    if others == "in a collective":
        tp.all_reduce(torch.zeros(1))
    time.sleep(240)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "others", "error", "message"),
    [
        ("user", "in a collective", ConfigError, "no such thing"),
        ("bug", "in a collective", RankError, "rank 1: (?s:.*)a bug"),
        ("kill", "computing", RankDiedError, "rank 1 died: .* SIGKILL"),
        ("interrupt", "computing", KeyboardInterrupt, ""),
    ],
)
def test_a_rank_that_fails_ends_all(
    how: str, others: str, error: type[BaseException], message: str, tmp_path: Path
) -> None:
    """And what is raised is its error, not that of the ranks whose collective it broke off; an interrupt of a rank is
    one of all."""
    told = tmp_path / "failed at"
    with pytest.raises(error, match=message):
        launch_ranks(partial(fail_on, rank=1, how=how, others=others, told=told), 2)
    assert time.monotonic() - float(told.read_text()) < 120


def tell(tp: TensorParallel, met: Path) -> int:
    """Returns when all have met: a rank that ended before would break off the others' meeting."""
    tp.all_reduce(torch.zeros(1))
    met.touch()
    return tp.size


@pytest.mark.slow
def test_the_port_where_ranks_meet_is_theirs_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that asks for it, again and again while the ranks load torch, is refused."""
    opened, ports, taken = socket.create_server, [], []
    met, done = tmp_path / "met", threading.Event()

    def create_server(*arguments: Any, **options: Any) -> socket.socket:
        server = opened(*arguments, **options)
        ports.append(server.getsockname()[1])
        return server

    def take() -> None:
        while not (done.wait(0.005) or met.exists()):
            for port in ports:
                with contextlib.suppress(OSError), opened(("127.0.0.1", port)):
                    taken.append(port)

    monkeypatch.setattr(socket, "create_server", create_server)
    thief = threading.Thread(target=take)
    thief.start()
    try:
        assert launch_ranks(tell, 2, met) == 2
    finally:
        done.set()
        thief.join()
    assert len(ports) == 1
    assert taken == []


def test_a_model_that_cannot_be_divided_says_what_is_valid() -> None:
    with pytest.raises(ConfigError, match="nearest that do: 1, 2, 4"):
        load_model(SPEC, weights="random", tp=TensorParallel(rank=0, size=3))


class OneOfTwo(NamedTuple):
    """A rank whose collectives have the other's numbers, so that two ranks run one after the other."""

    rank: int
    totals_RB: torch.Tensor
    size: int = 2

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        assert torch.equal(own, self.totals_RB[self.rank])
        return self.totals_RB

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        return own


def test_the_largest_draw_takes_a_token_that_has_a_weight() -> None:
    """A draft may leave over the smallest numbers there are, of which the largest float32 below 1 takes
    all: that lies behind the last rank's tokens, and token 0, which has no weight, is no answer."""
    least = 2.0**-149
    weights = [torch.tensor([[0.0, least]]), torch.tensor([[least, 0.0]])]
    largest = torch.tensor([1.0 - 2.0**-24])
    total = weights[0].sum() + weights[1].sum()
    assert largest * total == total
    totals = torch.stack([part.sum(dim=-1) for part in weights])
    tokens = [
        sample(part, largest, OneOfTwo(rank, totals))  # type: ignore[arg-type]
        for rank, part in enumerate(weights)
    ]
    assert sum(token.item() for token in tokens) == 2
