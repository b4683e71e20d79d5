"""Our scripts against TRL's trainers: time and peak memory of a step, same model, same rows.

    python benchmarks/train.py                                  both sizes, CPU, one thread
    python benchmarks/train.py --sizes tiny --tasks sft rm
    python benchmarks/train.py --ppo_python other/bin/python    PPO too: trl 1.12.0 still has it
    python benchmarks/train.py --sizes real --tasks grpo --policy my/smollm2 --questions rows.jsonl

Models: "tiny" is the embedded world's, on its own rows; "135m" a random Llama with the shape of
SmolLM2-135M, on rows of random characters whose lengths are log-normal (mean 200 tokens). These
hardly ever end an answer by themselves; "real" is a folder's policy on the shortest questions of a
file (columns instruction and input), whose answers are as long as it likes, up to 256 tokens. Both
sides get one file of rows, one batch size, longest row, learning rate, clipping at norm 1, fp32,
one thread, no gradient checkpointing (TRL's default is on, ours off), no evaluation, logging or
saving.

TRL runs with its own defaults beyond that: batches padded to their longest row, as packing and
padding-free batches want flash-attn, which a CPU lacks; DPO keeps a second model as reference and
asks it at every step, while train_dpo.py asks the start model beforehand, which is counted here;
GRPO and PPO generate with transformers. Neither side has a KL term in GRPO, both use the dapo loss.
PPO has two passes of two mini-batches on both sides.

Every run is a process of its own and the sides take turns; the best of --repeats counts. Time is
CPU time of the process between the start of training and the end of the last step: imports, loading
and tokenising are left out, and on the tiny model the first of two epochs. Memory is the process's
peak less what it held after its imports: weights, gradients, Adam's moments, reference models and
activations. Writes results/train.json, .md and .png after every pair of sides; what an earlier run
on the same machine measured, and this one does not, stays in them.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TASKS = ("sft", "rm", "dpo", "grpo", "ppo")
SIZES = {  # rows, pairs, answers of a step; answers: GRPO's and PPO's, of up to `new` tokens
    "tiny": dict(rows=16, pairs=16, steps=20, answers=128, group=8, rl_steps=3, new=96, warmup=1,
                 lr=1e-4),
    "135m": dict(rows=8, pairs=4, steps=2, answers=16, group=4, rl_steps=2, new=32, warmup=0,
                 lr=1e-6),
    "real": dict(answers=16, group=4, rl_steps=2, new=256, warmup=0, lr=1e-6),
}  # steps: those of an epoch; warmup: epochs before the one that is timed
BATCH = {"sft": "rows", "rm": "pairs", "dpo": "pairs", "grpo": "answers", "ppo": "answers"}
MAX_LEN = 512
TARGETS = {"sft": (1.3, 0.7), "rm": (1.3, 0.7), "dpo": (1.3, 0.7), "grpo": (3.0, 0.7)}
REWARD = '''
def digits(prompts, completions, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(sum(map(str.isdigit, text))) / 10 for text in texts]
'''


# --- what both sides get --------------------------------------------------------------------------


def real_inputs(folder, policy, questions):
    """GRPO's rows and policy/ of a folder that is there."""
    rows = map(json.loads, Path(questions).read_text().splitlines())
    texts = sorted((f"{row['instruction']}\n\n{row['input']}".strip() for row in rows), key=len)
    plan = SIZES["real"]
    for name, n in ("grpo", plan["answers"] * plan["rl_steps"] // plan["group"]), (
            "grpo_held_out", 2):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(
            {"prompt": [{"role": "user", "content": text}]}) + "\n" for text in texts[:n]))
    (folder / "policy").symlink_to(Path(policy).resolve())
    (folder / "reward.py").write_text(REWARD)


