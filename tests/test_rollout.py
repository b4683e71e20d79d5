"""From samples to gradients: what is laid out, scored, masked, and that only the sum counts."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from launch import ROOT
from nanorlhf import data, rollout, toy
from nanorlhf.losses import dpo_loss, gae, group_advantages
from nanorlhf.model import (
    DTYPES, autocast, load_policy, load_scorer, save_model, sequence_scores,
)
from nanorlhf.rewards import math_reward
from nanorlhf.rollout import (
    judge, lay_out, model_scores, rl_prompts, rollout_metrics, score_tokens, warn_if_hopeless,
)
from nanorlhf.sampler import Completion, Sampler, SamplingParams
from nanorlhf.utils import UserError, clean, read_jsonl
from tiny import tiny_model

sys.path.insert(0, str(ROOT))
import train_dpo  # noqa: E402
import train_grpo  # noqa: E402
import train_ppo  # noqa: E402
import train_sft  # noqa: E402


class Numbers:
    """Just enough of a tokenizer."""

    bos_token_id, eos_token_id = 1, 2

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def completion(prompt_index, prompt, tokens, reason="stop", text=""):
    return Completion(prompt_index, 0, prompt, tokens, [-float(t) for t in tokens], text, reason)


def actions(rollout, number):
    """The tokens that the number-th answer is trained on."""
    at = slice(rollout.cu_seqlens[number], rollout.cu_seqlens[number + 1])
    ids, mask = rollout.input_ids[at], rollout.loss_mask[at].bool()
    return ids[1:][mask[:-1]].tolist()


# --- where models are ---


class Traveller(torch.nn.Module):
    """A frozen model that says where it is when it is asked."""

    def __init__(self):
        super().__init__()
        self.device, self.trips = torch.device("cpu"), []

    def to(self, device):
        self.device = torch.device(device)
        self.trips.append(self.device.type)


@pytest.mark.parametrize("fails", [False, True])
def test_an_offloaded_model_is_on_the_device_only_while_it_scores(fails, monkeypatch):
    model, seen = Traveller(), []

    def scores(model, part, *temperature):
        seen.append(model.device.type)
        if fails:
            raise torch.OutOfMemoryError("full")
        return torch.zeros(len(part), device="meta"), torch.zeros(len(part), device="meta")

    monkeypatch.setattr(rollout, "token_logprobs", scores)
    monkeypatch.setattr(rollout, "sequence_scores", lambda *args: scores(*args)[0])
    batch = lay_out([completion(0, [5], [6, 2]), completion(1, [8], [9, 2])]).to("meta")
    monkeypatch.setattr(type(batch), "split", lambda self, size: [self, self])
    model.config = SimpleNamespace()
    for call in (lambda: score_tokens(model, batch, 1.0, 4), lambda: model_scores(model, batch, 4)):
        if fails:
            with pytest.raises(torch.OutOfMemoryError):
                call()
        else:
            call()
        assert model.trips == ["meta", "cpu"] and set(seen) == {"meta"}
        model.trips.clear(), seen.clear()


# --- laying out -----------------------------------------------------------------------------------


def test_lay_out_by_hand():
    rollout = lay_out([completion(0, [5, 6], [7, 2]), completion(1, [8], [9, 10, 11], "length")])
    assert rollout.input_ids.tolist() == [5, 6, 7, 2, 8, 9, 10, 11]
    assert rollout.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rollout.cu_seqlens.tolist() == [0, 4, 8]
    assert rollout.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 1, 0]  # t speaks of token t+1
    assert rollout.sampler_logp.tolist() == [0, -7, -2, 0, -9, -10, -11, 0]
    assert rollout.group.tolist() == [0, 1] and rollout.stopped.tolist() == [True, False]


def test_trained_ids_are_the_sampled_ids_also_of_cut_answers():
    """PPO-8: a model that (nearly) never ends, cut after four tokens; no EOS is written."""
    model, tokenizer = load_policy("toy")
    prompts = [data.encode([{"role": "user", "content": t}], tokenizer, prompt_only=True)[0]
               for t in toy.questions(6)]
    completions = Sampler(model, tokenizer).generate(
        prompts, SamplingParams(n=2, max_new_tokens=4, seed=0))
    rollout = lay_out(completions)
    cut = [c for c in completions if c.finish_reason == "length"]
    assert len(cut) > 6 and all(len(c.token_ids) == 4 for c in cut)
    for number, c in enumerate(completions):
        assert actions(rollout, number) == c.token_ids
        assert rollout.stopped[number] == (c.finish_reason == "stop")
        if c.finish_reason == "length":
            assert tokenizer.eos_token_id not in c.token_ids
    assert rollout.input_ids.tolist() == [
        i for c in completions for i in c.prompt_ids + c.token_ids]


def test_every_token_of_the_stop_list_ends_an_answer_that_counts_as_ended():
    """GRPO-2: two ids end a turn; answers that end in either are not truncated ones."""
    model = tiny_model()
    model.generation_config.eos_token_id = [2] + list(range(10, 40))
    completions = Sampler(model, Numbers()).generate(
        prompts_of(4), SamplingParams(n=16, max_new_tokens=64, seed=1))
    rollout = lay_out(completions)
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert len({c.token_ids[-1] for c in ended}) > 1 and 2 * len(ended) > len(completions)
    assert rollout.stopped.tolist() == [c.token_ids[-1] in [2, *range(10, 40)] for c in completions]
    for number, c in enumerate(completions):
        assert actions(rollout, number) == c.token_ids  # the stop token included, nothing after it


@pytest.mark.parametrize("stop_token_ids", [(), tuple(range(128))])
def test_answers_of_one_token(stop_token_ids):
    """TNY-6: --max_new_tokens 1, and a model that ends at once."""
    model = tiny_model()
    completions = Sampler(model, Numbers()).generate(prompts_of(1, 3, 9), SamplingParams(
        n=2, max_new_tokens=1 if not stop_token_ids else 8, stop_token_ids=stop_token_ids, seed=0))
    rollout = lay_out(completions)
    assert all(len(c.token_ids) == 1 for c in completions)
    assert rollout.loss_mask.sum() == 6
    rollout.old_logp, entropy = score_tokens(model, rollout, 1.0, 16)
    rollout.ref_logp, rollout.scores = rollout.old_logp, torch.zeros(6)
    assert all(map(math.isfinite, rollout_metrics(rollout, entropy).values()))


def test_the_score_lands_on_the_last_action():
    """PPO-5: as train_ppo.py places it; answers of 3 and 1 tokens, score 1, no KL, V = 0."""
    rollout = lay_out([completion(0, [5, 6], [7, 8, 2]), completion(1, [5], [9], "length")])
    rewards = torch.zeros(len(rollout.input_ids))
    rewards[rollout.last - 1] += torch.ones(2)
    assert rewards.tolist() == [0, 0, 0, 1, 0, 1, 0]
    assert (rollout.loss_mask[rollout.last - 1] == 1).all()
    advantages, _ = gae(rewards, torch.zeros(7), rollout.loss_mask, 1.0, 1.0, rollout.cu_seqlens)
    assert advantages.tolist() == [0, 1, 1, 1, 0, 1, 0]


# --- log-probs of sampler and trainer -------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_an_update_the_ratio_is_one(family, temperature):
    """PPO-1: prompts of 3 and 17 tokens among others, micro-batches that are not the rollout."""
    model = tiny_model(family)
    sampler = Sampler(model, Numbers(), block_size=4, max_seqs=5)
    completions = sampler.generate(prompts_of(3, 17, 1, 40), SamplingParams(
        n=3, temperature=temperature, max_new_tokens=24, seed=0))
    rollout = lay_out(completions)
    logps = [score_tokens(model, rollout, temperature, micro)[0] for micro in (10**6, 50, 1)]
    rollout.old_logp, entropy = score_tokens(model, rollout, temperature, 50)
    rollout.scores = torch.zeros(len(rollout))
    assert rollout_metrics(rollout, entropy)["sampler_gap"] <= 2e-5
    for logp in logps:
        assert (logp - rollout.old_logp).abs().max() <= 1e-5
        assert logp.isfinite().all()
    shuffled = rollout.select(list(range(len(rollout)))[::-1])
    logp, _ = score_tokens(model, shuffled, temperature, 60)
    assert (logp - shuffled.old_logp).abs().max() <= 1e-5


@pytest.mark.parametrize("name, value", [("temperature", 0.0), ("temperature", math.nan),
                                         ("max_new_tokens", 512)])
def test_sampling_that_rl_cannot_use_is_refused_with_the_reason(name, value):
    """PPO-4; truncated sampling is refused as a flag, see test_utils.py."""
    flags = dict(temperature=1.0, max_new_tokens=96, max_len=512, data="toy", eval_data="",
                 toy_grade="4x2", toy_rows=2, eval_rows=2, eval_prompts=2, seed=0, columns="",
                 chat_template="", show_data=0)
    model, tokenizer = toy.new_model(), toy.tokenizer()
    rl_prompts(SimpleNamespace(**flags), model, tokenizer, toy.gold_reward)
    words = {"temperature": "samples that differ", "max_new_tokens": "no room"}
    with pytest.raises(UserError, match=words[name]) as error:
        rl_prompts(SimpleNamespace(**flags | {name: value}), model, tokenizer, toy.gold_reward)
    assert str(error.value).startswith(f"--{name}")


# --- scores ---------------------------------------------------------------------------------------


def test_abstaining_rewards_are_counted_and_stay_out_of_the_statistics():
    """GRPO-5: [1, None, 0, 1]; what is logged is valid JSON."""
    prompts = [([5], {"prompt": "q", "answer": "3"})]
    completions = [completion(0, [5], [7, 2], text=str(i)) for i in range(4)]
    seen = {}

    def reward(prompts, completions, answer, finish_reasons, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [1, None, 0, 1]

    rollout = lay_out(completions)
    scores = judge(rollout, completions, prompts, reward, 100)
    assert scores[[0, 2, 3]].tolist() == [1, 0, 1] and scores[1].isnan()
    assert seen == {"prompts": ["q"] * 4, "completions": ["0", "1", "2", "3"],
                    "answer": ["3"] * 4, "columns": {}}
    rollout.scores, rollout.old_logp = scores, rollout.sampler_logp
    metrics = rollout_metrics(rollout, torch.zeros(len(rollout.input_ids)))
    assert metrics["unjudged"] == 1 and metrics["reward_mean"] == pytest.approx(2 / 3)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 3)
    assert group_advantages(scores, 4, "dr_grpo").tolist() == pytest.approx([1/3, 0, -2/3, 1/3])
    rollout.scores = torch.full((4,), math.nan)
    metrics = rollout_metrics(rollout, torch.zeros(len(rollout.input_ids)))
    assert metrics["unjudged"] == 4 and clean(metrics["reward_mean"]) is None


def test_metrics_by_hand():
    rollout = lay_out([completion(0, [5, 6], [7, 2]), completion(1, [8], [9, 10, 11], "length")])
    rollout.scores = torch.tensor([1.0, 3.0])
    rollout.old_logp = rollout.sampler_logp + 0.5 * rollout.loss_mask
    rollout.ref_logp = rollout.old_logp - rollout.loss_mask * 0.2
    found = rollout_metrics(rollout, torch.arange(8.0))
    assert found == pytest.approx({
        "reward_mean": 2, "reward_std": 1, "unjudged": 0, "entropy": (1 + 2 + 4 + 5 + 6) / 5,
        "sampler_gap": 0.5, "response_length": 2.5, "eos_rate": 0.5, "kl_k1": 0.2,
        "kl_sequence": 0.5, "kl_k3": math.exp(-0.2) - 1 + 0.2}, abs=1e-6)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A reward model of the toy family with a random head."""
    folder = tmp_path_factory.mktemp("rm")
    save_model(*load_policy("toy"), folder / "policy")
    scorer, tokenizer = load_scorer(str(folder / "policy"))
    torch.manual_seed(0)
    torch.nn.init.normal_(scorer.score.weight)
    scorer.config.reward_mean, scorer.config.reward_std = 0.5, 4.0
    save_model(scorer, tokenizer, folder / "rm")
    return str(folder / "rm")


