"""Models: load and save policy, reward model, critic, reference; log-probs and values of a batch.

The action frame: index t of every per-token tensor (log-prob, advantage, mask, ...) speaks of the
*prediction of token t+1*, made from the hidden state at t.

A policy is any HF causal language model whose attention goes through transformers'
`AttentionInterface`; a reward model, and a critic, is the `ForSequenceClassification` class of the
same family with one output: its head is read at the last token (a score) or at every token
(values). Dropout is off everywhere, so that two forward passes agree and the first PPO ratio is 1.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          AutoTokenizer, GenerationConfig,
                          MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
from transformers.utils import logging as transformers_logging

import nanorlhf.attention  # noqa: F401  registers the attention function
from nanorlhf import logprob, lora, toy
from nanorlhf.attention import packed_layout
from nanorlhf.data import Batch
from nanorlhf.utils import DTYPES, UserError

transformers_logging.disable_progress_bar()  # the scripts show bars of their own
transformers_logging.set_verbosity_error()  # what matters of its reports, load_weights raises
PAD = "<|pad|>"
RUNS = ("sft", "rm", "dpo", "ppo", "grpo")


def load_policy(path, device="cpu", seed=0):
    """A causal LM with fp32 weights and its tokenizer; path is a folder, a hub name, or "toy", a
    fresh tiny model whose weights `seed` draws."""
    if path == "toy":
        model, tokenizer = toy.new_model(seed), toy.tokenizer()
    else:
        tokenizer, scores = read_folder(path)
        if scores:
            raise UserError(f"{path} is a reward model, not a policy; give one, such as runs/sft")
        model = load_weights(AutoModelForCausalLM, path)
        fit_vocabulary(model, len(tokenizer))
    return prepare(model, path).to(device), tokenizer


def load_weights(model_class, path, **kwargs):
    """The model of a folder in fp32, an adapter on its base; missing weights are an error."""
    adapter = lora.read(path)
    try:
        model, report = model_class.from_pretrained(
            adapter["base_model_name_or_path"] if adapter else path, dtype=torch.float32,
            output_loading_info=True, **kwargs)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    missing = set(report["missing_keys"]) - ({"score.weight"} if adapter else set())
    if missing:
        raise UserError(f"{path} is damaged or of another kind: it lacks {min(missing)}")
    return lora.load(model, path, adapter) if adapter else model


def load_scorer(path, device="cpu"):
    """A reward model or critic from a reward model's folder, or made new from a policy's: its head
    then starts at zero, for a random head costs the trunk its first steps."""
    if path == "toy" or not is_scorer(path):
        policy, tokenizer = load_policy(path)
        if type(policy.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise UserError(f"no reward model can be made of {path}: transformers has no class for "
                            f"SequenceClassification with a {type(policy.config).__name__}")
        policy.config.num_labels = 1  # next: a classifier has no generation config
        policy.config.get_text_config().eos_token_id = sorted(eos_ids(policy, tokenizer))
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(policy.config)
        setattr(model, model.base_model_prefix, policy.base_model)
        model.score = nn.Linear(model.score.in_features, 1, bias=False)
        nn.init.zeros_(model.score.weight)
        model.lora_config = getattr(policy, "lora_config", None)
    else:
        tokenizer, _ = read_folder(path)
        one = {"num_labels": 1} if lora.read(path) else {}  # its base may be a policy
        model = load_weights(AutoModelForSequenceClassification, path, **one)
        fit_vocabulary(model, len(tokenizer))
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        raise UserError(f"{path} is a classifier with {model.config.num_labels} outputs and no "
                        "reward model; train one with train_rm.py")
    model.config.get_text_config().pad_token_id = None  # the check reads one row at a time
    prepare(model, path)
    distinct_pad(model, tokenizer)
    return model.to(device), tokenizer


def load_reward_model(path, tokenizer, device="cpu"):
    """A trained reward model that reads this tokenizer's ids, frozen; an adapter is merged."""
    if not is_scorer(path):
        raise UserError(f"{path} is no reward model; `python train_rm.py --model {path}` makes one")
    return freeze(path, *load_scorer(path, device), tokenizer)


def load_reference(path, policy, tokenizer, device="cpu"):
    """The frozen reference: the model of a folder, or the policy as it is now if path is empty. A
    copy, but of an adapted policy, on whose device it then stays, only the adapter is copied."""
    if not path:
        copy = lora.twin(policy).requires_grad_(False).eval()
        return copy if getattr(policy, "lora_config", None) else copy.to(device)
    return freeze(path, *load_policy(path, device), tokenizer)


