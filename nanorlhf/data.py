"""From rows in any common shape to token ids and a loss mask, and the batch that carries them.

A row enters through `encode`, once: what is trained, scored or given to the sampler are the very
ids made here. Nothing is cached on disk, so a change of template, max_len or of this file takes
effect at once. Encoded rows are lists in the *token* frame (loss_mask[i] = 1: token i is learned);
`Batch.from_rows` shifts them, once, into the *action* frame (loss_mask[t] = 1: the prediction of
token t+1 is trained). Unlike OpenRLHF, no EOS is written over a reply that is cut at max_len.

Letters: N tokens of a batch, laid end to end without padding; B sequences.
"""

import csv
import gzip
import io
import json
import random
import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import torch
from jinja2 import TemplateError

from nanorlhf.toy import parse_grade
from nanorlhf.utils import UserError

ORIGIN = "_origin"  # the key under which a row remembers its file:line
ROLES = {"human": "user", "Human": "user", "gpt": "assistant", "Assistant": "assistant"}
ASKS = {"prompt": ("completion", "response"), "instruction": ("output",), "question": ("answer",)}
CHATS = ("messages", "conversations")
SOURCES = ("a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, or a hub "
           "name[:config[:split]]")
SHAPES = {
    "SFT": "messages, conversations, prompt + completion or response, instruction [+ input] + "
           "output, question + answer, text",
    "preference": "[prompt +] chosen + rejected: text, message lists or Human/Assistant dialogues",
    "prompt": "prompt, question, instruction [+ input], messages, conversations, chosen + rejected",
}
JSON_CHAT = re.compile(r'\s*\[\s*{\s*"(role|content|from|value)"')
OPENED = re.compile(r"<(\w+)>\s*$")  # a tag that the generation prompt leaves open, say <think>
REWRITTEN = ("the chat template rewrites turn {}, so history is not what was sampled; give one row "
             "per reply, or a template that keeps history")
# Without a chat template, strings are joined as they stand and chats written like HH-RLHF's.
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
DIALOGUE = (
    "{% for m in messages %}{{ {'user': '\n\nHuman: ', 'assistant': '\n\nAssistant: '}"
    ".get(m.role, '\n\n') + m.content + (eos_token if m.role == 'assistant' else '') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
)


