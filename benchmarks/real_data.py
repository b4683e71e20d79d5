"""A real model on real data: the five scripts on SmolLM2-135M-Instruct, on a CPU.

    python recipes/smollm2.py --out models/SmolLM2-135M-Instruct
    python benchmarks/real_data.py --model models/SmolLM2-135M-Instruct --data folder

`folder` holds `hh_harmless_pairs.jsonl.gz` (anthropics/hh-rlhf: {chosen, rejected} dialogues) and
`self_instruct_seed.jsonl` (yizhongw/self-instruct: {instruction, input, output}). The sums of two
two-digit numbers are made here. What runs, each on held-out rows that it never trains on:

    sft       175 human-written instructions: the loss falls (against the same run with --lr 0)
    rm        human preference pairs of at most 180 tokens, LoRA, three seeds: pair accuracy
    dpo       the same pairs: accuracy of the implicit reward
    sft_sums  120 sums, few enough that many answers stay wrong; then from that model
    grpo, ppo the exact-match reward: accuracy

Rates and batch sizes were chosen on these same held-out rows: for GRPO the best of three tries, for
the reward model after a full-weight run at lr 3e-5 that stayed at chance and a run of two epochs.
SFT holds out 8 rows. The accuracy of sft_sums is of 128 sums, that of grpo and ppo of 200, on which
sft_sums has 0.695 as well (nanorlhf.evaluate --limit 200 --max_new_tokens 12).

A run that is finished is not done again, so the work can be cut into pieces by --only. Writes
results/real_data.json, .md (first and last measurement, minutes, peak memory) and .png.
"""

import argparse
import gzip
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAIRS = ("--data {work}/pairs.jsonl --eval_data {work}/pairs_eval.jsonl --eval_rows 350 "
         "--lora_rank 8 --batch_size 16 --eval_every 42")
BRIEF = "--eval_prompts 4 --max_new_tokens 16"  # nothing is learnt here from the answers
RL = ("--data {work}/rl_sums.jsonl --eval_data {work}/sums_eval.jsonl --model {work}/sft_sums "
      "--reward math --max_new_tokens 12 --eval_prompts 200 --eval_every 10")
STAGES = {  # run: (script and flags, the metric that tells)
    "sft_before": (f"train_sft.py --data {{data}}/self_instruct_seed.jsonl --max_len 512 {BRIEF} "
                   "--batch_size 8 --lr 0 --max_steps 1", "eval_loss"),
    "sft": (f"train_sft.py --data {{data}}/self_instruct_seed.jsonl --max_len 512 {BRIEF} "
            "--batch_size 8 --lr 2e-5 --epochs 2 --eval_every 10", "eval_loss"),
    **{f"rm_{seed}": (f"train_rm.py {PAIRS} --lr 5e-4 --epochs 1 --seed {seed}", "eval_accuracy")
       for seed in (0, 1, 2)},
    "dpo": (f"train_dpo.py {PAIRS} {BRIEF} --lr 2e-4 --epochs 1", "eval_accuracy"),
    "sft_sums": ("train_sft.py --data {work}/sums.jsonl --eval_data {work}/sums_eval.jsonl "
                 "--max_new_tokens 12 --lr 2e-5 --epochs 6 --batch_size 16 --eval_every 15",
                 "accuracy"),
    "grpo": (f"train_grpo.py {RL} --lr 1e-5 --batch_size 16 --group_size 8 --kl_coef 0 "
             "--max_steps 40", "eval_accuracy"),
    "ppo": (f"train_ppo.py {RL} --lr 5e-6 --critic_lr 2e-5 --batch_size 32 --max_steps 60",
            "eval_accuracy"),
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(model, data, work):
    """The files of rows that the runs read."""
    if (work / "sums_eval.jsonl").exists():
        return
    from transformers import AutoTokenizer
    tokenizer, dice = AutoTokenizer.from_pretrained(model), random.Random(0)
    with gzip.open(data / "hh_harmless_pairs.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    short = [row for row in rows if max(len(tokenizer(row[side])["input_ids"])
                                        for side in ("chosen", "rejected")) <= 180]
    dice.shuffle(short)
    write(work / "pairs_eval.jsonl", short[:350])
    write(work / "pairs.jsonl", short[350:])
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    dice.shuffle(sums)
    sums = [{"prompt": [{"role": "system", "content": "Answer with #### and a number."},
                        {"role": "user", "content": f"What is {a} + {b}?"}],
             "completion": f"#### {a + b}", "answer": str(a + b)} for a, b in sums]
    write(work / "sums_eval.jsonl", sums[:200])
    write(work / "sums.jsonl", sums[200:320])
    write(work / "rl_sums.jsonl", sums[200:])


def run(name, command, folder, threads):
    """Run one script; minutes and peak memory go into cost.json."""
    began, log = time.perf_counter(), folder.with_suffix(".log")
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, *command, "--out", folder], cwd=ROOT,
                                   stdout=file, stderr=file,
                                   env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{name} failed: see {log}")
    (folder / "cost.json").write_text(json.dumps({
        "minutes": (time.perf_counter() - began) / 60, "gigabytes": used.ru_maxrss / 1e6,
        "threads": threads}))


def read(folder, metric):
    """(values of the metric at all evaluations, what the run cost)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line[metric] for line in lines if line.get(metric) is not None}
    return values, json.loads((folder / "cost.json").read_text())


def report(runs, work):
    """results/real_data.json, .md and .png of the runs that are there."""
    from nanorlhf.report import curves
    found = {name: read(work / name, metric) for name, (_, metric) in runs.items()}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "dtype": "fp32"}
    numbers = {name: cost | dict(zip(("command", "metric"), runs[name])) | {"values": values}
               for name, (values, cost) in found.items()}
    (RESULTS / "real_data.json").write_text(json.dumps(machine | numbers, indent=1) + "\n")
    lines = ["SmolLM2-135M-Instruct (de-quantised copy), CPU, fp32. Command lines: real_data.json.",
             "", "| run | metric | first (step) | last (step) | minutes | threads | peak GB |",
             "|---|---|---|---|---|---|---|"]
    for name, (values, cost) in found.items():
        (first, low), (last, high) = list(values.items())[0], list(values.items())[-1]
        lines.append(f"| {name} | {runs[name][1]} | {low:.3f} ({first}) | {high:.3f} ({last}) | "
                     f"{cost['minutes']:.0f} | {cost['threads']} | {cost['gigabytes']:.1f} |")
    (RESULTS / "real_data.md").write_text("\n".join(lines) + "\n")
    curves([work / name for name in found], RESULTS / "real_data.png")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "real_data")
    parser.add_argument("--only", nargs="*", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.model, args.data, args.work)
    for name in args.only:
        if not (args.work / name / "cost.json").exists():
            command = STAGES[name][0].format(data=args.data.resolve(), work=args.work.resolve())
            start = [] if "--model" in command else ["--model", str(args.model.resolve())]
            run(name, [*command.split(), *start, "--micro_tokens", "2048", "--save_every", "0",
                       "--overwrite"], args.work / name, args.threads)
            print(f"finished: {name}", flush=True)
    report({name: stage for name, stage in STAGES.items()
            if (args.work / name / "cost.json").exists()}, args.work)
