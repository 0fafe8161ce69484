"""Compares a model with other implementations of it: a plain float32 forward, and the checkpoint's own modelling code.

The checkpoint's code runs in a child process with another interpreter, whose environment has the package versions that
the code needs and no secrets. It computes the logits of every step of a decoding, from the whole sequence with its
masks. These logits, and the tokens that they reveal, are compared with ours.
"""

import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from sampler.attention import rotary_frequencies
from sampler.config import EMBEDDING, ModelConfig
from sampler.decode import Step, decode_prompts
from sampler.engine import Engine, Pass, Prefill, Row
from sampler.errors import InputError
from sampler.loading import LoadedModel
from sampler.plan import CacheSpec, PassKind, compute_all
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings, Prompt
from sampler.reveal import Prediction, RevealRule
from sampler.text import encode

TEXTS = (
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many pencils does he have left?",
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n",
)
NEW_TOKENS = 40
TOP = 5  # logits that are compared at each position: the largest ones
TOLERANCE = 2e-4  # relative difference of logits, both in float32
CHILD_TIMEOUT_SECONDS = 3600.0
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
CHILD = """
import json, sys
import torch, transformers
with open(sys.argv[1]) as file:
    request = json.load(file)
model = transformers.AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True)
model = model.float().to(request["device"]).eval()
answers = []
with torch.inference_mode():
    for state in request["states"]:
        tokens = torch.tensor([state["tokens"]], device=request["device"])
        rows = model(input_ids=tokens).logits[0].float()[state["reads"]]
        top = rows.topk(request["top"])
        ours = rows.gather(1, torch.tensor(state["ids"], device=rows.device))
        answers.append(
            {
                "ids": top.indices.tolist(),
                "logits": top.values.tolist(),
                "total": rows.logsumexp(-1).tolist(),
                "ours": ours.tolist(),
            }
        )
found = {"answers": answers, "torch": torch.__version__, "transformers": transformers.__version__}
with open(sys.argv[2], "w") as file:
    json.dump({**found, "class": type(model).__name__}, file)
"""


def fixed_tokens(config: ModelConfig, number: int, count: int) -> tuple[int, ...]:
    """Tokens without special ones; they differ by `number`."""
    special = {config.mask_token_id, config.pad_token_id, *config.eos_token_ids}
    plain = [token for token in range(min(config.vocab_size, 4096)) if token not in special]
    generator = torch.Generator().manual_seed(number)
    return tuple(plain[i] for i in torch.randint(len(plain), (count,), generator=generator).tolist())


def reference_states(
    read: Callable[[str], Tensor], config: ModelConfig, tokens: Sequence[int], device: torch.device
) -> Iterator[tuple[Tensor, float]]:
    """Per layer: its output in float32 for a block-causal forward, and the largest activation inside it.

    Unlike the model it fuses, reorders and caches nothing; it holds one tensor of the checkpoint at a time.
    """

    def weight(name: str) -> Tensor:
        return read(name).to(device).float()

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight(name)

    count, groups = len(tokens), config.num_heads // config.num_kv_heads
    position = torch.arange(count, device=device)
    frequency, scale = rotary_frequencies(config, device)
    angle = torch.outer(position.float(), frequency).repeat(1, 2)[:, None]
    hidden = position[:, None] // config.block_size < position // config.block_size

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return scale * (x * angle.cos() + torch.cat((-right, left), -1) * angle.sin())

    def project(h: Tensor, name: str) -> Tensor:
        bias = weight(f"{name}_proj.bias") if config.family.qkv_bias else None
        heads = linear(h, weight(f"{name}_proj.weight"), bias).view(count, -1, config.head_dim)
        return norm(heads, f"{name}_norm.weight") if config.family.qk_norm and name[-1] in "qk" else heads

    x = read(EMBEDDING)[list(tokens)].to(device).float()
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (project(h, f"{prefix}self_attn.{name}") for name in "qkv")
        q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        share = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).reshape(count, -1)
        x = x + linear(mixed, weight(prefix + "self_attn.o_proj.weight"))
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = linear(h, weight(prefix + "mlp.gate_proj.weight"))
        product = silu(gate) * linear(h, weight(prefix + "mlp.up_proj.weight"))
        x = x + linear(product, weight(prefix + "mlp.down_proj.weight"))
        yield x, max(float(t.abs().max()) for t in (q, k, v, gate, product, x))


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A sequence before a denoising pass, the positions that are predicted, and what the pass revealed."""

    prompt: int
    block: int
    step: int
    start: int  # of the block
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    reads: tuple[int, ...]  # the positions whose logits predict `positions`
    revealed: Mapping[int, int]  # tokens by position

    @property
    def has_boundary_prediction(self) -> bool:
        """Whether the first of `positions` is predicted by the pass before the block: prefill or commit."""
        return self.reads[0] < self.start


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits at one position, and the logarithm of the sum of all exponentials."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]
    total: float

    def prediction(self, mask_token_id: int) -> Prediction:
        best = next(n for n, token in enumerate(self.ids) if token != mask_token_id)
        return Prediction(self.ids[best], math.exp(self.logits[best] - self.total))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """The outcome of a comparison; `differences` explains each state that differs, in the order of decoding."""

    states: int
    largest: float  # difference of two logits
    differences: tuple[str, ...]
    child: Mapping[str, Any]  # versions of the other environment


def code_files(folder: Path) -> dict[str, str]:
    """The checkpoint's Python files with a short hash of each; InputError if config.json refers to none."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in sorted(folder.glob("*.py"))}
    if "AutoModelForCausalLM" not in (raw.get("auto_map") or {}) or not files:
        raise InputError(f"{folder} has no modelling code of its own: there is nothing to compare with")
    return files


