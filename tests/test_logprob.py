"""The fused head against its plain form, fp64 and other people's code.

With TRITON_INTERPRET=1 (set by test_logprob_triton.py in a process of its own) the same tests
drive the Triton kernels, on CPU tensors.
"""

import contextlib
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanorlhf import logprob
from nanorlhf.logprob import logits_logprobs, token_logprobs, token_logprobs_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In the interpreter, the path of a GPU: all but fp64 goes through the kernels."""
    torch_form = logprob.fold, logprob.to_gradient
    if INTERPRETED:
        forms = [partial(logprob.launch, kernel)
                 for kernel in (logprob.fold_kernel, logprob.gradient_kernel)]
        monkeypatch.setattr(logprob, "row_functions", lambda hidden, dtype: (
            torch_form if dtype == torch.float64 else forms))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that every tiny test crosses many borders, the last tile a part one."""
    monkeypatch.setattr(logprob, "TILES", {"cpu": (4, 8)})


def head(N=11, H=6, V=29, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
                            .requires_grad_() for shape in ((N, H), (V, H), (V,)))
    return hidden, weight, bias, torch.randint(V, (N,), generator=g)


OPTIONS = [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"softcap": 2.0, "temperature": 1.7}]


def results(fn, leaves, targets, w_logp, w_entropy, options, bias=True):
    """logp, entropy and gradients of a weighted sum; a weight of None leaves the output unused."""
    hidden, weight, b = leaves
    logp, entropy = fn(hidden, weight, targets, bias=b if bias else None, **options)
    loss = sum((w * x).sum() for w, x in ((w_logp, logp), (w_entropy, entropy)) if w is not None)
    wanted = leaves if bias else leaves[:2]
    return logp.detach(), entropy.detach(), *torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("used", ["logp", "entropy", "both"])
def test_equals_the_reference_in_fp64(small_tiles, options, bias, used):
    *leaves, targets = head()
    weights = torch.randn(2, len(targets), dtype=torch.float64)
    weights[:, 0] = 0  # LPK-1: the first token's weight must not stand for all
    args = (leaves, targets, weights[0] if used != "entropy" else None,
            weights[1] if used != "logp" else None, options, bias)
    plain = results(token_logprobs_reference, *args)
    for ours, theirs in zip(results(token_logprobs, *args), plain):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("used", ["logp", "entropy", "both"])
@pytest.mark.parametrize("V", [29, 5000])
def test_fp32_is_within_rounding_of_fp64(monkeypatch, V, options, used):
    monkeypatch.setattr(logprob, "TILES", {"cpu": (4, 16 if V == 29 else 4096)})
    *exact, targets = head(N=9, V=V)
    leaves = [x.detach().float().requires_grad_() for x in exact]
    weights = torch.randn(2, len(targets), dtype=torch.float64)
    weights[:, 0] = 0  # LPK-1 for the kernels
    args = (targets, weights[0] if used != "entropy" else None,
            weights[1] if used != "logp" else None, options)
    ours = results(token_logprobs, leaves, *args)
    for i, (a, b) in enumerate(zip(ours, results(token_logprobs_reference, exact, *args))):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).abs().max() <= (5e-6 if i < 2 else 1e-5 * b.abs().max())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("factor", [1.0, -4096.0])  # a loss scaler multiplies the promised gradient
