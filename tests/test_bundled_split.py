"""No test question occurs in training: by key, by text, and by its numbers once names and verbs are taken out."""

import random
import re
from collections import Counter
from itertools import islice

import pytest

from tools.bundled.choices import choice_key
from tools.bundled.documents import SUBJECTS, TEST_DOCUMENTS, bundled_problems, draw_problems
from tools.bundled.problems import HELD_OUT, TEST, TRAIN, Problem, split_of
from tools.bundled.training_lines import HELD_OUT_LINES, draw_drill, json_chat_template, parse_messages, training_lines
from tools.bundled.word_problems import BOXES, GAINS, HE, LOSSES, THINGS

DRAWN = {TRAIN: 3000, HELD_OUT: 200}  # of each subject
FREE = {**dict.fromkeys(HE, "NAME"), **dict.fromkeys(THINGS, "THINGS"), **dict.fromkeys(BOXES, "BOXES")}
FREE |= {**dict.fromkeys(GAINS, "GAIN"), **dict.fromkeys(LOSSES, "LOSS"), "He": "NAME", "She": "NAME"}
WORDS = re.compile("|".join(rf"\b{word}\b" for word in sorted(FREE, key=len, reverse=True)))


def bare(text: str) -> str:
    """A question without what does not matter: its numbers stay, names, things and verbs go."""
    return WORDS.sub(lambda word: FREE[word[0]], text)


def asked(problem: Problem) -> str:
    return bare(problem.fields[0])


def kinds(problems: list[Problem]) -> set[object]:
    return {problem.key[1] for problem in problems}


@pytest.mark.parametrize("task", SUBJECTS)
def test_test_and_training_share_no_question(task: str) -> None:
    for subject in SUBJECTS[task]:
        tests = bundled_problems(task, subject, TEST, TEST_DOCUMENTS[task])
        assert len({problem.key for problem in tests}) == TEST_DOCUMENTS[task]
        for split in (TRAIN, HELD_OUT):
            trained = list(
                islice(draw_problems(task, subject, split, random.Random(f"{subject} {split}")), DRAWN[split])
            )
            assert not {problem.key for problem in tests} & {problem.key for problem in trained}
            assert not {asked(problem) for problem in tests} & {asked(problem) for problem in trained}
            if split == TRAIN:
                assert kinds(tests) <= kinds(trained), "nothing is asked of a kind that is not trained"


def test_rendered_lines_hold_no_test_prompt() -> None:
    from tasks.documents import TaskOptions
    from tasks.task import open_task

    lines = training_lines(20_000, seed=11)
    trained = {bare(line["prompt"]) for line in lines}
    for task in SUBJECTS:
        opened = open_task(task, TaskOptions(data="bundled"))
        prompts = {
            bare(parse_messages(opened.requests(doc, json_chat_template)[0].args[0]).user) for doc in opened.documents
        }
        assert len(prompts) > 270
        assert not prompts & trained
    held_out = [line for line in lines if line["split"] == HELD_OUT]
    assert Counter(line["task"] for line in held_out) == dict.fromkeys(SUBJECTS, HELD_OUT_LINES)
    learned = {bare(line["prompt"]) for line in lines if line["split"] == TRAIN}
    assert not {bare(line["prompt"]) for line in held_out} & learned


def test_drills_of_letters_ask_no_sum_of_a_test_question() -> None:
    source = random.Random(5)
    answers = [draw_drill(source).answer for _ in range(2000)]
    sums = {item for answer in answers for item in re.findall(r"(\d+[+-]\d+):\n", answer)}
    assert len(sums) > 500
    assert {split_of(choice_key("range", item)) for item in sums} == {TRAIN}


def test_the_share_of_each_side() -> None:
    found = Counter(split_of(("anything", left, right)) for left in range(200) for right in range(200))
    shares = {split: round(count / 40_000, 2) for split, count in found.items()}
    assert shares == {TRAIN: 0.8, HELD_OUT: 0.05, TEST: 0.15}


def test_a_question_asked_in_other_words_would_be_noticed() -> None:
    one, two = "Tom has 9 apples. He buys 4 more.", "Eva has 9 pens. She finds 4 more."
    assert bare(one) == bare(two) != bare(two.replace("4", "5"))
