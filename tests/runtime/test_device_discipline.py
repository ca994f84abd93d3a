"""Decoding on a pretended GPU (pretend_gpu.py): nothing of the host meets the device's tensors, captured steps never
wait for the host, and replayed they decode what a CPU decodes. And on a GPU, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton")

from magicdec.runtime import attention, generate, kernels
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.layers import ShardedExperts
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.layers import MixtureOfExperts
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import started, tiny_spec
from tests.runtime.drafts import DRAFTS, TakesTurns, draft_model_for
from tests.runtime.pretend_gpu import (
    CLAIMED,
    MixedDevices,
    NotCapturable,
    PretendGPU,
    install,
)
from tests.runtime.test_architectures import RUN, drawn

PROMPTS = [[7, 3, 9, 1] * 6, [5, 2, 8, 4, 6]]
"""Longer than a draft's budget, and shorter."""

ON_DEVICE = [name for name in DRAFTS if name != "suffix"]
"""Drafts that do not run on the host."""


MIXTURE = tiny_spec(
    model_type="qwen3_moe",
    num_hidden_layers=1,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    head_dim=16,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(tiny_spec(num_hidden_layers=1), weights="random", seed=3)


@pytest.fixture
def triton_gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGPU:
    return install(monkeypatch)


@pytest.fixture
def gpu(triton_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch) -> PretendGPU:
    """In plain torch operations, which take less time than interpreted kernels."""
    monkeypatch.setattr(attention, "fastest_kernel", lambda *tensors: None)
    monkeypatch.setattr(kernels, "can_fuse", lambda tensor: False)
    return triton_gpu


def run(
    model: Transformer,
    draft: str | None,
    *,
    temperature: float = 0.0,
    gpu: PretendGPU | None = None,
    **options: Any,
) -> DecodeResult:
    spec = None if draft is None else DRAFTS[draft]
    draft_model = None if spec is None else draft_model_for(spec, model)
    if gpu is not None:
        model, draft_model = gpu.put(model), gpu.put(draft_model)
    if gpu is not None and isinstance(
        draft_model, Head
    ):  # whose embeddings are its target's
        output = draft_model.output if draft_model.vocabulary else model.logits_of
        draft_model = replace(draft_model, embedding=model.embedding, output=output)
    engine = started(model, PROMPTS, 64, max_gamma=3, max_back=5)
    drafter = None if spec is None else build_drafter(spec, engine, draft_model)
    options = {"max_new_tokens": [5, 8], "gamma": 0 if spec is None else 2, **options}
    return decode(
        engine,
        drafter,
        SamplingSpec(temperature=temperature, seed=3),
        DecodeOptions(**options),
    )


def both(
    model: Transformer, draft: str | None, gpu: PretendGPU, **options: Any
) -> None:
    expected = run(model, draft, **options)
    with gpu:
        result = run(model, draft, gpu=gpu, **options)
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)
    assert bool(gpu.captured) == (draft != "ngram")  # which drafts on the host


def in_turn() -> Iterator[Any]:
    """Every draft greedy or sampled, in turn; the other in the exhaustive tests."""
    for number, draft in enumerate([None, *ON_DEVICE]):
        yield pytest.param(draft, float(number % 2))
        yield pytest.param(draft, float(1 - number % 2), marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("draft", "temperature"), [*in_turn()])
def test_decoding_keeps_to_the_device(
    draft: str | None, temperature: float, model: Transformer, gpu: PretendGPU
) -> None:
    """Ragged prompts that end at different times."""
    both(model, draft, gpu, temperature=temperature)


@pytest.mark.parametrize("draft", ["topk", "model"])
def test_a_queue_and_changing_gammas_do_too(
    draft: str, model: Transformer, gpu: PretendGPU
) -> None:
    """Each gamma's graphs read what the step before left, whichever gamma it had; prompts are admitted in between."""
    options = {"gamma": 3, "max_new_tokens": 17, "queue": [[1, 2, 3], [4] * 20]}
    expected = run(model, draft, policy=TakesTurns(), **options)
    with gpu:
        result = run(model, draft, gpu=gpu, policy=TakesTurns(), **options)
    assert result.tokens == expected.tokens
    assert np.array_equal(result.num_accepted, expected.num_accepted)
    assert len(gpu.captured) >= 4 * (
        3 if draft == "model" else 4
    )  # its steps differ by how far it is behind, too


def test_rings_do_too(gpu: PretendGPU) -> None:
    """A layer of full attention and one of a window, which the prompts have long left."""
    spec = tiny_spec(
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    )
    model = load_model(spec, weights="random", seed=3)
    assert (
        Engine(model, batch_size=1, max_len=64, max_gamma=3, max_back=5).cache.ring(1)
        == 14
    )
    both(model, "snapkv", gpu)


def test_simulated_acceptance_does_too(model: Transformer, gpu: PretendGPU) -> None:
    both(
        model,
        "streamingllm",
        gpu,
        simulate_acceptance=[0.8, 0.5],
        max_new_tokens=5,
        queue=[[1, 2, 3]],
    )


