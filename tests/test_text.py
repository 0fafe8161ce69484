"""Between text and ids: tokenizer, chat template, pairs, stop strings; and stop strings while a model decodes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_folders import EOS, MERGES, OTHER, qwen2, tensors, tiny_folder, write_model, write_tokenizer
from torch import Tensor

from sampler.decode import decode_prompts
from sampler.errors import InputError
from sampler.loading import LoadedModel, load_model
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings, Generated, Prompt
from sampler.text import (
    StopStrings,
    check_stop,
    cut,
    decode,
    encode,
    encode_chat,
    encode_pair,
    load_tokenizer,
    token_ends,
)

torch.set_num_threads(1)

UNWRITTEN = 270  # an id of the model that the tokenizer has no text for


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), model_max_length=20))


@pytest.mark.parametrize("text", ["", "plain", " two  spaces ", "é😀漢字", "line\n\n\tline", "abcSTOPx", "don't , ."])
def test_text_round_trips(tokenizer: Any, text: str) -> None:
    assert decode(tokenizer, encode(tokenizer, text)) == text


def test_token_ends_divide_a_text_among_its_tokens(tokenizer: Any) -> None:
    text = "é😀 ab\n漢"
    ids = encode(tokenizer, text)
    ends = token_ends(tokenizer, ids, text)
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(text)
    for number, end in enumerate(ends, 1):
        assert text[:end] == decode(tokenizer, ids[:number]).rstrip("\ufffd")
    assert token_ends(tokenizer, ids, text[:3]) == tuple(min(end, 3) for end in ends)
    assert token_ends(tokenizer, (*ids, EOS, UNWRITTEN), text)[-3:] == (len(text),) * 3


def test_the_pre_tokenizer_of_the_file_is_used(tmp_path: Path) -> None:
    """Qwen2's way of splitting keeps digits apart; this file's does not."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, merges=[("1", "2")]))
    assert encode(tokenizer, "12") == (256,)


def test_special_tokens_are_read_in_a_prompt_and_left_out_of_an_answer(tokenizer: Any) -> None:
    assert encode(tokenizer, "ab<eos>") == (256, EOS)
    assert decode(tokenizer, (256, EOS, OTHER, UNWRITTEN)) == "ab"


def test_long_texts_cause_no_warning(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(encode(tokenizer, "y" * 100)) == 100
    assert capfd.readouterr() == ("", "")


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert encode(load_tokenizer(tmp_path), "aba") == (2, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "garbage"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "garbage"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "Nothing"}}'),
    ],
)
def test_broken_tokenizer(tmp_path: Path, name: str, text: str) -> None:
    (write_tokenizer(tmp_path) / name).write_text(text)
    with pytest.raises(InputError, match=r"cannot be loaded \(\w+: .+\)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("files", [(), ("tokenizer_config.json",), ("merges.txt",)])
def test_no_tokenizer(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=r"has no tokenizer \(tokenizer.json or vocab.json\)"):
        load_tokenizer(tmp_path)


# Chat template


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be é."}, {"role": "user", "content": "ab?"}]
    assert decode(tokenizer, encode_chat(tokenizer, messages)) == "system:Be é.\nuser:ab?\nA:"


def test_chat_template_that_rejects_messages(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"chat template rejects these messages \(no tools\)"):
        encode_chat(tokenizer, [{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[9].content.x }}", "{{ 1 + 'a' }}"])
def test_chat_template_that_is_broken(tmp_path: Path, template: str) -> None:
    with pytest.raises(InputError, match="chat template rejects these messages"):
        encode_chat(load_tokenizer(write_tokenizer(tmp_path, chat_template=template)), [{"role": "u", "content": "x"}])


def test_no_chat_template(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template; give a prompt"):
        encode_chat(load_tokenizer(write_tokenizer(tmp_path, chat_template=None)), [{"role": "u", "content": "x"}])


# Pairs


@pytest.mark.parametrize(
    ("prefix", "target"),
    [
        ("Answer:", " A"),
        ("Answer: ", "A"),
        ("Answer:\n\n", "(B)"),
        ("é", "漢字"),
        ("x y", " z"),
        ("ab", "c"),
        ("xST", "OP"),
    ],
)
def test_pair_is_the_whole_text_and_its_prefix_reveals_nothing(tokenizer: Any, prefix: str, target: str) -> None:
    before, after = encode_pair(tokenizer, prefix, target)
    assert decode(tokenizer, before) == prefix.rstrip()
    assert decode(tokenizer, before + after) == prefix + target
    assert after


def test_pair_is_tokenised_as_one_text(tokenizer: Any) -> None:
    before, after = encode_pair(tokenizer, "say ", "abc")
    assert before + after == encode(tokenizer, "say abc")


# Stop strings


def test_cut() -> None:
    assert cut("a STOP b END", ("END", "STOP")) == "a "
    assert cut("a END b", ("STOP",)) == "a END b"
    assert cut("STOP", ("STOP",)) == ""
    assert cut("aaa", ("aa", "aaa")) == ""
    assert cut("text", ()) == "text"


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_invalid_stop_strings(stop: str) -> None:
    with pytest.raises(InputError, match="stop string"):
        check_stop(["fine", stop])


def end_of(tokenizer: Any, text: str, *stop: str, step: int = 1) -> int | None:
    """Where a stop string ends, for an answer that grows by `step` tokens."""
    ids, stops = encode(tokenizer, text), StopStrings(tokenizer, stop)
    for length in range(step, len(ids) + step, step):
        end = stops.end(ids[:length])
        if end is not None:
            return end
    return None


@pytest.mark.parametrize("step", [1, 3, 100])
def test_stop_string_ends_where_its_last_token_does(tokenizer: Any, step: int) -> None:
    assert end_of(tokenizer, "yes END no", "END", step=step) == 7  # spans three tokens
    assert end_of(tokenizer, "yes STOP no", "TO", step=step) == 5  # lies inside one
    assert end_of(tokenizer, "yes no", "END", step=step) is None
    assert end_of(tokenizer, "one\n\ntwo", "two", "\n\n", "e", step=step) == 3
    assert end_of(tokenizer, "né! 😀 漢", "😀", "!x", step=step) == 9  # a character of four tokens
    assert end_of(tokenizer, "né! 😀 漢", "é", step=step) == 3


def test_an_incomplete_character_does_not_match(tokenizer: Any) -> None:
    ids, stops = encode(tokenizer, "😀"), StopStrings(tokenizer, ("😀",))
    assert [stops.end(ids[:n]) for n in (1, 2, 3, 4)] == [None, None, None, 4]


def test_tokens_without_a_text_do_not_hide_a_stop_string(tokenizer: Any) -> None:
    e, n, d = encode(tokenizer, "END")
    ids = (e, n, *(OTHER, UNWRITTEN) * 50, d)
    stops = StopStrings(tokenizer, ("END",))
    assert [stops.end(ids[:n]) for n in range(1, len(ids) + 1)] == [None] * 102 + [103]


def test_searching_the_tail_equals_searching_the_whole_text(tokenizer: Any) -> None:
    numbers = random.Random(0)
    pieces = ["a", "b", "c", "abc", "STOP", "x", "é", "😀", "漢", " ", "\n"]
    for _ in range(60):
        ids = encode(tokenizer, "".join(numbers.choices(pieces, k=60)))
        stop = ["".join(numbers.choices(pieces, k=numbers.randint(2, 4))) for _ in range(2)]
        whole = (n for n in range(len(ids) + 1) if any(string in decode(tokenizer, ids[:n]) for string in stop))
        stops, length, end = StopStrings(tokenizer, stop), 0, None
        while end is None and length < len(ids):
            length = min(len(ids), length + numbers.randint(0, 9))
            end = stops.end(ids[:length])
        assert end == next(whole, None)


# Stop strings while decoding


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("model"))), device="cpu")


