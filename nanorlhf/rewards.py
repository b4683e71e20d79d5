r"""Verifiable rewards: what the text of an answer is worth.

A reward is any callable `(prompts, completions, **columns) -> list[float | None]`. Completions are
strings; columns are lists with one entry per row: those of the data (`answer`, ...) and
`finish_reasons`. None means "cannot be judged": the row is masked and counted, never a zero.
Answers are compared as exact fractions or else as text. Nothing is evaluated, and patterns that
could be slow see at most LIMIT characters: no completion can hang a run, no time limit is needed.
"""

import inspect
import re
import runpy
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from nanorlhf import toy
from nanorlhf.utils import UserError

LIMIT = 1000  # characters; a longer "answer" is compared as it stands
MARK = re.compile(r"(?<!#)####(?!#)|\\boxed\s*\{|<answer>")
TAG = re.compile(r"</?(?:think|answer)>")
EDGES = re.compile(r"^(?:\*\*|[\s$`])+|(?:\*\*|[\s$`%.,;])+$")
DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d\d?)?"
NUMBER = re.compile(rf"([+-]?)\s*\$?({DECIMAL})(?:\s*/\s*(-?{DECIMAL}))?\s*", re.ASCII)
FRACTION = re.compile(r"^([+-]?)\s*\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}$")
WORDS = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")  # ordinary words, not LaTeX commands


def extract_answer(text):
    r"""The answer that a text gives, or None.

    The mark that *starts* last decides, so that an inner mark wins over the one around it:
    `#### x` (up to the end of the line, words after a number dropped: `#### 18 apples`),
    `\boxed{x}` (braces balanced) or `<answer>x</answer>`. If that one is unclosed or empty there is
    no answer. A text without any mark is an answer only if it is a number and nothing else."""
    marks = list(MARK.finditer(text))
    if not marks:
        return text.strip() if parse_number(text) is not None else None
    rest = text[marks[-1].end():]
    if marks[-1][0] == "<answer>":
        answer, closed, _ = rest.partition("</answer>")
        return (closed and answer.strip()) or None
    if marks[-1][0] == "####":
        answer = rest.strip().partition("\n")[0].partition("</answer>")[0]
        number, _, words = answer.partition(" ")
        drop = re.fullmatch(r"\s*[^\W\d_]{3}\D*", words) and parse_number(number) is not None
        return (number if drop else answer).strip() or None
    depth = 1
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # \{ and \} are no braces
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return rest[:token.start()].strip() or None
    return None


def _clean(text):
    """Markup, currency and percent signs at the edges, LaTeX spacing and odd minus signs away."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace(r"\!", "").replace(r"\%", "%")
    return EDGES.sub("", re.sub(r"\\[$()\[\]]", "$", text))


def parse_number(text):
    r"""Exact value or None: 1,000  -5.0  $3.50  50% (= 50, not 0.5)  2/3  \frac{2}{3}  1e3."""
    text = FRACTION.sub(r"\1\2/\3", _clean(text).strip("*_")) if len(text) <= LIMIT else ""
    if not (number := NUMBER.fullmatch(text)):
        return None
    sign, over, under = (part.replace(",", "") for part in number.groups(default="1"))
    return Fraction(sign + over) / Fraction(under) if Fraction(under) else None


def same_answer(a, b):
    """Equal as exact numbers or, where neither is a number, as text up to blanks."""
    if max(len(a), len(b)) > LIMIT:
        return a.strip() == b.strip()
    x, y = parse_number(a), parse_number(b)
    if x is not None or y is not None:
        return x == y
    # Blanks count only between two words or numbers: "x = 1" is "x=1", but "1 2" is not "12".
    a, b = (re.sub(r"(?<!\w) | (?!\w)", "", " ".join(_clean(text).split())) for text in (a, b))
    return a == b != ""


def read_gold(gold):
    """The reference answer in a data set's cell, or None if there is nothing to compare with.

    The cell holds a bare answer ("18", 5) or a solution with a mark (GSM8K's "... #### 18").
    Unreadable: empty, a lone word or sign, prose ("see proof", a solution without a mark)."""
    gold = str(gold) if isinstance(gold, (str, int, float)) else ""
    gold = extract_answer(gold) if MARK.search(gold) else gold.strip()
    if not gold or len(set(WORDS.findall(gold))) > 1:
        return None
    letter = re.fullmatch(r"\(?[^\W\d_]\)?", gold)  # a choice such as (B), or a variable
    return gold if letter or re.search(r"[\d\\=+^_]", gold) else None


def math_reward(prompts, completions, answer, **_):
    """1.0 where the completion gives the reference answer, else 0.0; None if that is unreadable."""
    return [None if gold is None else float(same_answer(extract_answer(text) or text, gold))
            for text, gold in zip(completions, map(read_gold, answer), strict=True)]


def format_reward(prompts, completions, **_):
    """1.0 where the only #### is a last line `#### number`, or where the text is one <think> and
    one filled <answer> block and nothing else; 0.0 otherwise (a tag missing, a second block)."""
    def well_formed(text):
        tags = TAG.findall(text)
        if tags == ["<think>", "</think>", "<answer>", "</answer>"]:
            before, _, between, answer, after = map(str.strip, TAG.split(text))
            return answer != "" and before + between + after == ""
        mark, number = text.strip().rpartition("\n")[2][:5], text.rpartition("####")[2]
        return (not tags and text.count("####") == 1 and mark == "#### "
                and parse_number(number) is not None)
    return [float(well_formed(text)) for text in completions]


BUILT_IN = {"math": math_reward, "format": format_reward, "toy": toy.gold_reward}


def readable(reward):
    """A test of columns: can the row be judged? Math needs a readable gold answer. None: always."""
    if reward is math_reward:
        return lambda columns: read_gold(columns.get("answer")) is not None


def load_reward(name):
    """The reward of this name: a built-in one or "my_file.py:my_function"; what a user's own file
    raises is left as it is."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, function = name.rpartition(":")
    own = {}
    if Path(path).is_file():
        sys.path.insert(0, str(Path(path).resolve().parent))  # it may import what lies beside it
        own = runpy.run_path(path, run_name="user_reward")
    if not callable(own.get(function)):
        why = f"{path} defines no {function}" if own else "there is no such file"
        raise UserError(f"no reward {name}: {why}; give {', '.join(BUILT_IN)} or file.py:function")
    return own[function]


def call_reward(reward, prompts, completions, /, **columns):
    """What a reward returns, checked: one float or None for each completion. Tensors, arrays and
    their scalars become floats, NaN and what exceeds 1e30 None."""
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        inspect.signature(reward).bind(prompts, completions, **columns)
    except TypeError as error:
        raise UserError(f"reward {name}: {error} (columns: {', '.join(columns) or 'none'}; "
                        "a reward takes those it does not use by **_)") from None
    count = len(completions)  # before a reward has its hands on them
    scores = reward(prompts, completions, **columns)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    try:
        numbers = np.array(scores, dtype=float).reshape(count).tolist()  # None: NaN
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"reward {name} must return a list of {count} numbers or None, one for "
                        f"each completion; got {scores!r:.80}") from None
    return [x if abs(x) < 1e30 else None for x in numbers]  # float32 ends near 3e38
