"""A server's command line, as `vllm serve`, SGLang's `launch_server` and `trtllm-serve` take it, in
the wrappings that people paste: a shell's script, a container, YAML, Python.

Readers by form: `shell` (of `statements`), `manifest` (YAML), `script` (Python); `start` finds
the server in words, `options` knows each engine's options, `command` makes fields of them. Nothing is
run. All forms follow plain assignments; a reference whose value is not written stays in the words,
marked, and `command` asks for those whose value is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from magicdec.errors import ConfigError
from magicdec.redaction import redacted
from magicdec.specs.serve_command.command import command_of
from magicdec.specs.serve_command.manifest import starts_of_yaml
from magicdec.specs.serve_command.options import OPTIONS, is_engine_option
from magicdec.specs.serve_command.script import starts_of_python
from magicdec.specs.serve_command.server import ServeCommand, Speculation
from magicdec.specs.serve_command.shell import Shell
from magicdec.specs.serve_command.speculation import speculation_of
from magicdec.specs.serve_command.start import (
    CLOSE,
    MENTIONS,
    MOST_TEXT,
    OPEN,
    STARTS,
    Given,
    SetValues,
    Start,
)

__all__ = [
    "MOST_TEXT",
    "OPTIONS",
    "ServeCommand",
    "Speculation",
    "is_engine_option",
    "read_serve_command",
    "speculation_of",
]
FENCE = re.compile(r"^[ \t]*```[\w-]*[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
"""A block of code in Markdown."""
DOCKERFILE = re.compile(r"^(?:CMD|ENTRYPOINT)[ \t]+(\[[^\n]*\])[ \t]*$", re.MULTILINE)
MOST_BLOCKS = 50
UNIT = re.compile(
    r"^(ExecStart(?:Pre|Post)?|Environment|EnvironmentFile)=[-@:+!]*", re.MULTILINE
)
"""Lines of a systemd unit."""
OF_UNITS = {"Environment": "export ", "EnvironmentFile": "source "}
PROMPT = re.compile(
    r"^[ \t]*(?:\([\w.-]+\)[ \t]*)?(?:\[?[\w.-]+@[^\s$#%\]]*(?:[ \t][^\s\]$#%]+)?\]?[ \t]?)?"
    r"(?:[$%❯]|(?<=\S)#)[ \t]+(?=[\w./])"
    r"|(?<=\\\n)[ \t]*>[ \t]+(?=-)",
    re.MULTILINE,
)
"""A terminal's prompt before a command or an option that was copied with it."""
QUOTED = re.compile(
    r"^[ \t]*>[^\n]*(?:(?:vllm|sglang) serve|launch_server|api_server|trtllm-serve|llama-server|docker run)",
    re.MULTILINE,
)
"""A server that is started in a quotation, as mails and Markdown mark it."""
QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
GRANTED = re.compile(
    r"--(?:gres[= ]gpu:|gpus(?:-per-(?:node|task))?[= ])(?P<name>[A-Za-z][\w-]*):(?P<count>\d{1,6})"
)
"""Devices that a Slurm job asks for."""


def read_serve_command(
    text: str,
    *,
    reads_files: bool = True,
    folder: Path | None = None,
    values: Mapping[str, str] | None = None,
) -> ServeCommand:
    """The server that a command line, a script, or the text of a YAML file starts.

    `reads_files`: with the files that it names, looked for in `folder` (None: here). `values`:
    variables that the text leaves open. Raises ConfigError where it starts none, names no model,
    gives an option a value that cannot be read or is not known, or asks for no variable of a name in
    `values`. No secret of the text is read.
    """
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"a command of {len(text)} characters is too long; {MOST_TEXT} are read"
        )
    if reads_files and folder is None:
        folder = Path()
    if not reads_files:
        folder = None
    text = redacted(text.replace(OPEN, "").replace(CLOSE, ""))
    if QUOTED.search(text):
        text = QUOTE.sub("", text)
    assigned = {}
    for name, value in (values or {}).items():
        assigned[name] = redacted(f"{name}={value}").removeprefix(f"{name}=")
    given = Given(text=text, values=SetValues(assigned), folder=folder)
    starts = _starts(given)
    given.values.check()
    if not starts:
        given.ask(
            [
                given.question(reference, '"vllm serve Qwen/Qwen3-8B"')
                for reference in given.commands
            ]
        )
        raise ConfigError(
            f"no server is started here: give {STARTS}, or a file with one"
        )
    first = next((start for start in starts if not start.is_prefill), starts[0])
    if first.doubt:
        given.notes.append(
            f"the server is started {first.doubt}, which is taken to be reached"
        )
    others = len(starts) - 1
    if others:
        given.notes.append(
            f"{others} more {'server is' if others == 1 else 'servers are'} started here; "
            f"read is the one with {given.shown(' '.join(first.words[:2]))[:60]}"
        )
    granted = GRANTED.search(text)
    if granted is not None and first.hardware is None:
        first.hardware = granted["name"]
        first.num_gpus = first.num_gpus or int(granted["count"])
    return command_of(first, given)


def _starts(given: Given) -> list[Start]:
    """Servers by the first form that has any."""
    starts = starts_of_python(given) or starts_of_yaml(given)
    if starts:
        return starts
    blocks = [
        block for block in FENCE.finditer(given.text) if MENTIONS.search(block[1])
    ]
    for block in blocks[:MOST_BLOCKS]:
        inner = Given(
            text=block[1],
            first_line=given.text.count("\n", 0, block.start(1)) + given.first_line,
            values=given.values,
            folder=given.folder,
            files=given.files,
        )
        starts = _starts(inner)
        if starts:
            given.references = inner.references
            given.reasons = inner.reasons
            given.notes += inner.notes
            return starts
    shell = Shell(given)
    shell.run(_as_shell(given.text))
    return shell.starts


def _as_shell(text: str) -> str:
    """A Dockerfile's and a systemd unit's lines as a shell's, and a terminal's without its prompts; other
    text unchanged."""
    if DOCKERFILE.search(text):
        words = []
        for line in DOCKERFILE.findall(text):
            words += re.findall(r"\"((?:[^\"\\]|\\.)*)\"", line)
        quoted = [f"'{word.replace(chr(39), '')}'" for word in words]
        rest = DOCKERFILE.sub("", text)
        return f"{rest}\n{' '.join(quoted)}\n"
    return UNIT.sub(lambda match: OF_UNITS.get(match[1], ""), PROMPT.sub("", text))
