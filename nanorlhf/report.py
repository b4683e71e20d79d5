"""Draw the curves of runs, and compare what the methods made of one start model.

    python -m nanorlhf.report runs/sft runs/rm runs/dpo runs/ppo runs/grpo \\
        --base runs/sft --reward_model runs/rm

writes into runs/report: curves.png (every metric of every run), and with --base, on the embedded
world, gold_vs_kl.png (gold score against the distance from the start model, best-of-n too) and
report.md (one table). `curves` also draws each run's own picture when it finishes.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt

from nanorlhf import data, evaluate, toy
from nanorlhf.model import is_scorer, load_policy, load_reward_model
from nanorlhf.rollout import lay_out, model_scores, score_tokens
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import UserError, read_jsonl, refuse, run_script

MICRO_TOKENS = 16384
FLAGS = {  # default, help
    "out": (Path("runs/report"), "folder to write"),
    "base": ("", "start model, on the embedded world: also measure every policy's gold score and "
             "its KL from this model"),
    "reward_model": ("", "also best-of-n under this reward model"),
    "toy_grade": ("4x2", "sums: digits x terms"),
    "n": (16, "largest n of best-of-n"),
    "limit": (256, "held-out questions"),
    "max_new_tokens": (96, "longest answer"),
}
PANELS = [  # title, metric names: whichever of them a run has is drawn
    ("loss", ["loss", "eval_loss"]),
    ("pair accuracy", ["accuracy", "eval_accuracy"]),
    ("reward", ["reward_mean", "margin", "eval_margin"]),
    ("gold score", ["gold_score", "eval_gold_score"]),
    ("share of worked answers", ["worked_share", "eval_worked_share"]),
    ("KL from the reference, per answer", ["kl_sequence"]),
    ("response length, tokens", ["response_length"]),
    ("entropy, nats per token", ["entropy"]),
    ("value loss", ["value_loss"]),
    ("explained variance", ["explained_variance"]),
    ("clipped share", ["clip_frac"]),
    ("zero-spread groups", ["zero_spread_groups"]),
    ("gradient norm", ["grad_norm"]),
]


def points(rows, name):
    """(steps, values) of a metric. A value that was not finite (null) leaves a visible gap."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [math.nan if x is None else x for _, x in pairs]


