"""The bundled model's tokenizer: pieces, bytes, chat turns, and the same ids however it is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_training_data import write_lines
from transformers import AutoTokenizer

from sampler import InputError
from sampler.text import decode, encode, encode_chat, load_tokenizer
from tools.tiny.examples import Line, encode_examples, read_lines, training_texts
from tools.tiny.model_files import END, MASK, PAD, START, _as_qwen2, build_tokenizer, tiny_config

STRANGE = "Zürich costs 3½ € (naïve)\n\n\tπ ≈ 3.14159… 日本 🙂 \\frac{1}{2}"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return read_lines(write_lines(tmp_path_factory.mktemp("data") / "lines.jsonl"))


@pytest.fixture(scope="module")
def folder(lines: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer(training_texts(lines))
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_as_qwen2(tiny_config(tokenizer))))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", ["Ann has 12 pens.", STRANGE, "a  b\r\n", " A", "<|not special|>"])
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_numbers_below_a_hundred_and_common_words_are_one_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize(" Ann has 42 pens") == ["ĠAnn", "Ġhas", "Ġ", "42", "Ġpens"]
    assert tokenizer.tokenize("1203 7 100") == ["12", "0", "3", "Ġ", "7", "Ġ", "10", "0"]
    assert len(tokenizer) < 600
    numbers = {token for token in tokenizer.get_vocab() if any(c in "0123456789" for c in token)}
    assert numbers == {str(number) for number in range(100)}


def test_letters_are_one_token_with_and_without_a_space(tokenizer: Any) -> None:
    for letter in "ABCD":
        assert len(encode(tokenizer, letter)) == len(encode(tokenizer, f" {letter}")) == 1


def test_every_way_of_loading_gives_the_same_ids(folder: Path, tokenizer: Any) -> None:
    auto = AutoTokenizer.from_pretrained(folder)
    for text in ("Question: Ann has 12 pens.\nAnswer:", STRANGE, f"{START}user\nhi{END}"):
        assert tuple(auto.encode(text, add_special_tokens=False)) == encode(tokenizer, text)
    assert auto.mask_token_id == tokenizer.mask_token_id
    assert auto.eos_token_id == tokenizer.eos_token_id
    assert auto.chat_template == tokenizer.chat_template


def test_the_same_texts_make_the_same_files(lines: list[Any], folder: Path, tmp_path: Path) -> None:
    build_tokenizer(training_texts(lines)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.mask_token, tokenizer.pad_token) == (END, MASK, PAD)
    assert tokenizer.unk_token is None
    for token in (END, MASK, PAD, START):
        assert encode(tokenizer, token) == (tokenizer.convert_tokens_to_ids(token),)


def test_the_chat_template_marks_roles(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    opened = "<|im_start|>system\nS<|im_end|><|im_start|>user\nU<|im_end|><|im_start|>assistant\n"

    def render(messages: list[dict[str, str]], **options: bool) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    assert render(chat, add_generation_prompt=True) == opened
    begun = [*chat, {"role": "assistant", "content": "It is"}]
    assert render(begun, continue_final_message=True) == opened + "It is"
    assert render(begun) == opened + "It is<|im_end|>"
    roles = [t for t in tokenizer.tokenize(opened) if t not in ("S", "U", "Ċ")]
    assert roles == [START, "system", END, START, "user", END, START, "assistant"]
    with pytest.raises(InputError, match="from system, user or assistant, not tool"):
        encode_chat(tokenizer, [{"role": "tool", "content": "x"}])


def test_training_reads_a_chat_as_scoring_does(lines: list[Any], tokenizer: Any) -> None:
    """lm-eval scores the letter directly after the rendered chat, tokenized as one text."""
    choices = [line for line in lines if line.task == "mmlu"]
    for line, example in zip(choices, encode_examples(choices, tokenizer), strict=True):
        context = tokenizer.apply_chat_template(line.messages, add_generation_prompt=True, tokenize=False)
        assert (*encode(tokenizer, context + line.answer), tokenizer.eos_token_id) == example.tokens
        assert example.prompt == len(encode(tokenizer, context)) == len(example.tokens) - 2
        assert example.is_choice


def test_a_drill_asks_for_its_results(lines: list[Any], tokenizer: Any) -> None:
    line = next(line for line in lines if line.task == "drill")
    assert asked_of(line, tokenizer) == "".join(part.split("=")[1] for part in line.answer.split(", "))
    letters = replace(line, answer="Chad:\nB, 3+4:\nA, tin:\nD")
    assert asked_of(letters, tokenizer) == "BAD"


def asked_of(line: Line, tokenizer: Any) -> str:
    (example,) = encode_examples([line], tokenizer)
    assert example.asked is not None
    return decode(tokenizer, [example.tokens[position] for position in sorted(example.asked)])
