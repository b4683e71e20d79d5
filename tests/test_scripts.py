"""The scripts as a user meets them: --help, bad inputs, a chain of runs, kill -9 and resume."""

import json
import math
import subprocess
import sys

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig,
)

from launch import ROOT, run
from nanorlhf import toy
from nanorlhf.utils import read_jsonl

TRAIN = ["train_sft.py", "train_rm.py", "train_dpo.py", "train_ppo.py", "train_grpo.py"]
TOOLS = ["nanorlhf.generate", "nanorlhf.evaluate", "nanorlhf.report", "nanorlhf.lora"]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return list(map(json.loads, path.read_text().splitlines()))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of small data files, good ones and bad ones."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "ten.jsonl", toy.demonstrations(10))
    write_jsonl(folder / "pairs.jsonl", toy.pairs(40))
    write_jsonl(folder / "odd.jsonl", [{"colour": "blue", "size": 3}])
    write_jsonl(folder / "nothing.jsonl", [])
    write_jsonl(folder / "system.jsonl", [{"prompt": [{"role": "system", "content": "t"},
                                                      {"role": "user", "content": "1+1="}]}])
    (folder / "run").mkdir()
    write_jsonl(folder / "run" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (folder / "latin.txt").write_bytes("é?\n".encode("latin-1"))
    (folder / "blank.txt").write_text("\n \n")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": \n')
    (folder / "reward.py").write_text(
        "def digits(prompts, completions, **_):\n"
        "    return [sum(c.isdigit() for c in text) / 10 for text in completions]\n")
    return folder


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", TRAIN + TOOLS)
def test_help(script, tmp_path):
    result = run(script, "--help", cwd=tmp_path)
    assert result.status == 0, result.err
    assert "usage" in result.out and "--out" in result.out
    if script in TRAIN:
        flags = ["--model", "--data", "--eval_data", "--out", "--seed", "--lr", "--epochs",
                 "--max_steps", "--batch_size", "--micro_tokens", "--max_len", "--warmup_ratio",
                 "--weight_decay", "--grad_clip", "--dtype", "--device",
                 "--gradient_checkpointing", "--save_every", "--eval_every", "--resume",
                 "--report_to", "--lora_rank", "--lora_alpha", "--lora_targets", "--preset"]
        assert [flag for flag in flags if flag not in result.out] == []
        assert "(default: 0.05)" in result.out


@pytest.mark.parametrize("command", [["train_sft.py", "--help"],
                                     ["-m", "nanorlhf.generate", "--model", "runs/nowhere"]])
def test_a_plain_python_process(command, tmp_path):
    """What `launch.run` imitates: a new interpreter, started from anywhere."""
    command = [str(ROOT / part) if part.endswith(".py") else part for part in command]
    result = subprocess.run([sys.executable, *command], cwd=ROOT if "-m" in command else tmp_path,
                            capture_output=True, text=True, timeout=120)
    assert result.returncode == (0 if "--help" in command else 2), result.stderr
    assert result.stderr.startswith("" if "--help" in command else "error: give one of --prompt")


# --- bad inputs -----------------------------------------------------------------------------------

SMALL = ["--toy_rows", 8, "--batch_size", 4, "--eval_prompts", 4, "--max_new_tokens", 8]
GRPO = ["--model", "toy", *SMALL]
PPO = [*GRPO, "--reward_model", "{rm}"]
BAD = {  # name -> script, flags, words of the error
    **{f"unknown flag, {script}": (script, ["--bogus", 1], ["--bogus"]) for script in TRAIN},
    **{f"no start model, {script}": (script, [], ["runs/sft", "train_sft.py"])
       for script in TRAIN[1:]},
    "no reward model": ("train_ppo.py", GRPO, ["runs/rm", "train_rm.py"]),
    "no such model folder": ("train_sft.py", ["--model", "./nowhere"], ["nowhere"]),
    "a folder that is no model": ("train_sft.py", ["--model", "{data}"], ["cannot load"]),
    "no such hub model": ("train_sft.py", ["--model", "no-such-model"], ["no-such-model"]),
    "not a number": ("train_sft.py", ["--lr", "fast"], ["--lr", "fast"]),
    "negative number": ("train_sft.py", ["--lr", -1], ["--lr", "at least 0"]),
    "nan": ("train_sft.py", ["--lr", "nan"], ["--lr"]),
    "no batch": ("train_sft.py", ["--batch_size", 0], ["--batch_size"]),
    "unknown dtype": ("train_sft.py", ["--dtype", "int8"], ["--dtype", "bf16"]),
    "unknown preset": ("train_sft.py", ["--preset", "9gb"], ["--preset", "8gb"]),
    "no such target": ("train_sft.py", ["--lora_rank", 4, "--lora_targets", "q_prj"],
                       ["--lora_targets q_prj", "q_proj"]),
    "negative rank": ("train_sft.py", ["--lora_rank", -1], ["--lora_rank", "at least 0"]),
    "no adapter": ("nanorlhf.lora", ["--adapter", "{data}"], ["adapter_config.json"]),
    "unknown grade": ("train_sft.py", ["--toy_grade", "big"], ["--toy_grade", "4x2"]),
    "too few questions": ("train_sft.py", ["--toy_grade", "1x2", "--toy_rows", 100],
                          ["questions"]),
    "empty --out": ("train_sft.py", ["--out", ""], ["--out"]),
    "no data file": ("train_sft.py", ["--data", "{data}/none.jsonl"], ["none.jsonl"]),
    "unknown columns": ("train_sft.py", ["--data", "{data}/odd.jsonl"], ["colour", "size"]),
    "empty file": ("train_sft.py", ["--data", "{data}/nothing.jsonl"], ["no rows"]),
    "broken line": ("train_sft.py", ["--data", "{data}/broken.jsonl"], ["broken.jsonl:2"]),
    "no eval file": ("train_sft.py", ["--data", "{data}/ten.jsonl", "--eval_data",
                                      "{data}/none.jsonl"], ["none.jsonl"]),
    "no such column": ("train_sft.py", ["--data", "{data}/odd.jsonl", "--columns", "prompt=color"],
                       ["color", "odd.jsonl: colour, size"]),
    "no share": ("train_sft.py", ["--data", "{data}/ten.jsonl*0,{data}/odd.jsonl*1"],
                 ["mixture", "weight"]),
    "no template file": ("train_sft.py", ["--chat_template", "none.jinja"],
                         ["none.jinja", "chatml"]),
    "all rows too long": ("train_sft.py", ["--data", "{data}/ten.jsonl", "--max_len", 4],
                          ["--max_len"]),
    "all prompts too long": ("train_grpo.py", [*GRPO, "--max_len", 12], ["--max_len"]),
    "pairs wanted": ("train_dpo.py", ["--model", "toy", "--data", "{data}/ten.jsonl"],
                     ["chosen"]),
    "unknown DPO loss": ("train_dpo.py", ["--model", "toy", "--data", "{data}/pairs.jsonl",
                                          "--loss_type", "best"], ["loss_type", "sigmoid"]),
    "unknown GRPO loss": ("train_grpo.py", [*GRPO, "--loss_type", "best"], ["--loss_type", "dapo"]),
    "unknown advantage": ("train_grpo.py", [*GRPO, "--advantage", "best"], ["advantage", "rloo"]),
    "unknown KL": ("train_grpo.py", [*GRPO, "--kl_estimator", "k9"], ["--kl_estimator", "k3"]),
    "group of one": ("train_grpo.py", [*GRPO, "--group_size", 1], ["--group_size", "at least 2"]),
    "no such reward": ("train_grpo.py", [*GRPO, "--reward", "none.py:f"], ["none.py"]),
    "top-p, GRPO": ("train_grpo.py", [*GRPO, "--top_p", 0.9], ["--top_p", "distribution"]),
    "top-k, PPO": ("train_ppo.py", [*PPO, "--top_k", 5], ["--top_k", "distribution"]),
    "greedy RL": ("train_grpo.py", [*GRPO, "--temperature", 0], ["--temperature"]),
    "nothing to answer": ("nanorlhf.generate", ["--model", "toy"], ["--prompt"]),
    "no prompt file": ("nanorlhf.generate", ["--model", "toy", "--prompts", "none.txt"],
                       ["none.txt"]),
    "no UTF-8": ("nanorlhf.generate", ["--model", "toy", "--prompts", "{data}/latin.txt"],
                 ["latin.txt", "UTF-8"]),
    "no prompts": ("nanorlhf.generate", ["--model", "toy", "--prompts", "{data}/blank.txt"],
                   ["blank.txt holds no prompt"]),
    "two system messages": ("nanorlhf.generate", ["--model", "toy", "--system", "s", "--prompts",
                                                   "{data}/system.jsonl"], ["--system", "already"]),
    "a file that is there": ("nanorlhf.generate", ["--model", "toy", "--prompt", "1+1=", "--out",
                                                   "{data}/ten.jsonl"], ["ten.jsonl exists"]),
    "two rewards": ("train_grpo.py", [*GRPO, "--reward", "toy", "--reward_model", "{rm}"],
                    ["--reward or --reward_model"]),
    "nothing to report on": ("nanorlhf.report", ["{data}/run", "--limit", 0], ["at least 1"]),
    "a base that is not there": ("nanorlhf.report", ["{data}/run", "--base", "./none"],
                                 ["cannot load a model"]),
    "no policy to talk to": ("nanorlhf.generate", ["--prompt", "1+1="], ["train_grpo.py"]),
    "no samples": ("nanorlhf.generate", ["--model", "toy", "--prompt", "1", "--n", 0], ["--n 0"]),
    "nothing to measure": ("nanorlhf.evaluate", [], ["runs/grpo", "train_grpo.py"]),
    "unknown flag, evaluate": ("nanorlhf.evaluate", ["--bogus", 1], ["--bogus"]),
    "unknown flag, report": ("nanorlhf.report", ["--bogus", "1"], ["--bogus"]),
    "no runs": ("nanorlhf.report", [], ["runs"]),
    "no folder for the answers": ("nanorlhf.generate", ["--model", "toy", "--prompt", "1+1=",
                                                        "--out", "none/x.jsonl"], ["none/x.jsonl"]),
    "no folder for the numbers": ("nanorlhf.evaluate", ["--out", "none/x.json"], ["none/x.json"]),
    "no folder to draw in": ("nanorlhf.report", ["{data}", "--out", "{data}/reward.py"],
                             ["is a file"]),
    "no run folder": ("nanorlhf.report", ["{data}"], ["metrics.jsonl"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(name, data, tmp_path):
    script, flags, words = BAD[name]
    flags = [str(flag).format(data=data, rm=tmp_path / "rm") for flag in flags]
    out = [] if "--out" in flags else ["--out", tmp_path / "out"]
    result = run(script, *flags, *out, cwd=tmp_path, limit=120)
    assert result.status == 2, result.err
    (line,) = result.errors
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == []
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_a_folder_that_can_be_made(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        result = run("train_sft.py", *SMALL, "--out", out, cwd=tmp_path)
        assert result.status == 2 and result.errors[0].startswith("error: --out"), result.err
    assert taken.read_text() == "mine"


# --- the chain ------------------------------------------------------------------------------------

STEPS = {"sft": 4, "rm": 3, "dpo": 2, "ppo": 3, "grpo": 2}


def flags_of(name, chain, data):
    """Small runs: seconds each."""
    model, few = ["--model", chain / "sft"], ["--eval_prompts", 4, "--max_new_tokens", 16]
    pairs = ["--data", data / "pairs.jsonl", "--batch_size", 8]
    return {
        "sft": ["--toy_rows", 64, "--batch_size", 16, *few],
        "rm": [*model, *pairs],
        "dpo": [*model, *pairs, *few],
        "ppo": [*model, "--reward_model", chain / "rm", "--toy_rows", 16, "--batch_size", 4,
                "--critic_warmup", 1, *few],
        "grpo": [*model, "--toy_rows", 16, "--batch_size", 3, "--group_size", 4,
                 "--reward", f"{data}/reward.py:digits", *few],
    }[name]


@pytest.fixture(scope="session")
def chain(data, tmp_path_factory):
    """A folder with the five finished runs."""
    folder = tmp_path_factory.mktemp("chain")
    for name, steps in STEPS.items():
        result = run(f"train_{name}.py", *flags_of(name, folder, data), "--max_steps", steps,
                     "--out", folder / name, cwd=folder)
        assert result.status == 0, result.err
        assert "finished" in result.out
    return folder


@pytest.mark.parametrize("name", STEPS)
def test_run_folder(name, chain):
    folder = chain / name
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS[name] + 1))
    assert all(math.isfinite(row[key]) for row in rows for key in ("loss", "lr", "tokens_per_s"))
    args = json.loads((folder / "args.json").read_text())
    assert args["finished"] and args["flags"]["max_steps"] == STEPS[name]
    assert {"torch", "transformers", "git", "python"} <= set(args)
    samples = read_jsonl(folder / "samples.jsonl")
    assert samples and {"step", "response", "score"} <= set(samples[0])
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "checkpoint").iterdir())) == 1
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("name", STEPS)
def test_the_folder_opens_in_plain_transformers(name, chain):
    kind = AutoModelForSequenceClassification if name == "rm" else AutoModelForCausalLM
    model, info = kind.from_pretrained(chain / name, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(chain / name)
    assert tokenizer.chat_template == toy.TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12+34="}], tokenize=False,
                                         add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    assert model(**inputs).logits.isfinite().all()
    if name == "rm":
        assert model.config.num_labels == 1 and model.config.reward_std > 0
    else:
        assert GenerationConfig.from_pretrained(chain / name).eos_token_id == [2]


def test_identities_at_the_first_step(chain):
    """What must hold before anything was learned, whatever the data: DPO-7, PPO-1."""
    first = {name: read_jsonl(chain / name / "metrics.jsonl")[0] for name in STEPS}
    assert abs(first["rm"]["loss"] - math.log(2)) <= 1e-5
    assert abs(first["dpo"]["loss"] - math.log(2)) <= 1e-5
    for name in ("ppo", "grpo"):
        assert abs(first[name]["kl_k1"]) <= 1e-6 and abs(first[name]["kl_k3"]) <= 1e-6
        for row in read_jsonl(chain / name / "metrics.jsonl"):
            assert abs(row["ratio_max"] - 1) <= 1e-5
            assert row["sampler_gap"] <= 2e-5
            assert row["unjudged"] == 0 and row["entropy"] >= 0
    ppo = read_jsonl(chain / "ppo" / "metrics.jsonl")
    assert ppo[0]["grad_norm"] is None and ppo[1]["grad_norm"] > 0  # the critic's warm-up
    assert ppo[1]["kl_k1"] == 0 and ppo[2]["kl_k1"] != 0
    for row in ppo:  # LOG-5: what is subtracted is what is logged (up to 6 printed digits)
        assert row["kl_penalty"] == pytest.approx(-row["kl_coef"] * row["kl_k1"], rel=1e-4,
                                                  abs=1e-9)


def test_metric_names(chain):
    """The names that people quote."""
    common = {"loss", "lr", "grad_norm", "tokens_per_s"}
    rl = common | {"reward_mean", "reward_std", "kl_k1", "kl_k3", "entropy", "approx_kl",
                   "clip_frac", "ratio_mean", "ratio_max", "sampler_gap", "response_length",
                   "eos_rate", "gold_score", "worked_share", "eval_gold_score",
                   "sampler_tokens_per_s", "sampler_kv_waste", "sampler_preemptions"}
    wanted = {
        "sft": common | {"eval_loss", "gold_score", "worked_share"},
        "rm": common | {"accuracy", "reward_chosen", "reward_rejected", "margin", "eval_accuracy"},
        "dpo": common | {"rewards_chosen", "rewards_rejected", "accuracy", "margin"},
        "ppo": rl | {"value_loss", "explained_variance"},
        "grpo": rl | {"zero_spread_groups"},
    }
    for name, names in wanted.items():
        assert names - set(read_jsonl(chain / name / "metrics.jsonl")[-1]) == set(), name


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def adapters(chain, data, tmp_path_factory):
    """The five runs with --lora_rank: SFT over the chain's, all others go on with its adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in STEPS:
        more = ["--model", chain / "sft", "--dtype", "bf16"] if name == "sft" else []
        result = run(f"train_{name}.py", *flags_of(name, folder, data), *more, "--lora_rank", 4,
                     "--max_steps", 3, "--out", folder / name, cwd=folder)
        assert result.status == 0, result.err
        assert result.out.count("LoRA: ") == (2 if name == "ppo" else 1)
    return folder


@pytest.mark.parametrize("name", STEPS)
def test_an_adapters_folder_opens_in_peft(name, adapters, chain):
    """LOR-6."""
    files = {path.name for path in (adapters / name).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    config = json.loads((adapters / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(chain / "sft")
    more = {"num_labels": 1} if name == "rm" else {}
    kind = peft.AutoPeftModelForSequenceClassification if more else peft.AutoPeftModelForCausalLM
    model = kind.from_pretrained(adapters / name, **more)
    inputs = AutoTokenizer.from_pretrained(adapters / name)("12+34=", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    on = model(**inputs).logits
    with model.disable_adapter():
        assert on.isfinite().all() and not torch.equal(on, model(**inputs).logits)


def test_identities_from_an_adapter(adapters):
    """LOR-5: the reference of a run that starts from base + SFT adapter is both of them."""
    first = {name: read_jsonl(adapters / name / "metrics.jsonl")[0] for name in STEPS}
    assert abs(first["rm"]["loss"] - math.log(2)) <= 1e-5
    assert abs(first["dpo"]["loss"] - math.log(2)) <= 1e-5
    for name in ("ppo", "grpo"):
        assert abs(first[name]["kl_k1"]) <= 1e-6
        rows = read_jsonl(adapters / name / "metrics.jsonl")
        assert rows[-1]["kl_k1"] != 0 and all(row["sampler_gap"] <= 2e-5 for row in rows)


def test_tools_read_adapters(adapters, chain, tmp_path):
    few = ["--limit", 4, "--max_new_tokens", 8]
    for flags in (["nanorlhf.generate", "--model", adapters / "sft", "--prompt", "1+1="],
                  ["nanorlhf.evaluate", "--model", adapters / "rm", "--limit", 4],
                  ["nanorlhf.evaluate", "--model", adapters / "dpo", "--reward_model",
                   adapters / "rm", *few]):
        result = run(*flags, cwd=tmp_path)
        assert result.status == 0 and result.out.strip(), result.err


def test_a_fresh_toy_model_is_saved_as_the_base(tmp_path):
    flags = [*SMALL, "--max_steps", 1, "--out", "run"]
    for preset in ("none", "8gb", "8gb"):  # over a full model, and over another adapter
        result = run("train_sft.py", *flags, "--preset", preset, "--overwrite", cwd=tmp_path)
        assert result.status == 0 and ("--lora_rank 16" in result.out) == (preset == "8gb")
    assert not {"model.safetensors", "config.json"} & {f.name for f in (tmp_path / "run").iterdir()}
    result = run("nanorlhf.lora", "--adapter", "run", "--out", "merged", cwd=tmp_path)
    assert result.status == 0, result.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() == 369_888
    result = run("train_sft.py", *SMALL, "--model", "run", "--lora_rank", 16, "--out", "run",
                 "--overwrite", cwd=tmp_path)
    assert result.status == 2 and "would overwrite" in result.errors[-1], result.err


def test_a_finished_run_is_not_overwritten_unless_told(chain, data, tmp_path):
    before = (chain / "sft" / "model.safetensors").read_bytes()
    flags = [*flags_of("sft", chain, data), "--max_steps", 4, "--out", chain / "sft"]
    for more in ([], ["--resume"]):
        result = run("train_sft.py", *flags, *more, cwd=tmp_path)
        assert result.status == 2 and "finished" in result.errors[0], result.err
    assert (chain / "sft" / "model.safetensors").read_bytes() == before
    copy = tmp_path / "copy"
    flags[-1] = copy
    for more in ([], ["--overwrite"]):  # the same flags, the same bits; and anew on request
        assert run("train_sft.py", *flags, *more, cwd=tmp_path).status == 0
        assert (copy / "model.safetensors").read_bytes() == before
        assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3, 4]


def test_resume_notices_other_margins(chain, data, tmp_path):
    pairs = [row | {"margin": 0} for row in read_rows(data / "pairs.jsonl")]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    flags = ["--model", chain / "sft", "--data", tmp_path / "pairs.jsonl", "--batch_size", 8,
             "--max_steps", 2, "--save_every", 1, "--out", tmp_path / "rm"]
    assert run("train_rm.py", *flags, cwd=tmp_path).status == 0
    args = tmp_path / "rm" / "args.json"
    args.write_text(args.read_text().replace('"finished": true', '"finished": false'))
    (tmp_path / "rm" / "checkpoint" / "step_00000002.pt").unlink()
    write_jsonl(tmp_path / "pairs.jsonl", [row | {"margin": 5} for row in pairs])
    result = run("train_rm.py", *flags, "--resume", cwd=tmp_path)
    assert result.status == 2 and "checksum of the encoded training rows" in result.errors[0]


def test_a_ppo_that_only_warms_its_critic_up_is_told(chain, tmp_path):
    flags = ["--model", chain / "sft", "--reward", "toy", "--toy_rows", 4, "--batch_size", 4,
             "--max_new_tokens", 4, "--eval_prompts", 2, "--out", tmp_path / "ppo"]
    result = run("train_ppo.py", *flags, cwd=tmp_path)
    assert result.status == 0 and "--critic_warmup 3 takes all 1 iterations" in result.err


def test_generate(chain, tmp_path):
    (tmp_path / "questions.md").write_text("12+34=\n\n5+6=\n")
    result = run("nanorlhf.generate", "--model", chain / "sft", "--prompts", "questions.md",
                 "--n", 2, "--max_new_tokens", 8, "--out", "answers.jsonl", cwd=tmp_path)
    assert result.status == 0, result.err
    rows = read_rows(tmp_path / "answers.jsonl")
    assert [row["prompt"] for row in rows] == ["12+34="] * 2 + ["5+6="] * 2
    assert all(row["finish"] in ("stop", "length") and row["tokens"] >= 1 for row in rows)
    result = run("nanorlhf.generate", "--model", chain / "sft", "--prompt", "1+1=", "--top_p", 0.9,
                 "--max_new_tokens", 8, cwd=tmp_path)
    assert result.status == 0 and result.out.strip(), result.err


def test_evaluate(chain, data, tmp_path):
    result = run("nanorlhf.evaluate", "--model", chain / "sft", "--limit", 4, "--n", 4,
                 "--max_new_tokens", 8, "--reward_model", chain / "rm", "--out", "sft.json",
                 cwd=tmp_path)
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "sft.json").read_text())
    assert {"gold_score", "pass@1", "pass@2", "pass@4", "best_of@1", "best_of@4", "score",
            "response_length", "eos_rate"} <= set(found)
    result = run("nanorlhf.evaluate", "--model", chain / "rm", "--limit", 8, "--out", "rm.json",
                 cwd=tmp_path)
    assert result.status == 0, result.err
    assert 0 <= json.loads((tmp_path / "rm.json").read_text())["accuracy"] <= 1
    result = run("nanorlhf.evaluate", "--model", chain / "rm", "--prompt", "1+1=", "--response",
                 "#### 2", cwd=tmp_path)
    assert result.status == 0 and result.out.startswith("score"), result.err
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1="}])
    result = run("nanorlhf.evaluate", "--model", chain / "sft", "--data", prompts, "--n", 2,
                 "--max_new_tokens", 8, "--reward_model", chain / "rm", cwd=tmp_path)
    assert result.status == 0 and "score" in result.out, result.err  # no answers: no best-of-n


def test_report(chain, tmp_path):
    runs = [chain / name for name in STEPS]
    result = run("nanorlhf.report", *runs, "--base", chain / "sft", "--limit", 4,
                 "--max_new_tokens", 8, "--out", tmp_path / "report", cwd=tmp_path)
    assert result.status == 0, result.err
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"curves.png", "gold_vs_kl.png", "report.md"}
    table = (tmp_path / "report" / "report.md").read_text()
    assert "/grpo |" in table and "/ppo |" in table and "/rm |" not in table
    base = next(line for line in table.splitlines() if "/sft |" in line)
    assert base.split("|")[-2].strip() in ("0.00", "-0.00")  # the base is no KL away from itself


# --- kill -9 and resume ---------------------------------------------------------------------------


def without_speed(folder):
    return [{k: v for k, v in row.items() if "tokens_per_s" not in k}
            for row in read_jsonl(folder / "metrics.jsonl")]


def equal(a, b):
    """Equality of nested checkpoints, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool((a == b).all()) if hasattr(a, "all") else a == b


def assert_same_end(broken, whole):
    assert without_speed(broken) == without_speed(whole)  # LOG-6: every step once
    model = (("adapter_model.safetensors", "adapter_config.json")
             if (whole / "adapter_config.json").exists() else ("model.safetensors", "config.json"))
    for name in (*model, "samples.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    last = [sorted((folder / "checkpoint").glob("step_*.pt"))[-1] for folder in (broken, whole)]
    assert last[0].name == last[1].name
    a, b = (torch.load(file, weights_only=False) for file in last)
    for name in ("step", "state", "kept", "rng"):  # CKP-4: Adam's moments, scaler, KL coefficient
        assert equal(a[name], b[name]), name


def broken_and_whole(name, flags, dies, tmp_path):
    """One unbroken run, and one killed at each place of `dies` and resumed after each."""
    script, whole, broken = f"train_{name}.py", tmp_path / "whole", tmp_path / "broken"
    result = run(script, *flags, "--out", whole, cwd=tmp_path)
    assert result.status == 0, result.err
    for number, die in enumerate([*dies, None]):
        resume = ["--resume"] if number else []
        result = run(script, *flags, "--out", broken, *resume, cwd=tmp_path, die=die)
        assert result.status == (-9 if die else 0), result.err
        if die:
            assert not json.loads((broken / "args.json").read_text())["finished"]
    return broken, whole


def test_sft_resumes_bit_equal_within_and_at_the_end_of_an_epoch(data, tmp_path):
    """CKP-1, CKP-3: 10 rows, batch 2, 3 epochs; killed in the middle of epoch 2, then right after
    the checkpoint at the end of epoch 2."""
    flags = ["--data", data / "ten.jsonl", "--batch_size", 2, "--epochs", 3, "--save_every", 5,
             "--eval_every", 6, "--eval_prompts", 2, "--max_new_tokens", 8]
    broken, whole = broken_and_whole("sft", flags, [("log", 7), ("log", 11)], tmp_path)
    assert_same_end(broken, whole)
    assert len(without_speed(broken)) == 15
    result = run("train_sft.py", *flags, "--out", broken, "--resume", cwd=tmp_path)
    assert result.status == 2 and "finished" in result.errors[0]  # CKP-3: says so


def test_killed_while_saving_and_before_the_model_is_written(data, tmp_path):
    """CKP-6: a half-written checkpoint is not taken. With all steps done the model still comes."""
    flags = ["--data", data / "ten.jsonl", "--batch_size", 2, "--max_steps", 4, "--save_every", 2,
             "--eval_prompts", 2, "--max_new_tokens", 8]
    assert_same_end(*broken_and_whole("sft", flags, [("save", 4), ("finish", 0)], tmp_path))
    assert not list((tmp_path / "broken").glob("**/*.tmp"))


def test_resume_refuses_other_flags_and_a_missing_checkpoint(data, tmp_path):
    flags = ["--data", data / "ten.jsonl", "--batch_size", 2, "--max_steps", 4, "--save_every", 2,
             "--eval_prompts", 2, "--max_new_tokens", 8, "--out", "run"]
    assert run("train_sft.py", *flags, cwd=tmp_path, die=("log", 3)).status == -9
    for more, words in ([[], "--resume an unf"], [["--resume", "--lr", 1], "--lr (was 0.003"]):
        result = run("train_sft.py", *flags, *more, cwd=tmp_path)
        assert result.status == 2 and words in result.errors[-1], result.err
    for file in (tmp_path / "run" / "checkpoint").iterdir():
        file.unlink()
    result = run("train_sft.py", *flags, "--resume", cwd=tmp_path)
    assert result.status == 2 and "checkpoint" in result.errors[-1], result.err


@pytest.mark.parametrize("name", ["rm", "dpo", "ppo", "grpo"])
def test_the_other_scripts_resume_bit_equal(name, chain, data, tmp_path):
    """CKP-1 and CKP-4: killed inside, and once more when only the model was left to write."""
    flags = [*flags_of(name, chain, data), "--max_steps", 6, "--save_every", 2, "--eval_every", 3]
    if name == "ppo":
        flags += ["--kl_target", 0.1, "--kl_horizon", 100]
    broken, whole = broken_and_whole(name, flags, [("log", 3), ("finish", 0)], tmp_path)
    assert_same_end(broken, whole)
    if name == "ppo":
        assert len({row["kl_coef"] for row in without_speed(whole)}) > 1  # it moves, so it counts


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_adapters_resume_bit_equal(name, adapters, data, tmp_path):
    """CKP-1 with --lora_rank: a checkpoint holds what is trained, the rest is the start model's."""
    flags = [*flags_of(name, adapters, data), "--model", adapters / "sft", "--lora_rank", 4,
             "--max_steps", 4, "--save_every", 2]
    broken, whole = broken_and_whole(name, flags, [("log", 3), ("finish", 0)], tmp_path)
    assert_same_end(broken, whole)
    last = torch.load(max((whole / "checkpoint").iterdir()), weights_only=False)["state"]
    assert all(key.endswith((".lora_A", ".lora_B")) for key in last["model"]), list(last["model"])
    if name == "ppo":
        assert {key for key in last["critic"] if ".lora_" not in key} == {"score.weight"}


def base_model(folder, tokenizer, eos):
    """A tiny model without a chat template, as a folder."""
    model = toy.new_model()
    model.resize_token_embeddings(len(tokenizer) + 9)  # a padded vocabulary
    model.config.eos_token_id, tokenizer.chat_template = eos, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("known", [True, False])
def test_a_base_model_learns_chatml_and_plain_generate_stops(known, tmp_path):
    """Whether <|im_end|> is a token of the vocabulary beside another EOS or not one at all; the run
    folder carries the template, and every id that may end a turn."""
    tokenizer = toy.tokenizer()
    if known:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in (("red", "apple"), ("blue", "sky"), ("green", "grass"))]
    flags = ["--model", base_model(tmp_path / "base", tokenizer, 2), "--data",
             write_jsonl(tmp_path / "rows.jsonl", rows), "--chat_template", "chatml",
             "--epochs", 40, "--batch_size", 3, "--eval_prompts", 3, "--max_new_tokens", 12]
    result = run("train_sft.py", *flags, "--out", "out", cwd=tmp_path)
    assert result.status == 0, result.err
    assert read_jsonl(tmp_path / "out" / "metrics.jsonl")[-1]["eos_rate"] == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reader = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reader.eos_token == ("<|im_end|>" if known else "<|end|>")
    stops = sorted({2, reader.eos_token_id})
    assert model.generation_config.eos_token_id == stops == ([2, 103] if known else [2])
    for row in rows:
        text = reader.apply_chat_template(row["messages"][:1], tokenize=False,
                                          add_generation_prompt=True)
        assert text == f"<|im_start|>user\n{row['messages'][0]['content']}{reader.eos_token}\n" \
            "<|im_start|>assistant\n"
        inputs = reader(text, return_tensors="pt", add_special_tokens=False)
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert reader.decode(out[0, inputs["input_ids"].shape[1]:]) == (
            row["messages"][1]["content"] + reader.eos_token)


@pytest.mark.parametrize("name", STEPS)
def test_show_data_prints_rows_and_writes_nothing(name, chain, data, tmp_path):
    """Also where a finished run lies: nothing is written, so it is not in the way."""
    flags = [*flags_of(name, chain, data), "--show_data", 3]
    (tmp_path / "out").symlink_to(chain / name)
    before = {path: path.stat().st_mtime_ns for path in (chain / name).rglob("*")}
    result = run(f"train_{name}.py", *flags, "--out", "out", cwd=tmp_path)
    assert result.status == 0 and not result.errors, result.err
    lines = result.out.splitlines()
    tables = [i for i, line in enumerate(lines) if line.split() == ["token", "id", "mask"]]
    assert len(tables) == (6 if name in ("rm", "dpo") else 3)
    assert all(lines[i - 1].startswith("<|user|>") for i in tables)
    learned = sum(line.endswith("*") for line in lines)
    assert learned == 0 if name in ("ppo", "grpo") else learned > len(tables)
    assert {path: path.stat().st_mtime_ns for path in (chain / name).rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