def test_graphs_can_be_switched_off(model: Transformer, gpu: PretendGPU) -> None:
    with gpu:
        run(model, "snapkv", gpu=gpu, cuda_graphs=False)
    assert not gpu.captured


def test_the_gpus_kernels_are_launched_on_its_tensors_alone(
    model: Transformer, triton_gpu: PretendGPU
) -> None:
    """Interpreted; sums in another order choose other tokens now and then, so only that they run is checked."""
    with triton_gpu:
        result = run(model, "snapkv", gpu=triton_gpu, temperature=1.0, max_new_tokens=2)
    assert [len(tokens) for tokens in result.tokens] == [2, 2]
    assert triton_gpu.captured
    assert {"_split_kernel", "_weigh_kernel", "_choose_kernel"} < triton_gpu.launched


@pytest.mark.parametrize("has_kernel", [True, False])
def test_mixtures_do_too_where_a_kernel_takes_their_experts_together(
    has_kernel: bool, triton_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the host reads who chose what, and nothing is captured."""
    monkeypatch.setattr(attention, "fastest_kernel", lambda *tensors: None)
    monkeypatch.setattr(kernels, "can_fuse", lambda x: has_kernel and is_of_experts(x))
    model = load_model(MIXTURE, weights="random", seed=3)
    expected = run(model, "streamingllm")
    with triton_gpu:
        result = run(model, "streamingllm", gpu=triton_gpu)
    assert bool(triton_gpu.captured) == has_kernel
    assert ("_grouped_product_kernel" in triton_gpu.launched) == has_kernel
    assert result.tokens == expected.tokens


def is_of_experts(x: Tensor) -> bool:
    """Their inputs have lost the dimension of sequences; weights, by which a model tells what it captures, had none."""
    return x.is_cuda and x.dim() == 2


ARCHITECTURES = [
    pytest.param(name, marks=[] if name == "olmo2" else pytest.mark.slow)
    for name in RUN
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_does_too(
    architecture: str, triton_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "fastest_kernel", lambda *tensors: None)
    monkeypatch.setattr(kernels, "can_fuse", is_of_experts)
    spec = model_from_hf_config(drawn(architecture, 0), name="drawn", where="drawn")
    model = load_model(spec, weights="random", seed=3)
    both(model, None, triton_gpu, max_new_tokens=3)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "chosen": {"scoring": "softmax_of_chosen", "router_bias": True, "bias": True},
    "groups": {
        "scoring": "sigmoid", "num_groups": 4, "num_chosen_groups": 2, "shared_width": 24, "correction_bias": True,
        "shared_gate": True,
    },
    "largest of a group": {"num_groups": 4, "num_chosen_groups": 2, "group_score": "max"},
    "input": {"scoring": "sigmoid_of_input", "num_experts_per_tok": 1},
    "mixer": {"scoring": "sparse_mixer"},
}  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
def test_replayed_experts_are_chosen_anew(
    router: str, triton_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured for one step's tokens and replayed for another's, against an expert after the other on a CPU."""
    kind = MixtureOfExperts(
        **{"num_experts": 8, "num_experts_per_tok": 3, "width": 20, **ROUTERS[router]}
    )
    layer = structs.replace(MIXTURE.layers[0], mlp=kind)
    spec = structs.replace(MIXTURE, layers=(layer,))
    experts = load_model(spec, weights="random", seed=3).layers[0].mlp
    assert isinstance(experts, ShardedExperts)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 4, 32, generator=generator)
    choices = [experts.router(x.flatten(0, 1))[1] for x in (first, second)]
    assert not torch.equal(*choices)
    expected = experts(second)
    monkeypatch.setattr(kernels, "can_fuse", lambda x: True)
    with triton_gpu:
        x = triton_gpu.put(first)
        on_device = triton_gpu.put(experts)
        replay, output, _ = triton_gpu.capture(lambda: on_device(x), None)
        replay()
        x.copy_(triton_gpu.put(second))
        replay()
        found = output.cpu()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("draft", [None, "topk"])
def test_the_host_waits_once_per_step(
    draft: str | None, model: Transformer, gpu: PretendGPU
) -> None:
    """Steps more are as many times more that it waits for the device."""
    counts = []
    for max_steps in (2, 4):
        with gpu:
            before = gpu.num_waits
            run(model, draft, gpu=gpu, max_new_tokens=30, max_steps=max_steps)
            counts.append(gpu.num_waits - before)
    assert counts[1] - counts[0] == 2


