"""What every script needs: flags, seeds, schedule, optimiser step, run folder, checkpoints.

A run folder holds the finished model as a plain HF folder, `args.json` (every flag, versions, git
revision, whether the run is finished), `metrics.jsonl` (one object a step), `samples.jsonl`,
`curves.png`, and `checkpoint/` with the last two resume points.
"""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import lru_cache, reduce
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile
from zlib import crc32

import numpy as np
import torch
import transformers
from tqdm import tqdm


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class UserError(ValueError):
    """Something the user can mend; scripts print it as one line and exit with status 2."""


def flag(default, help, **more):
    """A field of a Config; more, such as choices, goes to argparse."""
    return field(default=default, metadata={"help": help.replace("%", "%%"), **more})


OF_MEMORY = ("micro_tokens", "gradient_checkpointing", "lora_rank", "dtype", "device")
PRESETS = {"none": (), "cpu": (2048, False, 0, "fp32", "cpu"),
           "8gb": (2048, True, 16, "auto", "auto"), "16gb": (4096, True, 16, "auto", "auto"),
           "24gb": (8192, True, 32, "auto", "auto"), "80gb": (32768, False, 0, "auto", "auto")}
SMALLER = "lower --micro_tokens, give --gradient_checkpointing, --lora_rank 16, or a --preset"


@dataclass
class Common:
    """Flags that mean the same in every script."""

    model: str = flag("runs/sft", "start model: a folder or hub name; toy: a fresh tiny model")
    data: str = flag("toy", "training rows: toy, a .jsonl/.json/.csv/.parquet file, a folder saved "
                     "by datasets, a hub name[:config[:split]], or a mixture of such: a*0.7,b*0.3")
    eval_data: str = flag("", "held-out rows, named as --data; empty: a share of --data")
    eval_rows: int = flag(256, "held-out rows (pairs) that an evaluation measures")
    columns: str = flag("", "rename columns: field=column,... such as prompt=question")
    chat_template: str = flag("", "chatml, or a file with a jinja template; empty: the model's own")
    show_data: int = flag(0, "print this many encoded rows token by token, and end")
    toy_grade: str = flag("4x2", "sums of the embedded world: digits x terms; 4x2- also subtracts")
    out: str = flag("", "run folder that is written")
    seed: int = flag(0, "seed of everything random: toy rows, order of rows, sampling")
    lr: float = flag(1e-3, "peak learning rate (AdamW, betas 0.9 and 0.95)")
    epochs: int = flag(1, "passes over the training rows")
    max_steps: int = flag(0, "stop after this many optimiser steps; 0: epochs decide")
    batch_size: int = flag(64, "rows (pairs, prompts) of one optimiser step")
    micro_tokens: int = flag(4096, "tokens of one forward pass; lower it when memory runs out")
    max_len: int = flag(1024, "longest row in tokens, at most what the model reads")
    warmup_ratio: float = flag(0.05, "share of the steps in which the learning rate rises")
    weight_decay: float = flag(0.0, "AdamW weight decay of the matrices")
    grad_clip: float = flag(1.0, "largest gradient norm; 0: no clipping")
    lora_rank: int = flag(0, "train adapters of this rank (real models: ten times the lr); 0: all")
    lora_alpha: float = flag(0.0, "LoRA: the adapters are scaled by this / rank; 0: twice the rank")
    lora_targets: str = flag("", "LoRA: names of linear layers, such as q_proj,v_proj; empty: all")
    load_in_4bit: bool = flag(False, "LoRA: the frozen matrices in 4 bits (QLoRA); needs a GPU and "
                              "bitsandbytes")
    preset: str = flag("none", "sets flags for a memory; those given win", choices=PRESETS)
    dtype: str = flag("fp32", "compute precision, auto: the best of the device; master weights "
                      "stay fp32", choices=(*DTYPES, "auto"))
    device: str = flag("auto", "cuda or cpu; auto takes a GPU when there is one")
    gradient_checkpointing: bool = flag(False, "recompute activations in backward: less memory")
    save_every: int = flag(50, "steps between checkpoints; 0: none")
    eval_every: int = flag(50, "steps between evaluations; 0: only at the end")
    resume: bool = flag(False, "continue the unfinished run in --out from its last checkpoint")
    overwrite: bool = flag(False, "start anew although --out already holds a run")
    report_to: str = flag("none", "log there, too", choices=("none", "wandb", "tensorboard"))


