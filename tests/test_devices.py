"""The five scripts with --device cuda, on a machine without a GPU: no operation mixes devices.

What a GPU computes is not tested here, nor its kernels (NANORLHF_TRITON=0)."""

import sys
from pathlib import Path

import pytest
import torch

from fake_gpu import fake_gpu
from nanorlhf import toy, utils
from nanorlhf.model import load_scorer, save_model

sys.path.insert(0, str(Path(__file__).parent.parent))

RUNS = [
    ("sft", {}), ("sft", {"lora_rank": 2, "gradient_checkpointing": True}),
    ("rm", {}), ("rm", {"lora_rank": 2}),
    ("dpo", {"ref_model": "{policy}"}), ("dpo", {"lora_rank": 2, "loss_type": "ipo"}),
    ("ppo", {"kl_target": 1.0, "critic_warmup": 1, "offload": True, "dual_clip": 3.0}),
    ("ppo", {"lora_rank": 2, "critic_warmup": 0}), ("ppo", {"reward": "toy", "critic_warmup": 0}),
    ("grpo", {"reward_model": "{scorer}", "offload": True, "advantage": "rloo"}),
    ("grpo", {"lora_rank": 2, "loss_type": "dr_grpo", "mini_batches": 2}),
]


def test_the_fake_gpu_notices():
    with fake_gpu():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert x.device.type == "cuda" and y.device.type == "cpu" and (x[1:] * 2).is_cuda
        assert (x + torch.tensor(1.0) + y.to("cuda")).device == torch.zeros_like(x).device
        assert x[torch.tensor([0])].is_cuda and not x.cpu().is_cuda
        for wrong in (lambda: x + y, lambda: y[x.long()], lambda: torch.cat([x, y]), x.numpy):
            with pytest.raises(RuntimeError, match="two devices|on the GPU"):
                wrong()
        linear = torch.nn.Linear(3, 1).to("cuda")
        with pytest.raises(RuntimeError, match="two devices"):
            linear(y)
        linear(x).sum().backward()
        assert linear.weight.grad.is_cuda


@pytest.mark.parametrize("name, flags", RUNS)
def test_no_script_mixes_devices(name, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("NANORLHF_TRITON", "0")
    monkeypatch.setattr(utils, "free_memory", lambda device: 1e12)
    for asked, answer in (("mem_get_info", (10**9, 10**9)), ("memory_reserved", 0),
                          ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, asked, lambda *_, answer=answer: answer)
    policy, scorer = str(tmp_path / "policy"), str(tmp_path / "scorer")
    save_model(toy.new_model(), toy.tokenizer(), policy)
    save_model(*load_scorer(policy), scorer)
    (tmp_path / "pairs.jsonl").write_text("".join(
        f'{{"prompt": "{i}+1=", "chosen": "#### {i + 1}", "rejected": "#### {i}"}}\n'
        for i in range(10, 16)))
    flags = {key: value.format(policy=policy, scorer=scorer) if isinstance(value, str) else value
             for key, value in flags.items()}
    flags |= dict(model=policy, out=str(tmp_path / "run"), device="cuda", max_steps=2, batch_size=4,
                  max_len=64, eval_every=1, save_every=1, toy_rows=8, eval_rows=4)
    if name in ("rm", "dpo"):
        flags |= dict(data=str(tmp_path / "pairs.jsonl"))
    if name != "rm":
        flags |= dict(eval_prompts=2, max_new_tokens=6)
    if name == "ppo":
        flags.setdefault("reward_model", scorer)
    script = __import__(f"train_{name}")
    with fake_gpu():
        script.train(script.Config(**flags))
    assert (tmp_path / "run" / "curves.png").exists()
