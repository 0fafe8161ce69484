"""Reads prompt and answer lines and encodes them as token sequences.

A line is {"task", "subject", "split", "system", "prompt", "answer"}; subject and system may be missing or null.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampler.errors import InputError

TRAIN, HELD_OUT = "train", "held_out"
DRILL = "drill"  # a task of many small facts, of which only the results are learned
RESULTS = re.compile(r"(?:=|:\n)([^,]+)")  # the results in a drill
RARE_SHARE = 0.12  # a token is content if fewer answers than this contain it
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One prompt and its answer, as text."""

    task: str
    split: str
    system: str | None
    prompt: str
    answer: str

    def __post_init__(self) -> None:
        if self.split not in (TRAIN, HELD_OUT):
            raise InputError(f'"split" must be "{TRAIN}" or "{HELD_OUT}" (got {self.split!r})')
        for name in ("task", "prompt", "answer"):
            if not getattr(self, name):
                raise InputError(f'"{name}" must not be empty')

    @property
    def messages(self) -> list[Message]:
        """The prompt as a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The tokens of a prompt and its answer. `asked` is the set of positions to learn, or None for the whole answer."""

    tokens: tuple[int, ...]  # ends with the stop token
    prompt: int  # number of tokens in the prompt
    asked: frozenset[int] | None = None
    content: frozenset[int] = frozenset()  # token ids that distinguish answers

    @property
    def is_choice(self) -> bool:
        """Whether the answer is a single token, which is scored and not generated."""
        return self.asked is None and len(self.tokens) == self.prompt + 2


def read_lines(path: Path) -> list[Line]:
    """All lines of a file. Raises InputError with the number of the first invalid one."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot read data file {path}: {error.strerror}") from None
    lines = [_line(text, f"{path}, line {number}") for number, text in enumerate(texts, start=1) if text.strip()]
    if not any(line.split == TRAIN for line in lines):
        raise InputError(f'data file {path} must have lines with "split": "{TRAIN}" (found none)')
    return lines


def _line(text: bytes, where: str) -> Line:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object")
    values: dict[str, Any] = {name: fields.get(name) for name in ("task", "split", "system", "prompt", "answer")}
    for name, value in values.items():
        if not isinstance(value, str) and not (name == "system" and value is None):
            raise InputError(f'{where}: "{name}" must be a string (got {json.dumps(value)[:40]})')
    try:
        return Line(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def training_texts(lines: Iterable[Line]) -> list[str]:
    """Every text of the training lines, for the tokenizer."""
    return [
        text
        for line in lines
        if line.split == TRAIN
        for text in (line.system, line.prompt, line.answer)
        if text is not None
    ]


def encode_examples(lines: Sequence[Line], tokenizer: Any) -> list[Example]:
    """Tokenizes chats as the sampler's commands do, followed by the answer and a stop token."""
    prompts = tokenizer.apply_chat_template(
        [line.messages for line in lines], add_generation_prompt=True, tokenize=False
    )
    fast = tokenizer.backend_tokenizer  # encodes many texts at once
    before = fast.encode_batch(prompts, add_special_tokens=False)
    answers = fast.encode_batch([line.answer for line in lines], add_special_tokens=False)
    content = _rare([answer.ids for line, answer in zip(lines, answers, strict=True) if line.task != DRILL])
    return [
        Example(
            tokens=(*prompt.ids, *answer.ids, tokenizer.eos_token_id),
            prompt=len(prompt.ids),
            asked=_asked(line, len(prompt.ids), answer.offsets) if line.task == DRILL else None,
            content=content,
        )
        for line, prompt, answer in zip(lines, before, answers, strict=True)
    ]


def _rare(answers: Sequence[Sequence[int]]) -> frozenset[int]:
    """Tokens of names, things and numbers, which occur in few answers; the words around them occur in many."""
    seen = Counter(token for answer in answers for token in set(answer))
    return frozenset(token for token, count in seen.items() if count < RARE_SHARE * len(answers))


def _asked(line: Line, start: int, offsets: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Positions of the tokens with a drill's results."""
    spans = [match.span(1) for match in RESULTS.finditer(line.answer)]
    positions = frozenset(
        start + place
        for place, (begin, end) in enumerate(offsets)
        if any(left < end and begin < right for left, right in spans)
    )
    if not positions:
        raise InputError(f"drill {line.answer[:40]!r} has no results; they must follow = or a colon and a new line")
    return positions
