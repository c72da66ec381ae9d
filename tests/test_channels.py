"""Hybrid states: exact against training by hand, tangent against dense blocks, interactions by definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import aftershock as ak
from aftershock.core.footprint import Curvature
from aftershock.errors import HiddenState, InvalidInput, OutOfMemory
from aftershock.theory.channels import HYBRIDS, channel_responses

from .cases import Case, advised, make
from .test_baselines import counters
from .test_changes import clip_and_step, gradients, probe_loss
from .test_operators import H, System

CHANNELS = ("theta", "m", "v")
KEYS = {"m": "exp_avg", "v": "exp_avg_sq"}


def parts_of(hybrid: str) -> list[str]:
    return [] if hybrid == "none" else hybrid.split("+")


def hybrid_by_hand(case: Case, path: ak.Path, other: object, probe: object, kept: list[str], at: int) -> list[float]:
    """Two live runs take step `at`, one on the other batch; its channels go into the first, which trains on."""
    runs = [case.twin(), case.twin()]
    for step in path.steps[: at + 1]:
        for run, batch in zip(runs, (step.batch, other if step.index == at else step.batch)):
            torch.set_rng_state(step.random.cpu)
            gradients(run, batch)
            clip_and_step(run)
    control, shocked = runs
    for p, q in zip(control.model.parameters(), shocked.model.parameters()):
        if "theta" in kept:
            p.data.copy_(q.data)
        for name in set(kept) - {"theta"}:
            control.optimizer.state[p][KEYS[name]].copy_(shocked.optimizer.state[q][KEYS[name]])
    losses = [probe_loss(control, probe, path.steps[0].random.cpu)]
    for step in path.steps[at + 1 :]:
        torch.set_rng_state(step.random.cpu)
        gradients(control, step.batch)
        clip_and_step(control)
        losses.append(probe_loss(control, probe, path.steps[0].random.cpu))
    return losses


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "dropout", "untouched_rows"])
def test_exact_hybrids_are_training_by_hand(name: str) -> None:
    case = make(name)
    path = case.path(5)
    others, probe = case.batches(2), case.batch()
    found = channel_responses(path.replace(others, at=1), probe, answers=("exact",))["response"].isel(answer=0)
    assert list(found["channel"].values) == list(HYBRIDS)
    control = hybrid_by_hand(case, path, others[0], probe, [], 1)
    for hybrid, i in itertools.product(HYBRIDS, range(2)):
        shocked = hybrid_by_hand(case, path, others[i], probe, parts_of(hybrid), 1)
        expected = np.array(shocked) - np.array(control)
        assert hybrid == "none" or np.abs(expected).max() > 1e-9
        # differences of losses of order one, a few ulps each
        np.testing.assert_allclose(found.sel(channel=hybrid).isel(change=i).values, expected, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "adam_coupled", "clipped"])
def test_tangent_hybrids_are_dense_blocks(name: str) -> None:
    """c̄_h Φ(t+h, t+1) D B ξ with D keeping the blocks of the hybrid; Φ, B and c from reverse mode."""
    system = System(name)
    d = system.layout.size
    xi = torch.randn(2, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = channel_responses(system.path.perturb(xi), system.probe, answers=("tangent",), scale=0.5)
    write_in = system.oracle(0).write_in(system.exact_oracle)
    readouts, transitions = system.dense_readouts(), [system.dense_transition(s) for s in range(1, H + 1)]
    for hybrid in HYBRIDS:
        keep = torch.cat([torch.full((d,), float(c in parts_of(hybrid)), dtype=torch.float64) for c in CHANNELS])
        x = keep[:, None] * (0.5 * write_in @ xi.mT)
        for h in range(1, H + 2):
            x = x if h == 1 else transitions[h - 2] @ x
            value = found["response"].isel(answer=0).sel(channel=hybrid, horizon=h).values
            expected = (readouts[h - 1] @ x).numpy()
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9 * float(x.norm()))
    size = float(abs(found["response"]).max())
    assert size > 0
    assert float(abs(found["interaction"].sel(channel=["theta+m", "theta+v", "m+v", "theta+m+v"])).max()) < 1e-14 * size


def test_interactions_peaks_and_the_whole_change() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(6), case.batch()
    change = path.replace(case.batches(3), at=1)
    data = channel_responses(change, probe)
    whole = change.response(probe)
    for name, answer in (("exact", whole.exact), ("tangent", whole.tangent)):
        total = data["response"].sel({"answer": name, "channel": "theta+m+v"})
        np.testing.assert_allclose(total.values, answer.isel(scale=0).values, rtol=1e-9, atol=1e-16)
    r = data["response"].sel({"answer": "exact"})
    i = data["interaction"].sel({"answer": "exact"})
    t, m, v, tm, tv, mv, all_three = (r.sel(channel=name).values for name in HYBRIDS[1:])
    np.testing.assert_allclose(i.sel(channel="m").values, m)
    np.testing.assert_allclose(i.sel(channel="m+v").values, mv - m - v, atol=1e-17)
    three = all_three - tm - tv - mv + t + m + v
    assert np.abs(three).max() > 1e-8
    np.testing.assert_allclose(i.sel(channel="theta+m+v").values, three, atol=1e-17)
    expected = np.abs(m).argmax(-1) + 1
    np.testing.assert_array_equal(data["peak_horizon"].sel({"answer": "exact", "channel": "m"}).values, expected)
    assert (data["peak_horizon"].sel(channel="none") == 1).all()
    assert not data["no_derivative"].any()
    assert not data["counts_differ"].any()
    assert data["response"].dims == ("answer", "channel", "change", "horizon")


def test_horizon_and_memory_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("clipped")
    change, probe = case.path(5).replace(case.batches(3)), case.batch()
    change.path.check()
    Curvature.of(change.path.trajectory)  # measured once for a path
    count = counters(monkeypatch)
    whole = channel_responses(change, probe)["response"]
    assert (count["products"], count["__init__"]) == (3 * 3 * 4, 4)  # three blocks of three changes over four steps
    assert count["gradient"] == 5 + 2 + 3 + 7 * 3 * 4  # readouts, two controls, candidates, seven runs a change
    np.testing.assert_array_equal(channel_responses(change, probe, horizon=2)["response"], whole.isel(horizon=[0, 1]))
    with pytest.raises(OutOfMemory, match="a hybrid of one change needs") as refused:
        channel_responses(change, probe, memory=1)
    count["__init__"] = 0
    one_by_one = channel_responses(change, probe, memory=advised(refused))["response"]
    assert count["__init__"] == 3 * 4
    np.testing.assert_allclose(one_by_one.values, whole.values, rtol=1e-12, atol=1e-18)
    assert channel_responses(change, probe, horizon=1)["no_derivative"].sum() == 0


def test_m_without_its_v_has_no_derivative_and_says_so() -> None:
    """New tokens: the shock puts m on rows whose v is zero; a hybrid with m but not v is where no slope exists."""
    case = make("untouched_rows")
    path = case.path(4)
    data = channel_responses(path.replace([torch.full((4, 6), 5)]), case.batch(), answers=("exact",))
    broken = data["no_derivative"].isel(change=0)
    # the row of token 5 in the embedding, whose later gradients are exactly zero; token 4's is not touched
    assert [int(broken.sel(channel=c)) for c in HYBRIDS] == [3 * (c in ("m", "theta+m")) for c in HYBRIDS]
    assert "no derivative" in broken.attrs["meaning"]


def test_all_channels_of_a_skip_are_the_skip() -> None:
    """Its step counts too, which no part of it has."""
    case = make("tanh_mlp")
    change, probe = case.path(4).skip(1), case.batch()
    data = channel_responses(change, probe)
    assert data["counts_differ"].all()
    whole = change.response(probe)
    for answer, expected in (("exact", whole.exact), ("tangent", whole.tangent)):
        found = data["response"].sel({"answer": answer, "channel": "theta+m+v"}).values
        np.testing.assert_allclose(found, expected.isel(scale=0).values, rtol=1e-12)
    counts = data["interaction"].sel({"answer": "tangent", "channel": "theta+m+v"}).values
    assert abs(counts[:, 0]).max() < 1e-15  # no step yet, so no count yet
    assert (abs(counts[:, 1:]) > 1e-9).all()


def test_a_hybrid_that_diverges_is_infinite_from_there_on() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0, eps=1e-300, weight_decay=0.0)
    batch = torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    path = ak.capture(model, optimizer, lambda m, b: m(b).square().exp().sum()).follow([zero, zero, zero])
    data = channel_responses(path.replace([batch]), batch, answers=("exact",))
    alone = data["response"].isel(answer=0, change=0).sel(channel="m").values
    assert alone[0] == 0
    assert (alone[1:] == math.inf).all()
    assert int(data["peak_horizon"].isel(answer=0, change=0).sel(channel="m")) == 2


def test_refusals() -> None:
    case = make("batch_norm")
    path, batch = case.path(3), case.batch()
    change = path.replace([case.batch()])
    evaluating = ak.Probe(batch=batch, evaluating=True)
    with pytest.raises(HiddenState, match="outside"):
        channel_responses(change, evaluating)
    assert np.isfinite(channel_responses(change, evaluating, answers=("exact",))["response"]).all()
    with pytest.raises(InvalidInput, match="answers are"):
        channel_responses(change, batch, answers=("adjoint",))
    with pytest.raises(InvalidInput, match="can be followed for 3"):
        channel_responses(change, batch, horizon=4)
    with pytest.raises(InvalidInput, match="no scale"):
        channel_responses(path.skip(0), batch, scale=0.5)
    with pytest.raises(InvalidInput, match="nonzero"):
        channel_responses(change, batch, scale=math.nan)
