"""Commands that run one model without Ray: `reuse-sweep generate`, `score` and `profile`; options of such commands."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.cli.console import Line, Parser, announce, parse_options, parse_values, read_lines, write_in_order
from orchestrator.core.configuration import DECODE_SETTINGS
from orchestrator.core.system import usable_cores
from orchestrator.planning.fields import display, setting, settings_of, shared
from orchestrator.planning.settings import ALL_SETTINGS, SweepSettings, check_policy
from sampler.errors import InputError, NonFiniteError
from sampler.policy import GRAMMAR, ReusePolicy
from sampler.records import DecodeSettings, Generated, Pair, Prompt, Scored, document_seed
from sampler.text import check_stop, encode, encode_chat, encode_pair, token_texts

if TYPE_CHECKING:
    from sampler.engine import OnFailure
    from sampler.loading import LoadedModel, ModelFiles

T = TypeVar("T")
MODEL_HELP = "tiny (the bundled model), a directory (./tiny for one of that name), or a Hub id[@revision]"
DEVICE_HELP = "cpu, cuda, cuda:N or auto"
IDS_HELP = "lines contain token ids instead of text"
GENERATE_EXAMPLES = """examples:
  echo '{"id": 1, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}' |
    reuse-sweep generate --model Efficient-Large-Model/Fast_dLLM_v2_7B
  reuse-sweep generate --model DIR --policies k2_middle --ids --batch-size 8 < prompts.jsonl
"""
SCORE_EXAMPLES = """examples:
  echo '{"id": 1, "prefix": "The capital of France is", "target": " Paris"}' |
    reuse-sweep score --model Efficient-Large-Model/Fast_dLLM_v2_7B --policies k2_middle
  reuse-sweep score --model DIR --ids --scoring reference --batch-size 8 < pairs.jsonl
"""
PROFILE_EXAMPLES = """examples:
  reuse-sweep profile --model tiny --figure drift.svg < prompts.jsonl
  reuse-sweep profile --model DIR --ids --subset-size 8 --json < prompts.jsonl
