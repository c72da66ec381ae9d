"""The language study on tiny models with fresh weights: against torch.optim by hand, and what bad input gets."""

from __future__ import annotations

import json
import sys
import types
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xarray as xr
from benchmarks import language_study as language_benchmark
from torch import Tensor, nn
from typer.testing import CliRunner

import aftershock as ak
from aftershock import theory
from aftershock.commands import cli
from aftershock.core import path_plans, playback
from aftershock.core.noise import noise_floor
from aftershock.errors import InvalidFile, InvalidInput, InvalidLoss, OutOfMemory, WrongHessian
from aftershock.studies.carried import CarriedStore
from aftershock.studies.language import models, recipe, scene, text
from aftershock.studies.language.recipe import language_study, measured, require_same_sources
from aftershock.studies.language.scene import Protocol, Scene, logits_of, prepare
from aftershock.studies.results import SystemResults, join_systems
from aftershock.studies.study import Study

transformers = pytest.importorskip("transformers")

TINY = Protocol(sequences=40, length=6, continuation=8, references=2, candidates=2, horizon=3)
WORDS = [f"w{i}" for i in range(8)]
SHAPE = {
    "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 8,
    "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    # other names, tied, learned positions, and dropout, which the study leaves off
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, n_inner=16, vocab_size=8, n_positions=16, bos_token_id=0, eos_token_id=0
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, a tokenizer of eight words, and a text of them."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("language")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(folder / name)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    draws = np.random.default_rng(0)
    (folder / "words.txt").write_text("\n".join(" ".join(draws.choice(WORDS, 12)) for _ in range(40)))
    return folder


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "QUICK", TINY)


def study(folder: Path, name: str, dtype: str = "float64", **options: Any) -> Study:
    return language_study(
        [str(folder / name)], [str(folder / "words.txt")], tokenizer=folder / "tokenizer.json", quick=True,
        dtypes=[dtype], **options,
    )  # fmt: skip


def one(folder: Path, name: str, dtype: str = "float64", device: str = "cpu") -> Scene:
    made = study(folder, name, dtype)
    (system,) = made.systems
    found = made.run.keywords["grid"][system.kind]  # type: ignore[attr-defined]
    return prepare(system, *found, folder / "tokenizer.json", TINY, device)


@cache
def reruns(folder: Path, name: str) -> tuple[Scene, xr.Dataset]:
    """A system in float64 with its exact responses and finite differences."""
    made = one(folder, name)
    change = made.path.replace(made.candidates)
    return made, theory.logit_tangent(change, made.probe, logits_of, scales=TINY.scales)


@cache
def found(folder: Path) -> tuple[Scene, xr.Dataset]:
    """The NeoX in float64, with everything that the study measures."""
    made, _ = reruns(folder, "neox")
    return made, measured(made)


# --- the numbers, by hand