def test_model_scores_are_normalised_and_read_at_the_last_token(reward_model):
    scorer, tokenizer = load_scorer(reward_model)
    rollout = lay_out([completion(0, [30, 31], [40, 2]),
                       completion(1, [33], [50, 51, 52], "length")])
    with torch.no_grad():
        raw = sequence_scores(scorer, rollout)
        alone = scorer(input_ids=torch.tensor([[33, 50, 51, 52]]),
                       layout=data_layout(4)).logits[0, 0]
    torch.testing.assert_close(raw[1], alone, atol=1e-5, rtol=1e-5)
    for micro in (1, 10**6):
        torch.testing.assert_close(model_scores(scorer, rollout, micro), (raw - 0.5) / 4.0)
        assert torch.equal(judge(rollout, None, None, scorer, micro),
                           model_scores(scorer, rollout, micro))


def data_layout(length):
    from nanorlhf.attention import packed_layout
    return packed_layout(torch.tensor([0, length]))


def test_a_hopeless_first_iteration_is_told(capsys):
    cut = [completion(0, [5], [7, 8], "length", "so it goes")] * 20
    warn_if_hopeless(cut, 2, math_reward)
    warnings = capsys.readouterr().err
    assert "--max_new_tokens 2" in warnings and "'so it goes'" in warnings
    warn_if_hopeless([completion(0, [5], [7, 2], "stop", "#### 4")] * 20, 2, math_reward)
    assert not capsys.readouterr().err


