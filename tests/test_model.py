"""Models: packed = alone, what is refused, plain folders, reward heads, vocabularies."""

import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, CONFIG_MAPPING,
    GenerationConfig, PreTrainedTokenizerFast,
)

from nanorlhf import toy
from nanorlhf.data import Batch, encode, encode_sft
from nanorlhf.losses import bradley_terry_loss, sft_loss, token_weights
from nanorlhf.model import (
    distinct_pad, eos_ids, load_policy, load_reference, load_reward_model, load_scorer,
    normalised, prepare, save_model, sequence_scores, token_logprobs, token_values,
)
from nanorlhf.utils import UserError, trainable
from tiny import FAMILIES, SMALL, tiny_config, tiny_model

NO_SCORER = {"granite", "cohere"}  # transformers has no SequenceClassification class for them
LENGTHS = (3, 17, 2, 33, 9)


def rows_of(*lengths, seed=0, vocabulary=128):
    """Random rows (ids, mask); about two thirds of the tokens are learned, the last one always."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.67).int().tolist()
        rows.append((ids, mask[:-1] + [1]))
    return rows


def tiny_scorer(family, seed=0, **overrides):
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(
        tiny_config(family, num_labels=1, **overrides))
    model.config.get_text_config().pad_token_id = None
    return prepare(model, family)


def alone(model, ids):
    """(T, V) logits, or (T, 1) scores at every token, by transformers' own attention."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([ids])
    with torch.no_grad():
        if hasattr(model, "score"):
            out = model.score(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        else:
            out = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation("nanorlhf")
    return out[0].float()


# --- packed = alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_are_those_of_each_row_alone(family, temperature):
    model, rows = tiny_model(family), rows_of(*LENGTHS)
    batch = Batch.from_rows(rows)
    with torch.no_grad():
        logp, entropy = token_logprobs(model, batch, temperature)
    assert logp.shape == entropy.shape == (sum(LENGTHS),)
    for number, (ids, mask) in enumerate(rows):
        expected = (alone(model, ids) / temperature).log_softmax(-1)
        at = slice(batch.cu_seqlens[number], batch.cu_seqlens[number + 1] - 1)
        learned = torch.tensor(mask[1:], dtype=torch.bool)
        chosen = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(logp[at][learned], chosen[learned], atol=1e-5, rtol=1e-5)
        spread = -(expected.exp() * expected).sum(-1)[:-1]
        torch.testing.assert_close(entropy[at][learned], spread[learned], atol=1e-5, rtol=1e-5)
        assert not logp[at][~learned].any() and not entropy[at][~learned].any()
    assert not logp[batch.last].any()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NO_SCORER])
def test_packed_scores_and_values_are_those_of_each_row_alone(family):
    scorer, rows = tiny_scorer(family), rows_of(*LENGTHS)
    batch = Batch.from_rows(rows)
    with torch.no_grad():
        values, scores = token_values(scorer, batch), sequence_scores(scorer, batch)
    expected = [alone(scorer, ids)[:, 0] for ids, _ in rows]
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores, torch.stack([e[-1] for e in expected]), atol=1e-5, rtol=1e-5)
    assert scores.shape == (len(rows),)
    scorer.config.reward_mean, scorer.config.reward_std = 0.5, 2.0
    with torch.no_grad():  # values live on the scale of the normalised score, scores are raw
        torch.testing.assert_close(token_values(scorer, batch)[batch.last],
                                   normalised(scorer, scores))
        assert torch.equal(sequence_scores(scorer, batch), scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbour_changes_nothing(family):
    """SFT-7: pack A+B and A'+B, alone or between two others; B's numbers are the same."""
    model = tiny_model(family)
    a, other, b, c = rows_of(12, 12, 9, 30, seed=1)
    with torch.no_grad():
        for before, after in ([], []), ([c], [c]):
            logp = [token_logprobs(model, Batch.from_rows([*before, first, b, *after]))[0]
                    for first in (a, other)]
            at = sum(len(ids) for ids, _ in [*before, a])
            at = slice(at, at + len(b[0]))
            torch.testing.assert_close(logp[0][at], logp[1][at], atol=1e-5, rtol=0)
            lone = token_logprobs(model, Batch.from_rows([b]))[0]
            torch.testing.assert_close(logp[0][at], lone, atol=1e-5, rtol=1e-5)
            assert not torch.equal(logp[0], logp[1])


@pytest.mark.parametrize("family, option", [
    ("gemma2", {"final_logit_softcapping": 1.0}), ("cohere", {"logit_scale": 0.3}),
    ("granite", {"logits_scaling": 3.0}),
])
def test_what_a_family_does_to_its_logits_reaches_the_logprobs(family, option):
    model, (row,) = tiny_model(family, **option), rows_of(20)
    name, plain = next(iter(option)), {"final_logit_softcapping": None}.get(next(iter(option)), 1.0)
    batch = Batch.from_rows([row])
    with torch.no_grad():
        logp, _ = token_logprobs(model, batch)
        expected = alone(model, row[0]).log_softmax(-1)[:-1].gather(
            1, torch.tensor(row[0][1:])[:, None])[:, 0]
        setattr(model.config, name, plain)
        without, _ = token_logprobs(model, batch)
    torch.testing.assert_close(logp[:-1], expected * batch.loss_mask[:-1], atol=1e-5, rtol=1e-5)
    assert (logp - without).abs().max() > 0.1  # the test can see it


@pytest.mark.parametrize("family, options", [
    ("gpt2", dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)),
    ("phi3", dict(attention_dropout=0.1, resid_pdrop=0.1, embd_pdrop=0.1)),
    ("llama", dict(attention_dropout=0.1)),
    ("opt", dict(dropout=0.1, attention_dropout=0.1, ffn_dim=64, word_embed_proj_dim=32)),
])
def test_dropout_in_the_config_is_off(family, options):
    """DPO-7: two passes of a model in training mode are bit-equal, and equal evaluation."""
    torch.manual_seed(0)
    if family == "opt":
        config = CONFIG_MAPPING["opt"](**{k: v for k, v in SMALL.items() if k != "head_dim"},
                                       **options)
    else:
        config = tiny_config(family, **options)
    model = prepare(AutoModelForCausalLM.from_config(config), family)
    batch = Batch.from_rows(rows_of(*LENGTHS))
    model.eval()
    expected = token_logprobs(model, batch)[0]
    model.train()
    for _ in range(2):
        assert torch.equal(token_logprobs(model, batch)[0], expected)
    reference = load_reference("", model, None)
    assert torch.equal(token_logprobs(reference, batch)[0], expected)
    assert not any(p.requires_grad for p in reference.parameters())


