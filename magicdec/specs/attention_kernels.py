"""The attention kernel that an engine runs on a device, and its law for several query tokens.

`data/attention_kernels.toml` holds the kernels with their laws, and by engine, generation and
version the kernel behind each backend, the order in which backends are tried, and the layers that
they refuse. `attention_path` chooses; perfmodel/kernels/attention.py prices the law.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from magicdec.files import converted, read_toml
from magicdec.specs.device import Device, bytes_per_element
from magicdec.specs.engine import EngineProfile, is_within
from magicdec.specs.mixers import Attention, LatentAttention
from magicdec.specs.model import ModelSpec

Sort = Literal["heads", "latents", "chosen"]
"""A layer's attention: of heads over keys and values, of all heads over latents, or over latents
that an indexer chose."""
SORTS: dict[Sort, str] = {
    "heads": "heads' keys and values",
    "latents": "latents",
    "chosen": "chosen latents",
}
KERNELS_FILE = Path(__file__).resolve().parent / "data" / "attention_kernels.toml"


class KernelLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a kernel takes several query tokens of each sequence. One token is packed and split,
    by the device's measured curve, unless a field says otherwise."""

    title: str
    packs: bool = True
    """Whether the heads of a KV head share tiles; else each head has tiles of its own."""
    packs_tokens: bool = True
    """Whether query tokens share tiles; else each token has tiles of its own."""
    expands: bool = False
    """Whether several tokens of latent attention expand the whole context to keys and values of each
    head, and attend head by head, as prompts do."""
    is_timed: bool = True
    """Whether a device's curve of latents, timed in TensorRT-LLM, is of it; else ordinary attention's
    curve with these tiles, for one token too."""
    splits_to: float = math.inf
    """Most query tokens with which a sequence's context is split over blocks."""
    splits_single_heads: bool = True
    """Whether it is split where each head has a KV head of its own."""
    split_blocks: float = math.inf
    """Most blocks (sequences times KV heads) with which it is split."""
    max_parts: float = math.inf
    """Most parts of a context."""
    tiles: tuple[float, ...] = ()
    """Query rows of a tile, which computes all of them; the least that holds the rows is taken, of
    the largest several. Empty: work grows evenly, and reading by the engine's
    `query_tile_reread`."""
    tile_of_batch: bool = False
    """Whether the tile is chosen by the rows of the whole batch less one for each further sequence,
    as in a plan that is captured."""
    reread: float = 0.0
    """Share of reading the cache that each tile beyond the first repeats."""
    rate: float = 0.6
    """Tiles' share of the tensor cores' whole rate."""
    block_numbers_per_s: float | None = None
    """Numbers of the cache that one block takes in a second, whatever their format. None: as in the
    device's curve."""
    address: str = ""
    """Where its code, or a timing, shows it."""


class AttentionLayer(NamedTuple):
    """The properties of a layer of attention by which a backend takes it."""

    kv_dtype: str = "bf16"
    head_dim: float = 128
    has_sinks: bool = False
    mixed_heads: bool = False
    """Whether its model's layers differ in head size, as Gemma 4's do."""
    sort: Sort = "heads"


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row that holds for an engine's versions and some layers on some generations of devices."""

    engine: str
    of: Sort = "heads"
    on: str = ""
    """Generations; empty: any."""
    since: str = ""
    before: str = ""
    caches: str = ""
    """Formats of the cache; empty: any."""
    heads_above: int = 0
    """Head sizes above it; 0: any."""
    has_sinks: bool = False
    """Whether it is of layers with sinks alone."""
    mixed_heads: bool = False
    """Whether it is of models whose layers differ in head size alone."""
    address: str = ""

    def is_there(self, engine: str, version: str, generation: str) -> bool:
        """Whether it is of a version ("": the newest) there."""
        if engine != self.engine or (self.on and generation not in self.on.split()):
            return False
        return is_within(version, self.since, self.before)

    def takes(self, layer: AttentionLayer) -> bool:
        """Whether it is of such layers."""
        is_of_cache = not self.caches or layer.kv_dtype in self.caches.split()
        return (
            layer.sort == self.of
            and is_of_cache
            and layer.head_dim > self.heads_above
            and (layer.has_sinks or not self.has_sinks)
            and (layer.mixed_heads or not self.mixed_heads)
        )


class BackendRow(Row, frozen=True, kw_only=True):
    """The kernel behind a backend."""

    backend: str
    kernel: str
    or_kernel: str = ""
    """Another that may be the one."""
    one_token: str = ""
    """The kernel of one token, where it is another."""
    graphs: Literal["whole", "one_token"] = "whole"
    costs: str = ""
    """Its price where another is the default, in words."""


class DefaultRow(Row, frozen=True, kw_only=True):
    """The backends that are tried, in this order."""

    backends: tuple[str, ...]


class Refusal(Row, frozen=True, kw_only=True):
    """Layers that a backend does not take."""

    backend: str
    says: str


class Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of kernels."""

    kernels: dict[str, KernelLaw]
    backends: list[BackendRow]
    defaults: list[DefaultRow]
    refusals: list[Refusal]


def latent_layer(mixer: LatentAttention, kv_dtype: str) -> AttentionLayer:
    sort: Sort = "latents" if mixer.indexer is None else "chosen"
    return AttentionLayer(kv_dtype, float(mixer.latent_size), sort=sort)


def layers_of(model: ModelSpec, kv_dtype: str) -> list[AttentionLayer]:
    """The sorts of a model's layers of attention over caches."""
    layers: dict[AttentionLayer, None] = {}
    for mixer, _ in model.mixers:
        if isinstance(mixer, Attention):
            head_dim = float(mixer.head_dim)
            mixed = model.mixes_head_sizes
            layers[AttentionLayer(kv_dtype, head_dim, mixer.sinks, mixed)] = None
        elif isinstance(mixer, LatentAttention):
            layers[latent_layer(mixer, kv_dtype)] = None
    return list(layers)


