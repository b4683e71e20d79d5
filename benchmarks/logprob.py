"""The log-prob head against its rivals: time and peak memory of one forward and backward pass.

    python benchmarks/logprob.py                                          CPU, fp32
    python benchmarks/logprob.py --device cuda --tokens 8192 --vocab 151936 --hidden 4096
    python benchmarks/logprob.py --scripts      what it does to train_sft.py and train_grpo.py

Every run of every method is a process of its own, the methods take turns, the best of --repeats
runs counts. On a CPU the time is the process's CPU time on one thread (other jobs on the machine
disturb it least) and the memory is that of the process at its peak less that before; on a GPU it
is time between events, after a first run, and memory as torch's allocator counts it. The gradients
of hidden and weight, which every method returns, count as memory. "gradient in forward" is told
the gradient of the log-probs beforehand, as train_sft.py does. Writes results/logprob.json, .md
and .png (with --device cuda logprob-cuda.*).

--scripts runs two steps of train_sft.py and train_grpo.py on a random model of SmolLM2-135M's
shape, once with our head and once with the plain form of it: results/logprob-scripts.md.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHUNK = 512


# --- the methods: (hidden, weight, targets, whether entropy is wanted) -> logp, entropy or None ---


def naive(hidden, weight, targets, entropy):
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    return (logp.gather(1, targets[:, None])[:, 0],
            -(logp.exp() * logp).sum(-1) if entropy else None)


def selective(hidden, weight, targets, entropy):
    """Gather, less log-sum-exp: one (N, V) tensor less to keep."""
    z = (hidden @ weight.T).float()
    lse = z.logsumexp(-1)
    logp = z.gather(1, targets[:, None])[:, 0] - lse
    return logp, lse - (z.softmax(-1) * z).sum(-1) if entropy else None


def checkpointed(hidden, weight, targets, entropy):
    """Selective on chunks of tokens, made again in the backward pass."""
    parts = [checkpoint(selective, h, weight, t, entropy, use_reentrant=False)
             for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK))]
    return (torch.cat([logp for logp, _ in parts]),
            torch.cat([e for _, e in parts]) if entropy else None)


def torch_chunked(hidden, weight, targets, entropy):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="none",
                                   options=options), None


def trl_chunked(hidden, weight, targets, entropy):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as width
    logp, e, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, width, None, 1.0,
                                               ("entropy",) if entropy else ())
    return logp, e


def liger(hidden, weight, targets, entropy):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    return -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none"), None


def cut_cross_entropy(hidden, weight, targets, entropy):
    from cut_cross_entropy import linear_cross_entropy
    return -linear_cross_entropy(hidden, weight, targets, reduction="none"), None


def ours(hidden, weight, targets, entropy, upstream=None):
    from nanorlhf.logprob import token_logprobs
    return token_logprobs(hidden, weight, targets, upstream=upstream)


METHODS = {  # name: (function, knows entropy, needs)
    "naive": (naive, True, None),
    "selective": (selective, True, None),
    "checkpointed chunks": (checkpointed, True, None),
    "torch linear_cross_entropy": (torch_chunked, False, None),
    "TRL chunked": (trl_chunked, True, "trl"),
    "Liger": (liger, False, "liger_kernel"),
    "cut-cross-entropy": (cut_cross_entropy, False, "cut_cross_entropy"),
    "nanorlhf": (ours, True, None),
    "nanorlhf, gradient in forward": (ours, False, None),
}


def available(name, entropy, device):
    fn, knows_entropy, needs = METHODS[name]
    if fn is torch_chunked and not hasattr(F, "linear_cross_entropy"):
        return False
    if fn in (liger, cut_cross_entropy) and device == "cpu":
        return False
    return (knows_entropy or not entropy) and (needs is None or find_spec(needs) is not None)


# --- one run, in a process of its own -------------------------------------------------------------


def process_mb(key):
    """A line of /proc/self/status in MB: VmRSS now, VmHWM at its peak (Linux only)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), 0.0)


def measure(method, args):
    """{forward, backward: seconds, extra_mb} of one forward and backward pass."""
    fn, _, _ = METHODS[method]
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, device=args.device, dtype=dtype)
    weight = torch.randn(args.vocab, args.hidden, device=args.device, dtype=dtype)
    weight.mul_(args.hidden**-0.5)
    targets = torch.randint(args.vocab, (args.tokens,), device=args.device)
    g = torch.randn(2, args.tokens, device=args.device)

    def clock():
        if cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def run(hidden, weight, targets, g):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        times = [clock()]
        known = {"upstream": g[0]} if "gradient in" in method else {}
        logp, entropy = fn(*leaves, targets, args.entropy, **known)
        times.append(clock())
        loss = (logp * g[0]).sum()
        if args.entropy:
            loss = loss + (entropy * g[1]).sum()
        loss.backward()
        times.append(clock())
        return times[1] - times[0], times[2] - times[1]

    run(hidden[:8], weight[:64], targets[:8] % 64, g[:, :8])  # imports, threads, compiled kernels
    if cuda:
        run(hidden, weight, targets, g)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        before = process_mb("VmRSS")
    forward, backward = run(hidden, weight, targets, g)
    extra = ((torch.cuda.max_memory_allocated() - before) / 2**20 if cuda
             else process_mb("VmHWM") - before)
    return {"forward": forward, "backward": backward, "extra_mb": extra}


# --- the scripts, with our head and with the plain one --------------------------------------------


