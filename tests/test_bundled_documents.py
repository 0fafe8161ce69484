"""The bundled documents: made anew byte for byte, as many as promised, true, and neither short nor long."""

import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.catalog import CATALOG, MMLU_SUBJECTS
from tasks.sources import BUNDLED
from tools.documents.arithmetic import Sum, draw_sum, small
from tools.documents.documents import SUBJECTS
from tools.documents.facts import CONTINENTS, KINDS
from tools.documents.wording import pieces
from tools.documents.write import contents, write


def documents(task: str, split: str = "test") -> list[dict[str, Any]]:
    folder = BUNDLED / CATALOG[task].dataset
    paths = sorted(folder.glob(f"*/{split}.jsonl"))
    assert [path.parent.name for path in paths] == sorted(SUBJECTS[task])
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_generator_makes_the_same_files_byte_for_byte() -> None:
    made = {name: text.encode() for name, text in contents()}
    on_disk = {path.relative_to(BUNDLED).as_posix(): path.read_bytes() for path in BUNDLED.rglob("*.jsonl")}
    assert made.keys() == on_disk.keys()
    assert [name for name in made if made[name] != on_disk[name]] == []


def test_write_puts_them_where_it_is_told(tmp_path: Path) -> None:
    assert write(tmp_path) == 915
    for path in BUNDLED.rglob("*.jsonl"):
        assert (tmp_path / path.relative_to(BUNDLED)).read_bytes() == path.read_bytes()
    command = [sys.executable, "-m", "tools.documents.write", "--to", str(tmp_path / "none")]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "is not a folder" in wrong.stderr


@pytest.mark.parametrize(("task", "tests", "examples", "split"), [
    ("gsm8k", 280, 20, "train"), ("minerva_math", 280, 35, "train"), ("mmlu", 280, 20, "dev"),
])  # fmt: skip
def test_counts(task: str, tests: int, examples: int, split: str) -> None:
    found = documents(task)
    assert len(found) == tests
    assert len({json.dumps(document, sort_keys=True) for document in found}) == tests, "no document occurs twice"
    assert len(documents(task, split)) == examples
    if task == "mmlu":
        assert set(SUBJECTS[task]) <= set(MMLU_SUBJECTS)
        assert len(SUBJECTS[task]) >= 4
    if task == "minerva_math":
        assert len(SUBJECTS[task]) == 7


@pytest.mark.parametrize(("task", "field"), [("gsm8k", "answer"), ("minerva_math", "solution")])
def test_answers_are_true_and_end_in_their_last_result(task: str, field: str) -> None:
    for document in documents(task):
        text = document[field]
        sums = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", text)
        assert len(sums) >= 2, text
        for left, sign, right, result in sums:
            assert Sum(int(left), sign, int(right)).result == int(result), text
        (final,) = re.findall(r"\\boxed\{(\d+)\}", text)
        assert final == sums[-1][3] or f"={final}$" in text, text
        assert task == "minerva_math" or text.endswith(f"\n#### {final}")


@pytest.mark.parametrize(("task", "field"), [("gsm8k", "answer"), ("minerva_math", "solution")])
def test_answers_give_room_for_a_speed_axis(task: str, field: str) -> None:
    lengths = [pieces(document[field]) for document in documents(task)]
    assert 45 <= statistics.mean(lengths) <= 90
    assert min(lengths) >= 40
    assert max(lengths) <= 100
    questions = [pieces(document["question" if task == "gsm8k" else "problem"]) for document in documents(task)]
    assert max(map(sum, zip(lengths, questions, strict=True))) <= 130, "prompt and template must fit into 160 tokens"


def test_word_problems_have_two_to_four_steps() -> None:
    steps = {document["answer"].count("=") for document in documents("gsm8k")}
    assert steps == {2, 3, 4}


def test_levels_and_types() -> None:
    found = documents("minerva_math")
    assert {document["level"] for document in found} == {f"Level {level}" for level in range(1, 6)}
    assert {document["type"] for document in found} >= {"Counting & Probability", "Prealgebra", "Precalculus"}


def right_option(question: str) -> str:
    """The answer to a bundled mmlu question, found another way than the generator's."""
    if large := re.fullmatch(r"How large is (.*)\?", question):
        result = int(eval(large[1]))
        return (
            "less than 10"
            if result < 10
            else "30 or more"
            if result >= 30
            else f"from {result // 10}0 to {result // 10}9"
        )
    if held := re.findall(r"(\d+) (\w+)", question):
        return str(max(held, key=lambda pair: int(pair[0]))[1])
    names, asked = re.findall(r"(?:from|words) (\w+) (?:to|and) (\w+)", question)[0], question.split()[-1]
    if asked == "name?":
        kind = next(kind for kind in KINDS if names["second" in question] in KINDS[kind])
        return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    return next(one for one in CONTINENTS if names[asked == "stop?"] in CONTINENTS[one])


def test_choices_are_right_and_no_letter_is_preferred() -> None:
    found = documents("mmlu") + documents("mmlu", "dev")
    for document in found:
        assert len(set(document["choices"])) == 4
        assert document["choices"][document["answer"]] == right_option(document["question"]), document
    letters = [document["answer"] for document in found]
    assert all(0.15 < letters.count(letter) / len(letters) < 0.35 for letter in range(4))


def test_only_small_sums_are_made() -> None:
    source = random.Random(3)
    drawn = [draw_sum(source) for _ in range(3000)]
    assert {one.sign for one in drawn} == set("+-*/")
    assert max(max(one.left, one.right, one.result) for one in drawn) == 60
    assert not small(50, "+", 30)
    assert not small(7, "/", 2)
    assert not small(3, "-", 4)
    with pytest.raises(AssertionError, match="not among the sums"):
        Sum(7, "*", 9)
