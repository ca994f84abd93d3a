"""What `check` makes of a command and a load before anything is priced, asked for every case of a few numbers."""

from __future__ import annotations

from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.live import check, findings
from magicdec.live.load import ASSUMED_CONTEXT, AskedLoad
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.serve_command import ServeCommand, read_serve_command

MODEL = load_model_spec("llama-3.1-8b")
NAME = "meta-llama/Llama-3.1-8B-Instruct"


def command_of(**options: int | None) -> ServeCommand:
    written = [f"--{name} {value}" for name, value in options.items() if value]
    return read_serve_command(" ".join(["vllm serve", NAME, *written]))


def asked(command: ServeCommand, load: AskedLoad) -> tuple[Any, list[str], list[str]]:
    """The request of a plan, what was assumed for it, and what the rules say."""
    found = findings.findings_of(command, load)
    said = [*found.said["wrong"], *found.said["note"]]
    return found.request, found.assumed, said


def test_a_command_that_does_not_fit_is_of_all_its_devices() -> None:
    command = read_serve_command(
        "vllm serve meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 1 --pipeline-parallel-size 2 "
        "--data-parallel-size 3"
    )
    checked = check.check_command(command, AskedLoad(hardware="6xh100", batch=32))
    assert checked.as_it_is is None
    assert checked.num_gpus == 6


@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 3), (4, 2, 1), (2, 3, 5)]
)
def test_a_command_uses_the_devices_of_all_its_ways_to_spread(
    tp: int, pp: int, dp: int
) -> None:
    command = command_of(
        **{
            "tensor-parallel-size": tp,
            "pipeline-parallel-size": pp,
            "data-parallel-size": dp,
        }
    )
    needed = tp * pp * dp
    for given in (needed - 1, needed, needed + 1):
        load = AskedLoad(hardware=f"{given}xh100" if given else "h100", batch=32)
        request, _, problems = asked(command, load)
        says = [each for each in problems if "devices" in each]
        assert bool(says) == (given not in (0, needed))
        if says:
            assert str(needed) in says[0]
            assert str(given) in says[0]
        assert request.batch_sizes == (max(32 // dp, 1),)
        assert request.tp_size == tp
        assert request.pp_size == (None if pp == 1 else pp)


@pytest.mark.parametrize("limit", [None, 1000, 131071, 131072, 131073])
@pytest.mark.parametrize("context", [None, 900, 130_000])
def test_a_request_is_as_long_as_command_and_model_allow(
    limit: int | None, context: int | None
) -> None:
    """Up to the last token; an unknown prompt takes no more than half."""
    command = command_of(**{"max-model-len": limit})
    longest = min(limit or 131072, 131072)
    for more in (0, 1):
        gen_len = 100 if context is None else max(longest - context, 0) + more
        load = AskedLoad(hardware="h100", context_len=context, gen_len=gen_len)
        if context is not None and context + gen_len > longest:
            with pytest.raises(ConfigError, match=f"longer than the {longest}"):
                asked(command, load)
            continue
        request, assumed, problems = asked(command, load)
        assert bool(problems) == (limit is not None and limit > 131072)
        if context is None:
            usual = min(ASSUMED_CONTEXT, longest // 2)
            assert request.context_lens == (usual,)
            assert any(f"prompts of {usual} tokens" in each for each in assumed)
        else:
            assert request.context_lens == (context,)
        assert request.gen_len == gen_len
