"""Verifiable rewards: a table of strings, the reported faults of PITFALLS.md, round trips."""

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf.rewards import (
    call_reward,
    extract_answer,
    format_reward,
    load_reward,
    math_reward,
    parse_number,
    read_gold,
    same_answer,
)
from nanorlhf.utils import UserError

# Shared machines are slow at times; the same examples every run; nothing is written to disk.
steady = settings(deadline=None, derandomize=True, database=None)


def reward(gold, completion):
    return math_reward(["q"], [completion], answer=[gold])[0]


# ---------------------------------------------------------------- extraction (RWD-1, RWD-2)

EXTRACT = [
    ("so 6 * 7\n#### 42", "42"),
    ("#### 42\n" + "z" * 500, "42"),
    ("#### 42" + " " * 500, "42"),
    ("#### 42" + " and so on" * 50, "42"),
    ("#### 42 " + "x" * 500, "42"),
    ("#### 18 apples", "18"),
    ("#### 18. That is the answer", "18."),
    ("#### 18 or 19", "18 or 19"),  # a hedge is not an answer
    ("#### 2 pi", "2 pi"),
    ("####\n42", "42"),
    ("#### 1\n#### 2\n", "2"),
    ("## Title\n##### Not a mark 3", None),
    ("##### 3", None),
    ("the sum is #### 7", "7"),
    ("#### 42\r\nmore", "42"),
    ("<think>\na\n#### 3\n</think>\n<answer>\n9\n</answer>", "9"),
    ("<answer>4</answer> no, <answer>5</answer>" + "." * 500, "5"),
    ("<answer>4</answer> no, <answer>5", None),  # cut off: 4 is not what was meant
    ("<answer></answer>", None),
    (r"<answer>\boxed{42}</answer>", r"42"),
    ("<answer>#### 42</answer>", "42"),
    (r"#### \boxed{42}", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"\boxed{\{1,2\}}.", r"\{1,2\}"),
    (r"$\boxed{a_{b}}$", "a_{b}"),
    (r"\boxed {7}", "7"),
    (r"\boxed{x \\}", r"x \\"),
    (r"\boxed{" + "\n5\n" + "}" + "y" * 500, "5"),
    (r"\boxed{\{}", r"\{"),
    (r"\boxed{3", None),
    (r"\boxed{3\}", None),
    (r"\boxed{{3}", None),
    (r"\boxed{}", None),
    (r"\boxed", None),
    ("The answer is 18.", None),
    ("18", "18"),
    (" **1,000** ", "**1,000**"),
    ("12 13", None),
    ("", None),
    ("#### ", None),
    ("####", None),
]


@pytest.mark.parametrize(("text", "answer"), EXTRACT)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_balanced_braces_of_any_depth():
    for depth in range(30):
        content = "{" * depth + "x" + "}" * depth
        assert extract_answer(rf"a }} \boxed{{{content}}} }} b") == content
        assert extract_answer(rf"\boxed{{{content}") is None


# ---------------------------------------------------------------- equality (RWD-4, RWD-6)

EQUAL = [
    ("1000", "1,000"), ("1000", "1{,}000"), ("1234567.5", "1,234,567.50"), ("2/3", r"\frac{2}{3}"),
    ("2/3", r"\dfrac{ 2 }{ 3 }"), ("2/3", "4/6"), ("-2/3", r"-\frac{2}{3}"), ("-2/3", "2/-3"),
    ("0.5", "1/2"), ("73", "**73**"), ("73", "$73$."), ("73", "`73`"), ("73", "_73_"),
    ("73", r"\(73\)"), ("73", r"\[ 73 \]"), ("73", "**$73$**."), ("73", " 73\n"), ("73", "+73"),
    ("42", r"<answer>\boxed{42}</answer>"), ("5", "5.0"), ("5", "5."), ("5", "005"), (5, "5"),
    (5.0, "5"), (0.25, "1/4"), (1e20, "100000000000000000000"), ("-7", "\u22127"), ("-7", "- 7"),
    ("18", "$18"), ("18", r"\$18"), ("-18", "-$18.00"), ("50%", "50"), ("50", r"50\%"),
    (".5", "0.50"), ("0", "-0"), ("18", "#### 18"), ("so 9 * 2 = 18\n#### 18", "18"),
    (r"we get $\boxed{\frac{1}{2}}$", "0.5"), ("B", r"\boxed{B}"), ("(B)", "(B)"),
    (r"\{1,2\}", r"\boxed{\{1, 2\}}"), ("x=1", r"\boxed{x = 1}"), ("n=1,2,3", "n=1,2,3"),
    (r"\text{even}", r"\boxed{\text{even}}"), ("1/2^99", r"#### 1/2^99"),
    ("x=" + "1" * 2000, "#### x=" + "1" * 2000),
]