def answer(model: LoadedModel, *stop: str, length: int = 60, batch_size: int = 1) -> Generated:
    prompts = [Prompt(ids=tuple(range(70, 110)), stop=stop), Prompt(ids=(5, 6, 7))][:batch_size]
    settings = DecodeSettings(max_new_tokens=length, threshold=0.02)  # several tokens a step
    results = decode_prompts(model, prompts, policy=ReusePolicy.parse("k1"), settings=settings, batch_size=batch_size)
    return dict(results)[0]


def test_answer_ends_at_a_stop_string(model: LoadedModel) -> None:
    free = answer(model)
    assert free.text is not None
    assert len(set(free.text)) > 10
    for begin in (0, 3, 20):
        stop = free.text[begin : begin + 3]
        stopped = answer(model, stop, "never written")
        assert stopped.finish == "stop"
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.ids == free.ids[: len(stopped.ids)]
        assert stop in decode(model.tokenizer, stopped.ids)
        assert stop not in decode(model.tokenizer, stopped.ids[:-1])


def test_earliest_of_several_stop_strings_counts(model: LoadedModel) -> None:
    text = answer(model).text or ""
    assert answer(model, text[30:33], text[8:12]).text == cut(text, (text[30:33], text[8:12]))


def test_a_stop_string_that_never_occurs_changes_nothing(model: LoadedModel) -> None:
    free, watched = answer(model), answer(model, "never written")
    assert (free.ids, free.text, free.finish) == (watched.ids, watched.text, watched.finish)


def test_stop_string_belongs_to_its_document(model: LoadedModel) -> None:
    stop = (answer(model).text or "")[5:8]
    alone, batched = answer(model, stop), answer(model, stop, batch_size=2)
    assert (alone.ids, alone.text) == (batched.ids, batched.text)


def saying(folder: Path, token: int) -> LoadedModel:
    """A model that always predicts one token."""
    weights: dict[str, Tensor] = tensors(qwen2())
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            tensor.zero_()
    weights["model.embed_tokens.weight"][:] = 1
    weights["model.norm.weight"][:] = 1
    weights["lm_head.weight"][token] = 1
    return load_model(str(write_tokenizer(write_model(folder, weights))), device="cpu")


def test_stop_string_inside_a_token(tmp_path: Path) -> None:
    stop = len(MERGES) - 2 + 256
    assert answer(saying(tmp_path, stop), "TO").ids == (stop,)
    assert answer(saying(tmp_path, stop), "TO").text == "S"
    assert answer(saying(tmp_path, stop), "PS").text == "STO"


def test_stop_token_and_text(tmp_path: Path) -> None:
    answered = answer(saying(tmp_path, EOS), "x")
    assert (answered.ids, answered.text, answered.finish) == ((EOS,), "", "stop")