# --- a whole optimiser step -----------------------------------------------------------------------


class Done(Exception):
    pass


def gradients(script, monkeypatch, folder, updates=1, backwards=None, watch=None, **flags):
    """The gradients (flat tensors) with which `script.train` would make its first updates.

    backwards: reverse the order of the rows where the script shuffles this many of them.
    watch(name, value): is told the masks that the script weighs its tokens with.
    """
    found, original = [], data.epoch_order
    config = script.Config(device="cpu", out=str(folder / "run"), overwrite=True, **flags)

    def capture(optimizer, lr, grad_clip, scaler):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([p.grad.flatten() for p in weights]).clone())
        optimizer.zero_grad()
        if len(found) == updates:
            raise Done
        return 1.0

    with monkeypatch.context() as patch:
        patch.setattr(script, "optimizer_step", capture)
        patch.setattr(data, "epoch_order", lambda n, seed, epoch: (
            original(n, seed, epoch)[::-1] if n == backwards else original(n, seed, epoch)))
        if watch:
            weigh = rollout.token_weights
            patch.setattr(rollout, "token_weights", lambda mask, cu, *rest: (
                watch(mask, cu), weigh(mask, cu, *rest))[1])
        with pytest.raises(Done):
            script.train(config)
    return found


def assert_same_gradient(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.norm() > 0
        assert (x - y).norm() <= 1e-5 * x.norm()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sft_step(monkeypatch, tmp_path):
    """SFT-4: rows of 11 and about 101 target tokens; together, one by one, and the other way."""
    rows = [{"prompt": "a", "completion": "b" * 10}, {"prompt": "c" * 20, "completion": "d" * 100},
            {"prompt": "e", "completion": "f"}, {"prompt": "g", "completion": "h" * 40}]
    flags = dict(data=write(tmp_path / "rows.jsonl", rows), batch_size=4, max_steps=1)
    whole = gradients(train_sft, monkeypatch, tmp_path, **flags)
    for more in (dict(micro_tokens=1), dict(micro_tokens=150), dict(backwards=4)):
        assert_same_gradient(whole, gradients(train_sft, monkeypatch, tmp_path, **flags, **more))


@pytest.mark.parametrize("loss", [dict(), dict(loss_type="ipo"),
                                  dict(loss_type="simpo", nll_coef=0.5)])
def test_dpo_step(monkeypatch, tmp_path, loss):
    pairs = toy.pairs(6) + [{"prompt": "1+1=", "chosen": "#### 2", "rejected": "9 " * 50}]
    file = write(tmp_path / "pairs.jsonl", pairs)
    flags = dict(model="toy", data=file, batch_size=7, max_steps=1, **loss)
    whole = gradients(train_dpo, monkeypatch, tmp_path, **flags)
    for more in (dict(micro_tokens=1), dict(micro_tokens=200), dict(backwards=7)):
        assert_same_gradient(whole, gradients(train_dpo, monkeypatch, tmp_path, **flags, **more))


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def digits(prompts, completions, **_):\n"
        "    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"
        "def flat(prompts, completions, **_):\n"
        "    return [1.0] * len(completions)\n"
        "def silent(prompts, completions, **_):\n"
        "    return [None] * len(completions)\n"
        "def second_silent(prompts, completions, **_):\n"
        "    return [None if i % 4 == 1 else float(i % 4) for i in range(len(completions))]\n")
    return str(tmp_path / "reward.py")


