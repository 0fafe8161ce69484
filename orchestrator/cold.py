"""A grid run the plain way: a new process for each task and policy, a few at a time. For comparison; knows no Ray."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One document, as the process wrote it."""

    tokens: int
    seconds: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdRun:
    """The whole grid."""

    seconds: float  # from the first process's start to the last one's end
    at_a_time: int
    answers: Mapping[tuple[str, str], Mapping[str, Answered]]  # by task and policy, then document

    @property
    def decoding(self) -> float:
        return sum(answer.seconds for answers in self.answers.values() for answer in answers.values())

    @property
    def share(self) -> float:
        return self.decoding / (self.at_a_time * self.seconds)

    def tokens_per_s(self, task: str, policy: str) -> float:
        answers = self.answers[task, policy].values()
        return sum(answer.tokens for answer in answers) / sum(answer.seconds for answer in answers)


def run_cold(settings: SweepSettings, *, at_a_time: int, threads: int, folder: Path) -> ColdRun:
    """Each process starts Python, loads the model and opens its task; nothing is shared but the machine."""
    grid = [(task, policy) for task in settings.tasks for policy in settings.policies]
    outputs = {pair: folder / f"{number}.jsonl" for number, pair in enumerate(grid)}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        ended = [pool.submit(_process, command_of(settings, *pair, outputs[pair]), environment) for pair in grid]
        for process in ended:
            process.result()
    seconds = time.perf_counter() - began
    return ColdRun(seconds=seconds, at_a_time=at_a_time, answers={pair: _read(outputs[pair]) for pair in grid})


def command_of(settings: SweepSettings, task: str, policy: str, output: Path) -> list[str]:
    given: dict[str, Any] = {
        "task": task,
        "policy": policy,
        "model": settings.model,
        "data": settings.data,
        "limit": settings.limit,
        "fewshot": settings.fewshot,
        "subset-size": settings.subset_size,
        "dtype": settings.dtype,
        "batch-size": settings.batch_size,
        "max-new-tokens": settings.max_new_tokens,
        "threshold": settings.threshold[0],
        "small-block": settings.small_block[0],
        "out": output,
    }
    flags = [str(part) for name, value in given.items() if value is not None for part in (f"--{name}", value)]
    return [sys.executable, "-m", "tasks.run", *flags]


def _process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        raise InputError(f"a process of the comparison ended with {ended.returncode}: {last}")


def _read(output: Path) -> dict[str, Answered]:
    """Its lines but the last, which is the aggregate."""
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()[:-1]]
    return {
        line["doc_id"]: Answered(tokens=line["tokens"], seconds=line["seconds"], token_ids=tuple(line["token_ids"]))
        for line in lines
    }
