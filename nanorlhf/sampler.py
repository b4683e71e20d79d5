"""Sampling with a paged cache and continuous batching.

    sampler = Sampler(model, tokenizer)
    for c in sampler.generate(["1+1=", "2+2="], SamplingParams(n=4, seed=0)):
        print(c.prompt_index, c.index, c.text, c.finish_reason)

A call runs passes of the model until nobody waits or runs. A pass either *prefills* (brings waiting
prompts into the cache, several packed together, a long one in chunks) or *decodes* (one token for
every running sample). A prompt is prefilled once, then forked to its n samples, which share its
blocks (cache.py). Samples join as soon as rows and blocks are free and leave when they finish. When
blocks run out the last-come sample is pre-empted: its blocks are freed and it queues again, to be
prefilled with its prompt and all it had generated.

What is promised:

- The log-prob of a token is log_softmax(logits / temperature) in fp32 over the *full* vocabulary,
  also under top-k, top-p, min-p and repetition penalty: it is the number the trainer computes, and
  the sampling distribution only if none of these is set. Temperature 0 takes the argmax and gives
  the log-prob at temperature 1. Vocabulary rows beyond the tokenizer (padding of the matrix) are
  not masked: sampler and trainer speak of one distribution. A trained model does not choose them.
- A sample depends on (seed, prompt ids, sample index) alone: each has its own random stream. The
  same prompt twice with the same seed gives the same samples; use n for different ones. Without
  a seed, one is drawn for every prompt from torch's global generator.
- Nothing is kept between calls: weights may change at will.

Letters: S samples of a call, R of them in this pass, V vocabulary, L longest sample, W blocks of a
table.
"""

import hashlib
import time
from collections import deque
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
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

    Weights need not sum to 1. With 0 <= uniform <= 1 - 2**-23 that token exists and has a weight
    above 0. fp64, or small probabilities would vanish in a sum over a large vocabulary.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return token.clamp_(max=weights.shape[1] - 1)  # only NaN weights get there


def choose(logits, uniform, temperature, repetition_penalty=None, history=None, **filters):
    """logits (R, V) -> tokens (R,) and their log-probs (R,).

    uniform (R,) in [0, 1); temperature (R, 1); history (R, T) the tokens so far. repetition_penalty
    and the filters are (R, 1), or None where no row uses them; a row does not notice what others
    use, for a filter that is off leaves its numbers as they are, to the last bit.
    """
    logits, greedy = logits.float(), temperature == 0
    temperature = temperature.masked_fill(greedy, 1.0)
    scores = logp = (logits / temperature).log_softmax(-1)  # (R, V)
    if repetition_penalty is not None:  # Keskar et al. 2019
        seen = logits.gather(1, history)
        seen = torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
        scores = (logits.scatter(1, history, seen) / temperature).log_softmax(-1)
    token = inverse_cdf(truncate(scores, **filters).exp(), uniform)
    if greedy.any():
        token = torch.where(greedy[:, 0], scores.argmax(-1), token)
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
    """One sample on its way. Its numbers lie in row `row` of the call's tensors."""

    row: int
    prompt_index: int
    index: int
    blocks: list[int] = field(default_factory=list)  # its block table while it runs


@dataclass(eq=False)
class Prefill:
    """Tokens that must be in the cache before `sequences` can go on from there: a prompt and its
    n samples, or, after a pre-emption, one sample with its prompt and what it had generated."""

    sequences: list[Sequence]
    length: int  # how many tokens
    done: int = 0  # how many of them the cache holds
    blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # (V,) after the last token, once all are in


