"""What a person may choose about a task: how many documents, which prompts, from where. Checked at birth."""

import os
from dataclasses import dataclass

from sampler import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """Choices for one task; None means as in the catalog."""

    data: str = "hub"  # hub, bundled, or a folder laid out like the Hub
    limit: int | None = None  # the first N documents, of each subject in a group
    sample: int | None = None  # a random N, spread over the subjects like the documents are
    seed: int = 0
    fewshot: int | None = None
    chat_template: bool = True
    max_new_tokens: int | None = None
    allow_code_execution: bool = False
    unsafe_code_execution: bool = False
    revisions: tuple[tuple[str, str], ...] = ()  # of datasets on the Hub: to be read at this commit, not the newest

    def __post_init__(self) -> None:
        for name in ("limit", "sample", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: at least 1 is allowed")
        if self.fewshot is not None and self.fewshot < 0:
            raise InputError(f"--fewshot {self.fewshot}: 0 or more worked examples are allowed")
        if self.limit is not None and self.sample is not None:
            raise InputError("--limit and --sample exclude each other: the first N documents or a random N")
        if not self.data:
            raise InputError("--data is empty: hub, bundled or a folder laid out like the Hub is allowed")

    @property
    def code_execution_allowed(self) -> bool:
        """By flag, or by the variable that the Hub's own code metric asks for."""
        return self.allow_code_execution or self.unsafe_code_execution or os.environ.get("HF_ALLOW_CODE_EVAL") == "1"