def test_gradient_checkpointing_changes_no_gradient():
    grads = []
    for on in (False, True):
        model = tiny_model("llama").train()
        if on:
            config = SimpleNamespace(gradient_checkpointing=True, weight_decay=0.0, device="cpu",
                                     dtype="fp32")
            trainable(model, 1e-3, config)
        batch = Batch.from_rows(rows_of(*LENGTHS))
        sft_loss(token_logprobs(model, batch)[0], batch.loss_mask).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert grads[0].norm() > 0
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("family, config, name", [
    ("bloom", dict(vocab_size=128, hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM"),
    ("gpt_oss", SMALL | dict(num_local_experts=2, num_experts_per_tok=1), "GptOssForCausalLM"),
    ("stablelm", {k: v for k, v in SMALL.items() if k != "head_dim"}, "StableLmForCausalLM"),
    ("qwen3_5_text", SMALL, "Qwen3_5ForCausalLM"),
    ("mamba", dict(vocab_size=128, hidden_size=32, num_hidden_layers=2), "MambaForCausalLM"),
])
def test_families_that_would_be_computed_wrongly_are_refused_by_name(family, config, name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config))
    with pytest.raises(UserError, match=name) as error:
        prepare(model, "some/model")
    assert "some/model" in str(error.value) and "not supported" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_models_name_the_command_that_makes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no model folder runs/sft; `python train_sft.py` makes it"):
        load_policy("runs/sft")
    with pytest.raises(UserError, match="train_rm.py"):
        load_scorer("runs/rm")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load a model from ./empty"):
        load_policy("./empty")
    (tmp_path / "empty" / "args.json").write_text("{}")
    with pytest.raises(UserError, match="./empty is an unfinished run; go on by --resume"):
        load_policy("./empty")


def test_damaged_folders_are_one_line(tmp_path):
    save_model(toy.new_model(), toy.tokenizer(), tmp_path)
    for name, text in (("tokenizer.json", "{}"), ("config.json", "[]"), ("config.json", "")):
        good = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="cannot load a model from") as error:
            load_policy(str(tmp_path))
        assert "\n" not in str(error.value)
        (tmp_path / name).write_text(good)
    model = toy.new_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    save_model(model, toy.tokenizer(), tmp_path)
    with pytest.raises(UserError, match="not finite numbers"):
        load_policy(str(tmp_path))


# --- folders --------------------------------------------------------------------------------------


def words(count, pad=None, eos="<2>"):
    """A tokenizer of `count` words <0>, <1>, ..."""
    made = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(count)}, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<0>", eos_token=eos,
                                   pad_token=pad)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_saved_policies_open_bit_equal(family, tied, tmp_path):
    """CKP-8: AutoModelForCausalLM and our loader, no key missing or newly made."""
    model = tiny_model(family, tie_word_embeddings=tied)
    save_model(model, words(128), tmp_path)
    other, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(3, 40)[None]
    model.set_attn_implementation("eager")
    other.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
    ours, _ = load_policy(str(tmp_path))
    model.set_attn_implementation("nanorlhf")
    batch = Batch.from_rows(rows_of(*LENGTHS))
    assert torch.equal(token_logprobs(model, batch)[0], token_logprobs(ours, batch)[0])
    same = ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    assert same == tied and ours.dtype == torch.float32
    assert "nanorlhf" not in (tmp_path / "config.json").read_text()


