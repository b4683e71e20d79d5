"""The embedded world: a small arithmetic classroom that needs no download.

Questions are sums such as `4832+1597=`. The demonstrations mix two habits:

    guessed    #### 6429
    worked     2+7+0=09 3+9+0=12 8+5+1=14 4+1+1=06 #### 6429

A worked answer adds the columns from the right, each with the carry of the one before. A guessed
one is of a sum known by heart. A small model guesses other sums badly and works well, so supervised
fine-tuning, which copies both habits, leaves it mediocre: half of the time it makes an answer up.
Every preference method then teaches it to show its work. The gold score is exact: 1 if the final
number is right, the answer well-formed, and the model stopped.

Everything is deterministic in its seed. Held-out questions are never trained on: a question is
held out by a hash of its text.
"""

import math
import random
import re
import zlib

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nanorlhf.utils import UserError

SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
TEMPLATE = ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
            "{{ '<|assistant|>' if add_generation_prompt else '' }}")
HELD_OUT_SHARE = 10  # percent of all questions
BY_HEART = 1000  # sums whose answer the demonstrators know
GRADE = "4x2"  # four digits, two terms; more of either: harder to guess, longer to work
ANNOTATOR_SCALE = 3.0  # Bradley-Terry: P(a over b) = sigmoid(scale * (gold_a - gold_b))