RANGES = {  # (smallest, largest) allowed value: numbers; all others must be 0 or more
    (1e-6, math.inf): "beta",
    (0, 0.5): "label_smoothing",
    (0, 1): "warmup_ratio clip_eps_low gamma gae_lambda",
    (0, 2**32 - 1): "seed",
    (1, math.inf): "epochs batch_size micro_tokens eval_prompts eval_rows toy_rows "
                   "group_size inner_epochs mini_batches n limit kl_horizon max_new_tokens",
    (2, math.inf): "max_len",
}
ON_THE_BAR = ("loss", "accuracy", "reward_mean", "gold_score", "kl_k1", "response_length", "lr",
              "tokens_per_s")  # all others are in metrics.jsonl
TRUNCATION = ("--top_k", "--top_p", "--min_p", "--repetition_penalty")


def refuse(message):
    """What argparse does about a bad command line, as our kind of error."""
    raise UserError(message.replace("'", "") + "; see --help")


def parse(config_class, doc):
    """Flags from the command line into `config_class`; bad ones raise UserError."""
    parser = transformers.HfArgumentParser(config_class, usage="%(prog)s [--flag value] ...",
                                           description=doc.strip().splitlines()[0])
    parser.error, parser.allow_abbrev = refuse, False
    own = config_class.__annotations__  # --help begins with them
    parser._optionals._group_actions.sort(key=lambda action: action.dest not in own)
    preset = getattr(parser.parse_known_args()[0], "preset", "none")
    parser.set_defaults(**dict(zip(OF_MEMORY, PRESETS[preset])))  # what is given wins
    config, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        name = unknown[0].split("=")[0]
        if name in TRUNCATION:
            refuse(f"{name}: training and evaluation sample from the full distribution, else the "
                   "importance ratio of RL would be biased; python -m nanorlhf.generate has it")
        near = get_close_matches(name, parser._option_string_actions, 1)
        refuse(f"unknown flag {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    ranges = {name: pair for pair, names in RANGES.items() for name in names.split()}
    for name, value in vars(config).items():
        low, high = ranges.get(name, (0, math.inf))
        if type(value) in (int, float) and not (low <= value <= high and math.isfinite(value)):
            raise UserError(f"--{name} {value} must be at least {low}"
                            + (f" and at most {high}" if high < math.inf else ""))
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=config.device, dtype=torch.float64).tolist()  # the sampler needs it
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"--device {config.device} cannot be used here "
                        f"({str(error).splitlines()[0]}); use --device cpu") from None
    if getattr(config, "dtype", "") == "auto":
        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        config.dtype = half if config.device.startswith("cuda") else "fp32"
    if preset != "none":
        print(f"preset {preset}:", *(f"--{name} {getattr(config, name)}" for name in OF_MEMORY))
    if not config.out:
        raise UserError("--out is empty; give the run folder to write")
    return config


@lru_cache(maxsize=None)  # each warning once
def warn(message):
    tqdm.write(f"warning: {message}", file=sys.stderr)


def main(action, config_class, doc):
    run_script(lambda: action(parse(config_class, doc)), issubclass(config_class, Common))


