"""Secrets in text from elsewhere: what is pasted or read from a file goes through `redacted` before any
reader sees it, so nothing that quotes the text can give one away.

Hidden are values of options, variables, keys and headers whose name's last word speaks of a secret, and
words that look like one wherever they stand.
"""

from __future__ import annotations

import re

from magicdec.units import printable

HIDDEN = "…"
LONGEST_NAME = 80
NAMED = re.compile(
    r"""
    (?: token | secret | passw(?:or)?d | passphrase | authorization | (?<![a-z])key
      | (?<=[a-z])(?-i:Key) | (?:api|access|secret|private|auth|license)key )
    (?: [_-]?\d{1,3} )? (?![\w]|-[a-z]+[\s=:"'-])
    (?P<closed> \\{0,4}["'] )? \]? \)?
    (?:
        [ \t]{0,40} , [^\n()]{0,200}? \b default [ \t]? = [ \t]?          # an argument's default
      | [ \t]{0,40} : [ \t]? [A-Za-z][\w.\[\]|]{0,40} [ \t]? = [ \t]?     # name: str = value
      | (?P<block> [ \t]? : [ \t]? [|>] [-+\d]{0,2} [ \t]{0,40} \n [ \t]{0,80} )
      | (?P<joint> (?: [ \t]{0,40} (?: [:?+=!]?= | :(?!//)[-+?]? ) | (?<=\w)-(?=[^\s-]) ) >? [ \t]{0,40} )
      | (?: \s{0,80} , [\w.\[\]-]{0,80} \b | \s{0,80} [,\n] \s{0,80} \\{0,4}["']? ) value
            \\{0,4}["']? [ \t]? [:=] [ \t]{0,40}                         # name: X, value: Y
      | (?P<listed> [ \t]{0,40} , \s{0,80} )
      | (?P<spaced> [ \t]{0,40} (?: \\ [ \t]{0,40} \n [ \t]{0,80} | \n [ \t]{0,80} -[ \t]{1,40}
                  | \n [ \t]{1,80} (?= [^\s-][^\s]* [ \t]{0,40} \\? $ ) | [ \t] ) [ \t]{0,40} )
    )
    [\[(]? [ \t]{0,9} (?: [bfru]{1,2}(?=["']) )?
    """,
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
"""The end of a secret's name, with what stands between it and its value."""
HEAD = re.compile(r"[\w.\[\]#-]*$")
"""The beginning of a name, behind the text before its end."""
COUNTS = re.compile(r"(?:^|[_-])(?:num|max|min|per)[_-]|^--no-|^#", re.IGNORECASE)
"""Names that end in a secret's word and count or switch something."""
SETS = re.compile(r"(?:\b(?:ENV|ARG|setenv)|\bset[ \t]+-\w+)[ \t]+$")
"""Text that sets a name to the word behind it."""
SCHEME = re.compile(r"(?:bearer|basic|token|apikey)[ \t]+", re.IGNORECASE)
VALUE = re.compile(
    r"""
    (?P<quote> \\{0,4}["'] ) (?P<quoted> (?: (?!(?P=quote)) (?: \\. | [^\n] ) )* )
  | \$\{ \w+ :?[-=+?] (?P<default> [^}\n]* )
  | (?P<reference> \$\w+ | \$\{\w+\} | \$\(\w+\) | \{\{[^\n]*?\}\} | <[^<>\n]*> )
  | \$\( (?P<computed> (?: [^()\n] | \( [^()\n]{0,200} \) ){0,2000} )
  | ` (?P<ticked> [^`\n]* )
  | (?P<bare> (?: \\[^\n] | [^\s"'`,;|&<>(){}\[\]\\] | ,(?=[^\s,"'={}\[\]]+(?:[\s,]|$)) )+ )
    """,
    re.VERBOSE | re.MULTILINE,
)
CODE = re.compile(
    r"\s*[=(\[](?!=)|(?:(?<=\blambda)|(?<=\bawait)|(?<=\bnot)|(?<=\breturn)|(?<=\braise))\s"
)
"""Text that follows a word that is no value but code."""
VALUE_FIRST = re.compile(
    r"""\bvalue["']?[ \t]*:[ \t]*["']?(?P<value>[^\s"',}]+)["']?\s*[,\n]\s*["']?name["']?[ \t]*:[ \t]*"""
    r"""["']?\w*(?:token|key|secret|password)\b""",
    re.IGNORECASE,
)
"""A manifest's variable whose value stands before its name."""
LOGIN = re.compile(r"(?<=://)[^/\s@\"'<>]{1,300}@")
"""A user's name and password in an address."""
PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*KEY-----)[^\"']*?(-----END [A-Z ]*KEY-----|\Z)"
)
KEY = re.compile(
    r"""(?<![A-Za-z0-9]) (?:
        hf_ (?=[A-Za-z]*\d|[A-Za-z]*[A-Z]|[A-Za-z]{16}) [A-Za-z0-9]{6,}
      | sk- (?=[\w-]*\d|[\w-]*[A-Z]|[\w-]{16}) [\w-]{6,}
      | (?: gh[opsu]r?_ | github_pat_ | glpat- | nvapi- | gsk_ | xox[a-z]- | pypi- | dckr_pat_ ) [\w-]{10,}
      | A[KS]IA [0-9A-Z]{12,} | AIza [\w-]{20,}
      | eyJ [\w-]{8,} \. [\w-]{4,} (?: \. [\w-]* )?
    )""",
    re.VERBOSE,
)
"""Keys by their makers' beginnings, and JSON Web Tokens."""
BEARER = re.compile(r"(?<=\bbearer )(?!tokens?\b)[^\s\"'$<{…]{4,}", re.IGNORECASE)
LONG_WORDS = (
    re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}"),
    re.compile(r"[A-Za-z0-9+_-]{32,}={0,2}"),
)
"""Words that may be random, with slashes or as parts of a path."""
OF_REVISION = re.compile(
    r"(?:(?:revision|commit|sha\d*|digest|rev|ref)[\w-]*[\"']?[ \t]*[:=, \t][ \t]*[\"']?|[@/]|/[\w.-]+:)$",
    re.IGNORECASE,
)
"""Text that stands before the hexadecimal name of a version."""


