"""The sampler against HF `generate` (static batches) and `generate_batch` (continuous batching).

    python benchmarks/sampler.py                    SmolLM2-135M's shape and the embedded world's
    python benchmarks/sampler.py --shape tiny       the embedded world's model alone, two minutes
    python benchmarks/sampler.py --device cuda      bf16, with vLLM where it is installed

Weights are random and no token ends a sample: lengths are set by the load, so that all engines
make the same number of tokens. All run in this one process and take turns; the best of --repeats
counts. On a CPU the time is the process's CPU time on one thread, which other jobs disturb least.
The limit of a load is what its decode must at least take: per step the weights are read once and
the keys and values of all running samples once, at the bandwidth measured in this run, or the
products are computed at the measured rate, whichever is longer. Writes results/sampler.json, .md
and .png (with --device cuda sampler-cuda.*).
"""

import argparse
import json
import os
import platform
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # HF's continuous batching decodes in a thread

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

from nanorlhf import toy
from nanorlhf.sampler import Sampler, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Load:
    prompts: list[int]  # length of each prompt
    lengths: list[int]  # tokens to make for each of its samples
    slots: int  # samples at once
    n: int = 1  # samples of each prompt
    temperature: float = 0.0


def geometric(count, mean, cap, seed=0):
    return np.minimum(np.random.default_rng(seed).geometric(1 / mean, count), cap).tolist()


def loads(shape):
    """{name: Load} of the model of this shape."""
    if shape == "tiny":
        prompts = np.random.default_rng(1).integers(12, 19, 512).tolist()
        return {
            "equal lengths, 8": Load([15] * 8, [60] * 8, 8),
            "equal lengths, 32": Load([15] * 32, [60] * 32, 32),
            "equal lengths, 128": Load([15] * 128, [60] * 128, 128),
            "geometric lengths, 128 at once": Load(prompts, geometric(512, 40, 160), 128),
            "the same, sampled": Load(prompts, geometric(512, 40, 160), 128, temperature=1.0),
        }
    return {
        "equal lengths, 1": Load([32], [64], 1),
        "equal lengths, 8": Load([32] * 8, [48] * 8, 8),
        "equal lengths, 32": Load([32] * 32, [32] * 32, 32),
        "the same, sampled": Load([32] * 32, [32] * 32, 32, temperature=1.0),
        "geometric lengths, 16 at once": Load([32] * 64, geometric(64, 40, 160), 16),
        "8 samples of a prompt": Load([256] * 2, [32] * 2, 16, n=8),
    }


def new_model(shape):
    if shape == "tiny":
        model = toy.new_model()
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(
                vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
                tie_word_embeddings=True))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


class NoTokenizer:
    """Nothing ends a sample, and nobody reads it."""

    bos_token_id = eos_token_id = None

    def decode(self, ids, skip_special_tokens):
        return ""


# --- the engines: (model, prompts, load) -> tokens of every sample, and numbers of their own ------


def ours(model, prompts, load, **options):
    params = [SamplingParams(n=load.n, temperature=load.temperature, max_new_tokens=length, seed=0)
              for length in load.lengths]
    sampler = Sampler(model, NoTokenizer(), max_seqs=load.slots, **options)
    return [c.token_ids for c in sampler.generate(prompts, params)], sampler.stats


def options_of(load):
    if load.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": load.temperature, "top_k": 0, "top_p": 1.0}


@torch.no_grad()
def generate(model, prompts, load):
    """Batches in order of arrival, padded on the left; a batch lasts as long as its longest."""
    model.set_attn_implementation("sdpa")
    done, size = [], max(1, load.slots // load.n)
    for first in range(0, len(prompts), size):
        batch, lengths = prompts[first:first + size], load.lengths[first:first + size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch],
                            device=model.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths),
                             num_return_sequences=load.n, **options_of(load))
        rows = out[:, width:].tolist()
        done += [row[:lengths[i // load.n]] for i, row in enumerate(rows)]
    return done, {}


def generate_batch(model, prompts, load):
    """HF's continuous batching, a cache as large as ours; its CPU defaults but for the sizes."""
    model.set_attn_implementation("sdpa")
    page = 16
    blocks = sum(sorted(-(-(len(p) + length) // page) for p, length in
                        zip(prompts, load.lengths) for _ in range(load.n))[-load.slots - 1:])
    config = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks + load.slots, max_requests_per_batch=load.slots,
        max_batch_tokens=max(512, load.slots), use_async_batching=False, use_cuda_graph=False)
    generation = transformers.GenerationConfig(
        eos_token_id=-1, pad_token_id=0, num_return_sequences=load.n, **options_of(load))
    done = {}
    with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config) as manager:
        for i, (prompt, length) in enumerate(zip(prompts, load.lengths)):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=length)
        while len(done) < len(prompts) * load.n:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch gave up")
    model.set_attn_implementation("sdpa")
    return [done[key] for key in sorted(done, key=lambda k: (int(k.split("_")[0]), k))], {}


ENGINES = {"nanorlhf": ours, "generate": generate, "generate_batch": generate_batch}

if __name__ == "__main__":
    import sys
    torch.set_num_threads(1)
    shape = sys.argv[1]
    model = new_model(shape)
    gen = torch.Generator().manual_seed(0)
    for name, load in loads(shape).items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=gen).tolist() for n in load.prompts]
        best = {}
        outs = {}
        for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 2):
            for e, fn in ENGINES.items():
                if len(sys.argv) > 4 and e not in sys.argv[4]: continue
                t = time.process_time()
                outs[e], stats = fn(model, prompts, load)
                best[e] = min(best.get(e, 1e9), time.process_time() - t)
        print(name, {e: round(s, 3) for e, s in best.items()}, {e: round(s / best["nanorlhf"], 2) for e, s in best.items()},
              [sum(a == b for a, b in zip(outs["nanorlhf"], o)) for o in outs.values()], [len(o) for o in outs.values()], flush=True)
