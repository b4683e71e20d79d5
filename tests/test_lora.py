"""Adapters: PEFT as the oracle, what is trained, what is shared, what is refused."""

import json
import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from launch import run
from nanorlhf import lora
from nanorlhf.data import Batch
from nanorlhf.losses import sft_loss
from nanorlhf.model import (
    DTYPES, autocast, load_policy, load_reference, load_reward_model, load_scorer, save_model,
    sequence_scores, token_logprobs,
)
from nanorlhf.rollout import lay_out
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import UserError, optimizer_step, trainable
from test_model import rows_of, words
from tiny import tiny_model

LENGTHS = (3, 17, 2, 33, 9)
SEVEN = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def flags(**changes):
    values = dict(lora_rank=4, lora_alpha=0.0, lora_targets="", out="out", weight_decay=0.0,
                  gradient_checkpointing=False, device="cpu", dtype="fp32", load_in_4bit=False,
                  show_data=0)
    return SimpleNamespace(**(values | changes))


@pytest.fixture
def base(tmp_path):
    """The folder of a tiny policy, by family."""
    def make(family="llama", **overrides):
        folder = tmp_path / family
        if not folder.exists():
            save_model(tiny_model(family, **overrides), words(128, pad="<7>"), folder)
        return str(folder)
    return make


def shaken(model, scale=0.1):
    """The model with an adapter (and score head) that does something."""
    torch.manual_seed(1)
    for module, leaf in lora.trained(model).values():
        if leaf != "lora_A":
            nn.init.normal_(getattr(module, leaf), std=scale)
    return model


def adapted(path, load=load_policy, **changes):
    model, tokenizer = load(path)
    return shaken(lora.adapt(model, flags(**changes))), tokenizer


def logps(model, *lengths):
    with torch.no_grad():
        return token_logprobs(model, Batch.from_rows(rows_of(*lengths or LENGTHS)))[0]


def step(model, optimizer, scaler, seed=0):
    batch = Batch.from_rows(rows_of(*LENGTHS, seed=seed))
    loss = (sequence_scores(model, batch).square().sum() if hasattr(model, "score")
            else sft_loss(token_logprobs(model, batch)[0], batch.loss_mask / 40))
    loss.backward()
    optimizer_step(optimizer, 1e-2, 1.0, scaler)


# --- PEFT as the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2"])
def test_logits_and_gradients_are_pefts(family, base, tmp_path):
    model, tokenizer = adapted(base(family))
    save_model(model, tokenizer, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base(family)),
                                            tmp_path / "adapter", is_trainable=True)
    ((ids, mask),) = rows = rows_of(40)
    ids, learned = torch.tensor([ids]), torch.tensor(mask[1:], dtype=torch.bool)
    logp = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    ours, _ = token_logprobs(model, Batch.from_rows(rows))
    torch.testing.assert_close(ours[:-1][learned], logp[learned], atol=1e-5, rtol=1e-5)
    ours.sum().backward()
    logp[learned].sum().backward()
    grads = {name.replace(".default", ""): w.grad for name, w in theirs.named_parameters()
             if w.requires_grad}
    found = lora.trained(model)
    assert grads.keys() == found.keys() and len(found) >= 8
    for name, place in found.items():
        torch.testing.assert_close(getattr(*place).grad, grads[name], atol=1e-5, rtol=1e-4)
    assert {n for n, w in model.named_parameters() if w.grad is not None} == {
        n for n, w in model.named_parameters() if w.requires_grad}  # the frozen head has none


