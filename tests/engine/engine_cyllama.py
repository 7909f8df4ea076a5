"""Greedy tokens from cyllama (llama.cpp b9190), in its own process: `python engine_cyllama.py FILE TOKENS COUNT`."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print a JSON list of `COUNT` tokens that follow the JSON list `TOKENS`."""
    from cyllama.llama import llama_cpp as engine

    path, tokens, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = engine.LlamaModel(path, engine.LlamaModelParams())
    params = engine.LlamaContextParams()
    params.n_ctx = 256
    params.n_threads = params.n_threads_batch = 1
    context = engine.LlamaContext(model, params)
    sampler = engine.LlamaSampler(engine.LlamaSamplerChainParams())
    sampler.add_greedy()
    found: list[int] = []
    given, past = tokens, 0
    while len(found) < count:
        batch = engine.LlamaBatch(n_tokens=len(given), embd=0, n_seq_max=1)
        batch.set_batch(given, n_past=past, logits_all=False)
        context.decode(batch)
        past += len(given)
        found.append(sampler.sample(context, -1))
        given = found[-1:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
