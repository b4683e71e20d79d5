"""Sampling with a paged cache and continuous batching.

    sampler = Sampler(model, tokenizer)
    for c in sampler.generate(["1+1=", "2+2="], SamplingParams(n=4, seed=0)):
        print(c.prompt_index, c.index, c.text, c.finish_reason)

Every pass through the model takes one token of each running sample (*decode*) and, beside them, a
bounded piece of the prompts that still have to be read, so that a long prompt stalls nobody. A
group is the n samples of one prompt: the first reads it, and all share its blocks (cache.py). When
blocks run out, the sample that joined last is pre-empted: it gives its blocks back and waits
again, as a group of one whose prompt is all it has so far.

What is promised:

- The log-prob of a token is log_softmax(logits / temperature) in fp32 over the *full* vocabulary,
  also under top-k, top-p, min-p and repetition penalty: it is the number the trainer computes, and
  the sampling distribution only if none of these is set. Temperature 0 takes the argmax and gives
  the log-prob at temperature 1. Vocabulary rows beyond the tokenizer (padding of the matrix) are
  not masked, for the trainer does not mask them either; a trained model does not choose them.
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
from tqdm.auto import tqdm

from nanorlhf.attention import paged_layout
from nanorlhf.cache import BlockManager, PagedKVCache
from nanorlhf.utils import UserError

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
        for name, ok, rule in [
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "finite, 0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is off)"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "None or in 0..2**63-1"),
        ]:
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {rule}")


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
    stop: set[int] = frozenset()  # may hold None, which no token equals
    uniforms: list[float] = ()  # one for each new token
    logprobs: list[float] = field(default_factory=list)  # one for each new token so far
    blocks: list[int] = field(default_factory=list)  # its block table while it runs
    cached: int = 0
    followers: list = field(default_factory=list)  # who waits for this one to read their prompt


class Scheduler:
    """Decides who runs and who must give way. Any sample, alone in the pool, must fit in full."""

    def __init__(self, groups, blocks, max_seqs):
        """groups: lists of sequences with equal ids."""
        self.waiting, self.running = deque(groups), []
        self.blocks, self.max_seqs = blocks, max_seqs
        self.preemptions = self.blocks_saved = 0

    def step(self, budget):
        """The next pass: `chunks`, `takers`, `rows`, `copies`.

        chunks: (sequence, start, end): its ids[start:end] go through the model. A running sample
            brings the token it took last; besides, at most `budget` tokens of prompts are read.
        takers: the samples that take their next token then, each from the logits at the end of the
            chunk in `rows`: one that has read all its ids, and its followers.
        copies: (source, target) blocks to copy after the pass.
        """
        self.reserve()
        self.admit()
        chunks, takers, rows, copies = [], [], [], []
        for s in self.running:
            count = len(s.ids) - s.cached  # 0 for a follower
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count == 0:
                continue
            chunks.append((s, s.cached, s.cached + count))
            s.cached += count
            if s.cached == len(s.ids):
                place = s.cached // self.blocks.block_size
                if s.cached % self.blocks.block_size:
                    copies += [(s.blocks[place], f.blocks[place]) for f in s.followers]
                takers += [s, *s.followers]
                rows += [len(chunks) - 1] * (1 + len(s.followers))
                s.followers = []
        return chunks, takers, rows, copies

    def reserve(self):
        """Give every running sample room for the token it brings next; pre-empt if need be."""
        size = self.blocks.block_size
        for sequence in list(self.running):
            while sequence.blocks and len(sequence.blocks) * size < len(sequence.ids):
                if self.blocks.free:
                    self.blocks.reserve(sequence.blocks, len(sequence.ids) - 1)
                else:
                    self.preempt(self.running[-1])

    def preempt(self, last):
        """Back to the head of the queue; all its ids have to be read again."""
        self.finish([last])
        self.waiting.appendleft([last])
        last.cached = 0
        for s in self.running:  # the sample that reads its prompt need not wait for it
            s.followers = [f for f in s.followers if f is not last]
        self.preemptions += 1

    def admit(self):
        """Let waiting groups in, each sample with room for the token after its prompt.

        The first sample of a group reads the prompt, into blocks that the others share but for the
        last one if it is filled in part. A group waits until all of it fits, or a quarter of
        `max_seqs`, or nobody runs. What does not fit stays at the head of the queue.
        """
        while self.waiting:
            group, length = self.waiting[0], len(self.waiting[0][0].ids)
            # The first sample takes the prompt's blocks and its next token's, each other one more.
            fit = min(len(group), self.max_seqs - len(self.running),
                      len(self.blocks.free) - self.blocks.blocks_for(length + 1) + 1)
            if fit < (min(len(group), max(1, self.max_seqs // 4)) if self.running else 1):
                break
            self.waiting.popleft()
            if fit < len(group):
                self.waiting.appendleft(group[fit:])
            first, *others = group = group[:fit]
            first.blocks, first.followers = self.blocks.allocate(length), others
            for sequence in others:
                sequence.blocks, sequence.cached = self.blocks.fork(first.blocks), length
            for sequence in group:
                self.blocks.reserve(sequence.blocks, length)
            self.blocks_saved += len(others) * (length // self.blocks.block_size)
            self.running += group

    def finish(self, sequences):
        """Sequences leave and give their blocks back."""
        for sequence in sequences:
            self.blocks.release(sequence.blocks)
        self.running = [s for s in self.running if s.blocks]


# ---- the sampler ---------------------------------------------------------------------------------


class Sampler:
    """Samples from `model`, a HF causal LM, with the weights it has at the time of the call.

    block_size: tokens per cache block. max_seqs: samples that run at once. num_blocks: size of the
        cache; by default what the call can need, within 2 GB (CPU) or half of what is free (GPU).
    max_prefill_tokens: prompt tokens in one pass, beside the one of each sample that decodes.
    dtype: if it differs from the model's, a copy in this dtype is sampled from, and `sync()` must
        be called after the weights changed. Otherwise the sampler runs the very model object, and
        puts its training mode and attention back after a call.

    `stats` of the last call: tokens, seconds, tokens_per_s; steps (passes), mean_batch (tokens in a
    step); refused, preemptions; num_blocks, peak_blocks, blocks_used (after each step), blocks_left
    (a leak if not 0); kv_waste (share of the slots of used blocks without a token, over all steps);
    prefix_blocks_saved (by sharing prompts).
    """

    def __init__(self, model, tokenizer, block_size=16, max_seqs=256, num_blocks=None,
                 max_prefill_tokens=4096, dtype=None):
        if min(block_size, max_seqs, max_prefill_tokens) < 1:
            raise UserError("block_size, max_seqs and max_prefill_tokens must be at least 1")
        self.source = self.model = model
        if dtype not in (None, model.dtype):
            self.model = deepcopy(model).requires_grad_(False)
            for weight in self.model.parameters():  # not .to(dtype): rotary buffers must stay fp32
                weight.data = weight.data.to(dtype)
        self.tokenizer, self.config = tokenizer, model.config.get_text_config()
        self.block_size, self.max_seqs, self.num_blocks = block_size, max_seqs, num_blocks
        self.max_prefill_tokens, self.stats = max_prefill_tokens, {}

    @torch.no_grad()
    def sync(self):
        """Refresh the low-precision copy from the model; nothing to do when there is none."""
        if self.model is not self.source:
            fresh = self.source.state_dict()
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(fresh[name])

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
        began = time.perf_counter()
        requests = self._requests(prompts, params)
        num_blocks = self.num_blocks or self._default_blocks(requests)
        eos = self.model.generation_config.eos_token_id
        stop_ids = {self.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        known = self.model.get_input_embeddings().num_embeddings
        done, groups = [], []
        for i, ids, p, room in requests:
            reason = self._refusal(len(ids), room, num_blocks)
            if ids and not 0 <= min(ids) <= max(ids) < known:
                reason = f"the prompt has a token id outside of the model's 0..{known - 1}"
            if reason or room == 0:
                done += [Completion(i, k, ids, [], [], reason, "refused" if reason else "length")
                         for k in range(p.n)]
                continue
            seed = int(torch.randint(2**62, ())) if p.seed is None else p.seed
            groups.append([
                Sequence(i, k, p, list(ids), len(ids) + room, {*stop_ids, *p.stop_token_ids},
                         uniforms(seed, ids, k, room).tolist()) for k in range(p.n)])
        self.stats = {"refused": sum(c.finish_reason == "refused" for c in done)}
        with evaluating(self.model):
            done += self._run(groups, num_blocks, progress)
        tokens, seconds = sum(len(c.token_ids) for c in done), time.perf_counter() - began
        self.stats |= {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
                       "mean_batch": tokens / max(1, self.stats["steps"])}
        return sorted(done, key=lambda c: (c.prompt_index, c.index))

    def _requests(self, prompts, params):
        """(prompt index, prompt ids, params, most new tokens) of each prompt."""
        if isinstance(prompts, str) or any(isinstance(p, int) for p in prompts):
            raise UserError("generate takes a list of prompts; put the one prompt into [ ]")
        if not isinstance(params, list):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(params)} params; give one for each "
                            "prompt, or one for all")
        limit = getattr(self.config, "max_position_embeddings", None) or 2**31
        requests, bos = [], self.tokenizer.bos_token_id
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if isinstance(prompt, str) and bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
            requests.append((i, list(map(int, ids)), p, min(p.max_new_tokens, limit - len(ids))))
        return requests

    def _refusal(self, length, room, num_blocks):
        """Why a prompt of this length can never run; "" if it can."""
        if length == 0:
            return "the prompt is empty; give it at least one token"
        if room < 0:
            return f"the prompt has {length} tokens and the model reads {length + room}; shorten it"
        needed = -(-(length + room) // self.block_size)
        return "" if needed <= num_blocks else (
            f"{length} prompt tokens and {room} new ones need {needed} cache blocks of "
            f"{self.block_size} tokens, there are {num_blocks}; raise num_blocks, lower "
            "max_new_tokens or shorten the prompt")

    def _default_blocks(self, requests):
        """The longest max_seqs samples side by side and one more in waiting, if memory allows."""
        config, device = self.config, self.model.device
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers = 2 * config.num_hidden_layers * kv_heads * head_dim  # of one token
        budget = CPU_CACHE_BYTES
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget = int(CUDA_CACHE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
        affordable = budget // (numbers * self.model.dtype.itemsize * self.block_size)
        needed = [-(-(len(ids) + room) // self.block_size)
                  for _, ids, p, room in requests if room >= 0 for _ in range(p.n)]
        return max(1, min(affordable, sum(sorted(needed)[-self.max_seqs - 1:])))

    def _run(self, groups, num_blocks, progress):
        """All passes of a call; its completions in the order in which they finish."""
        blocks = BlockManager(num_blocks, self.block_size)
        cache = PagedKVCache(num_blocks, self.block_size, self.model.device)
        scheduler = Scheduler(groups, blocks, self.max_seqs)
        done, used, unfilled = [], [], 0
        bar = tqdm(total=sum(map(len, groups)), disable=not progress, unit="sample")
        while scheduler.waiting or scheduler.running:
            chunks, takers, rows, copies = scheduler.step(self.max_prefill_tokens)
            logits = self._forward(cache, chunks, rows)
            cache.copy_blocks(copies)
            used.append(blocks.used)
            unfilled += sum(len(s.blocks) * self.block_size - s.cached for s in scheduler.running)
            finished = self._take(takers, logits) if takers else []
            scheduler.finish(finished)
            done += map(self._completion, finished)
            bar.update(len(finished))
        bar.close()
        self.stats |= {
            "steps": len(used), "blocks_used": used, "num_blocks": num_blocks,
            "kv_waste": unfilled / max(1, sum(used) * self.block_size),
            "preemptions": scheduler.preemptions, "peak_blocks": blocks.peak,
            "prefix_blocks_saved": scheduler.blocks_saved, "blocks_left": blocks.used}
        return done

    def _forward(self, cache, chunks, rows):
        """One pass over chunks (sequence, start, end) of ids; logits (R, V) after those in rows."""
        ids = torch.tensor([i for s, start, end in chunks for i in s.ids[start:end]])  # (N,)
        width = max(len(s.blocks) for s, _, _ in chunks)
        tables = np.array([s.blocks + [0] * (width - len(s.blocks)) for s, _, _ in chunks])
        starts, ends = np.array([chunk[1:] for chunk in chunks]).T
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
        start = len(s.ids) - len(s.logprobs)
        text = self.tokenizer.decode(s.ids[start:], skip_special_tokens=True)
        return Completion(s.prompt_index, s.index, s.ids[:start], s.ids[start:], s.logprobs, text,
                          "stop" if s.ids[-1] in s.stop else "length")


@contextmanager
def evaluating(model):
    """The model in eval mode and on nanorlhf's attention; what it was before is put back."""
    modes, before = [(m, m.training) for m in model.modules()], model.config._attn_implementation
    try:
        model.eval().set_attn_implementation("nanorlhf")
        yield
    finally:
        for module, training in modes:
            module.training = training
        model.set_attn_implementation(before)