def test_gradients_made_in_the_forward_pass(small_tiles, options, factor):
    *leaves, targets = head()
    upstream = torch.randn(len(targets), dtype=torch.float64)
    upstream[::4] = 0
    args = (leaves, targets, factor * upstream, None)
    plain = results(token_logprobs_reference, *args, options)
    promised = results(token_logprobs, *args, options | {"upstream": upstream})
    for ours, theirs in zip(promised, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_scaled_promise_keeps_small_gradients_in_fp16():
    """What a loss scaler is for: the factor belongs into upstream, before fp16 can flush."""
    hidden, weight, _, targets = head(N=64, H=8, V=8192, dtype=torch.float32)
    upstream, errors = torch.full((64,), -1 / 65536), []
    for scale in (1.0, 65536.0):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", dtype=torch.float16):
            logp, _ = token_logprobs(*leaves, targets, upstream=upstream * scale)
        (logp * upstream * 65536.0).sum().backward()
        exact = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        logp, _ = token_logprobs_reference(*exact, targets)
        (logp * upstream * 65536.0).sum().backward()
        errors.append(float((leaves[0].grad - exact[0].grad).norm() / exact[0].grad.norm()))
    assert errors[1] < 2e-3 and errors[0] > 10 * errors[1], errors


@pytest.mark.parametrize("broken", ["another", "twice", "entropy", "none"])
def test_a_broken_promise_about_the_gradient_raises(broken):
    *leaves, targets = head(dtype=torch.float32)
    upstream = torch.zeros(11) if broken == "none" else torch.rand(11)
    logp, entropy = token_logprobs(*leaves[:2], targets, upstream=upstream)
    loss = (logp * (1 if broken in ("another", "none") else upstream)).sum()
    if broken == "entropy":
        loss = loss + entropy.sum()
    if broken == "twice":
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="upstream"):
        loss.backward()


def test_no_promise_and_no_token():
    *leaves, targets = head(dtype=torch.float32)
    logp, _ = token_logprobs(*leaves[:2], targets, upstream=torch.zeros(11))
    (logp * 0).sum().backward()  # a micro-batch without a trained token
    assert (leaves[1].grad == 0).all()
    logp, _ = token_logprobs(leaves[0][:0], leaves[1], targets[:0], upstream=torch.zeros(0))
    logp.sum().backward()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(small_tiles, options):
    *leaves, targets = head(N=5, H=3, V=11)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets, bias=b, **options), leaves)