@dataclass
class Batch:
    """Sequences laid end to end. Subclasses add fields, each a tensor or None: (N,) per token, or
    (B,) if named in PER_SEQUENCE; `to`, `select` and `split` carry them along."""

    input_ids: torch.Tensor  # (N,) long
    position_ids: torch.Tensor  # (N,) long, from 0 in each sequence
    cu_seqlens: torch.Tensor  # (B + 1,) long: where each sequence begins, then N
    loss_mask: torch.Tensor  # (N,) float32, action frame: 0 at the last token of each sequence

    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_rows(cls, rows, **more):
        """Lay rows [(ids, loss_mask)] (token frame) end to end; `more`: fields of a subclass."""
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        if not len(rows) or lengths.min() == 0:
            raise ValueError("a batch needs at least one row, and each row at least one token")
        ids = torch.tensor([i for ids, _ in rows for i in ids])
        mask = torch.tensor([m for _, mask in rows for m in mask], dtype=torch.float32).roll(-1)
        ends = lengths.cumsum(0)
        mask[ends - 1] = 0.0  # nothing is predicted from a last token
        positions = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
        return cls(ids, positions, torch.cat([ends.new_zeros(1), ends]), mask, **more)

    def __len__(self):
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self):
        return self.cu_seqlens.diff()  # (B,)

    @property
    def last(self):
        return self.cu_seqlens[1:] - 1  # (B,) index of each sequence's last token

    @property
    def row(self):
        """(N,) the number of the sequence that each token belongs to."""
        return torch.arange(len(self), device=self.lengths.device).repeat_interleave(self.lengths)

    def _map(self, change):
        """The batch made of change(name, tensor) for every field that is not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{k: v if v is None else change(k, v) for k, v in values.items()})

    def to(self, device):
        return self._map(lambda _, value: value.to(device))

    def select(self, indices):
        """These sequences (numbers in any order, or a boolean mask (B,)) as a new batch."""
        rows = torch.as_tensor(indices, device=self.cu_seqlens.device)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.long()
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        shift = (self.cu_seqlens[:-1][rows] - ends + lengths).repeat_interleave(lengths)
        tokens = torch.arange(len(shift), device=shift.device) + shift
        batch = self._map(lambda name, value: value if name == "cu_seqlens" else
                          value[rows if name in self.PER_SEQUENCE else tokens])
        batch.cu_seqlens = torch.cat([ends.new_zeros(1), ends])
        return batch

    def split(self, micro_tokens, unit=1):
        """Batches of whole sequences, in order, of at most micro_tokens tokens each; `unit`
        neighbours stay together (2 for pairs), and one longer unit stands alone."""
        if len(self) % unit:
            raise ValueError(f"{len(self)} sequences do not divide into units of {unit}")
        groups, used = [], 0
        for number, size in enumerate(self.lengths.view(-1, unit).sum(1).tolist()):
            if not groups or used + size > micro_tokens:
                groups.append([])
                used = 0
            groups[-1] += range(number * unit, (number + 1) * unit)
            used += size
        return [self.select(group) for group in groups]


def load_rows(spec, split=None, columns=None):
    """Rows (dicts) of a .jsonl, .json, .csv or .parquet file (.gz too), of a folder saved by
    `datasets`, or of a hub data set `name[:config[:split]]`. `columns` renames: {ours: theirs}."""
    try:
        numbered = list(_read(spec, split))
    except UserError:
        raise
    except (OSError, EOFError, ValueError, csv.Error) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot read {spec} ({reason}); give {SOURCES}") from error
    if not numbered:
        raise UserError(f"{spec} holds no rows; give a data set with at least one")
    for number, row in numbered:
        where = f"{spec}:{number}"
        if not isinstance(row, dict) or None in row:  # None: the surplus cells of a CSV row
            raise UserError(f"{where}: not one value for each column, but {row!r:.60}")
        for ours, theirs in (columns or {}).items():
            if theirs not in row:
                raise UserError(f"{where}: no column {theirs!r}; found {', '.join(row)}")
            row[ours] = row.pop(theirs)
        row[ORIGIN] = where
    return [row for _, row in numbered]


def _read(spec, split):
    """Pairs (number, row): the line where a file has lines, else a count from 1."""
    path = Path(spec).expanduser()
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if not path.is_file():
        if not path.is_dir() and (kind in ("jsonl", "json", "csv", "parquet") or spec[0] in "./~"):
            raise UserError(f"no such file or folder: {spec}; check the path")
        return enumerate(_dataset(spec, path, split), 1)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        raw = file.read().removeprefix(b"\xef\xbb\xbf")  # the mark that Windows editors leave
    if kind == "parquet":
        from pyarrow.parquet import read_table

        return enumerate(read_table(io.BytesIO(raw)).to_pylist(), 1)
    if kind == "csv":
        csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 kB
        reader = csv.DictReader(io.StringIO(raw.decode(), newline=""))
        return ((reader.line_num, row) for row in reader)
    if kind == "json" and raw.lstrip()[:1] == b"[":
        return enumerate(_json(raw, spec), 1)
    if kind in ("json", "jsonl"):
        lines = enumerate(raw.split(b"\n"), 1)
        return ((number, _json(line, f"{spec}:{number}")) for number, line in lines if line.strip())
    raise UserError(f"{spec}: unknown kind of file; give {SOURCES}")


def _json(raw, where):
    try:
        return json.loads(raw)
    except ValueError as error:  # of the JSON, or of its UTF-8
        raise UserError(f"{where}: not valid JSON ({error}); mend or delete it") from error


def _dataset(spec, path, split):
    import datasets  # slow to import, and most runs read a file

    if not path.is_dir():
        name, config, part = (spec.split(":") + ["", ""])[:3]
        return datasets.load_dataset(name, config or None, split=part or split or "train")
    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.Dataset):
        return data
    split = split or ("train" if len(data) > 1 else next(iter(data)))
    if split not in data:
        raise UserError(f"{spec} has no split {split!r}, only {', '.join(data)}")
    return data[split]


@contextmanager
def _naming(row):
    """Errors raised inside begin with the row's file and line."""
    where = f"{row.get(ORIGIN, 'a row')}: "
    try:
        yield {name: cell for name, cell in row.items() if cell is not None and name != ORIGIN}
    except UserError as error:
        raise UserError(where + str(error).removeprefix(where)) from error