def run_script(action, trains=False):
    """A UserError becomes one line and exit status 2."""
    try:
        return action()
    except (UserError, OSError) as error:  # OSError: no right to write, a full disk
        message, status = f"error: {error}", 2
    except torch.OutOfMemoryError as error:
        message, status = f"error: out of memory ({str(error).split('. ')[0]}); " + (
            f"{SMALLER}; the last checkpoint is kept, --resume takes another --micro_tokens"
            if trains else "ask for fewer or shorter answers"), 2
    except KeyboardInterrupt:
        message, status = "\ninterrupted" + (
            "; --resume goes on from the last checkpoint (--save_every)" if trains else ""), 130
    print(message, file=sys.stderr)
    sys.exit(status)


def derive_seed(*numbers):
    """One 32-bit seed out of several numbers, well mixed, their order included."""
    return int(np.random.SeedSequence([n % 2**32 for n in numbers]).generate_state(1)[0])


@lru_cache(maxsize=4)
def epoch_order(n, seed, epoch):
    """A permutation of range(n) that depends on (seed, epoch) alone, so a resume needs no state."""
    return tuple(random.Random(f"{seed} {epoch}").sample(range(n), n))


def lr_at(step, total, peak, warmup_ratio, floor=0.1):
    """Learning rate of step 0 ... total-1: linear warm-up, then cosine down to floor * peak."""
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_step(optimizer, lr, grad_clip, scaler):
    """Clip, step, clear. Returns the gradient norm before clipping."""
    scaler.unscale_(optimizer)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise UserError(f"the gradient norm is {norm}: the run has diverged; lower --lr")
    scaler.step(optimizer)  # in fp16 it skips the step by itself when a gradient overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def trainable(model, lr, config):
    """Put the model into training mode; returns AdamW, which decays matrices only, and a loss
    scaler, which keeps the small gradients of fp16 from vanishing and else does nothing."""
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # transformers' new name
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in weights if p.ndim > 1], "weight_decay": config.weight_decay},
              {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0}]
    device = weights[0].device.type
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")
    return optimizer, torch.amp.GradScaler(device, enabled=config.dtype == "fp16")


def memory_to_come(models, config):
    """Bytes that training takes once all models are in memory, but for what allocators keep.

    Per trained weight 12: gradient and Adam's two moments in fp32; in low precision 2 more, its
    copy. Per token of a micro-batch and layer, (28 + 3 b) H + 4 b F for the backward pass (counted
    in a Llama; b bytes of --dtype, hidden size H, MLP size F), once more while a layer runs; with
    checkpointing only 4 H. The sampler's cache takes at most half of what is free, and not then.
    """
    need, size = 0, 4 if config.dtype == "fp32" else 2
    for model in models:
        shape = model.config.get_text_config()
        inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
        layer = (28 + 3 * size) * shape.hidden_size + 4 * size * inner
        kept = 4 * shape.hidden_size if config.gradient_checkpointing else layer
        need += (16 - size) * sum(w.numel() for w in model.parameters() if w.requires_grad)
        need += (shape.num_hidden_layers * kept + layer) * max(config.micro_tokens, config.max_len)
    return need


