"""Causal language models by name, folder or GGUF file, and their tokenizers."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...core.derivatives import first_line
from ...errors import InvalidFile, InvalidInput
from ...extras import install

Weights = Literal["pretrained", "fresh", "quantized"]
Encode = Callable[[Sequence[str]], list[list[int]]]

OWNER = "EleutherAI"
PYTHIA = {  # layers, width, heads
    "pythia-410m": (24, 1024, 16),
    "pythia-1b": (16, 2048, 8),
    "pythia-1.4b": (24, 2048, 16),
}
PLAIN = ("F32", "F16", "BF16")  # GGUF types that hold a weight as it was
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
PATIENCE = 5.0  # seconds that a hub has to answer
NEEDS = f"the language study needs Hugging Face transformers: {install('language')}"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a folder, a GGUF file, a name on the hub, or a built-in Pythia configuration.

    note: what a reader of its numbers must know ("" where there is nothing).
    """

    name: str
    place: str
    weights: Weights
    note: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.place.endswith(".gguf")

    @property
    def builtin(self) -> bool:
        return self.place in PYTHIA


def find_model(word: str, *, fresh: bool = False) -> ModelSource:
    """A model from `PLACE` or `NAME=PLACE`; nothing of it is loaded yet.

    fresh: weights drawn anew in the model's configuration. A Pythia of the paper that cannot be had is drawn anew as
    well, with a warning.
    """
    require_transformers()
    named, _, place = word.rpartition("=")
    path = Path(place).expanduser()
    if place.endswith(".gguf"):
        return _gguf(named, path)
    if path.exists():
        if not (path / "config.json").is_file():
            raise InvalidFile(f"{place} holds no model: a folder with a config.json, or a .gguf file, is needed")
        return _plain(named or path.absolute().name, str(path.absolute()), fresh)
    short = place.removeprefix(f"{OWNER}/")
    if short in PYTHIA:
        repository = f"{OWNER}/{short}"
        if not fresh and _on_hub(repository):
            return _plain(named or short, repository, False)
        if not fresh:
            warnings.warn(
                f"{repository} cannot be reached, so {short} gets FRESH weights in its configuration: cost and "
                "numerics are real, the numbers of a pretrained model are not",
                stacklevel=2,
            )
        return _plain(named or short, short, True)
    if not _on_hub(place):
        raise InvalidInput(
            f"there is no model {place!r}: not a folder, not a .gguf file, and no hub answers for it. Give a path, or "
            f"one of {', '.join(PYTHIA)} (built in, with fresh weights where no hub can be reached)"
        )
    return _plain(named or place.rpartition("/")[2], place, fresh)


def require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InvalidInput(NEEDS) from error


def _plain(name: str, place: str, fresh: bool) -> ModelSource:
    note = "fresh weights: nothing was learned before the continuation" if fresh else ""
    return ModelSource(safe(name), place, "fresh" if fresh else "pretrained", note)


def _gguf(named: str, path: Path) -> ModelSource:
    if not path.is_file():
        raise InvalidFile(f"there is no file {path}")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InvalidInput(f"GGUF files need the package gguf: {install('language')}") from error
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise InvalidFile(f"{path} cannot be read as a GGUF file ({error})") from error
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    most = max(sizes, key=lambda kind: sizes[kind])
    words = [] if most in PLAIN else [f"most weights were rounded to {most}"]
    told = [reader.fields[key].contents() for key in ("general.name", "general.finetune") if key in reader.fields]
    if any("instruct" in str(text).lower() for text in [*told, path.name]):
        words.append("instruction-tuned")
    name = named or re.split(r"\.", path.name)[0]
    return ModelSource(
        safe(name), str(path.absolute()), "pretrained" if most in PLAIN else "quantized", "; ".join(words)
    )


def safe(name: str) -> str:
    """A name that may stand in a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".") or "model"


@cache
def _on_hub(repository: str) -> bool:
    """Whether the hub, or the cache of it, has this model; the hub is asked once and for a few seconds."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(repository, "config.json"), str):
            return True
        HfApi().model_info(repository, timeout=PATIENCE)
    except Exception:  # no network, no such model, no such name: each has its own class, and all mean no
        return False
    return True