"""


def _check_threads(threads: int) -> str | None:
    cores = usable_cores()
    return None if threads <= cores else f"must be at most {cores}, the cores of this machine (got {display(threads)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Where a model is, what its config.json may lack, and the number of threads that run it."""

    model: str = setting(verbatim=True, help=MODEL_HELP)
    family: str | None = shared(SweepSettings, "family")
    block_size: int | None = shared(SweepSettings, "block_size")
    threads: int = shared(  # one by default, as in an actor of a sweep
        SweepSettings, "threads_per_actor", default=1, default_text=None, check=_check_threads, help="CPU threads"
    )

    def start(self) -> None:
        """Imports torch, which takes seconds, and sets its threads."""
        announce(f"loading {self.model}")
        import torch

        torch.set_num_threads(self.threads)

    def find(self, *, code: bool = False) -> "ModelFiles":
        """The model's files; with `code`, also its own modelling code."""
        from sampler.loading import find_model

        return find_model(self.model, family=self.family, block_size=self.block_size, code=code)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(SourceOptions):
    """A model and the device it runs on."""

    dtype: str = shared(SweepSettings, "dtype")
    device: str = setting("auto", metavar="DEVICE", help=DEVICE_HELP)
    batch_size: int = shared(SweepSettings, "batch_size")
    compile: bool = shared(SweepSettings, "compile")

    def start(self) -> None:
        """Also raises InputError for a wrong device, before anything is read or downloaded."""
        super(ModelOptions, self).start()
        from sampler.device import pick_device, pick_dtype

        pick_dtype(self.dtype, pick_device(self.device))

    def load(self, files: "ModelFiles", *, rows: int) -> "LoadedModel":
        """Loads the model; InputError if there is not enough memory to decode this many rows."""
        from orchestrator.planning.estimate import check_model_fits
        from sampler.device import pick_device
        from sampler.loading import load_model

        batch_size = max(1, min(rows, self.batch_size))
        check_model_fits(files.config, self.dtype, pick_device(self.device), batch_size=batch_size)
        return load_model(files, dtype=self.dtype, device=self.device, compiled=self.compile)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions(ModelOptions):
    policy: str = setting(
        "k1", typed_as="policies", aliases=("policy",), metavar="POLICY", check=check_policy, help=GRAMMAR
    )
    subset_size: int | None = shared(SweepSettings, "subset_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(PolicyOptions):
    ids: bool = setting(False, help=IDS_HELP)
    max_new_tokens: int = setting(256, minimum=1, help="maximum number of tokens to generate")
    stop: tuple[str, ...] = setting(
        (), metavar="TEXT", repeatable=True, verbatim=True, help="stop before this text (repeatable)"
    )
    temperature: float = setting(0.0, minimum=0, default_text="0", help="sampling temperature; 0 is greedy decoding")
    top_p: float = setting(1.0, above=0, maximum=1, help="cumulative probability for nucleus sampling")
    seed: int = setting(0, default_text="0", help="random seed, combined with the id of each line")
    trace: bool = setting(False, help="add the block, small block, step and confidence of each token")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions(PolicyOptions):
    ids: bool = setting(False, help=IDS_HELP)
    scoring: str = setting(
        "chain",
        metavar="METHOD",
        choices=("chain", "reference"),
        help="chain scores all tokens of the target, reference only the first",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(ModelOptions):
    ids: bool = setting(False, help=IDS_HELP)
    subset_size: int | None = shared(
        SweepSettings, "subset_size", aliases=("size",), help="number of layers in the suggested subset"
    )
    figure: Path | None = setting(None, metavar="FILE", help="draw layers × steps into this .svg or .png file")
    json: bool = setting(False, help="print JSON with every step instead of a table")
    max_new_tokens: int = setting(256, minimum=1, help="maximum number of tokens to generate")


def parse_decoding(parser: Parser, cls: type[T], arguments: Sequence[str]) -> tuple[T, Mapping[str, Any]]:
    """The options of a command that decodes, and its decode settings by name."""
    axes = {name: ALL_SETTINGS[name].single for name in DECODE_SETTINGS}
    values = parse_values(parser, {**settings_of(cls), **axes}, arguments)
    decode = {name: values.pop(name) for name in DECODE_SETTINGS}
    return cls(**values), decode


def generate(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep generate",
        description='Continues prompts. Input lines: {"id", "prompt"} or {"id", "messages"}; with --ids {"id", "ids"}.',
        examples=GENERATE_EXAMPLES,
    )
    options, decode = parse_decoding(parser, GenerateOptions, arguments)
    policy = ReusePolicy.parse(options.policy)
    options.start()
    from sampler.decode import decode_prompts

    check_stop(options.stop)
    lines = read_lines()
    files = options.find()
    settings = files.config.decode_settings(
        decode, max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p
    )
    policy.bind(files.config.num_layers, options.subset_size)
    if options.stop or (lines and not options.ids):
        _ = files.tokenizer  # raises if there is none, before the weights are read
    prompts = read_prompts(lines, files, settings, options.ids, options.stop, options.seed)
    results = decode_prompts(
        options.load(files, rows=len(lines)),
        prompts,
        policy=policy,
        settings=settings,
        batch_size=options.batch_size,
        subset_size=options.subset_size,
        with_text=not options.ids,
        with_reveals=options.trace,
        on_failure=_raise_with_line(lines),
    )
    tokenizer = files.tokenizer if lines and not options.ids else None
    write_in_order(((i, _generated_json(lines[i], one, tokenizer)) for i, one in results), len(lines))


def score(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep score",
        description='Computes log-likelihoods. Input lines: {"id", "prefix", "target"}; with --ids they are token ids.',
        examples=SCORE_EXAMPLES,
    )
    options = parse_options(parser, ScoreOptions, arguments)
    policy = ReusePolicy.parse(options.policy)
    policy.check_scoring()
    options.start()
    from sampler.scoring import check_pairs, score_pairs

    lines = read_lines()
    files = options.find()
    policy.bind(files.config.num_layers, options.subset_size)
    if lines and not options.ids:
        _ = files.tokenizer  # raises if there is none, before the weights are read
    pairs = []
    for line in lines:
        with line:
            pairs.append(_pair(line, files, options.ids))
            check_pairs(pairs[-1:], files.config)
    results = score_pairs(
        options.load(files, rows=len(lines)),
        pairs,
        policy=policy,
        method=options.scoring,
        batch_size=options.batch_size,
        subset_size=options.subset_size,
        on_failure=_raise_with_line(lines),
    )
    write_in_order(((index, _scored_json(lines[index], scored)) for index, scored in results), len(lines))


def profile(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep profile",
        description="Measures with k=1 how much the contribution of each layer changes from step to step. "
        "The input lines are the same as for `reuse-sweep generate`.",
        examples=PROFILE_EXAMPLES,
    )
    options, decode = parse_decoding(parser, ProfileOptions, arguments)
    options.start()
    from sampler import drift
    from sampler.policy import resolve_subset_size

    if options.figure is not None:
        drift.check_path(options.figure)
    lines = read_lines()
    files = options.find()
    settings = files.config.decode_settings(decode, max_new_tokens=options.max_new_tokens)
    size = resolve_subset_size(files.config.num_layers, options.subset_size)
    prompts = read_prompts(lines, files, settings, options.ids)
    model = options.load(files, rows=len(lines))
    drift_profile = drift.profile(model, prompts, settings=settings, batch_size=options.batch_size)
    if not drift_profile.passes:
        raise InputError("no block took a second pass, so no passes can be compared; provide longer or more prompts")
    print(json.dumps(drift_profile.as_json(size), indent=1) if options.json else drift_profile.table(size))
    if options.figure is not None:
        drift.draw(drift_profile, drift_profile.suggestion(size), options.figure)


def _raise_with_line(lines: Sequence[Line]) -> "OnFailure":
    """A handler of non-finite numbers that raises InputError with the number of the line."""

    def fail(index: int, error: NonFiniteError) -> None:
        with lines[index]:
            raise InputError(error.reason)

    return fail


def read_prompts(
    lines: Sequence[Line],
    files: "ModelFiles",
    settings: DecodeSettings,
    as_ids: bool,
    stop: tuple[str, ...] = (),
    seed: int = 0,
) -> list[Prompt]:
    """The prompts in the lines, checked against the model."""
    from sampler.decode import check_prompts

    check_prompts([], settings, files.config)
    prompts = []
    for line in lines:
        with line:
            ids = prompt_ids(line, files, as_ids)
            prompts.append(Prompt(ids=ids, stop=stop, seed=document_seed(seed, line.fields["id"])))
            check_prompts(prompts[-1:], settings, files.config)
    return prompts


def prompt_ids(line: Line, files: "ModelFiles", as_ids: bool) -> tuple[int, ...]:
    """The token ids of a line's prompt or messages."""
    if as_ids:
        return line.token_ids("ids")
    if "messages" in line.fields and "prompt" in line.fields:
        raise InputError('a line must have "prompt" or "messages", not both')
    if "messages" in line.fields:
        return encode_chat(files.tokenizer, line.messages())
    return encode(files.tokenizer, line.text("prompt"))


def _pair(line: Line, files: "ModelFiles", as_ids: bool) -> Pair:
    if as_ids:
        return Pair(prefix=line.token_ids("prefix"), target=line.token_ids("target"))
    prefix, target = encode_pair(files.tokenizer, line.text("prefix"), line.text("target"))
    return Pair(prefix=prefix, target=target)


def _generated_json(line: Line, generated: Generated, tokenizer: Any) -> dict[str, Any]:
    """Without a tokenizer, the answer has token ids and no text."""
    text = {} if tokenizer is None else {"text": generated.text}
    answer = {"ids": list(generated.ids), **text, "finish": generated.finish}
    fields = {"id": line.fields["id"], **answer, **_work_json(generated)}
    if generated.reveals is not None:
        fields["trace"] = generated.trace_json(None if tokenizer is None else token_texts(tokenizer, generated.ids))
    return fields


def _scored_json(line: Line, scored: Scored) -> dict[str, Any]:
    answer = {"score": scored.score, "greedy": scored.greedy, "rewound": scored.rewound}
    return {"id": line.fields["id"], **answer, **_work_json(scored)}


def _work_json(result: Generated | Scored) -> dict[str, Any]:
    return {**result.counters.as_json(), "seconds": round(result.seconds, 6)}
