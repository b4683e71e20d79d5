"""The embedded world: exact sums, an exact judge, an annotator that errs as often as it says."""

import math
import random
import re

import pytest

from nanorlhf import toy
from nanorlhf.data import encode
from nanorlhf.toy import (
    bare, gold_reward, gold_score, guess, held_out, is_worked, questions, solve, work,
)
from nanorlhf.utils import UserError

GRADES = ["3x2", "4x2", "4x2-", "2x3", "5x4"]


def texts(grade, n=200):
    return questions(n, grade=grade)


@pytest.mark.parametrize("grade", GRADES)
def test_solve_guess_and_work_agree(grade):
    for text in texts(grade):
        expected = eval(text.rstrip("="))
        assert solve(text) == expected
        for answer in (guess(text), work(text)):
            assert int(answer.split("#### ")[1]) == expected
            assert gold_score(text, answer) == 1.0
        assert is_worked(work(text)) and not is_worked(guess(text))


@pytest.mark.parametrize("grade", GRADES)
def test_every_column_of_a_worked_answer_is_a_true_sum(grade):
    """The carry is written before the digit; a borrow stands for minus ten."""
    for text in texts(grade, 50):
        for column in work(text).split(" #### ")[0].split():
            terms, result = column.split("=")
            carry, digit = int(result[:-1]), int(result[-1])
            assert eval(terms) == digit + (-10 if "-" in terms else 10) * carry


def test_a_worked_answer_by_hand():
    assert work("4832+1597=") == "2+7+0=09 3+9+0=12 8+5+1=14 4+1+1=06 #### 6429"
    assert work("52-38=") == "2-8-0=14 5-3-1=01 #### 14"
    assert work("55-55=") == "5-5-0=00 5-5-0=00 #### 0"


@pytest.mark.parametrize("grade", GRADES)
def test_every_slip_makes_the_answer_wrong(grade):
    rng = random.Random(0)
    for text in texts(grade, 50):
        for slip in range(int(grade[0])):
            answer = work(text, slip, rng)
            assert toy.FORM.fullmatch(answer)  # looks like any other
            assert int(answer.split("#### ")[1]) != solve(text)
            assert gold_score(text, answer) == 0.0


@pytest.mark.parametrize("grade", GRADES)
def test_of_the_pools_answers_two_are_right(grade):
    rng = random.Random(1)
    for text in texts(grade, 50):
        right, slipped, guessed, wrong, rambling, unfinished = toy.pool(text, rng)
        scores = [gold_score(text, answer, "####" in answer) for answer in
                  (right, slipped, guessed, wrong, rambling, unfinished)]
        assert scores == [1, 0, 1, 0, 0, 0], (text, slipped)


@pytest.mark.parametrize("answer, stopped, score", [
    ("#### 46", True, 1.0),
    ("2+4+0=06 1+3+0=04 #### 46", True, 1.0),
    ("#### 46", False, 0.0),  # did not stop
    ("#### 47", True, 0.0),
    ("#### 046", True, 1.0),  # the number counts
    ("2+4+0=06 #### 46", True, 0.0),  # a column is missing
    ("2+4+0=06 1+3+0=04 2+4+0=06 1+3+0=04 #### 46", True, 0.0),  # rambling
    ("2+4+0=06 1+3+0=04", True, 0.0),  # unfinished
    ("2+4+0=06 1+3+0=04 #### 46 #### 46", True, 0.0),
    ("#### 46 ", True, 0.0), (" #### 46", True, 0.0), ("46", True, 0.0), ("", True, 0.0),
    ("#### 46\n", True, 0.0),
])
def test_gold_score_is_exact(answer, stopped, score):
    assert gold_score("12+34=", answer, stopped) == score


def test_gold_reward_reads_prompts_of_every_kind_and_who_stopped():
    rendered = toy.tokenizer().apply_chat_template([{"role": "user", "content": "1+2="}],
                                                   tokenize=False, add_generation_prompt=True)
    prompts = ["1+2=", rendered, "user: 1+1=\nassistant: #### 2\nuser: 1+2=", "1+2="]
    assert {bare(prompt) for prompt in prompts} == {"1+2="}
    reasons = ["stop", "stop", "stop", "length"]
    assert gold_reward(prompts, ["#### 3"] * 4, finish_reasons=reasons) == [1, 1, 1, 0]
    assert gold_reward(prompts, ["#### 3"] * 4) == [1, 1, 1, 1]


