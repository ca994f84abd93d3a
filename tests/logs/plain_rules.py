"""The rules of look-ups written plainly, by scanning the text at each step: references for the replays."""

from __future__ import annotations

import numpy as np

Step = tuple[int, int, int]
"""Index of the last token emitted before the step, drafted tokens, accepted tokens as far as the log goes."""


def earlier_places(text: list[int], length: int) -> list[int]:
    """Where the last `length` tokens stand earlier in the text, from first to last; they may overlap themselves."""
    wanted = text[len(text) - length :]
    return [
        start
        for start in range(len(text) - length)
        if text[start : start + length] == wanted
    ]


def draft_of(rule: str, text: list[int], gamma: int, low: int, high: int) -> list[int]:
    """The draft of one n-gram rule after `text`."""
    if rule == "llama.cpp":
        return llama_draft(text[:-1], text[-1], high, gamma)
    for length in range(min(high, len(text) - 1), low - 1, -1):
        places = earlier_places(text, length)
        if not places:
            continue
        if rule == "ngram-gpu":
            begin = places[-1] + length
            draft = text[begin : begin + gamma]
            return draft + [text[-1]] * (gamma - len(draft))
        begin = places[0] + length
        return text[begin : begin + gamma]
    return [text[-1]] * gamma if rule == "ngram-gpu" else []


def llama_draft(tokens: list[int], sampled: int, n: int, m: int) -> list[int]:
    """llama.cpp's ngram-simple, whose history does not hold the token just sampled."""
    size = len(tokens)
    if size <= n + m + 1:
        return []
    pattern = [*tokens[size - n + 1 :], sampled]
    for start in range(size - n - 1, 0, -1):
        if tokens[start : start + n] == pattern:
            draft = tokens[start + n : start + n + m]
            return draft if len(draft) >= n else []
    return []


def accepted_of(draft: list[int], rest: list[int]) -> int:
    count = 0
    while count < min(len(draft), len(rest)) and draft[count] == rest[count]:
        count += 1
    return count


def ngram_steps(
    rule: str,
    text: list[int],
    prompt_len: int,
    gamma: int,
    low: int,
    high: int,
    max_len: int = 0,
) -> list[Step]:
    """All steps of one n-gram rule on a request."""
    place = prompt_len
    steps = []
    while place < len(text) - 1:
        room = gamma if not max_len else min(gamma, max_len - place - 2)
        draft = draft_of(rule, text[: place + 1], room, low, high) if room > 0 else []
        accepted = accepted_of(draft, text[place + 1 :])
        steps.append((place, len(draft), accepted))
        place += accepted + 1
    return steps


class PlainTree:
    """Counts of every sequence of up to `depth` tokens, with the order of the tokens that follow each."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count: dict[tuple[int, ...], int] = {}
        self.following: dict[tuple[int, ...], list[int]] = {}

    def append(self, sequence: list[int]) -> None:
        """Count the suffixes of a sequence that has just grown by its last token."""
        for length in range(1, min(self.depth, len(sequence)) + 1):
            self._rise(tuple(sequence[len(sequence) - length :]))

    def remove(self, sequence: list[int]) -> None:
        for start in range(len(sequence)):
            for end in range(start + 1, min(start + self.depth, len(sequence)) + 1):
                self._fall(tuple(sequence[start:end]))

    def _alike(self, key: tuple[int, ...], count: int) -> list[int]:
        """Places in the parent's list that have this count."""
        parent = key[:-1]
        tokens = self.following[parent]
        return [
            i for i, token in enumerate(tokens) if self.count[(*parent, token)] == count
        ]

    def _rise(self, key: tuple[int, ...]) -> None:
        tokens = self.following.setdefault(key[:-1], [])
        if key not in self.count:
            self.count[key] = 1
            tokens.append(key[-1])
            return
        count = self.count[key]
        alike = self._alike(key, count)
        above = self._alike(key, count + 1)
        is_first = tokens[alike[0]] == key[-1]
        tokens.remove(key[-1])
        if is_first and above:
            tokens.insert(above[0], key[-1])
        else:
            tokens.insert(alike[0], key[-1])
        self.count[key] = count + 1

    def _fall(self, key: tuple[int, ...]) -> None:
        tokens = self.following[key[:-1]]
        count = self.count[key]
        alike = self._alike(key, count)
        if count == 1:
            tokens.remove(key[-1])
            del self.count[key]
            return
        tokens.remove(key[-1])
        tokens.insert(alike[-1], key[-1])
        self.count[key] = count - 1

    def speculate(
        self, text: list[int], gamma: int, factor: float, least: float
    ) -> tuple[list[int], np.float32]:
        best: list[int] = []
        best_score = np.float32(0)
        for length in range(1, min(len(text), self.depth)):
            key = tuple(text[len(text) - length :])
            if key not in self.count:
                break
            room = min(
                gamma, int(float(np.float32(length) * np.float32(factor)) + 1e-6)
            )
            draft: list[int] = []
            score = np.float32(0)
            probability = np.float32(1)
            while len(draft) < room and self.following.get(key):
                token = self.following[key][0]
                below = (*key, token)
                share = np.float32(self.count[below]) / np.float32(self.count[key])
                probability = probability * share
                if probability < np.float32(least):
                    break
                draft.append(token)
                score = score + probability
                key = below
            if score >= best_score:
                best = draft
                best_score = score
        return best, best_score


class PlainSuffix:
    """Suffix decoding over requests in their order."""

    def __init__(self, *, depth: int, factor: float, least: float, cached: int) -> None:
        self.depth = depth
        self.factor = factor
        self.least = least
        self.cached = cached
        self.responses = PlainTree(depth)
        self.live: list[list[int]] = []

    def steps(
        self, text: list[int], prompt_len: int, gamma: int, max_len: int = 0
    ) -> list[Step]:
        local = PlainTree(self.depth)
        for place in range(prompt_len):
            local.append(text[: place + 1])
        response: list[int] = []
        if self.cached:
            self.live.append(response)
            while len(self.live) > self.cached:
                self.responses.remove(self.live.pop(0))
        steps = []
        place = prompt_len - 1
        emitted = 1
        while True:
            for _ in range(emitted):
                place += 1
                local.append(text[: place + 1])
                response.append(text[place])
                if self.cached:
                    self.responses.append(response)
            if place == len(text) - 1:
                return steps
            room = gamma if not max_len else min(gamma, max_len - place - 2)
            known = text[: place + 1]
            draft, score = local.speculate(known, room, self.factor, self.least)
            others, others_score = self.responses.speculate(
                known, room, self.factor, self.least
            )
            if others_score > score:
                draft = others
            accepted = accepted_of(draft, text[place + 1 :])
            steps.append((place, len(draft), accepted))
            emitted = min(accepted + 1, len(text) - 1 - place)
