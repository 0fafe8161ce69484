"""The commands generate and score: JSON lines in and out, and one sentence for whatever is wrong."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_folders import MASK, qwen2, tensors, tiny_folder, write_model

from orchestrator.cli import sampling
from orchestrator.cli.__main__ import dispatch
from orchestrator.cli.console import run_command
from orchestrator.core.system import usable_cores
from sampler import loading
from sampler.errors import InputError

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
GOLDEN = str(ROOT / "tests" / "golden" / "m28")
GENERATED = {"id", "ids", "finish", "passes", "layers", "seconds"}
SCORED = {"id", "score", "greedy", "passes", "layers"}
PASSES, LAYERS = {"prefill", "full", "small", "commit"}, {"computed", "reused", "positions"}
LINE = '{"id": 1, "ids": [1, 2, 3]}'
PAIR = '{"id": 1, "prefix": [1, 2, 3], "target": [4]}'
HANG_SECONDS = 900  # a command that runs longer counts as hanging; usually it takes seconds


class Outcome:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[dict[str, Any]]:
        assert self.code == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


class Pipe(io.TextIOWrapper):
    def __init__(self, content: bytes = b"") -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


def as_input(lines: object) -> bytes:
    if isinstance(lines, bytes | str):
        return lines if isinstance(lines, bytes) else lines.encode()
    assert isinstance(lines, Sequence)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: its flags, its input, its outcome."""

    def run(command: str, lines: object, *flags: str, model: str = GOLDEN) -> Outcome:
        out = Pipe()
        monkeypatch.setattr(sys, "stdin", Pipe(as_input(lines)))
        monkeypatch.setattr(sys, "stdout", out)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: dispatch([command, "--model", model, "--device", "cpu", *flags]))
        return Outcome(int(ended.value.code or 0), out.buffer.getvalue().decode(), capfd.readouterr().err)  # type: ignore[attr-defined]

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a tokenizer."""
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


def tokens(results: list[dict[str, Any]]) -> dict[Any, Any]:
    return {result["id"]: result["ids"] for result in results}


# What comes out

PROMPTS = [{"id": f"p{n}", "ids": [(7 * n + i) % 150 for i in range(n)]} for n in (1, 100, 3, 32, 31, 64, 2, 40)]
PAIRS = [
    {"id": n, "prefix": [(7 * n + i) % 150 for i in range(n)], "target": [5, 9, 11][: n % 3 + 1]}
    for n in (1, 70, 3, 32, 31, 64, 2)
]


@pytest.mark.parametrize("policy", ["k1", "k2_middle"])
def test_generate_keeps_the_order_and_the_contract(run: Run, policy: str) -> None:
    flags = ("--ids", "--policy", policy, "--max-new-tokens", "20")
    alone, together = (run("generate", PROMPTS, *flags, "--batch-size", n).lines for n in ("1", "5"))
    assert [result["id"] for result in together] == [prompt["id"] for prompt in PROMPTS]
    assert tokens(alone) == tokens(together)
    for result in together:
        assert set(result) >= GENERATED
        assert "text" not in result
        assert set(result["passes"]) == PASSES
        assert set(result["layers"]) == LAYERS
        assert result["finish"] == "stop" or (result["finish"] == "length" and len(result["ids"]) == 20)
        assert result["seconds"] > 0
    assert any(result["layers"]["reused"] for result in together) == (policy != "k1")


def test_score_keeps_the_order_and_the_contract(run: Run) -> None:
    alone, together = (run("score", PAIRS, "--ids", "--batch-size", n).lines for n in ("1", "5"))
    assert [result["id"] for result in together] == [pair["id"] for pair in PAIRS]
    for one, other in zip(alone, together, strict=True):
        assert set(other) >= SCORED
        assert set(other["passes"]) == PASSES
        assert set(other["layers"]) == LAYERS
        assert isinstance(other["greedy"], bool)
        assert other["score"] == pytest.approx(one["score"], abs=1e-4)
        assert other["score"] < 0


def test_score_by_the_reference_reads_one_token(run: Run) -> None:
    chain, reference = (run("score", PAIRS, "--ids", "--scoring", name).lines for name in ("chain", "reference"))
    differ = [pair["id"] for pair, a, b in zip(PAIRS, chain, reference, strict=True) if a["score"] != b["score"]]
    assert differ == [pair["id"] for pair in PAIRS if len(pair["target"]) > 1]  # type: ignore[arg-type]


def test_prompt_and_messages(run: Run, tiny: str) -> None:
    lines = [
        {"id": 1, "prompt": "user:hé 😀\nA:"},
        {"id": {"any": "thing"}, "messages": [{"role": "user", "content": "hé 😀"}]},
    ]
    plain, chat = run("generate", lines, "--max-new-tokens", "12", "--batch-size", "2", model=tiny).lines
    assert plain["ids"] == chat["ids"]
    assert plain["text"] == chat["text"]
    assert isinstance(plain["text"], str)
    assert chat["id"] == {"any": "thing"}


def test_texts_are_scored_as_their_ids(run: Run, tiny: str) -> None:
    texts = run("score", [{"id": "é", "prefix": "ab ", "target": "c"}], model=tiny).lines
    ids = run("score", [{"id": "é", "prefix": [256], "target": [220, 66]}], "--ids", model=tiny).lines
    assert texts[0]["id"] == "é"
    assert texts[0]["score"] == ids[0]["score"]


def test_a_trace_has_the_step_and_confidence_of_each_token(run: Run, tiny: str) -> None:
    line, flags = [{"id": 1, "prompt": "hé 😀"}], ("--max-new-tokens", "40", "--threshold", "0.01")
    [plain], [traced] = (run("generate", line, *flags, *more, model=tiny).lines for more in ((), ("--trace",)))
    trace = traced.pop("trace")
    assert {**traced, "seconds": 0} == {**plain, "seconds": 0}
    assert [token["token"] for token in trace] == traced["ids"]
    assert "".join(token["text"] for token in trace) == traced["text"]
    places = [(token["block"], token["small_block"]) for token in trace]
    assert places == sorted(places)
    assert {(0, 3), (1, 0)} <= set(places)
    assert {token["step"] for token in trace} >= {-1, 0, 1}
    assert all(0 < token["confidence"] <= 1 for token in trace)
    [bare] = run("generate", LINE, "--ids", "--max-new-tokens", "3", "--trace").lines
    assert all(set(token) == {"token", "block", "small_block", "step", "confidence"} for token in bare["trace"])


def test_stop_strings(run: Run, tiny: str) -> None:
    line = [{"id": 1, "prompt": "hello"}]
    [free] = run("generate", line, "--max-new-tokens", "20", model=tiny).lines
    stop = free["text"][4:6]
    [cut] = run("generate", line, "--max-new-tokens", "20", "--stop", "never", "--stop", stop, model=tiny).lines
    assert (cut["text"], cut["finish"]) == (free["text"][: free["text"].index(stop)], "stop")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_ids_need_no_tokenizer(run: Run, tmp_path: Path, name: str) -> None:
    (write_model(tmp_path, tensors(qwen2())) / name).write_text("garbage")
    assert run("generate", LINE, "--ids", "--max-new-tokens", "3", model=str(tmp_path)).lines
    assert run("score", PAIR, "--ids", model=str(tmp_path)).lines


@pytest.mark.parametrize("lines", ["", "\n", "  \n\r\n"])
@pytest.mark.parametrize("command", ["generate", "score"])
def test_nothing_in_nothing_out(run: Run, command: str, lines: str) -> None:
    for flags in ((), ("--ids",)):
        outcome = run(command, lines, *flags)
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_byte_order_mark_blank_lines_and_a_missing_last_newline(run: Run) -> None:
    text = b"\xef\xbb\xbf" + LINE.encode() + b"\r\n\n" + LINE.encode()
    assert len(run("generate", text, "--ids", "--max-new-tokens", "2").lines) == 2


def test_output_is_utf8_whatever_the_terminal(run: Run) -> None:
    outcome = run("generate", [{"id": "é😀", "ids": [1]}], "--ids", "--max-new-tokens", "1")
    assert '"é😀"' in outcome.out


COMMON = (
    "--model --family --block-size --threads --compile --policies --subset-size --batch-size --dtype --device --ids"
)
BLOCKS = "--threshold --small-block --block-cache --no-block-cache --max-new-tokens --stop"
DRAWING = "--temperature --top-p --seed --trace --reveal"


@pytest.mark.parametrize(
    ("command", "flags"),
    [("generate", f"{COMMON} --ids --help {BLOCKS} {DRAWING}"), ("score", f"{COMMON} --ids --help --scoring")],
)
def test_help_names_every_flag(run: Run, command: str, flags: str) -> None:
    shown = run(command, "", "--help")
    assert (shown.code, shown.err) == (0, "")
    assert set(re.findall(r"--[a-z-]+", shown.out.partition("examples:")[0])) == set(flags.split())


def test_seed_decides_whatever_the_batch_and_the_order(run: Run) -> None:
    flags = ("--ids", "--temperature", "1", "--top-p", "0.9", "--max-new-tokens", "12", "--seed")
    first = tokens(run("generate", PROMPTS, *flags, "3").lines)
    assert tokens(run("generate", PROMPTS[::-1], *flags, "3", "--batch-size", "3").lines) == first
    assert tokens(run("generate", PROMPTS, *flags, "4").lines) != first


@pytest.mark.parametrize("seed", ["-1", "0", "99999999999999999999999999"])
def test_any_whole_number_is_a_seed(run: Run, seed: str) -> None:
    assert run("generate", LINE, "--ids", "--temperature", "1", "--max-new-tokens", "3", "--seed", seed).lines


# What is refused


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights would be too late."""
    monkeypatch.setattr(loading, "build_transformer", lambda *_, **__: pytest.fail("weights were read"))