class Scheduler:
    """Decides who joins, who runs and who must give way. It knows lengths and blocks, no tokens.

    `length` (S,) counts the tokens of each sample. All but the last of a running sample are in the
    cache; the last is written when the next is computed. Waiting prefills that hold blocks always
    stand at the front of the queue. Any single sample must fit into the pool at full length.
    """

    def __init__(self, sequences, length, limit, blocks, max_seqs, max_prefill_tokens):
        """length, limit (S,): tokens that each sequence has, and can have at most."""
        self.length, self.blocks = length, blocks
        self.max_seqs, self.max_prefill_tokens = max_seqs, max_prefill_tokens
        groups = [list(group) for _, group in groupby(sequences, lambda s: s.prompt_index)]
        self.waiting = deque(Prefill(group, int(length[group[0].row])) for group in groups)
        self.running: list[Sequence] = []
        self.rows = torch.empty(0, dtype=torch.long)  # of the running sequences
        width = blocks.blocks_for(int(limit.max()))
        self.table = torch.zeros(len(length), width, dtype=torch.long)  # (S, W)
        self.preemptions = self.blocks_saved = 0

    def plan_prefill(self):
        """Chunks (prefill, start, end) of the next prefill pass; empty if nothing can come in."""
        chunks, budget = [], self.max_prefill_tokens
        free_rows = self.max_seqs - len(self.running)
        for item in self.waiting:
            if free_rows <= 0 or budget == 0:
                break
            if not item.blocks:
                # Each sample takes a block of its own soon: do not come in to be thrown out again.
                wanted = self.blocks.blocks_for(item.length) + min(free_rows, len(item.sequences))
                if wanted > len(self.blocks.free) and self.blocks.used:
                    break
                item.blocks = self.blocks.allocate(item.length)
            start, item.done = item.done, min(item.length, item.done + budget)
            if start < item.done:
                chunks.append((item, start, item.done))
            budget -= item.done - start
            free_rows -= len(item.sequences)
        return chunks

    def join(self):
        """Fork samples off the prefills that are done, while rows and blocks last.

        Returns the new sequences, the logits (V,) each goes on from, and the block copies to make.
        """
        joined, logits, copies = [], [], []
        while self.waiting and self.waiting[0].logits is not None:
            if len(self.running) == self.max_seqs:
                break
            item = self.waiting[0]
            last = len(item.sequences) == 1  # inherits the prefill's blocks, needs no copy
            if not self.blocks.free and not (last and item.length % self.blocks.block_size):
                if self.running:
                    break  # they will finish, or give way
                # This prompt alone fills the pool: let the first sample have it, then the others.
                self.waiting.insert(1, Prefill(item.sequences[1:], item.length))
                del item.sequences[1:]
                continue
            sequence = item.sequences.pop(0)
            sequence.blocks = self.blocks.fork(item.blocks)
            if last:
                self.blocks.release(item.blocks)
                self.waiting.popleft()
            else:
                self.blocks_saved += item.length // self.blocks.block_size
            if copy := self.blocks.reserve(sequence.blocks, item.length):
                copies.append(copy)
            self.table[sequence.row, :len(sequence.blocks)] = torch.tensor(sequence.blocks)
            self.running.append(sequence)
            joined.append(sequence)
            logits.append(item.logits)
        if joined:
            self._update_rows()
        return joined, logits, copies

    def reserve(self):
        """Give every running sample the slot of the token it writes next; pre-empt if need be."""
        size = self.blocks.block_size
        edges = ((self.length[self.rows] - 1) % size == 0).nonzero()[:, 0].tolist()
        for sequence in [self.running[i] for i in edges]:
            place = (int(self.length[sequence.row]) - 1) // size
            if len(sequence.blocks) > place:
                continue  # has had it since it joined
            while sequence.blocks and not self.blocks.free:
                if not self.drop_prefill():
                    self.preempt(max(self.running, key=lambda s: s.row))
            if sequence.blocks:  # not pre-empted itself
                self.blocks.reserve(sequence.blocks, place * size)
                self.table[sequence.row, place] = sequence.blocks[-1]

    def drop_prefill(self):
        """Free the blocks of the last waiting prefill that holds any; False if there is none."""
        for item in reversed(self.waiting):
            if item.blocks:
                self.blocks.release(item.blocks)
                item.done, item.logits = 0, None
                return True
        return False

    def preempt(self, sequence):
        """Back to the head of the queue: everybody in it came later."""
        self.finish([sequence])
        self.waiting.appendleft(Prefill([sequence], int(self.length[sequence.row])))
        self.preemptions += 1

    def finish(self, sequences):
        """Sequences leave and give their blocks back."""
        if not sequences:
            return
        for sequence in sequences:
            self.blocks.release(sequence.blocks)
        self.running = [s for s in self.running if s.blocks]
        self._update_rows()

    def _update_rows(self):
        self.rows = torch.tensor([s.row for s in self.running], dtype=torch.long)


# ---- the sampler ---------------------------------------------------------------------------------


