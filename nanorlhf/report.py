"""Draw the curves of runs, and compare what the methods made of one start model.

    python -m nanorlhf.report runs/sft runs/rm runs/dpo runs/ppo runs/grpo \\
        --base runs/sft --reward_model runs/rm

writes into runs/report: curves.png, and with --base, on the embedded world, gold_vs_kl.png (gold
score against the distance from the start model, best-of-n too) and report.md (one table). `curves`
also draws each run's own picture when it finishes.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure  # without pyplot: no screen, and nothing to close

from nanorlhf import evaluate
from nanorlhf.model import is_scorer
from nanorlhf.utils import UserError, read_jsonl, refuse, run_script

PANELS = [  # whichever metrics of a list a run has are drawn in one panel
    ["loss", "eval_loss"], ["accuracy", "eval_accuracy"], ["margin", "eval_margin"],
    ["reward_mean"], ["gold_score", "eval_gold_score"], ["worked_share", "eval_worked_share"],
    ["kl_sequence"],
    ["response_length"], ["entropy"], ["value_loss"], ["explained_variance"], ["clip_frac"],
    ["zero_spread_groups"], ["grad_norm"],
]


def plain(name):
    """A name as it stands; between two $ matplotlib would see a formula."""
    return str(name).replace("$", r"\$")


def points(rows, name):
    """(steps, values) of a metric. A value that was not finite (null) leaves a visible gap."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [math.nan if x is None else x for _, x in pairs]


def curves(folders, path):
    """One picture: a panel for each metric, a line for each run, pale where rows are trained on.
    Runs of unlike length are each drawn over their whole course."""
    runs = {Path(folder): read_jsonl(Path(folder) / "metrics.jsonl") for folder in folders}
    called = [folder.name for folder in runs]
    short = {folder: plain(folder if called.count(folder.name) > 1 else folder.name)
             for folder in runs}
    known = {name for rows in runs.values() for row in rows for name in row}
    used = [names for names in PANELS if known & set(names)]
    lines, one = max(1, -(-len(used) // 3)), len(runs) == 1
    figure = Figure(figsize=(12.6, 2.9 * lines), layout="tight")
    for place, names in enumerate(used, 1):
        axis = figure.add_subplot(lines, 3, place, title=names[0].replace("_", " "),
                                  xlabel="step" if one else "share of the run")
        for number, (folder, rows) in enumerate(runs.items()):
            there = [name for name in names if points(rows, name)[0]]
            for name in there:
                steps, values = points(rows, name)
                scale = 1 if one else rows[-1]["step"]
                label = name if one else short[folder] if name == there[-1] else None
                axis.plot([step / scale for step in steps], values, ".-", linewidth=1,
                          markersize=3, color=f"C{number}", label=label,
                          alpha=0.5 if name in ("loss", "accuracy", "margin") else 1.0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6, framealpha=0.4)
    figure.savefig(path, dpi=110)


def occupancy(calls, path):
    """Blocks of the cache in use after each pass. calls: {name: `Sampler.stats` after a call}."""
    figure = Figure(figsize=(6, 3), layout="tight")
    axis = figure.add_subplot(xlabel="pass through the model", ylabel="cache blocks in use")
    for name, stats in calls.items():
        axis.plot(stats["blocks_used"], label=f"{name}: {stats['preemptions']} pre-emptions")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def compare(args):
    """{name: numbers} of the policies among the runs; with a reward model also of best-of-k, drawn
    from the base, and of the reward model."""
    ask = partial(evaluate.Config, toy_grade=args.toy_grade, max_new_tokens=args.max_new_tokens,
                  limit=args.limit, device="cuda" if torch.cuda.is_available() else "cpu")
    table = {str(folder): evaluate.evaluate_policy(ask(model=str(folder), base=args.base))
             for folder in args.runs if not is_scorer(str(folder))}
    if args.reward_model:
        best = ask(model=args.base, reward_model=args.reward_model, n=args.n)
        found = evaluate.evaluate_policy(best)
        for k in evaluate.doublings(args.n):  # its KL: Stiennon et al. 2020, appendix G.3
            table[f"best-of-{k}"] = {"gold_score": found[f"best_of@{k}"],
                                     "kl": math.log(k) - (k - 1) / k}
        table["reward model, on pairs"] = evaluate.evaluate_scorer(
            ask(model=args.reward_model, pairs_from=args.base, limit=400))
    return table


def distance_picture(table, path):
    """Gold score against KL from the base model: what each method pays for what it gets. A line is
    the course of a run, a point what it, or best-of-n, came to."""
    figure = Figure(figsize=(6, 4.2), layout="tight")
    axis = figure.add_subplot(xlabel="KL from the base model, nats per answer",
                              ylabel="gold score, held-out questions")
    axis.margins(0.15)
    drawn = {name: row for name, row in table.items() if "kl" in row and name != "best-of-1"}
    for number, (name, row) in enumerate(drawn.items()):  # best of one is the base itself
        log = Path(name) / "metrics.jsonl"
        course = [step for step in (read_jsonl(log) if log.exists() else [])
                  if "kl_sequence" in step and "eval_gold_score" in step]
        at = row["kl"], row["gold_score"]
        [mark] = axis.plot(*at, "o" if log.exists() else "ks")
        left = number % 2 == 0  # neighbours are named on different sides
        axis.annotate(plain(Path(name).name), at, (-5 if left else 5, -3), fontsize=8,
                      textcoords="offset points", ha="right" if left else "left")
        axis.plot(points(course, "kl_sequence")[1], points(course, "eval_gold_score")[1],
                  color=mark.get_color(), alpha=0.5)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def markdown(table):
    names = ["gold_score", "worked_share", "response_length", "eos_rate", "accuracy", "kl"]
    rows = [[model, *(f"{row[name]:.2f}" if name in row else "" for name in names)]
            for model, row in table.items()]
    head = ["model", *(name.replace("_", " ") for name in names)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def report(args):
    if args.out.is_file():
        raise UserError(f"--out {args.out} is a file; give a folder")
    for folder in args.runs:
        if not (log := folder / "metrics.jsonl").exists() or not read_jsonl(log):
            raise UserError(f"{folder} is no run folder: it has no metrics.jsonl with a step")
    if min(args.n, args.limit, args.max_new_tokens) < 1:
        raise UserError("--n, --limit and --max_new_tokens must be at least 1")
    table = compare(args) if args.base else {}
    args.out.mkdir(parents=True, exist_ok=True)
    curves(args.runs, args.out / "curves.png")
    if table:
        distance_picture(table, args.out / "gold_vs_kl.png")
        (args.out / "report.md").write_text(markdown(table))
        print(markdown(table))
    print(f"written: {args.out}")


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error, add = refuse, parser.add_argument
    add("runs", nargs="+", type=Path, help="run folders")
    add("--out", type=Path, default=Path("runs/report"), help="folder to write")
    add("--base", default="", help="start model on the embedded world: also gold scores and KL")
    add("--reward_model", default="", help="also best-of-n under this reward model")
    add("--toy_grade", default="4x2", help="sums: digits x terms")
    add("--n", type=int, default=8, help="largest n of best-of-n")
    add("--limit", type=int, default=256, help="held-out questions")
    add("--max_new_tokens", type=int, default=96, help="longest answer")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_script(lambda: report(arguments()))
