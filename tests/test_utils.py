"""Flags, schedule, run folder, checkpoints, metrics, points of a curve."""

import json
import math
import os
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from transformers import set_seed

from nanorlhf import toy, report, utils
from nanorlhf.data import Batch
from nanorlhf.losses import kl_estimate, ppo_stats
from nanorlhf.model import autocast, token_logprobs
from nanorlhf.utils import (
    Common, Run, UserError, add_stats, clean, derive_seed, flag, lr_at, optimizer_step, parse,
    read_jsonl, run_script, trainable,
)
from tiny import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_sft  # noqa: E402


@dataclass
class Config(Common):
    out: str = flag("run", "run folder that is written")
    group_size: int = flag(4, "answers, 100 % of them")


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """Parse a command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*flags):
        monkeypatch.setattr("sys.argv", ["train_x.py", *map(str, flags)])
        return parse(Config, "A script.\n\nMore.")
    return command


# --- flags ----------------------------------------------------------------------------------------


def test_defaults_and_values(parsed):
    config = parsed()
    assert config.lr == 1e-3 and config.resume is False
    assert config.device in ("cpu", "cuda", "mps")  # "auto" is decided
    config = parsed("--lr", "3e-4", "--resume", "--gradient_checkpointing", "true")
    assert config.lr == 3e-4 and config.resume and config.gradient_checkpointing


@pytest.mark.parametrize("flags, words", [
    (["--bogus", "1"], "--bogus"), (["--batch_sise", 2], "--batch_size"), (["stray"], "stray"),
    (["--lr", "fast"], "--lr"), (["--lr", "-1"], "--lr -1"), (["--lr", "nan"], "--lr"),
    (["--lr", "inf"], "--lr"), (["--epochs", 0], "--epochs 0"), (["--epochs", "1.5"], "--epochs"),
    (["--batch_size", -2], "--batch_size"), (["--group_size", 0], "--group_size"),
    (["--dtype", "int8"], "fp32, bf16, fp16"), (["--report_to", "paper"], "wandb"),
    (["--resume", "perhaps"], "--resume"), (["--out", ""], "--out"), (["--lr"], "--lr"),
])
def test_bad_flags_are_named(parsed, flags, words):
    with pytest.raises(UserError, match=words) as error:
        parsed(*flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "repetition_penalty"])
def test_truncated_sampling_is_refused_with_the_reason(parsed, name):
    """PPO-4."""
    for flags in ([f"--{name}", 1], [f"--{name}=1"]):
        with pytest.raises(UserError, match="full distribution.*nanorlhf.generate") as error:
            parsed(*flags)
        assert str(error.value).startswith(f"--{name}:")


def test_help_shows_every_flag_and_its_default(parsed, capsys):
    with pytest.raises(SystemExit) as done:
        parsed("--help")
    text = capsys.readouterr().out
    assert done.value.code == 0 and "100 % of them" in text and "(default: 0.05)" in text
    assert text.index("--group_size") < text.index("--model")  # what is this script's own is first


def test_a_user_error_is_one_line_and_status_2(capsys):
    def action():
        raise UserError("no such thing; make one")

    with pytest.raises(SystemExit) as done:
        run_script(action)
    assert done.value.code == 2 and capsys.readouterr().err == "error: no such thing; make one\n"
    with pytest.raises(ZeroDivisionError):  # a fault of ours is not dressed up as the user's
        run_script(lambda: 1 / 0)


# --- memory ---------------------------------------------------------------------------------------


def test_a_preset_sets_what_is_not_given_and_says_so(parsed, capsys):
    config = parsed("--preset", "8gb", "--micro_tokens", 3000, "--device", "cpu")
    assert config.micro_tokens == 3000 and config.gradient_checkpointing and config.lora_rank == 16
    assert config.dtype == "fp32"  # "auto" on a CPU
    assert capsys.readouterr().out == ("preset 8gb: --micro_tokens 3000 --gradient_checkpointing "
                                       "True --lora_rank 16 --dtype fp32 --device cpu\n")
    config = parsed("--preset", "24gb", "--lora_rank", 0, "--gradient_checkpointing", "false")
    assert config.lora_rank == 0 and not config.gradient_checkpointing
    assert parsed("--preset", "cpu").device == "cpu"
    capsys.readouterr()
    assert parsed().micro_tokens == 4096 and not capsys.readouterr().out
    with pytest.raises(UserError, match="--preset: invalid choice: 9gb .*none, cpu, 8gb"):
        parsed("--preset", "9gb")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_precision_is_what_the_card_has(has_bf16, parsed, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: empty(*size))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert parsed("--preset", "16gb", "--device", "cuda").dtype == ("bf16" if has_bf16 else "fp16")
    assert parsed("--preset", "16gb", "--device", "cuda", "--dtype", "fp32").dtype == "fp32"


def llama(layers):
    return tiny_model(hidden_size=64, intermediate_size=192, num_hidden_layers=layers, head_dim=16,
                      num_key_value_heads=4)


def memory_flags(**changes):
    return SimpleNamespace(**(dict(dtype="fp32", gradient_checkpointing=False, device="cpu", lr=1.0,
                                   micro_tokens=512, max_len=64, weight_decay=0.0) | changes))


def kept_for_backward(model, dtype):
    """Bytes that autograd keeps of a forward pass of 512 tokens, without the weights' own."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(
            "cpu", dtype):
        logp, _ = token_logprobs(model, Batch.from_rows([([5] * 64, [1] * 64)] * 8))
    for weight in model.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_estimate_is_what_autograd_keeps(dtype, checkpointing):
    """What a layer adds, counted, and what `memory_to_come` says of it, within a tenth."""
    config = memory_flags(dtype=dtype, gradient_checkpointing=checkpointing)
    counted, told = [], []
    for layers in (2, 6):
        model = llama(layers)
        utils.trainable(model, 1.0, config)
        counted.append(kept_for_backward(model, dtype))
        told.append(utils.memory_to_come([model], config))
    grown = 4 * sum(w.numel() for w in model.model.layers[0].parameters())
    told = told[1] - told[0] - 12 * grown - (2 * grown if dtype == "bf16" else 0)
    if dtype == "bf16" and not checkpointing:
        counted[1] -= 2 * grown  # the weights' copies, counted with the weights
    assert counted[1] - counted[0] == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize("fits", [False, True])
