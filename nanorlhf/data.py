"""From rows in any common shape to token ids and a loss mask, and the batch that carries them.

A row enters through `encode`, once: what is trained, scored or sampled from are the very ids made
here; nothing is cached on disk. Encoded rows are lists in the *token* frame (loss_mask[i] = 1:
token i is learned); `Batch.from_rows` shifts them, once, into the *action* frame (loss_mask[t] = 1:
the prediction of token t+1 is). Unlike OpenRLHF, no EOS is written over a reply cut at max_len.
Letters: N tokens of a batch, laid end to end without padding; B sequences.
"""

import csv
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import torch
from jinja2 import TemplateError
from torch.nn.functional import pad

from nanorlhf.utils import UserError, epoch_order, warn

FORMATS = (".jsonl", ".json", ".csv", ".parquet")  # of files with rows
ORIGIN = "_origin"  # the key under which a row remembers its file:line
# The columns that make a row one of a kind: the prompt's, or none where the others hold it, and the
# others. The first shape that fits is taken; input, margin, answer and label may be added.
SHAPES = {
    "SFT": "+messages +conversations prompt+completion prompt+response instruction+output "
           "question+answer +text",
    "preference": "prompt+chosen+rejected +chosen+rejected",
    "prompt": "prompt instruction question messages conversations +chosen+rejected",
}
SHAREGPT = {"from": "role", "value": "content"}
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant",
         "system": "system", "tool": "tool"}  # however they are capitalised
TEXT = (str, int, float)  # types of a cell that is text: 5 is "5", but True is none
# Without a chat template, strings are joined as they stand and chats written like HH-RLHF's.
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
DIALOGUE = ("{% for m in messages %}{{ '\n\n' + {'user': 'Human: ', 'assistant': 'Assistant: '}"
            ".get(m.role, '') + m.content + (eos_token if m.role == 'assistant' else '') }}"
            "{% endfor %}{{ '\n\nAssistant:' if add_generation_prompt else '' }}")
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + eos_token }}\n"
          "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}")


class Dropped(UserError):
    """Why a row cannot be used; the rows of a file are counted by it, and the run goes on."""


