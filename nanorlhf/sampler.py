"""Sampling with a paged cache and continuous batching.

    sampler = Sampler(model, tokenizer)
    for c in sampler.generate(["1+1=", "2+2="], SamplingParams(n=4, seed=0)):
        print(c.prompt_index, c.index, c.text, c.finish_reason)

Every pass through the model takes one token of each running sample (*decode*) and, beside them, a
bounded piece of the prompts that still have to be read, so that a long prompt stalls nobody. A
group is the n samples of one prompt: the first reads it, and all share its blocks (cache.py). When
blocks run out, the sample that joined last is pre-empted: it gives its blocks back and waits
again, as a group of one whose prompt is all it has so far.

- The log-prob of a token is log_softmax(logits / temperature) in fp32 over the *full* vocabulary
  (padding rows of the matrix included): the number that the trainer computes, and the sampling
  distribution if no filter is set. Temperature 0 takes the argmax, its log-prob at temperature 1.
- A sample depends on (seed, prompt ids, sample index) alone: each has its own random stream.
  Without a seed, one is drawn for every prompt from torch's global generator.
- Nothing is kept between calls: weights may change at will.

Letters: R samples in this step, V vocabulary, N tokens in a pass, T longest history.
"""

import hashlib
import math
import time
from collections import deque
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.pytorch_utils import Conv1D

from nanorlhf import graphs
from nanorlhf.attention import paged_layout
from nanorlhf.cache import BlockManager, PagedKVCache
from nanorlhf.model import eos_ids
from nanorlhf.utils import DTYPES, UserError

CPU_CACHE_BYTES = 2 * 1024**3
CUDA_CACHE_SHARE = 0.5  # of the memory that is free when a call begins


@dataclass
class SamplingParams:
    """How to sample. Filters apply in HF's order: penalty, temperature, top-k, top-p, min-p."""

    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    max_new_tokens: int = 256
    stop_token_ids: tuple = ()  # besides the EOS of tokenizer and generation config
    seed: int | None = None

    def __post_init__(self):
        for name, low, high in [
            ("n", 1, math.inf), ("temperature", 0, 1e9), ("top_k", 0, math.inf), ("top_p", 1e-9, 1),
            ("min_p", 0, 1), ("repetition_penalty", 1e-9, math.inf),
            ("max_new_tokens", 1, math.inf), ("seed", 0, 2**63 - 1),
        ]:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"{name} is {value}; it must be at least {low} and at most {high}")


@dataclass
class Completion:
    prompt_index: int
    index: int  # which of the prompt's n samples
    prompt_ids: list[int]
    token_ids: list[int]  # a stop token is the last of them
    logprobs: list[float]  # one for each of token_ids
    text: str  # token_ids without special tokens; of a refused one, the reason
    finish_reason: str  # "stop", "length" (max_new_tokens or the model's own limit) or "refused"


# ---- choosing tokens -----------------------------------------------------------------------------


def truncate(logp, top_k=None, top_p=None, min_p=None):
    """Set the log-probs (R, V) of tokens that the filters, each None or (R, 1), exclude to -inf."""
    drop = float("-inf")
    if top_k is not None:
        k = top_k.clamp(max=logp.shape[1])
        kth = logp.topk(max(1, int(k.max()))).values.gather(1, (k - 1).clamp(min=0))
        logp = logp.masked_fill((logp < kth) & (k > 0), drop)
    if top_p is not None:
        ascending, order = logp.sort(-1)
        cut = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        cut[:, -1] = False
        logp = logp.masked_fill(torch.empty_like(cut).scatter_(1, order, cut), drop)
    if min_p is not None:
        logp = logp.masked_fill(logp < logp.max(-1, keepdim=True).values + min_p.log(), drop)
    return logp


