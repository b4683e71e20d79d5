"""Supervised fine-tuning (SFT): teach a model to answer by imitating demonstrations.

The loss is the negative log-likelihood of the assistant's tokens, averaged over all trained tokens
of the optimiser step (Ouyang et al. 2022, "Training language models to follow instructions with
human feedback", section 3.5). Prompts are masked out; the end-of-turn token is trained, so that
the model learns to stop.

Where we differ from OpenRLHF: sequences are packed without padding and without flash-attn; a row
cut at --max_len does not get an EOS written over its last token; dropout is off.

    python train_sft.py                                            # embedded world -> runs/sft
    python train_sft.py --model Qwen/Qwen3-0.6B --data rows.jsonl --lr 1e-5 --out runs/qwen

What to expect on the embedded world, in two minutes: held-out loss 0.07 to 0.16; about half of the
answers are guessed and mostly wrong, the worked ones 98 % right, so the gold score is about 0.5.
"""

from dataclasses import dataclass
from functools import partial

from nanorlhf import data, evaluate, lora, toy
from nanorlhf.losses import sft_loss, token_weights
from nanorlhf.model import (DTYPES, autocast, eos_ids, load_policy, longest, save_model,
                            token_logprobs)
from nanorlhf.rollout import score_tokens
from nanorlhf.sampler import Sampler
from nanorlhf.utils import Common, Run, flag, lr_at, main, optimizer_step, trainable


@dataclass
class Config(Common):
    model: str = flag("toy", "start model: a folder or hub name; toy: a fresh tiny model")
    out: str = flag("runs/sft", "run folder that is written")
    lr: float = flag(3e-3, "peak learning rate; 1e-5 to 2e-5 for a real model")
    batch_size: int = flag(16, "rows of one optimiser step")
    train_on: str = flag("all", "replies of a conversation to learn", choices=("all", "last"))
    toy_rows: int = flag(30000, "training rows drawn from the embedded world")
    eval_prompts: int = flag(128, "held-out prompts answered at each evaluation")
    eval_every: int = flag(250, "steps between evaluations; 0: only at the end")
    save_every: int = flag(250, "steps between checkpoints; 0: none")
    max_new_tokens: int = flag(96, "longest answer in an evaluation")


def train(cfg):
    run = Run(cfg)

    # --- data: rows become token ids and masks, once ---
    model, tokenizer = load_policy(cfg.model, seed=cfg.seed)
    lora.adapt(model, cfg)  # --lora_rank, --device
    data.set_template(tokenizer, cfg.chat_template)
    train_rows, eval_rows = data.train_and_eval_rows(cfg, toy.demonstrations)
    max_len, ends = longest(model, cfg.max_len), eos_ids(model, tokenizer)
    encode = partial(data.encode_sft, tokenizer=tokenizer, max_len=max_len, stop_ids=ends,
                     train_on=cfg.train_on)
    rows = encode(train_rows)
    held_out = data.Batch.from_rows(encode(eval_rows[: cfg.eval_rows])).to(cfg.device)
    prompts = data.encode_prompts(eval_rows[: cfg.eval_prompts], tokenizer, max_len, or_none=True)
    data.show_data(cfg, rows, tokenizer)

    # --- optimiser, and a sampler over the model's own tensors ---
    optimizer, scaler = trainable(model, cfg.lr, cfg)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[cfg.dtype])
    start = run.start(model=model, optimizer=optimizer, scaler=scaler)

    # --- training ---
    for step, picked in run.steps(rows, start):
        batch = data.Batch.from_rows([rows[i] for i in picked]).to(cfg.device)
        # One division by the tokens of the whole step: micro-batches never change the gradient.
        batch.loss_mask = token_weights(batch.loss_mask, batch.cu_seqlens, "token")
        loss = 0.0
        for part in batch.split(cfg.micro_tokens):
            with autocast(cfg.device, cfg.dtype):
                # Its gradient is known before: the head need not run again in the backward pass.
                logp, _ = token_logprobs(model, part, upstream=-part.loss_mask * scaler.get_scale())
                part_loss = sft_loss(logp, part.loss_mask)
            scaler.scale(part_loss).backward()
            loss += part_loss.item()
        lr = lr_at(step, run.total, cfg.lr, cfg.warmup_ratio)
        norm = optimizer_step(optimizer, lr, cfg.grad_clip, scaler)
        metrics = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": run.speed(batch)}

        # --- evaluation on held-out rows, and a resume point ---
        if run.due(step, cfg.eval_every):
            with autocast(cfg.device, cfg.dtype):
                logp, _ = score_tokens(model, held_out, 1.0, cfg.micro_tokens)
            metrics["eval_loss"] = sft_loss(logp, held_out.loss_mask) / held_out.loss_mask.sum()
            if prompts:  # rows of plain text have none
                metrics |= evaluate.held_out_answers(run, step, sampler, prompts)
        run.end_step(step, metrics)

    run.finish(lambda folder: save_model(model, tokenizer, folder))


if __name__ == "__main__":
    main(train, Config, __doc__)
