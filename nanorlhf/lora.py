"""Low-rank adapters (LoRA): freeze the model and train a few small matrices beside it.

To the output W x of every linear layer of the trunk (alpha / rank) B A x is added, A (rank, in)
random and B (out, rank) zero, so that training starts at the model itself (Hu et al. 2021, "LoRA",
section 4.1). A reward model's head is trained in full.

A run with --lora_rank leaves PEFT's files in its folder, beside the tokenizer. PEFT opens it, and
all our scripts do as `--model`, as long as the base is where `base_model_name_or_path` says. A run
with --lora_rank that starts from such a folder goes on training that adapter; its reference is base
+ adapter as they were at the start. A run without merges it and trains all weights. A fresh toy
base is saved beside its adapter, in `base/`.

    python train_sft.py --model runs/sft --lora_rank 8 --out runs/sft_lora
    python -m nanorlhf.lora --adapter runs/sft_lora --out runs/merged       # a plain HF folder
"""

import copy
import json
import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from nanorlhf.utils import DTYPES, UserError, flag, main

PREFIX = "base_model.model."  # before every name in PEFT's file
# What PEFT would compute otherwise than we, or with another base: {option: values that are fine}.
COMPUTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian"),
            "use_dora": (), "use_rslora": (), "lora_bias": (), "rank_pattern": (),
            "alpha_pattern": (), "use_qalora": (), "alora_invocation_tokens": ()}
SCALE = ("reward_mean", "reward_std")  # see model.normalised; kept in the head of the file


def low_rank(linear, inputs, output):
    """Forward hook of a linear layer that has an adapter."""
    return output + F.linear(F.linear(inputs[0], linear.lora_A), linear.lora_B) * linear.lora_scale


def linear_layers(model):
    """{name: layer} of the trunk, so without lm head and score head."""
    modules = model.base_model.named_modules(prefix=model.base_model_prefix)
    return {name: m for name, m in modules if isinstance(m, (nn.Linear, Conv1D))}


def matrix(linear):
    """The weight as (out, in); GPT-2's Conv1D keeps it the other way round."""
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight.T


def attach(model, names, config):
    """Give the linear layers of these names a fresh adapter; config as in adapter_config.json."""
    for name in names:
        linear = model.get_submodule(name)
        n_out, n_in = matrix(linear).shape
        a, b = torch.empty(config["r"], n_in), torch.zeros(n_out, config["r"])
        linear.lora_A = nn.Parameter(nn.init.kaiming_uniform_(a, math.sqrt(5)).to(model.device))
        linear.lora_B = nn.Parameter(b.to(model.device))
        linear.lora_scale = config["lora_alpha"] / config["r"]
        linear.lora_hook = linear.register_forward_hook(low_rank)
    model.lora_config = config


def quantise(linear, config):
    """Keep a frozen matrix as 4-bit NormalFloats (Dettmers et al. 2023, "QLoRA", section 3). Its
    products are computed in --dtype. Copies of the model share it: they copy no function."""
    import bitsandbytes as bnb
    where = config.device, DTYPES[config.dtype]
    weight, state = bnb.functional.quantize_4bit(matrix(linear).detach().to(*where),
                                                 compress_statistics=True, quant_type="nf4")
    bias = None if linear.bias is None else linear.bias.detach().to(*where)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.forward = lambda x: bnb.matmul_4bit(x.to(where[1]), weight.t(), state, bias=bias)


def trained(model):
    """{name in PEFT's file: (module, attribute)}: the adapters, and a reward model's head."""
    found = {f"{PREFIX}{name}.{leaf}.weight": (module, leaf)
             for name, module in model.named_modules() if hasattr(module, "lora_A")
             for leaf in ("lora_A", "lora_B")}
    head = {f"{PREFIX}score.weight": (model.score, "weight")} if hasattr(model, "score") else {}
    return found | head