def make_inputs(size, folder):
    """Write policy/, scorer/, and the rows of every task, as chats, into the folder."""
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    from nanorlhf import toy
    tokenizer, rng, plan = toy.tokenizer(), random.Random(0), SIZES[size]
    policy = toy.new_model()
    if size == "135m":
        torch.manual_seed(0)
        policy = LlamaForCausalLM(LlamaConfig(
            hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, pad_token_id=0,
            bos_token_id=None, eos_token_id=2, max_position_embeddings=2048))
    policy.config.num_labels = 1
    scorer = LlamaForSequenceClassification(policy.config)
    scorer.model.load_state_dict(policy.model.state_dict())
    for name, model in ("policy", policy), ("scorer", scorer):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def text(share):
        """Random characters, one token each: `share` of a row."""
        length = min(rng.lognormvariate(math.log(200) - 0.18, 0.6), MAX_LEN - 10)
        return "".join(rng.choices("abcdefghij 0123456789", k=max(1, int(share * length))))

    def said(role, words):
        return [{"role": role, "content": words}]

    n, n_rl = plan["rows"] * plan["steps"], plan["answers"] * plan["rl_steps"]
    n_pairs = plan["pairs"] * plan["steps"]
    if size == "tiny":
        answers, pairs = toy.demonstrations(n), toy.pairs(n_pairs)
        questions = toy.prompts(n_rl)
    else:
        answers = [{"prompt": text(0.25), "completion": text(0.75)} for _ in range(n)]
        pairs = [{"prompt": text(0.25), "chosen": text(0.75), "rejected": text(0.75)}
                 for _ in range(n_pairs)]
        questions = [{"prompt": text(0.25)} for _ in range(n_rl)]
    for name, rows in (("sft", answers), ("rm", pairs), ("dpo", pairs), ("ppo", questions),
                       ("grpo", questions[:n_rl // plan["group"]])):
        columns = {"prompt": "user", "completion": "assistant", "chosen": "assistant",
                   "rejected": "assistant"}
        lines = [json.dumps({key: said(role, row[key]) for key, role in columns.items()
                             if key in row}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{name}_held_out.jsonl").write_text("\n".join(lines[:2]) + "\n")
    (folder / "reward.py").write_text(REWARD)


# --- one run, in a process of its own -------------------------------------------------------------


class Clock:
    """CPU time at the start of training and after every step; memory before and at the peak."""

    def __init__(self):
        self.times, self.before, self.more = [], self.memory("VmRSS"), 0.0

    def tick(self):
        self.times.append(time.process_time())

    @staticmethod
    def memory(key):
        """MB of the process, VmRSS: now, VmHWM: at its peak; without /proc always the peak."""
        status = Path("/proc/self/status")
        if not status.exists():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak / 2**20 if sys.platform == "darwin" else peak / 1024
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines()
                    if line.startswith(key))

    def result(self, steps, samples):
        seconds = self.times[-1] - self.times[-1 - steps] + self.more
        peak = self.memory("VmHWM")
        return {"seconds_per_step": seconds / steps, "samples_per_s": steps * samples / seconds,
                "extra_mb": peak - self.before, "total_mb": peak}


def run_ours(task, plan, folder):
    sys.path.insert(0, str(ROOT))
    script = __import__(f"train_{task}")
    import nanorlhf.report  # noqa: F401  what finish() would import
    from nanorlhf.utils import Run
    clock, start = Clock(), Run.start

    def started(self, *frozen, **objects):
        found = start(self, *frozen, **objects)
        clock.tick()
        return found

    Run.start, Run.due, Run.finish = started, lambda *_: False, lambda *_: None
    Run.end_step = lambda *_, **__: clock.tick()
    if task == "dpo":  # the reference's log-probs of one epoch
        score = script.score_tokens

        def timed(*args):
            began = time.process_time()
            found = score(*args)
            clock.more += time.process_time() - began
            return found
        script.score_tokens = timed
    more = {"sft": {}, "rm": dict(centre_coef=0.0), "dpo": dict(beta=0.1, nll_coef=0.0),
            "grpo": dict(reward=f"{folder}/reward.py:digits", kl_coef=0, group_size=plan["group"],
                         batch_size=plan["answers"] // plan["group"], max_new_tokens=plan["new"]),
            "ppo": dict(reward_model=f"{folder}/scorer", critic_lr=plan["lr"], critic_warmup=0,
                        max_new_tokens=plan["new"])}[task]
    script.train(script.Config(**dict(
        model=f"{folder}/policy", data=f"{folder}/{task}.jsonl", out=f"{folder}/run",
        eval_data=f"{folder}/{task}_held_out.jsonl", device="cpu", batch_size=plan[BATCH[task]],
        epochs=1 + plan["warmup"], lr=plan["lr"], max_len=MAX_LEN, eval_every=0, save_every=0)
        | more))
    return clock


def run_trl(task, plan, folder):
    import torch
    import transformers
    from datasets import load_dataset
    if task == "ppo":
        from trl.experimental.ppo import PPOConfig as Config, PPOTrainer as Trainer
    else:
        import trl
        name = {"sft": "SFT", "rm": "Reward", "dpo": "DPO", "grpo": "GRPO"}[task]
        Config, Trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    clock = Clock()  # after the imports, which come with these names

    class Timer(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.tick()

        def on_step_end(self, *_, **__):
            clock.tick()

    def load(auto_class, name):
        return auto_class.from_pretrained(folder / name, dtype=torch.float32)

    rows = load_dataset("json", data_files=f"{folder}/{task}.jsonl", split="train",
                        cache_dir=f"{folder}/cache")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
    options = dict(
        output_dir=f"{folder}/trl", num_train_epochs=1 + plan["warmup"], learning_rate=plan["lr"],
        per_device_train_batch_size=plan[BATCH[task]], bf16=False, gradient_checkpointing=False,
        use_cpu=True, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True)
    more = {"model": f"{folder}/policy", "train_dataset": rows}
    if task == "ppo":
        options |= dict(num_ppo_epochs=2, num_mini_batches=2, response_length=plan["new"],
                        temperature=1.0, num_sample_generations=0, stop_token="eos",
                        missing_eos_penalty=1.0)
        tokenizer.padding_side = "left"
        rows = rows.map(lambda row: {"input_ids": tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False)},
            remove_columns=rows.column_names)
        causal, scorer = (transformers.AutoModelForCausalLM,
                          transformers.AutoModelForSequenceClassification)
        more = dict(model=load(causal, "policy"), ref_model=load(causal, "policy"),
                    reward_model=load(scorer, "scorer"), value_model=load(scorer, "scorer"),
                    train_dataset=rows, eval_dataset=rows)
    elif task == "grpo":
        namespace = {}
        exec(REWARD, namespace)
        more["reward_funcs"] = namespace["digits"]
        options |= dict(num_generations=plan["group"], max_completion_length=plan["new"])
    else:
        options["max_length"] = MAX_LEN
    if task != "ppo":
        options["model_init_kwargs"] = {"dtype": torch.float32}
    Trainer(args=Config(**options), processing_class=tokenizer, callbacks=[Timer()],
            **more).train()
    return clock


def one(task, side, size, folder):
    import torch
    torch.set_num_threads(1)
    plan = SIZES[size]
    clock = (run_ours if side == "ours" else run_trl)(task, plan, folder)
    steps = plan["rl_steps" if BATCH[task] == "answers" else "steps"]
    print(json.dumps(clock.result(steps, plan[BATCH[task]])))


# --- all of them ----------------------------------------------------------------------------------


def call(python, *flags):
    done = subprocess.run([python, __file__, *map(str, flags)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, flags))}\n{done.stderr[-4000:]}")
    return done.stdout


def machine():
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else [platform.processor()]
    return {"cpu": names[0], "threads": 1, "python": platform.python_version()} | {
        name: version(name) for name in ("torch", "transformers", "trl")}


def markdown(results, runs):
    lines = ["# A training step, ours and TRL's", "",
             ", ".join(f"{key} {value}" for key, value in machine().items())
             + "; fp32 on a CPU. What was run: see the head of benchmarks/train.py.", "",
             "| model | script | runs | s a step, ours | s a step, TRL | speed-up | target "
             "| MB, ours | MB, TRL | ratio | target |", "|---" * 11 + "|"]
    for (size, task), r in results.items():
        fast, small = TARGETS.get(task, ("", ""))
        cells = [size, task, len(runs[size, task]["ours"]),
                 *(f"{r[side]['seconds_per_step']:.3g}" for side in ("ours", "trl")),
                 f"{r['speed_up']:.2f}", fast,
                 *(f"{r[side]['extra_mb']:.0f}" for side in ("ours", "trl")),
                 f"{r['memory']:.2f}", small]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Speed-up: our samples per CPU second over TRL's, best of the runs. MB: peak of "
              "the process less what it held after its imports."]
    return "\n".join(lines) + "\n"


def draw(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.4 * len(results) + 1.4), sharey=True)
    names = [f"{task}, {size}" for size, task in results]
    for axis, key, label, target in (
            (axes[0], "speed_up", "our samples per CPU second / TRL's", 0),
            (axes[1], "memory", "our extra memory at the peak / TRL's", 1)):
        axis.barh(names, [r[key] for r in results.values()], color="tab:orange")
        for i, (_, task) in enumerate(results):
            if task in TARGETS:
                axis.plot([TARGETS[task][target]] * 2, [i - 0.4, i + 0.4], "k--", linewidth=1)
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle("A training step against TRL's (dashed: what we aim at)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def earlier():
    """{(size, task): {side: runs}} of the file, if it is of this machine and these plans."""
    path = RESULTS / "train.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    plans = old.get("plans", {})
    if old.get("machine") != machine() or any(SIZES.get(k) != plan for k, plan in plans.items()):
        return {}
    return {(r["size"], r["task"]): {side: r[side] for side in ("ours", "trl")}
            for r in old["runs"]}


def write(runs):
    """The three files, of every pair of sides that is done."""
    runs = {(size, task): runs[size, task] for size in SIZES for task in TASKS
            if (size, task) in runs}
    results = {}
    for key, sides in runs.items():
        best = {side: min(found, key=lambda r: r["seconds_per_step"]) | {
            "extra_mb": min(r["extra_mb"] for r in found)} for side, found in sides.items()}
        ours, trl = best["ours"], best["trl"]
        results[key] = best | {"speed_up": ours["samples_per_s"] / trl["samples_per_s"],
                               "memory": ours["extra_mb"] / trl["extra_mb"]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "train.json").write_text(json.dumps({
        "machine": machine(), "plans": SIZES,
        "results": [{"size": size, "task": task} | r for (size, task), r in results.items()],
        "runs": [{"size": size, "task": task} | r for (size, task), r in runs.items()]},
        indent=1) + "\n")
    (RESULTS / "train.md").write_text(markdown(results, runs))
    draw(results, RESULTS / "train.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "135m"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--repeats", type=int, help="runs of each; else 2 of tiny, 1 of 135m")
    parser.add_argument("--ppo_python", help="python of an environment with trl 1.12.0")
    parser.add_argument("--one", nargs=4, metavar=("TASK", "SIDE", "SIZE", "FOLDER"),
                        help="run this one here, print JSON, stop")
    parser.add_argument("--policy", help="of size real: a folder")
    parser.add_argument("--questions", help="of size real: a .jsonl file")
    parser.add_argument("--inputs", nargs=2, metavar=("SIZE", "FOLDER"), help="write these, stop")
    args = parser.parse_args()
    if args.one:
        return one(*args.one[:3], Path(args.one[3]))
    if args.inputs:
        return make_inputs(args.inputs[0], Path(args.inputs[1]))
    tasks = [task for task in args.tasks if task != "ppo" or args.ppo_python]
    if "ppo" in args.tasks and not args.ppo_python:
        print("ppo is left out: --ppo_python names no environment with trl 1.12.0", flush=True)
    runs = earlier()
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if size == "real":
                real_inputs(Path(folder), args.policy, args.questions)
            else:
                call(sys.executable, "--inputs", size, folder)
            for task in tasks if size != "real" else ["grpo"]:
                found = runs[size, task] = {"ours": [], "trl": []}
                for side in ("ours", "trl") * (args.repeats or (2 if size == "tiny" else 1)):
                    other = (task, side) == ("ppo", "trl")
                    out = call(args.ppo_python if other else sys.executable, "--one", task, side,
                               size, folder)
                    found[side].append(json.loads(out.splitlines()[-1]))
                    print(size, task, side, found[side][-1], flush=True)
                write(runs)
    print((RESULTS / "train.md").read_text())


if __name__ == "__main__":
    main()
