"""One warm model that runs trials: documents in, Arrow record batches out, with one row per document. Needs no Ray.

A worker keeps the model, the opened tasks, the calibrated speed and the memory of caches between trials; it never reads
what a cache held in an earlier trial. It checks that its node has the model and the documents that the sweep was
planned with. A row consists of columns about the trial and the attempt, `_model_columns` and `_result_columns`.
"""

import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa
import torch

from orchestrator.core import system
from orchestrator.core.system import format_bytes
from orchestrator.core.trial import Trial
from orchestrator.planning.preflight import folder_revision
from orchestrator.planning.run_plan import WorkerSettings
from orchestrator.store.schema import ROWS
from sampler import DecodeSettings, InputError, Prompt, ReusePolicy, decode_prompts, load_model
from sampler.device import numeric_flags, pick_device
from sampler.errors import NonFiniteError, UnavailableError
from sampler.loading import ModelFiles, find_model
from sampler.measure import warm_up
from sampler.text import encode
from tasks.documents import Document
from tasks.evaluate import ModelDecoder, Result, chat_renderer, evaluate
from tasks.task import Task, open_task

T = TypeVar("T")
CALIBRATION_PARTS = 4  # of the calibration documents; each sample decodes the next part
MIN_REST_FACTOR = 99  # a pause lasts at least this many times as long as the sample before it
CALIBRATION_TOKENS = 32  # generated for each document
CALIBRATION_PROMPT_TOKENS = 256  # the last ones of the prompt
GPU_CALIBRATION_INTERVAL_SECONDS = 60.0
FREE_MEMORY_TIMEOUT_SECONDS = 60.0