def freeze(path, model, own, tokenizer):
    """The model, an adapter merged, frozen; its own tokenizer must give the policy's ids."""
    words = own.get_vocab()
    if any(words.get(word) != i for word, i in tokenizer.get_vocab().items()):
        raise UserError(f"{path} has another vocabulary than the policy; take one of its family")
    return lora.merge(model).requires_grad_(False).eval()


@contextmanager
def visiting(model, device):
    """A frozen model that waits on the CPU (--offload) is on the device while it is used."""
    home = model.device
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


def longest(model, max_len):
    """max_len, or what the model reads at most if that is less."""
    return min(max_len, getattr(model.config.get_text_config(), "max_position_embeddings", max_len))


def is_scorer(path):
    """Whether a folder or hub name holds a reward model rather than a policy."""
    return read_folder(path)[1]


def read_folder(path):
    """(tokenizer, is_scorer) of a model folder or hub name, or one clear error."""
    if path == "toy":
        raise UserError("toy is only a start for training; give a folder, such as runs/sft")
    if not Path(path).is_dir() and (str(path).startswith((".", "/", "runs/")) or
                                    str(path).count("/") > 1 or Path(path).exists()):
        name = Path(path).name  # of a folder that a script makes unless told otherwise
        made = f"; `python train_{name}.py` makes it" if name in RUNS else ""
        raise UserError(f"no model folder {path}{made}")
    if (Path(path) / "args.json").exists() and not list(Path(path).glob("*config.json")):
        raise UserError(f"{path} is an unfinished run; go on by --resume, or --overwrite it")
    if adapter := lora.read(path):
        try:
            tokenizer, _ = read_folder(adapter["base_model_name_or_path"])
        except UserError as error:
            raise UserError(f"{path} is an adapter, and its base is missing: {error}") from None
        if (Path(path) / "tokenizer_config.json").exists():  # PEFT alone saves none
            tokenizer = AutoTokenizer.from_pretrained(path)
        return tokenizer, adapter["task_type"] == "SEQ_CLS"
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
        return tokenizer, "ForSequenceClassification" in str(config.architectures)
    except Exception as error:  # whatever a damaged file raises
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load a model from {path}: {why}") from None


def prepare(model, name):
    """Dropout off, our attention in, checked on a few tokens."""
    if sum(weight.numel() for weight in model.parameters()) < 5_000_000:
        torch.set_num_threads(1)  # for a tiny model a second CPU thread only spins
    for module in model.modules():
        for key, value in list(vars(module).items()):  # OPT has such a number beside nn.Dropout
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
    try:
        check(model.eval())
    except (ValueError, TypeError) as error:
        raise UserError(f"{name} ({type(model).__name__}) is not supported: {error}") from None
    return model


@torch.no_grad()
def check(model):
    """Two short sequences packed through our code must come out as each alone in transformers': the
    model hands our layout to every layer, and does nothing to its logits that we lack."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"it has layers of kind {', '.join(sorted(kinds))}")
    size = model.get_input_embeddings().num_embeddings
    rows = [torch.arange(low, high) % size for low, high in ((3, 8), (5, 17))]  # (T,) each
    batch = Batch.from_rows([(ids, [1] * len(ids)) for ids in rows])
    is_policy = model.get_output_embeddings() is not None
    model.set_attn_implementation("eager")
    theirs = [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in rows]
    if not all(logits.isfinite().all() for logits in theirs):
        raise ValueError("its outputs are not finite numbers, so its weights are broken")
    if is_policy:
        theirs = [logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                  for logits, ids in zip(theirs, rows)]
    model.set_attn_implementation("nanorlhf")
    if model.config._attn_implementation != "nanorlhf":
        raise ValueError("its class computes attention by itself")
    ours = (token_logprobs(model, batch)[0][batch.loss_mask > 0] if is_policy
            else sequence_scores(model, batch))
    if not torch.allclose(ours, torch.cat(theirs), rtol=1e-3, atol=1e-3):
        raise ValueError("it computes something outside nanorlhf's attention and head; two packed "
                         "sequences give other numbers than each alone")


@torch.no_grad()
def fit_vocabulary(model, size):
    """Embeddings for tokens that were added to the tokenizer: the mean of those that are there, so
    that an adapter's base comes out the same each time. A vocabulary never shrinks."""
    known = model.get_input_embeddings().num_embeddings
    if size > known:
        model.resize_token_embeddings(size, mean_resizing=False)
        for table in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            table.weight[known:] = table.weight[:known].mean(0)