def test_a_base_with_a_contradictory_generation_config_can_be_saved(tmp_path):
    """CKP-7: do_sample=False beside a temperature would refuse to be saved."""
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[2, 5])
    save_model(model, words(128), tmp_path / "base")
    file = tmp_path / "base" / "generation_config.json"
    file.write_text('{"do_sample": false, "temperature": 0.9, "eos_token_id": [2, 5]}')
    model, tokenizer = load_policy(str(tmp_path / "base"))
    assert model.generation_config.temperature == 0.9
    save_model(model, tokenizer, tmp_path / "new")
    new = GenerationConfig.from_pretrained(tmp_path / "new")
    assert new.eos_token_id == [2, 5] and new.do_sample and new.temperature == 1.0
    assert eos_ids(model, tokenizer) == {2, 5}


def test_plain_generate_on_a_saved_folder_stops_at_the_end_of_the_turn(tmp_path):
    """CKP-7 and SFT-1: four rows of different length are learned by heart; greedy decoding by
    plain transformers gives each of them and stops, 4 of 4."""
    model, tokenizer = load_policy("toy")
    rows = [{"prompt": f"{i}+{i}=", "completion": "yes " * i + f"#### {2 * i}"}
            for i in range(1, 5)]
    batch = Batch.from_rows(encode_sft(rows, tokenizer, 128))
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = sft_loss(token_logprobs(model, batch)[0], weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    save_model(model, tokenizer, tmp_path)
    other, tokenizer = (kind.from_pretrained(tmp_path)
                        for kind in (AutoModelForCausalLM, AutoTokenizer))
    for row in rows:
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}],
                                             tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            out = other.generate(**inputs, max_new_tokens=100, do_sample=False)
        assert tokenizer.decode(out[0, inputs["input_ids"].shape[1]:]) == (
            row["completion"] + tokenizer.eos_token)


# --- reward models --------------------------------------------------------------------------------


def base_folder(folder, family="llama", count=100, pad=None, **overrides):
    save_model(tiny_model(family, pad_token_id=None, **overrides), words(count, pad), folder)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_new_reward_model_has_one_output_that_starts_at_zero(family, tmp_path):
    """RM-4, and the first Bradley-Terry loss is ln 2."""
    scorer, _ = load_scorer(base_folder(tmp_path, family))
    assert scorer.score.out_features == 1 and scorer.config.num_labels == 1
    scores = sequence_scores(scorer, Batch.from_rows(rows_of(*LENGTHS, 5)))
    assert scores.shape == (6,) and not scores.any()
    loss = bradley_terry_loss(*scores.view(-1, 2).T) / 3
    assert abs(loss.item() - math.log(2)) < 1e-6
    loss.backward()
    assert scorer.score.weight.grad.norm() > 0  # zero, yet it learns


@pytest.mark.parametrize("pad", [None, "<2>", "<7>"])  # none, pad == eos, one of its own
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_saved_reward_model_scores_identically_in_plain_transformers(pad, side, tmp_path):
    """RM-1, RM-3: rows with an EOS at the end of every turn, in a padded batch of mixed lengths, on
    either side, score as packed and as alone."""
    scorer, tokenizer = load_scorer(base_folder(tmp_path / "base", pad=pad))
    torch.nn.init.normal_(scorer.score.weight)
    scorer.config.reward_mean, scorer.config.reward_std = 0.25, 1.5
    save_model(scorer, tokenizer, tmp_path / "rm")

    plain, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm", output_loading_info=True)
    assert not any(info.values()), info
    assert plain.config.num_labels == 1 and plain.config.reward_std == 1.5
    reader = AutoTokenizer.from_pretrained(tmp_path / "rm", padding_side=side)
    assert reader.pad_token_id != reader.eos_token_id
    assert plain.config.pad_token_id == reader.pad_token_id

    prompt = "<9> <8> <2> <11>"  # an EOS inside what both answers share
    texts = [f"{prompt} <20> <21> <2>", f"{prompt} <30> <31> <32> <33> <34> <2>", "<5> <2>",
             f"{prompt} <40> <2>"]
    rows = [(reader(text)["input_ids"], [1] * len(text.split())) for text in texts]
    batch = Batch.from_rows(rows)
    with torch.no_grad():
        padded = reader(texts, padding=True, return_tensors="pt")
        padded.pop("token_type_ids", None)
        theirs = plain(**padded).logits[:, 0]
        lone = torch.cat([plain(input_ids=torch.tensor([ids])).logits[:, 0] for ids, _ in rows])
        ours = sequence_scores(scorer, batch)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lone, ours, atol=1e-4, rtol=1e-4)
    assert len({round(float(s), 3) for s in ours}) == len(texts)
    again, _ = load_scorer(str(tmp_path / "rm"))  # and opened by ourselves
    with torch.no_grad():
        assert torch.equal(sequence_scores(again, batch), ours)


