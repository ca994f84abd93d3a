"""A started server: the words of its command, with what the text around them says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.errors import ConfigError, closest
from magicdec.redaction import redacted
from magicdec.units import MOST_BITS

STARTS = "vllm serve, python -m sglang.launch_server, trtllm-serve or llama-server"
IMAGES = {
    "vllm/vllm-openai": "vllm",
    "lmsysorg/sglang": "sglang",
    "ghcr.io/ggml-org/llama.cpp": "llama.cpp",
    "ghcr.io/ggerganov/llama.cpp": "llama.cpp",
}
"""Container images whose entry point is the server."""
OTHER_IMAGES = re.compile(
    r"(?:^|/)(?:vllm(?:-openai)?|sglang|tensorrt-llm/release|(?:vllm|sglang|tensorrtllm)-runtime)"
    r"[\w-]*:v?(?P<version>\d[\w.]*)"
)
"""Images of an engine whose tag is its version."""
OWN_BUILDS = re.compile(
    r"^(?:docker\.io/)?(?:vllm/vllm-openai|lmsysorg/sglang|nvcr\.io/nvidia/tensorrt-llm/release)[\w-]*:"
)
"""Images that the engine's makers build: others may add options."""
LLAMA_CPP_BUILD = re.compile(r"llama\.cpp:[\w-]*?b(?P<version>\d{3,6})$")
"""llama.cpp's image of one build, as "server-cuda-b9235"."""
INSTALLED = re.compile(r"(?:vllm|sglang|tensorrt[-_]llm)(?:\[[\w,]*\])?==(\d[\w.]*)")
MENTIONS = re.compile(
    r"vllm|sglang|trtllm|tensorrt.llm|llama-server|llama\.cpp|modelArtifacts|llm_configs",
    re.I,
)
"""Every text that starts a server mentions its engine."""
MODULES = {
    "sglang.launch_server": "sglang",
    "sglang_router.launch_server": "sglang",
    "dynamo.vllm": "vllm",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
}
MOST_TEXT = 1_000_000
MOST_STARTS = 20
"""Servers of one text that are read; the first is answered."""
SHOWN = 80
"""Characters of a value that an error shows."""


OPEN = "\ufdd0"
CLOSE = "\ufdd1"
"""Around the number of a reference, in a word, whose value is not known; no text holds these two."""
MARKED = re.compile(rf"{OPEN}(\d+){CLOSE}")
SHOWN_REFERENCE = 60
MOST_PLACES = 100
"""References that are looked for in a manifest; each look reads it whole."""
MOST_QUESTIONS = 10
OWN_ARGUMENTS = "is the script's own"
"""Why "$@" is open outside functions: a script as it is pasted has no arguments."""


class SetValues(Mapping[str, str]):
    """The values that a user sets, which remember the names that the text asks for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values_by_name = values
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> str:
        self.asked[name] = None
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def check(self) -> None:
        """Raises ConfigError for a name that the text does not ask for."""
        for name in self.values_by_name:
            if name not in self.asked:
                near = closest(name, self.asked)
                names = list(dict.fromkeys([*near, *self.asked]))[:MOST_QUESTIONS]
                raise ConfigError(
                    f"--set {name}: the text does not ask for it; it asks for "
                    f"{', '.join(names) or 'none'}"
                )


class Given(msgspec.Struct, kw_only=True):
    """The text to read, and what else may be used to read it."""

    text: str
    first_line: int = 1
    values: SetValues
    """Variables that the user sets; they win."""
    folder: Path | None = None
    """Folder of the files that the text names; None: none of them is read."""
    files: dict[str, str] = {}
    """Texts that the input itself writes or holds, by path."""
    references: list[str] = []
    """References whose value is not known, as they are written."""
    reasons: dict[str, tuple[int, str]] = {}
    """The number of each reference, and why it is not known."""
    commands: list[str] = []
    """References that stand where a command does."""
    notes: list[str] = []
    """Parts of the text that were taken one way and could run another."""

    def place(self, reference: str) -> str:
        """Where a reference first stands, for a message."""
        found = None
        if len(self.references) < MOST_PLACES:
            found = re.search(rf"{re.escape(reference)}(?!\w)", self.text)
        if found is None:
            return ""
        line = self.text.count("\n", 0, found.start()) + self.first_line
        return f" (line {line})"

    def left_open(self, reference: str, why: str) -> str:
        """The mark that stands in a word for a reference whose value is not known."""
        reference = reference[:SHOWN_REFERENCE]
        if reference not in self.reasons:
            self.reasons[reference] = (len(self.references), why)
            self.references.append(reference)
        return f"{OPEN}{self.reasons[reference][0]}{CLOSE}"

    def ask(self, questions: Sequence[str]) -> None:
        """Raises ConfigError with all questions, if there are any."""
        asked = list(dict.fromkeys(questions))
        if asked:
            more = len(asked) - MOST_QUESTIONS
            shown = asked[:MOST_QUESTIONS] + [f"and {more} more"] * (more > 0)
            raise ConfigError("; ".join(shown))

    def open_in(self, text: str) -> list[str]:
        """The references within a text whose values are not known."""
        numbers = dict.fromkeys(MARKED.findall(text))
        return [self.references[int(number)] for number in numbers]

    def shown(self, text: str) -> str:
        """A text with its open references as they are written."""
        return MARKED.sub(lambda match: self.references[int(match[1])], text)

    def question(self, reference: str, sample: str) -> str:
        """A line that asks for a reference's value."""
        _, why = self.reasons[reference]
        name = re.sub(r"^\$[({]?|[)}]$", "", reference)
        is_name = re.fullmatch(r"[\w.@]+", name) is not None
        if is_name and not (reference.startswith("$(") and "computed" in why):
            return f"{reference} {why}: --set {name}={sample}"
        return f"{reference} {why}: write its value there"

    def file(self, path: str) -> str | None:
        """The text of a file that the input writes, or that lies beside it; None: neither."""
        name = path.strip()
        if name in self.files:
            return self.files[name]
        base = name.rpartition("/")[2]
        for written, text in self.files.items():
            if base and written.rpartition("/")[2] == base:
                return text  # a mount gives it another folder
        if self.folder is None:
            return None
        for candidate in (self.folder / name, self.folder / base, Path(name)):
            found = _text_of(candidate)
            if found is not None:
                return found
        return None