def test_what_does_not_fit_is_told(fits, monkeypatch, capsys):
    model, config = llama(2), memory_flags()
    need = 12 * sum(w.numel() for w in model.parameters()) + 512 * 3 * (40 * 64 + 16 * 192)
    assert need == utils.memory_to_come([model], config)
    model.model.requires_grad_(False)  # frozen weights need neither gradient nor moments
    need -= 12 * sum(w.numel() for w in model.model.parameters())
    monkeypatch.setattr(utils, "free_memory", lambda device: need if fits else need - 1)
    run = Run(utils.Common(out="x", device="cpu", micro_tokens=512, max_len=64))
    run.start(model=model)
    out = capsys.readouterr().out
    assert f"about {need / 1e9:.2f} GB more" in out
    assert ("does not fit" in out and "lower --micro_tokens" in out) != fits
    monkeypatch.undo()
    assert utils.free_memory("cpu") > 1e6


def test_out_of_memory_in_a_step(tmp_path, monkeypatch, capsys):
    """One line with the flag to turn, status 2, and the checkpoint serves a smaller --micro_tokens
    to the end."""
    flags = dict(device="cpu", out=str(tmp_path / "run"), toy_rows=16, batch_size=4, save_every=1,
                 eval_prompts=2, max_new_tokens=4, max_steps=3)
    steps = iter(range(3))

    def full(*args):
        if next(steps) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU ...")
        return optimizer_step(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as done:
        patch.setattr(train_sft, "optimizer_step", full)
        run_script(lambda: train_sft.train(train_sft.Config(**flags)), trains=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert done.value.code == 2 and "--micro_tokens" in line and "--resume" in line
    train_sft.train(train_sft.Config(**flags, micro_tokens=64, gradient_checkpointing=True,
                                     resume=True))
    assert steps_logged(tmp_path) == [1, 2, 3]


# --- seeds, schedule, step ------------------------------------------------------------------------


def test_seeds(parsed):
    draws = []
    for _ in range(2):
        Run(parsed("--seed", 7))
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    seeds = {derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125 and all(0 <= seed < 2**32 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2) != derive_seed(2, 1)


def test_learning_rate_rises_and_falls():
    rates = [lr_at(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])  # never 0
    assert rates[10] == 2.0 and max(rates) == 2.0
    assert rates[55] == pytest.approx(2 * (0.1 + 0.9 * 0.5))  # half way down
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    assert 0.2 < rates[99] < 0.21  # towards a tenth of the peak
    assert lr_at(0, 1, 2.0, 0.1) == 2.0  # one step: a full one
    assert lr_at(0, 4, 1.0, 0.0) == 1.0
    assert lr_at(3, 4, 1.0, 1.0) == 1.0  # all of it warm-up


def test_optimizer_step_clips_and_refuses_what_is_not_finite():
    model = torch.nn.Linear(3, 1)
    optimizer, scaler = trainable(model, 1.0, memory_flags(weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    model(torch.full((1, 3), 100.0)).sum().backward()
    norm = optimizer_step(optimizer, 0.01, 1.0, scaler)
    assert norm == pytest.approx(math.sqrt(3 * 100**2 + 1))  # before clipping
    assert all(p.grad is None for p in model.parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    before = model.weight.clone()
    (model(torch.ones(1, 3)).sum() * math.nan).backward()
    with pytest.raises(UserError, match="diverged; lower --lr"):
        optimizer_step(optimizer, 0.01, 1.0, scaler)
    assert torch.equal(model.weight, before)


# --- the life of a run folder ---------------------------------------------------------------------


class Thing:
    """Anything with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save_text(folder):
    (folder / "config.json").write_text("{}")


def begun(parsed, *flags, steps=0, every=1):
    """A run of so many steps, with a checkpoint after each `every`."""
    run = Run(parsed("--device", "cpu", *flags))
    thing = Thing(0)
    run.start(thing=thing)
    for step in range(1, steps + 1):
        thing.value = step
        run.log(step, {"loss": 1.0 / step})
        run.samples(step, [{"prompt": "p", "response": f"answer {step}", "score": None}])
        if step % every == 0:
            run.kept["kl_coef"] = step / 10
            run.save(step)
    return run


def test_a_run_from_start_to_finish(parsed, tmp_path):
    run = begun(parsed, steps=3)
    args = json.loads((tmp_path / "run" / "args.json").read_text())
    assert args["finished"] is False and args["flags"]["lr"] == 1e-3
    run.finish(save_text)
    args = json.loads((tmp_path / "run" / "args.json").read_text())
    assert args["finished"] is True and args["torch"] == torch.__version__
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"args.json", "metrics.jsonl", "samples.jsonl", "curves.png", "checkpoint",
                     "config.json"}
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == [
        "step_00000002.pt", "step_00000003.pt"]  # the last two


def test_nothing_is_written_before_start(parsed, tmp_path):
    Run(parsed())
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_protected(parsed, tmp_path):
    run = begun(parsed, steps=2)
    protected = "holds a run or a model; choose another --out, --resume an unfinished.*--overwrite"
    with pytest.raises(UserError, match=protected):
        Run(parsed())
    Run(parsed("--resume", "--device", "cpu"))
    run.finish(save_text)
    for flags, words in ([], protected), (["--resume"], "holds a finished run"):
        with pytest.raises(UserError, match=words):
            Run(parsed(*flags))
    begun(parsed, "--overwrite", steps=1)
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 1


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
@pytest.mark.parametrize("flags, words", [
    ([], "holds a run"), (["--resume"], "args.json is missing or damaged")])
def test_a_run_whose_args_are_gone_or_damaged_is_protected(text, flags, words, parsed, tmp_path):
    begun(parsed, steps=2)
    file = tmp_path / "run" / "args.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UserError, match=words):
        Run(parsed(*flags))
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize("name", ["model", "ref_model", "reward_model"])
@pytest.mark.parametrize("inside", ["", "base"])
def test_overwrite_never_deletes_what_the_run_needs(name, inside, parsed, tmp_path):
    config = parsed("--overwrite")
    setattr(config, name, str(tmp_path / "run" / inside))
    with pytest.raises(UserError, match=f"would overwrite --{name}"):
        Run(config)


def test_overwrite_deletes_runs_only(parsed, tmp_path):
    theirs = tmp_path / "run" / "base" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(UserError, match="holds base, but no args.json"):
        Run(parsed("--overwrite"))
    assert theirs.read_text() == "mine"


@pytest.mark.parametrize("name, value", [
    ("data", "run/samples.jsonl"), ("data", "run/samples.jsonl*0.5,other.jsonl*.5"),
    ("eval_data", "run/metrics.jsonl"), ("chat_template", "run/chat_template.jinja"),
    ("model", "adapter"), ("reward_model", "adapter")])
def test_overwrite_never_deletes_a_file_that_the_run_reads(parsed, tmp_path, name, value):
    begun(parsed, steps=1)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(
        {"base_model_name_or_path": "run", "r": 4, "lora_alpha": 8}))
    config = parsed("--overwrite")
    setattr(config, name, value)
    with pytest.raises(UserError, match=f"would overwrite --{name}"):
        Run(config)


def test_overwrite_unlinks_links(parsed, tmp_path):
    begun(parsed, steps=1)
    elsewhere = (tmp_path / "run" / "checkpoint").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint").symlink_to(elsewhere)
    begun(parsed, "--overwrite", steps=1)
    assert list(elsewhere.iterdir()) and not (tmp_path / "run" / "checkpoint").is_symlink()


def test_an_out_that_cannot_be_made_is_one_line(parsed, tmp_path, capsys):
    for out in ("x" * 300, "/proc/nothing"):
        with pytest.raises(SystemExit):
            run_script(partial(begun, parsed, "--out", out, steps=1))
        assert capsys.readouterr().err.startswith("error: ")


def test_resume_notices_other_data_and_another_frozen_model(parsed, tmp_path):
    def frozen(value):
        model = toy.new_model()
        torch.nn.init.constant_(model.lm_head.weight, value)
        return model.requires_grad_(False)

    run = Run(parsed("--save_every", 1))
    run.start(frozen(1.0), model=frozen(0.5))
    for step, _ in run.steps(range(200), 0):
        run.end_step(step, {})
        if step == 1:
            break
    resumed = Run(parsed("--save_every", 1, "--resume"))
    for other in (2.0, -1.0):
        with pytest.raises(UserError, match="checksum of the start models' weights was"):
            resumed.start(frozen(other), model=frozen(0.5))
        resumed = Run(parsed("--save_every", 1, "--resume"))
    resumed = Run(parsed("--save_every", 1, "--resume"))
    done = resumed.start(frozen(1.0), model=frozen(0.5))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for other in (range(150), range(1, 201)):  # fewer rows; as many, but others
        with pytest.raises(UserError, match="checksum of the encoded training rows was"):
            next(resumed.steps(other, done))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert next(resumed.steps(range(200), done))[0] == 2


@pytest.mark.parametrize("every, kept", [(0, 0), (150, 2), (300, 1)])
def test_save_every(parsed, tmp_path, every, kept):
    run = Run(parsed("--device", "cpu", "--save_every", every, "--max_steps", 200))
    run.start(thing=Thing(0))
    for step, _ in run.steps(range(200), 0):
        run.end_step(step, {})
    assert len(list((tmp_path / "run" / "checkpoint").glob("*"))) == kept


def test_overwrite_takes_the_logs_of_tensorboard_away(parsed, tmp_path):
    begun(parsed, steps=1)
    (tmp_path / "run" / "events.out.tfevents.1").touch()
    begun(parsed, "--overwrite", steps=1)
    assert not list((tmp_path / "run").glob("events*"))


def test_folders_that_cannot_be_a_run(parsed, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        with pytest.raises(UserError, match="is a file"):
            Run(parsed("--out", out))
    with pytest.raises(UserError, match="holds no run"):
        Run(parsed("--resume"))
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        Run(parsed("--resume"))
    (tmp_path / "run" / "config.json").write_text("{}")  # somebody's model
    with pytest.raises(UserError, match="--overwrite"):
        Run(parsed())


def test_a_resume_needs_the_flags_of_the_start(parsed):
    begun(parsed, "--seed", 1, steps=1)
    with pytest.raises(UserError, match=r"--seed \(was 1, now 0\), --lr \(was 0.001, now 0.5\)"):
        Run(parsed("--resume", "--lr", 0.5, "--device", "cpu"))
    Run(parsed("--resume", "--seed", 1, "--save_every", 7, "--device", "cpu"))  # harmless ones


# --- checkpoints ----------------------------------------------------------------------------------


def resumed(parsed):
    run = Run(parsed("--resume", "--device", "cpu"))
    thing = Thing(None)
    done = run.start(thing=thing), run.kept.get("kl_coef"), thing.value
    run._open()  # what the first log does
    return done


def steps_logged(folder, name="metrics.jsonl"):
    return [row["step"] for row in read_jsonl(folder / "run" / name)]


def test_a_resume_drops_the_steps_after_the_checkpoint(parsed, tmp_path):
    """LOG-6."""
    begun(parsed, steps=7, every=3)
    assert resumed(parsed) == (6, 0.6, 6)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert steps_logged(tmp_path, name) == [1, 2, 3, 4, 5, 6]


def test_a_half_written_line_is_dropped_too(parsed, tmp_path):
    begun(parsed, steps=3, every=3)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    resumed(parsed)
    assert steps_logged(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(parsed, tmp_path, capsys, damage):
    """CKP-6."""
    utils.warn.cache_clear()
    begun(parsed, steps=7, every=3)
    newest = tmp_path / "run" / "checkpoint" / "step_00000006.pt"
    good = newest.read_bytes()
    newest.write_bytes({"cut": good[: len(good) // 2], "empty": b"", "noise": b"x" * 99}[damage])
    assert resumed(parsed) == (3, 0.3, 3)
    assert steps_logged(tmp_path) == [1, 2, 3]
    warning = capsys.readouterr().err
    assert "step_00000006.pt is damaged" in warning and "the checkpoint before it" in warning
    newest.with_name("step_00000003.pt").unlink()
    with pytest.raises(UserError, match="no complete checkpoint; start anew with --overwrite"):
        resumed(parsed)


def test_what_is_missing_is_an_error_never_a_fresh_start(parsed, tmp_path):
    """CKP-4."""
    begun(parsed, steps=2)
    with pytest.raises(KeyError, match="critic"):
        Run(parsed("--resume", "--device", "cpu")).start(thing=Thing(0), critic=Thing(0))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="cannot read .*metrics.jsonl"):
        resumed(parsed)
    for file in (tmp_path / "run" / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        resumed(parsed)


def test_a_save_that_breaks_off_leaves_the_old_checkpoint(parsed, tmp_path, monkeypatch):
    """CKP-6: as on a full disk, while the new file is written."""
    run = begun(parsed, steps=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(utils.torch, "save", full)
    with pytest.raises(OSError):
        run.save(3)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    names = {path.name for path in (tmp_path / "run" / "checkpoint").glob("step*")}
    assert names == {"step_00000001.pt", "step_00000002.pt"}


def test_random_states_are_restored(parsed, monkeypatch):
    run = begun(parsed, steps=1)
    set_seed(3)
    run.save(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    set_seed(4)
    assert resumed(parsed)[0] == 1
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_a_byte_that_flips_within_a_tensor_is_noticed(parsed, tmp_path, capsys):
    utils.warn.cache_clear()
    run = Run(parsed("--save_every", 1))
    run.start(model=toy.new_model())
    run.log(1, {})
    run.save(1)
    run.log(2, {})
    run.save(2)
    newest = tmp_path / "run" / "checkpoint" / "step_00000002.pt"
    good = bytearray(newest.read_bytes())
    good[len(good) // 2] ^= 1
    newest.write_bytes(good)
    assert Run(parsed("--save_every", 1, "--resume")).start(model=toy.new_model()) == 1
    assert "step_00000002.pt is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"step": 2}\n', "5\n", '{"loss": 1}\n'])
def test_a_resume_needs_the_whole_log(parsed, tmp_path, text):
    begun(parsed, steps=2)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match="metrics.jsonl lacks steps|cannot read the log"):
        resumed(parsed)


def test_two_runs_in_one_folder_notice_each_other(parsed, tmp_path):
    first, second = Run(parsed()), Run(parsed())  # both before either has written
    first.start(thing=Thing(0))
    second.start(thing=Thing(0))
    first.log(1, {"loss": 1.0})
    with pytest.raises(OSError, match="exists"):
        second.log(1, {"loss": 2.0})
    first.save(1)
    assert resumed(parsed)[0] == 1
    later = Run(parsed("--resume", "--device", "cpu"))
    later.start(thing=Thing(None))
    later.log(2, {"loss": 3.0})
    with pytest.raises(UserError, match="somebody else has changed"):
        first.log(2, {"loss": 4.0})
    assert steps_logged(tmp_path) == [1, 2]


def test_resume_notices_another_reward_file(parsed, tmp_path):
    (tmp_path / "mine.py").write_text("def f(p, c, **_): return [1.0] * len(c)\n")

    def run(*flags):
        config = parsed("--device", "cpu", *flags)
        config.reward = str(tmp_path / "mine.py") + ":f"
        found = Run(config)
        found.start(thing=Thing(0))
        return found

    begun = run()
    begun.log(1, {})
    begun.save(1)
    run("--resume")
    (tmp_path / "mine.py").write_text("def f(p, c, **_): return [2.0] * len(c)\n")
    with pytest.raises(UserError, match="checksum of the --reward file was"):
        run("--resume")


# --- metrics --------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_null_in_valid_json(parsed, tmp_path):
    run = begun(parsed)
    run.log(1, {"a": math.nan, "b": torch.tensor(math.inf), "c": np.float32(0.5), "d": 0.0,
                "e": torch.tensor(3), "f": 1 / 3})
    line = (tmp_path / "run" / "metrics.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": None, "c": 0.5, "d": 0.0, "e": 3, "f": 0.333333}
    assert clean(True) is True and clean("text") == "text" and clean(-math.inf) is None


def test_speed_leaves_out_what_happens_between_steps(parsed, monkeypatch):
    """10 tokens in 2 s each, whatever the evaluation and the saving after them take."""
    times = iter([0.0, 2.0, 100.0, 102.0])
    monkeypatch.setattr(utils.time, "perf_counter", lambda: next(times))
    run = Run(parsed())
    batch = Batch.from_rows([([5] * 10, [1] * 10)])
    assert [run.speed(batch) for _ in zip(range(2), run.steps(range(200), 0))] == [5.0, 5.0]


def test_stats_of_micro_batches_add_up():
    """LOG-3: KL 0, 1, 2, 3 on 1, 1, 1 and 5 tokens: the mean is 18 / 8 = 2.25."""
    def shift(kl):  # the log-ratio at which the estimate k3 is kl
        low, high = 0.0, 5.0
        for _ in range(100):
            middle = (low + high) / 2
            k3 = kl_estimate(torch.zeros(1, dtype=torch.double),
                             torch.full((1,), middle, dtype=torch.double), "k3").item()
            low, high = (middle, high) if k3 < kl else (low, middle)
        return low

    total = {}
    for kl, count in zip((0, 1, 2, 3), (1, 1, 1, 5)):
        old = torch.zeros(count, dtype=torch.double)
        part = ppo_stats(old + shift(kl), old, torch.ones_like(old), torch.full_like(old, 1 / 8),
                         0.2, 0.2)
        total = add_stats(total, part)
    assert float(total["approx_kl"]) == pytest.approx(2.25, abs=1e-9)
    assert float(total["log_ratio_max"]) == pytest.approx(shift(3))  # the largest, not the sum
    assert float(total["clip_frac"]) == pytest.approx(7 / 8)
    assert add_stats({"a": 1, "b_max": 5}, {"a": 2, "b_max": 3}) == {"a": 3, "b_max": 5}


def test_zero_is_a_point_and_nan_a_gap(tmp_path):
    """LOG-7."""
    rows = [{"step": i, "loss": v} for i, v in enumerate([1, 0.0, 0.5, None, 0.2], 1)]
    rows.insert(2, {"step": 2.5, "other": 1})  # a row without the metric is no gap
    steps, values = report.points(rows, "loss")
    assert steps == [1, 2, 3, 4, 5]
    assert values[:3] == [1, 0.0, 0.5] and math.isnan(values[3]) and values[4] == 0.2
    assert report.points(rows, "absent") == ([], [])


def test_curves_draw_every_point(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            for i, v in enumerate([1, 0.0, 0.5, None, 0.2], 1):
                file.write(json.dumps({"step": i, "loss": v, "grad_norm": 0.0}) + "\n")
    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot",
                        lambda axis, *args, **kw: drawn.append(args[:2]) or plot(axis, *args, **kw))
    report.curves([tmp_path / "a", tmp_path / "b"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000
    assert len(drawn) == 4  # two metrics of two runs
    assert all(len(steps) == len(values) == 5 for steps, values in drawn)


def test_a_legend_tells_runs_of_one_name_apart(tmp_path, monkeypatch):
    labels, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axis, *args, label=None, **kw: (
        labels.append(str(label)), plot(axis, *args, label=label, **kw))[1])
    folders = [tmp_path / name for name in ("a/sft", "b/sft", "b/rm")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    report.curves(folders, tmp_path / "curves.png")
    assert labels == [str(folders[0]), str(folders[1]), "rm"]


def test_occupancy_draws_every_pass(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axis, *args, **kw: (
        drawn.append((*args, kw)), plot(axis, *args, **kw))[1])
    stats = {"blocks_used": [1, 5, 2], "preemptions": 7}
    report.occupancy({"small pool": stats}, tmp_path / "blocks.png")
    assert drawn == [([1, 5, 2], {"label": "small pool: 7 pre-emptions"})]
    assert (tmp_path / "blocks.png").stat().st_size > 5000


def test_report_needs_runs(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        report.report(report.arguments([str(tmp_path), "--out", str(tmp_path / "out")]))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="with a step"):
        report.report(report.arguments([str(tmp_path), "--out", str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="runs"):
        report.arguments([])


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "args.json"
    utils.write_atomically(file, "old")
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        utils.write_atomically(file, "new")
    assert file.read_text() == "old"