@dataclass
class Batch:
    """Sequences laid end to end. Subclasses add fields, each a tensor or None: (N,) per token, or
    (B,) if named in PER_SEQUENCE; `to`, `select` and `split` carry them along."""

    input_ids: torch.Tensor  # (N,) long
    position_ids: torch.Tensor  # (N,) long, from 0 in each sequence
    cu_seqlens: torch.Tensor  # (B + 1,) long: where each sequence begins, then N
    loss_mask: torch.Tensor  # (N,) float32, action frame: 0 at the last token of each sequence
    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ()
    lengths = property(lambda self: self.cu_seqlens.diff())  # (B,)
    last = property(lambda self: self.cu_seqlens[1:] - 1)  # (B,) where each sequence ends
    row = property(lambda self: torch.repeat_interleave(self.lengths))  # (N,) sequence of a token

    @classmethod
    def from_rows(cls, rows, **more):
        """Lay rows [(ids, loss_mask)] (token frame) end to end; `more`: fields of a subclass."""
        bad = [i for i, (ids, mask) in enumerate(rows) if not 0 < len(ids) == len(mask)]
        if bad or not rows:
            raise ValueError(f"a batch needs rows of tokens with masks as long; bad rows: {bad}")
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        cu_seqlens = pad(lengths.cumsum(0), (1, 0))
        ids, mask = (torch.cat([torch.as_tensor(part) for part in parts]) for parts in zip(*rows))
        mask = mask.float().roll(-1)
        mask[cu_seqlens[1:] - 1] = 0.0  # nothing is predicted from a last token
        positions = torch.arange(len(ids)) - cu_seqlens[:-1].repeat_interleave(lengths)
        return cls(ids, positions, cu_seqlens, mask, **more)

    def __len__(self):
        return len(self.cu_seqlens) - 1

    def _map(self, change):
        """The batch made of change(name, tensor) for every field that is not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{k: v if v is None else change(k, v) for k, v in values.items()})

    def to(self, device):
        return self._map(lambda _, value: value.to(device))

    def select(self, indices):
        """These sequences (numbers in any order, or a boolean mask of all) as a new batch."""
        rows = torch.as_tensor(indices)
        if rows.dtype == torch.bool and rows.shape == (len(self),):
            rows = rows.nonzero()[:, 0]
        if len(rows) and (rows.dtype != torch.long or rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"not sequences 0 to {len(self) - 1} or a mask of them: {rows}")
        rows = rows.to(self.cu_seqlens.device, torch.long)
        lengths = self.lengths[rows]
        cu_seqlens = pad(lengths.cumsum(0), (1, 0))
        shift = (self.cu_seqlens[rows] - cu_seqlens[:-1]).repeat_interleave(lengths)
        tokens = torch.arange(len(shift), device=shift.device) + shift
        return self._map(lambda name, value: cu_seqlens if name == "cu_seqlens" else
                         value[rows if name in self.PER_SEQUENCE else tokens])

    def split(self, micro_tokens, unit=1):
        """Batches of whole sequences, in order, of at most micro_tokens tokens each; `unit`
        neighbours stay together (2 for pairs), and one longer unit stands alone."""
        groups, used = [[]], 0
        for number, size in enumerate(self.lengths.view(-1, unit).sum(1).tolist()):
            if groups[-1] and used + size > micro_tokens:
                groups, used = groups + [[]], 0
            groups[-1] += range(number * unit, (number + 1) * unit)
            used += size
        return [self.select(group) for group in groups]


def load_rows(spec, columns="", seed=0):
    """Rows (dicts) of a local file, a folder saved by `datasets`, a hub name[:config[:split]], or a
    mixture (see `_mixture`). columns: "field=column,..." renames; what no file has is an error."""
    plain = not re.search("[,*]", spec) or os.path.exists(os.path.expanduser(spec))
    rows = _rows_of(spec) if plain else _mixture(spec, seed)
    fields, files = dict(re.findall(r"\s*([^=,]+)=([^,]+)", columns)), {}
    if ",".join(map("=".join, fields.items())) != columns:
        raise UserError(f"--columns {columns} must be field=column,..., such as prompt=question")
    for row in rows:
        files.setdefault(row[ORIGIN].rpartition(":")[0], {}).update(row)
    if lacking := set(fields.values()).difference(*files.values()):
        found = "; ".join(f"{f}: {', '.join(sorted({*c} - {ORIGIN}))}" for f, c in files.items())
        raise UserError(f"--columns: no column {min(lacking)}; there are {found}")
    return [{name: cell for name, cell in row.items() if name not in fields.values()}
            | {field: row[name] for field, name in fields.items() if name in row} for row in rows]


def _mixture(spec, seed):
    """Rows of "a.jsonl*0.7,b.jsonl*0.3", in an order drawn by seed. Weights are shares of the sum,
    which ends where its first source runs out, so that no row comes twice."""
    parts = [re.fullmatch(r"\s*(.+)\*(\d{0,9}\.?\d{1,9})\s*", part) for part in spec.split(",")]
    if all(parts) and len(parts) > 1:
        sources = [(_rows_of(part[1]), max(float(part[2]), 1e-9)) for part in parts]
        size = min(len(rows) / share for rows, share in sources)
        drawn = [[rows[i] for i in epoch_order(len(rows), f"{seed} mixed", n)[:round(size * share)]]
                 for n, (rows, share) in enumerate(sources)]
        if all(drawn):
            rows = sum(drawn, [])
            return [rows[i] for i in epoch_order(len(rows), f"{seed} mixed", -1)]
    raise UserError(f"{spec}: no file; in a mixture each source needs a weight above 0 and a row")


def _rows_of(spec):
    """Rows of one source, each with its origin."""
    rows, where = [], spec
    try:
        for number, row in _read(spec):
            where = f"{spec}:{number}"
            row = json.loads(row) if isinstance(row, bytes) else row
            if not isinstance(row, dict) or None in row:  # None: the surplus cells of a CSV row
                raise ValueError(f"not one value for each column, but {row!r:.60}")
            rows.append(row | {ORIGIN: where})
        if not rows:
            raise ValueError("it holds no rows")
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # Runtime: nested too deep
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot read {where} ({reason}); mend it or check the name") from error
    return rows


def _read(spec):
    """Pairs (number, row or its JSON): the line where a file has lines, else a count from 1."""
    path = Path(spec).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        from pyarrow.parquet import read_table
        return enumerate(read_table(path).to_pylist(), 1)
    if suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(2**31 - 1)  # else 131072; a C long of 32 bits holds this much
            reader = csv.DictReader(file, strict=True)  # else an open quote swallows what follows
            try:
                if len(set(reader.fieldnames or [])) < len(reader.fieldnames or []):
                    raise ValueError("two columns have one name")
                return [(reader.line_num, row) for row in reader]
            except csv.Error as error:
                raise ValueError(f"row from line {reader.line_num + 1} on: {error}") from error
    if suffix in (".json", ".jsonl") or path.is_file():
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the mark that Windows editors leave
        if raw.lstrip().startswith(b"["):
            return enumerate(json.loads(raw), 1)
        return [(n, line) for n, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
    import datasets  # slow, and most runs read a file
    name, config, part = (spec.split(":") + ["", ""])[:3]
    try:
        data = (datasets.load_from_disk(str(path)) if path.is_dir() else
                datasets.load_dataset(name, config or None, split=part or "train"))
    except Exception as error:  # of any type: from the hub, the network or a builder
        raise ValueError("it is neither a file, a folder saved by datasets nor a hub data set that "
                         f"could be loaded: {str(error).strip()}") from error
    if isinstance(data, dict):
        data = data["train" if len(data) > 1 else next(iter(data))]
    return enumerate(data, 1)


def _text(cell):
    if type(cell) not in TEXT:
        raise UserError(f"text is wanted, not {cell!r:.60}")
    return str(cell)


def _turns(cell, role="user"):
    """A cell as messages: OpenAI or ShareGPT turns, their JSON, an HH-RLHF dialogue or a text."""
    if isinstance(cell, str) and re.match(r'\s*\[\s*{\s*"(role|content|from|value)"', cell):
        cell = json.loads(cell)
    elif isinstance(cell, str) and re.match(r"(?s)\s*Human:.*\n\nAssistant:", cell):
        _, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + cell.strip())
        cell = [{"role": who, "content": "\n\n".join(text.strip() for _, text in said)}
                for who, said in groupby(zip(parts[::2], parts[1::2]), lambda part: part[0])]
    messages = []
    for turn in cell if isinstance(cell, list) else [{"role": role, "content": cell}]:
        turn = turn if isinstance(turn, dict) else {}
        turn = {SHAREGPT.get(name, name): v for name, v in turn.items() if v is not None}
        who, content = turn.get("role"), turn.get("content", "" if "tool_calls" in turn else None)
        if not who or not isinstance(who, str) or type(content) not in TEXT:
            raise UserError(f"a turn needs a role and a content, both text; found {turn!r:.60}")
        messages.append(turn | {"role": ROLES.get(who.lower(), who), "content": str(content)})
    asked = [m["content"] for m in messages if m["role"] != "assistant"]
    if not messages or asked and not "".join(asked).strip():
        raise UserError("the prompt is empty")
    return messages


def _join(prompt, side):
    """One conversation: a side that opens with the assistant is a reply, any other one repeats the
    end of the prompt."""
    if not prompt or side[0]["role"] == "assistant":
        return prompt + side
    asked, again = ([(m["role"], m["content"].strip()) for m in turns] for turns in (prompt, side))
    for i in range(len(asked)):
        if asked[i:] == again[:len(asked) - i]:
            return prompt[:i] + side
    raise UserError("the prompt column says something else than the turns before the reply; mend "
                    "it, or rename it away: --columns unused=prompt")


def _conversations(row, kind):
    """(prompt, sides, cells): the turns of the prompt column, a whole conversation for each other
    column of the shape, and the cells that are not None. A `text` row gives ("", [text], cells)."""
    cells = {name: cell for name, cell in row.items() if cell is not None and name != ORIGIN}
    for ask, *others in (shape.split("+") for shape in SHAPES[kind].split()):
        if cells.keys() >= {ask, *others} - {""}:
            break
    else:
        if kind == "prompt" and "text" in cells:
            raise Dropped("no prompt to answer")
        known = ", ".join(shape.lstrip("+") for shape in SHAPES[kind].split())
        found = ", ".join(name if name in cells else f"{name} (empty)" for name in row
                          if name != ORIGIN) or "nothing"
        raise UserError(f"not a {kind} row: it has {found}; give {known}")
    if others == ["text"]:
        return "", [_text(cells["text"])], cells
    opening = cells.get(ask)
    if ask == "instruction" and cells.get("input", "") != "":
        opening = f"{_text(opening)}\n\n{_text(cells['input'])}"
    prompt = _turns(opening) if ask else []
    while prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    sides = [_turns(cells[name], "assistant") for name in others]
    sides = [_join(prompt, side) for side in sides]
    if any(not turns or turns[0]["role"] == "assistant" for turns in sides or [prompt]):
        raise UserError("there is no prompt before the reply; add a prompt column")
    return prompt, sides, cells


def to_pair(row):
    """(prompt, chosen, rejected, margin or 0.0); the prompt ends where the two sides part."""
    _, [a, b], cells = _conversations(row, "preference")
    end = max((i for i in range(1, min(len(a), len(b))) if a[:i] == b[:i]
               and a[i]["role"] == b[i]["role"] == "assistant"), default=0)
    if not end:
        raise UserError("chosen and rejected share no prompt; add a prompt column")
    margin = float(str(cells.get("margin", "")).strip() or 0)  # "": an empty cell of a CSV file
    if not abs(margin) < 1e30:  # nan, or more than float32 can hold
        raise UserError(f"a margin must be a finite number; found {margin}")
    return a[:end], a[end:], b[end:], margin


def to_prompt(row):
    """(messages to be answered, columns for rewards); a `label` is known as `answer` too."""
    prompt, _, cells = _conversations(row, "prompt")
    used = [ORIGIN, "input", *re.findall(r"\w+", SHAPES["prompt"])]
    columns = {name: cell for name, cell in row.items() if name not in used}
    if "answer" in row or "label" in row:
        answer = cells.get("answer", cells.get("label"))
        columns["answer"] = str(answer) if isinstance(answer, (int, float)) else answer
    return prompt or to_pair(row)[0], columns


def set_template(tokenizer, template):
    """Give a tokenizer the template "chatml" or that of a jinja file; it is saved with it. ChatML's
    <|im_end|> becomes the EOS; where it is no token, the tokenizer's own EOS closes the turns."""
    if template == "chatml":
        if "<|im_end|>" in tokenizer.get_vocab():
            tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
        adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        tokenizer.chat_template = "{{ bos_token }}" * adds_bos + CHATML
    elif template:
        if not Path(template).is_file():
            raise UserError(f"--chat_template {template} is no file; give a jinja file or chatml")
        tokenizer.chat_template = Path(template).read_text("utf-8", "replace")


