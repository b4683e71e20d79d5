"""Every family through all five scripts, two steps each: the identities at step 0 hold, and what is
saved opens in plain transformers, with --lora_rank in PEFT."""

import json
import math

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from launch import run
from nanorlhf import toy
from nanorlhf.model import load_policy, load_scorer, save_model
from test_model import NO_SCORER
from tiny import FAMILIES, tiny_model

FAST = [("llama", 0), ("qwen3", 4)]  # the others are slow tests
CASES = [pytest.param(family, rank, marks=[] if (family, rank) in FAST else pytest.mark.slow)
         for family in FAMILIES for rank in (0, 4)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The embedded world's rows as files, so that the scripts treat the model as any other."""
    folder = tmp_path_factory.mktemp("rows")
    for name, found in (("sft", toy.demonstrations(24)), ("pairs", toy.pairs(24)),
                        ("prompts", toy.prompts(24))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (folder / "reward.py").write_text(
        "def digits(prompts, completions, **_):\n"
        "    return [sum(c.isdigit() for c in text) / 10 for text in completions]\n")
    return folder


def plain_logits(folder, rank, kind, ids):
    """What transformers alone, or PEFT, makes of a run folder."""
    if rank:
        kinds = {AutoModelForCausalLM: peft.AutoPeftModelForCausalLM,
                 AutoModelForSequenceClassification: peft.AutoPeftModelForSequenceClassification}
        options = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
        model = kinds[kind].from_pretrained(folder, **options)
    else:
        model = kind.from_pretrained(folder)
    return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family, rank", CASES)
def test_five_scripts(family, rank, rows, tmp_path):
    save_model(tiny_model(family), toy.tokenizer(), tmp_path / "base")
    def train(name, model, data, *flags):
        result = run(f"train_{name}.py", "--model", tmp_path / model, "--data",
                     rows / f"{data}.jsonl", *flags, "--max_steps", 2, "--lora_rank", rank,
                     "--out", tmp_path / name, cwd=tmp_path)
        assert result.status == 0, result.err
        found = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        assert all(math.isfinite(row["loss"]) for row in found)
        return found[0]

    few = ["--batch_size", 8, "--eval_prompts", 4, "--max_new_tokens", 8]
    reward = ["--reward", f"{rows}/reward.py:digits"]
    train("sft", "base", "sft", *few)
    dpo = train("dpo", "base", "pairs", *few, "--nll_coef", 0)
    assert dpo["loss"] == pytest.approx(math.log(2), abs=1e-5)
    grpo = train("grpo", "base", "prompts", *few, *reward, "--group_size", 2, "--kl_coef", 0.1)
    firsts, made = [grpo], ["sft", "dpo", "grpo"]
    if family not in NO_SCORER:
        rm = train("rm", "base", "pairs", "--batch_size", 8)
        assert rm["loss"] == pytest.approx(math.log(2), abs=1e-5)
        firsts.append(train("ppo", "base", "prompts", *few, "--reward_model",
                            tmp_path / "rm", "--critic_warmup", 0))
        made += ["ppo"]
    for row in firsts:
        assert abs(row["kl_k1"]) < 1e-6 and row["sampler_gap"] <= 2e-5
        assert row["ratio_max"] == pytest.approx(1, abs=1e-5)

    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "sft")("12+34=")["input_ids"]])
    with torch.no_grad():
        for name in made:
            ours, _ = load_policy(str(tmp_path / name))
            ours.set_attn_implementation("eager")
            theirs = plain_logits(tmp_path / name, rank, AutoModelForCausalLM, ids)
            torch.testing.assert_close(ours(input_ids=ids, use_cache=False).logits, theirs,
                                       atol=1e-5, rtol=1e-5)
        if family not in NO_SCORER:
            ours, _ = load_scorer(str(tmp_path / "rm"))
            ours.set_attn_implementation("eager")
            theirs = plain_logits(tmp_path / "rm", rank, AutoModelForSequenceClassification, ids)
            torch.testing.assert_close(ours(input_ids=ids, use_cache=False).logits, theirs,
                                       atol=1e-5, rtol=1e-5)