def redacted(text: str) -> str:
    """A text with `…` in place of every secret."""
    pieces = []
    end = 0
    position = 0
    while (name := NAMED.search(text, position)) is not None:
        position = name.end()
        found = _value_of(text, name)
        if found is None:
            # its separator may be the beginning of another name
            position = max(name.start() + 3, end)
            continue
        begin, stop = found
        pieces += [text[end:begin], HIDDEN]
        end = position = stop
    text = "".join([*pieces, text[end:]])
    return without_keys(VALUE_FIRST.sub(_hidden_value, text))


def quoted(text: object) -> str:
    """A piece of a log, of metrics or of a file as a line may show it: printable, and no key."""
    return without_keys(printable(str(text)))


def without_keys(text: str) -> str:
    """A text with `…` in place of the words that look like keys, whatever stands before them."""
    text = LOGIN.sub(f"{HIDDEN}@", text)
    text = PRIVATE_KEY.sub(_hidden_lines, text)
    text = KEY.sub(HIDDEN, text)
    text = BEARER.sub(HIDDEN, text)
    for words in LONG_WORDS:
        text = words.sub(_unless_usual, text)
    return text


def _value_of(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    """Where the value behind a name stands; None: it is no secret's, or stands elsewhere."""
    before = text[max(name.start() - LONGEST_NAME, 0) : name.start()]
    head = HEAD.search(before)
    assert head is not None
    whole = head[0].lstrip("[]") + re.split(r"[^\w]", name[0], maxsplit=1)[0]
    is_option = whole.startswith("-")
    if COUNTS.search(whole):
        return None
    if whole in ("key", "Key") and not before.endswith(("?", "&")):
        return None  # of a pair
    if name["joint"] == "-" and not before[: head.start()].endswith("${"):
        return None
    if name["spaced"] is not None and not (
        is_option or SETS.search(before[: head.start()])
    ):
        return None
    if name["listed"] is not None and not (is_option or name["closed"]):
        return None
    begin = name.end()
    if name["block"] is not None:
        stop = text.find("\n", begin)
        return begin, len(text) if stop < 0 else stop
    scheme = SCHEME.match(text, begin)
    value = VALUE.match(text, begin)
    if value is not None and value["quoted"] is not None:
        scheme = SCHEME.match(text, value.start("quoted"), value.end("quoted"))
        begin = value.start("quoted") if scheme is None else scheme.end()
        return (begin, value.end("quoted")) if value["quoted"] else None
    if scheme is not None:
        value = VALUE.match(text, scheme.end())
    if value is None or value["reference"] is not None:
        return None
    if value["bare"] is not None:
        is_given = value["bare"].startswith("-") and name["spaced"] is not None
        if is_given or value["bare"][:1] in ("|", ">"):
            return None
        if (name["listed"] is not None or not is_option) and CODE.match(
            text, value.end()
        ):
            return None
        if name["listed"] is not None and not (
            is_option and re.match(r"\w+=", value["bare"]) is None
        ):
            return None
    return value.span(str(value.lastgroup))


def _hidden_value(match: re.Match[str]) -> str:
    if match["value"].startswith("$"):
        return match[0]
    begin = match.start("value") - match.start()
    return match[0][:begin] + HIDDEN + match[0][begin + len(match["value"]) :]


def _hidden_lines(match: re.Match[str]) -> str:
    """A private key without its lines, whose number stays."""
    return f"{match[1]}{HIDDEN}" + "\n" * match[0].count("\n") + match[2]


def _unless_usual(match: re.Match[str]) -> str:
    word = match[0]
    is_hexadecimal = re.fullmatch(r"[0-9a-fA-F]+", word) is not None
    before = match.string[max(match.start() - 40, 0) : match.start()]
    if is_hexadecimal and OF_REVISION.search(before):
        return word
    return HIDDEN if _is_random(word) else word


def _is_random(word: str) -> bool:
    """Whether a word has no more order than a key: names of models and classes have words in them, and
    are joined by hyphens."""
    parts = re.findall(r"[A-Za-z0-9]+", word)
    letters = "".join(parts)
    if len(letters) < 26 or len(letters) < 5 * len(parts):
        return False
    digits = re.findall(r"\d", letters)
    capitals = re.findall(r"[A-Z]", letters)
    small = re.findall(r"[a-z]+", letters)
    if small and capitals:
        usual_word = sum(map(len, small)) / len(small)
        return usual_word < 3.5 and len(digits) + len(capitals) >= 8
    words = re.findall(r"[A-Za-z]+", letters)
    if len(parts) > 1 or not 3 <= len(digits) <= 0.85 * len(letters) or not words:
        return False
    return sum(map(len, words)) / len(words) < 8.0