DIFFERENT = [
    ("n=2,3,4", "n=1,2,3"), ("1/2^99", "1/2^98"), ("3x\u2212y+13=0", "3x+4y+14=0"), ("5", "50"),
    ("5", "-5"), ("5", "5 or 6"), ("5", "#### 5 or 6"), ("1", "1/2"), ("12", "1 2"), ("12", "1$2"),
    ("6", "2*3"), ("23", "2**3"), ("512", r"5\frac{1}{2}"), ("11/2", r"1\frac{1}{2}"),
    ("42", "42x"), ("2/34", r"\frac{2}{3}4"), ("18", "#### 18 maybe 19"), (r"\(\)", ""),
    ("1000", "1,00"), ("1", "0,001"), ("1000", "1, 000"), ("3", r"\boxed{3"), ("0", "1/0"),
    ("0", ""), ("0", "0/0"), ("0", "nan"), ("18", "the answer is 18"), ("18", "see proof"),
    ("0.3333", "1/3"), ("0.5", "50%"), ("1000", "1.000"), ("1", "1^(9^9)"), ("x", "X"),
    ("10", "1e1000000000"), ("3", "\u0663"), (r"\frac{1}{3}", r"\frac{1}{2}"), ("5", "--5"),
    ("1/2^99", "1"), ("x+y", "x y"), (str(10**30), str(10**30 + 1)), ("1/3", "0." + "3" * 60),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers(gold, answer):
    assert reward(gold, answer) == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers(gold, answer):
    assert reward(gold, answer) == 0.0
    assert reward(answer, gold) in (0.0, None)


def formats(n):
    """Ways to write the integer n."""
    return [str(n), f"{n:,}", f"{n}.0", f"{n:,}.00", f"${n:,}", f"**{n}**", f"{n}/1", f"{2 * n}/2",
            f"{n}%", rf"\frac{{{n}}}{{1}}", f" {n}.\n", f"{n:,}".replace(",", "{,}")]


@steady
@given(st.integers())
def test_every_way_to_write_an_integer_is_equal(n):
    for text in formats(n):
        assert parse_number(text) == n
        assert reward(n, f"so\n#### {text}") == 1.0
        assert reward(text, rf"\boxed{{{n}}}") == 1.0


@steady
@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12))
def test_decimals_keep_their_value(x):
    assert reward(f"{x:f}", f"#### {x:,f}0" if "." in f"{x:f}" else f"#### {x:,f}.0") == 1.0
    assert parse_number(f"{x:,f}") == x


@steady
@given(st.integers(), st.integers())
def test_different_integers_are_never_equal(n, m):
    for a, b in zip(formats(n), reversed(formats(m)), strict=True):
        assert same_answer(a, b) == (n == m)


@steady
@given(st.text(max_size=200), st.text(max_size=20))
def test_any_text_gives_an_answer_or_none_and_no_crash(text, gold):
    assert reward(gold, text) in (0.0, 1.0, None)
    assert format_reward([""], [text])[0] in (0.0, 1.0)


@steady
@given(st.text(alphabet=r"\boxed{}frac1/,.$#*<answer> " + "\n", max_size=300))
def test_hostile_alphabet(text):
    assert reward("1", text) in (0.0, 1.0)
    extract_answer("\\boxed{" + text)


# ---------------------------------------------------------------- unreadable references (RWD-8)

UNREADABLE = [
    "", " ", "\n", None, "see proof", "See proof.", "proof", "N/A", "nan", "None", "-", "?", "...",
    "$$", float("nan"), float("inf"), "the proof is left to the reader", [], ["18"], True, "####",
    "He has 5 apples and eats 2, which leaves 3.", "#### see proof", r"\boxed{3", "#### ",
    "<answer></answer>", "see theorem 3 above",
]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_unreadable_gold_is_none_whatever_the_completion(gold):
    for text in ["", "18", "#### 18", str(gold), rf"\boxed{{{gold}}}"]:
        assert reward(gold, text) is None


def test_gold_of_gsm8k():
    assert read_gold("He has <<3*6=18>>18 eggs.\n#### 1,018") == "1,018"
    assert read_gold(18) == "18"


# ---------------------------------------------------------------- no hang (RWD-9)