def run_script(task, head, folder):
    """Print what benchmarks/train.py measures of two steps of a script."""
    import train
    from nanorlhf import logprob
    plan = train.SIZES["135m"] | {"new": 128}
    if head == "plain":
        logprob.token_logprobs = lambda *args, upstream=None, **kwargs: (
            logprob.token_logprobs_reference(*args, **kwargs))
    clock = train.run_ours(task, plan, Path(folder))
    steps = plan["rl_steps" if task == "grpo" else "steps"]
    print(json.dumps(clock.result(steps, plan[train.BATCH[task]])))


def scripts():
    import train
    lines = ["# The head inside the scripts: a 135M-shaped model, fp32, one CPU thread", "",
             "| script | head | seconds a step | MB above the imports |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        train.make_inputs("135m", Path(folder))
        for task in ("sft", "grpo"):
            for head in ("plain", "ours"):
                out = subprocess.run([sys.executable, __file__, "--script", task, head, folder],
                                     check=True, capture_output=True, text=True).stdout
                found = json.loads(out.splitlines()[-1])
                lines.append(f"| train_{task}.py | {head} | {found['seconds_per_step']:.1f} | "
                             f"{found['extra_mb']:.0f} |")
                print(lines[-1], flush=True)
    (RESULTS / "logprob-scripts.md").write_text("\n".join(lines) + "\n")


# --- all of them ----------------------------------------------------------------------------------


def machine(device):
    def package(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else [platform.processor()]
    found = {"cpu": names[0], "cores": len(names), "threads": 1,
             "python": platform.python_version()}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found | {name: package(name) for name in ("torch", "triton", "trl", "liger-kernel",
                                                     "cut-cross-entropy") if package(name)}


def table(results, entropy):
    base = results["naive"]
    seconds = base["forward"] + base["backward"]
    lines = [f"**{'With' if entropy else 'Without'} entropy**", "",
             "| method | forward s | backward s | time / naive | extra MB | less memory |",
             "| --- | --- | --- | --- | --- | --- |"]
    for name, r in results.items():
        lines.append(f"| {name} | {r['forward']:.3g} | {r['backward']:.3g} | "
                     f"{(r['forward'] + r['backward']) / seconds:.2f} | {r['extra_mb']:.0f} | "
                     f"{base['extra_mb'] / r['extra_mb']:.1f}x |")
    return "\n".join(lines)


def draw(tables, path, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(len(tables), 2, figsize=(10, 2.6 * len(tables)), squeeze=False)
    for row, (entropy, results) in zip(axes, tables.items()):
        names = list(results)[::-1]
        colours = ["tab:orange" if name.startswith("nanorlhf") else "tab:gray" for name in names]
        for axis, values, label in (
                (row[0], [results[n]["forward"] + results[n]["backward"] for n in names],
                 "seconds, forward + backward"),
                (row[1], [results[n]["extra_mb"] for n in names], "extra memory at the peak, MB")):
            axis.barh(names, values, color=colours)
            axis.set_xlabel(f"{label} ({entropy} entropy)")
            axis.spines[["top", "right"]].set_visible(False)
        row[1].set_yticks([])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--method", choices=METHODS, help="measure this one, print JSON, stop")
    parser.add_argument("--entropy", action="store_true", help="with --method: entropy too")
    parser.add_argument("--scripts", action="store_true", help="measure the scripts instead")
    parser.add_argument("--script", nargs=3, metavar=("TASK", "HEAD", "FOLDER"),
                        help="measure one of them, print JSON, stop")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.method or args.script:
        torch.set_num_threads(1)
    if args.script:
        return run_script(*args.script)
    if args.scripts:
        return scripts()
    if args.method:
        print(json.dumps(measure(args.method, args)))
        return
    size = [f"--{key}={getattr(args, key)}" for key in ("device", "tokens", "vocab", "hidden")]
    jobs = [(entropy, name) for entropy in (False, True) for name in METHODS
            if available(name, entropy, args.device)]
    runs = {job: [] for job in jobs}
    for _ in range(args.repeats):
        for entropy, name in jobs:
            out = subprocess.run([sys.executable, __file__, *size, "--method", name,
                                  *["--entropy"] * entropy], check=True, capture_output=True,
                                 text=True).stdout
            runs[entropy, name].append(json.loads(out.splitlines()[-1]))
            print(name, "with" if entropy else "without", "entropy:", runs[entropy, name][-1],
                  flush=True)
    best = {key: {name: min(runs[entropy, name], key=lambda r: r["forward"] + r["backward"])
                  for e, name in jobs if e == entropy}
            for key, entropy in (("without", False), ("with", True))}
    shape = f"{args.tokens} tokens x {args.vocab} words x {args.hidden}, " + (
        "bf16" if args.device == "cuda" else "fp32")
    host = machine(args.device)
    text = [f"# Log-prob head: {shape}, forward + backward, best of {args.repeats}", "",
            ", ".join(f"{key} {value}" for key, value in host.items()), "",
            table(best["without"], False), "", table(best["with"], True), ""]
    path = RESULTS / ("logprob" if args.device == "cpu" else "logprob-cuda")
    RESULTS.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({
        "machine": host, "shape": shape, "best": best,
        "runs": [{"method": name, "entropy": entropy, "runs": runs[entropy, name]}
                 for entropy, name in jobs]}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(text))
    draw(best, path.with_suffix(".png"), shape)
    print("\n".join(text))


if __name__ == "__main__":
    main()
