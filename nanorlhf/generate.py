"""Talk to a model.

    python -m nanorlhf.generate --model runs/grpo --prompt "1234+5678="
    python -m nanorlhf.generate --model runs/grpo --prompts questions.txt --n 4
    python -m nanorlhf.generate --model runs/grpo --interactive true
"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanorlhf import data
from nanorlhf.model import load_policy
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import DTYPES, UserError, flag, main, refuse, writable


@dataclass
class Config:
    model: str = flag("runs/grpo", "policy: a folder or hub name")
    prompt: str = flag("", "one prompt")
    prompts: str = flag("", "a file: rows (.jsonl, .json, .csv, .parquet), or one prompt a line")
    interactive: bool = flag(False, "read prompts from the keyboard and keep the conversation")
    system: str = flag("", "system message before every prompt")
    n: int = flag(1, "answers to each prompt")
    temperature: float = flag(1.0, "sampling temperature; 0: greedy")
    top_k: int = flag(0, "sample among the k likeliest tokens; 0: all")
    top_p: float = flag(1.0, "sample among the likeliest tokens that make up this probability")
    min_p: float = flag(0.0, "drop tokens less likely than this share of the likeliest")
    repetition_penalty: float = flag(1.0, "above 1: tokens seen before become less likely")
    max_new_tokens: int = flag(256, "longest answer")
    max_len: int = flag(4096, "longest prompt in tokens")
    seed: int = flag(0, "seed of sampling")
    dtype: str = flag("auto", "precision of sampling; auto: the best of the device",
                      choices=(*DTYPES, "auto"))
    device: str = flag("auto", "cuda or cpu")
    out: str = flag("-", "write answers as JSON lines into this file; -: print them")


def generate(cfg):
    if [bool(cfg.prompt), bool(cfg.prompts), cfg.interactive].count(True) != 1:
        raise UserError("give one of --prompt, --prompts and --interactive")
    out = None if cfg.out == "-" else writable(cfg.out)
    params = SamplingParams(
        n=cfg.n, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    rows = read_prompts(cfg)
    sampler = Sampler(*load_policy(cfg.model, cfg.device), dtype=DTYPES[cfg.dtype])
    opening = [{"role": "system", "content": cfg.system}] if cfg.system else []
    if cfg.interactive:
        return converse(sampler, params, opening, cfg.max_len)
    if opening:
        rows = [{"messages": opening + data.to_prompt(row)[0]} for row in rows]
        if any(row["messages"][1]["role"] == "system" for row in rows):
            raise UserError("--system: there are prompts that have a system message already")
    prompts = data.encode_prompts(rows, sampler.tokenizer, cfg.max_len)
    completions = sampler.generate([ids for ids, _ in prompts], params, progress=len(prompts) > 1)
    answers = [{"prompt": prompts[c.prompt_index][1]["prompt"], "response": c.text,
                "finish": c.finish_reason, "tokens": len(c.token_ids),
                "logprob": round(sum(c.logprobs), 4)}
               for c in completions if c.finish_reason != "refused"]
    if out:
        out.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    else:
        for answer in answers:
            tqdm.write((f"--- {answer['prompt']}\n" if answers[1:] else "") + answer["response"])
    if len(answers) < len(completions):
        reason = next(c.text for c in completions if c.finish_reason == "refused")
        raise UserError(f"{len(completions) - len(answers)} not answered; {reason}")


def read_prompts(cfg):
    """Rows {prompt, ...} of --prompt or of the file --prompts."""
    path = Path(cfg.prompts)
    if not cfg.prompts:
        return [{"prompt": cfg.prompt}]
    if path.suffix.lower() in data.FORMATS or not path.is_file():
        return data.load_rows(cfg.prompts)
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}") from None
    rows = [{"prompt": line.strip()} for line in lines if line.strip()]
    return rows or refuse(f"{path} holds no prompt")


def converse(sampler, params, messages, max_len):
    """A conversation on the keyboard; an empty line ends it."""
    print("an empty line ends the conversation", file=sys.stderr)
    with suppress(EOFError):
        while text := input("you: ").strip():
            messages.append({"role": "user", "content": text})
            [(ids, _)] = data.encode_prompts([{"messages": messages}], sampler.tokenizer, max_len)
            [completion] = sampler.generate([ids], params)
            if completion.finish_reason == "refused":
                raise UserError(completion.text)
            messages.append({"role": "assistant", "content": completion.text})
            print(f"model: {completion.text}")


if __name__ == "__main__":
    main(generate, Config, __doc__)