# --- the model itself


def build_model(source: ModelSource, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model with eager attention, which has second derivatives, and in eval mode: nothing in it is drawn anew."""
    require_transformers()
    from transformers import AutoModelForCausalLM

    options = _options(dtype)
    try:
        if source.weights == "fresh":
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(seed)
                # torch draws other numbers in another dtype; buffers stay in the one that the model made them in
                model = AutoModelForCausalLM.from_config(configuration(source), **_options(torch.float32))
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(dtype)
        elif source.is_gguf:
            path = Path(source.place)
            model = copy.deepcopy(_read_gguf(path, path.stat().st_mtime_ns, dtype))
        else:
            with _without_bars():
                # nothing is unpickled
                model = AutoModelForCausalLM.from_pretrained(source.place, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise InvalidFile(f"{source.name} cannot be loaded from {source.place}: {first_line(error)}") from error
    if hasattr(model, "set_experts_implementation"):  # the fused products of a mixture know float32 alone
        model.set_experts_implementation("eager")
    return model.to(device).eval().requires_grad_(True)


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": "eager"}


@lru_cache(maxsize=1)
def _read_gguf(path: Path, written: int, dtype: torch.dtype) -> nn.Module:
    """The last GGUF file's model stays in the host's memory: reading it takes longer than the rest of a load, and a
    model on several texts is read once. written: when the file was, so that another one of its name is read."""
    from transformers import AutoModelForCausalLM

    with _without_bars():
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, **_options(dtype))


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def configuration(source: ModelSource) -> Any:
    """What the model looks like, without its weights."""
    from transformers import AutoConfig, GPTNeoXConfig

    if not source.builtin:
        return AutoConfig.from_pretrained(source.place)
    layers, width, heads = PYTHIA[source.place]
    return GPTNeoXConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=50304,
        max_position_embeddings=2048,
        use_parallel_residual=True,
    )


def require_length(model: Any, tokens: int) -> None:
    """Refuse sequences longer than the model takes."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise InvalidInput(
            f"the study's sequences have {tokens} tokens before the last, and this model takes {longest}; choose a "
            "model with a longer context"
        )


# --- tokenizers


def load_encoder(source: ModelSource, tokenizer: Path | None) -> Encode:
    """Texts to token ids, without special tokens: by a tokenizer.json or a folder, else by the model's own."""
    if tokenizer is not None and not tokenizer.exists():
        raise InvalidFile(f"there is no tokenizer at {tokenizer}: a tokenizer.json or a model's folder is needed")
    if tokenizer is not None and tokenizer.is_file():
        return _from_file(tokenizer)
    if tokenizer is None and source.builtin:
        raise InvalidInput(
            f"{source.name} has no tokenizer here, because its weights are fresh; give the file with "
            "--tokenizer tokenizer.json"
        )
    require_transformers()
    path = Path(source.place)
    own = tokenizer is None and source.is_gguf
    place = tokenizer or (path.parent if source.is_gguf else source.place)
    folder = Path(place)
    if not own and folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):
        # transformers would make one without any words
        raise InvalidInput(f"{place} holds no tokenizer; give one with --tokenizer FILE")
    try:
        found = _read_gguf_tokenizer(path, path.stat().st_mtime_ns) if own else _tokenizer(str(place))
    except Exception as error:  # every format has its own way to say that there is none
        raise InvalidInput(
            f"no tokenizer could be loaded from {place} ({first_line(error)}); give one with --tokenizer FILE"
        ) from error
    return lambda texts: found(list(texts), add_special_tokens=False)["input_ids"]


def _tokenizer(place: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, **options)


@lru_cache(maxsize=1)
def _read_gguf_tokenizer(path: Path, written: int) -> Any:
    return _tokenizer(str(path.parent), gguf_file=path.name)


def _from_file(path: Path) -> Encode:
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain exceptions
        raise InvalidFile(f"{path} is not a tokenizer.json ({first_line(error)})") from error
    return lambda texts: [one.ids for one in found.encode_batch(list(texts), add_special_tokens=False)]
