"""The whole chain on the embedded world for several seeds: the numbers that README quotes.

    python benchmarks/chain.py --seeds 0 1 2

Runs the five scripts with their defaults for every seed, measures every model on 256 held-out
questions and writes results/chain.json and results/chain.md (mean, lowest and highest of each
number). About seven minutes a seed on one CPU core.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STAGES = {  # name: (script, flags)
    "sft": ("train_sft.py", []),
    "rm": ("train_rm.py", ["--model", "{runs}/sft"]),
    "dpo": ("train_dpo.py", ["--model", "{runs}/sft"]),
    "ppo": ("train_ppo.py", ["--model", "{runs}/sft", "--reward_model", "{runs}/rm"]),
    "grpo": ("train_grpo.py", ["--model", "{runs}/sft"]),
}


def run(*command):
    """CPU seconds that a command took; its output is shown only if it fails."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began


def evaluate(*flags):
    out = RESULTS / f"numbers-{os.getpid()}.json"
    run("-m", "nanorlhf.evaluate", "--out", out, *flags)
    numbers = json.loads(out.read_text())
    out.unlink()
    return numbers


def chain(seed, runs):
    """{stage: numbers} of one seed."""
    table = {}
    for stage, (script, flags) in STAGES.items():
        seconds = run(script, *(flag.format(runs=runs) for flag in flags), "--seed", seed,
                      "--out", runs / stage, "--overwrite")
        if stage == "rm":
            numbers = evaluate("--model", runs / "rm", "--pairs_from", runs / "sft", "--limit", 400)
        else:
            numbers = evaluate("--model", runs / stage, "--limit", 256)
        table[stage] = numbers | {"seconds": seconds}
        print(f"seed {seed} {stage}: " + ", ".join(
            f"{name} {value:.3f}" for name, value in table[stage].items()
            if name in ("gold_score", "worked_share", "accuracy", "seconds")), flush=True)
    best = evaluate("--model", runs / "sft", "--limit", 256, "--n", 16,
                    "--reward_model", runs / "rm")
    table["best-of-n"] = {name: value for name, value in best.items() if "@" in name}
    return table


def spread(seeds, stage, name):
    values = [table[stage][name] for table in seeds.values()]
    return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def markdown(seeds):
    lines = [f"Seeds {', '.join(seeds)}; mean (lowest to highest), 256 held-out questions.", "",
             "| model | gold score | worked share | response length | CPU seconds |",
             "|---|---|---|---|---|"]
    for stage in STAGES:
        if stage != "rm":
            names = ("gold_score", "worked_share", "response_length", "seconds")
            lines.append(f"| {stage} | "
                         + " | ".join(spread(seeds, stage, name) for name in names) + " |")
    for k in (1, 2, 4, 8, 16):
        gold = spread(seeds, "best-of-n", f"best_of@{k}")
        lines.append(f"| best-of-{k} | {gold} | | | |")
    accuracy, seconds = spread(seeds, "rm", "accuracy"), spread(seeds, "rm", "seconds")
    lines += ["", f"Reward model, accuracy on 400 noise-free on-policy pairs: {accuracy}; "
              f"{seconds} CPU seconds.",
              "", f"{platform.machine()}, one thread each, Python {platform.python_version()}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "chain")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    tables = {str(seed): chain(seed, args.runs / str(seed)) for seed in args.seeds}
    (RESULTS / "chain.json").write_text(json.dumps(tables, indent=1) + "\n")
    (RESULTS / "chain.md").write_text(markdown(tables))
    print(markdown(tables))