RL = dict(model="toy", toy_rows=3, batch_size=3, max_new_tokens=40, max_steps=1, eval_prompts=4,
          group_size=4)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_grpo_step(monkeypatch, tmp_path, rewards, loss_type):
    """GRPO-1."""
    flags = RL | dict(reward=f"{rewards}:digits", loss_type=loss_type, kl_coef=0.1,
                      kl_estimator="k1")
    whole = gradients(train_grpo, monkeypatch, tmp_path, **flags)
    for more in (dict(micro_tokens=1), dict(micro_tokens=150), dict(backwards=12)):
        assert_same_gradient(whole, gradients(train_grpo, monkeypatch, tmp_path, **flags, **more))


def test_ppo_step(monkeypatch, tmp_path, reward_model):
    """The same for the policy and the critic, with several answers and one answer to a prompt."""
    flags = RL | dict(reward_model=reward_model, critic_warmup=0, inner_epochs=1, mini_batches=1,
                      updates=2)
    whole = gradients(train_ppo, monkeypatch, tmp_path, **flags)
    for more in (dict(micro_tokens=1), dict(micro_tokens=150), dict(backwards=12)):
        assert_same_gradient(whole, gradients(train_ppo, monkeypatch, tmp_path, **flags, **more))
    assert len(whole) == 2 and len(whole[0]) != len(whole[1])