def test_every_loader_opens_the_folder(base, tmp_path):
    """LOR-6: the loaded output is that before saving, and not that of the base."""
    model, tokenizer = adapted(base())
    save_model(model, tokenizer, tmp_path / "adapter")
    ids = torch.tensor([rows_of(20)[0][0]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for kind in (peft.AutoPeftModelForCausalLM, AutoModelForCausalLM):
            other = kind.from_pretrained(tmp_path / "adapter")
            torch.testing.assert_close(other(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    model.set_attn_implementation("nanorlhf")
    ours, again = load_policy(str(tmp_path / "adapter"))
    assert torch.equal(logps(ours), logps(model)) and len(again) == 128
    assert (logps(ours) - logps(load_policy(base())[0])).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab() == again.get_vocab()


@pytest.mark.parametrize("family, targets", [("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])])
def test_an_adapter_that_peft_made_opens(family, targets, base, tmp_path):
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base(family)),
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM",
                        lora_dropout=0.1, fan_in_fan_out=family == "gpt2",
                        init_lora_weights=False)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = load_policy(str(tmp_path / "theirs"))  # tokenizer and config are the base's
    ((ids, _),) = rows = rows_of(20)
    ids = torch.tensor([ids])
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(
            1, ids[0, 1:, None])[:, 0]
    batch = Batch.from_rows(rows)
    torch.testing.assert_close(token_logprobs(model, batch)[0][:-1],
                               expected * batch.loss_mask[:-1], atol=1e-5, rtol=1e-5)
    more = lora.adapt(model, flags(lora_rank=3))  # its targets are kept
    save_model(more, words(128), tmp_path / "ours")
    ours, theirs = (json.loads((tmp_path / name / "adapter_config.json").read_text())
                    for name in ("ours", "theirs"))
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"]) == targets


def test_a_reward_models_adapter_opens_in_peft(base, tmp_path):
    scorer, tokenizer = adapted(base(), load_scorer)
    scorer.config.reward_mean, scorer.config.reward_std = 0.5, 2.0
    save_model(scorer, tokenizer, tmp_path / "rm")
    rows = rows_of(*LENGTHS)
    with torch.no_grad():
        expected = sequence_scores(scorer, Batch.from_rows(rows))
        for theirs in (
            peft.AutoPeftModelForSequenceClassification.from_pretrained(
                tmp_path / "rm", num_labels=1),
            peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(
                base(), num_labels=1), tmp_path / "rm")):
            scores = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[:, 0]
                                for ids, _ in rows])
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        again, _ = load_scorer(str(tmp_path / "rm"))
        assert torch.equal(sequence_scores(again, Batch.from_rows(rows)), expected)
    assert again.config.reward_mean == 0.5 and again.config.reward_std == 2.0
    with pytest.raises(UserError, match="is a reward model, not a policy"):
        load_policy(str(tmp_path / "rm"))


def test_a_reward_model_starts_from_a_policys_adapter(base, tmp_path):
    policy, tokenizer = adapted(base())
    save_model(policy, tokenizer, tmp_path / "sft")
    scorer, _ = load_scorer(str(tmp_path / "sft"))
    batch = Batch.from_rows(rows_of(*LENGTHS))
    assert not sequence_scores(scorer, batch).any()
    lora.adapt(scorer, flags())
    assert scorer.score.weight.requires_grad
    ours, theirs = (m.base_model.layers[0].mlp.up_proj.lora_B for m in (scorer, policy))
    assert torch.equal(ours, theirs)
    save_model(shaken(scorer), tokenizer, tmp_path / "rm")  # its base is still the base
    again, _ = load_scorer(str(tmp_path / "rm"))
    assert torch.equal(sequence_scores(again, batch), sequence_scores(scorer, batch))
    assert again.lora_config["base_model_name_or_path"] == base()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_folders_are_plain(family, base, tmp_path):
    for load, kind in ((load_policy, AutoModelForCausalLM),
                       (load_scorer, AutoModelForSequenceClassification)):
        model, tokenizer = adapted(base(family), load)
        save_model(model, tokenizer, tmp_path / "adapter" / kind.__name__)
        out = tmp_path / "merged" / kind.__name__
        result = run("nanorlhf.lora", "--adapter", tmp_path / "adapter" / kind.__name__, "--out",
                     out, cwd=tmp_path)
        assert result.status == 0, result.err
        other, info = kind.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()) and not (out / "adapter_config.json").exists()
        model.set_attn_implementation("eager")
        ids = torch.tensor([rows_of(20)[0][0]])
        with torch.no_grad():
            torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits,
                                       atol=1e-5, rtol=1e-5)


# --- what is trained, and what is not -------------------------------------------------------------