SPACES = " " * 900
HOSTILE = [
    "#### 9^(9^9)", r"\boxed{9^{9^{9}}}", "#### 1e999999999", "#### 9**9**9", "{" * 10_000,
    "\\boxed{" * 10_000, "\\boxed{" + "{" * 10_000 + "}" * 10_000, "\\boxed{" * 9999 + "}" * 9999,
    "#### " + "9" * 1_000_000, "9" * 1_000_000, "#### " + "1,000" * 200_000, "<answer>" * 125_000,
    "<think>" * 140_000, "#" * 1_000_000, "#### " * 200_000, " " * 1_000_000 + "x", "*" * 999 + "x",
    "\\boxed" + " " * 1_000_000, "<answer>" + " " * 1_000_000, "\\" * 1_000_001, "\n" * 1_000_000,
    "#### " + "$ " * 450 + "x", "#### a" + SPACES + "b", rf"#### \frac{{{SPACES}}}{{{SPACES}}}x",
    rf"#### \frac{{{SPACES}", "#### 1" + SPACES + "/" + "x", "#### " + "1" * 990 + "x",
    "#### 5 " + "abc " * 250_000 + "7", "__import__('os').system('x')",
    "\\boxed{" + "a" * 1_000_000, "#### a" + "$" * 100_000 + "x", "#### " + "-" * 990,
    "#### " + "**" * 480 + "x", r"\frac{1" * 150,
]


def seconds_of_the_slowest(texts, check):
    seconds = []
    for text in texts:
        start = time.perf_counter()
        check(text)
        seconds.append(time.perf_counter() - start)
    return max(seconds)


def test_hostile_answers_are_zero_in_time_in_a_worker_thread():
    def check(text):
        assert math_reward(["q"], [text], answer=["5"]) == [0.0]
        assert format_reward(["q"], [text]) == [0.0]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(seconds_of_the_slowest, HOSTILE, check).result() < 5.0


def test_hostile_gold_in_time():
    def check(text):
        assert reward(text, "5") in (0.0, None)

    assert seconds_of_the_slowest(HOSTILE, check) < 5.0


# ---------------------------------------------------------------- format (RWD-1)

FORMAT = [
    ("3 + 4 = 7\n#### 7", 1), ("#### 7", 1), ("#### -1,000.5\n", 1), ("#### 2/3", 1),
    ("a\r\n#### 7", 1),
    ("#### 7\nmore", 0), ("#### 6\n#### 7", 0), ("is #### 7", 0), ("####7", 0), ("#### seven", 0),
    ("####", 0), ("#### ", 0), ("##### 7", 0), ("#### 7 8", 0), ("7", 0), ("", 0),
    ("#### seven\n7", 0), ("#### x\n#### ", 0),
    ("<think>a</think><answer>9</answer>", 1),
    ("<think>\na\nb\n</think>\n<answer>9\n</answer>\n", 1),
    ("<think></think><answer>9</answer>", 1),
    ("<think>a</think><answer>9", 0), ("<think>a<answer>9</answer>", 0), ("<answer>9</answer>", 0),
    ("a</think><answer>9</answer>", 0), ("<think>a</think>9", 0), ("<think>a</think>", 0),
    ("<think>a</think><answer>8</answer><answer>9</answer>", 0),
    ("<think>a</think><think>b</think><answer>9</answer>", 0),
    ("<answer>9</answer><think>a</think>", 0), ("<think>a</think><answer> </answer>", 0),
    ("<think>a</think><answer>9</answer> so", 0), ("so <think>a</think><answer>9</answer>", 0),
    ("<think>a</think> so <answer>9</answer>", 0), ("<think>a\n#### 7", 0),
    ("<think><answer>9</answer></think>", 0),
]


@pytest.mark.parametrize(("text", "expected"), FORMAT)
def test_format_reward(text, expected):
    assert format_reward(["q"], [text]) == [float(expected)]


# ---------------------------------------------------------------- call_reward (GRPO-5, TNY-6)

def constant(scores):
    def my_reward(prompts, completions, **_):
        return scores
    return my_reward


@pytest.mark.parametrize("scores", [
    [1, None, 0.5], (True, None, np.float32(0.5)), [np.int64(1), None, torch.tensor(0.5)],
    torch.tensor([1, float("nan"), 0.5], dtype=torch.bfloat16), np.array([1, np.inf, 0.5]),
    np.array([1, None, 0.5], dtype=object), [1.0, float("-inf"), 0.5], [1, np.nan, 0.5],
])
def test_scores_become_floats_or_none(scores):
    got = call_reward(constant(scores), ["p"] * 3, ["c"] * 3)
    assert got == [1.0, None, 0.5]
    assert all(x is None or type(x) is float for x in got)