class Call:
    """The tensors of one `generate`, on the CPU, a row for each of its S samples."""

    def __init__(self, requests, stop_ids):
        """requests: (prompt index, prompt ids, params, most new tokens) of each prompt."""
        rows = [(i, k, ids, p, room) for i, ids, p, room in requests for k in range(p.n)]
        self.sequences = [Sequence(row, i, k) for row, (i, k, *_) in enumerate(rows)]
        self.start = torch.tensor([len(ids) for _, _, ids, _, _ in rows])  # (S,) prompt length
        room = torch.tensor([room for *_, room in rows])
        self.limit = self.start + room
        stops = [torch.tensor([*stop_ids, *p.stop_token_ids], dtype=torch.long)
                 for *_, p, _ in rows]
        self.stop = pad_sequence(stops, batch_first=True, padding_value=-1)
        self.ids = torch.zeros(len(rows), int(self.limit.max()), dtype=torch.long)  # (S, L)
        self.logprobs = torch.zeros(self.ids.shape)  # aligned with ids
        self.uniforms = torch.zeros(len(rows), int(room.max()))
        seeds = {i: int(torch.randint(2**62, ())) if p.seed is None else p.seed
                 for i, _, p, _ in requests}
        for row, (i, k, ids, _, room) in enumerate(rows):
            self.ids[row, :len(ids)] = torch.tensor(ids)
            self.uniforms[row, :room] = uniforms(seeds[i], ids, k, room)
        self.options = {}  # keyword of `choose` -> (S, 1), for what some sample uses
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            values = [getattr(p, name) for *_, p, _ in rows]
            if name == "temperature" or set(values) != {getattr(SamplingParams, name)}:
                self.options[name] = torch.tensor(values)[:, None]

    def history(self, rows, length):
        """Every token so far, (R, T); short rows are filled up with their own first token."""
        ids = self.ids[rows, :int(length.max())]
        return torch.where(torch.arange(ids.shape[1]) < length[:, None], ids, ids[:, :1])