def adapt(model, config):
    """Decide by --lora_rank what is trained: all, or adapters, fresh ones or those that the model
    came with, and the score head. Never a tensor that another model shares. Returns the model, on
    --device."""
    found, rank = getattr(model, "lora_config", None), config.lora_rank
    base = found["base_model_name_or_path"] if found else model.name_or_path  # "": a toy
    if not rank and (config.lora_alpha or config.lora_targets):
        raise UserError("--lora_alpha and --lora_targets need a --lora_rank above 0")
    if config.load_in_4bit and not (rank and base and config.device.startswith("cuda")
                                    and find_spec("bitsandbytes")):
        raise UserError("--load_in_4bit needs --lora_rank, a --model from a folder or hub, a CUDA "
                        "device and `pip install bitsandbytes`")
    if not rank:
        return merge(model).requires_grad_(True).to(config.device)
    taken = (Path(base).resolve(), *Path(base).resolve().parents)
    if base and not config.show_data and Path(config.out).resolve() in taken:
        raise UserError(f"--out {config.out} would overwrite the base; give another folder")
    targets = re.findall(r"[^\s,]+", config.lora_targets)
    if not found:
        layers = linear_layers(model)
        leaves = sorted({name.rpartition(".")[2] for name in layers})
        picked = {t: [name for name in layers if f".{name}".endswith(f".{t}")]
                  for t in targets or leaves}
        if none := [t for t, names in picked.items() if not names]:
            raise UserError(f"--lora_targets {','.join(none)} are no linear layers of the model; "
                            f"it has {', '.join(leaves)}")
        attach(model, dict.fromkeys(sum(picked.values(), [])), {
            "peft_type": "LORA", "base_model_name_or_path": base or f"{config.out}/base",
            "target_modules": list(picked), "r": rank, "lora_alpha": config.lora_alpha or 2 * rank,
            "fan_in_fan_out": any(isinstance(m, Conv1D) for m in layers.values())})
    elif (found["r"] != rank or config.lora_alpha not in (0, found["lora_alpha"])
          or targets and set(targets) != set(found["target_modules"])):
        raise UserError(f"to go on with the adapter of --model give --lora_rank {found['r']} and "
                        "no other --lora_alpha or --lora_targets, or merge it with nanorlhf.lora")
    # The critic that shares a frozen reward model's trunk leaves it as it is.
    own = any(linear.weight.requires_grad for linear in linear_layers(model).values())
    model.requires_grad_(False)
    for module, leaf in trained(model).values():
        setattr(module, leaf, nn.Parameter(getattr(module, leaf).detach().clone()))
    learn, total = model.num_parameters(only_trainable=True), model.num_parameters()
    print(f"LoRA: {learn:,} of {total:,} weights are trained ({learn / total:.2%})")
    if config.load_in_4bit and own:
        for linear in linear_layers(model).values():
            quantise(linear, config)
    return model.to(config.device)


def twin(model):
    """A copy that shares the tensors that nobody trains: of an adapted model a light one."""
    return copy.deepcopy(model, {id(w): w for w in model.parameters() if not w.requires_grad})


@torch.no_grad()
def merge(model):
    """Add the adapters, if there are any, to the weights they stand beside. Returns the model."""
    for linear in [m for m in model.modules() if hasattr(m, "lora_A")]:
        matrix(linear).add_(linear.lora_scale * linear.lora_B @ linear.lora_A)
        linear.lora_hook.remove()
        del linear.lora_A, linear.lora_B
    model.lora_config = None
    return model


def save(model, folder):
    """PEFT's two files."""
    head = hasattr(model, "score")
    config = model.lora_config | {"task_type": "SEQ_CLS" if head else "CAUSAL_LM",
                                  "modules_to_save": ["score"] if head else None}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {key: getattr(*place).detach().cpu() for key, place in trained(model).items()}
    scale = {key: str(value) for key, value in vars(model.config).items() if key in SCALE}
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"} | scale)


def read(path):
    """adapter_config.json of a folder; None if it holds no adapter."""
    file = Path(path) / "adapter_config.json"
    if not file.exists():
        return None
    try:
        config = json.loads(file.read_text())
        stacked = (Path(config["base_model_name_or_path"]) / file.name).exists()
        if not (config["r"] >= 1 and config["lora_alpha"] > 0):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{file} is damaged, or names no model as its base") from None
    if stacked:
        raise UserError(f"{path} is an adapter on an adapter; merge its base with nanorlhf.lora")
    return {"task_type": "CAUSAL_LM"} | config


def load(model, path, config):
    """Put the adapter of a folder onto its base. Every tensor of the file must have its place in
    the model, and the other way round. Returns the model."""
    if odd := [f"{option}={config[option]}" for option, fine in COMPUTED.items()
               if config.get(option) and config[option] not in fine]:
        raise UserError(f"{path}: nanorlhf does not compute {', '.join(odd)}; merge it with PEFT")
    file = Path(path) / "adapter_model.safetensors"
    if not file.exists():
        raise UserError(f"{path} has an adapter_config.json, but no {file.name}")
    try:
        with safe_open(file, "pt") as opened:
            weights = {key: opened.get_tensor(key) for key in opened.keys()}
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    model.config.update({key: float(metadata[key]) for key in SCALE if key in metadata})
    attach(model, [name for name in linear_layers(model)
                   if f"{PREFIX}{name}.lora_A.weight" in weights], config)
    places = trained(model)
    shapes = {key: getattr(*place).shape for key, place in places.items()}
    if not weights or shapes != {key: weight.shape for key, weight in weights.items()}:
        raise UserError(f"the adapter {path} does not fit {config['base_model_name_or_path']}")
    for key, (module, leaf) in places.items():
        getattr(module, leaf).data = weights[key].float()
    return model


@dataclass
class Config:
    adapter: str = flag("", "folder of a run with --lora_rank, or one of PEFT's")
    out: str = flag("", "new folder for the merged model, which plain transformers opens")
    device: str = flag("cpu", "where to compute it")


def merge_folder(cfg):
    from nanorlhf.model import is_scorer, load_policy, load_scorer, save_model
    if not read(cfg.adapter):
        raise UserError(f"--adapter {cfg.adapter!r} holds no adapter_config.json")
    if Path(cfg.out).exists():
        raise UserError(f"--out {cfg.out} exists; give a new folder")
    model, tokenizer = (load_scorer if is_scorer(cfg.adapter) else load_policy)(cfg.adapter,
                                                                                 cfg.device)
    save_model(merge(model), tokenizer, cfg.out)
    print(f"merged: {cfg.out}")


if __name__ == "__main__":
    main(merge_folder, Config, __doc__)