def test_training_starts_at_the_model_itself(base, capsys):
    model, _ = load_policy(base())
    before = logps(model)
    assert torch.equal(logps(lora.adapt(model, flags())), before)
    assert sorted(model.lora_config["target_modules"]) == SEVEN
    assert model.lora_config["lora_alpha"] == 8  # twice the rank
    learn = sum(w.numel() for w in model.parameters() if w.requires_grad)
    assert learn == 4 * sum(sum(m.weight.shape) for m in lora.linear_layers(model).values())
    assert f"LoRA: {learn:,} of" in capsys.readouterr().out


@pytest.mark.parametrize("load", [load_policy, load_scorer])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_moves_in_one_step(checkpointing, load, base):
    """LOR-1, and nothing else moves; the optimiser holds nothing else."""
    cfg = flags(gradient_checkpointing=checkpointing)
    model = lora.adapt(load(base())[0], cfg)
    if load is load_scorer:
        nn.init.normal_(model.score.weight)
    before = {name: w.clone() for name, w in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        optimizer, scaler = trainable(model, 1e-2, cfg)
    step(model, optimizer, scaler)
    moved = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
    assert moved >= {n for n in before if n.endswith("lora_B")}  # A's first gradient is 0
    assert moved <= {n for n, w in model.named_parameters() if w.requires_grad}
    step(model, optimizer, scaler)
    moved = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
    assert moved == {n for n, w in model.named_parameters() if w.requires_grad}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(moved)


def test_targets(base):
    model, _ = load_policy(base())
    for wrong in ("qproj", "q_proj,lm_head", "proj"):
        with pytest.raises(UserError, match="--lora_targets.*no linear.*down_proj, gate_proj, k_p"):
            lora.adapt(model, flags(lora_targets=wrong))
    lora.adapt(model, flags(lora_targets="1.mlp.up_proj, q_proj", lora_alpha=3.0))
    names = [n for n, m in model.named_modules() if hasattr(m, "lora_A")]
    assert names == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                     "model.layers.1.mlp.up_proj"]
    assert model.model.layers[1].mlp.up_proj.lora_scale == 0.75


# --- reference and sampler share the frozen weights -----------------------------------------------


@pytest.mark.parametrize("from_adapter", [False, True])
def test_the_reference_is_the_start_and_stays_there(from_adapter, base, tmp_path):
    """LOR-5: no second copy of the base, log-probs bit-equal after ten steps."""
    path = base()
    if from_adapter:
        save_model(*adapted(path), tmp_path / "sft")
        path = str(tmp_path / "sft")
    model, tokenizer = load_policy(path)
    start = logps(model)
    lora.adapt(model, flags())
    reference = load_reference("", model, tokenizer)
    assert torch.equal(logps(reference), start) and torch.equal(logps(model), start)
    optimizer, scaler = trainable(model, 1e-2, flags())
    for seed in range(10):
        step(model, optimizer, scaler, seed)
    assert torch.equal(logps(reference), start)
    assert (logps(model) - start).abs().max() > 0.01
    shared = {w.data_ptr() for w in model.parameters() if not w.requires_grad}
    copied = {n for n, w in reference.named_parameters() if w.data_ptr() not in shared}
    assert copied == {n for n, w in model.named_parameters() if w.requires_grad}


