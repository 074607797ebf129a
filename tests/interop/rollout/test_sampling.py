"""Ferry's processed distribution beside transformers' logits processors, and beside vLLM's penalties written in torch."""
import json
import random
import subprocess

import pytest
import torch
from transformers import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper,
                          TopKLogitsWarper, TopPLogitsWarper)

from support import FERRY

# The bound on differences of log-probabilities: fp32 rounds logits of up to 64 by 4e-6, and each side rounds a few times.
BOUND = 2e-5
DEFAULTS = {"prompt": [], "output": [], "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0}


def ours(requests):
    """-> for each request {token: log-probability} of the tokens that are kept."""
    lines = "".join(json.dumps(DEFAULTS | r | {"logits": r["logits"].tolist()}) + "\n" for r in requests)
    done = subprocess.run([FERRY.parent.parent / "tests/sampling_tool"], input=lines, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return [dict(zip(a["kept"], a["logprobs"], strict=True)) for a in map(json.loads, done.stdout.splitlines())]


def theirs(request):
    """vLLM's order: penalties, temperature, min-p, top-k, top-p; each by transformers, the OpenAI penalties in torch."""
    r = DEFAULTS | request
    scores = request["logits"][None].clone()
    processors = LogitsProcessorList()
    seen = torch.tensor([r["prompt"] + r["output"]], dtype=torch.long)
    if r["repetition_penalty"] != 1:
        scores = RepetitionPenaltyLogitsProcessor(r["repetition_penalty"])(seen, scores)
    counts = torch.bincount(torch.tensor(r["output"], dtype=torch.long), minlength=scores.shape[1])
    scores = scores - r["frequency_penalty"] * counts - r["presence_penalty"] * (counts > 0)
    if r["temperature"] != 1:
        processors.append(TemperatureLogitsWarper(r["temperature"]))
    if r["min_p"] > 0:
        processors.append(MinPLogitsWarper(r["min_p"]))
    if r["top_k"] > 0:
        processors.append(TopKLogitsWarper(r["top_k"]))
    if r["top_p"] < 1:
        processors.append(TopPLogitsWarper(r["top_p"]))
    log_probs = torch.log_softmax(processors(seen, scores)[0], 0)
    return {i: x for i, x in enumerate(log_probs.tolist()) if x != -float("inf")}


def requests(vocabulary, count, generator):
    for _ in range(count):
        request = {"logits": torch.randn(vocabulary, generator=generator) * random.choice([0.5, 2.0, 6.0])}
        prompt = torch.randint(vocabulary, (random.randrange(1, 60),), generator=generator).tolist()
        output = torch.randint(vocabulary, (random.randrange(60),), generator=generator).tolist()
        yield request | {"prompt": prompt, "output": output + output[:10]} | {
            name: random.choice(values) for name, values in {
                "temperature": [1.0, 0.5, 0.9, 1.7], "top_k": [0, 1, 2, 20, 300, vocabulary, vocabulary + 5], "top_p": [1.0, 0.95, 0.5, 0.1, 0.001],
                "min_p": [0.0, 0.02, 0.3, 1.0], "repetition_penalty": [1.0, 1.2, 0.8], "presence_penalty": [0.0, 0.5, -1.0],
                "frequency_penalty": [0.0, 0.3, -0.2]}.items() if random.random() < 0.6}


@pytest.mark.parametrize("vocabulary", [7, 1000, 32000])
def test_processed_distribution(vocabulary):
    """The same tokens are kept, and their log-probabilities agree as fp32 allows."""
    random.seed(vocabulary)
    asked = list(requests(vocabulary, 400 if vocabulary <= 1000 else 30, torch.Generator().manual_seed(vocabulary)))
    for request, mine in zip(asked, ours(asked), strict=True):
        expected = theirs(request)
        shown = {k: v for k, v in request.items() if k not in ("logits", "prompt", "output")}
        assert mine.keys() == expected.keys(), f"{shown}: {len(mine)} kept, expected {len(expected)}"
        worst = max(abs(mine[i] - expected[i]) for i in mine)
        assert worst <= BOUND, f"{shown}: off by {worst}"


def test_ties_at_the_edge():
    """Tokens that equal the k-th largest stay, as in transformers; of those that straddle top-p the smaller ids stay, as many as there."""
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0, -1.0])
    by_count, by_mass = ours([{"logits": logits, "top_k": 2}, {"logits": logits, "top_p": 0.75}])
    assert set(by_count) == set(theirs({"logits": logits, "top_k": 2})) == {1, 2, 4}
    assert set(by_mass) == {0, 1, 2, 4}
    assert len(by_mass) == len(theirs({"logits": logits, "top_p": 0.75}))
