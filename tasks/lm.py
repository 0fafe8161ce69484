"""An lm-eval model that decodes under a reuse policy.

lm_eval.simple_evaluate(model=ReuseLM(model="DIR", policy="k2_middle"), tasks=["gsm8k"], apply_chat_template=True)
lm_eval.simple_evaluate(model="reuse-sweep", model_args={"model": "DIR", "policy": "k2_middle"}, tasks=["gsm8k"])
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from sampler import DecodeSettings, InputError, ReusePolicy, load_model
from tasks.evaluate import Decoder, ModelDecoder, chat_renderer, group_by_sampling, to_pairs, to_prompt

DEFAULTS = DecodeSettings()


@register_model("reuse-sweep")
class ReuseLM(LM):  # type: ignore[misc]
    """An lm-eval model. `decoder`, if given, replaces the model and all its settings.

    A `threshold` or `small_block` of None means the default of the model family.
    """

    def __init__(
        self,
        model: str = "",
        policy: str = "k1",
        *,
        threshold: float | None = None,
        small_block: int | None = None,
        reveal: str = DEFAULTS.reveal,
        block_cache: bool = DEFAULTS.block_cache,
        max_new_tokens: int = 2048,
        batch_size: int | str = 1,
        subset_size: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_batch_size: int | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        super().__init__()
        del max_batch_size  # lm-eval always passes it
        if decoder is None:
            if not str(batch_size).isdigit():
                raise InputError(f"batch_size must be a whole number (got {batch_size!r})")
            loaded = load_model(model, dtype=dtype, device=device or "auto")
            requested = {"threshold": threshold, "small_block": small_block, "reveal": reveal}
            decoder = ModelDecoder(
                policy=ReusePolicy.parse(policy),
                model=loaded,
                settings=loaded.config.decode_settings(
                    requested, block_cache=block_cache, max_new_tokens=max_new_tokens
                ),
                batch_size=int(batch_size),
                subset_size=subset_size,
            )
        self.decoder = decoder

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        answers = [""] * len(requests)
        repeats = _repeat_numbers(requests)
        for sampling, indices in group_by_sampling(requests).items():
            prompts = [to_prompt(requests[index], self.decoder.tokenizer, repeats[index]) for index in indices]
            for position, generated in self.decoder.generate(prompts, sampling):
                answers[indices[position]] = generated.text or ""
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        del disable_tqdm
        answers = [(0.0, False)] * len(requests)
        for index, scored in self.decoder.score(to_pairs(requests, self.decoder.tokenizer)):
            answers[index] = (scored.score, scored.greedy)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        del requests, disable_tqdm
        raise InputError(
            "rolling log-likelihood (perplexity of whole texts) is not defined for a block-diffusion model; "
            "use a generation or multiple-choice task"
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = chat_renderer(self.decoder.tokenizer)(chat_history, add_generation_prompt=add_generation_prompt)
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.decoder.tokenizer, "name_or_path", "tokenizer"))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Reject lm-eval's response cache: its key is the prompt alone, so policies would share answers."""
        if getattr(cache_hook, "dbdict", None) is not None:
            raise InputError("lm-eval's response cache ignores the policy; remove use_cache")
        super().set_cache_hook(cache_hook)


def _repeat_numbers(requests: Sequence[Instance]) -> list[int]:
    """How often each request occurs earlier in the list. Each repeat uses a different seed."""
    seen: dict[int, int] = {}
    counts = []
    for request in requests:
        counts.append(seen.get(id(request), 0))
        seen[id(request)] = counts[-1] + 1
    return counts