class Calibrator:
    """Measures the current speed with fixed documents: all of them before the first trial, one part per later sample.

    Policies are compared with trials that ran at about the same time on the same machine, so a calibration only has to
    follow slow changes and differences between machines. Samples take at most a hundredth of the elapsed time, however
    many trials there are. The speed of a GPU changes more slowly, so it is sampled at most once a minute.

    `decode` decodes one part of the fixed documents and returns the number of tokens.
    """

    def __init__(
        self, decode: Callable[[int], int], *, min_interval: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._decode, self._min_interval, self._clock = decode, min_interval, clock
        self._samples: deque[tuple[int, float]] = deque(maxlen=CALIBRATION_PARTS)  # tokens and seconds
        self._count = 0
        self._last_end = 0.0
        self.seconds_within_trial = 0.0  # spent on samples within the current or last trial

    def before_trial(self) -> float:
        """Takes a sample if one is due, and on the first call one of each part. Returns the seconds spent."""
        began = self._clock()
        while len(self._samples) < CALIBRATION_PARTS:
            self._sample()
        if self._is_due():
            self._sample()
        self.seconds_within_trial = 0.0
        return self._clock() - began

    @property
    def speed(self) -> float:
        """Tokens/s over the last sample of each part; NaN if nothing was measured."""
        if not self._samples:
            return math.nan
        tokens = sum(tokens for tokens, _ in self._samples)  # 0 if the model fails on all of the documents
        return tokens / sum(seconds for _, seconds in self._samples) if tokens else math.nan

    def during(self, results: Iterable[T]) -> Iterator[T]:
        """Yields the results of a trial, and takes samples between them when they are due."""
        for result in results:
            yield result
            if self._samples and self._is_due():
                self._sample()
                self.seconds_within_trial += self._samples[-1][1]

    def _is_due(self) -> bool:
        pause = max(self._min_interval, MIN_REST_FACTOR * self._samples[-1][1])
        return self._clock() - self._last_end > pause

    def _sample(self) -> None:
        began = self._clock()
        tokens = self._decode(self._count % CALIBRATION_PARTS)
        self._last_end = self._clock()
        self._samples.append((tokens, self._last_end - began))
        self._count += 1


class Worker:
    """Loads and warms up a model when created; then calibrates and runs one trial after another."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device, free = pick_device(settings.device), None
        if device.type == "cuda":
            seconds = FREE_MEMORY_TIMEOUT_SECONDS if settings.memory <= torch.cuda.mem_get_info(device)[1] else 0.0
            free = wait_for_memory(settings.memory, lambda: torch.cuda.mem_get_info(device)[0], seconds=seconds)
        files = find_planned_model(
            settings.model, settings.revision, family=settings.family, block_size=settings.block_size
        )
        with explain_out_of_memory(settings.memory, free):
            began = time.perf_counter()
            self.model = load_model(files, dtype=settings.dtype, device=settings.device, compiled=settings.compile)
            self._synchronize()
            self.load_seconds = time.perf_counter() - began
            with numeric_flags() as flags:
                self._numeric_flags = {
                    name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()
                }
            self.warm_up = warm_up(self.model, batch_size=settings.batch_size)
        self._device = system.describe_device(self.model.device.type, self.model.device.index)
        self._provenance = {"packages": system.package_versions(), "code": system.code_version()}
        self._tasks: dict[str, tuple[Task, dict[str, Document]]] = {}
        self._prompts = self._calibration_prompts()
        self.failed_documents: dict[str, str] = {}  # of the current or last trial: why the model cannot compute them
        min_interval = GPU_CALIBRATION_INTERVAL_SECONDS if self.model.device.type == "cuda" else 0.0
        self._calibrator = Calibrator(self._decode_calibration_part, min_interval=min_interval)

    def facts(self, trial: Trial, calibration_seconds: float) -> dict[str, Any]:
        """Facts for trial.json about a trial and the worker that runs it."""
        return {
            "process": os.getpid(),
            "device": self._device,
            "load_seconds": self.load_seconds,
            "warm_up_seconds": self.warm_up.seconds,
            "warm_up_rounds": len(self.warm_up.rounds),
            "warm_up_settled": self.warm_up.settled,
            "calibration": self._calibrator.speed,
            "calibration_seconds": calibration_seconds,
            "threads": torch.get_num_threads(),
            "numeric_flags": self._numeric_flags,
            "layers": self._layers(trial),
            "settings": self._effective_settings(trial),
            **self._provenance,
        }

    def open_task(self, name: str) -> None:
        """Reads a task's documents at first use; InputError if they are missing or different on this node."""
        self._opened(name)

    def calibrate(self) -> float:
        """Measures the current speed if a sample is due; returns the seconds spent."""
        return self._calibrator.before_trial()

    @property
    def recalibration_seconds(self) -> float:
        """Seconds spent on calibration within the last trial."""
        return self._calibrator.seconds_within_trial

    def run(self, trial: Trial, documents: Sequence[str], attempt: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yields rows of these documents, except `failed_documents`. Their times cover decoding, not scoring.

        `attempt` has the columns that describe this attempt: sweep, attempt, actor and node.
        """
        task, by_id = self._opened(trial.task)
        unknown = [doc_id for doc_id in documents if doc_id not in by_id]
        if unknown:
            raise InputError(
                f"task {trial.task} has no document {unknown[0]} on this node: the sweep was planned with other data"
            )
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
        decoder = ModelDecoder(
            model=self.model,
            policy=ReusePolicy.parse(trial.policy),
            settings=trial.configuration.decode_settings,
            batch_size=self.settings.batch_size,
            subset_size=self.settings.subset_size,
            with_reveals=self.settings.store_steps,
        )
        failed = self.failed_documents = {}

        def record_failure(document: Document, error: NonFiniteError) -> None:
            failed.setdefault(document.doc_id, error.reason)

        results = evaluate(task, [by_id[doc_id] for doc_id in documents], decoder, record_failure)
        calibrated = self._calibrator.during(results)
        shared = {**trial.as_dict(), **self._model_columns(trial), **attempt}
        return build_batches(calibrated, shared, lambda: self._calibrator.speed)

    def peak_memory(self) -> int:
        """Bytes: on a CUDA device since the trial began, else of this process."""
        if self.model.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.model.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _effective_settings(self, trial: Trial) -> dict[str, Any]:
        """How documents are decoded, for trial.json; a task may set its own maximum length of an answer."""
        columns, (task, _) = self._model_columns(trial), self._opened(trial.task)
        decode = trial.configuration.decode_settings
        return {
            **asdict(decode),
            "max_new_tokens": task.options.max_new_tokens or task.spec.max_new_tokens or decode.max_new_tokens,
            "fewshot": task.fewshot,
            "chat_template": task.options.chat_template,
            "thinking": task.options.thinking,
            "dtype": columns["dtype"],
            "batch_size": columns["batch_size"],
            "attention": self.model.network.execution.backend.value,
            "compile": self.settings.compile,
            "model": {
                "source": self.model.source,
                "revision": self.model.revision,
                "depth": self.model.config.num_layers,
            },
            "datasets": dict(task.provenance.datasets),
        }

    def _model_columns(self, trial: Trial) -> dict[str, Any]:
        """A row's columns about the policy, the loaded model and how it runs."""
        policy = ReusePolicy.parse(trial.policy)
        return {
            "k": policy.k,
            "subset": policy.layers,
            "mode": None if policy.layers is None else policy.mode,
            "layers": self._layers(trial),
            "batch_size": self.settings.batch_size,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self._device["name"]),
        }

    def _layers(self, trial: Trial) -> list[int]:
        policy = ReusePolicy.parse(trial.policy)
        return list(policy.layer_indices(self.model.config.num_layers, self.settings.subset_size))

    def _opened(self, name: str) -> tuple[Task, dict[str, Document]]:
        """A task and its documents by id; opened at first use."""
        if name not in self._tasks:
            try:
                task = open_task(name, self.settings.options)
            except InputError as error:
                kind = UnavailableError if isinstance(error, UnavailableError) else InputError
                raise kind(f"task {name} cannot be opened on this node: {error}") from None
            planned = (self.settings.datasets or {}).get(name)
            if planned is not None and dict(planned) != dict(task.provenance.datasets):
                raise InputError(
                    f"task {name} has different documents on this node than the sweep was planned with: "
                    "copy the same files to every node"
                )
            self._tasks[name] = task, {document.doc_id: document for document in task.documents}
        return self._tasks[name]

    def _calibration_prompts(self) -> list[Prompt]:
        """Prompts from the first documents of the calibration task; a scored question is also used as a prompt."""
        task, _ = self._opened(self.settings.calibration_task)
        tokenizer = self.model.tokenizer
        template = chat_renderer(tokenizer, task.options.thinking) if task.options.chat_template else None
        documents = task.documents[: CALIBRATION_PARTS * self.settings.batch_size]
        contexts = [task.requests(document, template)[0].args[0] for document in documents]
        longest = min(CALIBRATION_PROMPT_TOKENS, self.model.config.max_positions - CALIBRATION_TOKENS)
        return [Prompt(ids=encode(tokenizer, context)[-longest:]) for context in contexts if context]

    def _decode_calibration_part(self, part: int) -> int:
        """Decodes one batch of the fixed documents at k1 with default settings and returns the number of tokens."""
        self._synchronize()
        size = self.settings.batch_size
        indices = range(part * size, (part + 1) * size)
        decoded = decode_prompts(
            self.model,
            [self._prompts[index % len(self._prompts)] for index in indices],
            policy=ReusePolicy.parse("k1"),
            settings=DecodeSettings(**self.model.config.decode_defaults, max_new_tokens=CALIBRATION_TOKENS),
            batch_size=size,
            with_text=False,
            on_failure=lambda *_: None,  # trials report the documents that fail
        )
        tokens = sum(len(generated.ids) for _, generated in decoded)
        self._synchronize()
        return tokens

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def build_batches(
    results: Iterable[Result], shared: Mapping[str, Any], speed: Callable[[], float]
) -> Iterator[pa.RecordBatch]:
    """Yields a record batch for each batch of documents, as soon as its last document is decoded.

    `shared` has the columns with the same value in all rows of an attempt. `speed` returns the worker's current
    calibration, in tokens/s.
    """
    remaining = iter(results)
    batch_id = 0
    while batch := list(islice(remaining, shared["batch_size"])):
        seconds = sum(result.wall_seconds for result in batch)
        common = {**shared, "batch_id": batch_id, "batch_seconds": seconds, "calibration": speed()}
        rows = [common | _result_columns(result) for result in batch]
        yield pa.RecordBatch.from_pylist(rows, schema=ROWS)
        batch_id += 1


def _result_columns(result: Result) -> dict[str, Any]:
    """A row's columns about one document."""
    counters = result.counters
    return {
        "subtask": result.document.subtask,
        "doc_id": result.document.doc_id,
        "doc_hash": result.document.doc_hash,
        "correct": result.correct,
        "metrics": json.dumps(result.metrics, ensure_ascii=False, default=str),
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "passes_prefill": counters.prefill,
        "passes_full": counters.full,
        "passes_small": counters.small,
        "passes_commit": counters.commit,
        "layers_computed": counters.layers_computed,
        "layers_reused": counters.layers_reused,
        "layer_positions": counters.layer_positions,
        "prefill_tokens": counters.prefill_tokens,
        "eligible": counters.eligible,
        "replayed": counters.replayed,
        "finish": result.finish,
        "text": None if result.text is None else _storable(result.text),
        "token_ids": list(result.token_ids),
        "scores": list(result.scores),
        "token_steps": None if result.reveals is None else [reveal.step for reveal in result.reveals],
        "token_confidences": None if result.reveals is None else [reveal.confidence for reveal in result.reveals],
        "token_ends": result.token_ends,
        "started_at": datetime.now(UTC) - timedelta(seconds=result.seconds),
    }


def _storable(text: str) -> str:
    """Replaces incomplete characters (lone surrogates), which UTF-8 cannot store; the token ids keep them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def find_planned_model(
    source: str, revision: str | None, *, family: str | None = None, block_size: int | None = None
) -> ModelFiles:
    """The model's files on this node. InputError if they are missing or differ from the planned `revision`."""
    if os.path.isabs(source) and not os.path.isdir(source):
        raise InputError(f"--model {source} is not a directory on this node: copy it to every node or use a Hub id")
    files = find_model(source, family=family, block_size=block_size)
    try:
        revision_here = files.revision or folder_revision(files.folder)
    except OSError as error:
        raise InputError(f"--model {source} cannot be read on this node: {error.strerror}") from None
    if revision not in (None, revision_here):
        same = "install the same version of this package on" if files.revision else "copy the same files to"
        raise InputError(
            f"model {source} on this node differs from the one the sweep was planned with: {same} every node"
        )
    return files


@contextmanager
def explain_out_of_memory(needed: int, free: int | None) -> Iterator[None]:
    """Turns a GPU's out-of-memory error into an InputError; `needed` (an estimate) and `free` are in bytes."""
    try:
        yield
    except torch.OutOfMemoryError:
        available = "" if free is None else f" and {format_bytes(free)} were free"
        raise InputError(
            "the GPU on this node is too small: the model and its caches need about "
            f"{format_bytes(needed)}{available}; use a smaller --batch-size, fewer actors per GPU or a larger GPU"
        ) from None


def wait_for_memory(
    needed: int, free: Callable[[], int], *, seconds: float = FREE_MEMORY_TIMEOUT_SECONDS, step: float = 1.0
) -> int:
    """Waits until enough memory is free: a worker that died may still hold some. Returns the bytes free at the end."""
    until = time.monotonic() + seconds
    while (available := free()) < needed and time.monotonic() < until:
        time.sleep(step)
    return available