def _unknown(cells, kind):
    return UserError(f"not a {kind} row: it has {', '.join(cells) or 'nothing'}; give "
                     f"{SHAPES[kind]}, or rename the columns")


def _text(value, name):
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{name} must be text, not {type(value).__name__}")
    return str(value)  # answer 5 and answer "5" are the same


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"margins and scores must be numbers, not {value!r:.40}") from error


def _messages(turns):
    """[{"role", "content"}] from OpenAI or ShareGPT turns, or from their JSON text."""
    if isinstance(turns, str):
        turns = _json(turns, "messages")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise UserError("messages must be a list of one or more {role, content}")
    messages = []
    for number, turn in enumerate(turns, 1):
        role = turn.get("role") or turn.get("from")
        content = turn.get("content", turn.get("value"))
        if not role or content is None:
            raise UserError(f"turn {number} of the messages lacks its role or its content")
        more = {k: v for k, v in turn.items() if v is not None and k not in ("from", "value")}
        messages.append(more | {"role": ROLES.get(role, role),
                                "content": _text(content, f"turn {number}")})
    asked = [m["content"].strip() for m in messages if m["role"] != "assistant"]
    if asked and not any(asked):
        raise UserError("the prompt is empty")
    return messages


def _turns(cell, name, role="user"):
    """A cell as messages: a list, its JSON, a Human/Assistant dialogue, or the text of one turn."""
    if isinstance(cell, list) or isinstance(cell, str) and JSON_CHAT.match(cell):
        return _messages(cell)
    text = _text(cell, name)
    if not re.match(r"\s*Human:.*\n\nAssistant:", text, re.DOTALL):
        return _messages([{"role": role, "content": text}])
    _, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + text.strip())
    said = groupby(zip(parts[::2], parts[1::2]), key=lambda part: part[0])  # some speak twice
    return _messages([{"role": who, "content": "\n\n".join(text.strip() for _, text in turns)}
                      for who, turns in said])


def _ask(cells, name):
    """The turns of a prompt column, up to the last one that is not the assistant's."""
    cell = cells[name]
    if name == "instruction" and cells.get("input"):
        cell = _text(cell, name) + "\n\n" + _text(cells["input"], "input")
    turns = _turns(cell, name)
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns:
        raise UserError("there is no prompt before the reply")
    return turns


def _sft(row):
    """(messages or text, number of the first turn to learn)."""
    with _naming(row) as cells:
        for name in CHATS:
            if name in cells:
                return _messages(cells[name]), 0
        for ask, replies in ASKS.items():
            for reply in replies:
                if ask in cells and reply in cells:
                    prompt = _ask(cells, ask)
                    return prompt + _turns(cells[reply], reply, "assistant"), len(prompt)
        if "text" in cells:
            return _text(cells["text"], "text"), 0
        raise _unknown(cells, "SFT")


def to_messages(row):
    """An SFT row as messages [{"role", "content"}], or as a string if it is a `text` row."""
    return _sft(row)[0]