def refused(outcome: Outcome, *parts: str) -> None:
    """One sentence on stderr that holds all of `parts`, exit code 2, nothing on stdout."""
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    assert all(part in outcome.err for part in parts), outcome.err


BAD_FLAGS = {
    ("--policy", "k9x"): ("'k9x'", "k2_middle"),
    ("--policy", ""): ("--policy must not be empty",),
    ("--policy", "k2"): ("k2", "k2_middle"),
    ("--policy", "k0_middle"): ("k0", "at least 1"),
    ("--policy", "k-1_middle"): ("'k-1_middle'", "k2_middle"),
    ("--policy", "k2_centre"): ("'centre'", "first, middle, last, all"),
    ("--policy", "k2_middle.fast"): (".fast", ".output and .small"),
    ("--policy", "k2_20-30"): ("layer 30", "0 to 27"),
    ("--policy", "k2_28"): ("layer 28", "0 to 27"),
    ("--policy", "k2_first", "--subset-size", "28"): ("got 28", "between 1 and 27"),
    ("--policy", "k2_first", "--subset-size", "0"): ("--subset-size", "at least 1 (got 0)"),
    ("--subset-size", "x"): ("--subset-size", "(got x)"),
    ("--batch-size", "0"): ("--batch-size", "(got 0)"),
    ("--batch-size", "-3"): ("--batch-size", "(got -3)"),
    ("--batch-size", "1.5"): ("--batch-size", "(got 1.5)"),
    ("--dtype", "float17"): ("(got float17)", "bfloat16"),
    ("--dtype", "float16"): ("float16", "float32 or bfloat16"),
    ("--device", "tpu"): ("'tpu'", "cuda:N"),
    ("--device", "cuda:77"): ("'cuda:77'", "CUDA devices"),
    ("--no-such-flag",): ("--no-such-flag", "--help"),
    ("--batch",): ("--batch",),
    ("--policy",): ("--policy", "expected one argument"),
    ("stray",): ("stray",),
}
BAD_DECODING = {
    ("--threshold", "0"): ("--threshold", "above 0 and at most 1 (got 0)"),
    ("--threshold", "1.01"): ("--threshold", "above 0 and at most 1 (got 1.01)"),
    ("--threshold", "nan"): ("--threshold", "(got nan)"),
    ("--threshold=-inf",): ("--threshold", "(got -inf)"),
    ("--threshold", "high"): ("--threshold", "(got high)"),
    ("--small-block", "5"): ("--small-block must divide", "(got 5", "block size of 32"),
    ("--small-block", "0"): ("--small-block", "at least 1 (got 0)"),
    ("--small-block", "64"): ("--small-block must divide", "(got 64", "block size of 32"),
    ("--max-new-tokens", "0"): ("--max-new-tokens", "at least 1 (got 0)"),
    ("--max-new-tokens", "-1"): ("--max-new-tokens", "at least 1 (got -1)"),
    ("--max-new-tokens", "1" + "0" * 30): ("line 1: 1" + "0" * 29 + "3", "4096 positions"),
    ("--max-new-tokens", "9" * 5000): ("--max-new-tokens",),
    ("--temperature", "-1"): ("--temperature", "(got -1)"),
    ("--temperature", "nan"): ("--temperature", "(got nan)"),
    ("--temperature", "inf"): ("--temperature", "(got inf)"),
    ("--top-p", "0"): ("--top-p", "above 0 and at most 1 (got 0)"),
    ("--top-p", "nan"): ("--top-p", "(got nan)"),
    ("--seed", "1.5"): ("--seed", "(got 1.5)"),
    ("--seed", ""): ("--seed", "''"),
    ("--stop", ""): ("stop string", "empty"),
    ("--stop", "\udcff"): ("stop string", "UTF-8"),
    ("--stop", "x"): ("no tokenizer",),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("flags", BAD_FLAGS, ids=" ".join)
@pytest.mark.parametrize("command", ["generate", "score"])
def test_bad_flag(run: Run, command: str, flags: tuple[str, ...]) -> None:
    refused(run(command, LINE if command == "generate" else PAIR, "--ids", *flags), *BAD_FLAGS[flags])


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("flags", BAD_DECODING, ids=lambda flags: ascii(" ".join(flags))[:30])
def test_bad_flag_of_decoding(run: Run, flags: tuple[str, ...]) -> None:
    refused(run("generate", LINE, "--ids", *flags), *BAD_DECODING[flags])


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("flags", [("--small-block", "5"), ("--stop", "x"), ("--policy", "k2_28")], ids=" ".join)
def test_bad_flag_without_a_line(run: Run, flags: tuple[str, ...]) -> None:
    refused(run("generate", "", "--ids", *flags))


@pytest.mark.usefixtures("no_weights")
def test_bad_scoring(run: Run) -> None:
    refused(run("score", PAIR, "--ids", "--scoring", "guess"), "(got guess)", "chain", "reference")


BAD_LINES = {
    "{": ("not valid JSON", "column 2"),
    '{"id": 1, "ids": [1, 2}': ("not valid JSON", "column"),
    "[1, 2]": ("[1, 2]", "must be a JSON object"),
    "null": ("null", "must be a JSON object"),
    '"text"': ('"text"', "must be a JSON object"),
    "{}": ('"id" is missing',),
    '{"ids": [1]}': ('"id" is missing',),
    '{"id": 1, "id": 2, "ids": [1]}': ('"id"', "twice"),
    '{"id": {"a": 1, "a": 2}, "ids": [1]}': ('"a"', "twice"),
    '{"id": NaN, "ids": [1]}': ("not valid JSON",),
    '{"id": 1e999, "ids": [1]}': ("not valid JSON",),
    '{"id": "\\ud800", "ids": [1]}': ("not valid JSON", "surrogates"),
    '{"id": ' + "9" * 5000 + ', "ids": [1]}': ("not valid JSON",),
    '{"id": ' + "[" * 100_000: ("not valid JSON",),
    '{"id": 1}': ('"ids" is missing',),
    '{"id": 1, "prompt": "x"}': ('"ids" is missing', '"prompt"'),
    '{"id": 1, "ids": null}': ('"ids" must', "list of token ids"),
    '{"id": 1, "ids": "1 2"}': ('(got "1 2")', "list of token ids"),
    '{"id": 1, "ids": 5}': ("(got 5)", "list of token ids"),
    '{"id": 1, "ids": [1, 2.0]}': ("(got 2.0)", "whole numbers"),
    '{"id": 1, "ids": [1, true]}': ("(got true)", "whole numbers"),
    '{"id": 1, "ids": [1, [2]]}': ("(got [2])", "whole numbers"),
    '{"id": 1, "ids": ["1"]}': ('(got "1")', "whole numbers"),
    '{"id": 1, "ids": []}': ("prompt is empty", "at least one token"),
    '{"id": 1, "ids": [1, -1]}': ("token id -1", "0 to 159"),
    '{"id": 1, "ids": [160]}': ("token id 160", "0 to 159"),
    '{"id": 1, "ids": [99999999999999999999999]}': ("token id 99999999999999999999999", "0 to 159"),
    '{"id": 1, "ids": [1, 159]}': ("mask token id 159",),
    '{"id": 1, "ids": [' + "1, " * 4000 + "1]}": ("4257 tokens", "4096 positions"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_bad_line_is_named_by_its_number(run: Run, line: str) -> None:
    refused(run("generate", f"{LINE}\n\n{line}\n{LINE}\n", "--ids"), "line 3: ", *BAD_LINES[line])


BAD_PAIRS = {
    '{"id": 1, "prefix": [1]}': ('"target" is missing', '"prefix"'),
    '{"id": 1, "target": [1]}': ('"prefix" is missing',),
    '{"id": 1, "prefix": [], "target": [1]}': ("prefix is empty",),
    '{"id": 1, "prefix": [1], "target": []}': ("target is empty",),
    '{"id": 1, "prefix": [1], "target": [159]}': ("target", "mask token id 159"),
    '{"id": 1, "prefix": [159], "target": [1]}': ("prefix", "mask token id 159"),
    '{"id": 1, "prefix": [1], "target": [160]}': ("token id 160", "target", "0 to 159"),
    '{"id": 1, "prefix": "a", "target": "b"}': ('"prefix" must', '(got "a")', "list of token ids"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("line", BAD_PAIRS)
def test_bad_pair_is_named_by_its_number(run: Run, line: str) -> None:
    refused(run("score", f"{PAIR}\n{line}", "--ids"), "line 2: ", *BAD_PAIRS[line])


BAD_TEXTS = {
    '{"id": 1, "prompt": ""}': ("prompt is empty",),
    '{"id": 1, "prompt": ["a"]}': ('"prompt" must', '(got ["a"])', "text"),
    '{"id": 1, "ids": [1]}': ('"prompt" is missing', '"ids"'),
    '{"id": 1, "prompt": "a<mask>b"}': (f"mask token id {MASK}",),
    '{"id": 1, "prompt": "\\udfff"}': ("not valid JSON", "surrogates"),
    '{"id": 1, "prompt": "a", "messages": []}': ('"prompt" or "messages"',),
    '{"id": 1, "messages": []}': ("(got [])", '"role"'),
    '{"id": 1, "messages": "hi"}': ('(got "hi")', '"role"'),
    '{"id": 1, "messages": ["hi"]}': ('(got "hi")', '"role"'),
    '{"id": 1, "messages": [{"role": "user"}]}': ('{"role": "user"}', '"content"'),
    '{"id": 1, "messages": [{"role": "user", "content": null}]}': ('{"role": "user", "content": null}', '"content"'),
    '{"id": 1, "messages": [{"role": "tool", "content": ""}]}': ("chat template", "no tools"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("line", BAD_TEXTS)
def test_bad_text_is_named_by_its_number(run: Run, tiny: str, line: str) -> None:
    refused(run("generate", f'{{"id": 0, "prompt": "a"}}\n{line}', model=tiny), "line 2: ", *BAD_TEXTS[line])


@pytest.mark.usefixtures("no_weights")
def test_bytes_that_are_no_utf8(run: Run) -> None:
    refused(run("generate", LINE.encode() + b'\n{"id": "\xff"}', "--ids"), "line 2: ", "UTF-8", "0xff")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["generate", "score"])
def test_text_without_a_tokenizer(run: Run, command: str) -> None:
    refused(run(command, '{"id": 1, "prompt": "a", "prefix": "a", "target": "b"}'), "m28 has no tokenizer")


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def misread(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": ')


@pytest.mark.parametrize(
    ("damage", "part"), [(emptied, "no weights"), (truncated, "truncated"), (misread, "not valid JSON")]
)
@pytest.mark.parametrize("command", ["generate", "score"])
def test_damaged_model(run: Run, tmp_path: Path, command: str, damage: Callable[[Path], None], part: str) -> None:
    folder = tmp_path / "two\nlines"
    damage(write_model(folder, tensors(qwen2())))
    refused(run(command, LINE if command == "generate" else PAIR, "--ids", model=str(folder)), part, "two lines")


@pytest.mark.parametrize("offline", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: str) -> None:
    """Nobody listens at the address; the commit as a revision would make a plain download try for half a minute."""
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path)}
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    outcome = real("generate", "--model", f"owner/name@{'0' * 40}", "--ids", **hub)
    refused(outcome, "'owner/name@", "the Hub cannot be reached", "local directory")


# As real processes


def command_line(command: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", command, *flags]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | changes


def real(command: str, *flags: str, lines: str = LINE, **changes: str) -> Outcome:
    done = subprocess.run(
        command_line(command, *flags),
        input=lines.encode(),
        capture_output=True,
        cwd=ROOT,
        env=environment(**changes),
        timeout=HANG_SECONDS,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_real_commands_say_nothing_else(tiny: str) -> None:
    output = real("generate", "--model", tiny, "--max-new-tokens", "3", lines='{"id": "é", "prompt": "é"}')
    assert output.err == ""
    assert [line["id"] for line in output.lines] == ["é"]
    scored = real("score", "--model", GOLDEN, "--ids", lines=PAIR, PYTHONIOENCODING="ascii")
    assert scored.err == ""
    assert len(scored.lines) == 1


def test_real_help() -> None:
    shown = real("generate", "--help")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("usage: reuse-sweep generate ")


def start_generate(max_new_tokens: int) -> subprocess.Popen[bytes]:
    """Reads prompts from a pipe. It receives Ctrl-C even if a shell started the tests in the background."""
    return subprocess.Popen(
        command_line("generate", "--model", GOLDEN, "--ids", "--max-new-tokens", str(max_new_tokens)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_reader_that_closes_the_pipe_early_ends_the_command() -> None:
    lines = f"{LINE}\n" * 400
    with start_generate(1) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(lines.encode())
        process.stdin.close()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(HANG_SECONDS) == 141


def test_keyboard_interrupt_ends_without_a_traceback() -> None:
    lines = f"{LINE}\n" * 2000
    with start_generate(40) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(lines.encode())
        process.stdin.close()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdin = None
        _, err = process.communicate(timeout=HANG_SECONDS)
        assert (process.returncode, err) == (130, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--model", GOLDEN, "--ids", "--max-new-tokens", "1"],
        ["tasks"],
        ["sweep", "--help"],
        pytest.param(
            ["sweep", "--tasks", "gsm8k", "--model", "tiny", "--data", "bundled", "--dry-run"], marks=pytest.mark.slow
        ),
    ],
)
def test_lost_output_is_an_error(words: list[str]) -> None:
    """On a full disk, and with standard output closed."""
    command = shlex.join(command_line(*words))
    for redirection, reason in ((">/dev/full", "No space left"), (">&-", "is closed")):
        done = subprocess.run(
            f"{command} {redirection}",
            shell=True,
            input=LINE.encode(),
            stderr=-1,
            cwd=ROOT,
            env=environment(),
            check=False,
        )
        refused(Outcome(done.returncode, "", done.stderr.decode()), "standard output", reason)


# Threads and terminals


MODELS = {
    "generate": ["--model", GOLDEN, "--ids", "--max-new-tokens", "2"],
    "score": ["--model", GOLDEN, "--ids"],
    "tasks run": ["--model", "tiny", "--task", "gsm8k", "--limit", "1", "--max-new-tokens", "2"],
    "bench": ["--shape", "tiny", "--batch", "1", "--policies", "k2_middle", "--rounds", "1"],
}


@pytest.mark.parametrize("command", MODELS)
@pytest.mark.parametrize(("flags", "expected"), [((), 1), (("--threads", "2"), 2)], ids=["default", "given"])
def test_threads_are_those_of_a_worker_or_as_given(
    monkeypatch: pytest.MonkeyPatch, command: str, flags: tuple[str, ...], expected: int
) -> None:
    """Whatever OMP_NUM_THREADS and the number of cores are: too many threads are slow when the cores are busy."""
    chosen: list[int] = []
    torch.set_num_threads(3)
    monkeypatch.setattr(sampling, "usable_cores", lambda: 2)
    monkeypatch.setattr(sys, "stdin", Pipe((LINE if command == "generate" else PAIR).encode()))

    def note(*_: object, **__: object) -> None:
        chosen.append(torch.get_num_threads())
        raise InputError("seen")

    monkeypatch.setattr(loading, "build_transformer", note)
    try:
        with pytest.raises(InputError, match="seen"):
            dispatch([*command.split(), *MODELS[command], *flags])
    finally:
        torch.set_num_threads(1)
    assert chosen == [expected]


@pytest.mark.parametrize("words", [["generate"], ["score"], ["tasks", "run"], ["check"], ["bench"], ["bench", "sweep"]])
def test_no_more_threads_than_cores(words: list[str]) -> None:
    with pytest.raises(InputError, match=rf"--threads must be at most {usable_cores()}, the cores .* \(got 9999\)"):
        dispatch([*words, "--threads", "9999"])


def test_generate_at_a_terminal_says_that_it_reads_lines() -> None:
    """With standard input, output and error at one terminal."""
    master, slave = pty.openpty()
    command = command_line("generate", "--model", GOLDEN, "--ids", "--max-new-tokens", "1")
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment()) as process:
        os.close(slave)
        shown = b""
        while b"until Ctrl-D" not in shown:
            shown += os.read(master, 1024)
        os.write(master, f"{LINE}\n\x04".encode())
        while b'"finish"' not in shown:
            shown += os.read(master, 1024)
        assert process.wait(HANG_SECONDS) == 0
    os.close(master)
    assert shown.index(b"loading") < shown.index(b"reading JSON lines from standard input")