def test_classifiers_and_families_without_one_are_refused(tmp_path):
    torch.manual_seed(0)
    two = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=2))
    two.save_pretrained(tmp_path / "two")
    words(128).save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match="2 outputs.*train_rm.py"):
        load_scorer(str(tmp_path / "two"))
    with pytest.raises(UserError, match="no reward model can be made.*GraniteConfig"):
        load_scorer(base_folder(tmp_path / "granite", "granite"))
    save_model(*load_scorer(base_folder(tmp_path / "base")), tmp_path / "rm")
    with pytest.raises(UserError, match="is a reward model, not a policy"):
        load_policy(str(tmp_path / "rm"))


def test_a_critic_must_read_the_policys_ids(tmp_path):
    with pytest.raises(UserError, match="no reward model.*train_rm.py"):
        load_reward_model(base_folder(tmp_path / "policy"), words(100))
    path = str(tmp_path / "rm")
    save_model(*load_scorer(base_folder(tmp_path / "base")), path)
    critic = load_reward_model(path, words(100))
    assert token_values(critic, Batch.from_rows(rows_of(4, 6))).shape == (10,)
    with pytest.raises(UserError, match="another vocabulary"):
        load_reward_model(path, toy.tokenizer())


@pytest.mark.parametrize("count, grows", [(100, False), (128, True)])
def test_a_pad_token_never_shrinks_or_redraws_the_vocabulary(count, grows, tmp_path):
    """DAT-9: 128 embedding rows for 100 words stay 128 rows; 128 for 128 words become 129."""
    base = tiny_model(pad_token_id=None)
    save_model(base, words(count), tmp_path / "base")
    scorer, tokenizer = load_scorer(str(tmp_path / "base"))
    weight = scorer.get_input_embeddings().weight
    assert weight.shape[0] == scorer.config.vocab_size == 128 + grows
    assert torch.equal(weight[:128], base.get_input_embeddings().weight)
    assert tokenizer.pad_token_id == count == scorer.config.pad_token_id
    save_model(scorer, tokenizer, tmp_path / "rm")
    again, tokenizer = load_scorer(str(tmp_path / "rm"))
    assert torch.equal(again.get_input_embeddings().weight, weight)
    assert tokenizer.pad_token_id == count


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_added_to_the_tokenizer_get_the_mean_embedding(family, tied, tmp_path):
    """DAT-9's kin: more tokens than embeddings. Loaded twice the model is the same."""
    base = tiny_model(family, tie_word_embeddings=tied)
    save_model(base, words(131), tmp_path / "base")
    policy, tokenizer = load_policy(str(tmp_path / "base"))
    scorer, _ = load_scorer(str(tmp_path / "base"))
    assert len(tokenizer) == policy.config.get_text_config().vocab_size == 131
    for model in (policy, load_policy(str(tmp_path / "base"))[0], scorer):
        for table, old in ((model.get_input_embeddings(), base.get_input_embeddings()),
                           (model.get_output_embeddings(), base.get_output_embeddings())):
            if table is not None:
                assert torch.equal(table.weight[:128], old.weight)
                mean = old.weight.mean(0).expand(len(table.weight) - 128, -1)
                torch.testing.assert_close(table.weight[128:], mean, atol=1e-6, rtol=0)
    ids = [[5, 129, 130, 7]]
    logp, _ = token_logprobs(policy, Batch.from_rows([(row, [1] * 4) for row in ids]))
    assert logp.isfinite().all()
    save_model(policy, tokenizer, tmp_path / "saved")
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()) and plain.get_input_embeddings().num_embeddings == 131


def test_a_pad_token_of_its_own_is_kept():
    model, tokenizer = tiny_scorer("llama"), words(100, pad="<7>")
    distinct_pad(model, tokenizer)
    assert tokenizer.pad_token == "<7>" and model.config.pad_token_id == 7 and len(tokenizer) == 100


def test_training_and_generation_read_the_same_prompt_ids():
    """What `encode` writes for a finished conversation begins with what the sampler is given."""
    tokenizer = toy.tokenizer()
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "#### 2"}]
    whole, mask = encode(turns, tokenizer)
    prompt, _ = encode(turns[:1], tokenizer, prompt_only=True)
    assert whole[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (
        len(whole) - len(prompt))
