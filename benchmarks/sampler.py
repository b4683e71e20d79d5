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
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # HF's continuous batching decodes in a thread

import numpy as np
import torch
import transformers
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from nanorlhf import toy  # noqa: E402
from nanorlhf.sampler import Sampler, SamplingParams  # noqa: E402


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
        "8 samples of a prompt": Load([256] * 2, [32] * 2, 16, n=8, temperature=1.0),
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


def vllm(model, prompts, load):
    """On CUDA, where it is installed: the same weights through a saved checkpoint."""
    from tempfile import TemporaryDirectory

    from vllm import LLM, SamplingParams as Params
    if not hasattr(model, "vllm"):
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model.vllm = [LLM(folder, skip_tokenizer_init=True, max_num_seqs=load.slots)]
    params = [Params(n=load.n, temperature=load.temperature, max_tokens=length, ignore_eos=True,
                     detokenize=False) for length in load.lengths]
    out = model.vllm[0].generate([{"prompt_token_ids": p} for p in prompts], params)
    return [list(o.token_ids) for request in out for o in request.outputs], {}


ENGINES = {"nanorlhf": ours, "generate": generate, "generate_batch": generate_batch}


# --- the limit ------------------------------------------------------------------------------------


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def machine_rates(model):
    """(bytes/s of a matrix times a vector too large for any cache, flop/s of a large product)."""
    dtype, device, rates = model.dtype, model.device, []
    for n, m, k in ((16384, 1, 8192), (2048, 2048, 2048)):
        a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((n, k), (k, m)))
        times = []
        for _ in range(5):
            began = clock(device.type)
            a @ b
            times.append(clock(device.type) - began)
        rates.append((a.nbytes if m == 1 else 2 * n * m * k) / min(times))
    return rates


def limit(model, prompts, load, steps, rates):
    """Least seconds for the decode of a load in so many steps."""
    config, weights = model.config, sum(p.numel() for p in model.parameters())  # tied head: once
    head_dim = config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim  # of one token
    tokens = load.n * sum(load.lengths)
    context = load.n * sum(length * len(p) + length * (length - 1) // 2
                           for p, length in zip(prompts, load.lengths))
    read = (steps * weights + context * kv) * model.dtype.itemsize
    return max(read / rates[0], 2 * weights * tokens / rates[1])


# --- runs, tables, picture ------------------------------------------------------------------------


def measure(model, load, engines, repeats, rates):
    """All numbers of one load."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist()
               for n in load.prompts]
    seconds, outputs = {name: [] for name in engines}, {}
    for _ in range(repeats):
        for name, engine in engines.items():
            began = clock(model.device.type)
            outputs[name], stats = engine(model, prompts, load)
            seconds[name].append(clock(model.device.type) - began)
            if name == "nanorlhf":
                numbers = {key: stats[key] for key in ("steps", "kv_waste", "peak_blocks",
                           "preemptions", "prefix_blocks_saved", "mean_batch")}
    lengths = [length for length in load.lengths for _ in range(load.n)]
    assert all([*map(len, rows)] == lengths for rows in outputs.values())
    best = {name: min(times) for name, times in seconds.items()}
    numbers |= {"seconds": best, "tokens": sum(lengths), "same_tokens": {
        name: sum(a == b for a, b in zip(rows, outputs["nanorlhf"])) / len(lengths)
        for name, rows in outputs.items()},
        "share_of_limit": limit(model, prompts, load, numbers["steps"], rates) / best["nanorlhf"]}
    if load.temperature == 0:
        for size in (4, 8):
            if len(lengths) > 64:
                numbers[f"kv_waste_{size}"] = ours(model, prompts, load, block_size=size)[1][
                    "kv_waste"]
    if load.n > 1:  # every sample a prompt of its own
        alone = Load(load.prompts * load.n, load.lengths * load.n, load.slots)
        numbers["peak_blocks_unshared"] = ours(model, prompts * load.n, alone)[1]["peak_blocks"]
    return numbers


def markdown(results):
    lines = []
    for shape, table in results["shapes"].items():
        lines += [f"{shape}: {results['models'][shape]}", "",
                  "| load | tokens/s | over generate | over generate_batch | share of limit | "
                  "KV waste at block size 16, 8, 4 | blocks |", "|---|---|---|---|---|---|---|"]
        for name, n in table.items():
            ours, *others = n["seconds"].values()
            waste = ", ".join(f"{100 * w:.1f} %" for w in (n["kv_waste"], n.get("kv_waste_8"),
                                                          n.get("kv_waste_4")) if w is not None)
            blocks = f"{n['peak_blocks']}"
            if "peak_blocks_unshared" in n:
                blocks += f" ({n['peak_blocks_unshared']} unshared)"
            ratios = " | ".join(f"{other / ours:.2f}x" for other in others)
            lines.append(f"| {name} | {n['tokens'] / ours:.0f} | {ratios} | "
                         f"{100 * n['share_of_limit']:.0f} % | {waste} | {blocks} |")
        lines.append("")
    return "\n".join(lines) + "\n".join(f"{k}: {v}" for k, v in results["machine"].items()) + "\n"


def picture(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(results["shapes"]), figsize=(12, 4), squeeze=False)
    for ax, (shape, table) in zip(axes[0], results["shapes"].items()):
        for i, engine in enumerate(next(iter(table.values()))["seconds"]):
            speed = [n["seconds"]["generate"] / n["seconds"][engine] for n in table.values()]
            ax.barh([y + 0.27 * (1 - i) for y in range(len(table))], speed, 0.25, label=engine)
        ax.set_yticks(range(len(table)), table)
        ax.invert_yaxis()
        ax.set(title=shape, xlabel="speed, generate = 1")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if "model name" in line),
                platform.processor())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["all", "135m", "tiny"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda" and find_spec("vllm"):
        ENGINES["vllm"] = vllm
    results = {"shapes": {}, "models": {}, "machine": {
        "processor": processor() if args.device == "cpu" else torch.cuda.get_device_name(),
        "cores": os.cpu_count(), "threads": 1, "torch": torch.__version__,
        "transformers": transformers.__version__}}
    for shape in ["135m", "tiny"] if args.shape == "all" else [args.shape]:
        model = new_model(shape).to(args.device)
        if args.device == "cuda":
            model = model.to(torch.bfloat16)
        rates = machine_rates(model)
        count = sum(p.numel() for p in model.parameters())
        results["models"][shape] = (f"{count / 1e6:.1f} million weights, {model.dtype}, "
                                    f"{rates[0] / 1e9:.1f} GB/s, {rates[1] / 1e9:.0f} GFLOP/s")
        table = results["shapes"][shape] = {}
        for name, load in loads(shape).items():
            table[name] = measure(model, load, ENGINES, args.repeats, rates)
            print(shape, name, {k: round(v, 2) for k, v in table[name]["seconds"].items()},
                  flush=True)
    path = RESULTS / ("sampler" if args.device == "cpu" else "sampler-cuda")
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(results))
    picture(results, path.with_suffix(".png"))
    print(markdown(results))
