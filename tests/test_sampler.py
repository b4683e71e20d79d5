"""The sampler: exact against HF, independent of its own scheduling, and it loses no block."""

import doctest
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, tiny_model
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.generation import logits_process as hf

import nanorlhf.cache
from nanorlhf import graphs
from nanorlhf.cache import BlockManager, PagedKVCache
from nanorlhf.sampler import (
    Sampler, SamplingParams, Scheduler, Sequence, choose, inverse_cdf, truncate, uniforms,
)
from nanorlhf.utils import UserError


class Digits:
    """Just enough of a tokenizer: characters to ids, BOS 1 in front, EOS 2."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text):
        return {"input_ids": [1] + [1 if c == "^" else 3 + ord(c) % 100 for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i < 3))


class Endless(Digits):
    eos_token_id = None


def ids_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def endless(family="llama", **overrides):
    model = tiny_model(family, **overrides)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def model():
    return endless()


def hf_greedy(model, prompt, new):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                         do_sample=False, max_new_tokens=new)
    model.set_attn_implementation(before)
    return ids[0, len(prompt):].tolist()


def tokens(completions):
    return [c.token_ids for c in completions]


# ---- blocks --------------------------------------------------------------------------------------


def test_block_table_example_of_the_docstring():
    result = doctest.testmod(nanorlhf.cache)
    assert result.attempted > 5 and result.failed == 0


def test_copied_block_holds_the_same_and_is_separate():
    cache = PagedKVCache(3, 4, torch.device("cpu"))
    kv = torch.randn(2, 4, 2, 8)
    cache.write(0, torch.arange(4, 8), kv[0], kv[1])  # block 1
    cache.copy_blocks([(1, 2)])
    pool = cache.pools[0]
    assert pool.shape == (12, 2, 2, 8) and torch.equal(pool[8:12], pool[4:8])
    cache.write(0, torch.tensor([8]), kv[0][:1] + 1, kv[1][:1])
    assert torch.equal(pool[4, 0], kv[0][0])


# ---- exact against HF ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_hf_generate(family):
    """Block borders, chunk borders and (mistral, gemma: window 8) sliding windows."""
    model = endless(family)
    prompts = ids_of(1, 15, 16, 17, 32, 24 + 15)
    expected = [hf_greedy(model, p, 20) for p in prompts]
    greedy = SamplingParams(temperature=0, max_new_tokens=20)
    plain = Sampler(model, Endless())
    assert tokens(plain.generate(prompts * 2, greedy)) == expected * 2
    tight = Sampler(model, Endless(), num_blocks=6, max_prefill_tokens=12, max_seqs=4)
    assert tokens(tight.generate(prompts, greedy)) == expected
    assert tight.stats["preemptions"] > 0 and tight.stats["peak_blocks"] <= 6
    assert plain.stats["blocks_left"] == tight.stats["blocks_left"] == 0


@pytest.mark.parametrize("chunk", [8, 16])
def test_chunked_prefill_at_chunk_borders(model, chunk):
    prompts = ids_of(chunk, 2 * chunk, 2 * chunk + 1, 3 * chunk + 15)
    greedy = SamplingParams(temperature=0, max_new_tokens=8)
    expected = [hf_greedy(model, p, 8) for p in prompts]
    assert tokens(Sampler(model, Endless(), max_prefill_tokens=chunk).generate(prompts, greedy)) \
        == expected


def test_a_plain_hf_model_comes_back_as_it_was(model):
    model.set_attn_implementation("sdpa")
    model.train()
    [c] = Sampler(model, Endless()).generate(ids_of(5), SamplingParams(max_new_tokens=2))
    assert len(c.token_ids) == 2 and model.config._attn_implementation == "sdpa"
    assert model.training and model.model.layers[0].mlp.training
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    model.eval().set_attn_implementation("nanorlhf")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_decode_graphs_give_the_same_samples(family, monkeypatch):
    """What is recorded here is, as by CUDA, a list of operations on fixed memory: a replay runs no
    Python of the model, so nothing that a step is made of may come from elsewhere."""
    model, shapes = tiny_model(family), []
    model.config.pad_token_id = None  # GPT-2 has none; where there is one, it looks for it
    prompts, params = ids_of(5, 18, 1), SamplingParams(n=2, max_new_tokens=18, seed=3)

    def samples():
        sampler = Sampler(model, Endless(), block_size=4, max_seqs=4, num_blocks=14)
        return sampler.generate(prompts, params), sampler.stats

    plain, stats = samples()

    def record(self, decode):
        decode()
        shapes.append(decode.__closure__[0].cell_contents.shape)
        return make_fx(decode)()

    monkeypatch.setattr(graphs, "usable", lambda device: True)
    monkeypatch.setattr(graphs.DecodeGraphs, "record", record)
    graphed, others = samples()
    assert [c.token_ids for c in graphed] == [c.token_ids for c in plain]
    for a, b in zip(graphed, plain):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert others["blocks_used"] == stats["blocks_used"] and others["preemptions"] > 0
    assert 1 < len(shapes) < 8 < others["steps"] and len(set(shapes)) == len(shapes)
    assert all(n & n - 1 == 0 for rows, width in shapes for n in (rows, width - 2))


def test_filters_keep_what_hf_keeps():
    torch.manual_seed(0)
    logits, history = torch.randn(64, 50) * 3, torch.randint(0, 50, (64, 9))
    for penalty, temperature, k, p, low in [
        (1.0, 1.0, 5, 1.0, 0.0), (1.0, 0.7, 0, 0.8, 0.0), (1.0, 1.3, 0, 1.0, 0.1),
        (1.3, 0.7, 20, 0.9, 0.05), (0.8, 2.0, 99, 0.3, 0.5),
    ]:
        expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
        expected = hf.TemperatureLogitsWarper(temperature)(history, expected)
        column = {}
        if k:
            expected = hf.TopKLogitsWarper(k)(history, expected)
            column["top_k"] = torch.full((64, 1), k)
        if p < 1:
            expected = hf.TopPLogitsWarper(p)(history, expected)
            column["top_p"] = torch.full((64, 1), p)
        if low:
            expected = hf.MinPLogitsWarper(low)(history, expected)
            column["min_p"] = torch.full((64, 1), low)
        penalised = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
        ours = truncate((penalised / temperature).log_softmax(-1), **column)
        torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1))
        u = torch.rand(64)
        token, logp = choose(logits, u, torch.full((64, 1), temperature),
                             torch.full((64, 1), penalty), history, **column)
        assert torch.equal(token, inverse_cdf(expected.softmax(-1), u))
        full = (logits / temperature).log_softmax(-1)
        torch.testing.assert_close(logp, full.gather(1, token[:, None])[:, 0])


# ---- randomness ----------------------------------------------------------------------------------


def test_inverse_cdf_hits_every_token_in_proportion_and_never_an_impossible_one():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.0, 0.125, 0.0])
    grid = torch.arange(1024) / 1024
    counts = inverse_cdf(weights.expand(1024, -1), grid).bincount(minlength=8)
    assert torch.equal(counts / 1024, weights)
    ends = torch.tensor([0.0, 1 - 2**-23])
    assert inverse_cdf(weights.expand(2, -1), ends).tolist() == [1, 6]
    tiny = torch.tensor([0.0, 1e-30, 0.0, 1e-38, 0.0])  # unnormalised, almost nothing
    assert inverse_cdf(tiny.expand(2, -1), ends).tolist() == [1, 1]
    logits = torch.full((2, 8), float("-inf"))
    logits[:, 5] = 3.0
    token, logp = choose(logits, ends, torch.ones(2, 1))
    assert token.tolist() == [5, 5] and logp.tolist() == [0, 0]


def test_random_streams_are_uniform_own_and_prefix_stable():
    u = uniforms(3, [5, 6], 0, 40_000)
    assert u.min() >= 0 and u.max() < 1 and torch.equal(u * 2**23, (u * 2**23).round())
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert torch.equal(uniforms(3, [5, 6], 0, 10), u[:10])
    others = [uniforms(4, [5, 6], 0, 10), uniforms(3, [6, 5], 0, 10), uniforms(3, [5, 6], 1, 10)]
    assert all(not torch.equal(u[:10], other) for other in others)


def test_samples_depend_on_seed_prompt_and_index_alone(model):
    prompts = ids_of(3, 15, 16, 17, 30, 8, 21)
    params = SamplingParams(n=3, max_new_tokens=12, seed=7)
    base = Sampler(model, Endless()).generate(prompts, params)
    assert [(c.prompt_index, c.index) for c in base] == [(i, k) for i in range(7) for k in range(3)]
    assert [c.prompt_ids for c in base[::3]] == prompts
    expected = tokens(base)
    for settings_ in [dict(block_size=4), dict(block_size=5, max_seqs=4), dict(max_seqs=2),
                      dict(max_prefill_tokens=7), dict(block_size=4, num_blocks=12)]:
        sampler = Sampler(model, Endless(), **settings_)
        assert tokens(sampler.generate(prompts, params)) == expected, settings_
        assert sampler.stats["blocks_left"] == 0
    assert sampler.stats["preemptions"] > 0
    backwards = tokens(sampler.generate(prompts[::-1], params))
    assert sum((backwards[i:i + 3] for i in range(18, -1, -3)), []) == expected
    assert tokens(sampler.generate(prompts[2:3], SamplingParams(max_new_tokens=12, seed=7))) \
        == expected[6:7]
    neighbours = [SamplingParams(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0,
                                 temperature=0.3, max_new_tokens=12), params]
    assert tokens(sampler.generate(prompts[:2], neighbours))[1:] == expected[3:6]
    assert len({tuple(t) for t in expected[:3]}) == 3


def test_without_a_seed_torch_decides_and_equal_prompts_differ(model):
    sampler, prompts = Sampler(model, Endless()), ids_of(6) * 2
    params = SamplingParams(max_new_tokens=20)
    torch.manual_seed(0)
    first, second = (tokens(sampler.generate(prompts, params)) for _ in range(2))
    torch.manual_seed(0)
    assert tokens(sampler.generate(prompts, params)) == first != second and first[0] != first[1]
    state = torch.get_rng_state()
    sampler.generate(prompts, SamplingParams(seed=1, max_new_tokens=2))
    assert torch.equal(state, torch.get_rng_state())


def test_four_thousand_samples_follow_the_model(model):
    [prompt] = ids_of(5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        probs = (model(torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1)
    model.set_attn_implementation("nanorlhf")
    params = SamplingParams(n=4000, temperature=2.0, max_new_tokens=1, seed=0)
    found = torch.tensor(tokens(Sampler(model, Endless()).generate([prompt], params)))
    observed = found[:, 0].bincount(minlength=128) / 4000
    error = (probs * (1 - probs) / 4000).sqrt()
    assert ((observed - probs).abs() < 5 * error + 1e-3).all()


# ---- log-probs -----------------------------------------------------------------------------------


def full_logits(model, c):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([c.prompt_ids + c.token_ids])).logits[0]
    model.set_attn_implementation("nanorlhf")
    return logits[len(c.prompt_ids) - 1:-1]


@pytest.mark.parametrize("options", [dict(temperature=0.6), dict(temperature=0.6, top_k=4,
                         top_p=0.9, min_p=0.01, repetition_penalty=1.2), dict(temperature=0)])
def test_logprob_is_of_the_tempered_full_distribution(model, options):
    [c] = Sampler(model, Endless()).generate(ids_of(9), SamplingParams(seed=0, **options,
                                                                      max_new_tokens=16))
    logits, chosen = full_logits(model, c), torch.tensor(c.token_ids)[:, None]
    tempered = (logits / (options["temperature"] or 1)).log_softmax(-1).gather(1, chosen)[:, 0]
    torch.testing.assert_close(torch.tensor(c.logprobs), tempered, atol=2e-5, rtol=0)
    assert max(c.logprobs) <= 0 and len(c.logprobs) == len(c.token_ids) == 16


def test_three_temperatures_in_one_batch(model):
    prompts = ids_of(7, 7, 7)
    params = [SamplingParams(temperature=t, max_new_tokens=64, seed=0) for t in (0, 0.7, 1)]
    sampler = Sampler(model, Endless())
    mixed = sampler.generate(prompts, params)
    assert mixed[0].token_ids == hf_greedy(model, prompts[0], 64)
    alone = [sampler.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(mixed) == tokens(alone)
    assert all(torch.tensor(c.logprobs).isfinite().all() for c in mixed)


# ---- ends and refusals ---------------------------------------------------------------------------


def test_every_stop_token_ends_a_sample_and_stays_in_it(model):
    [prompt] = ids_of(4)
    [free] = Sampler(model, Endless()).generate([prompt], SamplingParams(max_new_tokens=40, seed=1))
    third, eighth = free.token_ids[2], free.token_ids[7]
    first = min(free.token_ids.index(third), free.token_ids.index(eighth))

    class Stops(Digits):
        eos_token_id = 127 if 127 not in free.token_ids else 0

    sampler, params = Sampler(model, Stops()), SamplingParams(max_new_tokens=40, seed=1)
    params.stop_token_ids = (eighth, third)
    [a] = sampler.generate([prompt], params)
    params.stop_token_ids = ()
    model.generation_config.eos_token_id = [third, eighth]
    [b] = sampler.generate([prompt], params)
    model.generation_config.eos_token_id = None
    assert a.token_ids == b.token_ids == free.token_ids[:first + 1]
    assert a.finish_reason == b.finish_reason == "stop" and free.finish_reason == "length"
    assert len(a.logprobs) == len(a.token_ids)
    Stops.eos_token_id = free.token_ids[0]
    [c] = sampler.generate([prompt], SamplingParams(max_new_tokens=1, seed=1))
    assert c.token_ids == free.token_ids[:1] and c.finish_reason == "stop"


@pytest.mark.parametrize("bad", [[128], [3, -1]])
def test_ids_that_the_model_lacks_are_refused_and_the_others_finish(model, bad):
    out = Sampler(model, Digits()).generate([bad, [3, 127]], SamplingParams(max_new_tokens=3))
    assert [c.finish_reason for c in out] == ["refused", "length"] and "0..127" in out[0].text


def test_oversize_prompts_are_refused_and_the_others_finish(model):
    prompts = ids_of(80, 10, 513, 0, 30)
    sampler, began = Sampler(model, Endless(), num_blocks=4), time.perf_counter()
    out = sampler.generate(prompts, SamplingParams(n=2, temperature=0, max_new_tokens=20))
    assert time.perf_counter() - began < 5
    refused = [c.finish_reason == "refused" for c in out]
    assert refused == [True] * 2 + [False] * 2 + [True] * 4 + [False] * 2
    assert [len(c.token_ids) for c in out] == [0 if r else 20 for r in refused]
    assert all(number in out[0].text for number in ("80", "20", "7", "16", "4"))
    assert "513 tokens and the model reads 512" in out[4].text and "empty" in out[6].text
    assert sampler.stats["refused"] == 6 and sampler.stats["blocks_left"] == 0


def test_the_models_length_ends_a_sample(model):
    prompts = ids_of(511, 512, 510)
    out = Sampler(model, Endless()).generate(prompts, SamplingParams(max_new_tokens=2, seed=0))
    assert [len(c.token_ids) for c in out] == [1, 0, 2]
    assert {c.finish_reason for c in out} == {"length"}


@pytest.mark.parametrize("prompt", [47, 48, 49])
def test_a_group_that_fills_the_pool_runs_one_by_one(model, prompt):
    params = SamplingParams(n=4, max_new_tokens=64 - prompt, seed=0)
    expected = tokens(Sampler(model, Endless()).generate(ids_of(prompt), params))
    tight = Sampler(model, Endless(), num_blocks=4)
    assert tokens(tight.generate(ids_of(prompt), params)) == expected
    assert tight.stats["peak_blocks"] == 4 and tight.stats["blocks_left"] == 0


def test_samples_share_their_prompt(model):
    sampler = Sampler(model, Endless())
    sampler.generate(ids_of(100), SamplingParams(n=8, max_new_tokens=4))
    assert sampler.stats["peak_blocks"] == 6 + 8 and sampler.stats["prefix_blocks_saved"] == 7 * 6
    assert sampler.stats["steps"] == 4 and sampler.stats["tokens"] == 32


def test_a_long_prompt_stalls_nobody(model):
    sampler, prompts = Sampler(model, Endless(), max_prefill_tokens=10), ids_of(5, 100, 5)
    out = sampler.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))
    assert tokens(out) == [hf_greedy(model, p, 12) for p in prompts]
    stats = sampler.stats
    # 5 + 5 tokens of prompts in the first pass, then tens; the first sample is done meanwhile
    assert stats["steps"] == 11 + 11 and stats["mean_batch"] == 36 / 22
    assert len(stats["blocks_used"]) == 22 and max(stats["blocks_used"]) == stats["peak_blocks"]
    assert stats["preemptions"] == stats["blocks_left"] == 0


def test_waste_is_the_part_of_used_blocks_that_holds_no_token(model):
    sampler = Sampler(model, Endless(), block_size=4)
    sampler.generate(ids_of(6), SamplingParams(n=2, max_new_tokens=3))
    # After the prompt: two shared blocks, one full, one with 2 of 4 slots filled. After each later
    # pass: the full one, and for each sample one with 3, then 4 filled.
    assert sampler.stats["blocks_used"] == [2, 3, 3]
    assert sampler.stats["kv_waste"] == (2 + 2 * 1 + 0) / ((2 + 3 + 3) * 4)


def test_strings_get_one_bos(model):
    sampler = Sampler(model, Digits())
    out = sampler.generate(["ab", "^ab"], SamplingParams(max_new_tokens=3, temperature=0))
    assert out[0].prompt_ids == out[1].prompt_ids == [1, 3 + 97, 3 + 98]
    assert out[0].text == " ".join(str(i) for i in out[0].token_ids if i > 2)


@pytest.mark.parametrize("bad", [dict(n=0), dict(temperature=-1.0), dict(top_p=0.0), dict(top_k=-1),
                         dict(max_new_tokens=0), dict(min_p=2.0), dict(repetition_penalty=0.0),
                         dict(seed=-1), dict(temperature=float("nan"))])
def test_bad_params_are_named(bad):
    with pytest.raises(UserError, match=f"^{next(iter(bad))} is .* must be"):
        SamplingParams(**bad)


def test_bad_calls_are_named(model):
    sampler = Sampler(model, Digits())
    for prompts in ("text", [1, 2]):
        with pytest.raises(UserError, match="list of prompts"):
            sampler.generate(prompts)
    with pytest.raises(ValueError, match="shorter"):
        sampler.generate(ids_of(3, 4), [SamplingParams()])
    assert sampler.generate([]) == []


# ---- weights -------------------------------------------------------------------------------------


def test_changed_weights_are_seen_at_once_and_copies_after_sync():
    model, prompts = endless(), ids_of(20, 33)
    params = SamplingParams(max_new_tokens=10, seed=0)
    same, copy = Sampler(model, Endless()), Sampler(model, Endless(), dtype=torch.bfloat16)
    assert same.model is model and model.dtype == torch.float
    fresh = dict(model.named_parameters())
    for name, weight in copy.model.named_parameters():  # norms and embeddings are the trainer's own
        shared = "norm" in name or "embed" in name
        assert weight.dtype == (torch.float32 if shared else torch.bfloat16), name
        assert (weight is fresh[name]) == shared
    assert {b.dtype for b in copy.model.buffers()} == {torch.float32}  # rotary frequencies
    before, before_copy = same.generate(prompts, params), copy.generate(prompts, params)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) * 0.1
    after = same.generate(prompts, params)
    assert after == Sampler(model, Endless()).generate(prompts, params)
    assert tokens(after) != tokens(before)
    copy.sync()
    new = Sampler(model, Endless(), dtype=torch.bfloat16)
    assert copy.generate(prompts, params) == new.generate(prompts, params) != before_copy


def test_only_a_model_in_fp32_has_a_copy():
    model = endless().to(torch.bfloat16)
    assert Sampler(model, Endless(), dtype=torch.bfloat16).model is model
    with pytest.raises(UserError, match="as it is"):
        Sampler(model, Endless(), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bf16"])
def test_a_copy_has_one_of_three_precisions(model, dtype):
    with pytest.raises(UserError, match="dtype must be one of torch.float32, torch.bfloat16"):
        Sampler(model, Digits(), dtype=dtype)


def test_nan_weights_are_named():
    model = endless()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        Sampler(model, Endless()).generate(ids_of(4))


# ---- schedules -----------------------------------------------------------------------------------


def run_schedule(draw):
    """Random groups, lengths, arrivals and pools, no model: nothing leaks, nothing that others read
    is written to, every sample finds its own tokens where its table says, and all end."""
    size, max_seqs = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    num_blocks, budget = draw(st.integers(1, 16)), draw(st.integers(1, 20))
    drawn = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 20)),
                          min_size=1, max_size=6))  # n, prompt length, most new tokens
    groups = [[Sequence(i, k, None, [(i, p) for p in range(prompt)], prompt + room)
               for k in range(n)] for i, (n, prompt, room) in enumerate(drawn)]
    embeddings = SimpleNamespace(num_embeddings=1)
    sampler = SimpleNamespace(block_size=size, model=SimpleNamespace(
        get_input_embeddings=lambda: embeddings))
    reasons = [Sampler._refusal(sampler, [0] * prompt, room, num_blocks)
               for _, prompt, room in drawn]
    assert all(str(num_blocks) in reason for reason in reasons if reason)
    groups = [group for group, reason in zip(groups, reasons, strict=True) if not reason]
    everybody = [s for group in groups for s in group]
    ends = {s: len(s.ids) + draw(st.integers(1, s.limit - len(s.ids))) for s in everybody}
    blocks, memory, ended = BlockManager(num_blocks, size), {}, []
    now = draw(st.integers(0, len(groups)))  # groups that are there from the start
    scheduler, later = Scheduler(groups[:now], blocks, max_seqs), groups[now:]

    def check_books():
        named = [block for s in scheduler.running for block in s.blocks]
        assert blocks.references == [named.count(block) for block in range(blocks.num_blocks)]
        assert sorted(blocks.free) == [b for b in range(blocks.num_blocks) if b not in named]
        followers = [f for s in scheduler.running for f in s.followers]
        assert len(scheduler.running) + len(followers) <= max_seqs
        waiting = [s for group in scheduler.waiting for s in group]
        assert not any(s.blocks or s.cached for s in [*waiting, *followers])
        assert all(s.ids == group[0].ids for group in scheduler.waiting for s in group)
        inside = [*scheduler.running, *followers, *waiting, *ended,
                  *(s for group in later for s in group)]
        assert len(inside) == len(everybody) and set(inside) == set(everybody)

    def slot(s, position):
        return s.blocks[position // size], position % size

    for _ in range(3000):
        idle = not (scheduler.waiting or scheduler.running)
        if later and (idle or draw(st.booleans())):
            scheduler.waiting.append(later.pop(0))
        elif idle:
            break
        oldest = scheduler.running[:1]
        copies, chunks, takers, rows = scheduler.step(budget)
        followers = {s: {t for t, row in zip(takers, rows) if chunks[row][0] is s}
                     for s, _, _ in chunks}
        assert chunks and oldest == scheduler.running[:len(oldest)]  # never pre-empted: all end
        assert len({target for _, target in copies}) == len(copies)
        assert sum(end - start for _, start, end in chunks if end - start > 1) <= budget
        check_books()
        memory |= {(target, place): memory.get((source, place))  # all are read, then all written
                   for source, target in copies for place in range(size)}
        for s, start, end in chunks:
            for p in range(start, end):
                readers = {r for r in scheduler.running if slot(s, p)[0] in r.blocks}
                assert readers <= {s, *followers[s]}
                memory[slot(s, p)] = s.ids[p]
        for taker, row in zip(takers, rows, strict=True):
            s, _, end = chunks[row]
            assert taker.ids == s.ids and end == taker.cached == len(taker.ids)
            assert [memory[slot(taker, p)] for p in range(end)] == taker.ids
        for taker in takers:
            taker.ids.append((taker.prompt_index, taker.index, len(taker.ids)))
        gone = [s for s in takers if len(s.ids) == ends[s]]
        scheduler.finish(gone)
        ended += gone
    assert len(ended) == len(everybody) and blocks.used == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_schedule_keeps_the_books(data):
    run_schedule(data.draw)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(st.data())
def test_ten_thousand_schedules_keep_the_books(data):
    run_schedule(data.draw)