class Loop:
    """Plain training by torch: the same model, sequences and optimizer, nothing of aftershock."""

    def __init__(self, folder: Path, name: str, tokens: Tensor) -> None:
        options = {"dtype": torch.float64, "attn_implementation": "eager"}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, **options).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
        self.tokens = tokens

    def loss(self, *which: int) -> Tensor:
        ids = self.tokens[list(which)]
        with mock.patch.object(torch, "float32", torch.float64):  # the types that norms and softmaxes ask for by name
            logits = self.model(ids[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def gradient(self, *which: int) -> list[Tensor]:
        return [g.clone() for g in torch.autograd.grad(self.loss(*which), list(self.model.parameters()))]

    def step(self, gradient: list[Tensor]) -> None:
        for parameter, grad in zip(self.model.parameters(), gradient):
            parameter.grad = grad
        self.optimizer.step()


def by_hand(folder: Path, name: str, tokens: Tensor, candidate: int | None, scale: float) -> list[float]:
    """The probe's loss at every horizon of one run."""
    run, used = Loop(folder, name, tokens), TINY.continuation
    for i in range(used):
        run.step(run.gradient(i))
    control = [(a + b) / 2 for a, b in zip(run.gradient(used), run.gradient(used + 1))]
    if candidate is not None:
        other = run.gradient(used + 2 + candidate)
        control = [g + scale * (o - g) for g, o in zip(control, other)]
    run.step(control)
    first, losses = used + 2 + TINY.candidates, []
    for h in range(TINY.horizon):
        losses.append(float(run.loss(TINY.used - 2, TINY.used - 1).detach()))
        if h + 1 < TINY.horizon:
            run.step(run.gradient(first + h))
    return losses


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_responses_are_those_of_a_plain_loop(folder: Path, name: str) -> None:
    made, data = reruns(folder, name)
    control = by_hand(folder, name, made.tokens, None, 0.0)
    off = 1e-12  # float64 rounding of losses of about 2, summed in another order; seen: equal to the bit
    assert np.allclose(data["control"], control, rtol=0, atol=off)
    for candidate, scale in ((0, 1.0), (1, 0.0625)):
        truth = np.subtract(by_hand(folder, name, made.tokens, candidate, scale), control)
        assert np.abs(truth).min() > 1e4 * off
        assert np.allclose(data["exact"].sel(scale=scale)[candidate], truth, rtol=0, atol=off)


def test_predictions_hybrids_and_norms_of_the_same_system(folder: Path) -> None:
    made, data = found(folder)
    response = data["response"]
    assert np.array_equal(response.sel(answer="exact"), reruns(folder, "neox")[1]["exact"])
    # semilinear is exact up to the gradient's curvature, and a tangent up to the scale: both far from zero here
    small = response.sel(scale=0.0625)
    size = float(abs(small.sel(answer="exact")).max())
    assert float(abs(small.sel(answer="semilinear") - small.sel(answer="exact")).max()) < 1e-3 * size
    assert np.allclose(response.sel(answer="tangent", scale=0.25), 0.25 * response.sel(answer="tangent", scale=1.0))
    channels = data["channel_exact"]
    assert list(channels["channel"].values) == ["000", "100", "010", "001", "110", "101", "011", "111"]
    assert np.allclose(channels.sel(channel="111"), response.sel(answer="exact", scale=1.0, change=0), rtol=1e-9)
    assert (channels.sel(channel="000") == 0).all()
    assert float(abs(channels.sel(channel="010") - channels.sel(channel="111")).max()) > 0.1 * size
    run, used = Loop(folder, "neox", made.tokens), TINY.continuation
    for i in range(used):
        run.step(run.gradient(i))
    before = [p.clone() for p in run.model.parameters()]
    mean = [(a + b) / 2 for a, b in zip(run.gradient(used), run.gradient(used + 1))]
    xi = torch.cat([(o - g).flatten() for g, o in zip(mean, run.gradient(used + 2))])
    assert float(data["gradient_norm"][0]) == pytest.approx(float(xi.norm()), rel=1e-10)
    assert 0 < float(data["write_norm"][0]) < 1e-3 * float(torch.cat([p.detach().flatten() for p in before]).norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_is_float64_throughout(folder: Path, name: str) -> None:
    """Norms and softmaxes of transformers go through float32, which left a noise of 1e-9 in a float64 study."""
    made, data = reruns(folder, name)
    noise = noise_floor(made.path.watch(0, made.probe), torch.as_tensor(data["control"].values))
    assert 0 < float(noise.max()) < 1e-14


def words_and_next(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    return model(batch[:, :-1]), batch[:, 1:]


def test_the_error_of_finite_differences_falls_as_the_square_of_the_step() -> None:
    torch.manual_seed(0)
    layers = nn.Embedding(8, 6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return theory.token_loss(*words_and_next(model, batch))

    batches = [torch.randint(8, (4, 9)) for _ in range(28)]
    for batch in batches[:20]:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    change = ak.capture(model, optimizer, loss_fn).follow(batches[20:24]).replace(batches[24:27])
    tangent = change.response(batches[27], answers=("tangent",)).tangent.isel(scale=0).values
    steps = (0.04, 0.02, 0.01)
    data = theory.logit_tangent(change, batches[27], words_and_next, steps=steps)
    errors = [float(np.abs(data["derivative"].sel(fd_step=step).values - tangent).max()) for step in steps]
    assert errors[-1] < 1e-3 * np.abs(tangent).max()
    # 4 for each halving, but for the next even order, of the size of ε²
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.02)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.02)


def test_losses_keep_the_digits_of_their_logits() -> None:
    z = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10).view(2, 5) % 7
    rows = z.double().numpy().reshape(10, 7)
    truth = np.log(np.exp(rows).sum(1)) - rows[np.arange(10), labels.flatten()]
    assert float(theory.token_loss(z, labels)) == pytest.approx(truth.mean(), rel=1e-14)
    labels[0, 0] = -100  # not counted
    assert float(theory.token_loss(z, labels)) == pytest.approx(truth[1:].mean(), rel=1e-14)


def test_rows_read_together_are_those_read_alone(folder: Path) -> None:
    made = one(folder, "neox")
    change = made.path.replace(made.candidates[:1])
    alone = theory.logit_tangent(change, made.probe, logits_of, steps=(0.5,))
    assert change.path.point.loss.sharing.wanted is False
    change.path.point.loss.sharing.wanted = True  # as on a GPU
    together = theory.logit_tangent(change, made.probe, logits_of, steps=(0.5,))
    assert change.path.point.loss.sharing.tries("reading", 3)
    assert change.path.point.loss.sharing.compared("reading")
    for variable in ("exact", "derivative", "control"):
        assert np.allclose(together[variable], alone[variable], rtol=1e-6, atol=1e-13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_recorded_readings_are_plain_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for large in (0, 2**40):  # everything is recorded, and nothing
        monkeypatch.setattr(playback, "LARGE", large)
        made = one(folder, "neox", "float32", device="cuda")
        change = made.path.replace(made.candidates)
        change.path.point.loss.sharing.wanted = False
        answers.append(theory.logit_tangent(change, made.probe, logits_of, scales=TINY.scales))
        assert change.path.point.loss.player.has("reading") == (large == 0)
    for variable in ("exact", "derivative", "control"):
        # readings of float32 logits in float64: recorded kernels are the plain ones
        assert np.allclose(answers[0][variable], answers[1][variable], rtol=1e-5, atol=1e-9)


def test_a_budget_cuts_reruns_and_changes_nothing(folder: Path) -> None:
    made, data = found(folder)
    change = made.path.replace(made.candidates[:1])
    with pytest.raises(OutOfMemory, match=r"one rerun needs .* What would fit: memory="):
        theory.logit_tangent(change, made.probe, logits_of, memory=1000)
    tight = made.point.follow([made.control_batch, *made.future], memory=1)
    assert tight.trajectory.kept(1) is None
    for path in (made.path, tight):  # with the control's states in memory, and without
        change = path.replace([*made.candidates, made.control_batch])
        little = theory.logit_tangent(change, made.probe, logits_of, steps=(0.5,), memory="1MiB")
        assert np.array_equal(little["exact"][0, :2], data["response"].sel(answer="exact", scale=1.0))
        assert not little["exact"][0, 2].any()  # a change of nothing
        assert not little["derivative"][:, 2].any()
    with pytest.raises(InvalidInput, match="positive"):
        theory.logit_tangent(change, made.probe, logits_of, steps=(-0.5,))
    with pytest.raises(InvalidLoss, match=r"logits\(model, batch\) gives the logits and their labels.*TypeError"):
        theory.logit_tangent(change, made.probe, lambda model, batch: None)  # type: ignore[arg-type, return-value]


# --- the study


def test_the_study_runs_in_float32_and_its_results_travel(folder: Path, tmp_path: Path) -> None:
    name = "llama"
    made = study(folder, name, "float32")
    (system,) = made.systems
    assert system.name == f"{name}-words-float32-2026-0"
    data = made.run(system, made.pieces[0])["language"]
    assert data.sizes == {
        "answer": 3, "scale": 5, "change": 2, "horizon": 3, "fd_step": 6, "channel": 8, "part": 8
    }  # fmt: skip
    assert [str(data[key].values) for key in ("model", "domain", "weights", "dtype")] == [
        name, "words", "pretrained", "float32"
    ]  # fmt: skip
    assert not data.isnull().any().to_array().any()
    exact = data["response"].sel(answer="exact")
    assert (data["noise_floor"] > 0).all()
    assert float(abs(exact.sel(scale=1.0)).max()) > 20 * float(data["noise_floor"].max())
    truth = reruns(folder, name)[1]["exact"].sel(scale=1.0)
    assert np.allclose(exact.sel(scale=1.0), truth, rtol=0.05, atol=10 * float(data["noise_floor"].max()))

    store = CarriedStore(tmp_path, made)
    store.prepare()
    store.save(system.name, SystemResults({"language": data}, ({"machine": "here"},)))
    back = {system.name: store.load(system.name)}
    results = join_systems(made, back)
    assert results["language"].isel(system=0, drop=True).drop_attrs().equals(data[sorted(map(str, data.data_vars))])
    require_same_sources(made, results)
    results["language"]["weights"][:] = "fresh"
    with pytest.raises(InvalidFile, match="weights is fresh there and pretrained here"):
        require_same_sources(made, results)


def test_from_the_command_to_tables_and_page_and_the_same_by_carried_files_of_both_dtypes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "QUICK", replace(TINY, candidates=4))  # ranks need three
    grid = ["--model", str(folder / "llama"), str(folder / "neox"), "--text", str(folder / "words.txt"), "--quick"]
    grid += ["--tokenizer", str(folder / "tokenizer.json"), "--dtype", "float32", "float64"]

    def run(*words: str) -> None:
        result = CliRunner().invoke(cli.app, list(words))
        assert result.exit_code == 0, result.output
        assert "wrote tables.md, tables.json, values.json, report.html" in result.output

    run("reproduce", "language", *grid, "--workers", "1", "--out", str(tmp_path / "here"))
    monkeypatch.setattr(sys, "argv", ["study", *grid, "--out", str(tmp_path / "away"), "--device", "cpu"])
    language_benchmark.main()
    (tmp_path / "finer").mkdir()
    for file in (tmp_path / "away").glob("*-float64-*"):
        file.rename(tmp_path / "finer" / file.name)
    assert len(list((tmp_path / "finer").iterdir())) == 2
    run("gather", str(tmp_path / "home"), str(tmp_path / "away"), str(tmp_path / "finer"))

    def cells(out: str) -> list[dict[str, Any]]:
        found = json.loads((tmp_path / out / "tables.json").read_text())["cells"]
        return [cell for cell in found if cell["table"] != "text:exp3_cost"]  # seconds differ

    assert cells("home") == cells("here")
    ranking = [cell for cell in cells("here") if cell["table"] == "tab:app_exp3_ranking"]
    assert {"neox, words", "llama, words", "Median"} <= {cell["row"] for cell in ranking if cell["ours"] is not None}
    exponents = {cell["row"] for cell in cells("here") if cell["table"] == "text:exp3_exponents" and cell["systems"]}
    assert exponents == {f"{name}, words{dtype}" for name in ("neox", "llama") for dtype in ("", ", float64")} | {
        "Overall median"
    }
    (signs,) = [cell for cell in cells("here") if cell["row"] == "Signs that semilinear recovers (ours)"]
    assert signs["ours_text"].endswith(" of 8")  # four candidates of each model, in float32 alone
    for out in ("here", "home"):
        page = (tmp_path / out / "report.html").read_text()
        for told in ("Finite differences against the exact tangent", "Noise of finite differences, or real?", "llama"):
            assert told in page


def test_fresh_weights_are_said_plainly(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(models, "_on_hub", lambda repository: False)
    with pytest.warns(UserWarning, match="pythia-410m gets FRESH weights"):
        source = models.find_model("pythia-410m")
    assert (source.name, source.weights) == ("pythia-410m", "fresh")
    assert source.note.startswith("fresh weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert models.find_model("EleutherAI/pythia-1b", fresh=True).weights == "fresh"
    config = models.configuration(models.find_model("pythia-1.4b", fresh=True))
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in whole.parameters()) == 1_414_647_808  # as the hub's
    monkeypatch.setattr(models, "_on_hub", lambda repository: True)
    assert models.find_model("pythia-410m").place == "EleutherAI/pythia-410m"
    drawn = [models.build_model(models.find_model(f"x={folder / 'neox'}", fresh=True), torch.device("cpu"),
                                torch.float32, seed) for seed in (1, 1, 2)]  # fmt: skip
    lifted = models.build_model(models.find_model(f"x={folder / 'neox'}", fresh=True), torch.device("cpu"),
                                torch.float64, 1)  # fmt: skip
    for single, double in zip(drawn[0].parameters(), lifted.parameters()):
        assert torch.equal(single.double(), double)  # torch draws other numbers in float64
    embeddings = [model.get_input_embeddings().weight for model in drawn]
    assert torch.equal(embeddings[0], embeddings[1])
    assert not torch.equal(embeddings[0], embeddings[2])


def test_models_that_make_their_own_mask_are_left_to_it() -> None:
    tokens = torch.arange(5)[None] + 1
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "n_layer": 1,
             "n_embd": 8, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    for config, takes in ((transformers.GPT2Config(**small), True), (transformers.BloomConfig(**small), False)):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        mask = scene.causal_mask(model, tokens[:, :-1])
        assert (mask is not None) == takes
        batch = {"tokens": tokens, "mask": mask}
        logits, labels = logits_of(model, batch)
        changed = logits_of(model, {**batch, "tokens": tokens.index_fill(1, torch.tensor([3]), 7)})[0]
        assert torch.allclose(changed[:, :3], logits[:, :3], atol=1e-6)  # no token sees a later one
        assert torch.equal(labels, tokens[:, 1:])


def test_a_mixture_of_experts_runs_in_float64(tmp_path: Path) -> None:
    """Its fused products take float32 alone."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture")
    source = models.find_model(str(tmp_path / "mixture"))
    model = models.build_model(source, torch.device("cpu"), torch.float64, 0)
    loss = model(torch.arange(5)[None], use_cache=False).logits.square().sum()
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradient), list(model.parameters()))
    assert all(g.dtype == torch.float64 and g.isfinite().all() for g in second)
    assert any(g.any() for g in second)


def test_gguf_files_say_how_they_were_rounded(tmp_path: Path) -> None:
    import gguf

    shape = {**SHAPE, "hidden_size": 32, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for kind, weights in ((gguf.GGMLQuantizationType.F32, "pretrained"), (gguf.GGMLQuantizationType.Q8_0, "quantized")):
        path = tmp_path / f"Tiny-{kind.name}-instruct.gguf"
        write_gguf(path, model, kind)
        source = models.find_model(str(path))
        assert (source.name, source.weights) == (f"Tiny-{kind.name}-instruct", weights)
        assert (
            source.note
            == ("" if weights == "pretrained" else "most weights were rounded to Q8_0; ") + "instruction-tuned"
        )
        loaded = models.build_model(source, torch.device("cpu"), torch.float32, 0)
        ids = torch.arange(8)[None]
        off = float((loaded(ids).logits - model.eval()(ids).logits).detach().abs().max())
        assert off < (1e-5 if weights == "pretrained" else 1e-2)
        assert weights == "pretrained" or off > 1e-6
    with pytest.raises(InvalidFile, match="no file"):
        models.find_model(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(InvalidFile, match="cannot be read as a GGUF file"):
        models.find_model(str(tmp_path / "bad.gguf"))


def test_a_gguf_file_is_read_once_for_several_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    def written(seed: int) -> models.ModelSource:
        torch.manual_seed(seed)
        shape = {**SHAPE, "hidden_size": 32, "intermediate_size": 32}
        made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape))
        write_gguf(tmp_path / "tiny.gguf", made, gguf.GGMLQuantizationType.F32)
        return models.find_model(str(tmp_path / "tiny.gguf"))

    def build(source: models.ModelSource) -> nn.Module:
        return models.build_model(source, torch.device("cpu"), torch.float32, 0)

    reads = []
    own = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained",
        lambda *words, **options: reads.append(words) or own(*words, **options),
    )  # fmt: skip
    source = written(0)
    first = build(source)
    weights = torch.nn.utils.parameters_to_vector(first.parameters()).detach().clone()
    with torch.no_grad():
        for parameter in first.parameters():  # as training moves them
            parameter.add_(1)
    second = build(source)
    assert len(reads) == 1
    assert torch.equal(torch.nn.utils.parameters_to_vector(second.parameters()), weights)
    third = build(written(1))  # another file of the same name
    assert len(reads) == 2
    assert not torch.equal(torch.nn.utils.parameters_to_vector(third.parameters()), weights)


def write_gguf(path: Path, model: Any, kind: Any) -> None:
    """A Llama as llama.cpp stores it, matrices in the given type."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk.",
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        stored = parameter.detach()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp interleaves the two halves of a rotation
            heads = config.num_attention_heads
            stored = stored.view(heads, 2, -1, stored.shape[-1]).transpose(1, 2).reshape(stored.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        own = kind if stored.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(stored.numpy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- bad input


def refused(*words: object) -> str:
    result = CliRunner().invoke(cli.app, ["reproduce", *(str(word) for word in words)])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return str(result.stderr)


@pytest.mark.parametrize(
    "words",
    [
        "language --model a b --text c d=e --fresh --tokenizer t",
        "language --tokenizer t --fresh --text c --model a --model b --text d=e",
        "language --model=a --model b --fresh --text c d=e --tokenizer t",
        "--model a --model b --text c --text d=e --fresh --tokenizer t language",
    ],
)
def test_lists_of_models_and_texts(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recipe(*given: Any) -> None:
        asked.append(given[-1])
        raise InvalidInput("nothing is run here")

    monkeypatch.setattr(cli, "_recipe", recipe)
    assert "nothing is run here" in refused(*words.split())
    assert asked == [cli.LanguageOptions(("a", "b"), ("c", "d=e"), Path("t"), True)]


def test_what_is_missing_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_on_hub", lambda repository: False)
    words, model = folder / "words.txt", folder / "neox"
    assert "--model NAME_OR_PATH --text FILE_OR_DATASET" in refused("language")
    assert "there is no model 'nobody/nothing'" in refused("language", "--model", "nobody/nothing", "--text", words)
    assert "holds no model" in refused("language", "--model", folder, "--text", words)
    told = refused("language", "--model", model, "--text", tmp_path / "none.txt")
    assert "no text file" in told
    assert "give a UTF-8 file" in told
    told = refused("language", "--model", model, "--text", folder)
    assert f"{folder} is a folder" in told
    assert "name the file in it" in told
    assert "there is no text 'nothing'" in refused("language", "--model", model, "--text", "nothing")
    assert "the same name" in refused("language", "--model", model, "--model", model, "--text", words)
    assert "--data and --roots do not" in refused("language", "--model", model, "--text", words, "--data", folder)
    assert "belong to the language study" in refused("quadratic", "--model", model)
    with pytest.raises(InvalidInput, match="dtype is one of"):
        study(folder, "neox", "int8")
    encode = models.load_encoder(models.find_model(str(model)), folder / "tokenizer.json")
    with pytest.raises(InvalidInput, match=r"too short: it has 480 tokens, and 100 sequences of 6 tokens need 600"):
        text.token_sequences(text.find_text(str(words)), encode, 100, 6)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidFile, match="not a UTF-8 text"):
        text.token_sequences(text.find_text(str(tmp_path / "binary.txt")), encode, 1, 6)


def test_a_tokenizer_that_is_missing_or_belongs_to_another_model(folder: Path, tmp_path: Path) -> None:
    source = models.find_model(str(folder / "neox"))
    with pytest.raises(InvalidFile, match="there is no tokenizer at"):
        models.load_encoder(source, tmp_path / "none.json")
    with pytest.raises(InvalidInput, match=r"neox holds no tokenizer; give one with --tokenizer FILE"):
        models.load_encoder(source, None)
    with pytest.raises(InvalidInput, match=r"weights are fresh; give the file with --tokenizer"):
        models.load_encoder(models.find_model("pythia-410m", fresh=True), None)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InvalidFile, match=r"is not a tokenizer\.json"):
        models.load_encoder(source, tmp_path / "bad.json")
    network = models.build_model(source, torch.device("cpu"), torch.float32, 0)
    with pytest.raises(InvalidInput, match="it gives token 8, and neox knows 8 tokens"):
        scene.require_vocabulary(network, torch.tensor([[1, 8]]), "neox")
    with pytest.raises(InvalidInput, match="have 17 tokens before the last, and this model takes 16"):
        models.require_length(network, 17)


def test_a_text_with_the_models_padding_is_refused(folder: Path, tmp_path: Path) -> None:
    """torch gives the row of a padding token no gradient, whatever the loss says."""
    shape = {**SHAPE, "pad_token_id": 3}
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path)
    words = ["--text", folder / "words.txt", "--tokenizer", folder / "tokenizer.json", "--quick"]
    told = refused("language", "--model", tmp_path, *words, "--out", tmp_path / "out")
    assert "token 3, which" in told
    assert "for padding" in told
    assert "config.json" in told


def test_a_model_that_sees_later_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    shape = {**SHAPE, "pad_token_id": None}
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**shape)).save_pretrained(tmp_path / "both-ways")
    words = ["--text", folder / "words.txt", "--tokenizer", folder / "tokenizer.json", "--quick"]
    told = refused("language", "--model", tmp_path / "both-ways", *words, "--out", tmp_path / "out")
    assert "both-ways is no causal language model" in told


def test_a_card_that_is_too_small_is_told_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_plans, "free", lambda device: 20 * 2**30)
    with pytest.raises(OutOfMemory, match=r"1,400 million .* What would fit: a model of up to 4\d\d million"):
        path_plans.require_fit("big", 1_400_000_000, 4, scene.LEAST_VECTORS, torch.device("cpu"))
    path_plans.require_fit("small", 300_000_000, 4, scene.LEAST_VECTORS, torch.device("cpu"))

    def full(*arguments: Any) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words")

    monkeypatch.setattr(scene, "build_model", full)
    made = study(folder, "neox")
    with pytest.raises(OutOfMemory, match=r"does not fit on cpu \(CUDA out of memory.*2 GiB\.\)\. What would fit"):
        made.run(made.systems[0], made.pieces[0])