def test_a_critic_shares_the_reward_models_trunk_and_moves_neither_it_nor_its_head(base, tmp_path):
    save_model(*adapted(base(), load_scorer), tmp_path / "rm")
    for path in (tmp_path / "plain", tmp_path / "rm"):
        if path.name == "plain":
            scorer, tokenizer = load_scorer(base())
            nn.init.normal_(scorer.score.weight)
            save_model(scorer, tokenizer, path)
        reward = load_reward_model(str(path), words(128, pad="<7>"))
        critic = lora.adapt(lora.twin(reward), flags())
        before = {name: w.clone() for name, w in reward.named_parameters()}
        optimizer, scaler = trainable(critic, 1e-2, flags())
        for seed in range(2):
            step(critic, optimizer, scaler, seed)
        assert all(torch.equal(w, before[n]) for n, w in reward.named_parameters())
        assert not any(w.requires_grad for w in reward.parameters())
        assert not torch.equal(critic.score.weight, reward.score.weight)
        assert (critic.get_input_embeddings().weight is reward.get_input_embeddings().weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hundred_syncs_wear_nothing(dtype, base):
    """LOR-2, SMP-7: frozen weights bit-identical, the adapter is applied once, the gap is flat."""
    model, tokenizer = adapted(base())
    frozen = {n: w.clone() for n, w in model.named_parameters() if not w.requires_grad}
    optimizer, scaler = trainable(model, 1e-2, flags())
    sampler = Sampler(model, tokenizer, dtype=dtype)
    copied = {n: w.clone() for n, w in sampler.model.named_parameters() if ".lora_" not in n}
    gaps = []
    for number in range(200):
        sampler.sync()
        if number % 50 == 0:
            step(model, optimizer, scaler, number)
            sampler.sync()
            rollout = lay_out(sampler.generate([[5, 9, 11]] * 4, SamplingParams(
                max_new_tokens=12, seed=number)))
            with torch.no_grad():
                logp, _ = token_logprobs(model, rollout)
            gaps.append(float((logp - rollout.sampler_logp).abs().max()))
    assert all(torch.equal(w, frozen[n]) for n, w in model.named_parameters() if n in frozen)
    weights = dict(model.named_parameters())
    for name, weight in sampler.model.named_parameters():
        assert torch.equal(weight, weights[name].to(weight.dtype))
        linear = "proj" in name or "lm_head" in name
        assert weight.dtype == (dtype if linear else torch.float32), name
        assert name not in copied or torch.equal(weight, copied[name])
    assert max(gaps) <= (1e-4 if dtype == torch.float32 else 0.3), gaps


# --- what is refused ------------------------------------------------------------------------------


def test_every_tensor_of_the_file_has_its_place_or_it_is_an_error(base, tmp_path):
    """LOR-6."""
    save_model(*adapted(base()), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(file)
    key = min(good)
    for bad in ({k: v for k, v in good.items() if k != key},  # one is missing
                good | {key.replace("layers.0", "layers.7"): good[key].clone()},  # one too many
                {k.replace("self_attn", "attn"): v for k, v in good.items()},  # renamed
                {k.removeprefix(lora.PREFIX): v for k, v in good.items()},  # unwrapped
                good | {key: torch.zeros(5, 32)}, {}):  # another shape; none
        save_file(bad, file)
        with pytest.raises(UserError, match="does not fit"):
            load_policy(str(tmp_path / "adapter"))
    file.unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        load_policy(str(tmp_path / "adapter"))


def test_names_that_hold_weight_or_lora_are_no_trap(tmp_path):
    """LOR-6: keys are made of whole names, nothing in their middle is replaced."""
    class Model(nn.Module):
        base_model_prefix, device = "model", "cpu"

        def __init__(self):
            super().__init__()
            self.model = self.base_model = nn.ModuleDict(
                {"weight": nn.Linear(3, 3), "lora_A_weight": nn.Linear(3, 3)})
            self.config = {}

    torch.manual_seed(0)
    record = {"r": 2, "lora_alpha": 2, "base_model_name_or_path": "x"}
    model = Model()
    lora.attach(model, [n for n in lora.linear_layers(model) if n.startswith("model.")], record)
    assert lora.PREFIX + "model.weight.lora_A.weight" in lora.trained(shaken(model))
    model.config = SimpleNamespace()
    lora.save(model, tmp_path)
    other = lora.load(Model(), tmp_path, record)
    assert len(lora.trained(other)) == 4
    for key, place in lora.trained(model).items():
        assert torch.equal(getattr(*place), getattr(*lora.trained(other)[key]))


def test_adapters_that_we_do_not_compute_are_refused(base, tmp_path):
    for name, option in (("dora", dict(use_dora=True)), ("rslora", dict(use_rslora=True)),
                         ("bias", dict(bias="all")), ("ranks", dict(rank_pattern={"q_proj": 8}))):
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base()), peft.LoraConfig(
            r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **option))
        theirs.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match="nanorlhf does not compute"):
            load_policy(str(tmp_path / name))