class Sampler:
    """Samples from `model`, a HF causal LM, with the weights it has at the time of the call.

    Its training mode and attention implementation are switched during `generate` and put back.

    block_size: tokens per cache block. max_seqs: samples that run at once. num_blocks: size of the
        cache; by default what the call can need, within 2 GB (CPU) or half of what is free (GPU).
    max_prefill_tokens: prompt tokens in one pass.
    dtype: if it differs from the model's, a copy in this dtype is sampled from, and `sync()` must
        be called after the weights changed. Otherwise the sampler runs the very model object.

    After a call, `stats` holds its numbers.
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

        A prompt that can never run (empty, longer than the model reads, or too large for the cache)
        does not stop the others: its n completions have finish_reason "refused", no tokens, and the
        reason as text. A prompt that fills the model to its last position gets no token and
        "length".
        """
        began = time.perf_counter()
        requests = self._requests(prompts, params)
        num_blocks = self.num_blocks or self._default_blocks(requests)
        done, accepted = [], []
        for i, ids, p, room in requests:
            reason = self._refusal(len(ids), room, num_blocks)
            if reason or room == 0:
                finish = "refused" if reason else "length"
                done += [Completion(i, k, ids, [], [], reason, finish) for k in range(p.n)]
            else:
                accepted.append((i, ids, p, room))
        self.stats = {"refused": sum(c.finish_reason == "refused" for c in done), "steps": 0,
                      "preemptions": 0, "peak_blocks": 0, "prefix_blocks_saved": 0,
                      "blocks_left": 0}
        if accepted:
            with evaluating(self.model):
                done += self._run(Call(accepted, self._stop_ids()), num_blocks, progress)
        tokens, seconds = sum(len(c.token_ids) for c in done), time.perf_counter() - began
        self.stats |= {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
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
        requests = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            ids = self._encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
            requests.append((i, ids, p, min(p.max_new_tokens, limit - len(ids))))
        return requests

    def _encode(self, text):
        ids, bos = self.tokenizer(text)["input_ids"], self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _stop_ids(self):
        ids = self.model.generation_config.eos_token_id
        ids = ids if isinstance(ids, list) else [ids]
        return [i for i in {self.tokenizer.eos_token_id, *ids} if i is not None]

    def _refusal(self, length, room, num_blocks):
        """Why a prompt of this length can never run; "" if it can."""
        if length == 0:
            return "the prompt is empty; give it at least one token"
        if room < 0:
            return (f"the prompt has {length} tokens and the model reads {length + room}; "
                    "shorten the prompt")
        needed = -(-(length + room) // self.block_size)
        if needed > num_blocks:
            return (f"{length} prompt tokens and {room} new ones need {needed} cache blocks of "
                    f"{self.block_size} tokens, there are {num_blocks}; raise num_blocks, lower "
                    "max_new_tokens or shorten the prompt")
        return ""

    def _default_blocks(self, requests):
        """The longest max_seqs samples side by side and one more in waiting, if memory allows."""
        config, device = self.config, self.model.device
        heads = config.num_attention_heads
        numbers = 2 * config.num_hidden_layers * (  # of one token
            (getattr(config, "num_key_value_heads", None) or heads)
            * (getattr(config, "head_dim", None) or config.hidden_size // heads))
        budget = CPU_CACHE_BYTES
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget = int(CUDA_CACHE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
        affordable = budget // (numbers * self.model.dtype.itemsize * self.block_size)
        needed = [-(-(len(ids) + room) // self.block_size)
                  for _, ids, p, room in requests if room >= 0 for _ in range(p.n)]
        return max(1, min(affordable, sum(sorted(needed)[-self.max_seqs - 1:])))

    def _run(self, call, num_blocks, progress):
        """All passes of a call; its completions in the order in which they finish."""
        blocks = BlockManager(num_blocks, self.block_size)
        cache = PagedKVCache(num_blocks, self.block_size, self.model.device)
        scheduler = Scheduler(call.sequences, call.start.clone(), call.limit, blocks, self.max_seqs,
                              self.max_prefill_tokens)
        done, bar = [], tqdm(total=len(call.sequences), disable=not progress)
        while scheduler.waiting or scheduler.running:
            chunks = scheduler.plan_prefill()
            if chunks:
                self._prefill(call, cache, chunks)
            joined, logits, copies = scheduler.join()
            if joined:
                cache.copy_blocks(copies)
                finished = self._take(call, scheduler, joined, torch.stack(logits))
            elif not chunks:
                scheduler.reserve()
                rows = scheduler.rows
                ends = scheduler.length[rows]
                logits = self._forward(cache, call.ids[rows, ends - 1], scheduler.table[rows],
                                       ends - 1, ends)
                finished = self._take(call, scheduler, scheduler.running, logits)
            else:
                finished = []
            self.stats["steps"] += bool(chunks or not joined)
            done += finished
            bar.update(len(finished))
        bar.close()
        self.stats |= {"preemptions": scheduler.preemptions, "peak_blocks": blocks.peak,
                       "prefix_blocks_saved": scheduler.blocks_saved, "blocks_left": blocks.used}
        return done

    def _prefill(self, call, cache, chunks):
        ids = [call.ids[item.sequences[0].row, start:end] for item, start, end in chunks]
        tables = pad_sequence([torch.tensor(item.blocks) for item, *_ in chunks], batch_first=True)
        starts, ends = torch.tensor([chunk[1:] for chunk in chunks]).unbind(1)
        logits = self._forward(cache, torch.cat(ids), tables, starts, ends)
        for (item, _, end), row in zip(chunks, logits, strict=True):
            if end == item.length:
                item.logits = row

    def _forward(self, cache, ids, tables, starts, ends):
        """ids (N,): tokens starts[i]..ends[i]-1 of sequence i. Logits (R, V) after each's last."""
        counts, device = ends - starts, self.model.device
        behind = counts.cumsum(0)
        positions = torch.arange(len(ids)) - torch.repeat_interleave(behind - ends, counts)  # (N,)
        return self.model(
            input_ids=ids[None].to(device), position_ids=positions[None].to(device),
            use_cache=False, logits_to_keep=(behind - 1).to(device),
            layout=paged_layout(cache, tables, starts, ends),
        ).logits[0]

    def _take(self, call, scheduler, sequences, logits):
        """Choose the next token of `sequences` from logits (R, V); the completions it finishes."""
        rows = scheduler.rows[-len(sequences):]  # those that joined last, or all
        length, device = scheduler.length[rows], logits.device
        options = {name: column[rows].to(device) for name, column in call.options.items()}
        if "repetition_penalty" in options:
            options["history"] = call.history(rows, length).to(device)
        uniform = call.uniforms[rows, length - call.start[rows]].to(device)
        token, logprob = (x.cpu() for x in choose(logits, uniform, **options))
        if logprob.isnan().any():
            raise UserError(f"the model's logits are NaN; it is broken or overflows {logits.dtype}")
        call.ids[rows, length], call.logprobs[rows, length] = token, logprob
        scheduler.length[rows] = length + 1
        stopped = (token[:, None] == call.stop[rows]).any(1)
        ended = (stopped | (length + 1 == call.limit[rows])).nonzero()[:, 0].tolist()
        finished = [sequences[i] for i in ended]
        scheduler.finish(finished)
        return [self._completion(call, sequence, int(length[i]) + 1, bool(stopped[i]))
                for i, sequence in zip(ended, finished, strict=True)]

    def _completion(self, call, sequence, length, stopped):
        row, start = sequence.row, int(call.start[sequence.row])
        ids, logprobs = call.ids[row, :length].tolist(), call.logprobs[row, start:length].tolist()
        text = self.tokenizer.decode(ids[start:], skip_special_tokens=True)
        return Completion(sequence.prompt_index, sequence.index, ids[:start], ids[start:], logprobs,
                          text, "stop" if stopped else "length")


@contextmanager
def evaluating(model):
    """The model in eval mode and on nanorlhf's attention; what it was before is put back."""
    modes = [(m, m.training) for m in model.modules()]
    implementation = model.config._attn_implementation
    try:
        model.eval()
        if implementation != "nanorlhf":
            model.set_attn_implementation("nanorlhf")
        yield
    finally:
        for module, training in modes:
            module.training = training
        if implementation != "nanorlhf":
            model.set_attn_implementation(implementation)