def inverse_cdf(weights, uniform):
    """The first token at which the running sum of weights (R, V) passes uniform (R,) * total.

    fp64: small weights would vanish in a long sum. With uniform <= 1 - 2**-23 the token exists.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return token.clamp_(max=weights.shape[1] - 1)  # only NaN weights get there


def choose(logits, uniform, temperature, repetition_penalty=None, history=None, **filters):
    """logits (R, V) -> tokens (R,) and their log-probs (R,).

    uniform (R,) in [0, 1); history (R, T) the tokens so far; temperature (R, 1) on the CPU, where
    looking at it waits for no GPU; the others (R, 1), or None where no row uses them. What others
    use does not touch a row: a filter that is off changes no bit.
    """
    logits, greedy = logits.float(), temperature == 0
    temperature = temperature.masked_fill(greedy, 1.0).to(logits.device)
    scores = logp = (logits / temperature).log_softmax(-1)  # (R, V)
    if repetition_penalty is not None:  # Keskar et al. 2019
        seen = logits.gather(1, history)
        seen = torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
        scores = (logits.scatter(1, history, seen) / temperature).log_softmax(-1)
    token = scores.argmax(-1)
    if not greedy.all():
        sampled = inverse_cdf(truncate(scores, **filters).exp(), uniform)
        token = torch.where(greedy[:, 0].to(token.device), token, sampled)
    return token, logp.gather(1, token[:, None])[:, 0]


def uniforms(seed, prompt_ids, index, count):
    """`count` multiples of 2**-23 in [0, 1), from a random stream of the sample's own."""
    name = np.array([seed, index, *prompt_ids], dtype="<i8").tobytes()
    key = hashlib.blake2b(name, digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)  # 64 bits each
    return torch.from_numpy((raw >> np.uint64(41)) * 2.0**-23).float()


# ---- who runs when -------------------------------------------------------------------------------


@dataclass(eq=False)
class Sequence:
    """One sample on its way. While it runs, the first `cached` of its ids are in the cache."""

    prompt_index: int
    index: int
    params: SamplingParams
    ids: list[int]  # the prompt and what was generated
    limit: int  # most ids that it may come to
    stop: set[int] = frozenset()
    refusal: str = ""  # why it can never run
    uniforms: list[float] = ()  # one for each new token
    logprobs: list[float] = field(default_factory=list)  # one for each new token so far
    blocks: list[int] = field(default_factory=list)  # its block table while it runs
    cached: int = 0
    followers: list = field(default_factory=list)  # samples that join once it has read their prompt