def free_memory(device):
    """Bytes that can still be had; infinite where the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    return int(found[1]) * 1024 if found else math.inf


LOGS = ("metrics.jsonl", "samples.jsonl")
WRITTEN = (*LOGS, "args.json", "curves.png", "checkpoint", "adapter_*", "base", "config.json",
           "generation_config.json", "model*.safetensors*", "tokenizer*", "chat_template.jinja",
           "events.out*")  # tensorboard's
HARMLESS = ("out", "resume", "overwrite", "save_every", "report_to", "device", "preset",
            "micro_tokens", "gradient_checkpointing", "offload")  # a resume may change these flags


class Run:
    """The run folder: what was asked, what happened, and where to go on after a break."""

    def __init__(self, config):
        transformers.set_seed(config.seed)
        self.config, self.folder, self.track = config, Path(config.out), None
        self.args_file, self.checkpoints = self.folder / "args.json", self.folder / "checkpoint"
        self.kept = {}  # numbers that a resume needs besides the states of objects
        self.sizes = {}  # of the logs, as this run left them
        if not config.show_data:  # which writes nothing
            self._check()

    def _check(self):
        """Refuse an --out that cannot be written, or gone on with, as the flags say."""
        config, folder = self.config, self.folder
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            raise UserError(f"--out {folder}: {nearest} is a file or read-only; give a folder")
        self.existing = [path for name in WRITTEN for path in folder.glob(name)]
        if config.report_to != "none" and find_spec(config.report_to) is None:
            raise UserError("--report_to {0} needs `pip install {0}`".format(config.report_to))
        if config.resume and config.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        if config.overwrite:
            ours = any((folder / name).exists() for name in ("args.json", *LOGS))
            if self.existing and not ours:
                raise UserError(f"--overwrite: {folder} holds {self.existing[0].name}, but no "
                                "args.json, so it is no run of ours; give another --out")
            for name, used in self._inputs():
                if folder.resolve() in (used, *used.parents):
                    raise UserError(f"--out {folder} would overwrite --{name} {used}")
        elif config.resume:
            try:
                args = json.loads(self.args_file.read_text())
                finished, flags = args["finished"], dict(args["flags"])
            except (OSError, ValueError, TypeError, KeyError):
                raise UserError(f"--resume: {folder} holds no run to go on with: args.json is "
                                "missing or damaged; start anew in another --out") from None
            if finished:
                raise UserError(f"--resume: {folder} holds a finished run")
            changed = [f"--{name} (was {old}, now {new})" for name, old in flags.items()
                       if name not in HARMLESS and old != (new := getattr(config, name, None))]
            if changed:
                raise UserError("--resume needs the flags of the start, not " + ", ".join(changed))
        elif self.existing:
            raise UserError(f"{folder} holds a run or a model; choose another --out, --resume an "
                            "unfinished run, or --overwrite what is there")

    def _inputs(self):
        """(flag, path) of what the run reads, an adapter's base and each file of a mixture too."""
        from nanorlhf import lora
        for name in ("model", "ref_model", "reward_model", "data", "eval_data", "chat_template"):
            for part in re.split(r"(?:\*[\d.]+)?(?:,|$)", str(getattr(self.config, name, ""))):
                adapter = lora.read(part) or {} if part else {}
                for path in filter(None, (part, adapter.get("base_model_name_or_path"))):
                    yield name, Path(path).resolve()

    def start(self, *frozen, **objects):
        """Take the objects whose state a resume needs, and the frozen models, which it must find
        unchanged; returns the number of steps done."""
        self.objects = objects
        modules = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        need, free = memory_to_come(modules, self.config), free_memory(self.config.device)
        print(f"memory: training takes about {need / 1e9:.2f} GB more" + (
            f"; that does not fit, {free / 1e9:.2f} GB are left: {SMALLER}" if need > free else ""))
        modules += [thing for thing in frozen if isinstance(thing, torch.nn.Module)]
        weights = (w.detach().cpu().contiguous() for m in modules for w in m.parameters())
        weights = checksum(w.view(torch.uint8).numpy() for w in weights)
        self.done = self._restore() if self.config.resume else 0
        self._keep("checksum of the start models' weights", weights)
        own = Path(getattr(self.config, "reward", "").rpartition(":")[0])  # a user's file
        self._keep("checksum of the --reward file",
                   checksum([own.read_bytes()] if own.is_file() else []))
        return self.done

    def _keep(self, what, value):
        """Remember a number that a resumed run must find again."""
        if self.kept.setdefault(what, value) != value:
            raise UserError(f"--resume: the {what} was {self.kept[what]}, is {value} now; bring "
                            "back what has changed, or start anew with --overwrite")

    def _open(self):
        """Make the folder, at the first step that is logged: what fails before leaves nothing."""
        if self.config.overwrite:
            for path in self.existing:
                linked = path.is_symlink() or path.is_file()
                path.unlink() if linked else shutil.rmtree(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in LOGS:
            log = self.folder / name
            if self.config.resume:  # steps after the checkpoint are run again
                rows = [row for row in read_jsonl(log) if row["step"] <= self.done]
                write_atomically(log, "".join(json.dumps(row) + "\n" for row in rows))
            else:
                log.touch(exist_ok=False)
            self.sizes[name] = log.stat().st_size
        self._write_args(finished=False)
        self.track = lambda values, step: None
        if self.config.report_to == "wandb":
            import wandb
            self.track = wandb.init(name=self.folder.name, config=vars(self.config)).log
        elif self.config.report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            write = SummaryWriter(self.folder).add_scalar
            self.track = lambda values, step: [write(*item, step) for item in values.items()]

    def _write_args(self, finished):
        git = subprocess.run("git rev-parse HEAD", shell=True, capture_output=True, text=True,
                             cwd=Path(__file__).parent)  # by a shell: there may be no git
        values = {"finished": finished, "flags": asdict(self.config), "torch": torch.__version__,
                  "transformers": transformers.__version__, "python": sys.version.split()[0],
                  "script": Path(sys.argv[0]).name, "git": git.stdout.strip() or None}
        write_atomically(self.args_file, json.dumps(values, indent=2) + "\n")

    def steps(self, rows, start):
        """Yield (step, numbers of its rows), behind a progress bar. Each of --epochs takes every
        row once, in an order of its own; its last step may have fewer rows."""
        self._keep("checksum of the encoded training rows",
                   checksum(repr(row).encode() for row in rows))
        size, steps_per_epoch = self.config.batch_size, -(-len(rows) // self.config.batch_size)
        self.total = self.config.max_steps or self.config.epochs * steps_per_epoch
        self.bar = tqdm(range(start, self.total), self.folder.name, self.total, initial=start)
        for step in self.bar:
            epoch, i = divmod(step, steps_per_epoch)
            order = epoch_order(len(rows), self.config.seed, epoch)
            self.step_began = time.perf_counter()
            yield step, order[i * size: (i + 1) * size]

    def speed(self, batch):
        """Tokens per second of this step; asked once they are learned, before an evaluation."""
        return len(batch.input_ids) / (time.perf_counter() - self.step_began)

    def due(self, step, every):
        """Whether what is done every so many steps (0: never), and at the end, is due now."""
        return step + 1 == self.total or (every > 0 and (step + 1) % every == 0)

    def end_step(self, step, metrics):
        """Log a step that is done, and keep a resume point where one is due."""
        self.log(step + 1, metrics)
        self.bar.set_postfix({k: metrics[k] for k in ON_THE_BAR if k in metrics}, refresh=False)
        if self.config.save_every and self.due(step, self.config.save_every):
            self.save(step + 1)

    def log(self, step, metrics):
        values = self._append("metrics.jsonl", step, metrics)
        self.track({name: value for name, value in values.items() if value is not None}, step)

    def samples(self, step, rows):
        for row in rows:
            self._append("samples.jsonl", step, row)

    def _append(self, name, step, row):
        if self.track is None:
            self._open()
        values, log = {"step": step} | {k: clean(v) for k, v in row.items()}, self.folder / name
        if not log.exists() or log.stat().st_size != self.sizes[name]:
            raise UserError(f"somebody else has changed {log}; give each run a folder of its own")
        with open(log, "a") as file:
            file.write(json.dumps(values) + "\n")
        self.sizes[name] = log.stat().st_size
        return values

    def save(self, step):
        """A resume point after `step` steps. The one before is kept: a file may get damaged."""
        self.checkpoints.mkdir(exist_ok=True)
        rng = {"python": random.getstate(), "numpy": np.random.get_state(),
               "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        state = {name: state_of(thing) for name, thing in self.objects.items()}
        write_atomically(self.checkpoints / f"step_{step:08d}.pt",
                         {"step": step, "state": state, "kept": self.kept, "rng": rng})
        for old in sorted(self.checkpoints.glob("step_*.pt"))[:-2]:
            old.unlink()

    def _restore(self):
        """Load the newest complete resume point into the objects; returns its step."""
        for file in sorted(self.checkpoints.glob("step_*.pt"), reverse=True):
            try:
                if bad := ZipFile(file).testzip():  # torch does not look at these checksums
                    raise ValueError(f"{bad} is damaged")
                saved = torch.load(file, map_location="cpu", weights_only=False)
                self.kept, rng = saved["kept"], saved["rng"]
                break
            except Exception as error:  # whatever a damaged file raises: try the one before
                warn(f"{file} is damaged ({type(error).__name__}); using the checkpoint before it")
        else:
            raise UserError(f"{self.checkpoints} holds no complete checkpoint; start anew with "
                            "--overwrite")
        logged = [row["step"] for row in read_jsonl(self.folder / LOGS[0])][:saved["step"]]
        if logged != [*range(1, saved["step"] + 1)]:
            raise UserError(f"--resume: {self.folder / LOGS[0]} lacks steps that the checkpoint "
                            "has; start anew with --overwrite")
        for name, thing in self.objects.items():  # frozen weights stay those of the start model
            thing.load_state_dict(thing.state_dict() | saved["state"][name])
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])
        torch.set_rng_state(rng["torch"])
        torch.cuda.set_rng_state_all(rng["cuda"])
        return saved["step"]

    def finish(self, save_model):
        """Write the model with `save_model(folder)`, mark the run as finished, draw its curves."""
        from nanorlhf import report
        save_model(self.folder)
        report.curves([self.folder], self.folder / "curves.png")
        self._write_args(finished=True)
        print(f"finished: {self.folder}")


def state_of(thing):
    """What a checkpoint keeps; weights that nobody trains are left to the start model."""
    if isinstance(thing, torch.nn.Module):
        return {name: w.detach() for name, w in thing.named_parameters() if w.requires_grad}
    return thing.state_dict()


def checksum(parts):
    """CRC-32 of byte strings or arrays, one after the other."""
    return reduce(lambda crc, part: crc32(part, crc), parts, 0)


def writable(path):
    """The path of a new file, refused before the work rather than after it."""
    path = Path(path)
    if path.exists() or not path.parent.is_dir():
        raise UserError(f"--out {path} exists, or lies in no folder; give a new file to write")
    return path


def write_atomically(path, content):
    """A text, or a checkpoint, stands in the file whole or not at all."""
    new = path.with_name("writing.tmp")
    try:
        with open(new, "wb") as file:
            file.write(content.encode()) if isinstance(content, str) else torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's of a full disk is a RuntimeError
        new.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({error}); is the disk full?") from None
    os.replace(new, path)


def add_stats(total, part):
    """Add up the sums of two micro-batches; of names that end in "max" the larger counts."""
    return {name: max(total.get(name, value), value) if name.endswith("max")
            else total.get(name, 0.0) + value for name, value in part.items()}


def mean_stats(updates):
    """Means over an iteration's updates; of a maximum the first's, where the ratio must be 1."""
    return {name: float(updates[0][name]) if name.endswith("max")
            else sum(float(stats[name]) for stats in updates) / len(updates)
            for name in updates[0]}


def clean(value):
    """A JSON value: tensors become numbers, NaN and infinity null (never invalid JSON)."""
    if isinstance(value, (torch.Tensor, np.generic)):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def read_jsonl(path):
    """The objects of a log; a last line that a kill has torn is left out."""
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(isinstance(row, dict) and type(row.get("step")) is int for row in rows):
            raise ValueError("not every line is an object with a step")
        return rows
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the log {path}: {error}") from None