def _render(tokenizer, template, messages, **more):
    """The text of a chat. A template that loses what a user says is an error."""
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more)
    told, at = "".join(text.split()), 0
    for role, said in ((m["role"], "".join(m["content"].split())) for m in messages):
        if role == "user" and (at := told.find(said, at) + len(said)) < len(said):
            raise UserError("the chat template leaves out a user's turn; give another one")
        if role == "system" and said not in told:
            warn("the chat template leaves out the system turn")
    return text


def _spans(messages, first_target, render, eos, *stops):
    """[(text, learned)] of a chat up to its last reply: the differences of rendered prefixes."""
    if first_target is None:
        if messages[-1]["role"] == "assistant":
            raise UserError("a prompt must not end in an assistant turn; drop that turn")
        return [(render(messages, add_generation_prompt=True), False)]
    targets = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_target]
    targets = targets[-1:] if first_target == -1 else targets
    if not targets or targets[0] == 0:
        raise UserError("there is no assistant turn to learn, or no turn before it")
    full, spans, text = render(messages[:targets[-1] + 1]), [], ""
    ends = "|".join(re.escape(stop) for stop in [eos, *stops] if stop.strip())
    for last, i in zip([0, *targets], targets):
        prompt = render(messages[:i], add_generation_prompt=True)
        end = render(messages[:i + 1])
        if not full.startswith(end):  # Phi-3 writes EOS after the last turn only
            end = end.removesuffix(eos)
        content, reply = messages[i]["content"], end[len(prompt):]
        tag = re.search(r"<(\w+)>\s*$", prompt)  # that the generation prompt opens, say <think>
        header = prompt[:tag.start()] if tag else prompt
        if not prompt.startswith(text) or not end.startswith(header):
            raise UserError(f"the chat template rewrites turn {(last or i) + 1}; learn the last "
                            "reply alone (train_sft.py --train_on last) or give another template")
        if not end.startswith(prompt) or "".join(content.split()) not in "".join(reply.split()):
            # Go on from the prompt, with one tag, which is closed where nothing was thought.
            reply = content.lstrip().removeprefix(f"<{tag[1]}>").lstrip() if tag else content
            if tag and f"</{tag[1]}>" not in content:
                reply = f"\n</{tag[1]}>\n\n{content}"
        elif reply != content:
            reply = reply.rstrip()  # white space that the template puts after its end of turn
            if not reply.lstrip().startswith(content.strip()) and prompt == render(messages[:i]):
                raise UserError("the chat template writes a role header but no generation prompt; "
                                "add the header under {% if add_generation_prompt %}")
        # Sampling ends at the first stop token, so what a template adds to it is not learned.
        reply = re.sub(rf"({ends})(\s|{ends})*$", r"\1", reply)
        spans += [(prompt[len(text):], False), (reply, True)]
        text = prompt + reply
    return spans


