"""The model that ships with the project: found by its name, small, loadable by others."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from qwen2_folders import tiny_folder
from transformers import AutoTokenizer, Qwen2ForCausalLM

from sampler import DecodeSettings, InputError, LoadedModel, Pair, Prompt, ReusePolicy, decode_prompts, load_model
from sampler.loading import BUNDLED_FOLDER, find_model
from sampler.policy import ReusePolicy as Policy
from sampler.scoring import score_pairs
from sampler.text import encode, encode_chat

BOX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def test_the_name_is_the_bundled_model_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    bundled, folder = find_model("tiny"), find_model("./tiny")
    assert (bundled.source, bundled.folder) == ("tiny", BUNDLED_FOLDER)
    weights = (BUNDLED_FOLDER / "model.safetensors").read_bytes()
    assert bundled.revision == hashlib.sha256(weights).hexdigest()[:12]
    assert (folder.source, folder.revision, folder.folder) == ("./tiny", None, tmp_path / "tiny")


def test_weights_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.loading.BUNDLED_FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"the bundled model 'tiny' is missing .* make train-tiny"):
        find_model("tiny")


def test_it_is_small_and_has_three_subsets_of_twelve_layers(tiny: LoadedModel) -> None:
    files = [path for path in BUNDLED_FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 8 << 20
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]
    assert tiny.config.num_layers == 36
    assert tiny.config.vocab_size <= 1280


def test_transformers_loads_it_without_custom_code(tiny: LoadedModel) -> None:
    """As one block, because its attention is causal otherwise: the last position sees everything in both."""
    auto = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    text = "Question: Ann has 3 pens."
    ids = auto.encode(text, add_special_tokens=False)
    assert tuple(ids) == encode(tiny.tokenizer, text)
    theirs = Qwen2ForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32).eval()
    assert theirs.config.num_hidden_layers == 36


def ask(model: LoadedModel, question: str, policy: str = "k1") -> str:
    prompt = Prompt(ids=encode_chat(model.tokenizer, [{"role": "user", "content": question + BOX}]))
    settings = DecodeSettings(threshold=0.95, small_block=8, max_new_tokens=160)
    ((_, generated),) = decode_prompts(model, [prompt], policy=ReusePolicy.parse(policy), settings=settings)
    assert generated.finish == "stop"
    return generated.text or ""


def test_answers_end_by_themselves_in_a_box(tiny: LoadedModel) -> None:
    text = ask(tiny, "Question: Eva has 6 pens. She gets 9 more. She loses 5. How many pens does Eva have now?")
    assert len(re.findall(r"\\boxed\{[0-9]+\}", text)) == 1, text


def test_choices_under_k1_are_one_pass_and_k3_scores_otherwise(tiny: LoadedModel) -> None:
    about = "The following are multiple choice questions (with answers) about high school geography.\n\n"
    options = "A. both\nB. only the first\nC. only the second\nD. neither"
    chats = [
        [
            {"role": "system", "content": about},
            {"role": "user", "content": f"Which of {names} are in Asia?\n{options}\nAnswer:"},
        ]
        for names in ("Iran and Nepal", "Cuba and Iran", "Peru and Italy")
    ]
    pairs = [
        Pair(prefix=encode_chat(tiny.tokenizer, chat), target=encode(tiny.tokenizer, letter))
        for chat in chats
        for letter in "ABCD"
    ]
    scored = {
        name: [result for _, result in sorted(score_pairs(tiny, pairs, policy=Policy.parse(name)))]
        for name in ("k1", "k3_last")
    }
    assert sum(result.counters.full for result in scored["k1"]) <= 3
    assert [r.score for r in scored["k1"]] != [r.score for r in scored["k3_last"]]