def distinct_pad(model, tokenizer):
    """Give a reward model a pad token of its own: transformers reads the score of a padded row at
    the last token that is not pad; with pad = eos that would be the token before the EOS."""
    ends = eos_ids(model, tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        tokenizer.add_special_tokens({"pad_token": PAD})
    fit_vocabulary(model, tokenizer.pad_token_id + 1)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def eos_ids(model, tokenizer):
    """Every token id that ends a response: the tokenizer's and those of the generation config or,
    in a reward model, which has none, of the config."""
    config = getattr(model, "generation_config", None) or model.config.get_text_config()
    found = config.eos_token_id
    found = found if isinstance(found, (list, tuple)) else [found]
    return {tokenizer.eos_token_id, *found} - {None}


def save_model(model, tokenizer, folder):
    """A plain HF folder, which `from_pretrained` opens without nanorlhf; of a model with an adapter
    only that, as PEFT's folder. With the generation config written here plain `generate` samples
    and stops as we do; a base model's contradictory one (do_sample=False with a temperature) would
    refuse to be saved."""
    if getattr(model, "lora_config", None):
        tokenizer.save_pretrained(folder)
        lora.save(model, Path(folder))
        if model.name_or_path:
            return
        folder = Path(folder) / "base"  # a fresh toy model: PEFT needs one that it can open
    if hasattr(model, "lm_head"):
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=sorted(eos_ids(model, tokenizer)), pad_token_id=tokenizer.pad_token_id)
    weights = {name: w for name, w in model.state_dict().items() if ".lora_" not in name}
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "config.json"  # our attention is not the reader's
    values = {k: v for k, v in json.loads(config.read_text()).items() if "attn_impl" not in k}
    config.write_text(json.dumps(values, indent=2) + "\n")


def autocast(device, dtype):
    """fp32 master weights, compute in `dtype` ("fp32", "bf16" or "fp16")."""
    return torch.autocast(torch.device(device).type, DTYPES[dtype], enabled=dtype != "fp32")


def hidden_states(model, batch):
    """(N, H) last hidden states of a packed batch."""
    return model.base_model(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False,
        layout=packed_layout(batch.cu_seqlens),
    ).last_hidden_state[0]


def token_logprobs(policy, batch, temperature=1.0, upstream=None):
    """log_softmax(logits / temperature) of each next token and entropy of its distribution, (N,)
    each, in fp32. Zero where `batch.loss_mask` is: those positions never reach the vocabulary.
    upstream (N,): the gradient that the log-probs will get, if it is known (see logprob.py)."""
    kept = batch.loss_mask.nonzero()[:, 0]  # (M,)
    hidden = hidden_states(policy, batch).index_select(0, kept)  # (M, H)
    head, config = policy.get_output_embeddings(), policy.config.get_text_config()
    # Cohere multiplies its logits by a constant, Granite divides: fold it into the hidden state.
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    logp, entropy = logprob.token_logprobs(
        hidden * scale if scale != 1.0 else hidden, head.weight, batch.input_ids[kept + 1],
        temperature, bias=head.bias, softcap=getattr(config, "final_logit_softcapping", None),
        upstream=None if upstream is None else upstream[kept])
    zeros = torch.zeros(len(batch.input_ids), device=logp.device)
    return zeros.index_copy(0, kept, logp), zeros.index_copy(0, kept, entropy.to(zeros.dtype))


def token_values(critic, batch):
    """(N,) a critic's value at every token, in fp32, on the scale of the normalised score. Index t
    is the state after token t, in which token t+1 is chosen."""
    return normalised(critic, head_scores(critic, hidden_states(critic, batch)))


def sequence_scores(scorer, batch):
    """(B,) the reward model's raw score, read at the last token of each sequence, in fp32."""
    return head_scores(scorer, hidden_states(scorer, batch)[batch.last])


def head_scores(scorer, hidden):
    """(M,) of hidden (M, H). Not under autocast: bf16 would make ties of scores that differ."""
    with torch.autocast(hidden.device.type, enabled=False):
        return scorer.score(hidden.float())[:, 0]


def normalised(scorer, scores):
    """Scores less their mean, over their spread, as measured on held-out pairs in training."""
    config = scorer.config
    return (scores - getattr(config, "reward_mean", 0.0)) / getattr(config, "reward_std", 1.0)
