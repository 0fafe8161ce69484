"""Whether a model that was found, but not loaded, can do what a sweep asks of it. Knows no machine."""

from collections.abc import Mapping
from typing import Any

from orchestrator.core.errors import Problems
from orchestrator.planning.prepared import PreparedTask
from orchestrator.planning.settings import SweepSettings
from sampler import DecodeSettings, InputError, ReusePolicy
from sampler.config import ModelConfig
from sampler.decode import check_ids, check_length, check_prompts
from sampler.loading import ModelFiles
from sampler.policy import checked_subset_size
from tasks.catalog import GENERATE
from tasks.evaluate import chat_renderer, to_pairs, to_prompt

ANY_BLOCK = DecodeSettings(small_block=1)  # divides every block: the asked ones are told about once, not per task


def check_model(
    settings: SweepSettings, files: ModelFiles, tasks: Mapping[str, PreparedTask], problems: Problems
) -> None:
    """Policies against its depth, small blocks against its block, first prompts against its length."""
    config = files.config
    with problems.collect():
        checked_subset_size(config.num_layers, settings.subset_size)
    for name in settings.policies:
        with problems.collect():
            ReusePolicy.parse(name).bind(config.num_layers, settings.subset_size)
        scored = sorted(task.task.name for task in tasks.values() if task.task.kind != GENERATE)
        with problems.collect():
            if scored:
                _check_scoring(name, scored[0])
    for size in settings.small_block:
        with problems.collect():
            check_prompts((), DecodeSettings(small_block=size), config)
    with problems.collect():
        tokenizer = files.tokenizer
        template = chat_renderer(tokenizer) if settings.chat_template else None
        for task in tasks.values():
            with problems.collect():
                _check_first_documents(task, config, tokenizer, template)


def _check_scoring(policy: str, task: str) -> None:
    try:
        ReusePolicy.parse(policy).check_scoring()
    except InputError as error:
        raise InputError(f"task {task}: {error}") from None


def _check_first_documents(prepared: PreparedTask, config: ModelConfig, tokenizer: Any, template: Any) -> None:
    """A prompt of each subject, with its worked examples and room for the answer, fits the model."""
    task = prepared.task
    first = {document.subtask: document for document in reversed(prepared.wanted)}
    for document in first.values():
        requests = task.requests(document, template)
        try:
            if task.kind == GENERATE:
                check_prompts([to_prompt(request, tokenizer) for request in requests], ANY_BLOCK, config)
            for pair in to_pairs(requests, tokenizer) if task.kind != GENERATE else ():
                check_ids(pair.prefix, config, "prompt")
                check_length(len(pair.prefix) + len(pair.target), config)
        except InputError as error:
            raise InputError(f"task {task.name}, document {document.doc_id}: {error}") from None
