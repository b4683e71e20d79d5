"""What evaluate prints: numbers by hand."""

import json

import pytest
import torch

from launch import run
from nanorlhf import data, evaluate, generate, toy
from nanorlhf.model import eos_ids, save_model
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import UserError


def test_histogram_of_margins():
    lines = evaluate.histogram(torch.tensor([-5.0, -4.9, 0.5, 0.0, 1.1, 1.9, 4.0, 0.1, 0.2]))
    assert [line.split() for line in lines] == [
        ["-5.000", "to", "-4.000", "2", "#" * 20], ["-4.000", "to", "-3.000", "0"],
        ["-3.000", "to", "-2.000", "0"], ["-2.000", "to", "-1.000", "0"],
        ["-1.000", "to", "0.000", "0"], ["0.000", "to", "1.000", "4", "#" * 40],
        ["1.000", "to", "2.000", "2", "#" * 20], ["2.000", "to", "3.000", "0"],
        ["3.000", "to", "4.000", "0"],
        ["4.000", "to", "5.000", "1", "#" * 10]]  # a value on a border lies above it
    lines = evaluate.histogram(torch.zeros(3))  # a head that starts at zero
    assert [int(line.split()[3]) for line in lines] == [0] * 5 + [3] + [0] * 4


def test_rank_and_length_bias_by_hand(monkeypatch):
    """Pairs whose chosen answer is longer, shorter, and as long; all ranked by length alone."""
    lengths = (3, 1), (4, 2), (5, 1), (1, 3), (2, 2)
    pairs = [(([0] * chosen, None), ([0] * rejected, None)) for chosen, rejected in lengths]
    scores = torch.tensor([[3., 1], [4, 2], [5, 1], [1, 3], [2, 2]])
    monkeypatch.setattr(evaluate, "pair_scores", lambda *_: scores)
    metrics, _ = evaluate.rank(None, pairs)
    assert metrics["accuracy"] == pytest.approx(3 / 5)
    assert metrics["length_bias"] == pytest.approx(1 - 3 / 4)
    assert metrics["margin"] == pytest.approx((2 + 2 + 4 - 2 + 0) / 5)


def test_pass_at_k_and_best_of_k():
    assert evaluate.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    found = evaluate.best_of([0, 1, 0, 1, 1, None, 1, 0], [1., 2, 3, 0, 5, 9, 5, 5], n=4)
    assert found == {"best_of@1": 0.5, "best_of@2": 1.0, "best_of@4": 0.0}  # None is left out


@pytest.mark.parametrize("base, kl", [("same", True), ("other", False)])
def test_kl_from_a_base_model(tmp_path, base, kl):
    for seed, name in enumerate(("same", "other")):
        save_model(toy.new_model(seed), toy.tokenizer(), tmp_path / name)
    found = evaluate.evaluate_policy(evaluate.Config(
        model=str(tmp_path / "same"), base=str(tmp_path / base), limit=4, max_new_tokens=8,
        device="cpu"))
    assert (abs(found["kl"]) < 1e-5) is kl


def test_a_reward_model_s_histogram_is_printed(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in toy.pairs(4)))
    result = run("train_rm.py", "--model", "toy", "--data", file, "--out", "rm", "--max_steps", 1,
                 cwd=tmp_path)
    assert result.status == 0, result.err
    result = run("nanorlhf.evaluate", "--model", "rm", "--data", file, cwd=tmp_path)
    assert result.status == 0, result.err
    assert "chosen - rejected" in result.out and result.out.count(" to ") == 10
    assert "length_bias" in result.out


def test_what_the_model_cannot_read_is_dropped_and_counted(tmp_path, capsys):
    model, tokenizer = toy.new_model(), toy.tokenizer()
    model.config.max_position_embeddings = 64
    save_model(model, tokenizer, tmp_path / "policy")
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1" * 60 + "+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.evaluate_policy(evaluate.Config(model=str(tmp_path / "policy"), data=str(file),
                                             max_new_tokens=4, device="cpu"))
    assert "dropped 1 of 2 rows: prompt longer than --max_len 64" in capsys.readouterr().err


@pytest.mark.parametrize("name, kind", [("prompt", "policy"), ("pairs_from", "policy"),
                                        ("base", "reward model"), ("reward_model", "reward model")])
def test_a_flag_of_the_other_kind_of_model_is_refused(monkeypatch, name, kind):
    monkeypatch.setattr(evaluate, "is_scorer", lambda path: kind == "reward model")
    with pytest.raises(UserError, match=f"--{name} does not go with m, which is a {kind}"):
        evaluate.evaluate(evaluate.Config(model="m", **{name: "x"}))


def test_kl_is_of_the_distributions_that_were_sampled_from(monkeypatch, tmp_path):
    save_model(toy.new_model(0), toy.tokenizer(), tmp_path / "policy")
    save_model(toy.new_model(1), toy.tokenizer(), tmp_path / "base")
    asked, score = [], evaluate.score_tokens
    monkeypatch.setattr(evaluate, "score_tokens", lambda model, batch, temperature, micro: (
        asked.append(temperature), score(model, batch, temperature, micro))[1])
    flags = dict(model=str(tmp_path / "policy"), base=str(tmp_path / "base"), device="cpu",
                 max_new_tokens=4, limit=4)
    assert evaluate.evaluate_policy(evaluate.Config(temperature=0.5, **flags))["kl"] > 0
    assert asked == [0.5, 0.5]
    with pytest.raises(UserError, match="--temperature above 0"):
        evaluate.evaluate(evaluate.Config(temperature=0.0, **flags))
    with pytest.raises(UserError, match="its --prompt"):
        monkeypatch.setattr(evaluate, "is_scorer", lambda path: True)
        evaluate.evaluate(evaluate.Config(model="rm", response="x"))


def test_an_answer_that_is_refused_is_an_error_not_a_wrong_answer():
    model, tokenizer = toy.new_model(), toy.tokenizer()
    prompts = data.encode_prompts(toy.prompts(2), tokenizer, 99)
    with pytest.raises(UserError, match="cannot be answered.*cache blocks"):
        evaluate.answer(Sampler(model, tokenizer, num_blocks=1), prompts, SamplingParams())


def test_prompts_of_a_file_with_a_capital_suffix_are_rows(tmp_path):
    (tmp_path / "ROWS.JSONL").write_text('{"prompt": "1+1="}\n')
    rows = generate.read_prompts(generate.Config(prompts=str(tmp_path / "ROWS.JSONL")))
    assert [row["prompt"] for row in rows] == ["1+1="]


def test_training_and_sampling_end_by_the_same_tokens():
    model, tokenizer = toy.new_model(), toy.tokenizer()
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [8, 9]
    sampler = Sampler(model, tokenizer)
    [sequence] = sampler._group(0, [5], SamplingParams(), 99)
    assert sequence.stop == eos_ids(model, tokenizer) == {tokenizer.eos_token_id, 8, 9}