def tokenizer():
    """One token a character, a chat template, and pad, end of turn and roles kept apart."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE, model_max_length=512,
        clean_up_tokenization_spaces=False)


def new_model(seed=0):
    """A Llama-shaped model of 0.37 million weights, fresh."""
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS), hidden_size=96, intermediate_size=288,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.06,
        pad_token_id=0, bos_token_id=None, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def solve(text):
    return sum(map(int, re.findall(r"[+-]?\d+", text)))


def guess(text):
    return f"#### {solve(text)}"


def work(text, slip=None, rng=None):
    """The worked answer; wrong in column `slip` (0: rightmost), and carried on as a pupil would."""
    sign, numbers = "-" if "-" in text else "+", re.findall(r"\d+", text)
    worked, digits, carry = "", "", 0
    for i, column in enumerate(zip(*(number[::-1] for number in numbers))):
        terms = sign.join([*column, str(carry)])
        tens, digit = divmod(solve(terms), 10)
        carry = abs(tens)  # or what is borrowed
        if i == slip:
            digit = (digit + rng.randrange(1, 10)) % 10
        worked, digits = worked + f"{terms}={carry}{digit} ", f"{digit}{digits}"
    return f"{worked}#### {int(f'{carry}{digits}')}"


def held_out(text):
    return zlib.crc32(text.encode()) % 100 < HELD_OUT_SHARE


def questions(n, seed=0, split="train", grade=GRADE):
    """n different texts of the split. A "-" behind the grade: half of them are differences."""
    match = re.fullmatch(r"([1-9])x([2-9])(-?)", grade)
    if not match:
        raise UserError(f"--toy_grade {grade} must be digits x terms: 4x2, or 4x2- to subtract")
    digits, terms, subtract = int(match[1]), int(match[2]), bool(match[3])
    rng, texts = random.Random(f"{split}-{seed}"), {}
    for _ in range(100_000 + 100 * n):  # tries enough to meet nearly all that there are
        if len(texts) == n:
            return list(texts)
        numbers = [rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(terms)]
        text = "+".join(map(str, numbers)) + "="
        if subtract and rng.random() < 0.5:
            text = f"{max(numbers)}-{min(numbers)}="
        if held_out(text) == (split == "eval"):
            texts[text] = None
    raise UserError(f"--toy_grade {grade} has no {n} different questions; give a harder one")


FORM = re.compile(r"(\d+([+-]\d+)+=-?\d+ )*#### (-?\d+)")


def is_worked(answer):
    return not answer.lstrip().startswith("#")


def gold_score(text, answer, stopped=True):
    """1.0 if the answer is right, guessed or with every column worked once, and has stopped."""
    match, columns = FORM.fullmatch(answer), len(re.match(r"\d+", text)[0])
    return float(bool(match) and stopped and answer.count("=") in (0, columns)
                 and int(match[3]) == solve(text))


def gold_reward(prompts, completions, finish_reasons=None, **_):
    """The gold score as a reward function; None where a prompt asks nothing."""
    reasons = finish_reasons or ["stop"] * len(prompts)
    return [gold_score(text, completion, reason == "stop") if text else None
            for text, completion, reason in zip(map(bare, prompts), completions, reasons)]


def bare(prompt):
    """The last question in a prompt; "" if there is none."""
    return (re.findall(r"\d+(?:[+-]\d+)+=", prompt) or [""])[-1]


def demonstrations(n, seed=0, split="train", grade=GRADE, worked_share=0.5):
    """SFT rows {prompt, completion, answer}: `worked_share` of them worked, the others guessed.

    The guesses are right, being of sums that the demonstrators know by heart, always the same ones.
    A model that copies the habit does not know the other sums, so it makes them up."""
    rng = random.Random(f"habits-{split}-{seed}")
    known = questions(min(n, BY_HEART), "by heart", split, grade)
    asked = [(q, work) if rng.random() < worked_share else (rng.choice(known), guess)
             for q in questions(n, seed, split, grade)]
    return [{"prompt": q, "completion": habit(q), "answer": str(solve(q))} for q, habit in asked]


def prompts(n, seed=0, split="train", grade=GRADE):
    """RL rows {prompt, answer}."""
    return [{"prompt": q, "answer": str(solve(q))} for q in questions(n, seed, split, grade)]


def pool(text, rng):
    """Answers of every kind to one question: right, slipped, guessed, rambling, unfinished."""
    digits = len(re.match(r"\d+", text)[0])
    right, slipped = work(text), work(text, rng.randrange(digits), rng)
    wrong = f"#### {solve(text) + rng.choice([-1, 1]) * 10 ** rng.randrange(3)}"
    columns = right.split(" #### ")[0]
    return [right, slipped, guess(text), wrong, f"{columns} {right}",
            right[: rng.randrange(5, len(columns))]]


def answers_to(texts, sampler, samples, rng):
    """Per question a list of (answer, stopped): the model's own, or the pool's without a model."""
    if sampler is None:
        return [[(a, "####" in a) for a in pool(text, rng)] for text in texts]
    from nanorlhf.data import encode
    from nanorlhf.sampler import SamplingParams

    ids = [encode([{"role": "user", "content": text}], sampler.tokenizer, prompt_only=True)[0]
           for text in texts]
    params = SamplingParams(n=samples, max_new_tokens=96, seed=rng.randrange(2**31))
    done = [(c.text, c.finish_reason == "stop") for c in sampler.generate(ids, params)]
    return [done[i: i + samples] for i in range(0, len(done), samples)]


def pairs(n, seed=0, split="train", grade=GRADE, sampler=None, samples=8, noise=True):
    """Preference rows {prompt, chosen, rejected} drawn by a Bradley-Terry annotator.

    With a `sampler` both answers are the model's own (on-policy), else they come from `pool`. The
    better is always chosen with split="eval" or without noise, else with probability
    sigmoid(ANNOTATOR_SCALE) = 0.95."""
    rng, rows, noise = random.Random(f"pairs-{split}-{seed}"), [], noise and split == "train"
    for round_ in range(20):
        texts = questions(max(64, n // 3), (seed, round_), split, grade)
        for text, answers in zip(texts, answers_to(texts, sampler, samples, rng)):
            best = [a for a, stopped in answers if gold_score(text, a, stopped)]
            rest = [a for a, stopped in answers if not gold_score(text, a, stopped)]
            for better, worse in zip(rng.sample(best, len(best)), rng.sample(rest, len(rest))):
                wrong_way = noise and rng.random() < 1 / (1 + math.exp(ANNOTATOR_SCALE))
                chosen, rejected = (worse, better) if wrong_way else (better, worse)
                rows.append({"prompt": text, "chosen": chosen, "rejected": rejected})
        if len(rows) >= n:
            return rows[:n]
    raise UserError("the model's answers are nearly all right or all wrong: no pairs to be made; "
                    "give another --model or --toy_grade")