def encode(messages_or_text, tokenizer, prompt_only=False, first_target=0, bare=None, stop_ids=()):
    """(ids, loss_mask), two lists in the token frame; the one way from words to ids.

    The mask marks each assistant turn, from turn `first_target` on (-1: the last alone), and what
    ends it, but no role header. The last reply ends the ids, with EOS or one of stop_ids. Text is
    learned whole and closed by EOS. A BOS comes first if the template or the tokenizer adds one,
    never two. prompt_only: up to the generation prompt, mask 0. bare: a prompt that is a string."""
    if tokenizer.eos_token is None and not prompt_only:
        raise UserError("the tokenizer has no EOS, so no reply would end; set tokenizer.eos_token")
    if isinstance(messages_or_text, str):
        spans = [(messages_or_text, not prompt_only)]
    else:
        turns = _turns(messages_or_text)
        template = tokenizer.chat_template or (PLAIN if turns[0]["content"] == bare else DIALOGUE)
        render = partial(_render, tokenizer, template)
        spans = _spans(turns, None if prompt_only else first_target, render, tokenizer.eos_token,
                       *(tokenizer.decode([stop]) for stop in stop_ids))
    tokenise = partial(tokenizer, add_special_tokens=False, verbose=False)
    ids, mask, text = [], [], ""
    for span, learned in spans:
        text += span
        new = tokenise(text)["input_ids"]
        # Where a merge crosses the border, tokenise apart: the prompt must not depend on the reply.
        new = new[len(ids):] if new[:len(ids)] == ids else tokenise(span)["input_ids"]
        ids, mask = ids + new, mask + [int(learned)] * len(new)
    if not ids or not text.strip():
        raise UserError("the text is empty")
    if not prompt_only and ids[-1] not in (tokenizer.eos_token_id, *stop_ids):
        ids, mask = ids + [tokenizer.eos_token_id], mask + [1]
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    if unknown in ids and unknown not in (bos, tokenizer.eos_token_id, *stop_ids):  # as in GPT-2
        warn(f"the tokenizer lacks some characters of the text: it reads {tokenizer.unk_token}")
    if bos is not None and ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
        ids, mask = [bos] + ids, [0] + mask
    return ids, mask