# --- rows -----------------------------------------------------------------------------------------


def test_held_out_questions_are_never_trained_on():
    train = {row["prompt"] for seed in range(3) for row in toy.demonstrations(1000, seed)}
    train |= {row["prompt"] for row in toy.prompts(1000, 7)}
    train |= {row["prompt"] for row in toy.pairs(300, 8)}
    tests = {row["prompt"] for row in toy.prompts(500, split="eval")}
    tests |= {row["prompt"] for row in toy.pairs(100, split="eval")}
    assert not train & tests
    assert not any(map(held_out, train)) and all(map(held_out, tests))
    assert len(set(questions(500))) == 500


@pytest.mark.parametrize("rows", [toy.demonstrations, toy.prompts, toy.pairs])
def test_rows_are_a_function_of_the_seed(rows):
    random.seed(1)
    first = rows(50, seed=3)
    random.seed(2)
    assert rows(50, seed=3) == first and rows(50, seed=4) != first
    assert rows(50, seed=3, split="eval") != first


def test_demonstrations_mix_two_habits():
    worked = [is_worked(row["completion"]) for row in toy.demonstrations(2000)]
    assert abs(sum(worked) / 2000 - 0.5) < 4 * 0.5 / math.sqrt(2000)  # four standard errors
    assert all(is_worked(row["completion"]) for row in toy.demonstrations(50, worked_share=1.0))


def test_the_annotator_errs_as_bradley_and_terry_say():
    """P(better is chosen) = sigmoid(3) = 0.953; without noise always."""
    def better_chosen(row):
        scores = [gold_score(row["prompt"], row[name], "####" in row[name])
                  for name in ("chosen", "rejected")]
        assert scores[0] != scores[1]
        return scores[0] > scores[1]

    n, p = 4000, 1 / (1 + math.exp(-toy.ANNOTATOR_SCALE))
    share = sum(map(better_chosen, toy.pairs(n))) / n
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert all(map(better_chosen, toy.pairs(500, noise=False)))


def test_grades():
    for text in ("", "4", "0x2", "4x1", "x", "4x2+", "44x2"):
        with pytest.raises(UserError, match="toy_grade"):
            questions(1, grade=text)
    assert all(re.fullmatch(r"\d{4}\+\d{4}=", t) for t in questions(20))
    assert all(re.fullmatch(r"\d{3}\+\d{3}\+\d{3}=", t) for t in questions(20, grade="3x3"))
    signs = [("-" in t) for t in texts("4x2-")]
    assert 0.3 < sum(signs) / len(signs) < 0.7
    with pytest.raises(ValueError, match="100 different questions"):
        questions(100, grade="1x2")


# --- tokenizer and model --------------------------------------------------------------------------


def test_every_character_survives_the_tokenizer():
    tokenizer = toy.tokenizer()
    text = "".join(toy.CHARACTERS) + "  two  spaces\n\n, . ' n't "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("ä")["input_ids"] == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_a_conversation_through_the_template():
    tokenizer = toy.tokenizer()
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="},
             {"role": "assistant", "content": "#### 2"}]
    ids, mask = encode(turns, tokenizer)
    assert tokenizer.decode(ids) == ("<|system|>Be short.<|end|><|user|>1+1=<|end|>"
                                     "<|assistant|>#### 2<|end|>")
    assert tokenizer.decode([i for i, m in zip(ids, mask) if m]) == "#### 2<|end|>"
    assert ids.count(tokenizer.eos_token_id) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Be short.1+1=#### 2"


def test_a_saved_tokenizer_is_the_same(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = toy.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(toy.CHARACTERS) + "<|user|>1+1= <|end|>"
    assert other(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert other.decode(other(text)["input_ids"]) == text
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.chat_template == tokenizer.chat_template
    assert (other.pad_token, other.eos_token) == ("<|pad|>", "<|end|>")


def test_the_model_is_a_function_of_its_seed_and_leaves_torch_alone():
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = toy.new_model(1), toy.new_model(1), toy.new_model(2)
    assert torch.equal(before, torch.get_rng_state())
    weights = [next(m.parameters()) for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert len(toy.tokenizer()) == a.config.vocab_size
