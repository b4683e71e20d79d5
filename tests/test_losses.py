"""Hand numbers, identities, gradient checks; "fixture" is section 6 of the reference notes, numbers
that OpenRLHF, verl and TRL were run to get."""

import math

import pytest
import torch
import torch.nn.functional as F

from nanorlhf.losses import (
    adaptive_kl,
    bradley_terry_loss,
    dpo_loss,
    explained_variance,
    gae,
    group_advantages,
    importance_weights,
    kl_estimate,
    ppo_policy_loss,
    ppo_stats,
    sft_loss,
    token_weights,
    value_loss,
    whiten,
)
from nanorlhf.utils import UserError

NAN = float("nan")
LOGP = torch.tensor([[-.2, -.4, -.1], [-.7, -.3, -.2]])
LOG_RATIO = torch.tensor([[.03, -.4, .01], [.02, .5, -.03]])
OLD = LOGP - LOG_RATIO
ADV = torch.tensor([[1, -.5, 0], [.3, -1.2, .5]])
MASK = torch.tensor([[1., 1, 0], [1, 1, 1]])


def close(value, expected, atol=1e-6):
    torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected), rtol=1e-5,
                               atol=atol, check_dtype=False)


def doubles(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# token weights: one sum, many means


CU = torch.tensor([0, 3, 53, 60, 150])  # GRPO-1: completions of 3, 50, 7, 90 tokens


def test_token_weights_by_hand():
    mask, cu = torch.tensor([0., 1, 1, 0, 1, 0, 0]), torch.tensor([0, 3, 5, 7])
    close(token_weights(mask, cu, "token"), mask / 3)
    close(token_weights(mask, cu, "sequence"), [0, 1 / 4, 1 / 4, 0, 1 / 2, 0, 0])  # 2 non-empty
    close(token_weights(mask, cu, "constant", max_tokens=10), mask / 30)
    for kind in ("token", "sequence"):
        close(token_weights(mask * 0, cu, kind), mask * 0)
    with pytest.raises(UserError, match="token, sequence, constant"):
        token_weights(mask, cu, "mean")


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_micro_batches_do_not_change_the_gradient(kind):  # SFT-4, GRPO-1
    N = int(CU[-1])
    mask = torch.ones(N)
    mask[CU[1:] - 1] = 0
    old, adv, start = doubles(N, seed=1), doubles(N, seed=2), doubles(N) * 0.3
    weights = token_weights(mask, CU, kind, max_tokens=128).double()

    def gradient(order, size):
        theta = torch.zeros(N, dtype=torch.float64, requires_grad=True)
        for i in range(0, 4, size):
            rows = torch.cat([torch.arange(CU[s], CU[s + 1]) for s in order[i:i + size]])
            logp = (old + start + theta)[rows]
            loss = ppo_policy_loss(logp, old[rows], adv[rows], weights[rows])
            (loss + sft_loss(logp, weights[rows])).backward()
        return theta.grad

    whole = gradient([0, 1, 2, 3], 4)
    assert whole.abs().sum() > 0.1
    for order, size in (([0, 1, 2, 3], 1), ([3, 0, 2, 1], 1), ([2, 3, 1, 0], 2)):
        torch.testing.assert_close(gradient(order, size), whole, rtol=1e-12, atol=1e-15)


def test_trl_reductions():
    """TRL's grpo, dapo and dr_grpo (grpo_trainer.py::_compute_loss): three weights of one sum."""
    x, mask = doubles(3, 8), torch.ones(3, 8, dtype=torch.float64)
    mask[0, 2:], mask[1, 7:] = 0, 0
    cu, flat = torch.tensor([0, 8, 16, 24]), mask.flatten()
    ours = {kind: sft_loss(-x.flatten(), token_weights(flat, cu, kind, max_tokens=8).double())
            for kind in ("sequence", "token", "constant")}
    close(ours["sequence"], ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean())  # grpo
    close(ours["token"], (x * mask).sum() / mask.sum())  # dapo
    close(ours["constant"], (x * mask).sum() / (3 * 8))  # dr_grpo


def test_agg_loss_fixture():
    mask, cu = MASK.flatten(), torch.tensor([0, 3, 6])
    for kind, expected in (("token", .02), ("sequence", .0583333), ("constant", .0166667)):
        close(sft_loss(-ADV.flatten(), token_weights(mask, cu, kind, max_tokens=3)), expected)
    close(sft_loss(-ADV, MASK), .1)


# supervised learning and preferences


def test_sft_loss():
    close(sft_loss(torch.tensor([-1., -2, -4]), torch.tensor([1., 0, .5])), 3.0)
    logp = torch.tensor([-1., NAN], requires_grad=True)
    loss = sft_loss(logp, torch.tensor([1., 0]))
    loss.backward()
    close(loss, 1.0)
    close(logp.grad, [-1., 0])


def test_bradley_terry_fixture():
    c, r, margin = torch.tensor([1, .2]), torch.tensor([.5, .6]), torch.tensor([.1, .3])
    close(bradley_terry_loss(c, r) / 2, .6935462)
    close(bradley_terry_loss(c, r), torch.log1p(torch.exp(r - c)).sum())
    close(bradley_terry_loss(c, r, margin) / 2, .8081007)
    close(bradley_terry_loss(c, r, centre_coef=.01) - bradley_terry_loss(c, r),
          .01 * (1.5 ** 2 + .8 ** 2))
    close(bradley_terry_loss(c, c) / 2, math.log(2))


@pytest.mark.parametrize("shapes", [((4,), (4, 1), None), ((4, 1), (4, 1), (4,)),
                                    ((4,), (4,), (1,)), ((4, 2), (4, 2), None)])
def test_scores_of_other_shapes_are_refused(shapes):
    """(P, 1) - (P,) would be (P, P), and a two-output head (P, 2), without an error."""
    with pytest.raises(ValueError, match="chosen|scores"):
        bradley_terry_loss(*(None if s is None else torch.zeros(s) for s in shapes))


PAIR = [torch.tensor(x) for x in ([-10., -12], [-11, -11.5], [-10.5, -12.2], [-10.8, -11])]


def test_dpo_fixture():
    close(dpo_loss(*PAIR, beta=.1) / 2, .6587596)
    close(dpo_loss(*PAIR, beta=.1, label_smoothing=.1) / 2, .6657596)
    close(dpo_loss(*PAIR, beta=.1, loss_type="ipo") / 2, 18.490002)
    close(dpo_loss(PAIR[0], PAIR[1], PAIR[0], PAIR[1]) / 2, math.log(2))


@pytest.mark.parametrize("loss_type, expected", [("sigmoid", .43749), ("hinge", .4), ("ipo", 1.0)])
def test_dpo_margin_six(loss_type, expected):  # DPO-8: beta .1, one-token replies
    zero, one = torch.zeros(1), torch.ones(1)
    loss = dpo_loss(zero + 6, zero, zero, zero, .1, loss_type, lengths=(one, one))
    close(loss, expected, atol=1e-5)


def test_ipo_is_a_matter_of_tokens_not_of_length():
    lengths = torch.tensor([3, 4]), torch.tensor([5, 2])
    short = dpo_loss(*PAIR, loss_type="ipo", lengths=lengths)
    long = dpo_loss(*(2 * x for x in PAIR), loss_type="ipo", lengths=[2 * n for n in lengths])
    close(long, short)
    c, r = (PAIR[0] - PAIR[2]) / lengths[0], (PAIR[1] - PAIR[3]) / lengths[1]  # TRL
    close(short, ((c - r - 1 / (2 * .1)) ** 2).sum())


def test_simpo():
    lengths = torch.tensor([5, 6]), torch.tensor([4, 5])
    delta = PAIR[0] / lengths[0] - PAIR[1] / lengths[1]
    for s in (0, .2):  # TRL: cpo_trainer.py::cpo_loss
        z = 2.0 * (delta - 1.6 / 2.0)
        expected = -(1 - s) * F.logsigmoid(z) - s * F.logsigmoid(-z)
        close(dpo_loss(PAIR[0], PAIR[1], None, None, 2.0, "simpo", s, lengths, gamma=1.6),
              expected.sum())
    with pytest.raises(UserError, match="lengths"):
        dpo_loss(*PAIR, loss_type="simpo")


@pytest.mark.parametrize("loss_type", ["ipo", "simpo"])
def test_an_empty_reply_divides_nothing_by_zero(loss_type):
    zero = torch.zeros(1)
    loss = dpo_loss(zero, zero - 2, zero, zero, loss_type=loss_type,
                    lengths=(torch.tensor([0]), torch.tensor([2])))
    assert loss.isfinite()


def test_dpo_refuses_what_it_would_have_to_ignore():
    with pytest.raises(UserError, match="sigmoid, ipo, hinge, simpo"):
        dpo_loss(*PAIR, loss_type="kto")
    for loss_type in ("ipo", "hinge"):
        with pytest.raises(UserError, match="label_smoothing"):
            dpo_loss(*PAIR, loss_type=loss_type, label_smoothing=.1)
    with pytest.raises(ValueError, match="ref_chosen"):
        dpo_loss(PAIR[0], PAIR[1], PAIR[2][:, None], PAIR[3])
    with pytest.raises(ValueError, match="chosen_length"):
        dpo_loss(*PAIR, loss_type="ipo", lengths=(torch.ones(2, 1), torch.ones(2)))


# PPO


def test_policy_loss_fixture():
    weights = MASK / MASK.sum()
    close(ppo_policy_loss(LOGP, OLD, ADV, weights), .1113456)
    stats = ppo_stats(LOGP, OLD, ADV, weights, .2, .2)
    close(stats["clip_frac"], .2)
    close((weights * kl_estimate(OLD, LOGP, "k1")).sum(), -.024)  # their ppo_kl
    r = LOG_RATIO.exp()
    close(stats["approx_kl"], (weights * (r - 1 - LOG_RATIO)).sum())
    close(stats["ratio_mean"], (weights * r).sum())
    close(stats["ratio_max"], math.exp(.5))
    close(stats["log_ratio_max"], .5)


def test_first_inner_step():
    """logp == old_logp: the ratio is 1, nothing clips, and the gradient is the policy gradient."""
    logp = LOGP.clone().requires_grad_()
    loss = ppo_policy_loss(logp, logp, ADV, MASK)  # GRPO-6: old_logp is a constant even so
    loss.backward()
    close(loss, -(MASK * ADV).sum())
    close(logp.grad, -MASK * ADV)
    stats = ppo_stats(logp, logp, ADV, MASK / 5, .2, .2)
    assert not any(x.requires_grad for x in stats.values())
    names = "approx_kl", "clip_frac", "ratio_mean", "ratio_max", "log_ratio_max"
    close([stats[name] for name in names], [0., 0, 1, 1, 0])


@pytest.mark.parametrize("ratio, advantage, clipped", [
    (1.3, 1, True), (1.3, -1, False), (.7, 1, False), (.7, -1, True), (1.1, 1, False),
    (.9, -1, False)])
def test_clipped_tokens_have_no_gradient(ratio, advantage, clipped):
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    one, A = torch.ones(1), torch.tensor([float(advantage)])
    ppo_policy_loss(logp, torch.zeros(1), A, one).backward()
    close(logp.grad, [0. if clipped else -ratio * advantage])
    assert not clipped or logp.grad.item() == 0
    assert ppo_stats(logp, torch.zeros(1), A, one, .2, .2)["clip_frac"] == clipped


def test_clip_higher_and_dual_clip():
    logp, zero, one = torch.tensor([1.25]).log(), torch.zeros(1), torch.ones(1)
    close(ppo_policy_loss(logp, zero, one, one), -1.2)
    close(ppo_policy_loss(logp, zero, one, one, clip_eps_high=.28), -1.25)
    logp = torch.tensor([5.0]).log().requires_grad_()
    close(ppo_policy_loss(logp, zero, -one, one), 5.0)
    loss = ppo_policy_loss(logp, zero, -one, one, dual_clip=3.0)
    loss.backward()
    close(loss, 3.0)
    assert logp.grad.item() == 0
    close(ppo_policy_loss(logp, zero, one, one, dual_clip=3.0), -1.2)  # only where A < 0


def test_huge_log_ratios_stay_finite():
    logp = torch.tensor([500., -500], requires_grad=True)
    loss = ppo_policy_loss(logp, torch.zeros(2), torch.tensor([-1., 1]), torch.ones(2))
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()


def test_value_loss_fixture():
    V, old, R = torch.tensor([[.1, .9, 0], [-.3, .2, .5]]), torch.zeros(2, 3), torch.ones(2, 3)
    close(value_loss(V, old, R, MASK, .2) / 5, .442)
    close(value_loss(V, old, R, MASK, .5) / 5, .364)
    close(value_loss(V, old, R, MASK), .5 * (MASK * (V - 1) ** 2).sum())


def test_gradients_in_fp64():
    mask = torch.tensor([1., 0, .5, 2, 1, 1], dtype=torch.float64)
    x, old, third = (doubles(6, seed=s) for s in range(3))
    checks = [
        lambda x: sft_loss(x, mask),
        lambda x: bradley_terry_loss(x, old, third, centre_coef=.1),
        lambda x: bradley_terry_loss(old, x),
        lambda x: ppo_policy_loss(x, old, third, mask, .1, .3),
        lambda x: ppo_policy_loss(x, old, third, mask, dual_clip=1.5),
        lambda x: value_loss(x, old, third, mask),
        lambda x: value_loss(x, old, third, mask, .4),
        *(lambda x, k=k: (mask * kl_estimate(x, old, k)).sum() for k in ("k1", "k2", "k3")),
    ]
    lengths = torch.tensor([3, 1, 2, 9, 1, 4]), torch.tensor([1, 2, 5, 2, 7, 1])
    checks += [lambda x, t=t: dpo_loss(x, old, third, -old, .3, t, lengths=lengths)
               for t in ("sigmoid", "ipo", "hinge", "simpo")]
    checks += [lambda x: dpo_loss(old, x, third, -old, .3, label_smoothing=.2)]
    for check in checks:
        assert torch.autograd.gradcheck(check, x.clone().requires_grad_())


@pytest.mark.parametrize("loss", [
    lambda x, a, b, m: sft_loss(x, m),
    lambda x, a, b, m: ppo_policy_loss(x, a, b, m, dual_clip=3.0),
    lambda x, a, b, m: value_loss(x, a, b, m, .2)])
def test_nan_in_padding_is_harmless(loss):
    mask = torch.tensor([1., 1, 0])
    inputs = [torch.tensor([.1, -.2, NAN]) * s for s in (1, 2, 3)]
    x = inputs[0].requires_grad_()
    value = loss(x, *inputs[1:], mask)
    value.backward()
    close(value, loss(*(t[:2].detach() for t in inputs), mask[:2]))
    assert x.grad.isfinite().all() and x.grad[2] == 0
    stats = ppo_stats(*inputs, mask, .2, .2)
    assert all(v.isfinite() for v in stats.values())


def test_other_shapes_than_the_mask_are_refused():
    x = torch.zeros(4)
    for call in (lambda: sft_loss(x, x[:, None]), lambda: value_loss(x, x, x[:, None], x),
                 lambda: ppo_policy_loss(x, x, x[:, None], x), lambda: whiten(x, x[:3]),
                 lambda: gae(x, x[:3], x, 1, 1), lambda: kl_estimate(x, x[:, None], "k1")):
        with pytest.raises(ValueError, match="shapes differ"):
            call()


# advantages


def test_gae_fixture():
    r = torch.tensor([[0., 0, 1], [0, 0, 0], [0, 2, NAN], [0, 0, 3]])
    V = torch.tensor([[.1, .2, .3], [0, .1, .2], [.5, .4, NAN], [.2, .2, .2]])
    mask = torch.tensor([[1., 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]])
    mask[1, 2] = 1
    advantages, returns = gae(r, V, mask, 1.0, .95)
    close(returns, [[.92675, .965, 1], [.0145, .01, 0], [1.92, 2, 0], [2.727, 2.86, 3]])
    close(advantages, (returns - V).masked_fill(mask == 0, 0))
    close(whiten(advantages, mask)[0, 0], -.338245)


def test_gae_ignores_what_is_masked():  # PPO-5, PPO-7
    one_hot, mask = torch.tensor([0., 1, 0]), torch.tensor([1, 1, 0])
    for junk in (100., -7, NAN):  # -7 makes the values integers, which must not round the results
        advantages, returns = gae(one_hot, torch.tensor([0, 0, junk]), mask, 1, .95)
        close(advantages, [.95, 1, 0])
        close(returns, [.95, 1, 0])
        close(whiten(advantages, mask), [-1., 1, 0])
    score_at_eos = torch.tensor([[0., 0, 1, 0, 0]])
    advantages, _ = gae(score_at_eos, torch.zeros(1, 5), torch.tensor([[1, 1, 1, 0, 0]]), 1, 1)
    close(advantages, [[1., 1, 1, 0, 0]])


def slow_gae(rewards, values, mask, gamma, lam):
    """One sequence, token by token, V and A carried across the holes as verl does."""
    advantages, following, A = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            A = rewards[t] + gamma * following - values[t] + gamma * lam * A
            advantages[t], following = A, values[t]
    return advantages


def test_gae_equals_the_loop_packed_or_not():
    torch.manual_seed(0)
    B, T = 5, 12
    rewards, values = doubles(B, T), doubles(B, T, seed=1)
    mask = (torch.rand(B, T) < .6).double()
    mask[3] = 0  # a sequence without any trained token
    advantages, returns = gae(rewards, values, mask, .98, .9)
    for i in range(B):
        expected = slow_gae(rewards[i].tolist(), values[i].tolist(), mask[i].tolist(), .98, .9)
        close(advantages[i], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    close(returns, (advantages + values) * mask, atol=1e-12)
    assert returns.dtype == torch.float64

    lengths = [12, 7, 1, 5, 9]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    packed = gae(rewards[real], values[real], mask[real], .98, .9, cu)
    cut = gae(rewards, values, mask * real, .98, .9)
    for a, b in zip(packed, cut):
        assert torch.equal(a, b[real])


def test_gae_limits():
    """lam = 1: return-to-go; lam = 0: one-step TD; nothing unmasked: zeros."""
    r, V, ones = doubles(1, 4), doubles(1, 4, seed=1), torch.ones(1, 4)
    _, returns = gae(r, V, ones, 1, 1)
    close(returns, r.flip(1).cumsum(1).flip(1))
    advantages, _ = gae(r, V, ones, .9, 0)
    close(advantages, r + .9 * F.pad(V[:, 1:], (0, 1)) - V)
    assert not any(x.any() for x in gae(r, V, ones * 0, .9, .9))
    assert gae(r[:, :0], V[:, :0], ones[:, :0], .9, .9)[0].shape == (1, 0)


def test_whiten():
    x, mask = torch.tensor([[1., 2, 3], [4, 5, 6]]), torch.tensor([[1., 1, 0], [1, 1, 1]])
    ours = whiten(x, mask)
    assert ours[0, 2] == 0
    real = ours[mask > 0]
    close([real.mean(), real.var(unbiased=False)], [0., 1])
    values = x[mask > 0]  # TRL and verl: masked_whiten, unbiased, first element -1.2538
    close(ours[0, 0] * (4 / 5) ** .5, -1.2538, atol=1e-4)
    close(real, (values - values.mean()) * torch.rsqrt(values.var(unbiased=False)))
    close(whiten(torch.full((3,), .1), torch.ones(3)), torch.zeros(3), atol=1e-3)
    close(whiten(torch.tensor([3., NAN]), torch.tensor([False, False])), [0., 0])
    close(whiten(torch.tensor([3., 5, NAN]), torch.tensor([True, True, False])), [-1., 1, 0])


def test_kl_fixture():
    close(kl_estimate(LOGP, OLD, "k1"), LOG_RATIO)
    close(kl_estimate(LOGP, OLD, "k2"), [[.00045, .08, .00005], [.0002, .125, .00045]])
    close(kl_estimate(LOGP, OLD, "k3"),
          [[.0004455, .0918247, .0000498], [.0001986, .1065307, .0004545]])


def test_kl_sign():
    """Means over the policy's own samples; the flipped sign would give -.2442 and .2158."""
    p, q = torch.tensor([.5, .3, .15, .05]), torch.full((4,), .25)
    for kind in ("k1", "k3"):
        close((p * kl_estimate(p.log(), q.log(), kind)).sum(), .2442, atol=1e-4)
        close((q * kl_estimate(q.log(), p.log(), kind)).sum(), .3112, atol=1e-4)
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    close(kl_estimate(p, p, "k3"), torch.zeros(4))


def test_kl_extremes():
    far = kl_estimate(torch.tensor([-1000., 1000, -15]), torch.zeros(3), "k3")
    close(far, [math.exp(20) - 21, 999, math.exp(15) - 16])
    tiny = kl_estimate(torch.tensor([1e-4]), torch.zeros(1), "k3")
    close(tiny * 1e9, [5.0], atol=1e-2)  # l^2 / 2, where exp(-l) - 1 + l would be all rounding
    with pytest.raises(UserError, match="k1, k2, k3"):
        kl_estimate(LOGP, OLD, "k4")


def test_only_k2_has_the_gradient_of_the_kl():
    """Exact expectation over the policy's samples, the sampling itself not differentiated."""
    logits, ref = doubles(6).requires_grad_(), doubles(6, seed=1).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    p = logp.exp().detach()
    k1, k2, k3 = (torch.autograd.grad((p * kl_estimate(logp, ref, kind)).sum(), logits,
                                      retain_graph=True)[0] for kind in ("k1", "k2", "k3"))
    torch.testing.assert_close(k2, exact)
    assert k1.abs().max() < 1e-12 and (k3 - exact).abs().max() > 1e-2


def test_adaptive_kl():
    close(adaptive_kl(.2, 12, 6, 1e4, 256), .201024)
    close(adaptive_kl(.2, 6, 6, 1e4, 256), .2)
    close(adaptive_kl(.2, 0, 6, 1e4, 256), .2 * (1 - .2 * .0256))
    close(adaptive_kl(.2, 6.6, 6, 1e4, 256), .2 * (1 + .1 * .0256))


@pytest.mark.parametrize("kind, expected", [
    ("grpo", [.7071, -.7071, -.7071, .7071]), ("dr_grpo", [.5, -.5, -.5, .5]),
    ("rloo", [1., -1, -1, 1])])
def test_group_fixture(kind, expected):
    close(group_advantages(torch.tensor([1, 0, 2, 3]), 2, kind), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_groups(kind):
    R = torch.tensor([1., 1, 0, 0, .1, .1, .1, .1, NAN, NAN, NAN, 5, NAN, NAN, NAN, NAN])
    A = group_advantages(R, 4, kind)
    assert A.shape == R.shape and (A[:2] > 0).all() and (A[2:4] < 0).all()
    assert (A[4:] == 0).all()  # GRPO-3 and GRPO-8: no spread, one reward, none at all
    close(A[:4].sum(), 0.)
    order = torch.tensor([2, 0, 3, 1])
    close(group_advantages(R[:4][order], 4, kind), A[:4][order])
    for value in (.1, 1 / 3, 1e6 + .1):  # the mean of equal numbers may be off by an ulp
        assert (group_advantages(torch.full((7,), value), 7, kind) == 0).all()


def test_an_abstaining_reward_stays_out_of_the_statistics():  # GRPO-5
    R = torch.tensor([1., NAN, 0, 1])
    rest = torch.tensor([0, 2, 3])
    for kind in ("grpo", "dr_grpo", "rloo"):
        A = group_advantages(R, 4, kind)
        assert A[1] == 0
        close(A[rest], group_advantages(R[rest], 3, kind))
    close(group_advantages(R, 4, "rloo")[0], 1 - 1 / 2)
    close(group_advantages(R, 4, "grpo")[0], (1 / 3) / (R[rest].std() + 1e-6))


def test_groups_that_cannot_be():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.ones(4), 1, "grpo")
    with pytest.raises(ValueError, match="whole groups"):
        group_advantages(torch.ones(5), 2, "grpo")
    with pytest.raises(UserError, match="grpo, dr_grpo, rloo"):
        group_advantages(torch.ones(4), 2, "gspo")


def test_importance_weights():
    old = torch.zeros(2, 3, requires_grad=True)
    weights = importance_weights(old, old - torch.tensor([[.3, -.1, 0], [2, 0, 500]]), MASK)
    close(weights, [[math.exp(.3), math.exp(-.1), 0], [2, 1, 2]])
    assert not weights.requires_grad
    junk = importance_weights(torch.tensor([0., NAN]), torch.tensor([0., -1]), torch.tensor([1, 0]))
    close(junk, [1., 0])


def test_explained_variance():
    returns, mask = torch.tensor([1., 2, 3, NAN]), torch.tensor([1., 1, 1, 0])
    close(explained_variance(returns, returns, mask), 1.0)
    close(explained_variance(returns + 5, returns, mask), 1.0)  # blind to a constant error
    close(explained_variance(returns * 0 + 7, returns, mask), 0.0)
    close(explained_variance(-returns, returns, mask), -3.0)
    for constant in (.3, 100.1):
        returns = torch.full((3,), constant)
        assert explained_variance(doubles(3).float(), returns, torch.ones(3)) == 0


def test_the_loss_goes_where_it_should():
    """Descent on the PPO loss raises the log-prob of good tokens and lowers that of bad ones."""
    logp = LOGP.clone().requires_grad_()
    ppo_policy_loss(logp, LOGP, ADV, MASK).backward()
    assert ((-logp.grad).sign() == (ADV * MASK).sign()).all()
    chosen = torch.zeros(1, requires_grad=True)
    dpo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1)).backward()
    assert chosen.grad < 0


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e20, 9e29])
def test_group_advantages_of_large_and_small_rewards(scale):
    rewards = torch.tensor([0.0, scale, scale, 0.0])
    A = group_advantages(rewards, 4, "grpo")
    assert A.dtype == torch.float32
    close(A, torch.tensor([-1.0, 1, 1, -1]) * 0.5 * scale / (3**-0.5 * scale + 1e-6))
