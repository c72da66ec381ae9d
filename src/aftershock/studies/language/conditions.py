"""Which models, texts and dtypes a run had, which of them are the paper's, and which are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import InvalidFile

if TYPE_CHECKING:
    import xarray as xr

PAPER_MODELS = {"pythia410m": "410M", "pythia1b": "1B", "pythia14b": "1.4B"}
PAPER_DOMAINS = {"codeparrot": "CodeParrot", "openwebtext": "OpenWebText", "wikitext103": "WikiText-103"}
UNITS = {1e9: "B", 1e6: "M", 1e3: "k"}
DTYPES = ("float32", "float64", "bfloat16")  # in the order in which they stand; the first that is there is pooled
POOLED = "Medians are over all candidates of the systems that a row names."
ONCE = (
    "Pooled numbers count a model and a text once, in float32 where it was run in that (torch's own; the paper names "
    "no dtype for its language models); float64 stands beside it where the question is what is noise."
)
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
    dtype: str
    digest: str  # of the text: another one may have its name
    note: str  # what a reader of its numbers must know
    paper_model: bool
    paper_domain: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.domain}{self._others}"

    @property
    def start(self) -> tuple[str, ...]:
        """What systems share that differ in the dtype alone; a system's name ends with its seed and index."""
        return (self.model, self.domain, self.digest, self.weights, *self.system.rsplit("-", 2)[1:])

    @property
    def _others(self) -> str:
        """A row of weights drawn anew must not pass for one of trained ones, nor one of float64 for one of float32."""
        fresh = ", fresh weights" if self.weights == "fresh" else ""
        return fresh + ("" if self.dtype == DTYPES[0] else f", {self.dtype}")

    @property
    def size(self) -> str:
        """The row of the tables by size: the paper's label, or the model's name with its size."""
        label = size_label(self.parameters)
        return (label if self.paper_model else f"{self.model} ({label})") + self._others

    @property
    def from_paper(self) -> bool:
        trained = self.weights == "pretrained" and self.dtype == DTYPES[0]
        return self.paper_model and self.paper_domain and trained


def conditions(data: xr.Dataset) -> list[Condition]:
    """The conditions of a joined dataset, system by system."""
    if "dtype" not in data:
        raise InvalidFile(
            "these results of the language study do not say each system's dtype, so an older version made them: run it "
            "again in another folder"
        )
    names = ("system", "model", "domain", "weights", "dtype", "text_digest", "note", "parameters")
    return [_condition(*map(str, row)) for row in zip(*(data[name].values for name in names))]


def once(some: Sequence[Condition]) -> list[int]:
    """Places of the systems that pooled numbers count: of those that differ in the dtype alone, the first of DTYPES."""
    first: dict[tuple[str, ...], int] = {}
    for i in sorted(range(len(some)), key=lambda i: DTYPES.index(some[i].dtype)):
        first.setdefault(some[i].start, i)
    return sorted(first.values())


def in_float64(some: Sequence[Condition], i: int) -> int | None:
    """The place of the same in float64, where it was run and system i is in another dtype."""
    wanted = (k for k, c in enumerate(some) if c.start == some[i].start and c.dtype == "float64")
    return next((k for k in wanted if k != i), None)


def by_size(data: xr.Dataset) -> xr.Dataset:
    """Language systems as tables show them: small models first, texts by the alphabet, dtypes beside each other.

    Other studies' stay as they are.
    """
    if "parameters" not in data:
        return data
    some = conditions(data)

    def place(i: int) -> tuple[object, ...]:
        c = some[i]
        return c.parameters, c.model, c.domain.lower(), DTYPES.index(c.dtype)

    return data.isel(system=sorted(range(len(some)), key=place))


def _condition(
    system: str, model: str, domain: str, weights: str, dtype: str, digest: str, note: str, parameters: str
) -> Condition:
    ours_model, ours_domain = _plain(model), _plain(domain)
    paper_domain = next((name for key, name in PAPER_DOMAINS.items() if ours_domain.startswith(key)), None)
    return Condition(
        system,
        PAPER_MODELS.get(ours_model, model.rpartition("/")[2]),
        paper_domain or domain.rpartition("/")[2],
        weights,
        int(parameters),
        dtype,
        digest,
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
    """The models with their weights, texts and dtypes, a sentence for those that share them, and what is pooled."""
    alike: dict[tuple[str, str], list[Condition]] = {}
    for model in dict.fromkeys(c.model for c in some):
        own = [c for c in some if c.model == model]
        words = dict.fromkeys(word for c in own for word in (c.note, WEIGHTS.get(c.weights, c.weights)) if word)
        alike.setdefault(("; ".join(words), _places(own)), []).append(own[0])
    sentences = [
        f"{', '.join(f'Pythia-{c.model}' if c.paper_model else c.model for c in models)} "
        f"({', '.join(size_label(c.parameters) for c in models)}; {words}) {places}."
        for (words, places), models in alike.items()
    ]
    return " ".join([*sentences, POOLED, *([ONCE] if len(once(some)) < len(some) else [])])


def _places(some: Sequence[Condition]) -> str:
    dtypes = [dtype for dtype in DTYPES if any(c.dtype == dtype for c in some)]
    texts = [", ".join(dict.fromkeys(c.domain for c in some if c.dtype == dtype)) for dtype in dtypes]
    return " and ".join(f"on {own} in {dtype}" for own, dtype in zip(texts, dtypes))