def to_pair(row):
    """(prompt, chosen, rejected, margin): three message lists, and a float or None. The prompt ends
    where the two sides part; both go on with an assistant turn."""
    with _naming(row) as cells:
        if not {"chosen", "rejected"} <= cells.keys():
            raise _unknown(cells, "preference")
        prompt = _ask(cells, "prompt") if "prompt" in cells else []
        sides = [_turns(cells[name], name, "assistant") for name in ("chosen", "rejected")]
        # A side that opens with the assistant is a reply, any other one repeats the prompt.
        a, b = [prompt + side if side[0]["role"] == "assistant" else side for side in sides]
        shared = min(len(a), len(b)) - 1
        while shared > 0 and not (a[:shared] == b[:shared] and
                                  a[shared]["role"] == b[shared]["role"] == "assistant"):
            shared -= 1
        if shared < 1:
            raise UserError("chosen and rejected share no prompt; add a prompt column")
        margin = cells.get("margin", "")  # an empty cell in a CSV file
        if margin == "" and {"chosen_score", "rejected_score"} <= cells.keys():
            margin = _number(cells["chosen_score"]) - _number(cells["rejected_score"])
        margin = None if margin == "" else _number(margin)
        return a[:shared], a[shared:], b[shared:], margin


def to_prompt(row):
    """(messages, columns): the turns to be answered, and the other cells, for rewards; a `label`
    is known as `answer` too."""
    with _naming(row) as cells:
        name = next((name for name in (*ASKS, *CHATS) if name in cells), None)
        if name is None and not {"chosen", "rejected"} <= cells.keys():
            raise _unknown(cells, "prompt")
        messages = to_pair(row)[0] if name is None else _ask(cells, name)
        columns = {k: v for k, v in row.items() if k not in (*ASKS, *CHATS, "input", ORIGIN)}
        if "answer" not in cells and "label" in cells:
            columns["answer"] = cells["label"]
        if isinstance(columns.get("answer"), (int, float)):
            columns["answer"] = str(columns["answer"])
        return messages, columns


def _spans(messages, tokenizer, first_target, plain):
    """[(text, learned)] of a conversation, up to its last reply, in the words of the template."""
    template = tokenizer.chat_template or (PLAIN if plain else DIALOGUE)

    def render(turns, opening=False):
        return tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False,
                                             add_generation_prompt=opening)

    if first_target is None:
        if messages[-1]["role"] == "assistant":
            raise UserError("a prompt must not end in an assistant turn; drop that turn")
        return [(render(messages, True), False)]
    targets = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_target]
    if not targets or targets[0] == 0:
        raise UserError("there is no assistant turn to learn, or no turn before it")
    full = render(messages[:targets[-1] + 1])
    spans, done = [], ""
    for i in targets:
        content, prompt = messages[i]["content"], render(messages[:i], True)
        end = full if i == targets[-1] else render(messages[:i + 1])
        if not full.startswith(end):  # Phi-3 writes EOS after the last turn only
            end = end.removesuffix(tokenizer.eos_token or "")
        reply = end[len(prompt):]
        opened = OPENED.search(prompt)
        if not (full.startswith(prompt) and full.startswith(end)
                and "".join(content.split()) in "".join(reply.split())):
            # The last reply may still go on where the generation prompt ends, as a sample does.
            header = prompt[:opened.start()] if opened else prompt
            if end is not full or not full.startswith(header):
                raise UserError(REWRITTEN.format(i + 1))
            reply = _after(opened[1], content) if opened else content
        if not prompt.startswith(done):
            raise UserError(REWRITTEN.format(i + 1))
        if reply[:max(reply.find(content), 0)].strip() and render(messages[:i]) == prompt:
            raise UserError("the chat template writes a role header but no generation prompt; "
                            "add the header under {% if add_generation_prompt %}")
        if reply != content:  # white space that the template puts after its end of turn
            reply = reply.rstrip()
        spans += [(prompt[len(done):], False), (reply, True)]
        done = prompt + reply
    return spans