class Scheduler:
    """Decides who runs and who must give way. Any sample, alone in the pool, must fit in full."""

    def __init__(self, groups, blocks, max_seqs):
        """groups: lists of sequences with equal ids."""
        self.waiting, self.running = deque(groups), []
        self.blocks, self.max_seqs = blocks, max_seqs
        self.preemptions = self.blocks_saved = 0

    def step(self, budget):
        """The next pass: `copies`, `chunks`, `takers`, `rows`.

        copies: (source, target) blocks to copy before it.
        chunks: (sequence, start, end): its ids[start:end] go through the model. A running sample
            brings the token it took last; besides, at most `budget` tokens of prompts are read.
        takers: the samples that take their next token then, each from the logits at the end of the
            chunk in `rows`: one that has read all its ids, and its followers, which now join.
        """
        copies = self.reserve()
        self.admit()
        before, self.running = self.running, []
        chunks, takers, rows = [], [], []
        for s in before:
            count, group = len(s.ids) - s.cached, [s]
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                chunks.append((s, s.cached, s.cached + count))
                s.cached += count
            if s.cached == len(s.ids):
                group += self.fork(s)
                takers += group
                rows += [len(chunks) - 1] * len(group)
            self.running += group
        return copies, chunks, takers, rows

    def reserve(self):
        """Make the place of every running sample's next token writable; returns blocks to copy."""
        copies = []
        for s in list(self.running):
            while s.blocks and not self.blocks.writable(s.blocks, len(s.ids) - 1):
                if self.blocks.free:
                    copies += self.blocks.reserve(s.blocks, len(s.ids) - 1)
                else:
                    self.preempt(self.running[-1])
        return copies

    def preempt(self, last):
        """Back to the head of the queue; all its ids have to be read again."""
        self.finish([last])
        self.waiting.appendleft([last, *last.followers])
        last.cached, last.followers = 0, []
        self.preemptions += 1

    def admit(self):
        """Let waiting groups in, with room for the prompt and the next token of each sample.

        The first sample of a group reads the prompt. A group waits until all of it fits, or a
        quarter of `max_seqs`, or nobody runs. What does not fit stays at the head of the queue.
        """
        while self.waiting:
            group, length = self.waiting[0], len(self.waiting[0][0].ids)
            promised = sum(len(s.followers) for s in self.running)  # a block and a place for each
            fit = min(len(group), self.max_seqs - len(self.running) - promised,
                      len(self.blocks.free) - promised - self.blocks.blocks_for(length + 1) + 1)
            if fit < (min(len(group), max(1, self.max_seqs // 4)) if self.running else 1):
                break
            self.waiting.popleft()
            if fit < len(group):
                self.waiting.appendleft(group[fit:])
            first, *first.followers = group[:fit]
            first.blocks = self.blocks.allocate(length + 1)
            self.running.append(first)

    def fork(self, first):
        """The followers of a sample that has read their prompt, now over the same blocks."""
        followers, first.followers = first.followers, []
        for s in followers:
            s.cached = first.cached
            s.blocks = self.blocks.fork(first.blocks[:self.blocks.blocks_for(s.cached)])
        self.blocks_saved += len(followers) * (first.cached // self.blocks.block_size)
        return followers

    def finish(self, sequences):
        """Sequences leave and give their blocks back."""
        for sequence in sequences:
            self.blocks.release(sequence.blocks)
        self.running = [s for s in self.running if s.blocks]


# ---- the sampler ---------------------------------------------------------------------------------


class Sampler:
    """Samples from `model`, a HF causal LM, with the weights it has at the time of the call.

    block_size: tokens per cache block. max_seqs: samples that run at once. num_blocks: size of the
        cache, by default 2 GB (CPU) or half of what is free (GPU); no more is taken than is needed.
    max_prefill_tokens: prompt tokens in one pass, beside the one of each sample that decodes.
    dtype: if it differs from the model's, the sampler runs a copy as training does, by autocast:
        the matrices are copied in this dtype, and `sync()` must be called after they changed; all
        else is shared. Otherwise it runs the very model object, and puts its training mode and
        attention back after a call.

    `stats` of the last call: tokens, seconds, tokens_per_s; steps (passes), mean_batch (tokens in a
    step); refused, preemptions; num_blocks, blocks_used (after each step), peak_blocks, blocks_left
    (a leak if not 0); kv_waste (share of the slots of used blocks without a token, over all steps);
    prefix_blocks_saved (by sharing prompts).
    """

    def __init__(self, model, tokenizer, block_size=16, max_seqs=256, num_blocks=None,
                 max_prefill_tokens=4096, dtype=None):
        if min(block_size, max_seqs, max_prefill_tokens) < 1:
            raise UserError("block_size, max_seqs and max_prefill_tokens must be at least 1")
        self.source, self.model, self.dtype = model, model, dtype or model.dtype
        if self.dtype != model.dtype:
            if dtype not in DTYPES.values():
                raise UserError(f"dtype must be one of {', '.join(map(str, DTYPES.values()))}")
            if model.dtype != torch.float32:
                raise UserError(f"a model in {model.dtype} is sampled from as it is: no dtype")
            self.model = deepcopy(model, {id(w): w for w in model.parameters()})
            for linear in [m for m in self.model.modules() if isinstance(m, (nn.Linear, Conv1D))]:
                for name, weight in linear.named_parameters():
                    if weight.is_floating_point():  # not the 4-bit ones of QLoRA
                        setattr(linear, name, nn.Parameter(weight.detach().to(dtype), False))
        self.tokenizer, self.config = tokenizer, model.config.get_text_config()
        self.block_size, self.max_seqs, self.num_blocks = block_size, max_seqs, num_blocks
        self.max_prefill_tokens, self.stats = max_prefill_tokens, {}

    @torch.no_grad()
    def sync(self):
        """Refresh the low-precision copy from the model; nothing to do when there is none."""
        fresh = dict(self.source.named_parameters(remove_duplicate=False))
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            if weight is not fresh[name]:
                weight.copy_(fresh[name])

    @torch.no_grad()  # not inference_mode: what it touches could never meet autograd again
    def generate(self, prompts, params=None, progress=False):
        """Completions of every prompt, ordered by prompt, then by sample index.

        prompts: a list of token id lists and strings. A string gets the special tokens that its
            tokenizer adds, except a second BOS where the text begins with one.
        params: one SamplingParams for all, or a list with one for each prompt.
        A prompt that can never run (empty, longer than the model reads, too large for the cache)
        does not stop the others: its completions are "refused", without tokens, the reason as text.
        One that fills the model to its last position gets no token and "length".
        """
        if isinstance(prompts, str) or any(isinstance(p, int) for p in prompts):
            raise UserError("generate takes a list of prompts; put the one prompt into [ ]")
        if not isinstance(params, list):
            params = [params or SamplingParams()] * len(prompts)
        most = self.num_blocks or self._affordable_blocks()
        groups = [self._group(*request, most)
                  for request in zip(range(len(prompts)), prompts, params, strict=True)]
        lower = torch.autocast(self.model.device.type, self.dtype, cache_enabled=False,
                               enabled=self.model is not self.source)
        with evaluating(self.model), lower:
            self._run(groups, most, progress)
        return [self._completion(s) for group in groups for s in group]

    def _group(self, number, prompt, params, num_blocks):
        """The samples of one prompt."""
        ids, bos = prompt, self.tokenizer.bos_token_id
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
            ids = ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        ids = list(map(int, ids))
        limit = getattr(self.config, "max_position_embeddings", None) or 2**31
        room = min(params.max_new_tokens, limit - len(ids))
        refusal = self._refusal(ids, room, num_blocks)
        stop = eos_ids(self.model, self.tokenizer).union(params.stop_token_ids)
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        return [Sequence(number, k, params, list(ids), len(ids) + room, stop, refusal,
                         uniforms(seed, ids, k, 0 if refusal else room).tolist())
                for k in range(params.n)]

    def _refusal(self, ids, room, num_blocks):
        """Why a prompt can never run; "" if it can."""
        if not ids:
            return "the prompt is empty; give it at least one token"
        known, needed = self.model.get_input_embeddings().num_embeddings, len(ids) + room
        if not 0 <= min(ids) <= max(ids) < known:
            return f"the prompt has a token id outside of the model's 0..{known - 1}"
        if room < 0:
            return f"the prompt has {len(ids)} tokens and the model reads {needed}; shorten it"
        needed = -(-needed // self.block_size)
        return "" if needed <= num_blocks else (
            f"{len(ids)} prompt tokens and {room} new ones need {needed} cache blocks of "
            f"{self.block_size} tokens, there are {num_blocks}; raise num_blocks, lower "
            "max_new_tokens or shorten the prompt")

    def _affordable_blocks(self):
        """How many blocks of the cache the memory has room for."""
        config, device, budget = self.config, self.model.device, CPU_CACHE_BYTES
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers = 2 * config.num_hidden_layers * kv_heads * head_dim  # of one token
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget = int(CUDA_CACHE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
        return budget // (numbers * self.dtype.itemsize * self.block_size)

    def _run(self, groups, most_blocks, progress):
        """All passes of a call, until every sequence has its tokens."""
        began, samples = time.perf_counter(), [s for group in groups for s in group]
        waiting = [g for g in groups if not g[0].refusal and len(g[0].ids) < g[0].limit]
        # The longest max_seqs samples side by side and one more in waiting.
        needed = sorted(-(-s.limit // self.block_size) for group in waiting for s in group)
        blocks = BlockManager(min(most_blocks, sum(needed[-self.max_seqs - 1:])), self.block_size)
        cache = PagedKVCache(blocks.num_blocks + 1, self.block_size, self.model.device)
        decode = (graphs.DecodeGraphs(self.model, cache) if graphs.usable(cache.device) else None)
        scheduler, used, unfilled = Scheduler(waiting, blocks, self.max_seqs), [], 0
        bar = tqdm(total=len(needed), disable=not progress, unit="sample")
        while scheduler.waiting or scheduler.running:
            copies, chunks, takers, rows = scheduler.step(self.max_prefill_tokens)
            cache.copy_blocks(copies)
            logits = self._forward(cache, chunks, rows, decode)
            used.append(blocks.used)
            unfilled += sum({s.blocks[-1]: len(s.blocks) * self.block_size - s.cached
                             for s in scheduler.running}.values())  # a shared block counts once
            finished = self._take(takers, logits) if takers else []
            scheduler.finish(finished)
            bar.update(len(finished))
        bar.close()
        tokens, seconds = sum(len(s.logprobs) for s in samples), time.perf_counter() - began
        self.stats = {
            "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
            "steps": len(used), "mean_batch": tokens / max(1, len(used)),
            "refused": sum(s.refusal != "" for s in samples), "preemptions": scheduler.preemptions,
            "num_blocks": blocks.num_blocks, "blocks_used": used,
            "peak_blocks": max(used, default=0), "blocks_left": blocks.used,
            "kv_waste": unfilled / max(1, sum(used) * self.block_size),
            "prefix_blocks_saved": scheduler.blocks_saved}

    def _forward(self, cache, chunks, rows, decode):
        """One pass over chunks (sequence, start, end) of ids; logits (R, V) after those in rows."""
        ids = torch.tensor([i for s, start, end in chunks for i in s.ids[start:end]])  # (N,)
        width = max(len(s.blocks) for s, _, _ in chunks)
        tables = np.array([s.blocks + [0] * (width - len(s.blocks)) for s, _, _ in chunks])
        starts, ends = np.array([chunk[1:] for chunk in chunks]).T
        if decode and (ends - starts == 1).all():
            return decode(ids.numpy(), tables, starts)[rows]
        last = torch.from_numpy(((ends - starts).cumsum() - 1)[rows]).to(cache.device)
        layout = paged_layout(cache, tables, starts, ends)
        return self.model(input_ids=ids[None].to(cache.device), layout=layout, use_cache=False,
                          position_ids=layout.positions[None], logits_to_keep=last).logits[0]

    def _take(self, sequences, logits):
        """Give every sequence its next token, chosen from logits (R, V); returns those it ends."""
        device = logits.device
        options = {"temperature": torch.tensor([[s.params.temperature] for s in sequences])}
        for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
            values = [getattr(s.params, name) for s in sequences]
            if set(values) != {getattr(SamplingParams, name)}:
                options[name] = torch.tensor(values, device=device)[:, None]
        if "repetition_penalty" in options:
            width = max(len(s.ids) for s in sequences)  # filled up with each row's own first token
            history = [s.ids + s.ids[:1] * (width - len(s.ids)) for s in sequences]
            options["history"] = torch.tensor(history, device=device)
        uniform = torch.tensor([s.uniforms[len(s.logprobs)] for s in sequences], device=device)
        tokens, logprobs = (x.tolist() for x in choose(logits, uniform, **options))
        if any(map(math.isnan, logprobs)):
            raise UserError(f"the model's logits are NaN; it is broken or overflows {logits.dtype}")
        for s, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            s.ids.append(token)
            s.logprobs.append(logprob)
        return [s for s in sequences if s.ids[-1] in s.stop or len(s.ids) == s.limit]

    def _completion(self, s):
        prompt, new = s.ids[:len(s.ids) - len(s.logprobs)], s.ids[len(s.ids) - len(s.logprobs):]
        text = s.refusal or self.tokenizer.decode(new, skip_special_tokens=True)
        reason = "refused" if s.refusal else "stop" if new and new[-1] in s.stop else "length"
        return Completion(s.prompt_index, s.index, prompt, new, s.logprobs, text, reason)


@contextmanager
def evaluating(model):
    """The model in eval mode and on nanorlhf's attention; what it was before is put back."""
    training, attention = model.training, model.config._attn_implementation
    model.eval().set_attn_implementation("nanorlhf")
    try:
        yield
    finally:
        model.train(training).set_attn_implementation(attention)