def test_hand_numbers():
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8."""
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [5.0]]).log()
    logp, entropy = token_logprobs(hidden, weight, torch.arange(3))
    p = torch.tensor([1, 2, 5]) / 8
    torch.testing.assert_close(logp, p.log())
    torch.testing.assert_close(entropy, -(p * p.log()).sum().expand(3))
    # halving the temperature squares the odds: 1, 4, 25 of 30
    logp, _ = token_logprobs(hidden, weight, torch.arange(3), temperature=0.5)
    torch.testing.assert_close(logp, (torch.tensor([1.0, 4, 25]) / 30).log())


@pytest.mark.parametrize("V", [1, 2, 1000, 50257, 65537, 151936])  # LPK-5: no tail may leak
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "temperature": 0.7}])
def test_any_vocabulary_sums_to_one(V, options):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 4), torch.randn(V, 4), torch.full((V,), -100.0)
    targets = torch.tensor([0, V - 1, V // 2])
    bias.requires_grad_()
    logp, entropy = token_logprobs(hidden, weight, targets, bias=bias, **options)
    plain = token_logprobs_reference(hidden.double(), weight.double(), targets,
                                     bias=bias.detach().double(), **options)
    assert (logp <= 0).all() and (entropy >= -1e-6).all()
    for a, b in zip((logp, entropy), plain):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-5)  # logits near -100
    if "softcap" not in options:  # p is the gradient that is left of logp[0] beside the target
        p = -torch.autograd.grad(logp[0], bias)[0].double()
        p[0] += 1
        assert abs(p.sum().item() - 1) < 1e-5
        z = (weight.double() @ hidden[0].double() - 100) / options.get("temperature", 1.0)
        torch.testing.assert_close(p, z.softmax(0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("V", [1, 1000, 5000])
def test_rows_end_where_they_end(V):
    """LPK-5: what lies behind a row of the tile in memory is never read, nor written."""
    fold, to_gradient = logprob.row_functions(torch.zeros(1), torch.float32)
    buffer = torch.full((3, V + 40), float("nan"))
    z = buffer[:, :V]
    z.copy_(torch.randn(3, V))
    expected = z.logsumexp(1)
    stats = torch.zeros(4, 3)
    stats[0] = logprob.LOWEST
    column = torch.tensor([0, V, -1])  # the last two targets are in other tiles
    first = z[:, 0].clone()
    fold(z, column, stats, 1.0)
    torch.testing.assert_close(stats[0] + stats[1].log(), expected)
    assert stats[3].tolist() == [first[0].item(), 0, 0]
    z.copy_(torch.randn(3, V))
    to_gradient(z, column, torch.ones(4, 3), 1.0, True)
    assert buffer[:, :V].isfinite().all() and buffer[:, V:].isnan().all()


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])  # LPK-7
def test_bias_and_offset_over_several_tiles(offset):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 8), torch.randn(9000, 8), torch.randn(9000)
    targets = torch.randint(9000, (7,))
    logp, entropy = token_logprobs(hidden, weight, targets, bias=bias + offset)
    plain = -F.cross_entropy(hidden @ weight.T + bias, targets, reduction="none")
    tolerance = 1e-3 if offset else 1e-5
    torch.testing.assert_close(logp, plain, rtol=0, atol=tolerance)
    expected = token_logprobs_reference(hidden, weight, targets, bias=bias)[1]
    torch.testing.assert_close(entropy, expected, rtol=0, atol=2e-3 if offset else 1e-5)


def test_logp_is_never_positive_and_certainty_has_no_entropy():
    torch.manual_seed(0)
    bias = torch.zeros(5000)
    bias[4321] = 60.0
    logp, entropy = token_logprobs(torch.randn(64, 4), torch.randn(5000, 4),
                                   torch.full((64,), 4321), bias=bias)
    assert (logp <= 0).all() and (logp > -1e-6).all() and entropy.abs().max() < 1e-5


INF = float("inf")


@pytest.mark.parametrize("logits, expected", [  # LPK-8
    ([0.0, -INF], 0.0), ([0.0, 0.0, -INF], 0.693147), ([-INF] * 9 + [0.0] + [-INF] * 9, 0.0)])
def test_impossible_words(small_tiles, logits, expected):
    bias = torch.tensor(logits)
    target = int(bias.argmax())
    hidden = torch.ones(1, 2, requires_grad=True)
    weight = torch.zeros(len(logits), 2, requires_grad=True)
    for fn in (token_logprobs, token_logprobs_reference):
        logp, entropy = fn(hidden, weight, torch.tensor([target]), bias=bias)
        torch.testing.assert_close(entropy, torch.tensor([expected]))
        torch.testing.assert_close(logp, torch.tensor([-expected]))
        for grad in torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight)):
            assert grad.isfinite().all()
        logp, entropy = fn(hidden, weight, torch.tensor([int(bias.argmin())]), bias=bias)
        assert logp.item() == -INF and entropy.isfinite().all()


def test_half_precision_extremes():
    hidden = torch.ones(1, 1, dtype=torch.float16)
    weight = torch.tensor([[65504.0], [-65504.0]], dtype=torch.float16, requires_grad=True)
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([0]))
    assert logp.item() == 0 and entropy.item() == 0 and logp.dtype == torch.float32
    (grad,) = torch.autograd.grad((logp + entropy).sum(), weight)
    assert grad.dtype == torch.float16 and grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_have_fp32_statistics(dtype):
    hidden, weight, _, targets = head(N=20, H=16, V=5000, dtype=dtype)
    logp, entropy = token_logprobs(hidden, weight, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    plain, plain_entropy = token_logprobs_reference(hidden, weight, targets)
    torch.testing.assert_close(logp, plain, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy, plain_entropy, rtol=1e-5, atol=1e-4)
    ours = torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight))
    exact = torch.autograd.grad(plain.sum() + plain_entropy.sum(), (hidden, weight))
    for a, b in zip(ours, exact):
        assert a.dtype == dtype
        assert (a - b).float().norm() < 0.02 * b.float().norm()


def test_autocast(small_tiles):
    """fp32 master weights: the product runs in bf16, the gradient of the weight arrives in fp32."""
    hidden, weight, bias, targets = head(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, entropy = token_logprobs(hidden, weight, targets, bias=bias)
        low = token_logprobs_reference(hidden, weight, targets, bias=bias)[0]
    full = token_logprobs(hidden, weight, targets, bias=bias)[0]
    assert logp.dtype == entropy.dtype == torch.float32 and not torch.equal(logp, full)
    torch.testing.assert_close(logp, low, rtol=0, atol=0.05)
    grads = torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight, bias))
    exact = torch.autograd.grad(full.sum(), (hidden, weight, bias))
    assert all(g.dtype == torch.float32 for g in grads)
    logp = token_logprobs(hidden, weight, targets, bias=bias)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # backward inside a context is no error
        again = torch.autograd.grad(logp.sum(), (hidden, weight, bias))
    for a, b in zip(again, exact):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.1)


def test_inputs_are_untouched_and_a_second_backward_agrees(small_tiles):  # LPK-2
    *leaves, targets = head()
    before = [x.detach().clone() for x in leaves]
    logp, entropy = token_logprobs(leaves[0], leaves[1], targets, bias=leaves[2])
    loss = logp.sum() + 0.3 * entropy.sum() + leaves[0].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves))


def test_offsets_beyond_32_bits():
    """LPK-4: row 2 of the tile begins 2^31 elements in (4 GB, of which three pages are touched)."""
    fold, to_gradient = logprob.row_functions(torch.zeros(1), torch.float32)
    z = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((3, 64), (2**30, 1))
    logits, column = torch.randn(3, 64).half(), torch.tensor([0, 1, 63])
    stats = torch.zeros(4, 3)
    stats[0] = logprob.LOWEST
    z.copy_(logits)
    fold(z, column, stats, 1.0)
    lse = logits.float().logsumexp(1)
    torch.testing.assert_close(stats[0] + stats[1].log(), lse)
    assert torch.equal(stats[3], logits.float().gather(1, column[:, None])[:, 0])
    z.copy_(logits)
    to_gradient(z, column, torch.stack([lse, lse, torch.ones(3), torch.zeros(3)]), 1.0, False)
    expected = F.one_hot(column, 64) - logits.float().softmax(1)
    torch.testing.assert_close(z.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("V", [29, 5000])
def test_logits_that_exist_are_read_and_kept(V):  # LPK-2
    torch.manual_seed(0)
    whole = torch.randn(6, V + 3)
    logits, targets = whole[:, 1:V + 1].requires_grad_(), torch.randint(V, (6,))
    before, weights = logits.detach().clone(), torch.randn(6)
    logp, entropy = logits_logprobs(logits, targets, 0.7)
    plain = torch.log_softmax(logits.double() / 0.7, -1)
    plain_entropy = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(logp.double(), plain.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy.double(), plain_entropy)
    loss = (logp * weights).sum() + entropy.sum() + logits.square().sum()  # logits used twice
    exact = ((plain.gather(1, targets[:, None])[:, 0] * weights).sum() + plain_entropy.sum()
             + logits.square().sum())
    for retain in (True, False):
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=retain)
        (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype, offset", [(torch.float32, 1e4), (torch.bfloat16, 100)])  # LPK-7
def test_an_offset_of_all_logits_changes_nothing(dtype, offset):
    torch.manual_seed(0)
    logits, targets = torch.randint(-20, 20, (4, 5000)).to(dtype), torch.randint(5000, (4,))
    for a, b in zip(logits_logprobs(logits, targets), logits_logprobs(logits + offset, targets)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_gradients_nobody_wants_are_not_made(small_tiles, trained):
    *leaves, targets = head()
    wanted = leaves[["hidden", "weight"].index(trained)]
    frozen = [x if x is wanted else x.detach() for x in leaves[:2]]
    token_logprobs(*frozen, targets)[0].sum().backward()
    expected = torch.autograd.grad(token_logprobs_reference(*leaves[:2], targets)[0].sum(), wanted)
    torch.testing.assert_close(wanted.grad, expected[0])
    assert sum(x.grad is not None for x in leaves) == 1


def test_no_tokens_and_odd_layouts(small_tiles):
    hidden, weight, bias, targets = head()
    logp, entropy = token_logprobs(hidden[:0], weight, targets[:0], bias=bias)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad.abs().sum() == 0 and hidden.grad.abs().sum() == 0
    strided = hidden.detach().T.contiguous().T[::2]
    assert not strided.is_contiguous()
    torch.testing.assert_close(token_logprobs(strided, weight.detach(), targets[::2])[0],
                               token_logprobs(hidden, weight, targets)[0][::2])


@pytest.mark.parametrize("change, words", [
    ({"hidden": torch.zeros(3, 5)}, "hidden"), ({"hidden": torch.zeros(1, 3, 4)}, "hidden"),
    ({"targets": torch.zeros(2, dtype=torch.long)}, "targets"),
    ({"targets": torch.tensor([0, -100, 1])}, "-100"), ({"targets": torch.tensor([0, 7, 1])}, "7"),
    ({"bias": torch.zeros(4)}, "bias"), ({"temperature": 0}, "temperature")])
def test_errors_name_the_argument(change, words):
    good = dict(hidden=torch.zeros(3, 4), weight=torch.zeros(7, 4), targets=torch.arange(3))
    for fn in (token_logprobs, token_logprobs_reference):
        with pytest.raises(ValueError, match=words):
            fn(**(good | change))
    with pytest.raises(ValueError, match="logits"):
        logits_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long))


class LargestTensor(TorchDispatchMode):
    """Notes the element count of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest, self.operations = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        self.operations += 1
        return out