def _after(tag, content):
    """The reply after a generation prompt that has opened <tag>: the tag is not opened twice, and a
    reply without such a block closes it at once, as Qwen3's template does."""
    if f"</{tag}>" not in content:
        return f"\n</{tag}>\n\n{content}"
    return content.lstrip().removeprefix(f"<{tag}>").lstrip()


def encode(messages_or_text, tokenizer, *, prompt_only=False, first_target=0, plain=False,
           stop_ids=()):
    """(ids, loss_mask), two lists in the token frame; the one way from words to ids.

    Messages go through the chat template. The mask marks the content of each assistant turn (from
    turn `first_target` on) and the token that ends it, never a role header; spans are differences
    of rendered prefixes, so no template needs generation markers. The last reply ends the ids, with
    a stop token: what a template writes after it is never sampled. Text is learned whole and closed
    by EOS. A BOS comes first if the template writes one or the tokenizer adds one, never two.
    prompt_only: ids up to and with the generation prompt, mask 0.
    plain: without a chat template, join the contents as they stand.
    stop_ids: what ends a turn besides EOS, as in a generation config.
    """
    stops = [i for i in (tokenizer.eos_token_id, *stop_ids) if i is not None]
    if not stops and not prompt_only:
        raise UserError("the tokenizer has no EOS, so no reply would end; set tokenizer.eos_token")
    chat = not isinstance(messages_or_text, str)
    if chat:
        messages = _messages(messages_or_text)
        try:
            spans = _spans(messages, tokenizer, None if prompt_only else first_target, plain)
        except TemplateError as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from error
    else:
        spans = [(messages_or_text, not prompt_only)]

    def tokenise(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    ids, mask, text = [], [], ""
    for span, learned in spans:
        text += span
        whole = tokenise(text)
        # Where a merge crosses the border, tokenise apart: the prompt must not depend on the reply.
        new = whole[len(ids):] if whole[:len(ids)] == ids else tokenise(span)
        ends = [n for n, i in enumerate(new, 1) if i in stops] if learned and chat else []
        count = (ends + [len(new)])[0] if learned else 0
        ids = ids + new
        mask += [1] * count + [0] * (len(new) - count)
    if not ids or not text.strip():
        raise UserError("the text is empty")
    if not prompt_only:
        length = len(ids) - len(new) + count
        ids, mask = ids[:length], mask[:length]
        if ids[-1] not in stops:
            ids, mask = ids + stops[:1], mask + [1]
    bos = tokenizer.bos_token_id
    if bos is not None and ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
        ids, mask = [bos] + ids, [0] + mask
    return ids, mask


def _coded(row, messages, tokenizer, max_len=None, **options):
    """`encode`, cut on the right; errors name the row, and bare strings are known as such."""
    chat = not isinstance(messages, str)
    plain = chat and len(messages) <= 2 and messages[0]["content"] == row.get("prompt")
    with _naming(row):
        ids, mask = encode(messages, tokenizer, plain=plain, **options)
    return ids[:max_len], mask[:max_len]


def _kept(kept, dropped, total):
    """`kept`, after one line on stderr for each reason why rows were dropped; never empty."""
    lines = [f"dropped {count} of {total} rows: {reason}" for reason, count in dropped.items()]
    if not kept:
        raise UserError(f"no row is left ({'; '.join(lines)}); raise --max_len or mend the data")
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return kept


def encode_sft(rows, tokenizer, max_len, stop_ids=()):
    """[(ids, loss_mask)], cut on the right at max_len. Rows without a target token are dropped."""
    kept, dropped = [], Counter()
    for row in rows:
        messages, first = _sft(row)
        coded = _coded(row, messages, tokenizer, max_len, first_target=first, stop_ids=stop_ids)
        if any(coded[1][1:]):
            kept.append(coded)
        else:
            dropped[f"prompt fills --max_len {max_len}, no target tokens"] += 1
    return _kept(kept, dropped, len(rows))


def encode_pairs(rows, tokenizer, max_len, stop_ids=()):
    """([(chosen row, rejected row)], [margin]), rows cut like SFT rows, margins 0.0 where absent.
    Pairs with an empty or entirely cut reply, and pairs that do not differ, are dropped."""
    kept, dropped = [], Counter()
    for row in rows:
        prompt, *replies, margin = to_pair(row)
        pair = [_coded(row, prompt + reply, tokenizer, max_len, first_target=len(prompt),
                       stop_ids=stop_ids) for reply in replies]
        if not all(reply[-1]["content"].strip() for reply in replies):
            dropped["a reply is empty"] += 1
        elif not all(any(mask[1:]) for _, mask in pair):
            dropped[f"prompt fills --max_len {max_len}, no target tokens"] += 1
        elif pair[0][0] == pair[1][0]:
            dropped[f"chosen and rejected do not differ within --max_len {max_len}"] += 1
        else:
            kept.append((tuple(pair), margin or 0.0))
    pairs, margins = zip(*_kept(kept, dropped, len(rows)))
    return list(pairs), list(margins)


def encode_prompts(rows, tokenizer, max_len, usable=None):
    """[(ids, columns)], with the same column names in every row. Dropped, never cut: prompts longer
    than max_len, rows whose answer, label or tests are empty, and what usable(columns) denies."""
    kept, dropped = [], Counter()
    for row in rows:
        messages, columns = to_prompt(row)
        ids, _ = _coded(row, messages, tokenizer, prompt_only=True)
        gold = [columns[name] for name in ("answer", "label", "tests") if name in columns]
        if len(ids) > max_len:
            dropped[f"prompt longer than --max_len {max_len}"] += 1
        elif gold and not any(str(g or "").strip() for g in gold) or usable and not usable(columns):
            dropped["no answer to judge by"] += 1
        else:
            # What reward functions and samples.jsonl show: the question, or the whole conversation.
            text = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
            kept.append((ids, columns | {"prompt": messages[0]["content"] if len(messages) == 1
                                         else text}))
    names = {name: None for _, columns in _kept(kept, dropped, len(rows)) for name in columns}
    return [(ids, names | columns) for ids, columns in kept]


def show_masks(rows, tokenizer, n=1):
    """Print the tokens of the first n encoded rows (or of one row); * marks the learned ones."""
    for ids, mask in [rows] if isinstance(rows, tuple) else rows[:n]:
        print(f"{'token':>16}  {'id':>6}  mask")
        for token, learned in zip(ids, mask):
            print(f"{tokenizer.decode([token])!r:>16}  {token:>6}  {'*' if learned else '.'}")


@lru_cache(maxsize=4)
def epoch_order(n, seed, epoch):
    """A permutation of range(n) that depends on (seed, epoch) alone, so a resume needs no state."""
    order = list(range(n))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def batches_of(order, batch_size):
    """Slices of batch_size; the last one may be shorter, and is never dropped."""
    return [order[i:i + batch_size] for i in range(0, len(order), batch_size)]


def train_and_eval_rows(config, toy_train, toy_eval):
    """(training rows, held-out rows) as --data and --eval_data say.

    `toy_train(seed=, split=, grade=)` and `toy_eval` make rows of the embedded world. Without --eval_data
    every 20th row, at most 200, is held out.
    """
    if config.data == "toy":
        grade = parse_grade(config.toy_grade)
        return (toy_train(seed=config.seed, split="train", grade=grade),
                toy_eval(seed=0, split="eval", grade=grade))
    rows = load_rows(config.data)
    if config.eval_data:
        return rows, load_rows(config.eval_data)
    held_out = epoch_order(len(rows), "held out", 0)[: min(200, len(rows) // 20)]
    if not held_out:
        return rows, rows  # too few to hold any out
    kept = sorted(set(range(len(rows))) - set(held_out))
    return [rows[i] for i in kept], [rows[i] for i in held_out]