@pytest.mark.parametrize("reward", ["flat", "silent"])
def test_without_spread_or_judgement_there_is_no_gradient(monkeypatch, tmp_path, rewards, reward):
    """GRPO-3 and GRPO-5: exactly zero, not NaN."""
    (gradient,) = gradients(train_grpo, monkeypatch, tmp_path,
                            **RL | dict(reward=f"{rewards}:{reward}"))
    assert not gradient.any()


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_answers_that_were_not_judged_are_not_trained_on(monkeypatch, tmp_path, rewards,
                                                         reward_model, script):
    """GRPO-5: every second answer of a group of four abstains; its weights are 0."""
    more = dict(reward_model=reward_model, mini_batches=1, critic_warmup=0) if (
        script is train_ppo) else {}
    seen = []

    def watch(mask, cu_seqlens):
        seen.append([mask[a:b].sum().item() for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])])

    (gradient,) = gradients(script, monkeypatch, tmp_path, watch=watch,
                            **RL | dict(reward=f"{rewards}:second_silent") | more)
    assert gradient.isfinite().all() and gradient.any()
    assert sum(count == 0 for count in seen[0]) == 3 and len(seen[0]) == 12


def test_every_prompt_is_asked_once_an_epoch_and_groups_stay_together(monkeypatch, tmp_path,
                                                                      rewards):
    """GRPO-8: 10 prompts, 4 an iteration: 4 + 4 + 2; the answers of a group are neighbours."""
    asked, groups = [], []

    def watched(rollout, completions, prompts, *rest):
        asked.append([columns["prompt"] for _, columns in prompts])
        groups.append([(c.prompt_index, c.index) for c in completions])
        assert all(c.prompt_ids == prompts[c.prompt_index][0] for c in completions)
        return judge(rollout, completions, prompts, *rest)

    monkeypatch.setattr(rollout, "judge", watched)
    train_grpo.train(train_grpo.Config(**RL | dict(
        device="cpu", out=str(tmp_path / "run"), toy_rows=10, batch_size=4, group_size=2,
        max_new_tokens=4, max_steps=0, epochs=2, reward=f"{rewards}:digits")))
    assert [len(batch) for batch in asked] == [4, 4, 2] * 2
    for epoch in (asked[:3], asked[3:]):
        texts = [text for batch in epoch for text in batch]
        assert len(set(texts)) == 10
    assert asked[:3] != asked[3:]  # in another order
    assert groups[0] == [(p, i) for p in range(4) for i in range(2)]