class Once(torch.autograd.Function):
    """An operation that is differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


def test_a_model_without_second_derivatives_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any) -> nn.Module:
        network = models.build_model(*arguments)
        network.gpt_neox.final_layer_norm = Kernel()  # type: ignore[union-attr]
        return network

    monkeypatch.setattr(scene, "build_model", build)
    made = study(folder, "neox")
    with pytest.raises(
        WrongHessian, match=r"no response could be trusted.*a custom autograd function.*a mixture of experts"
    ):
        made.run(made.systems[0], made.pieces[0])


def test_bfloat16_weights_are_refused_where_the_response_drowns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "QUICK", replace(TINY, candidates=1, horizon=2, continuation=2))
    made = study(folder, "neox", "bfloat16")
    with pytest.raises(InvalidInput, match=r"rounding alone moves .* cannot be told from noise.*bfloat16.*in float32"):
        made.run(made.systems[0], made.pieces[0])
    words = ["--text", folder / "words.txt", "--tokenizer", folder / "tokenizer.json", "--quick", "--workers", "1"]
    told = refused("language", "--model", folder / "neox", *words, "--dtype", "bfloat16", "--out", tmp_path / "out")
    assert told.startswith(
        "aftershock: neox-words-bfloat16-2026-0: rounding alone moves"
    )  # named once, without its piece
    assert told.count("neox-words") == 1


def test_a_response_near_the_noise_is_warned_of_scale_by_scale(folder: Path) -> None:
    made, data = found(folder)
    exact = data["response"].sel(answer="exact", drop=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe.judge_noise(made, exact, data["noise_floor"])
    sizes = np.full((2, 3, 3), 1e-3)  # [scale, change, horizon]
    sizes[0], sizes[1, 2] = 1e-6, 1e-6
    both = xr.DataArray(sizes, {"scale": [0.0625, 1.0]}, ("scale", "change", "horizon"))
    noise = xr.DataArray(np.full(3, 1e-6), dims="horizon")
    with pytest.warns(UserWarning, match=r"are 3 of 3 at α = 0.0625, 1 of 3 at α = 1; .* left blank"):
        recipe.judge_noise(made, both, noise)
    with pytest.raises(InvalidInput, match="3 of 3 candidates cannot be told from noise"):
        recipe.judge_noise(made, both.isel(scale=[0]), noise)


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "neox" / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    source = models.find_model(f"pickled={tmp_path}")
    with pytest.raises(InvalidFile, match=r"pickled cannot be loaded from .*safetensors"):
        models.build_model(source, torch.device("cpu"), torch.float32, 0)


def test_datasets_of_the_hub_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*words: Any, **options: Any) -> Any:
        asked.append((*words, options))
        return iter([{"content": "w1 w2 "}, {"content": "w3"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = text.find_text("code=codeparrot")
    ids = text.token_sequences(source, lambda texts: [[int(w[1]) for w in t.split()] for t in texts], 1, 3)
    assert ids.tolist() == [[1, 2, 3]]
    assert asked == [("codeparrot/codeparrot-clean", None, {"split": "train", "streaming": True})]
    assert source.name == "code"
    wiki = text.find_text("wikitext-103")
    assert (wiki.name, wiki.place) == ("wikitext-103", "Salesforce/wikitext:wikitext-103-raw-v1")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: iter([{"x": 1}])))
    with pytest.raises(InvalidInput, match="no column text or content"):
        text.token_sequences(wiki, lambda texts: [[0]], 1, 3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInput, match=r"needs the package datasets: pip install .aftershock\[language\]"):
        text.token_sequences(wiki, lambda texts: [[0]], 1, 3)


def hub(asked: list[dict[str, Any]], gone: str = "") -> types.SimpleNamespace:
    """A stand-in for `datasets`: openwebtext is a program, whose rows are kept as parquet; `gone` cannot be reached."""

    def load_dataset(name: str, configuration: str | None = None, **options: Any) -> Any:
        asked.append({"name": name, "configuration": configuration, **options})
        if name == gone:
            raise ConnectionError("no hub")
        if "openwebtext" in name and "revision" not in options:
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return iter([{"text": "w1 w2 "}, {"text": "w3"}])

    return types.SimpleNamespace(load_dataset=load_dataset)


@pytest.mark.parametrize(("word", "part"), [("openwebtext", None), ("Skylion007/openwebtext:plain_text", "plain_text")])
def test_a_dataset_that_is_a_program_is_read_from_its_parquet(
    word: str, part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "datasets", hub(asked))
    source = text.find_text(word)
    ids = text.token_sequences(source, lambda texts: [[int(w[1]) for w in t.split()] for t in texts], 1, 3)
    assert ids.tolist() == [[1, 2, 3]]
    common = {"name": "Skylion007/openwebtext", "split": "train", "streaming": True}
    parquet = {"configuration": None, "data_dir": part, "revision": "refs/convert/parquet"}
    assert asked == [{**common, "configuration": part}, {**common, **parquet}]
    broken = types.SimpleNamespace(load_dataset=lambda *_, **__: exec('raise RuntimeError("another")'))
    monkeypatch.setitem(sys.modules, "datasets", broken)
    with pytest.raises(InvalidInput, match=r"Skylion007/openwebtext cannot be read \(RuntimeError: another\)"):
        text.require_text(source)


def test_a_text_that_cannot_be_had_is_told_before_anything_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    texts = ["wikitext-103", "openwebtext", "codeparrot"]
    monkeypatch.setitem(sys.modules, "datasets", hub(asked))
    assert len(recipe.language_study([str(folder / "neox")], texts, quick=True).systems) == 3
    monkeypatch.setitem(sys.modules, "datasets", hub(asked, gone="codeparrot/codeparrot-clean"))
    with pytest.raises(InvalidInput, match=r"codeparrot/codeparrot-clean cannot be read \(ConnectionError: no hub\)"):
        recipe.language_study([str(folder / "neox")], texts, quick=True)