def test_going_on_needs_the_adapters_own_shape(base, tmp_path):
    save_model(*adapted(base()), tmp_path / "adapter")
    for changes in (dict(lora_rank=8), dict(lora_alpha=5.0), dict(lora_targets="q_proj")):
        with pytest.raises(UserError, match="give --lora_rank 4"):
            lora.adapt(load_policy(str(tmp_path / "adapter"))[0], flags(**changes))
    model, _ = load_policy(str(tmp_path / "adapter"))
    before = logps(model)
    lora.adapt(model, flags(lora_targets=",".join(SEVEN), lora_alpha=8.0))
    assert torch.equal(logps(model), before)
    full = lora.adapt(load_policy(str(tmp_path / "adapter"))[0], flags(lora_rank=0))  # merged
    torch.testing.assert_close(logps(full), before, atol=1e-5, rtol=1e-5)
    assert all(w.requires_grad for w in full.parameters()) and not lora.trained(full)


def test_the_base_is_not_overwritten_and_is_missed_when_gone(base, tmp_path):
    with pytest.raises(UserError, match="--out .*llama would overwrite"):
        lora.adapt(load_policy(base())[0], flags(out=base()))
    save_model(*adapted(base()), tmp_path / "adapter")
    (tmp_path / "llama").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no model folder .*llama"):
        load_policy(str(tmp_path / "adapter"))


@pytest.mark.parametrize("flags, words", [
    ([], "--adapter '' holds no adapter_config.json"),
    (["--adapter", "llama"], "'llama' holds no adapter_config.json"),
    (["--adapter", "adapter", "--out", "llama"], "--out llama exists"),
])
def test_merge_refuses(flags, words, base, tmp_path):
    save_model(*adapted(base()), tmp_path / "adapter")
    result = run("nanorlhf.lora", *flags, *([] if "--out" in flags else ["--out", "new"]),
                 cwd=tmp_path)
    assert result.status == 2 and words in result.errors[-1], result.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change, message", [
    ({"init_lora_weights": "pissa"}, "init_lora_weights"), ({"use_qalora": True}, "use_qalora"),
    ({"alora_invocation_tokens": [3]}, "alora"),
    ({"base_model_name_or_path": None}, "names no model"),
    ({"base_model_name_or_path": "./gone"}, "is an adapter, and its base is missing")])
def test_adapters_that_would_be_computed_wrongly_are_refused(change, message, base, tmp_path):
    model, tokenizer = adapted(base())
    folder = tmp_path / "adapter"
    folder.mkdir()
    lora.save(model, folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        load_policy(str(folder))
    for text in ("{", json.dumps(config | {"r": 0}), json.dumps(config | {"r": "4"}),
                 json.dumps({k: v for k, v in config.items() if k != "lora_alpha"})):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            load_policy(str(folder))


def test_adapters_on_adapters_and_damaged_ones_are_refused(base, tmp_path):
    model, _ = adapted(base())
    for name in ("itself", "upper", "cut"):
        (tmp_path / name).mkdir()
        lora.save(model, tmp_path / name)
    for name, on in (("itself", "itself"), ("upper", "cut")):
        config = tmp_path / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {
            "base_model_name_or_path": str(tmp_path / on)}))
        with pytest.raises(UserError, match="an adapter on an adapter; merge its base"):
            load_policy(str(tmp_path / name))
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged"):
        load_policy(str(tmp_path / "cut"))


def test_targets_without_a_rank_are_refused(base):
    model, _ = load_policy(base())
    with pytest.raises(UserError, match="need a --lora_rank"):
        lora.adapt(model, flags(lora_rank=0, lora_targets="q_proj"))


class Gpu(str):
    """The CPU, taken for a GPU: bitsandbytes computes there, too, if slowly."""

    def startswith(self, prefix):
        return True


