"""Rows, chat templates, masks and batches, with tokenizers made here and small local files."""

import csv
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast,
)

from nanorlhf import data, evaluate, toy, utils
from nanorlhf.data import (
    Batch,
    encode,
    encode_pairs,
    encode_prompts,
    encode_sft,
    epoch_order,
    load_rows,
    show_masks,
    to_pair,
    to_prompt,
)
from nanorlhf.model import (
    eos_ids, load_policy, load_scorer, save_model, sequence_scores, token_logprobs,
)
from nanorlhf.sampler import Sampler, SamplingParams
from nanorlhf.utils import UserError
from tiny import tiny_model


def to_messages(row):
    return data._conversations(row, "SFT")[1][0]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# EOS closes every turn, the user's too, so that it stands inside the prompt.
LLAMA = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
INST = (  # Llama 2: no generation prompt, a space that merges with the reply
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI = (  # EOS only after the last turn
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # an empty think block before the last reply, none in history
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "{{ '<think>\n\n</think>\n\n' + m.content }}"
    "{% elif m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPEN_THINK = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
R1 = (  # reasoning is cut from every reply, and the generation prompt opens the tag
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].strip() + eos_token }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]


def make_tokenizer(template=None, bos=None, eos="</s>", auto_bos=False, pad="<pad>"):
    """Byte-level BPE with one merge, ' $', which crosses from a prompt into a reply."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet + ["Ġ$"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "$")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if auto_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad,
        additional_special_tokens=[t for t in SPECIALS[1:] if t not in (bos, eos, pad)])
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def save_text(path, text):
    path.write_text(text)
    return str(path)


def learned(tokenizer, coded):
    return tokenizer.decode([i for i, m in zip(*coded, strict=True) if m])


def whole(tokenizer, coded):
    return tokenizer.decode(coded[0])


# --- the mask of chats ------------------------------------------------------


@pytest.mark.parametrize("template, eos, text", [
    (CHATML, "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    (LLAMA, "</s>", "<|user|>hi</s><|assistant|>"),
    (INST, "</s>", "[INST] hi [/INST]"),
    (PHI, "</s>", "<|user|>\nhi<|end|>\n<|assistant|>\n"),
])
def test_first_learned_token_is_the_replys_first_and_the_end_of_turn_is_the_last(
        template, eos, text):  # SFT-5, DAT-2
    tokenizer = make_tokenizer(template, eos=eos)
    ids, mask = encode(chat("hi", "yes"), tokenizer)
    prompt, zeros = encode(chat("hi"), tokenizer, prompt_only=True)
    assert tokenizer.decode(prompt) == text and not any(zeros)
    assert ids[:len(prompt)] == prompt
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert ids[-1] == tokenizer.eos_token_id
    assert "yes" in learned(tokenizer, (ids, mask))
    official = tokenizer.apply_chat_template(chat("hi", "yes"), tokenize=True, return_dict=True)
    assert official["input_ids"][:len(ids)] == ids


def test_the_mask_does_not_depend_on_list_or_dict_returns(monkeypatch):  # SFT-5
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    expected = encode(chat("hi", "yes"), tokenizer)
    render = tokenizer.apply_chat_template
    for as_dict in (True, False):
        monkeypatch.setattr(tokenizer, "apply_chat_template",
                            lambda *a, d=as_dict, **k: render(*a, **k | {"return_dict": d}))
        assert encode(chat("hi", "yes"), tokenizer) == expected


@pytest.mark.parametrize("template, eos", [(CHATML, "<|im_end|>"), (LLAMA, "</s>"), (PHI, "</s>"),
                                           (INST, "</s>"), (None, "</s>")])
def test_every_assistant_turn_is_learned_or_only_those_from_a_given_one(template, eos):
    tokenizer = make_tokenizer(template, eos=eos)
    turns = chat("a b", "c d", "e f", "g h")
    said = learned(tokenizer, encode(turns, tokenizer))
    assert "c d" in said and "g h" in said and "e f" not in said and "assistant" not in said.lower()
    ids, mask = encode(turns, tokenizer, first_target=3)
    assert "c d" not in learned(tokenizer, (ids, mask)) and ids[-1] == tokenizer.eos_token_id
    prompt, _ = encode(turns[:3], tokenizer, prompt_only=True)
    assert ids[:len(prompt)] == prompt and mask.index(1) == len(prompt)
    if template in (CHATML, LLAMA):
        assert said == f"c d{eos}g h{eos}"
    # A trailing question has no reply to learn from.
    assert encode(turns + chat("why?"), tokenizer) == encode(turns, tokenizer)


def test_eos_is_added_unless_the_turn_ends_in_a_stop_token():
    tokenizer = make_tokenizer(CHATML, eos="</s>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert learned(tokenizer, encode(chat("q", "r"), tokenizer)) == "r<|im_end|></s>"
    ids, mask = encode(chat("q", "r"), tokenizer, stop_ids=[end])
    assert learned(tokenizer, (ids, mask)) == "r<|im_end|>" and ids[-1] == end
    phi = make_tokenizer(PHI)
    assert learned(phi, encode(chat("q", "r"), phi)) == "r<|end|>\n</s>"
    with pytest.raises(UserError, match="EOS"):
        encode("text", make_tokenizer(eos=None))


def test_nothing_is_learned_after_a_stop_token():
    every = make_tokenizer(PHI.replace("<|end|>\n'", "<|end|>\n' + eos_token + '\n'"))
    phi, inline = make_tokenizer(PHI), make_tokenizer(CHATML.replace("\n' }}{% endfor",
                                                                     "' + '\n\n' }}{% endfor"))
    stop = {name: phi.convert_tokens_to_ids(name) for name in ("<|end|>", "<|im_end|>", "</s>")}
    for tokenizer, name in ((phi, "<|end|>"), (every, "<|end|>"), (inline, "<|im_end|>")):
        for stops in ([stop[name]], [stop["</s>"], stop[name]], {stop[name], stop["</s>"]}):
            coded = encode(chat("a", "b", "c", "d"), tokenizer, stop_ids=stops)
            assert learned(tokenizer, coded) == f"b{name}d{name}"
            assert coded[0][-1] == stop[name] and coded[1][-1] == 1
    # A stop token that the author wrote inside a reply cuts nothing off.
    coded = encode(chat("a", "b<|end|>c"), phi, stop_ids=[stop["<|end|>"]])
    assert learned(phi, coded) == "b<|end|>c<|end|>"
    text = encode("b<|end|>", phi, stop_ids=[stop["<|end|>"]])
    assert whole(phi, text) == "b<|end|>"
    newline = phi("\n")["input_ids"]
    encode(chat("a", "\n" * 999 + "b"), phi, stop_ids=newline)  # no endless backtracking


def test_pad_equal_to_eos_blanks_no_eos():  # SFT-1
    tokenizer = make_tokenizer(LLAMA, pad="</s>")
    rows = [{"text": "x" * n} for n in (1, 3, 5, 9)]
    for ids, mask in encode_sft(rows, tokenizer, 64):
        assert [m for i, m in zip(ids, mask, strict=True) if i == tokenizer.eos_token_id] == [1]
    rows = [{"messages": chat("q", "x" * n)} for n in (1, 3, 5, 9)]
    batch = Batch.from_rows(encode_sft(rows, tokenizer, 64))
    is_eos = batch.input_ids.roll(-1) == tokenizer.eos_token_id  # the token predicted at t
    assert (batch.loss_mask[is_eos].sum() == 4) and (batch.input_ids[batch.last] == 2).all()


@pytest.mark.parametrize("options, count", [
    (dict(template="{{ bos_token }}" + LLAMA, bos="<s>"), 1),
    (dict(template="{{ bos_token }}" + LLAMA, bos="<s>", auto_bos=True), 1),
    (dict(template=LLAMA, bos="<s>", auto_bos=True), 1),
    (dict(template=LLAMA, bos=None), 0),
    (dict(template=None, bos="<s>", auto_bos=True), 1),
    (dict(template=None, bos=None), 0),
])
def test_one_bos_at_most_and_the_same_ids_everywhere(options, count):  # DAT-1
    tokenizer = make_tokenizer(**options)
    [sft] = encode_sft([{"prompt": "q", "completion": "yes"}], tokenizer, 64)
    [[chosen, rejected]], _ = encode_pairs([dict(prompt="q", chosen="yes", rejected="no")],
                                           tokenizer, 64)
    [(prompt, _)] = encode_prompts([{"prompt": "q"}], tokenizer, 64)
    assert sft == chosen and chosen[0][:len(prompt)] == rejected[0][:len(prompt)] == prompt
    plain = encode("hello", tokenizer)
    for ids in (sft[0], chosen[0], rejected[0], prompt):
        assert ids.count(1) == count and (ids[0] == 1) == (count == 1) and None not in ids
    if options["template"] is None:  # a template may write a BOS, plain text gets the tokenizer's
        assert plain[0].count(1) == count
    assert [i for i in (sft[0], chosen[0], rejected[0]) if i[-1] != 2 or i[-2] == 2] == []
    assert plain[0][-1] == 2 and plain[0].count(2) == 1
    assert plain[0][0] != 1 or plain[1][0] == 0


def test_chatml_for_base_models(tmp_path):
    """<|im_end|> closes a turn and is the EOS, or the own EOS where the tokenizer lacks it."""
    spelled = "<|im_start|>user\nhi{0}\n<|im_start|>assistant\nyes{0}"
    for tokenizer, end, bos in [
            (make_tokenizer(eos="</s>"), "<|im_end|>", ""), (toy.tokenizer(), "<|end|>", ""),
            (make_tokenizer(eos=None, bos="<s>", auto_bos=True), "<|im_end|>", "<s>")]:
        size, before = len(tokenizer), tokenizer.get_vocab()
        data.set_template(tokenizer, "")
        assert tokenizer.chat_template in (None, toy.TEMPLATE)
        data.set_template(tokenizer, "chatml")
        assert (tokenizer.eos_token, len(tokenizer)) == (end, size)
        assert tokenizer.get_vocab() == before
        ids, mask = encode(chat("hi", "yes"), tokenizer)
        assert whole(tokenizer, (ids, mask)) == bos + spelled.format(end)
        assert learned(tokenizer, (ids, mask)) == "yes" + end
        assert ids[-1] == tokenizer.eos_token_id and mask[0] == 0
        prompt, _ = encode(chat("hi"), tokenizer, prompt_only=True)
        assert ids[:len(prompt)] == prompt
        tokenizer.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert encode(chat("hi", "yes"), again) == (ids, mask)
        plain = again.apply_chat_template(chat("hi"), tokenize=True, add_generation_prompt=True)
        assert (plain if isinstance(plain, list) else plain["input_ids"]) == prompt  # DAT-1
    (tmp_path / "t.jinja").write_text(LLAMA)
    data.set_template(tokenizer, str(tmp_path / "t.jinja"))
    assert whole(tokenizer, encode(chat("hi", "yes"), tokenizer)) == \
        "<s><|user|>hi<|im_end|><|assistant|>yes<|im_end|>"
    for name in ("none.jinja", "", "~nobody-here/x"):
        with pytest.raises(UserError, match="is no file.*chatml"):
            data.set_template(tokenizer, str(tmp_path / name) if name[:1] != "~" else name)
    data.set_template(tokenizer, save_text(tmp_path / "broken.jinja", "{% for"))
    with pytest.raises(UserError, match=r"^my.jsonl:3: "):
        encode_sft([{"messages": QA, data.ORIGIN: "my.jsonl:3"}], tokenizer, 99)


def test_text_is_learned_whole_and_closed_once():
    tokenizer = make_tokenizer(CHATML, eos="</s>")
    assert encode("ab", tokenizer) == encode("ab</s>", tokenizer)
    ids, mask = encode("ab", tokenizer)
    assert whole(tokenizer, (ids, mask)) == "ab</s>" and mask == [1, 1, 1]
    assert encode("ab", tokenizer, prompt_only=True) == (ids[:2], [0, 0])
    assert learned(tokenizer, encode("a</s>b", tokenizer)) == "a</s>b</s>"
    with pytest.raises(UserError, match="empty"):
        encode(" ", tokenizer)


def test_prompt_does_not_depend_on_the_reply_where_a_merge_crosses_the_border():  # DPO-3
    for template in (None, CHATML.replace("<|im_start|>' + m.role + '\n'", "' + m.role + ': '")
                     .replace("<|im_start|>assistant\n", "assistant: ")):
        tokenizer = make_tokenizer(template)
        [(chosen, rejected)], margins = encode_pairs(
            [{"prompt": "Price? ", "chosen": "46", "rejected": "$46"}], tokenizer, 64)
        [(prompt, _)] = encode_prompts([{"prompt": "Price? "}], tokenizer, 64)
        for coded, reply in ((chosen, "46"), (rejected, "$46")):
            ids, mask = coded
            assert ids[:len(prompt)] == prompt and mask.index(1) == len(prompt)
            assert learned(tokenizer, coded).split("<|im_end|>")[0].removesuffix("</s>") == reply
        assert margins == [0.0]
        if template is None:
            assert tokenizer.decode(prompt) == "Price? "


def test_chats_without_a_template_are_dialogues():
    tokenizer = make_tokenizer()
    text = "\n\nHuman: a\n\nAssistant: b</s>\n\nHuman: c\n\nAssistant: d</s>"
    coded = encode(chat("a", "b", "c", "d"), tokenizer)
    assert whole(tokenizer, coded) == text and learned(tokenizer, coded) == " b</s> d</s>"
    prompt, _ = encode(chat("a", "b", "c"), tokenizer, prompt_only=True)
    assert tokenizer.decode(prompt) == text[:text.index(" d")]
    [row] = encode_sft([{"prompt": "a", "completion": "b "}], tokenizer, 64)
    assert whole(tokenizer, row) == "ab </s>"


def test_unknown_characters_are_told_once(capsys):
    tokenizer = toy.tokenizer()
    data.warn.cache_clear()
    encode_sft([{"prompt": "1+1=", "completion": "2"}], tokenizer, 99)
    assert capsys.readouterr().err == ""
    for text in ("caf\u00e9", "na\u00efve"):
        [(ids, _)] = encode_prompts([{"prompt": text}], tokenizer, 99)
        assert ids.count(tokenizer.unk_token_id) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("warning: ") and "<|unk|>" in err
    data.warn.cache_clear()
    gpt2 = make_tokenizer(LLAMA)  # of bytes, nothing is unknown; its unk is the EOS
    gpt2.unk_token = "</s>"
    encode(chat("caf\u00e9 </s>", "yes"), gpt2)
    assert capsys.readouterr().err == ""


# --- templates that think ---------------------------------------------------


def test_rewritten_history_is_refused_by_turn_and_harmless_when_not_learned():  # DAT-4
    tokenizer = make_tokenizer(QWEN3, eos="<|im_end|>")
    assert learned(tokenizer, encode(chat("a", "b"), tokenizer)) == \
        "<think>\n\n</think>\n\nb<|im_end|>"
    turns = chat("a", "<think>\nx\n</think>\n\nb", "c", "<think>\ny\n</think>\n\nd")
    for given in (turns, chat("a", "b", "c", "d")):
        with pytest.raises(UserError, match="rewrites turn 2"):
            encode(given, tokenizer)
    coded = encode(turns, tokenizer, first_target=3)
    assert learned(tokenizer, coded) == "<think>\ny\n</think>\n\nd<|im_end|>"
    assert encode_sft([{"messages": turns}], tokenizer, 99, train_on="last") == [coded]
    with pytest.raises(UserError, match=r"rows.jsonl:7: .*rewrites turn 2"):
        encode_sft([{"messages": turns, data.ORIGIN: "rows.jsonl:7"}], tokenizer, 99)


@pytest.mark.parametrize("template, eos", [(OPEN_THINK, "<|im_end|>"), (R1, "</s>")])
def test_a_generation_prompt_that_opens_a_tag_shows_one_block(template, eos):  # DAT-4
    tokenizer = make_tokenizer(template, eos=eos)
    prompt, _ = encode(chat("q"), tokenizer, prompt_only=True)
    assert tokenizer.decode(prompt).endswith("<think>\n")
    for content, after in [("<think>\nx\n</think>\n\ny", "x\n</think>\n\ny"),
                           ("x\n</think>\n\ny", "x\n</think>\n\ny"),
                           ("y", "\n</think>\n\ny")]:
        coded = encode(chat("q", content), tokenizer)
        assert coded[0][:len(prompt)] == prompt
        assert learned(tokenizer, coded) == after + eos
        assert whole(tokenizer, coded).count("<think>") == 1
    with pytest.raises(UserError, match="rewrites turn 2"):
        encode(chat("q", "y", "r", "z"), tokenizer)
    assert learned(tokenizer, encode(chat("q", "y", "r", "z"), tokenizer, first_target=3)) == \
        "\n</think>\n\nz" + eos


def test_a_template_that_drops_reasoning_is_not_obeyed_in_the_last_reply_and_refused_before():
    tokenizer = make_tokenizer(R1.replace("<think>\n' }}{% endif", "' }}{% endif"))
    turns = chat("q", "<think>x</think>y", "r", "<think>z</think>w")
    assert learned(tokenizer, encode(turns[:2], tokenizer)) == "<think>x</think>y</s>"
    with pytest.raises(UserError, match="rewrites turn 2"):
        encode(turns, tokenizer)


def test_reasoning_in_a_field_of_its_own_is_learned():
    """As Qwen3 renders it: before the last reply, out of history."""
    template = CHATML.replace("+ m.content", "+ ('<think>\n' + m.reasoning_content + '\n</think>"
                              "\n\n' if m.reasoning_content and loop.last else '') + m.content")
    tokenizer = make_tokenizer(template, eos="<|im_end|>")
    turns = chat("a", "b", "c", "d")
    turns[1]["reasoning_content"], turns[3]["reasoning_content"] = "x", "y"
    assert learned(tokenizer, encode(turns[:2], tokenizer)) == \
        "<think>\nx\n</think>\n\nb<|im_end|>"
    with pytest.raises(UserError, match="rewrites turn 2.*--train_on last"):
        encode(turns, tokenizer)
    coded = encode(turns, tokenizer, first_target=-1)
    assert learned(tokenizer, coded) == "<think>\ny\n</think>\n\nd<|im_end|>"
    assert "x" not in whole(tokenizer, coded)


def test_odd_templates_and_conversations_are_refused():
    strange = make_tokenizer(CHATML.replace("assistant\n' }}{% endif", "bot\n' }}{% endif"))
    with pytest.raises(UserError, match="rewrites turn 2"):
        encode(chat("a", "b"), strange)
    headless = make_tokenizer(CHATML[:CHATML.index("{% if add")])  # the header would be learned
    with pytest.raises(UserError, match="generation prompt"):
        encode(chat("a", "b"), headless)
    for lost in ("{{ messages[-1].content + eos_token }}", CHATML.replace("user", "human").replace(
            "m.content", "(m.content if m.role != 'user' else '')")):
        for prompt_only, turns in ((False, chat("why?", "b")), (True, chat("why?", "b", "c"))):
            with pytest.raises(UserError, match="leaves out a user's turn"):
                encode(turns, make_tokenizer(lost), prompt_only)
    strict = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        encode_sft([{"messages": chat("a", "b")}], strict, 99)
    tokenizer = make_tokenizer(CHATML)
    for turns in ([], chat("a"), chat("a", "b")[1:], chat("", "b"), [{"role": "user"}], [3],
                  [{"content": "x"}], [{"role": "user", "content": {"a": 1}}]):
        with pytest.raises(UserError):
            encode(turns, tokenizer)
    with pytest.raises(UserError, match="assistant"):
        encode(chat("a", "b"), tokenizer, prompt_only=True)


# --- with models ---


def padded_base(folder):
    """A folder: 320 rows of embeddings for 263 tokens, two tokens that end a turn."""
    model, tokenizer = tiny_model(vocab_size=320), make_tokenizer(CHATML, eos="</s>")
    model.generation_config.eos_token_id = [2, 4]  # </s> and <|im_end|>
    save_model(model, tokenizer, folder)
    return model, tokenizer


def test_a_padded_vocabulary_stays_as_it_is_and_every_end_stops(tmp_path):  # DAT-9, CKP-7
    base, tokenizer = padded_base(tmp_path / "base")
    tokenizer.add_tokens(["<tool>"])  # takes a spare row
    save_model(base, tokenizer, tmp_path / "added")
    for name in ("base", "added"):
        model, tokenizer = load_policy(str(tmp_path / name))
        weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert len(weight) == len(head) == model.config.vocab_size == 320
        assert torch.equal(weight, base.get_input_embeddings().weight)
        ends = eos_ids(model, tokenizer)
        assert ends == {2, 4} == set(GenerationConfig.from_pretrained(
            tmp_path / name).eos_token_id)
        [(ids, mask)] = encode_sft([{"prompt": "a<tool>", "completion": "b"}], tokenizer, 99, ends)
        assert (ids.count(263) == 1) == (name == "added") and ids.count(4) == 2 and ids[-1] == 4
        [(prompt, _)] = encode_prompts([{"prompt": "a<tool>"}], tokenizer, 99)
        assert ids[:len(prompt)] == prompt
        # Ids that the tokenizer lacks may be sampled: they have no text, and one log-prob.
        params = SamplingParams(n=8, max_new_tokens=24, seed=0)
        sampled = Sampler(model, tokenizer).generate([prompt], params)
        assert max(token for c in sampled for token in c.token_ids) > 263
        for c in sampled:
            assert c.text == tokenizer.decode([i for i in c.token_ids if i < len(tokenizer)],
                                              skip_special_tokens=True)
            whole_row = (c.prompt_ids + c.token_ids, [0] * len(prompt) + [1] * len(c.token_ids))
            batch = Batch.from_rows([whole_row])
            with torch.no_grad():
                logp = token_logprobs(model, batch)[0][batch.loss_mask > 0]
            torch.testing.assert_close(logp, torch.tensor(c.logprobs), atol=1e-5, rtol=1e-5)


def test_plain_generate_stops_at_each_of_several_ends(tmp_path):  # CKP-7
    base, tokenizer = padded_base(tmp_path)
    inputs = tokenizer("<|im_start|>user", return_tensors="pt")
    for end in (2, 4):
        with torch.no_grad():  # a model that says x, then `end`, whatever it reads
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
            for weight in model.parameters():
                weight.zero_()
            model.model.embed_tokens.weight[:, 0] = 1.0
            model.model.embed_tokens.weight[100, 1] = 9.0
            model.model.norm.weight.fill_(1.0)
            model.lm_head.weight[100, 0], model.lm_head.weight[end, 1] = 1.0, 1.0
            save_model(model, tokenizer, tmp_path / "new")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
        out = plain.generate(**inputs, max_new_tokens=9, do_sample=False)
        assert out[0, inputs["input_ids"].shape[1]:].tolist() == [100, end]
        model, tokenizer = load_policy(str(tmp_path / "new"))
        [ours] = Sampler(model, tokenizer).generate(
            inputs["input_ids"].tolist(), SamplingParams(max_new_tokens=9, temperature=0.0))
        assert ours.token_ids == [100, end] and ours.finish_reason == "stop"


def test_evaluation_scores_the_ids_of_training(tmp_path):  # DAT-1
    padded_base(tmp_path / "base")
    scorer, tokenizer = load_scorer(str(tmp_path / "base"))
    torch.nn.init.normal_(scorer.score.weight)
    save_model(scorer, tokenizer, tmp_path / "rm")
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    config = evaluate.Config(model=str(tmp_path / "rm"), device="cpu", prompt="q", response="yes")
    found = evaluate.evaluate_scorer(config)
    [sides], _ = encode_pairs([pair], tokenizer, 99, eos_ids(scorer, tokenizer))
    assert sides[0][0][-1] == 4 and sides[0][0].count(2) == 0
    with torch.no_grad():
        scores = sequence_scores(scorer, Batch.from_rows(sides))
    assert found["score"] == pytest.approx(float(scores[0]), abs=1e-5)
    (tmp_path / "pair.jsonl").write_text(json.dumps({"ask": "q"} | pair | {"prompt": None}))
    config.prompt, config.data, config.columns = "", str(tmp_path / "pair.jsonl"), "prompt=ask"
    assert evaluate.evaluate_scorer(config)["reward_rejected"] == pytest.approx(
        float(scores[1]), abs=1e-5)


# --- limits -----------------------------------------------------------------


def test_rows_without_target_are_dropped_and_counted(capsys):  # SFT-3, TNY-1
    tokenizer = make_tokenizer()
    rows = [{"prompt": "p" * (20 if i < 3 else 4), "completion": "c" * 30} for i in range(8)]
    coded = encode_sft(rows, tokenizer, 16)
    assert "dropped 3 of 8 rows: prompt fills --max_len 16, no target tokens" in \
        capsys.readouterr().err
    assert len(coded) == 5 and all(len(ids) == 16 and sum(mask) == 12 for ids, mask in coded)
    assert all(tokenizer.eos_token_id not in ids for ids, _ in coded)  # a cut reply has no EOS
    with pytest.raises(UserError, match="3 of 3 rows.*--max_len"):
        encode_sft(rows[:3], tokenizer, 16)
    assert len(encode_sft([{"prompt": "p" * 15, "completion": "c"}], tokenizer, 16)) == 1
    with pytest.raises(UserError, match="--max_len 1"):  # nothing predicts a first token
        encode_sft([{"text": "ab"}], tokenizer, 1)
    with pytest.raises(UserError, match="--max_len"):
        encode_sft([{"prompt": "p" * 16, "completion": "c"}], tokenizer, 16)


def test_pairs_that_cannot_teach_are_dropped(capsys):  # RM-6, DPO-1, TNY-6
    tokenizer = make_tokenizer()
    good = {"prompt": "pppp", "chosen": "ab", "rejected": "c" * 40}
    rows = [good, good | {"chosen": "c" * 41}, good | {"rejected": ""}, good | {"rejected": "ab"},
            good | {"prompt": "p" * 16}]
    pairs, margins = encode_pairs(rows, tokenizer, 16)
    [(chosen, rejected)] = pairs
    assert learned(tokenizer, chosen) == "ab</s>" and learned(tokenizer, rejected) == "c" * 12
    err = capsys.readouterr().err
    assert "dropped 2 of 5 rows: chosen and rejected do not differ within --max_len 16" in err
    assert "dropped 1 of 5 rows: a reply is empty" in err and "dropped 1 of 5 rows: prompt" in err
    with pytest.raises(UserError, match="--max_len"):
        encode_pairs(rows[1:2], tokenizer, 16)
    [(ids, mask)] = encode_sft([{"prompt": "p", "completion": ""}], tokenizer, 16)
    assert learned(tokenizer, (ids, mask)) == "</s>"  # to say nothing is a lesson too


def test_long_prompts_are_dropped_never_cut(capsys):  # DAT-5
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": "p" * n, "answer": n} for n in (1, 99)]
    [(ids, columns)] = encode_prompts(rows, tokenizer, 60)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    assert columns == {"answer": "1", "prompt": "p"}
    assert "dropped 1 of 2 rows: prompt longer than --max_len 60" in capsys.readouterr().err
    assert len(encode_prompts(rows[:1], tokenizer, len(ids))) == 1
    with pytest.raises(UserError, match="--max_len"):
        encode_prompts(rows, tokenizer, len(ids) - 1)


def test_prompts_without_a_readable_answer_are_dropped(capsys):  # RWD-8
    tokenizer = make_tokenizer()
    rows = [{"prompt": "q", "answer": a} for a in (0, "", None, "see proof", 5)]
    rows += [{"prompt": "q", "label": 5, "topic": "sums"}]
    got = encode_prompts(rows, tokenizer, 9, usable=lambda columns: columns["answer"].isdigit())
    assert [columns["answer"] for _, columns in got] == ["0", "5", "5"]
    assert [columns["topic"] for _, columns in got] == [None, None, "sums"]  # one set of columns
    assert "dropped 3 of 6 rows: no answer to judge by" in capsys.readouterr().err
    assert encode_prompts([{"prompt": "q"}], tokenizer, 9) == [
        (encode("q", tokenizer, prompt_only=True)[0], {"prompt": "q"})]
    [(_, columns)] = encode_prompts([{"prompt": chat("a", "b", "c")}], tokenizer, 99)
    assert columns["prompt"] == "user: a\nassistant: b\nuser: c"


def test_rows_of_text_hold_no_prompt(capsys):
    tokenizer, rows = make_tokenizer(), [{"text": "a"}, {"text": "b", "prompt": None}]
    assert encode_prompts(rows, tokenizer, 9, or_none=True) == []
    assert "dropped 2 of 2 rows: no prompt to answer" in capsys.readouterr().err
    [(_, columns)] = encode_prompts([*rows, {"prompt": "q", "text": "c"}], tokenizer, 9)
    assert columns == {"prompt": "q", "text": "c"}
    for call in (lambda: encode_prompts(rows, tokenizer, 9), lambda: to_prompt(rows[0])):
        with pytest.raises(UserError, match="no prompt to answer"):
            call()
    with pytest.raises(UserError, match="not a prompt row"):
        encode_prompts([{"foo": "x"}], tokenizer, 9, or_none=True)


# --- shapes -----------------------------------------------------------------

QA = chat("q", "a")
SFT_ROWS = [
    {"messages": QA},
    {"messages": json.dumps(QA)},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": "q", "response": "a"},
    {"prompt": QA[:1], "completion": QA[1:]},
    {"instruction": "q", "input": "", "output": "a"},
    {"question": "q", "answer": "a"},
]
PAIR_ROWS = [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": QA[:1], "chosen": QA[1:], "rejected": chat("q", "b")[1:]},
    {"prompt": "q", "chosen": QA, "rejected": chat("q", "b")},
    {"chosen": QA, "rejected": chat("q", "b")},
    {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"},
]
PROMPT_ROWS = [
    {"prompt": "q", "answer": 5}, {"prompt": QA[:1], "label": "5"},
    {"question": "q", "answer": "5"}, {"instruction": "q", "answer": 5},
    {"messages": QA, "answer": 5},
]


def save(folder, kind, rows):
    """Write rows as a user would have them; nested cells of a CSV are JSON text."""
    path = folder / f"rows.{kind}"
    lines = "\n".join(map(json.dumps, rows))
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({name: json.dumps(cell) if isinstance(cell, list) else cell
                              for name, cell in row.items()} for row in rows)
    elif kind == "parquet":
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_every_shape_in_every_format(kind, tmp_path):
    for row in SFT_ROWS:
        assert to_messages(load_rows(save(tmp_path, kind, [row]))[0]) == QA
    for row in PAIR_ROWS:
        got = to_pair(load_rows(save(tmp_path, kind, [row]))[0])
        assert got == (QA[:1], QA[1:], chat("q", "b")[1:], 0.0)
    for row in PROMPT_ROWS:
        messages, columns = to_prompt(load_rows(save(tmp_path, kind, [row]))[0])
        assert messages == QA[:1] and columns["answer"] == "5" and data.ORIGIN not in columns
    [row] = load_rows(save(tmp_path, kind, [{"text": "some text"}]))
    assert to_messages(row) == "some text"


def dialogue(*contents):
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {c}" for i, c in enumerate(contents))


TALK, OTHER = chat("hi", "hello", "3+4?", "7"), chat("hi", "hello", "3+4?", "12")
PUBLIC = {  # rows written anew in the columns of well-known data sets
    "preference_dataset_mixture2_and_safe_pku": {
        "rejected": OTHER, "rejected_score": 1.5, "chosen": TALK, "chosen_score": 4.0},
    "hh-rlhf": {"chosen": dialogue("hi", "hello", "3+4?", "7"),
                "rejected": dialogue("hi", "hello", "3+4?", "12")},
    "ultrafeedback_binarized": {
        "prompt": "3+4?", "prompt_id": "ab12", "chosen": chat("3+4?", "7"),
        "rejected": chat("3+4?", "12"), "messages": chat("3+4?", "7"), "score_chosen": 8.5,
        "score_rejected": 6.0},
    "gsm8k": {"question": "3+4?", "answer": "3+4 = <<3+4=7>>7\n#### 7"},
    "alpaca": {"instruction": "Add.", "input": "3+4", "output": "7", "text": "Below is ... 7"},
    "sharegpt": {"id": "x_0", "conversations": [
        {"from": who, "value": said} for who, said in (
            ("system", "Be short."), ("human", "hi"), ("gpt", "hello"), ("human", "3+4?"),
            ("gpt", "7"))]},
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
@pytest.mark.parametrize("name", PUBLIC)
def test_schemas_of_public_data_sets(name, kind, tmp_path):
    """Every use a row has, after its way through a file: (text, what of it is learned)."""
    [row] = load_rows(save(tmp_path, kind, [PUBLIC[name]]))
    tokenizer = make_tokenizer(LLAMA)
    paired, sole = "rejected" in row, name in ("ultrafeedback_binarized", "gsm8k")
    first, system = "<|user|>hi</s><|assistant|>hello</s>", "<|system|>Be short.</s>"
    asked = "<|user|>Add.\n\n3+4</s>" if name == "alpaca" else "<|user|>3+4?</s>"
    first = {"alpaca": "", "sharegpt": system + first}.get(name, "" if sole else first)
    prompt = first + asked + "<|assistant|>"
    reply = row["answer"] if name == "gsm8k" else "7"
    [(ids, columns)] = encode_prompts([row], tokenizer, 200)
    assert tokenizer.decode(ids) == prompt
    assert columns.get("answer") == row.get("answer")
    if paired:
        [pair], [margin] = encode_pairs([row], tokenizer, 200)
        assert [whole(tokenizer, side) for side in pair] == [prompt + "7</s>", prompt + "12</s>"]
        assert [learned(tokenizer, side) for side in pair] == ["7</s>", "12</s>"]
        assert margin == 0.0  # scores are no margins
    if not paired or "messages" in row:
        [coded] = encode_sft([row], tokenizer, 200)
        assert whole(tokenizer, coded) == f"{prompt}{reply}</s>"
        assert learned(tokenizer, coded) == "hello</s>" * (name == "sharegpt") + reply + "</s>"
        [coded] = encode_sft([row], tokenizer, 200, train_on="last")
        assert learned(tokenizer, coded) == reply + "</s>"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_system_and_tool_turns_are_passed_through_and_not_learned(kind, tmp_path):
    template = CHATML.replace("m.content +", "(m.tool_calls[0].function.name + '!' if m.tool_calls "
                              "else m.content) +")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "[3, 4]"}}
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "3+4?"},
             {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "content": "7", "tool_call_id": "c1"},
             {"role": "assistant", "content": "Seven."}, {"role": "user", "content": "thanks"}]
    tokenizer = make_tokenizer(template, eos="<|im_end|>")
    [row] = load_rows(save(tmp_path, kind, [{"messages": turns}]))
    [coded] = encode_sft([row], tokenizer, 300)
    assert learned(tokenizer, coded) == "add!<|im_end|>Seven.<|im_end|>"
    assert "system\nBe short.<" in whole(tokenizer, coded)
    assert "tool\n7<" in whole(tokenizer, coded) and "thanks" not in whole(tokenizer, coded)
    [coded] = encode_sft([row], tokenizer, 300, train_on="last")
    assert learned(tokenizer, coded) == "Seven.<|im_end|>"
    [(ids, _)] = encode_prompts([row], tokenizer, 300)
    assert tokenizer.decode(ids).endswith("thanks<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match="a turn needs a role and a content"):
        encode([turns[1], {"role": "assistant", "content": None}], tokenizer)


def test_finer_points_of_shapes():
    assert to_messages({"prompt": '[{"a": 1}]', "completion": "a"}) == chat('[{"a": 1}]', "a")
    thought = [QA[0], QA[1] | {"reasoning_content": "hm", "tool_calls": None}]
    assert to_messages({"messages": thought}) == [QA[0], QA[1] | {"reasoning_content": "hm"}]
    alpaca = {"instruction": "add", "input": 12, "output": 3}
    assert to_messages(alpaca) == chat("add\n\n12", "3")
    numbers = {"messages": None, "prompt": "[1, 2]", "completion": 2}
    assert to_messages(numbers) == chat("[1, 2]", "2")
    # Scores are not margins: they would change the loss of data sets that happen to have them.
    margins = [{"margin": "0.5"}, {"margin": None}, {"margin": ""}, {"margin": " "}, {"margin": 0},
               {"chosen_score": 3, "rejected_score": 1}]
    assert [to_pair(PAIR_ROWS[0] | m)[3] for m in margins] == [0.5, 0, 0, 0, 0, 0]
    assert encode_pairs([PAIR_ROWS[0] | margins[0]], make_tokenizer(), 9)[1] == [0.5]
    # Sides that part early: the prompt ends there, and every later reply is learned.
    long = {"chosen": chat("q", "a", "r", "b"), "rejected": chat("q", "c", "r", "d")}
    assert to_pair(long)[:3] == (chat("q"), long["chosen"][1:], long["rejected"][1:])
    [(chosen, _)], _ = encode_pairs([long], make_tokenizer(LLAMA), 99)
    assert learned(make_tokenizer(), chosen) == "a</s>b</s>"
    twice = "\n\nHuman: a\n\nHuman: b\n\nAssistant: "
    assert to_pair({"chosen": twice + "c", "rejected": twice + "d"})[0] == chat("a\n\nb")
    assert to_prompt({"chosen": QA, "rejected": chat("q", "b")})[0] == QA[:1]
    tests = {"prompt": "q", "tests": ["assert f(1) == 2"], "difficulty": 0.5}
    assert to_prompt(tests)[1] == {"tests": tests["tests"], "difficulty": 0.5}
    # Only the completion of prompt turns + completion is learned.
    several = {"prompt": chat("a", "b", "c"), "completion": "d"}
    [row] = encode_sft([several], make_tokenizer(LLAMA), 99)
    assert learned(make_tokenizer(), row) == "d</s>"


def test_unknown_and_bad_rows_are_named():  # DAT-8
    here = {data.ORIGIN: "my.jsonl:3"}
    for function, row in [
        (encode_sft, {"foo": 1, "bar": 2}), (encode_pairs, {"prompt": "q", "chosen": "a"}),
        (encode_prompts, {"foo": "x", "bar": None}), (encode_sft, {"messages": []}),
        (encode_sft, {"messages": "[{"}), (encode_sft, {"prompt": "", "completion": "x"}),
        (encode_sft, {"prompt": "q"}), (encode_prompts, {"prompt": " "}), (encode_sft, {}),
        (encode_pairs, {"chosen": "a", "rejected": "b"}),
        (encode_sft, {"prompt": {"a": 1}, "response": ""}),
        (encode_prompts, {"messages": QA[1:]}),
        *[(encode_pairs, PAIR_ROWS[0] | {"margin": margin}) for margin in
          ("much", float("nan"), float("inf"), "-inf", 1e39, 10**400, [1], {"a": 1}, True)],
        *[(encode_sft, {"messages": [{"role": role, "content": "q"}, QA[1]]}) for role in
          (["user"], {"a": 1}, 5, True, "")],
        (encode_sft, {"text": "\ud800"}), (encode_sft, {"prompt": "\ud800", "completion": "a"}),
        (encode_prompts, {"prompt": "q", "tests": ["\udfff"]}),
        (encode_sft, {"messages": '[{"role": ' + "[" * 100_000}),
    ]:
        with pytest.raises(UserError, match=r"^my.jsonl:3: ") as error:
            function([row | here], make_tokenizer(), 99)
        assert str(error.value).count("my.jsonl") == 1
    with pytest.raises(UserError, match="foo, bar.*messages.*question"):
        to_messages({"foo": 1, "bar": 2})
    with pytest.raises(UserError, match=r"my.jsonl:3: .*prompt is empty"):
        encode_sft([{"prompt": "", "completion": "x"} | here], make_tokenizer(), 9)


# --- files ------------------------------------------------------------------


def test_jsonl_with_a_mark_blank_lines_and_a_broken_line(tmp_path):  # DAT-8
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": 5}\r\n\n  \n'
                     b'{"question": "\xe2\x80\xa8", "answer": "5"}\n')
    first, second = load_rows(str(path))
    assert to_prompt(first)[1] == to_prompt(second | {"question": "b"})[1] == {"answer": "5"}
    assert first[data.ORIGIN].endswith("rows.jsonl:1") and second[data.ORIGIN].endswith(":4")
    (tmp_path / "rows.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"a\r\nb",5\r\n')
    [row] = load_rows(str(tmp_path / "rows.csv"))
    assert to_messages(row) == chat("a\r\nb", "5") and row[data.ORIGIN].endswith("rows.csv:3")
    for bad in (b'{"question": ', b"\xff", b"[1]", b"3"):
        path.write_bytes(b'{"question": "a"}\n\n' + bad + b"\n")
        with pytest.raises(UserError, match=r"rows.jsonl:3 "):
            load_rows(str(path))


def test_rows_that_break_a_template_or_nest_too_deep_are_named(tmp_path):
    tokenizer = make_tokenizer(CHATML.replace("m.content", "m.content + m.name|default('')"))
    with pytest.raises(UserError, match=r"^my.jsonl:3: "):  # the template's TypeError
        encode_sft([{"messages": [QA[0] | {"name": 5}, QA[1]], data.ORIGIN: "my.jsonl:3"}],
                   tokenizer, 99)
    deep = "[" * 100_000 + "]" * 100_000
    for text, where in ((deep, "rows.jsonl "), ('{"text": "a"}\n{"a": %s}' % deep, "jsonl:2 ")):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(UserError, match=where + ".*recursion"):
            load_rows(str(tmp_path / "rows.jsonl"))


def test_capital_suffixes_and_two_columns_of_one_name(tmp_path):
    (tmp_path / "ROWS.CSV").write_text("text\na\n")
    assert load_rows(str(tmp_path / "ROWS.CSV"))[0]["text"] == "a"
    (tmp_path / "rows.csv").write_text("text,text\na,b\n")
    with pytest.raises(UserError, match="two columns have one name"):
        load_rows(str(tmp_path / "rows.csv"))


def test_roles_in_capitals_are_the_same_roles():
    turns = [{"role": "System", "content": "s"}, {"role": "User", "content": "q"},
             {"from": "GPT", "value": "a"}, {"role": "Custom", "content": "c"}]
    assert [m["role"] for m in data._turns(turns)] == ["system", "user", "assistant", "Custom"]


@pytest.mark.parametrize("row", [
    {"text": {"a": 1}}, {"text": ["a"]}, {"text": False}, {"prompt": "q", "completion": True},
    {"instruction": ["a"], "input": "b", "output": "c"},
    {"instruction": "a", "input": {"b": 1}, "output": "c"}])
def test_only_text_and_numbers_are_text(row):
    with pytest.raises(UserError, match="text"):
        encode_sft([row], make_tokenizer(), 99)


def test_an_input_of_zero_is_an_input():
    row = {"instruction": "double", "input": 0, "output": 0}
    assert to_messages(row) == chat("double\n\n0", "0")
    assert to_messages(row | {"input": ""}) == chat("double", "0")


def test_a_prompt_column_and_sides_that_repeat_its_end():
    system = [{"role": "system", "content": "be terse"}]
    sides = {"chosen": chat("q", "a"), "rejected": chat("q", "b")}
    for prompt, whole in ((system + chat("q"), system + chat("q")), (chat("q"), chat("q")),
                          (" q\n", chat("q")), (chat("p", "r", "q"), chat("p", "r", "q"))):
        assert to_pair({"prompt": prompt} | sides) == (
            whole, chat("q", "a")[1:], chat("q", "b")[1:], 0.0)
    with pytest.raises(UserError, match="something else than the turns"):
        to_pair({"prompt": "q", "chosen": chat("other", "a"), "rejected": chat("other", "b")})


def test_a_template_that_leaves_out_the_system_turn_is_told(capsys):
    bare = make_tokenizer(CHATML.replace(
        "{{ '<|im_start|>' + m.role", "{% if m.role != 'system' %}{{ '<|im_start|>' + m.role"
    ).replace("+ '<|im_end|>\n' }}", "+ '<|im_end|>\n' }}{% endif %}"))
    utils.warn.cache_clear()
    encode([{"role": "system", "content": "be terse"}, *chat("q", "a")], bare)
    assert "leaves out the system turn" in capsys.readouterr().err


def test_csv_cells_may_be_long_but_not_left_open(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,n\n" + "x" * 200_000 + ",1\n")
    assert len(load_rows(str(path))[0]["text"]) == 200_000
    for text, line in (('a,b\n1,2\n"x,1\n2,3\n4,5\n', 3), ('a,b\n"x"y,1\n', 2), ('"a,b\n', 1)):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"rows.csv .row from line {line} on: "):
            load_rows(str(path))


def test_files_that_cannot_be_read_say_how_to_mend_it(tmp_path, monkeypatch):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "wide.csv").write_text("text\na,b\n")
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "broken.json").write_text('[{"a": 1},')
    (tmp_path / "broken.parquet").write_text("x")
    for name, words in [("none.jsonl", "No such file"), ("empty.jsonl", "no rows"),
                        ("wide.csv", "wide.csv:2"), ("rows.txt", "cannot read .*rows.txt:1 "),
                        ("broken.json", "cannot read"), ("broken.parquet", "cannot read"),
                        ("", "cannot read")]:
        with pytest.raises(UserError, match=words) as error:
            load_rows(str(tmp_path / name))
        assert "\n" not in str(error.value)


def test_folders_with_splits(tmp_path):
    import datasets

    folder = str(tmp_path / "saved")
    parts = {name: datasets.Dataset.from_list([{"problem": name, "answer": 1}])
             for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(folder)
    assert load_rows(f"{folder}/test")[0]["problem"] == "test"
    assert load_rows(folder)[0]["problem"] == "train"
    with pytest.raises(UserError, match="saved/dev .it is neither"):
        load_rows(f"{folder}/dev")


def test_hub_names(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *a, **k: asked.append((*a, k["split"])) or [{"text": "x"}])
    for spec in ("gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:test", "gsm8k::test"):
        assert load_rows(spec)[0]["text"] == "x"
    assert asked == [("gsm8k", None, "train"), ("openai/gsm8k", "main", "train"),
                     ("openai/gsm8k", "main", "test"), ("gsm8k", None, "test")]

    def fail(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("not there\nor private")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="nothing .it is neither a file.*: not there."):
        load_rows("nobody/nothing")


@pytest.mark.parametrize("spec", [":::", "::", "../x", "no/such/file.txt", "~nobody-here/x"])
def test_specs_that_are_nothing(spec):
    with pytest.raises(UserError, match="^cannot read ") as error:
        load_rows(spec)
    assert "\n" not in str(error.value)
    assert "neither a file, a folder saved by datasets nor a hub data" in str(error.value) or \
        spec[0] == "~"


def write_rows(path, n, name):
    path.write_text("".join(json.dumps({name: f"{path.stem}{i}"}) + "\n" for i in range(n)))
    return str(path)


@pytest.mark.parametrize("weights, counts", [
    (("0.7", "0.3"), (56, 24)),  # b runs out first
    (("1", "1"), (24, 24)), (("3", "1"), (72, 24)), (("7", ".1"), (100, 1)),
])
def test_mixtures(weights, counts, tmp_path):
    a = write_rows(tmp_path / "a.jsonl", 100, "text")
    b = write_rows(tmp_path / "b.jsonl", 24, "text")
    spec = f"{a}*{weights[0]},{b}*{weights[1]}"
    rows = load_rows(spec, seed=1)
    assert rows == load_rows(spec.replace(",", " , "), seed=1)
    texts = [row["text"] for row in rows]
    assert tuple(sum(text[0] == name for text in texts) for name in "ab") == counts
    assert len(set(texts)) == len(texts)  # no row twice
    assert rows == load_rows(spec, seed=1) and rows != load_rows(spec, seed=2)
    assert "ab" in "".join(text[0] for text in texts) and "ba" in "".join(t[0] for t in texts)
    assert {row[data.ORIGIN].rpartition(":")[0] for row in rows} == {a, b}


def test_bad_mixtures_and_names_that_only_look_like_one(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", 9, "text"), write_rows(tmp_path / "b.jsonl", 9, "text")
    for weights in (("*0", "*1"), ("*-1", "*2"), ("*nan", "*1"), ("*1", "*inf"), ("*x", "*1"),
                    ("*1", ""), ("", "*"), ("", ""), ("*0.01", "*0.99"), ("*1e9", "*1"),
                    ("*1" + "0" * 400, "*1"), ("*0.5", None)):  # the last: one source alone
        spec = a + weights[0] + (f",{b}{weights[1]}" if weights[1] is not None else "")
        with pytest.raises(UserError, match="source needs a weight above 0") as error:
            load_rows(spec)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="^cannot read .*none.jsonl "):
        load_rows(f"{a}*1,{tmp_path}/none.jsonl*1")
    for name in ("a,b.jsonl", "a*0.5.jsonl", "x*2,y*3"):  # "x*2,y*3" is read as JSON lines
        assert len(load_rows(write_rows(tmp_path / name, 3, "text"))) == 3
    star = write_rows(tmp_path / "a*2", 3, "text")
    assert len(load_rows(f"{star}*2,{b}*2")) == 6


def test_columns_are_renamed_before_the_shape_is_recognised(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"question": "q", "better": "a", "worse": "b", "prompt": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "chosen": "c"}\n')
    spec = str(tmp_path / "a.jsonl")
    [row] = load_rows(spec, columns="prompt=question,chosen=better,rejected=worse")
    assert to_pair(row) == (chat("q"), QA[1:], chat("q", "b")[1:], 0.0)
    [row] = load_rows(spec, columns="better=worse,worse=better,ignored=question")
    assert row == {"better": "b", "worse": "a", "ignored": "q", "prompt": 3,
                   data.ORIGIN: spec + ":1"}
    both = f"{spec}*1,{tmp_path}/b.jsonl*1"
    rows = load_rows(both, columns="chosen=better")
    assert sorted(row["chosen"] for row in rows) == ["a", "c"]
    with pytest.raises(UserError, match="no column gold; there are ") as error:
        load_rows(both, columns="prompt=question,answer=gold")
    for found in ("a.jsonl: better, prompt, question, worse", "b.jsonl: chosen, prompt"):
        assert found in str(error.value)
    for columns in ("prompt", "prompt=", "=question", "prompt=question,prompt=better", ",", "a=b,",
                    "prompt=question, chosen=better"):
        with pytest.raises(UserError, match="must be field=column"):
            load_rows(spec, columns=columns)


def test_nothing_is_cached(monkeypatch):  # DAT-7
    tokenizer, row = make_tokenizer(LLAMA), {"prompt": "q", "completion": "a"}
    before = encode_sft([row], tokenizer, 64)
    tokenizer.chat_template = CHATML
    assert encode_sft([row], tokenizer, 64) != before
    tokenizer.chat_template = None
    plain = encode_sft([row], tokenizer, 64)
    monkeypatch.setattr(data, "PLAIN", "{% for m in messages %}{{ m.content + '-' }}{% endfor %}")
    assert encode_sft([row], tokenizer, 64) != plain


# --- batches ----------------------------------------------------------------


@dataclass
class Scored(Batch):
    logp: torch.Tensor | None = None  # (N,)
    values: torch.Tensor | None = None  # (N,)
    scores: torch.Tensor | None = None  # (B,)

    PER_SEQUENCE: ClassVar[tuple[str, ...]] = ("scores",)


ROWS = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([9, 10], [0, 1]), ([11, 12, 13, 14], [0, 0, 1, 0])]


def test_from_rows_shifts_the_mask_into_the_action_frame():
    batch = Batch.from_rows(ROWS)
    assert batch.input_ids.tolist() == list(range(5, 15))
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 10] and len(batch) == 4
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert batch.lengths.tolist() == [3, 1, 2, 4] and batch.last.tolist() == [2, 3, 5, 9]
    assert batch.row.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert batch.loss_mask.dtype == torch.float32 and batch.input_ids.dtype == torch.int64
    for rows in ([], [([], [])]):
        with pytest.raises(ValueError):
            Batch.from_rows(rows)
    with pytest.raises(ValueError, match=r"bad rows: \[1\]"):
        Batch.from_rows([([1, 2], [0, 1]), ([1, 2, 3], [0, 1]), ([1], [1])])


def test_select_equals_building_from_those_rows_and_carries_every_field():
    batch = Scored.from_rows(ROWS, logp=torch.arange(10.0), scores=torch.arange(4.0))
    order = [3, 0, 0, 2]
    got = batch.select(order).to("cpu")
    alone = Batch.from_rows([ROWS[i] for i in order])
    for name in ("input_ids", "position_ids", "cu_seqlens", "loss_mask"):
        assert torch.equal(getattr(got, name), getattr(alone, name))
    assert got.logp.tolist() == [6, 7, 8, 9, 0, 1, 2, 0, 1, 2, 4, 5]
    assert got.scores.tolist() == [3, 0, 0, 2] and got.values is None and type(got) is Scored
    assert len(batch.select([])) == 0 == len(batch.select([False] * 4))
    for mask in ([True, False, False, True], torch.tensor([1, 0, 0, 1]).bool()):
        assert batch.select(mask).scores.tolist() == [0, 3]
    for pair in ((2, 1), torch.tensor([2, 1])):
        assert batch.select(pair).scores.tolist() == [2, 1]
    for wrong in ([True, False], [True] * 5, [1.0], torch.ones(4), [4], [0, -1]):
        with pytest.raises(IndexError, match="sequences 0 to 3"):
            batch.select(wrong)


@pytest.mark.parametrize("micro, unit, sizes", [
    (100, 1, [4]), (4, 1, [2, 1, 1]), (6, 1, [3, 1]), (1, 1, [1, 1, 1, 1]), (5, 2, [2, 2]),
    (10, 2, [4]), (3, 4, [4]),
])
def test_split_keeps_order_and_units(micro, unit, sizes):
    batch = Scored.from_rows(ROWS, logp=torch.arange(10.0), scores=torch.arange(4.0))
    parts = batch.split(micro, unit=unit)
    assert [len(part) for part in parts] == sizes
    assert all(len(part.input_ids) <= micro or len(part) == unit for part in parts)
    for name in ("input_ids", "position_ids", "loss_mask", "logp", "scores"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(batch, name))
    with pytest.raises(RuntimeError):
        batch.split(10, unit=3)


def test_epochs_are_permutations_of_their_own_and_no_row_is_lost():  # TNY-1
    assert sorted(epoch_order(50, 0, 1)) == list(range(50))
    assert epoch_order(50, 0, 1) == epoch_order(50, 0, 1)
    assert len({epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert isinstance(epoch_order(3, 0, 0), tuple)  # what is cached cannot be spoilt


@pytest.mark.parametrize("rows, limit, held_out", [(19, 256, 19), (20, 256, 4), (200, 256, 10),
                                                  (6000, 256, 256), (6000, 8, 8)])
def test_rows_held_out_of_a_file(tmp_path, rows, limit, held_out):
    path = save(tmp_path, "jsonl", [{"text": str(i)} for i in range(rows)])
    config = SimpleNamespace(data=path, columns="", seed=0, eval_data="", eval_rows=limit)
    train, held = data.train_and_eval_rows(config, None)
    assert len(held) == held_out
    assert len({row["text"] for row in train + held}) == rows
    assert rows < 20 or len(train) + len(held) == rows
    config.seed = 1  # another order of training, the same rows held out
    assert data.train_and_eval_rows(config, None)[1] == held


def test_show_masks(capsys):
    tokenizer = make_tokenizer()
    coded = encode(chat("a", "b"), tokenizer)
    show_masks(coded, tokenizer)
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 1 + len(coded[0]) and table.count("*") == sum(coded[1])
    show_masks([coded, coded, coded], tokenizer, n=2)
    assert capsys.readouterr().out == table * 2
    show_masks(([5] * 1000, [1] * 1000), tokenizer)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 60 + 1 and lines[31] == "... 940 tokens ..."