def _encode_rows(rows, encode_row, or_none=False):
    """[encode_row(row)], empty only with or_none; Dropped rows are counted, errors name the row."""
    kept, dropped = [], Counter()
    for row in rows:
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()  # half a surrogate pair?
            kept.append(encode_row(row))
        except Dropped as reason:
            dropped[str(reason)] += 1
        except (ValueError, TypeError, RecursionError, TemplateError) as error:
            raise UserError(f"{row.get(ORIGIN, 'a row')}: {error}") from error
    lines = [f"dropped {count} of {len(rows)} rows: {why}" for why, count in dropped.items()]
    if not kept and not or_none:
        raise UserError(f"no row is left ({'; '.join(lines)}); raise --max_len or mend the data")
    sys.stderr.writelines(line + "\n" for line in lines)
    return kept


def _cut(row, messages, first_target, tokenizer, max_len, stop_ids):
    ids, mask = encode(messages, tokenizer, False, first_target, row.get("prompt"), stop_ids)
    if not any(mask[1:max_len]):
        raise Dropped(f"prompt fills --max_len {max_len}, no target tokens")
    return ids[:max_len], mask[:max_len]


def encode_sft(rows, tokenizer, max_len, stop_ids=(), train_on="all"):
    """[(ids, loss_mask)], cut on the right at max_len; of a conversation "all" or the "last" of the
    replies are learned. Rows without a target token are dropped."""
    def encode_row(row):
        prompt, [messages], _ = _conversations(row, "SFT")
        first = -1 if train_on == "last" else len(prompt)
        return _cut(row, messages, first, tokenizer, max_len, stop_ids)
    return _encode_rows(rows, encode_row)