def curves(folders, path):
    """One picture: a panel for each metric, a line for each run."""
    runs = {folder: read_jsonl(Path(folder) / "metrics.jsonl") for folder in folders}
    used = [(title, names) for title, names in PANELS
            if any(name in row for rows in runs.values() for row in rows for name in names)]
    columns = max(1, min(3, len(used)))
    lines = max(1, -(-len(used) // columns))
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 2.9 * lines), squeeze=False)
    for axis, (title, names) in zip(axes.flat, used):
        for number, (folder, rows) in enumerate(runs.items()):
            for name in names:
                steps, values = points(rows, name)
                if not steps:
                    continue
                if len(runs) > 1:  # runs of unlike length: draw each over its whole course
                    steps = [step / rows[-1]["step"] for step in steps]
                sparse = name.startswith("eval_") or len(steps) < len(rows)
                label = name if len(runs) == 1 else f"{Path(folder).name} {name}"
                axis.plot(steps, values, "o-" if sparse else "-", markersize=3, linewidth=1.2,
                          color=f"C{number if len(runs) > 1 else names.index(name)}",
                          alpha=1.0 if sparse or len(names) == 1 else 0.5, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step" if len(runs) == 1 else "share of the run", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    for axis in list(axes.flat)[len(used):]:
        axis.axis("off")
    finish(figure, path)


def measure(policy, tokenizer, base, prompts, max_new_tokens):
    """Numbers of one policy on held-out prompts, with its KL from the base model per answer."""
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    found, completions = evaluate.answer(Sampler(policy, tokenizer), prompts, params, embedded=True)
    batch = lay_out(completions)
    logp, base_logp = (score_tokens(model, batch, 1.0, MICRO_TOKENS)[0]
                       for model in (policy, base))
    return found | {"kl": float((logp - base_logp).sum()) / len(batch)}


def labels(folders):
    """{run: its name, or its path where another run has the same name}."""
    names = [folder.name for folder in folders]
    return {folder: folder.name if names.count(folder.name) == 1 else str(folder)
            for folder in folders}


def compare(args):
    """({run: numbers}, best-of-n curve [(KL, gold score, n)], pair accuracy or None)."""
    grade = toy.parse_grade(args.toy_grade)
    base, tokenizer = load_policy(args.base)
    rows = toy.prompts(args.limit, split="eval", grade=grade)
    prompts = data.encode_prompts(rows, tokenizer, 512)
    table = {name: measure(load_policy(str(folder))[0], tokenizer, base, prompts,
                           args.max_new_tokens)
             for folder, name in labels(args.runs).items() if not is_scorer(str(folder))}
    if not args.reward_model:
        return table, [], None
    scorer, sampler = load_reward_model(args.reward_model, tokenizer), Sampler(base, tokenizer)
    rows = toy.pairs(400, split="eval", sampler=sampler, noise=False, grade=grade)
    pairs, _ = data.encode_pairs(rows, tokenizer, 512)
    params = SamplingParams(n=args.n, max_new_tokens=args.max_new_tokens, seed=0)
    completions = sampler.generate([ids for ids, _ in prompts], params)
    scores = model_scores(scorer, lay_out(completions), MICRO_TOKENS)
    # KL of best-of-k from the base: Stiennon et al. 2020, appendix G.3
    best = [(math.log(k) - (k - 1) / k, gold, k) for k, gold in
            evaluate.best_of(prompts, completions, scores, args.n, True).items()]
    return table, best, evaluate.rank(scorer, pairs)[0]["accuracy"]


def distance_picture(args, table, best, path):
    """Gold score against KL from the base model: what each method pays for what it gets."""
    figure, axis = plt.subplots(figsize=(6, 4.2))
    if best:
        axis.plot([kl for kl, _, _ in best], [gold for _, gold, _ in best], "s--",
                  color="grey", label="best-of-n")
        for kl, gold, k in best:
            axis.annotate(str(k), (kl, gold), (3, -9), textcoords="offset points", fontsize=7)
    for number, (folder, name) in enumerate(labels(args.runs).items()):
        if name in table:
            rows = [row for row in read_jsonl(folder / "metrics.jsonl")
                    if "kl_sequence" in row and "eval_gold_score" in row]
            colour = f"C{number}"
            axis.plot(points(rows, "kl_sequence")[1], points(rows, "eval_gold_score")[1], "-",
                      color=colour, alpha=0.5)
            axis.plot(table[name]["kl"], table[name]["gold_score"], "o", color=colour, label=name)
    axis.set_xlabel("KL from the base model, nats per answer")
    axis.set_ylabel("gold score, held-out questions")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    finish(figure, path)


def finish(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def markdown(table, best, accuracy):
    names = ["gold_score", "worked_share", "response_length", "eos_rate", "kl"]
    lines = ["| model | " + " | ".join(name.replace("_", " ") for name in names) + " |",
             "|---" * (len(names) + 1) + "|"]
    for run, row in table.items():
        lines.append(f"| {run} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    for kl, gold, k in best[1:]:
        lines.append(f"| best-of-{k} | {gold:.2f} | | | | {kl:.2f} |")
    if accuracy is not None:
        lines += ["", f"Reward model: {accuracy:.1%} of noise-free on-policy pairs ranked right."]
    return "\n".join(lines) + "\n"


def report(args):
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file; give a folder")
    for folder in args.runs:
        if not (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder} is no run folder: it has no metrics.jsonl")
    args.out.mkdir(parents=True, exist_ok=True)
    curves(args.runs, args.out / "curves.png")
    names = ["curves.png"]
    if args.base:
        table, best, accuracy = compare(args)
        distance_picture(args, table, best, args.out / "gold_vs_kl.png")
        text = markdown(table, best, accuracy)
        (args.out / "report.md").write_text(text)
        print(text)
        names += ["gold_vs_kl.png", "report.md"]
    print("written:", ", ".join(str(args.out / name) for name in names))


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = refuse
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_script(lambda: report(arguments()))
