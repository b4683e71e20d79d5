"""The Triton kernels: run in Triton's interpreter, compiled for four generations of GPUs without
one at hand, and, where there is a GPU, run on it.

The interpreter has to be chosen before the first import of triton, and the compiler cannot work
beside it: hence the processes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanorlhf import logprob
from nanorlhf.logprob import logits_logprobs, token_logprobs, token_logprobs_reference

ROOT = Path(__file__).parent.parent
triton = pytest.importorskip("triton", reason="no Triton for this system")
compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1",
                              reason="the compiler does not work beside the interpreter")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="[GPU] needs a CUDA device")


def python(*args, **env):
    """Output of a process of its own; stops the test if that fails."""
    done = subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_kernels_pass_the_tests_of_the_torch_form():
    out = python("-m", "pytest", "-p", "no:cacheprovider", "tests/test_logprob.py", "-k",
                 "not trl and not gradcheck and not equals_the_reference and not errors "
                 "and not options1-151936", TRITON_INTERPRET="1")  # those left out: torch, or slow
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 50, out


def test_triton_is_not_needed():
    python("-c", """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from nanorlhf.logprob import token_logprobs
logp, entropy = token_logprobs(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 4]))
assert torch.allclose(entropy, torch.tensor(5.0).log()) and torch.allclose(logp, -entropy)
""")


def test_form_is_chosen_by_device_type_and_flag(monkeypatch):
    class Cuda:
        is_cuda = True

    monkeypatch.delenv("NANORLHF_TRITON", raising=False)
    in_torch = (logprob.fold, logprob.to_gradient)
    forms = logprob.row_functions(Cuda, torch.bfloat16)
    assert [form.args[0] for form in forms] == [logprob.fold_kernel, logprob.gradient_kernel]
    assert logprob.row_functions(Cuda, torch.float64) == in_torch
    assert logprob.row_functions(torch.zeros(1), torch.float32) == in_torch
    monkeypatch.setenv("NANORLHF_TRITON", "0")
    assert logprob.row_functions(Cuda, torch.bfloat16) == in_torch


# --- compiled without a GPU -----------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("capability, dtypes", [
    (75, ["fp16", "fp32"]), (80, ["bf16", "fp32"]), (89, ["bf16", "fp32"]),
    (90, ["bf16", "fp16", "fp32"])])
def test_kernels_compile_without_spills_and_load_vectors(tmp_path, capability, dtypes):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, flags in ((logprob.fold_kernel, {}), (logprob.gradient_kernel,
                          {"with_entropy": True}), (logprob.gradient_kernel,
                          {"with_entropy": False})):
        for dtype in dtypes:
            types = {"z_ptr": "*" + dtype, "column_ptr": "*i64", "stats_ptr": "*fp32",
                     "stride": "i32", "width": "i32", "N": "i32", "T": "fp32"}
            names = kernel.arg_names
            # What the launcher finds out by itself: these are divisible by 16, as `tiles` sees to.
            aligned = {(names.index(name),): [["tt.divisibility", 16]]
                       for name in ("z_ptr", "stride", "width")}
            source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in names},
                               {"BLOCK": 4096} | flags, aligned)
            code = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                                  options={"num_warps": 8}).asm
            cubin = tmp_path / "kernel.cubin"
            cubin.write_bytes(code["cubin"])
            usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage",
                                    cubin], capture_output=True, text=True, check=True).stdout
            used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 96, used  # no spills
            assert "ld.global.v4.b32" in code["ptx"]
            assert kernel is logprob.fold_kernel or "st.global.v4.b32" in code["ptx"]


# --- on a GPU -------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05),
                                              (torch.float16, 0.01)])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 2.0}])
def test_gpu_agrees_with_fp64(dtype, tolerance, options):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(70, 64), torch.randn(33001, 64) / 8, torch.randn(33001)
    leaves = [x.cuda().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    targets = torch.randint(33001, (70,), device="cuda")
    g = torch.randn(2, 70, device="cuda")
    found = []
    for fn, (h, w, b) in ((token_logprobs, leaves), (token_logprobs_reference, exact)):
        logp, entropy = fn(h, w, targets, bias=b, **options)
        loss = (logp * g[0]).sum() + (entropy * g[1]).sum()
        found.append([logp, entropy, *torch.autograd.grad(loss, (h, w, b))])
    for a, b in zip(*found):
        assert (a - b).double().norm() <= tolerance * b.norm()


@gpu
@pytest.mark.parametrize("V", [1, 2, 1000, 50257, 65537, 151936, 262144])
def test_gpu_any_vocabulary(V):  # LPK-4, LPK-5
    torch.manual_seed(0)
    whole = torch.randn(128, V + 3, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(V, (64,), device="cuda")
    logits = whole[::2, 1:V + 1]
    logp, entropy = logits_logprobs(logits, targets)
    plain = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logp.double(), plain.gather(1, targets[:, None])[:, 0],
                               rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1),
                               rtol=1e-5, atol=2e-5)


@gpu
def test_gpu_more_than_2_to_the_31_elements():  # LPK-4
    N, V = 14400, 151936
    z = torch.randn(N, V, device="cuda", dtype=torch.bfloat16)
    stats = torch.zeros(4, N, device="cuda")
    stats[0] = logprob.LOWEST
    expected = z[-64:].float().logsumexp(1)
    logprob.launch(logprob.fold_kernel, z, torch.zeros(N, dtype=torch.long, device="cuda"), stats,
                   1.0)
    torch.testing.assert_close((stats[0] + stats[1].log())[-64:], expected, rtol=1e-5, atol=1e-5)


@gpu
def test_gpu_scratch_stays_below_1_gb():
    N, V, H = 8192, 151936, 4096
    hidden = torch.randn(N, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(V, (N,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = token_logprobs(hidden, weight, targets)
    (logp.sum() + entropy.sum()).backward()
    kept = sum(x.grad.nbytes for x in (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before - kept < 1e9
