"""Fakes for the tests of tasks/: a character tokenizer and a decoder with predefined answers."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sampler import Counters, Generated, Pair, Prompt, Scored
from sampler.engine import OnFailure
from tasks.documents import Document
from tasks.evaluate import Result, Sampling, evaluate
from tasks.sandbox import SandboxError, find_sandbox
from tasks.task import Task


def bench() -> Path:
    """The directory with the real benchmark data; skips the test if there is none."""
    folder = os.environ.get("REUSE_SWEEP_BENCH")
    if not folder:
        pytest.skip("REUSE_SWEEP_BENCH does not name the folder with the real benchmark data")
    if importlib.util.find_spec("nltk"):
        import nltk

        splitter = str(Path(folder) / "nltk_data")
        nltk.data.path += [splitter] if splitter not in nltk.data.path else []
    return Path(folder)


def working_sandbox() -> None:
    """Skips the test, with the reason, where generated programs cannot run in a sandbox."""
    try:
        find_sandbox()
    except SandboxError as error:
        pytest.skip(f"no sandbox works here: {error}")


class CharacterTokenizer:
    """Each character is a token."""

    chat_template = "yes"
    name_or_path = "characters"
    bos_token_id = eos_token_id = pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False, verbose: bool = True) -> list[int]:
        assert not add_special_tokens
        del verbose
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        assert not tokenize
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return text.removesuffix("</>") if continue_final_message else text + "<assistant>\n" * add_generation_prompt


class CannedDecoder:
    """Answers and scores with functions, and records its requests. `backwards` completes the last request first."""

    def __init__(
        self,
        answer: Callable[[str], str] = lambda _: "",
        score: Callable[[str, str], float] = lambda *_: 0.0,
        *,
        backwards: bool = False,
    ) -> None:
        self.answer, self.rate, self.backwards = answer, score, backwards
        self.tokenizer = CharacterTokenizer()
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling | None] = []
        self.pairs: list[Pair] = []

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, on_failure: OnFailure | None = None
    ) -> Iterator[tuple[int, Generated]]:
        del on_failure  # nothing fails
        self.prompts += prompts
        self.samplings.append(sampling)
        for index in self._order(len(prompts)):
            text = self.answer(self.tokenizer.decode(prompts[index].ids))
            ids = tuple(ord(character) for character in text)
            yield index, Generated(ids=ids, text=text, finish="stop", counters=Counters(full=1), started=0, seconds=0.5)

    def score(self, pairs: Sequence[Pair], on_failure: OnFailure | None = None) -> Iterator[tuple[int, Scored]]:
        del on_failure
        self.pairs += pairs
        for index in self._order(len(pairs)):
            prefix, target = (self.tokenizer.decode(ids) for ids in (pairs[index].prefix, pairs[index].target))
            counters = Counters(full=1, prefill_tokens=len(prefix))
            value = self.rate(prefix, target)
            yield index, Scored(score=value, greedy=False, rewound=0, counters=counters, started=0, seconds=0.25)

    def _order(self, count: int) -> Sequence[int]:
        return range(count)[::-1] if self.backwards else range(count)


def canned_for(task: Task, response: Callable[[dict[str, Any]], str], **settings: Any) -> CannedDecoder:
    """A decoder that recognises a generation task's documents by their prompts."""
    template = None
    if task.options.chat_template:
        from tasks.evaluate import chat_renderer

        template = chat_renderer(CharacterTokenizer())
    answers = {}
    for document in task.documents:
        (request,) = task.requests(document, template)
        answers[request.args[0]] = response(request.doc)
    return CannedDecoder(answers.__getitem__, **settings)


def choosing(task: Task, chosen: Callable[[dict[str, Any]], int]) -> CannedDecoder:
    """A decoder that prefers one option of each multiple-choice document."""
    preferred: dict[str, str] = {}
    decoder = CannedDecoder(score=lambda prefix, target: -1.0 if preferred[prefix] == target else -2.0 - len(target))
    for document in task.documents:
        requests = task.requests(document, None)
        preferred[requests[0].args[0]] = requests[chosen(requests[0].doc)].args[1]
    return decoder


def run(task: Task, decoder: CannedDecoder, documents: Sequence[Document] | None = None) -> list[Result]:
    return list(evaluate(task, task.documents if documents is None else documents, decoder))


def aggregate(task: Task, results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    return task.aggregate((result.document, result.metrics) for result in results)
