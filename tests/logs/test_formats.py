"""Readers of log formats: each format's own fields, and what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs.formats import (
    LoggedRow,
    UnreadableError,
    companion_of,
    format_of,
    rows_of,
)
from magicdec.logs.requests import Account, LoggedRequest, requests_of
from magicdec.logs.sources import companions_of, files_of, shards_of
from magicdec.logs.tokens import TextTokenizer

GUIDELLM = (
    Path(__file__).parents[1] / "data" / "load_generators" / "guidellm-128.json.gz"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED = [{"role": "user", "content": "name a colour"}]
TWO_TURNS = [
    *ASKED,
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "another"},
]


CASES: dict[str, tuple[str, dict[str, Any], list[LoggedRow]]] = {
    "vllm request output": (
        "token ids",
        {"prompt_token_ids": [1, 2], "outputs": [{"token_ids": [3, 4]}]},
        [LoggedRow(prompt=[1, 2], output=[3, 4])],
    ),
    "SpecDecode-Bench": (
        "token ids",
        {"id": "7", "prompt_token_ids": [1], "generated_token_ids": [2, 3], "acc_ngram": {"acc_len": [1, 1]}},
        [LoggedRow(prompt=[1], output=[2, 3])],
    ),
    "OpenAI chat": (
        "OpenAI",
        {
            "messages": ASKED,
            "created": 1700000000,
            "choices": [{"message": {"role": "assistant", "content": "blue"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1700000000.0, prompt_len=9, output_len=2,
                cached_len=4,
            )
        ],
    ),
    "OpenAI request and response": (
        "OpenAI",
        {
            "timestamp": "2024-01-01T00:00:01Z",
            "request": {"body": {"prompt": "once"}},
            "response": {"body": {"choices": [{"text": " upon"}, {"text": " more"}]}},
        },
        [
            LoggedRow(prompt="once", output=" upon", arrival_s=1704067201.0),
            LoggedRow(prompt="once", output=" more", arrival_s=1704067201.0),
        ],
    ),
    "reasoning before the answer": (
        "OpenAI",
        {"messages": ASKED, "choices": [{"message": {"reasoning_content": "hm", "content": "blue"}}]},
        [LoggedRow(prompt=ASKED, output="<think>\nhm\n</think>\n\nblue")],
    ),
    "conversation": (
        "conversation",
        {"messages": [*TWO_TURNS, {"role": "assistant", "content": "red"}]},
        [
            LoggedRow(prompt=ASKED, output="blue", is_stopped=True),
            LoggedRow(prompt=TWO_TURNS, output="red", is_stopped=True),
        ],
    ),
    "pair": ("prompt and completion", {"prompt": "a", "completion": "b"}, [LoggedRow(prompt="a", output="b")]),
    "ShareGPT": (
        "ShareGPT",
        {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        [LoggedRow(prompt=[{"role": "user", "content": "hi"}], output="hello", is_stopped=True)],
    ),
    "vllm bench serve": (
        "vllm bench serve",
        {
            "input_lens": [5, 6], "output_lens": [2, 0], "ttfts": [0.1, 0.0], "itls": [[0.1], []],
            "generated_texts": ["ab", ""], "errors": ["", "timeout"], "start_times": [1.5, 2.0],
        },
        [LoggedRow(output="ab", arrival_s=1.5, prompt_len=5, output_len=2)],
    ),
    "pair of messages": (
        "prompt and completion",
        {"start_time": 1704067201.5, "messages": ASKED, "response": "blue", "prompt_tokens": 9, "completion_tokens": 2},
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.5, prompt_len=9, output_len=2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_read_by_its_own_fields(name: str) -> None:
    """The rows hold the prompt, the output, and the times and lengths that the format has."""
    kind, document, rows = CASES[name]
    assert format_of(document) == kind
    assert rows_of(document, {}) == rows


def test_prompts_in_a_file_of_their_own_are_joined(tmp_path: Path) -> None:
    """A batch's input gives the prompts of the outputs that name them."""
    write_lines(
        tmp_path / "input.jsonl",
        [
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": ASKED},
            }
        ],
    )
    companions = companions_of(shards_of(files_of([tmp_path / "*.jsonl"])))
    choices = [{"message": {"role": "assistant", "content": "blue"}}]
    batch = {
        "custom_id": "a",
        "response": {"status_code": 200, "body": {"choices": choices}},
        "error": None,
    }
    assert rows_of(batch, companions) == [LoggedRow(prompt=ASKED, output="blue")]
    with pytest.raises(UnreadableError, match="give the batch's input file"):
        rows_of({**batch, "custom_id": "b"}, companions)
    assert companion_of(batch) is None


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"hello": 1}, "no known format"),
        ({"messages": ASKED, "choices": [{"message": {"content": None, "tool_calls": [{}]}}]}, "tool call"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "choices": [{"text": "x"}]}, "no text"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_says_why_without_its_text(
    document: dict[str, Any], reason: str
) -> None:
    """The reason names the form, never what stands in it."""
    with pytest.raises(UnreadableError, match=reason):
        rows_of(document, {})