@pytest.mark.parametrize("family, dtype", [("llama", "fp32"), ("qwen2", "bf16"), ("gpt2", "fp32")])
def test_qlora_trains_adapters_on_a_frozen_4_bit_base(family, dtype, base, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    four = flags(load_in_4bit=True, device=Gpu("cpu"), dtype=dtype)
    # the oracle: the same numbers in full size
    full, tokenizer = load_policy(base(family))
    state = torch.random.get_rng_state()
    lora.adapt(full, flags(dtype=dtype))
    for linear in lora.linear_layers(full).values():
        weight = lora.matrix(linear).data
        packed = bnb.functional.quantize_4bit(weight.to(DTYPES[dtype]), quant_type="nf4",
                                              compress_statistics=True)
        weight.copy_(bnb.functional.dequantize_4bit(*packed))
    torch.random.set_rng_state(state)
    model, _ = load_policy(base(family))
    lora.adapt(model, four)
    layers = lora.linear_layers(model).values()
    assert all(linear.weight.dtype == torch.uint8 for linear in layers)
    batch = Batch.from_rows(rows_of(*LENGTHS))
    for one in (shaken(full), shaken(model)):
        with autocast("cpu", dtype):
            logp, _ = token_logprobs(one, batch)
        sft_loss(logp, batch.loss_mask).backward()
    close = dict(atol=1e-5, rtol=1e-4) if dtype == "fp32" else dict(atol=0.05, rtol=0.05)
    for (module, leaf), (twin, _) in zip(*(lora.trained(m).values() for m in (model, full))):
        ours, theirs = getattr(module, leaf).grad, getattr(twin, leaf).grad
        torch.testing.assert_close(ours, theirs, **close)
        assert ours.abs().sum() > 0
    # copies share the packed weights; the sampler's low-precision one agrees with the trainer
    reference = load_reference("", model, tokenizer)
    sampler = Sampler(model, tokenizer, dtype=DTYPES[dtype])
    for copy in (reference, sampler.model):
        for one, other in zip(lora.linear_layers(copy).values(), layers):
            assert one.weight is other.weight
            assert copy is model or one.lora_A is not other.lora_A
    before = [linear.weight.clone() for linear in layers]
    optimizer, scaler = trainable(model, 0.1, four)
    optimizer_step(optimizer, 0.1, 1.0, scaler)
    sampler.sync()
    assert all(map(torch.equal, before, [linear.weight for linear in layers]))
    [completion] = sampler.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, seed=0))
    with torch.no_grad(), autocast("cpu", dtype):
        trainer, _ = token_logprobs(model, lay_out([completion]))
    gap = trainer[2: 2 + len(completion.logprobs)] - torch.tensor(completion.logprobs)
    assert gap.abs().max() < (1e-4 if dtype == "fp32" else 0.05)
    # the folder is any adapter's: on the base in full size it gives nearly the same
    save_model(model, tokenizer, tmp_path / "qlora")
    again, _ = load_policy(str(tmp_path / "qlora"))
    with torch.no_grad(), autocast("cpu", dtype):
        difference = token_logprobs(again, batch)[0] - token_logprobs(model, batch)[0]
    assert 0 < difference.abs().mean() < 0.2
    lora.adapt(again, four)  # and training goes on from there
    with torch.no_grad(), autocast("cpu", dtype):
        torch.testing.assert_close(token_logprobs(again, batch)[0],
                                   token_logprobs(model, batch)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [dict(device="cpu"), dict(device=Gpu("cpu"), model="toy"),
                                     dict(device=Gpu("cpu"), missing=True)])
def test_qlora_is_refused_where_it_cannot_be(changes, base, monkeypatch):
    if changes.pop("missing", False):
        monkeypatch.setattr(lora, "find_spec", lambda name: None)
    model, _ = load_policy(changes.pop("model", None) or base())
    with pytest.raises(UserError, match="--load_in_4bit needs .*a CUDA device and `pip install"):
        lora.adapt(model, flags(load_in_4bit=True, **changes))


def test_qlora_leaves_a_critics_trunk_to_the_reward_model(base, monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: True)
    reward, _ = load_scorer(base())
    reward.requires_grad_(False)
    critic = lora.adapt(lora.twin(reward), flags(load_in_4bit=True, device=Gpu("cpu")))
    for ours, theirs in zip(*(lora.linear_layers(m).values() for m in (critic, reward))):
        assert ours.weight is theirs.weight