def encode_pairs(rows, tokenizer, max_len, stop_ids=()):
    """([(chosen row, rejected row)], [margin]), rows cut like SFT rows, margins 0.0 where absent.
    Pairs with an empty or entirely cut reply, and pairs that do not differ, are dropped."""
    def encode_row(row):
        prompt, *replies, margin = to_pair(row)
        if not all(reply[-1]["content"].strip() for reply in replies):
            raise Dropped("a reply is empty")
        chosen, rejected = [_cut(row, prompt + reply, len(prompt), tokenizer, max_len, stop_ids)
                            for reply in replies]
        if chosen[0] == rejected[0]:
            raise Dropped(f"chosen and rejected do not differ within --max_len {max_len}")
        return (chosen, rejected), margin
    return tuple(map(list, zip(*_encode_rows(rows, encode_row))))


def encode_prompts(rows, tokenizer, max_len, usable=None, or_none=False):
    """[(ids, columns)], the same columns in every row, "prompt" (text) among them. Dropped, never
    cut: prompts over max_len, rows of text, which hold no prompt, rows without answer and tests,
    and what usable(columns) denies. If none is left, it is an error, or [] with or_none."""
    def encode_row(row):
        messages, columns = to_prompt(row)
        ids, _ = encode(messages, tokenizer, prompt_only=True, bare=row.get("prompt"))
        if len(ids) > max_len:
            raise Dropped(f"prompt longer than --max_len {max_len}")
        gold = [columns[name] for name in ("answer", "tests") if name in columns]
        if gold and not any(str(g or "").strip() for g in gold) or usable and not usable(columns):
            raise Dropped("no answer to judge by (a column, or --reward)")
        talk = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
        return ids, columns | {"prompt": talk if messages[1:] else messages[0]["content"]}
    kept = _encode_rows(rows, encode_row, or_none)
    names = {name: None for _, columns in kept for name in columns}
    return [(ids, names | columns) for ids, columns in kept]


def show_masks(rows, tokenizer, n=1, text=False):
    """Print the tokens, at most 60, of the first n encoded rows, pairs or prompts (or of one row);
    *: learned. text: the text before them."""
    for row in [rows] if isinstance(rows, tuple) else rows[:n]:
        for ids, mask in row if isinstance(row[0], tuple) else [row]:
            marks = "." * len(ids) if isinstance(mask, dict) else [".*"[m] for m in mask]
            lines = [f"{tokenizer.decode([i])!r:>16}  {i:>6}  {m}" for i, m in zip(ids, marks)]
            if len(lines) > 60:
                lines[30:-30] = [f"... {len(lines) - 60} tokens ..."]
            header = [tokenizer.decode(ids)] * text + [f"{'token':>16}  {'id':>6}  mask"]
            print(*header, *lines, sep="\n")


def show_data(config, rows, tokenizer):
    """Print the first encoded row token by token; with --show_data n the first n, and end."""
    show_masks(rows, tokenizer, config.show_data or 1, text=config.show_data > 0)
    if config.show_data:
        sys.exit()


def train_and_eval_rows(config, toy_rows, **options):
    """(training rows, held-out rows) as --data and --eval_data say; toy_rows makes the embedded
    world's. Without --eval_data a 20th is held out, but 4 at least and no more than evaluations
    measure; fewer than 20 serve as both."""
    most = max(config.eval_rows, getattr(config, "eval_prompts", 0))
    if config.data == "toy":
        if config.eval_data or config.columns:
            raise UserError("--eval_data and --columns go with --data, not with the toy world")
        draw = partial(toy_rows, grade=config.toy_grade, **options)
        return draw(config.toy_rows, config.seed, "train"), draw(most, 0, "eval")
    rows = load_rows(config.data, columns=config.columns, seed=config.seed)
    if config.eval_data:
        return rows, load_rows(config.eval_data, columns=config.columns)
    share = min(most, max(4, len(rows) // 20)) if len(rows) >= 20 else 0
    order = epoch_order(len(rows), "held out", 0)
    return [rows[i] for i in sorted(order[share:])], [rows[i] for i in order[:share]] or rows
