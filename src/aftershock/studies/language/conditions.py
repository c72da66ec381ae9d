"""Which models and texts a run had, and which of them are the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

PAPER_MODELS = {"pythia410m": "410M", "pythia1b": "1B", "pythia14b": "1.4B"}
PAPER_DOMAINS = {"codeparrot": "CodeParrot", "openwebtext": "OpenWebText", "wikitext103": "WikiText-103"}
UNITS = {1e9: "B", 1e6: "M", 1e3: "k"}
POOLED = "Medians are over all candidates of the systems that a row names."
WEIGHTS = {
    "pretrained": "pretrained weights",
    "fresh": "they measure cost and numerics, and say nothing of a trained language model",
    "quantized": "pretrained",
}


@dataclass(frozen=True)
class Condition:
    """One system's model and text, by the paper's names where they are the paper's."""

    system: str
    model: str
    domain: str
    weights: str
    parameters: int
    note: str  # what a reader of its numbers must know
    paper_model: bool
    paper_domain: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.domain}{self._fresh}"

    @property
    def _fresh(self) -> str:
        """A row of weights drawn anew must not pass for one of trained ones."""
        return ", fresh weights" if self.weights == "fresh" else ""

    @property
    def size(self) -> str:
        """The row of the tables by size: the paper's label, or the model's name with its size."""
        label = size_label(self.parameters)
        return (label if self.paper_model else f"{self.model} ({label})") + self._fresh

    @property
    def from_paper(self) -> bool:
        return self.paper_model and self.paper_domain and self.weights == "pretrained"


def conditions(data: xr.Dataset) -> list[Condition]:
    """The conditions of a joined dataset, system by system."""
    names = ("system", "model", "domain", "weights", "note", "parameters")
    return [_condition(*map(str, row)) for row in zip(*(data[name].values for name in names))]


def by_size(data: xr.Dataset) -> xr.Dataset:
    """Language systems as tables show them: small models first, texts by the alphabet. Others stay as they are."""
    if "parameters" not in data:
        return data
    some = conditions(data)
    order = sorted(range(len(some)), key=lambda i: (some[i].parameters, some[i].model, some[i].domain.lower()))
    return data.isel(system=order)


def _condition(system: str, model: str, domain: str, weights: str, note: str, parameters: str) -> Condition:
    ours_model, ours_domain = _plain(model), _plain(domain)
    paper_domain = next((name for key, name in PAPER_DOMAINS.items() if ours_domain.startswith(key)), None)
    return Condition(
        system,
        PAPER_MODELS.get(ours_model, model.rpartition("/")[2]),
        paper_domain or domain.rpartition("/")[2],
        weights,
        int(parameters),
        note,
        ours_model in PAPER_MODELS,
        paper_domain is not None,
    )


def _plain(name: str) -> str:
    """EleutherAI/pythia-1.4b as pythia14b: how a hub, a folder and the paper write one name."""
    return "".join(c for c in name.rpartition("/")[2].lower() if c.isalnum())


def comparable(some: Sequence[Condition], expected: int) -> bool:
    """Whether a number over these systems is the paper's: its models and texts, and all `expected` of them."""
    return all(c.from_paper for c in some) and len({(c.model, c.domain) for c in some}) == expected


def size_label(parameters: int) -> str:
    """A number of parameters as the paper writes it: 0.41B, 1.0B; smaller ones as 2M, 900k."""
    for limit, unit, word in ((1e9, 1e9, ".1f"), (1e8, 1e9, ".2f"), (1e6, 1e6, ".0f"), (1e3, 1e3, ".0f")):
        if parameters >= limit:
            return f"{parameters / unit:{word}}{UNITS[unit]}"
    return str(parameters)


def described(some: Sequence[Condition]) -> str:
    """The models with their weights and texts, in a sentence each."""
    sentences = []
    for model in dict.fromkeys(c.model for c in some):
        own = [c for c in some if c.model == model]
        domains = ", ".join(dict.fromkeys(c.domain for c in own))
        shown = f"Pythia-{model}" if own[0].paper_model else model
        words = dict.fromkeys(word for c in own for word in (c.note, WEIGHTS.get(c.weights, c.weights)) if word)
        sentences.append(f"{shown} ({size_label(own[0].parameters)}; {'; '.join(words)}) on {domains}.")
    return " ".join(sentences)