class Build(NamedTuple):
    """An engine's version, and whether another than its makers built it."""

    version: str | None = None
    is_other: bool = False


class Start(msgspec.Struct, kw_only=True):
    """A server that a text starts."""

    engine: str
    words: list[str]
    """Its arguments."""
    version: str | None = None
    """The engine's version, where an image's tag or a requirement names it."""
    is_other_build: bool = False
    """Whether that image is not its makers' own, and may add options."""
    environment: dict[str, str] = {}
    """Variables that it is started with."""
    num_gpus: int | None = None
    hardware: str | None = None
    is_prefill: bool = False
    """Whether it serves prompts for another server that decodes."""
    doubt: str = ""
    """Where it stands, if that may not be reached."""

    def built(self, build: Build) -> None:
        """Takes the version of a build, where its own image tells none."""
        if self.version is None:
            self.version = build.version
            self.is_other_build = build.is_other


def _text_of(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MOST_TEXT:
            return None
        return redacted(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no name of a file, or no text
        return None


def start_of(words: Sequence[str]) -> Start | None:
    """The server that words start, its arguments cut off behind them; None: they start none."""
    words = _entered(words)
    image: tuple[int, str] | None = None
    build = Build()
    for place, word in enumerate(words):
        follows = words[place + 1] if place + 1 < len(words) else ""
        engine = _engine_of(word, serves=follows == "serve")
        if engine is not None:
            begin = place + 1
            if follows == "serve":
                begin += 1
            return _started(engine, list(words[begin:]), build)
        if not word.startswith("-"):
            build = build_of(word) or build
        named = _image_in(word)
        if named is not None and image is None:
            image = (place + 1, IMAGES[named])
    if image is None:
        return None
    begin, engine = image
    return _started(engine, list(words[begin:]), build)


def _entered(words: Sequence[str]) -> Sequence[str]:
    """A container's words with its --entrypoint where it takes effect: before its arguments."""
    for place, word in enumerate(words):
        option, equals, entry = word.partition("=")
        if option != "--entrypoint":
            continue
        rest = words[place + 1 :]
        if not equals:
            entry, *rest = [*rest, ""]
        for behind, image in enumerate(rest, 1):
            is_image = build_of(image) is not None or _image_in(image) is not None
            if is_image or rest[behind : behind + 1] == ["serve"]:
                return [*rest[:behind], *entry.split(), *rest[behind:]]
    return words


def build_of(image: str) -> Build | None:
    """The build of an engine that an image's name and tag tell; None: they tell none."""
    tagged = OTHER_IMAGES.search(image) or LLAMA_CPP_BUILD.search(image)
    if tagged is None:
        return None
    return Build(tagged["version"], is_other=not OWN_BUILDS.match(image))


def _started(engine: str, words: list[str], build: Build) -> Start:
    text = " ".join(words)
    is_prefill = "--is-prefill-worker" in words
    if re.search(r"disaggregation-mode[ =]prefill|kv_producer", text):
        is_prefill = True
    return Start(
        engine=engine,
        words=words,
        version=build.version,
        is_other_build=build.is_other,
        is_prefill=is_prefill,
    )


def _engine_of(word: str, *, serves: bool) -> str | None:
    """The engine that a word starts; `serves`: the next word is "serve"."""
    base = word.rpartition("/")[2]
    if word in MODULES:
        return MODULES[word]
    if word.startswith("vllm.entrypoints.") or word.endswith("openai/api_server.py"):
        return "vllm"
    if base in ("vllm", "sglang") and serves:
        return base
    if base == "trtllm-serve":
        return "trtllm"
    if base in ("llama-server", "llama-server.exe"):
        return "llama.cpp"
    return None


def _image_in(word: str) -> str | None:
    name = word.removeprefix("docker.io/")
    for image in IMAGES:
        if name.startswith(image):
            return image
    return None


def text_of(value: Any) -> str:
    """A scalar as YAML writes it; a number that no text holds as none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "a number"
    return str(value)


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options by name as the words of a command: an object as JSON, a list as several words."""
    words: list[str] = []
    for name, value in options.items():
        if name == "":  # **options that are not known
            words.append(text_of(value))
            continue
        option = re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", str(name))
        option = option.replace("_", "-").lower()
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list) and all(
            isinstance(item, str | int) for item in value
        ):
            words += [f"--{option}", *map(text_of, value)]
        elif isinstance(value, Mapping | list):
            words.append(f"--{option}={json_of(value)}")
        else:
            words.append(f"--{option}={text_of(value)}")
    return words


def json_of(value: Any) -> str:
    """A value of a manifest or a script as the JSON that an engine's option takes."""
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a setting cannot be read: {error}") from None


def model_of(text: str) -> str:
    """The model's name of a path into a cache or of a URI."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+?)(?:/|$)", text)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return re.sub(r"^(?:hf|pvc|s3|gs)://", "", text)