@pytest.mark.parametrize("used", ["logp", "both"])
def test_the_logits_are_never_stored(small_tiles, used):
    N, H, V = 60, 5, 70
    hidden, weight, bias, targets = head(N, H, V)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with LargestTensor() as forward:
            logp, entropy = token_logprobs(hidden, weight, targets, bias=bias, softcap=3.0)
    own = [x for x in saved if all(x.data_ptr() != y.data_ptr() for y in (hidden, weight, bias,
                                                                        targets))]
    assert sorted(tuple(x.shape) for x in own) == [(N,), (N,)]  # log-sum-exp and entropy
    with LargestTensor() as backward:
        (logp.sum() if used == "logp" else logp.sum() + entropy.sum()).backward()
    assert forward.largest <= max(N * H, V * H) and backward.largest <= max(N * H, V * H)
    assert backward.operations > 100  # the mode really saw the backward pass
    with LargestTensor() as plain:
        token_logprobs_reference(hidden, weight, targets)
    assert plain.largest == N * V


@pytest.mark.parametrize("autocast", [False, True])
def test_trl_agrees(autocast):
    trl = pytest.importorskip("trl.trainer.utils")
    hidden, weight, _, targets = head(N=9, H=8, V=4200, dtype=torch.float32)
    with torch.autocast("cpu") if autocast else contextlib.nullcontext():
        logp, entropy = token_logprobs(hidden, weight, targets, temperature=0.8)
        logits = F.linear(hidden, weight).float() / 0.8
    torch.testing.assert_close(logp, trl.selective_log_softmax(logits, targets), atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy, trl.entropy_from_logits(logits), atol=1e-4, rtol=0)


def test_torch_linear_cross_entropy_agrees():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has F.linear_cross_entropy from 2.13 on")
    hidden, weight, _, targets = head(N=9, H=8, V=4200, dtype=torch.float32)
    weights = torch.randn(9)
    logp = token_logprobs(hidden, weight, targets)[0]
    theirs = -F.linear_cross_entropy(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(logp, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad((logp * weights).sum(), (hidden, weight)),
                    torch.autograd.grad((theirs * weights).sum(), (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
