"""The decode kernel: in Triton's interpreter against dense attention, compiled for GPUs without
one at hand, and the decode step, which never asks the device for a number.

The interpreter has to be chosen before the first import of triton, and the compiler cannot work
beside it: hence the processes.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from nanorlhf import decode_kernel, graphs
from nanorlhf.attention import paged_layout
from nanorlhf.cache import PagedKVCache
from nanorlhf.decode_kernel import paged_decode

ROOT = Path(__file__).parent.parent
triton = pytest.importorskip("triton", reason="no Triton for this system")
interpreting = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not interpreting, reason="run by a test in a process of its own")
compiled = pytest.mark.skipif(interpreting, reason="no compiler beside the interpreter")


def dense(query, pool, blocks, positions, block_size, scaling, window=None, softcap=None):
    """One query at a time, in fp64."""
    rows, group = [], query.shape[1] // pool.shape[2]
    for q, table, position in zip(query.double(), blocks, positions.tolist(), strict=True):
        keys = range(max(0, position + 1 - (window or math.inf)), position + 1)
        slots = [int(table[p // block_size]) * block_size + p % block_size for p in keys]
        k, v = (x.repeat_interleave(group, 1) for x in pool[slots].double().unbind(1))  # (S, H, D)
        scores = torch.einsum("hd,shd->hs", q, k) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


def random_case(positions, block_size, H, K, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    W = max(positions) // block_size + 1
    pool = torch.randn(len(positions) * W * block_size, 2, K, D, generator=generator)
    blocks = torch.randperm(len(positions) * W, generator=generator).view(len(positions), W)
    query = torch.randn(len(positions), H, D, generator=generator)
    return query, pool, blocks, torch.tensor(positions), block_size, D**-0.5


@interpreted
@pytest.mark.parametrize("positions, block_size, H, K, D", [
    ([0], 16, 1, 1, 16), ([15, 16, 17], 16, 2, 1, 16), ([63, 64], 16, 3, 1, 64),
    ([5, 130], 4, 4, 2, 24), ([200], 32, 2, 2, 32), ([70, 0, 33], 1, 2, 1, 8)])
@pytest.mark.parametrize("options", [{}, dict(splits=4), dict(window=50), dict(softcap=2.0),
                                     dict(splits=2, window=70, softcap=5.0)])
def test_kernel_equals_dense_attention(positions, block_size, H, K, D, options):
    case = random_case(positions, block_size, H, K, D)
    found = paged_decode(*case, **({"splits": 1} | options))
    expected = dense(*case, **{k: v for k, v in options.items() if k != "splits"})
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


@interpreted
@pytest.mark.parametrize("graphed", [False, True])  # True: on the fixed input of a CUDA graph
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # grouped heads; window and softcap too
def test_kernel_samples_the_same_tokens(family, graphed, monkeypatch):
    from test_sampler import Endless, endless, ids_of, tokens

    from nanorlhf.sampler import Sampler, SamplingParams

    sampler = Sampler(endless(family), Endless(), block_size=4, max_prefill_tokens=20)
    params = SamplingParams(n=2, max_new_tokens=3, seed=0)
    expected, calls = sampler.generate(ids_of(3, 30), params), []
    monkeypatch.setattr(decode_kernel, "usable", lambda device: True)
    monkeypatch.setattr(decode_kernel, "splits_for", lambda *_: calls.append(1) or 2)
    monkeypatch.setattr(graphs, "usable", lambda device: graphed)
    monkeypatch.setattr(graphs.DecodeGraphs, "record", lambda self, decode: decode)
    found = sampler.generate(ids_of(3, 30), params)
    assert tokens(found) == tokens(expected) and len(calls) >= 2 * 2  # layers, passes
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def test_choice_of_the_kernel(monkeypatch):
    cuda, cpu, starts = torch.device("cuda"), torch.device("cpu"), np.array([0, 40, 3])
    for capability, flag, expected in [((8, 0), "1", True), ((8, 0), "0", False),
                                       ((7, 5), "1", False)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setenv("NANORLHF_TRITON", flag)
        assert decode_kernel.usable(cuda) == expected and not decode_kernel.usable(cpu)
    for kernel, parts in ((False, 3), (True, 1)):  # the kernel takes all lengths in one launch
        monkeypatch.setattr(decode_kernel, "usable", lambda _, k=kernel: k)
        layout = paged_layout(PagedKVCache(9, 16, cpu), np.arange(9).reshape(3, 3), starts,
                              starts + 1)
        assert len(layout.rectangles) == parts


def test_few_long_sequences_are_split(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(multi_processor_count=108))
    splits = decode_kernel.splits_for
    assert [splits(n, 8192, None) for n in (3, 24, 96, 2048)] == [32, 8, 2, 1]
    assert [splits(3, length, None) for length in (16, 256, 1024)] == [1, 1, 4]


@compiled
def test_interpreted_tests_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "test_kernel"],
        cwd=ROOT, text=True, capture_output=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and "34 passed" in done.stdout, done.stdout[-4000:] + done.stderr


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("H, K, D, dtype", [  # SmolLM2-135M, Qwen3-0.6B, Gemma-3-1B
    (9, 3, 64, "bf16"), (16, 8, 128, "bf16"), (16, 8, 128, "fp32"), (4, 1, 256, "fp32")])
def test_compiles_for_tensor_cores_without_spills(tmp_path, capability, H, K, D, dtype):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = decode_kernel.decode_kernel
    constants = dict(softcap=0.0, block_size=16, H=H, K=K, D=D, GROUP=16, WIDTH=D,
                     TILE=decode_kernel.tile(
                         {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]))
    types = dict(q_ptr=f"*{dtype}", pool_ptr=f"*{dtype}", blocks_ptr="*i64", positions_ptr="*i64",
                 out_ptr=f"*{dtype}", lse_ptr="*fp32", W="i32", scaling="fp32", window="i32")
    names = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "_ptr" in name}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in names}, constants,
                       aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": 4, "num_stages": 2})
    code = made.asm
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(code["cubin"])
    usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin],
                           capture_output=True, text=True, check=True).stdout
    used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assert used["STACK"] == used["LOCAL"] == 0, used  # no spills
    assert made.metadata.shared <= 101_376  # what a consumer card has
    assert used["REG"] <= (168 if dtype == "bf16" else 255), used
    assert dtype == "fp32" or "mma.sync" in code["ptx"]  # fp32 products stay fp32
    assert re.search(r"ld\.global\.\S*v4\.b32|cp\.async", code["ptx"])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decode_step_never_waits_for_the_device(family):
    """Under FakeTensorMode tensors have shapes but no numbers: a step that asked for one, by
    .item(), bool() or an index of unknown size, would raise."""
    model, cache = tiny_model(family), PagedKVCache(9, 4, torch.device("cpu"))
    starts = np.array([9, 7, 3])
    layout = paged_layout(cache, np.arange(9).reshape(3, 3), starts, starts + 1)
    mode = FakeTensorMode()

    def fake(x):
        return tree_map_only(torch.Tensor, mode.from_tensor, x)

    for thing in (layout, *layout.rectangles):
        vars(thing).update(fake(vars(thing)))
    weights = fake(dict([*model.named_parameters(), *model.named_buffers()]))
    with mode, torch.no_grad():
        logits = functional_call(model, weights, (torch.ones(1, 3).long(),), dict(
            layout=layout, use_cache=False, position_ids=layout.positions[None],
            logits_to_keep=torch.arange(3))).logits
        assert logits.shape == (1, 3, 128) and len(cache.pools) == 2
        with pytest.raises(DataDependentOutputException):
            logits.sum().item()
