"""Over-optimisation, recorded: PPO that trusts a weak reward model, without a KL penalty.

    python benchmarks/overoptimise.py --sft runs/sft

Trains a reward model on 96 pairs only and lets PPO climb it for 40 iterations with --kl_coef 0. The
proxy (the reward model's score) keeps its height while the gold score, after a first gain, falls
(Gao et al. 2023, "Scaling laws for reward model overoptimization"). Writes
results/overoptimise.json and results/overoptimise.png. About three minutes on one CPU core.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from chain import RESULTS, ROOT, run


def picture(rows, path):
    figure, axis = plt.subplots(figsize=(6, 4))
    evaluated = [row for row in rows if "eval_gold_score" in row]
    axis.plot([row["step"] for row in evaluated], [row["eval_gold_score"] for row in evaluated],
              "o-", color="C2", label="gold score, held out")
    axis.set_xlabel("PPO iteration")
    axis.set_ylabel("gold score")
    axis.set_ylim(0, 1)
    proxy = axis.twinx()
    proxy.plot([row["step"] for row in rows], [row["reward_mean"] for row in rows], color="C3",
               label="proxy: the reward model's score")
    proxy.set_ylabel("proxy score")
    figure.legend(loc="lower right", bbox_to_anchor=(0.88, 0.13), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sft", type=Path, default=ROOT / "runs" / "sft")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "overoptimise")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    run("train_rm.py", "--model", args.sft, "--toy_rows", 96, "--epochs", 2,
        "--out", args.runs / "rm", "--overwrite")
    run("train_ppo.py", "--model", args.sft, "--reward_model", args.runs / "rm", "--kl_coef", 0,
        "--missing_eos_penalty", 0, "--eval_every", 5,
        "--out", args.runs / "ppo", "--overwrite")
    names = ("step", "reward_mean", "kl_sequence", "worked_share", "response_length",
             "eval_gold_score")
    lines = (args.runs / "ppo" / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k in names} for line in lines]
    (RESULTS / "overoptimise.json").write_text(
        "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    picture(rows, RESULTS / "overoptimise.png")
    for row in rows:
        if "eval_gold_score" in row:
            print(f"iteration {row['step']:3}: proxy {row['reward_mean']:.2f}, gold "
                  f"{row['eval_gold_score']:.2f}, KL {row['kl_sequence']:.1f}")