def compare(model: LoadedModel, python: Path) -> Parity:
    """Decodes a few prompts and compares every step with the checkpoint's own code; `model` is in float32."""
    settings = model.config.decode_settings({}, max_new_tokens=NEW_TOKENS, block_cache=False)
    states = list(decoding_states(model, parity_prompts(model), settings))
    ours = own_logits(model, states)
    child = run_child(model, python, states, ours)
    compared = [
        _compare_state(state, mine, answer, model.config.mask_token_id, settings.reveal_rule)
        for state, mine, answer in zip(states, ours, child.pop("answers"), strict=True)
    ]
    return Parity(
        states=len(states),
        largest=max(gap for gap, _ in compared),
        differences=tuple(text for _, text in compared if text),
        child=child,
    )


def _compare_state(
    state: State, ours: Sequence[TopLogits], answer: Mapping[str, Any], mask: int, rule: RevealRule
) -> tuple[float, str | None]:
    """The largest difference of two logits, and what differs, if anything: a logit, or the tokens that are revealed."""
    pairs = [zip(row.logits, same, strict=True) for row, same in zip(ours, answer["ours"], strict=True)]
    gaps = [[abs(a - b) if math.isfinite(b) else math.inf for a, b in row] for row in pairs]
    largest = max(map(max, gaps))
    rows = zip(answer["ids"], answer["logits"], answer["total"], strict=True)
    our_predictions = [row.prediction(mask) for row in ours]
    their_predictions = [TopLogits(tuple(ids), tuple(logits), total).prediction(mask) for ids, logits, total in rows]
    where = f"prompt {state.prompt}, block {state.block}, step {state.step}"
    compared = zip(state.positions, ours, answer["ours"], gaps, our_predictions, their_predictions, strict=True)
    for position, our_row, their_logits, gap, a, b in compared:
        worst = gap.index(max(gap))
        if gap[worst] > TOLERANCE * max(1.0, abs(our_row.logits[worst])):
            return largest, (
                f"{where}, position {position}: the logit of token {our_row.ids[worst]} is {our_row.logits[worst]:.6g} "
                f"but {their_logits[worst]:.6g} in the checkpoint's code; the prediction is token {a.token} "
                f"({a.probability:.3f}), but token {b.token} ({b.probability:.3f}) in the checkpoint's code"
            )
    revealed = _revealed(state, their_predictions, rule)
    if revealed != dict(state.revealed):
        return largest, (
            f"{where}: reveals {dict(state.revealed)}, but {revealed} with the logits of the checkpoint's code, which "
            "are the same within the tolerance (a near tie)"
        )
    return largest, None


def _revealed(state: State, predictions: Sequence[Prediction], rule: RevealRule) -> dict[int, int]:
    """Tokens by position that these predictions reveal; a boundary prediction is always revealed."""
    boundary = int(state.has_boundary_prediction)
    chosen = [n + boundary for n in rule.choose([[prediction] for prediction in predictions[boundary:]])]
    return {state.positions[n]: predictions[n].token for n in [*range(boundary), *chosen]}


def parity_prompts(model: LoadedModel) -> list[Prompt]:
    """Texts if there is a tokenizer; one prompt ends with a block, so that the prefill predicts a token."""
    config = model.config
    prompts = [fixed_tokens(config, 0, 2 * config.block_size)]
    if model.has_tokenizer:
        prompts += [encode(model.tokenizer, text) for text in TEXTS]
    else:
        prompts += [fixed_tokens(config, number, 20 * number) for number in (1, 2)]
    return [Prompt(ids=ids) for ids in prompts]


