"""Compares replays of look-ups with what engines counted: python scripts/check_replays.py FILE...

Takes runs with an engine's own steps and counters (tests/data/logs/*.json.gz), and SpecDecode-Bench's files
(github.com/SpecDecode-Bench/simulator, data/llama3.1-8B/combined_*.jsonl), whose acc_ngram counts the tokens that a
step at each place of the output emits, of vLLM's n-gram look-up 3..7 with 20 drafted tokens.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.logs.lookups import lookup
from magicdec.logs.ngram import NgramReplay
from magicdec.logs.suffix import SuffixReplay


def check_run(path: Path) -> None:
    """Every step of an engine's run, and its counters."""
    with gzip.open(path) as file:
        run = json.load(file)
    resolved = run["resolved"]
    if resolved["min"] is None:
        replay: Any = SuffixReplay([lookup("suffix-local", gamma=resolved["k"])])
    else:
        low, high = resolved["min"], resolved["max"]
        replay = NgramReplay(
            [lookup("ngram", gamma=resolved["k"], min_ngram=low, max_ngram=high)]
        )
    steps = differing = drafts = drafted_tokens = least = most = 0
    for row in run["rows"]:
        text = np.array(row["prompt"] + row["output"], dtype=np.int32)
        own = replay.steps(text, len(row["prompt"]), max_len=run["max_model_len"])[
            0
        ].tolist()
        recorded = row["steps"][1:]
        differing += abs(len(own) - len(recorded))
        for (place, drafted, accepted), (draft, emitted) in zip(
            own, recorded, strict=False
        ):
            left = len(text) - 1 - place
            is_alike = drafted == len(draft) and min(accepted + 1, left) == min(
                len(emitted), left
            )
            differing += not is_alike
            steps += 1
            drafts += drafted > 0
            drafted_tokens += drafted
            least += accepted
            most += drafted if accepted == left else accepted
    counters = run["counters"]
    print(
        f"{path.name}: {steps} steps, {differing} differ; drafts {drafts} (engine "
        f"{counters['spec_decode_num_drafts']}), drafted {drafted_tokens} "
        f"({counters['spec_decode_num_draft_tokens']}), accepted {least} to {most} "
        f"({counters['spec_decode_num_accepted_tokens']})"
    )


def check_places(path: Path) -> None:
    """Every place of an output at which a step begins."""
    replay = NgramReplay([lookup("ngram", gamma=20, min_ngram=3, max_ngram=7)])
    places = alike = beyond = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = row["prompt_token_ids"]
        text = np.array(prompt + row["generated_token_ids"], dtype=np.int32)
        counted = row["acc_ngram"]["acc_len"]
        for place, _, accepted in replay.steps(text, len(prompt))[0].tolist():
            if accepted == len(text) - 1 - place:
                beyond += 1
                continue
            places += 1
            alike += counted[place - len(prompt) + 1] == accepted + 1
    print(
        f"{path.name}: {alike} of {places} places alike, {beyond} reach beyond the log"
    )


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        if path.suffix == ".gz":
            check_run(path)
        else:
            check_places(path)


if __name__ == "__main__":
    main(sys.argv[1:])