@pytest.mark.parametrize("scores", [
    [1, 0], [1] * 4, [], None, 1.0, "abc", [1, 0, [1]], {1: 1, 2: 1, 3: 1},
    torch.tensor(1.0), np.zeros((3, 2)), [1, 0, "x"], [1, 0, 1j],
])
def test_bad_scores_name_the_reward(scores):
    with pytest.raises(UserError, match="my_reward") as error:
        call_reward(constant(scores), ["p"] * 3, ["c"] * 3)
    assert "\n" not in str(error.value)


def test_columns_reach_the_reward():
    columns = {"answer": ["1", 2, None, "2"], "finish_reasons": ["stop"] * 4}
    rows = (["q"] * 4, ["#### 1", "2", "3", ""])
    assert call_reward(math_reward, *rows, **columns) == [1.0, 1.0, None, 0.0]
    assert call_reward(format_reward, *rows, **columns) == [1.0, 0.0, 0.0, 0.0]
    assert call_reward(math_reward, [], [], answer=[]) == []


def test_missing_column_or_keyword_is_a_clear_error():
    with pytest.raises(UserError, match=r"math_reward.*'answer'.*finish_reasons"):
        call_reward(math_reward, ["q"], ["c"], finish_reasons=["stop"])
    with pytest.raises(UserError, match="<lambda>.*finish_reasons.*\\*\\*_"):
        call_reward(lambda prompts, completions: [0.0], ["q"], ["c"], finish_reasons=["stop"])


def test_an_error_inside_a_reward_is_not_hidden():
    def broken(prompts, completions, **_):
        raise TypeError("mine")
    with pytest.raises(TypeError, match="mine"):
        call_reward(broken, ["q"], ["c"])


# ---------------------------------------------------------------- load_reward

OWN = """
from dataclasses import dataclass
import math

@dataclass
class Bonus:
    size: "int" = 1

calls = 0

def length(prompts, completions, **columns):
    global calls
    calls += 1
    return [float(len(c)) if c else None for c in completions]

class Stateful:
    def __call__(self, prompts, completions, **columns):
        return [Bonus().size * math.pi] * len(prompts)

stateful = Stateful()
number = 3
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "math.py"  # must not shadow the module of this name
    path.write_text(OWN)
    return path


def test_built_in_rewards():
    assert load_reward("math") is math_reward
    assert load_reward("format") is format_reward


def test_own_file(own, tmp_path, monkeypatch):
    fn = load_reward(f"{own}:length")
    assert call_reward(fn, ["q"] * 2, ["abc", ""], answer=["1", "2"]) == [3.0, None]
    assert call_reward(load_reward(f"{own}:stateful"), ["q"], ["c"]) == [math.pi]
    monkeypatch.chdir(tmp_path)
    assert call_reward(load_reward("math.py:length"), ["q"], ["ab"]) == [2.0]


@pytest.mark.parametrize("spec", [
    "nope", "", "math.py", "nope.py:length", "{own}:nope", "{own}:number", "{own}:", "{own}",
    ":f", "{dir}:f", "math+format",
])
def test_what_cannot_be_loaded_is_one_clear_line(spec, own):
    with pytest.raises(UserError, match="reward") as error:
        load_reward(spec.format(own=own, dir=own.parent))
    assert "\n" not in str(error.value)


def test_numbers_that_float32_cannot_hold_and_rewards_that_eat_their_lists(tmp_path):
    assert call_reward(lambda p, c: [1e39, -1e39, 2.0], [""] * 3, [""] * 3) == [None, None, 2.0]
    with pytest.raises(UserError, match="a list of 1 numbers"):
        call_reward(lambda p, c: [10**400], [""], [""])
    with pytest.raises(UserError, match="a list of 2 numbers"):
        call_reward(lambda p, c: [c.pop() and 1.0] * len(c), ["", ""], ["a", "b"])


def test_a_reward_file_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_helper_of_rewards.py").write_text("worth = 3.0\n")
    (tmp_path / "own.py").write_text("from my_helper_of_rewards import worth\n"
                                     "def reward(p, c, **_): return [worth] * len(c)\n")
    assert call_reward(load_reward(f"{tmp_path}/own.py:reward"), ["q"], ["c"]) == [3.0]