def decoding_states(model: LoadedModel, prompts: Sequence[Prompt], settings: DecodeSettings) -> Iterator[State]:
    """Decodes with k1 and full passes only, so that every pass sees what one forward of the sequence would see."""
    steps: list[Step] = []
    k1 = ReusePolicy.parse("k1")
    list(decode_prompts(model, prompts, policy=k1, settings=settings, with_text=False, on_step=steps.append))
    config = model.config
    size, mask = config.block_size, config.mask_token_id
    for document, of_document in groupby(steps, key=lambda step: step.document):
        prompt = prompts[document].ids
        before = prompt[: len(prompt) // size * size]  # all blocks before the current one
        for block, of_block in groupby(of_document, key=lambda step: step.block):
            start = block * size
            for step in of_block:
                known = zip(step.tokens, step.context.revealed_at, strict=True)
                tokens = tuple(mask if at is None else token for token, at in known)
                first = step.small_block * settings.small_block
                masked = [p for p in range(first, first + settings.small_block) if tokens[p] == mask]
                opens_new_block = step.context.step == 0 and 0 < start >= len(prompt)
                boundary = config.boundary_predictions if opens_new_block else 0
                positions = [start + p for p in [*range(boundary), *masked]]
                yield State(
                    prompt=document,
                    block=block,
                    step=step.context.step,
                    start=start,
                    tokens=(*before, *tokens),
                    positions=tuple(positions),
                    reads=tuple(map(config.predicted_at, positions)),
                    revealed={p: step.tokens[p - start] for p in positions if step.tokens[p - start] != mask},
                )
            before = (*before, *step.tokens)


class _TopReader:
    """Reads the largest logits of each row."""

    def pack(self, queries: Sequence[Any], block_rows: Sequence[int]) -> Sequence[int]:
        del queries, block_rows
        return ()

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:
        del packed
        top = logits_PV.topk(TOP)
        return torch.cat(
            (top.indices.double(), top.values.double(), logits_PV.logsumexp(-1, True).double()), 1
        ).flatten()

    def unpack(self, numbers: Sequence[float], queries: Sequence[Any]) -> list[TopLogits]:
        width = 2 * TOP + 1
        rows = [numbers[n * width : (n + 1) * width] for n in range(len(queries))]
        return [TopLogits(tuple(map(int, row[:TOP])), tuple(row[TOP:-1]), row[-1]) for row in rows]


def own_logits(model: LoadedModel, states: Sequence[State]) -> list[list[TopLogits]]:
    """Our logits at the positions that each state reads, from the same passes as in decoding."""
    config = model.config
    logits: dict[int, list[TopLogits]] = {}
    engine: Engine[None] = Engine(
        model.network,
        cache_spec=CacheSpec(),
        slots=1,
        capacity=max(len(state.tokens) for state in states),
        reader=_TopReader(),
        reads=config.block_size,
    )

    def row(numbers: Sequence[int]) -> Row[None]:
        first = states[numbers[0]]
        before: list[TopLogits] = []
        if first.start:
            queries = (None,) if first.has_boundary_prediction else ()
            before = yield Prefill(tokens=first.tokens[: first.start], queries=queries)
        for number in numbers:
            state = states[number]
            reads = tuple(read - state.start for read in state.reads if read >= state.start)
            answers = yield Pass(
                kind=PassKind.FULL,
                start=state.start,
                tokens=state.tokens[state.start :],
                plan=compute_all(config.num_layers),
                read=reads,
                queries=(None,) * len(reads),
            )
            logits[number] = [*(before if number == numbers[0] else ()), *answers]

    blocks = groupby(range(len(states)), key=lambda number: (states[number].prompt, states[number].block))
    for _ in engine.run(row(list(numbers)) for _, numbers in blocks):
        pass
    return [logits[number] for number in range(len(states))]


def run_child(
    model: LoadedModel, python: Path, states: Sequence[State], ours: Sequence[Sequence[TopLogits]]
) -> dict[str, Any]:
    """Forwards the states with the checkpoint's own code; returns its answers and the versions of its packages."""
    request = {
        "folder": str(model.folder),
        "device": str(model.device),
        "top": TOP,
        "states": [
            {"tokens": state.tokens, "reads": state.reads, "ids": [row.ids for row in rows]}
            for state, rows in zip(states, ours, strict=True)
        ],
    }
    with tempfile.TemporaryDirectory(prefix="reuse-parity-") as folder:
        request_file, answers_file = Path(folder, "request.json"), Path(folder, "answers.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        try:
            ended = subprocess.run(
                [str(python), "-I", "-B", "-c", CHILD, str(request_file), str(answers_file)],
                cwd=folder,
                env=child_environment(folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHILD_TIMEOUT_SECONDS,
            )
        except OSError as error:
            raise InputError(f"--python {python} cannot be started ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise InputError(
                f"the checkpoint's code did not finish within {CHILD_TIMEOUT_SECONDS:.0f} seconds"
            ) from None
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise InputError(f"the checkpoint's code failed with {python}: {reason}")
        result: dict[str, Any] = json.loads(answers_file.read_text(encoding="utf-8"))
    return result


def child_environment(folder: str) -> dict[str, str]:
    """The environment of the child: only variables that hold no secret, `folder` as home, and no access to the Hub."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **offline, "HOME": folder, "TMPDIR": folder, "HF_HOME": folder}
