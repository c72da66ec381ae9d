"""Summaries, certificates, probes and files of a response."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import aftershock as ak
from aftershock.api.response import sparkline
from aftershock.errors import HiddenState, InvalidFile, InvalidInput
from aftershock.results.summaries import crossing, spike_margin, summarize

from .cases import Case, classes, cross_entropy, make, mlp


def array(rows: list[list[float]]) -> xr.DataArray:
    values = np.array(rows)[None, :, None, :]
    return xr.DataArray(
        values,
        dims=("answer", "change", "scale", "horizon"),
        coords={
            "answer": ["exact"],
            "change": [f"c{i}" for i in range(len(rows))],
            "scale": [1.0],
            "horizon": list(range(1, len(rows[0]) + 1)),
        },
    )


def test_summaries_by_hand() -> None:
    summary = summarize(array([[0.5, -2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])).isel(answer=0, scale=0)
    first, nothing = summary.isel(change=0), summary.isel(change=1)
    expected = {
        "peak": 2.0,
        "peak_horizon": 2,  # ties go to the earliest
        "delayed": True,
        "peak_sign": -1,
        "max_increase": 2.0,
        "max_decrease": 2.0,
        "total_abs": 5.5,
        "total_increase": 3.5,
        "total_decrease": 2.0,
    }
    assert {name: first[name].item() for name in expected} == expected
    assert nothing["peak"] == 0
    assert nothing["peak_sign"] == 0
    assert not nothing["delayed"]


def test_spike_margin_and_crossing() -> None:
    response = array([[0.1, 0.6, 2.0], [0.1, 0.2, 0.3]])
    control = xr.DataArray([1.0, 1.2, 5.0], dims="horizon", coords={"horizon": [1, 2, 3]})
    margin = spike_margin(control, 1.5)
    np.testing.assert_allclose(margin.values, [0.5, 0.3, -3.5])
    found = crossing(response, margin).isel(answer=0, scale=0).values
    assert found[0] == 2  # horizon 3 does not count: the control itself is over the threshold there
    assert np.isnan(found[1])


def test_validity_radius_is_the_largest_good_scale() -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    scales = [1 / 16, 1 / 4, 1.0, 64.0]
    response = path.replace(case.batches(3)).response(case.batch(), scales=scales)
    errors = response.certificate.errors
    good = errors["symmetric_error"].median("horizon") <= 0.2
    expected = (good * errors["scale"]).max("scale")
    np.testing.assert_array_equal(errors["validity_radius"].values, expected.values)
    assert float(errors["validity_radius"].sel({"answer": "tangent"}).max()) < 64
    assert float(errors["validity_radius"].min()) > 0


def test_without_the_exact_pair_nothing_is_called_proved() -> None:
    case = make("tanh_mlp")
    response = case.path(3).replace(case.batches(2)).response(case.batch(), answers=("tangent",))
    assert "Not verified" in str(response)
    assert "Do not trust" in str(response.certificate)


def test_clipping_that_switches_is_reported() -> None:
    case = make("tanh_mlp")
    batches = case.batches(4)
    norm = case.point().follow(batches[:1]).steps[0].clip.norm
    path = case.point().follow(batches, clip=1.5 * norm)  # the control's first step does not bind
    raw = path.point.loss.layout.compact(path.control(0).raw)
    response = path.perturb(9 * raw).response(case.batch())
    assert bool(response.data["clip_switched"].values.all())
    assert "Clipping switched" in str(response)


def test_untouched_coordinates_are_counted() -> None:
    case = make("untouched_rows")
    path = case.path(3)
    new_tokens = torch.randint(3, 6, (4, 6))
    response = path.replace([new_tokens, case.batch()]).response(case.batch())
    assert list(response.data["zero_v"].values) == [6, 6]
    assert list(response.data["zero_v_touched"].values) == [6, 0]
    assert "v = 0" in str(response.certificate)
    semilinear_error = abs(response.semilinear - response.exact).max() / abs(response.exact).max()
    tangent_error = abs(response.tangent - response.exact).max() / abs(response.exact).max()
    assert float(semilinear_error) < 0.1 * float(tangent_error)


def test_reset_second_moment_has_no_derivative_where_no_gradient_follows() -> None:
    """v = 0 with m ≠ 0: a token that stops occurring after its v was reset."""
    case = make("untouched_rows")
    with torch.no_grad():
        state = case.optimizer.state[case.model.embed.weight]
        state["exp_avg"][4:] = 0.1
    path = case.path(3)
    response = path.replace([torch.randint(3, 6, (4, 6))]).response(case.batch())
    assert int(response.data["no_derivative"].max()) == 6
    assert "no derivative exists" in str(response.certificate)


def test_a_parameter_that_the_control_does_not_use_has_no_derivative() -> None:
    """Its step count and decay start only with the change: the response jumps at α = 0."""
    case = make("unused_parameters")
    batches = case.batches(4)
    unused = next(i for i, (_, use_both) in enumerate(batches) if not use_both)
    path = case.point().follow(batches)
    response = path.replace([batches[unused + 1]], at=unused).response(case.batch(), horizon=1)
    assert int(response.data["no_derivative"].max()) == 12


# --- probes


def test_own_loss_is_the_next_steps_loss() -> None:
    case = make("dropout")
    path = case.path(5)
    response = path.replace([case.batch()]).response(ak.own_loss)
    assert list(response.data["horizon"].values) == [1, 2, 3, 4]
    np.testing.assert_allclose(response.data["control"].values, path.losses[1:], rtol=1e-12)


def test_any_function_of_the_model_can_be_watched() -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    response = path.replace([case.batch()]).response(lambda model: model[0].weight.square().sum(), scales=[0.01])
    layout = path.point.loss.layout
    norms = [layout.by_name(path.trajectory.state(h).theta)["0.weight"].square().sum() for h in range(1, 5)]
    np.testing.assert_allclose(response.data["control"].values, [float(n) for n in norms])
    assert float(response.certificate.errors["nrmse"].max()) < 0.1
    with pytest.raises(InvalidInput, match="probe is needed"):
        path.skip(0).response(None)


def test_eval_probe_of_batch_norm_has_an_exact_answer_only() -> None:
    """Running statistics are state outside (θ, m, v): a θ-only readout would be wrong."""
    case = make("batch_norm")
    path = case.path(4)
    probe = ak.Probe(case.batch(), evaluating=True)
    change = path.replace([case.batch()])
    response = change.response(probe)
    assert list(response.data["answer"].values) == ["exact"]
    assert "Only the exact response is given" in str(response)
    with pytest.raises(HiddenState, match="buffers that training moves"):
        change.response(probe, answers=("tangent",))
    with pytest.raises(HiddenState):
        path.rank([case.batch()], probe)
    assert list(change.response(case.batch()).data["answer"].values) == ["exact", "semilinear", "tangent"]


def test_eval_mode_turns_dropout_off_for_the_probe_alone() -> None:
    case = make("dropout")
    path = case.path(3)
    probe = case.batch()
    on = path.skip(0).response(probe).data["control"].values
    off = path.skip(0).response(ak.Probe(probe, evaluating=True)).data["control"].values
    again = path.skip(0).response(probe).data["control"].values
    assert (on != off).all()
    np.testing.assert_array_equal(on, again)


# --- files and words


def test_save_and_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = make("tanh_mlp")
    response = case.path(3).replace(case.batches(2)).response(case.batch(), scales=[0.5, 1.0])
    target = tmp_path / "deep" / "response.zarr"
    response.save(target)
    response.save(target)  # again, over itself
    loaded = ak.load_response(target)
    xr.testing.assert_identical(loaded.data, response.data)
    assert str(loaded) == str(response)
    assert sorted(p.name for p in target.parent.iterdir()) == ["response.zarr"]
    with pytest.raises(InvalidFile, match="no saved response"):
        ak.load_response(tmp_path / "nowhere")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "zarr.json").write_text("{")
    with pytest.raises(InvalidFile, match="damaged or not"):
        ak.load_response(tmp_path / "junk")


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    case = make("tanh_mlp")
    response = case.path(2).skip(0).response(case.batch())
    response.save(tmp_path / "r")
    monkeypatch.setattr(xr.Dataset, "to_zarr", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        response.save(tmp_path / "r")
    monkeypatch.undo()
    xr.testing.assert_identical(ak.load_response(tmp_path / "r").data, response.data)
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def curves(rows: dict[str, list[float]], answers: Sequence[str] = ("exact",)) -> ak.Response:
    """A response with these curves, the same for every answer."""
    count, horizons = len(rows), len(next(iter(rows.values())))
    values = np.array([list(rows.values())] * len(answers))[:, :, None]
    per_change = {name: ("change", np.zeros(count, int)) for name in ("zero_v", "zero_v_touched", "no_derivative")}
    return ak.Response(
        xr.Dataset(
            {
                "response": (("answer", "change", "scale", "horizon"), values),
                "control": ("horizon", np.full(horizons, 2.0)),
                "noise_floor": ("horizon", np.full(horizons, 1e-12)),
                "clip_switched": (("change", "scale"), np.zeros((count, 1), bool)),
                **per_change,
                "at": 7,
            },
            {"answer": list(answers), "change": list(rows), "scale": [1.0], "horizon": list(range(1, horizons + 1))},
        )
    )


def test_the_table_is_in_the_order_that_its_heading_names() -> None:
    nan = float("nan")
    response = curves({"small": [0.1, 0.2], "none": [nan, nan], "down": [-0.5, -3.0], "tie": [0.2, 0.1], "up": [1, 2]})
    assert response.order == ["down", "up", "small", "tie", "none"]  # by size; ties as given; what is missing last
    heading, _, *rows = response.table().splitlines()
    assert heading == "Changes by the size of their exact peak at scale 1, largest first:"
    assert [row.split()[0] for row in rows] == response.order
    assert [row.split()[2] for row in rows[:4]] == ["-3", "+2", "+0.2", "+0.2"]
    many = curves({f"c{i}": [float(i)] for i in range(20)}, ("tangent", "semilinear"))
    assert "their semilinear peak" in many.table()
    assert many.table().endswith("(8 more changes with smaller peaks; see .summary)")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": [0.1, -0.5]}, "lowers the loss most 2 states after it: 2 → 1.5 (-0.5, after +0.1 in the first)."),
        ({"a": [0.5, 0.1]}, "raises the loss most in the first state after it: 2 → 2.5 (+0.5)."),
        ({"a": [0.1, 0.5], "b": [0.1, 0.0]}, "(+0.5); 1 of 2 changes peak later than the first state."),
        ({"a": [0.0, 0.0]}, "'a' at step 7 does not move the loss at all."),
    ],
)
def test_the_verdict_carries_its_sign(rows: dict[str, list[float]], said: str) -> None:
    assert said in curves(rows).verdict


def test_the_best_answer_is_the_most_exact_that_was_run() -> None:
    rows = {"a": [0.1, 0.2]}
    assert curves(rows, ("tangent", "semilinear", "exact")).best_answer == "exact"
    best = curves(rows, ("tangent", "semilinear"))
    assert best.best_answer == "semilinear"
    assert best.verdict.endswith("(predicted by semilinear, not verified).")
    assert curves(rows, ("tangent",)).best_answer == "tangent"
    assert not hasattr(best, "endpoint")


def test_a_sparkline_has_a_mark_for_what_is_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    assert sparkline([1.0, -2.0]) == "▅█  (+ then − from h=2)"
    assert sparkline([1.0, 2.0, inf]) == "▅█∞  (+)"
    assert sparkline([-inf, nan]) == "∞·  (− then nothing from h=2)"
    assert sparkline([0.0]) == "▁  (0)"


def test_float32_noise_is_said() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    case = Case("f32", model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy, classes((4,)))
    case.train(case.batches(3))
    path = case.path(3)
    layout = path.point.loss.layout
    tiny = torch.full((layout.size,), 1e-9)
    text = str(path.perturb(tiny).response(case.batch()))
    assert "do not trust any sign" in text
    lifted = case.point().to(dtype=torch.float64).follow([s.batch for s in path.steps])
    assert "do not trust any sign" not in str(lifted.perturb(tiny).response(case.batch()))


def test_import_is_light() -> None:
    code = "import sys, aftershock; print([m for m in ('xarray', 'plotly', 'zarr', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_estimate_before_the_work() -> None:
    case = make("tanh_mlp")
    change = case.path(6).replace(case.batches(5))
    small = change.estimate(case.batch(), answers=("exact",))
    large = change.estimate(case.batch(), scales=[0.5, 1.0])
    assert 0 < small.gradients < large.gradients
    assert 0 < small.seconds < large.seconds
    assert "gradients" in str(large)
    vector = change.path.point.loss.layout.padded_size * 8
    assert large.memory >= 5 * 12 * vector


def test_hooks_of_the_user_stay_silent() -> None:
    case = make("tanh_mlp")
    seen: list[nn.Module] = []
    case.model[0].register_forward_hook(lambda module, *_: seen.append(module))
    case.point(hooks="ignore").follow(case.batches(3)).skip(0).response(case.batch())
    assert seen == []


def test_a_response_that_does_not_exist_has_no_summary() -> None:
    nan = float("nan")
    curves = xr.DataArray([[1.0, -3.0], [nan, nan]], dims=("change", "horizon"), coords={"horizon": [1, 2]})
    found = summarize(curves)
    assert found["peak"].values[0] == 3
    assert found["total_abs"].values[0] == 4
    for name in ("peak", "total_abs", "total_increase", "total_decrease", "max_increase"):
        assert np.isnan(found[name].values[1])
    assert found["peak_sign"].values.tolist() == [-1, 0]


def test_the_headline_tells_two_losses_apart() -> None:
    case = make("tanh_mlp")
    response = case.path(3).set(0, lr=0.0101).response(case.batch(), horizon=1)
    before, after = re.findall(r"it: (\S+) → (\S+) \(", response.verdict)[0]
    assert before != after
    peak = float(response.exact.values[0, 0, 0])
    control = float(response.data["control"][0])
    assert f"{control:.4g}" == f"{control + peak:.4g}", "four digits would do"
    assert math.copysign(1, float(after) - float(before)) == math.copysign(1, peak)