def test_the_ratio_leaves_one_at_the_second_inner_step(monkeypatch, tmp_path, rewards):
    """GRPO-6: the same answers twice; at a large learning rate the second pass is clipped."""
    seen, stats = [], train_grpo.ppo_stats
    monkeypatch.setattr(train_grpo, "ppo_stats",
                        lambda *args: seen.append(stats(*args)) or seen[-1])
    train_grpo.train(train_grpo.Config(**RL | dict(
        device="cpu", out=str(tmp_path / "run"), inner_epochs=2, lr=3e-2,
        reward=f"{rewards}:digits")))
    first, second = seen
    assert first["log_ratio_max"] <= 1e-5 and first["clip_frac"] == 0
    assert second["log_ratio_max"] > 0.1 and second["clip_frac"] > 0


def test_another_reference_is_read(tmp_path):
    """DPO-5: the log-probs that are computed beforehand are those of --ref_model."""
    pairs = toy.pairs(6)
    save_model(toy.new_model(seed=1), toy.tokenizer(), tmp_path / "ref")
    train_dpo.train(train_dpo.Config(
        device="cpu", model="toy", ref_model=str(tmp_path / "ref"), out=str(tmp_path / "run"),
        data=write(tmp_path / "pairs.jsonl", pairs), batch_size=6, beta=0.1, max_steps=1,
        eval_prompts=2, max_new_tokens=4))
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    model, tokenizer = load_policy("toy")
    encoded, _ = data.encode_pairs(pairs, tokenizer, 1024)
    batch = data.Batch.from_rows([side for pair in encoded for side in pair])
    sums = []
    for scorer in (model, load_policy(str(tmp_path / "ref"))[0]):
        logp, _ = score_tokens(scorer, batch, 1.0, 10**6)
        sums += torch.zeros(12).index_add(0, batch.row, logp).view(-1, 2).T
    expected = dpo_loss(*sums, beta=0.1).item() / 6
    assert row["loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(row["loss"] - math.log(2)) > 1e-2


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_rows_than_a_batch_are_trained_on(tmp_path, count):
    """TNY-1: 3 rows, batch 8; one row."""
    file = write(tmp_path / "rows.jsonl", toy.demonstrations(count))
    train_sft.train(train_sft.Config(device="cpu", data=file, out=str(tmp_path / "run"),
                                     batch_size=8, epochs=2, max_new_tokens=4))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_the_gap_of_a_low_precision_sampler_is_below_the_roundings_own(family, dtype):
    """Sampler against trainer, both by autocast, beside the trainer's own distance from fp32.
    (Packed against alone is no measure here: on a CPU it is 0.)"""
    model = tiny_model(family, initializer_range=0.1)
    sampler = Sampler(model, Numbers(), dtype=DTYPES[dtype])
    batch = lay_out(sampler.generate(prompts_of(*range(3, 35)),
                                     SamplingParams(n=4, max_new_tokens=48, seed=1)))
    exact, _ = score_tokens(model, batch, 1.0, 500)
    with autocast("cpu", dtype):
        trainer, _ = score_tokens(model, batch, 1.0, 500)
    gap, rounding = (difference[batch.loss_mask > 0].abs().mean() for difference in
                     (batch.sampler_logp - trainer, trainer - exact))
    assert gap <= 0.5 * rounding, (gap, rounding)