FAULTS: dict[str, tuple[Callable[[Tensor], Any], type[AssertionError]]] = {
    "a tensor of the host": (lambda x: x + torch.ones(x.shape[-1]), MixedDevices),
    "item": (lambda x: x.sum().item(), NotCapturable),
    "tolist": (lambda x: x.tolist(), NotCapturable),
    "cpu": (lambda x: x.cpu(), NotCapturable),
    "nonzero": (lambda x: x.nonzero(), NotCapturable),
    "a mask as an index": (lambda x: x[x > 0], NotCapturable),
    "a list as an index": (lambda x: x[[0, 0]], NotCapturable),
    "allclose": (lambda x: torch.allclose(x, x), NotCapturable),
    "unique": (lambda x: x.unique(), NotCapturable),
    "repeats that a tensor tells": (
        lambda x: x.repeat_interleave(x.flatten().argmax()[None], dim=0),
        NotCapturable,
    ),
    "an upload": (lambda x: torch.tensor([1.0], device=x.device), NotCapturable),
    "a copy": (lambda x: x[:1, :1, :1].copy_(torch.zeros(1, 1, 1)), NotCapturable),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_captured_step_is_found(
    fault: str, model: Transformer, gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put where a step judges the target's logits. On a CPU none of them shows."""
    commit, error = FAULTS[fault]
    verify = generate.verify

    def faulty(logits_BTV: Tensor, *args: Any, **options: Any) -> Any:
        commit(logits_BTV)
        return verify(logits_BTV, *args, **options)

    monkeypatch.setattr(generate, "verify", faulty)
    run(model, None)
    with gpu, pytest.raises(error):
        run(model, None, gpu=gpu)


def test_numpy_is_refused(gpu: PretendGPU) -> None:
    with gpu:
        x = torch.arange(3, device=CLAIMED)
        for read in (x.numpy, lambda: np.asarray(x)):
            with pytest.raises((RuntimeError, TypeError)):
                read()


def test_what_cuda_allows_is_let_through(gpu: PretendGPU) -> None:
    """Numbers and tensors of one number of the host; between steps, copies and indices of the host."""
    with gpu:
        x = torch.arange(6.0, device=CLAIMED).view(2, 3)
        y = x * 2 + torch.tensor(1.0)
        y[[0, 1]] = y[[1, 0]]
        y[0] = 5
        y[y > 8] = 0
        assert (y.is_cuda, y.device) == (True, CLAIMED)
        assert y.tolist() == y.cpu().tolist() == [[5, 5, 5], [1, 3, 5]]
        assert float(y.sum()) == 24


@pytest.mark.parametrize(
    "operate",
    [
        lambda device, host: device + host,
        lambda device, host: host + device,
        lambda device, host: device + host.sum(),
        lambda device, host: host.sum() * device,
        lambda device, host: device @ host,
        lambda device, host: torch.cat((device, host)),
        lambda device, host: torch.where(device > 0, device, host),
        lambda device, host: torch.where(device > 0, device, host.sum()),
        lambda device, host: device.gather(0, host.long()),
        lambda device, host: device.index_select(0, host.long()[0]),
        lambda device, host: torch.stack((device, host)),
        lambda device, host: torch.nn.functional.embedding(host.long(), device),
        lambda device, host: device.masked_fill(host > 0, 0.0),
    ],
)  # fmt: skip
def test_devices_mix_where_torch_says_so(
    operate: Callable[[Tensor, Tensor], Tensor], gpu: PretendGPU
) -> None:
    """Against torch's own rules for devices, those of its fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        is_allowed = _succeeds(
            lambda: operate(torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2))
        )
    with gpu:
        assert (
            _succeeds(
                lambda: operate(torch.zeros(2, 2, device=CLAIMED), torch.zeros(2, 2))
            )
            == is_allowed
        )


def _succeeds(work: Callable[[], Tensor]) -> bool:
    try:
        work()
    except (MixedDevices, RuntimeError):
        return False
    return True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *((tiny_spec(head_dim=16), draft) for draft in (None, *ON_DEVICE)),
        *((MIXTURE, draft) for draft in (None, "snapkv")),
    ],
)
def test_on_a_gpu_captured_steps_decode_what_plain_steps_decode(
    target: ModelSpec, draft: str | None, temperature: float
) -> None:
    """The same kernels in the same shapes; several gammas, and a queue."""
    model = load_model(target, weights="random", seed=3, device="cuda")
    assert model.can_capture
    small = tiny_spec(
        name="small", hidden_size=16, num_hidden_layers=1, intermediate_size=32
    )
    spec = None if draft is None else DRAFTS[draft]
    draft_model = None if spec is None else draft_model_for(spec, model)
    if isinstance(draft_model, Transformer):
        draft_model = load_model(small, weights="random", seed=9, device="cuda")
    results = []
    for cuda_graphs in (False, True):
        engine = started(model, [[7] * 33, [1, 2, 3, 4, 5]], 160)
        drafter = None if spec is None else build_drafter(spec, engine, draft_model)
        options = DecodeOptions(
            gamma=0 if drafter is None else 3, max_new_tokens=[40, 60, 50], queue=[[4] * 40],
            policy=None if drafter is None else TakesTurns(), cuda_graphs=cuda_graphs,
        )  # fmt: skip
        results.append(
            decode(
                engine, drafter, SamplingSpec(temperature=temperature, seed=3), options
            )
        )
    assert results[0].tokens == results[1].tokens
    assert np.array_equal(results[0].num_accepted, results[1].num_accepted)