class AttentionPath(NamedTuple):
    """The kernel of a layer's passes."""

    backend: str
    """The engine's name of it; "": it has none, or the device's is not known."""
    laws: tuple[KernelLaw, ...]
    """The kernel's law; two where either may be right."""
    loses_graphs: float = 0.0
    """Chance that a pass of several tokens replays no whole captured graph with it."""
    costs: str = ""
    """Its price where another is the default, in words."""
    one_token: KernelLaw | None = None
    """The law of one token, where it is another's."""

    def splits(self, query_len: float) -> bool:
        """Whether it splits the context for so many query tokens."""
        return not any(law.expands or query_len > law.splits_to for law in self.laws)


@lru_cache(maxsize=1)
def tables() -> Tables:
    document = read_toml(KERNELS_FILE, "table of attention kernels")
    return converted(document, Tables, where=str(KERNELS_FILE))


def generation_of(hw: Device) -> str:
    """The device's generation; Blackwell's chips without NVLink have kernels of their own."""
    generation = hw.generation.lower()
    if generation == "blackwell" and hw.link.topology != "nvlink":
        return "blackwell-rtx"
    return generation


def backend_name(asked: str) -> str:
    """vLLM's backend by its name of today ("FLASHINFER_VLLM_V1" was FLASHINFER's)."""
    return asked.upper().rpartition(".")[2].removesuffix("_VLLM_V1")


def attention_path(
    engine: EngineProfile, hw: Device, layer: AttentionLayer
) -> AttentionPath:
    """The kernel that an engine runs on a device for a layer: the backend that it is asked for,
    or the first of its list that takes the layer."""
    of_engine = engine.kernels.attention_kernels
    if not of_engine or hw.kind != "gpu":
        return AttentionPath("", (tables().kernels["packed"],))
    return _chosen(
        of_engine,
        engine.version,
        generation_of(hw),
        layer,
        engine.paths.attention_backend,
    )


@lru_cache(maxsize=4096)
def _chosen(
    engine: str, version: str, generation: str, layer: AttentionLayer, asked: str
) -> AttentionPath:
    candidates = _listed(engine, version, generation, layer)
    if asked:
        candidates = (asked, *candidates)
    for backend in candidates:
        if refusal_of(engine, version, generation, layer, backend) is not None:
            continue
        for row in tables().backends:
            is_there = row.is_there(engine, version, generation)
            if row.backend == backend and is_there and row.takes(layer):
                names = filter(None, (row.kernel, row.or_kernel))
                laws = tuple(tables().kernels[name] for name in names)
                loses = 1.0 if row.graphs == "one_token" else 0.0
                one = tables().kernels[row.one_token] if row.one_token else None
                return AttentionPath(backend, laws, loses, row.costs, one)
    if layer.sort != "heads":
        return AttentionPath("", (tables().kernels["packed"],))
    either = (tables().kernels["packed"], tables().kernels["fa2"])
    narrow = bytes_per_element(layer.kv_dtype) < 2.0
    return AttentionPath("", either, 0.5 if narrow else 0.0)


def splitting_backend(
    engine: EngineProfile, hw: Device, layers: list[AttentionLayer], query_len: float
) -> str:
    """The first backend in the engine's own order that splits the context of all these layers for
    several query tokens, where one that it runs does not; "": none."""
    paths = [attention_path(engine, hw, layer) for layer in layers]
    if all(path.splits(query_len) or not path.backend for path in paths):
        return ""
    of_engine = engine.kernels.attention_kernels
    generation = generation_of(hw)
    for name in _listed(of_engine, engine.version, generation, layers[0]):
        asked = engine.with_constants({"paths.attention_backend": name})
        others = [attention_path(asked, hw, layer) for layer in layers]
        if all(path.backend == name and path.splits(query_len) for path in others):
            return name
    return ""


def _listed(
    engine: str, version: str, generation: str, layer: AttentionLayer
) -> tuple[str, ...]:
    """The backends that an engine tries for a layer on a device, in its order."""
    for row in tables().defaults:
        if row.is_there(engine, version, generation) and row.takes(layer):
            return row.backends
    return ()


def known_backends(engine: EngineProfile, hw: Device) -> list[str]:
    """The backends whose kernels are known there."""
    of_engine = engine.kernels.attention_kernels
    generation = generation_of(hw)
    names = dict.fromkeys(
        row.backend
        for row in tables().backends
        if row.is_there(of_engine, engine.version, generation)
    )
    return list(names)


def refusal_of(
    engine: str, version: str, generation: str, layer: AttentionLayer, backend: str
) -> Refusal | None:
    """Why a backend does not take a layer; None: it does, as far as is known."""
    for row in tables().refusals:
        is_there = row.is_there(engine, version, generation)
        if row.backend == backend and is_there and row.takes(layer):
            return row
    there = [
        row for row in tables().backends if row.is_there(engine, version, generation)
    ]
    own = dict.fromkeys(row.backend for row in there if row.takes(layer))
    if backend in own or backend not in (row.backend for row in there):
        return None
    says = f"it has no kernel for attention over {SORTS[layer.sort]}"
    if own:
        says += f"; {', '.join(own)}: the known ones that have"
    return Refusal(engine=engine, backend=backend, says=says)