def write_lines(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def read_all(
    patterns: list[str | Path],
    tokenizer: TextTokenizer | None = None,
    shard_bytes: int = 1 << 26,
) -> tuple[list[LoggedRequest], Account]:
    account = Account()
    shards = shards_of(files_of(patterns), shard_bytes=shard_bytes)
    companions = companions_of(shards)
    requests: list[LoggedRequest] = []
    for shard in shards:
        requests += requests_of(
            shard, account, tokenizer=tokenizer, companions=companions
        )
    return requests, account


IDS = [{"prompt": [1, number], "output": [3, 4, number]} for number in range(40)]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "json", "parquet"])
def test_every_form_of_file_gives_the_same_requests(form: str, tmp_path: Path) -> None:
    """JSON lines, compressed or not, one JSON list, and a table."""
    path = tmp_path / f"log.{form}"
    lines = "".join(json.dumps(row) + "\n" for row in IDS).encode()
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == "json":
        path.write_text(json.dumps(IDS, indent=1))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            arrow.Table.from_pylist(IDS), path
        )
    requests, account = read_all([path])
    assert [request.text.tolist() for request in requests] == [
        row["prompt"] + row["output"] for row in IDS
    ]
    assert account.num_rows == len(IDS)
    assert not account.unreadable


def test_shards_of_a_file_hold_every_line_once(tmp_path: Path) -> None:
    """Whatever the size of the shards, each line belongs to one of them."""
    path = write_lines(tmp_path / "log.jsonl", IDS)
    whole, _ = read_all([path])
    for shard_bytes in (1, 30, 31, 64, 100, 1000):
        parts, account = read_all([path], shard_bytes=shard_bytes)
        assert [part.text.tolist() for part in parts] == [
            request.text.tolist() for request in whole
        ]
        assert account.num_rows == len(IDS)


def test_rows_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    """Each reason has its number of rows, and the places of the first of them."""
    path = tmp_path / "log.jsonl"
    good = json.dumps(IDS[0])
    path.write_text(
        f'{good}\n{{"prompt": "a", "completion": "b"}}\nnot json\n[1]\n\n{good}\n{{"output": [1]}}\n'
    )
    requests, account = read_all([path])
    assert len(requests) == account.num_requests == 2
    assert account.num_rows == 6
    assert sum(account.unreadable.values()) == 4
    assert account.unreadable["text, which needs --tokenizer"] == 1
    assert account.examples["not JSON"] == ["log.jsonl line 3"]


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match=r"x\.json is neither JSON nor JSON lines"):
        read_all([tmp_path / "x.json"])
    with pytest.raises(ConfigError, match="no pattern that any file matches"):
        files_of([tmp_path / "*.nothing"])
    (tmp_path / "y.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot read"):
        read_all([tmp_path / "y.jsonl.gz"])


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(["name a colour blue another red"] * 3, trainer)
    trained.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": TEMPLATE,
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_messages_become_the_ids_that_transformers_makes(
    tokenizer_folder: Path,
) -> None:
    """The chat template is rendered as transformers renders it, and texts are encoded alike."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    ours = TextTokenizer(tokenizer_folder)
    for messages in (ASKED, TWO_TURNS):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert ours.message_ids(messages).tolist() == list(expected)
    assert (
        ours.text_ids("blue red", is_prompt=False).tolist()
        == theirs("blue red")["input_ids"]
    )
    assert ours.stop_id == theirs.eos_token_id


def test_text_is_read_with_a_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Outputs that stopped end with the stop token; those that the engine counted are compared."""
    kind, document, _ = CASES["OpenAI chat"]
    path = write_lines(tmp_path / "log.jsonl", [document, CASES["pair"][1]])
    tokenizer = TextTokenizer(tokenizer_folder)
    requests, account = read_all([path], tokenizer)
    assert account.tokenized == 2
    assert account.recounted == 1
    assert requests[0].text[-1] == tokenizer.stop_id
    assert requests[0].prompt_len == len(tokenizer.message_ids(ASKED))
    assert np.array_equal(
        requests[1].text[1:], tokenizer.text_ids("b", is_prompt=False)
    )
    assert kind == "OpenAI"


def test_a_template_that_refuses_its_messages_leaves_a_row_unread(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Templates may raise; the row then says so."""
    folder = tmp_path / "refusing"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(
        (tokenizer_folder / "tokenizer.json").read_bytes()
    )
    config = {"chat_template": "{{ raise_exception('no system role') }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnreadableError, match="refuses its messages"):
        TextTokenizer(folder).message_ids(ASKED)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UnreadableError, match="no chat template"):
        TextTokenizer(folder).message_ids(ASKED)
    with pytest.raises(ConfigError, match="is no tokenizer"):
        TextTokenizer(folder / "tokenizer_config.json")


@pytest.mark.parametrize("time", [1e18, -1e18, 1e30])
def test_a_time_that_no_clock_shows_is_no_arrival(time: float) -> None:
    """A benchmark's own start times, which are seconds; a stamp of nanoseconds since 1970 is a time."""
    row = {
        "input_lens": [4],
        "output_lens": [2],
        "generated_texts": ["a b"],
        "errors": [""],
        "start_times": [time],
    }
    with pytest.raises(UnreadableError, match="a time that no clock shows"):
        rows_of(row, {})
    stamped = {"prompt": "a", "completion": "b", "timestamp": 1.8e18}
    assert [each.arrival_s for each in rows_of(stamped, {})] == [1.8e9]
