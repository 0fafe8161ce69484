"""Writes sampler/tiny/golden.json: what the reference decoder computes with the bundled model, in float64.

Run it after the bundled model was trained again: python tests/bundled_golden.py
"""

import json
from typing import Any

import torch
from oracle.decoder import ReferenceModel, reference_generate, reference_score

from sampler.check import GOLDEN_FILE
from sampler.loading import BUNDLED_FOLDER
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings
from sampler.text import load_tokenizer
from tasks.documents import TaskOptions
from tasks.evaluate import chat_renderer, to_pairs, to_prompt
from tasks.task import open_task

POLICIES = ("k1", "k1", "k2_middle", "k3_first", "k2_last.output", "trim=0.25_middle", "adaptive=0.2_middle")
SCORED = ("k1", "k2_middle")
MARGIN = 1e-3  # of every decision, so that rounding cannot change a token
NEW_TOKENS = 40


def golden() -> dict[str, Any]:
    reference = ReferenceModel.load(BUNDLED_FOLDER, torch.float64)
    tokenizer = load_tokenizer(BUNDLED_FOLDER)
    settings = DecodeSettings(max_new_tokens=NEW_TOKENS)
    task = open_task("gsm8k", TaskOptions(data="bundled", limit=20))
    prompts = iter(
        to_prompt(task.requests(document, chat_renderer(tokenizer))[0], tokenizer).ids for document in task.documents
    )
    generated = []
    for policy in POLICIES:
        while True:
            prompt = next(prompts)
            found = reference_generate(reference, prompt, policy=ReusePolicy.parse(policy), settings=settings)
            if found.margin > MARGIN:
                generated.append({"policy": policy, "prompt": prompt, "ids": found.ids})
                print(f"{policy}: {len(found.ids)} tokens, margin {found.margin:.2g}", flush=True)
                break
    task = open_task("mmlu", TaskOptions(data="bundled", limit=1))
    pairs = to_pairs(task.requests(task.documents[0], chat_renderer(tokenizer)), tokenizer)
    scored = [
        {
            "policy": policy,
            "prefix": pair.prefix,
            "target": pair.target,
            "score": reference_score(reference, pair.prefix, pair.target, policy=ReusePolicy.parse(policy)).score,
        }
        for policy in SCORED
        for pair in pairs[:2]
    ]
    return {"max_new_tokens": NEW_TOKENS, "generated": generated, "scored": scored}


if __name__ == "__main__":
    (BUNDLED_FOLDER / GOLDEN_FILE).write_text(json.dumps(golden()) + "\n")
