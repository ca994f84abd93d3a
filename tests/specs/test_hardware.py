"""The hardware catalog and profile files."""

from __future__ import annotations

import json
import re

import msgspec
import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.base import Fit
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.profile import (
    DATASHEETS as DATASHEET_FILES,
)
from magicdec.perfmodel.kernels.profile import (
    Devices,
    HardwareProfile,
    counted,
    every_gpu,
    hardware_names,
    instances,
    load_hardware,
    save_hardware,
)
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.device import Link, bytes_per_element
from magicdec.specs.engine import load_engine, save_engine

# GB of memory, GB/s, dense bf16 TFLOP/s: the vendors' tables, typed here apart from the catalog
DATASHEETS = {
    "a100-sxm-80gb": (80, 2039, 312), "a100-sxm-40gb": (40, 1555, 312), "a100-pcie-80gb": (80, 1935, 312),
    "a100-pcie-40gb": (40, 1555, 312), "h100-sxm-80gb": (80, 3350, 989), "h100-pcie-80gb": (80, 2039, 756),
    "h200-sxm-141gb": (141, 4800, 989), "gh200-96gb": (96, 4000, 989), "b200-sxm-192gb": (192, 8000, 2250),
    "gb200-nvl72": (189, 8000, 2500), "l40s-48gb": (48, 864, 362), "l40-48gb": (48, 864, 181),
    "l4-24gb": (24, 300, 121), "a10g-24gb": (24, 600, 70), "a40-48gb": (48, 696, 149.7),
    "rtx-a6000-48gb": (48, 768, 154.8), "rtx-4090-24gb": (24, 1008, 165), "mi300x-192gb": (192, 5300, 1307),
    "h20-sxm-96gb": (96, 4000, 148), "h100-nvl-94gb": (94, 3900, 835), "b300-sxm-288gb": (288, 7750, 2250),
    "gb300-nvl72": (288, 8000, 2500), "rtx-5090-32gb": (32, 1792, 209.5), "rtx-pro-6000-96gb": (96, 1792, 467.8),
    "rtx-3090-24gb": (24, 936, 71), "l20-48gb": (48, 864, 119.5), "mi325x-256gb": (256, 6000, 1307),
    "mi355x-288gb": (288, 8000, 2517), "gb10-128gb": (128, 273, 125),
}  # fmt: skip


def local_profile() -> HardwareProfile:
    return HardwareProfile(
        name="local", kind="cpu", memory_bytes=8e9, memory_bytes_per_s=1.5e10, flops_per_s={"fp32": 1.5e11},
        num_multiprocessors=2, l2_bytes=3.2e7,
        link=Link(bytes_per_s=5e9, topology="shared-memory", num_gpus_per_node=2),
        sources={"memory_bytes_per_s": 'measured: "copy" of 64 MB\nhere'},
        gemm=GemmCurve(tiled=False, gemv_efficiency=0.2, fit=Fit(fitted_on="this machine", num_rows=9, error=0.04)),
    )  # fmt: skip


def test_every_device_of_the_catalog_has_its_datasheet_values():
    """Those that stand under a name of their own because they were measured (`h200-…-measured`) and those
    known by their datasheet alone aside."""
    assert set(every_gpu()) == set(DATASHEETS)
    for name, (gigabytes, bandwidth, tflops) in DATASHEETS.items():
        profile = load_hardware(name)
        assert profile.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.08)
        assert profile.memory_bytes_per_s == pytest.approx(bandwidth * 1e9, rel=0.001)
        assert profile.flops_per_s["bf16"] == pytest.approx(tflops * 1e12, rel=0.005)


MIB = 2**20
GIB = 2**30
# the driver's total as it was printed in public, and what CUDA or ROCm gave a program there, typed here apart from
# the catalog; None: not seen
PRINTED = {
    "h20-sxm-96gb": (97871 * MIB, None), "gh200-96gb": (97871 * MIB, 97280 * MIB), "gh200-144gb": (None, 153008209920),
    "h100-nvl-94gb": (95830 * MIB, 93.0 * GIB), "h200-nvl-141gb": (143771 * MIB, None),
    "h800-sxm-80gb": (81559 * MIB, None), "mi325x-256gb": (None, 255.98 * GIB),
    "mi350x-288gb": (309220868096, 287.98 * GIB), "mi355x-288gb": (309220868096, 287.98 * GIB),
    "a40-48gb": (46068 * MIB, None), "l20-48gb": (46068 * MIB, None), "a10-24gb": (23028 * MIB, None),
    "t4-16gb": (15360 * MIB, 14.75 * GIB), "p40-24gb": (23040 * MIB, None), "strix-halo-128gb": (None, 127 * GIB),
    "rtx-3090-24gb": (24576 * MIB, 23.56 * GIB), "h100-sxm-80gb": (81559 * MIB, 79.11 * GIB),
    "l40s-48gb": (46068 * MIB, 44.39 * GIB), "rtx-5090-32gb": (32607 * MIB, 31.37 * GIB),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_memory_is_what_drivers_print_and_programs_are_given(name):
    total, usable = PRINTED[name]
    device = load_hardware(name)
    if total is not None:
        assert device.memory_bytes == total
    if usable is not None:
        assert device.usable_memory == (pytest.approx(usable), 0.0)
        return
    # half a percent to two below nvidia-smi's, whatever the device
    middle, error = device.usable_memory
    assert middle * (1 - error) == pytest.approx(0.980 * device.memory_bytes, rel=1e-3)
    assert middle * (1 + error) == pytest.approx(0.995 * device.memory_bytes, rel=1e-3)


def test_every_number_of_the_catalog_names_its_source():
    for name in hardware_names():
        profile = load_hardware(name)
        sources = profile.sources
        for key in (
            "memory_bytes",
            "memory_bytes_per_s",
            "flops_per_s",
            "num_multiprocessors",
            "l2_bytes",
            "link",
        ):
            if key == "l2_bytes" and not profile.l2_bytes:
                continue  # Apple states none
            assert re.match(r"(datasheet|measured|computed)", sources[key]), (name, key)
        assert (profile.usable_bytes is None) == ("usable_bytes" not in sources)
        assert "compared" in sources["checked"], name
        if not name.endswith("-measured"):
            linked = ("memory_bytes", "memory_bytes_per_s", "flops_per_s", "link")
            assert all("https://" in sources[key] for key in linked)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100-sxm-80gb"),
        ("H200", "h200-sxm-141gb"),
        ("a100", "a100-sxm-80gb"),
        ("4090", "rtx-4090-24gb"),
        ("4xh100", "h100-sxm-80gb"),
        ("2x8xH200", "h200-sxm-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-96gb"),
        ("NVIDIA B300", "b300-sxm-288gb"),
        ("NVIDIA GB10", "gb10-128gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
        ("rtx_5090", "rtx-5090-32gb"),
        ("Tesla T4", "t4-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("NVIDIA A10", "a10-24gb"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx-4080-super-16gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("7900xtx", "rx-7900-xtx-24gb"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx-24gb"),
        ("AMD Instinct MI210", "mi210-64gb"),
        ("Intel(R) Arc B580", "arc-b580-12gb"),
        ("Apple M2 Ultra", "apple-m2-ultra-192gb"),
        ("Gaudi 3", "gaudi3-128gb"),
        ("Ascend 910B", "ascend-910b-64gb"),
        ("A100 80G PCIe", "a100-pcie-80gb"),
        ("A100-80G", "a100-sxm-80gb"),
        ("3080 10GB", "rtx-3080-10gb"),
        ("H200 141GB", "h200-sxm-141gb"),
        ("Ryzen AI Max+ 395", "strix-halo-128gb"),
        ("nvidia-tesla-a100", "a100-sxm-40gb"),  # GKE's label
    ],
)
def test_aliases_and_capital_letters_find_a_device(alias, name):
    assert load_hardware(alias).name == name


def test_a_number_in_front_of_a_device_is_its_count_and_that_of_a_node():
    assert counted("h100") == Devices("h100")
    assert counted("4xH100") == Devices("h100", num_gpus=4)
    assert counted("2x8xh200") == Devices("h200", num_gpus=16, num_gpus_per_node=8)
    assert load_hardware("4x4xh200").link.num_gpus_per_node == 4
    assert counted("8 x NVIDIA B200").num_gpus == 8
    assert counted("3090") == Devices("3090")


@pytest.mark.parametrize("text", ["h100:8", "H100 x 8", "h100x8", "8*h100"])
def test_a_number_behind_a_device_is_its_count_too(text):
    assert counted(text)[:2] == ("h100", 8)


def test_a_device_with_the_number_of_others_names_these():
    with pytest.raises(
        ConfigError, match="rtx-a6000-48gb, rtx-pro-6000-96gb or rtx-pro"
    ):
        load_hardware("RTX 6000 Turbo")


def test_a_laptops_gpu_is_not_the_card_of_its_name():
    assert load_hardware("RTX 4090 Laptop GPU").name == "rtx-4090-laptop-16gb"
    with pytest.raises(ConfigError, match="a laptop's GPU has other clocks"):
        load_hardware("RTX 3080 Laptop GPU")


@pytest.mark.parametrize("text", ["RTX 5060", "RTX 4060 Super", "H100 192GB", "80GB"])
def test_a_device_is_not_taken_for_one_of_more_words(text):
    with pytest.raises(ConfigError, match="unknown hardware"):
        load_hardware(text)


def test_a_cloud_instance_is_so_many_devices():
    for node in ("DGX H100", "HGX-H100", "gpu_8x_h100_sxm5"):
        assert counted(node).num_gpus == 8
        assert load_hardware(node).name == "h100-sxm-80gb"
    assert counted("p5.48xlarge") == Devices("h100-sxm-80gb", num_gpus=8)
    assert counted("2xp5.48xlarge") == Devices(
        "h100-sxm-80gb", num_gpus=16, num_gpus_per_node=8
    )
    assert counted("Standard_ND96isr_H100_v5=90").price_per_hour_usd == 90.0
    for instance, devices in instances().items():
        assert counted(instance).num_gpus or instance.startswith("nvidia"), instance
        assert load_hardware(counted(devices).name).name == counted(devices).name


def test_devices_known_by_their_datasheet_alone_say_so():
    """Each has a source for every figure, borrows curves or has none, and is left out of "all"."""
    known = [load_hardware(path.stem) for path in DATASHEET_FILES.glob("*.toml")]
    assert len(known) >= 40
    for device in known:
        assert not device.is_measured
        assert device.name not in every_gpu()
        assert {"memory_bytes", "memory_bytes_per_s", "flops_per_s", "link"} <= set(
            device.sources
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8xtpu-v5e", "tpu-v5e is not covered"),
        ("ct6e-standard-4t", "is not covered"),
        ("trn2.48xlarge", "is not covered"),
        ("inferentia2", "--hardware FILE.toml"),
        ("gaudi", "did you mean gaudi2 or gaudi3"),
        ("mi50", "magicdec hardware lists"),
        ("b100", "magicdec hardware lists"),
        ("h200x", "did you mean h200"),
    ],
)
def test_an_unknown_device_is_not_taken_for_one_of_another_number(name, words):
    with pytest.raises(ConfigError) as caught:
        load_hardware(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("driver_name", "device"),
    [
        ("NVIDIA RTX 4000 Ada Generation", "rtx-4000-ada-20gb"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "rtx-4000-sff-ada-20gb"),
        ("NVIDIA RTX 4500 Ada Generation", "rtx-4500-ada-24gb"),
        ("NVIDIA RTX 5000 Ada Generation", "rtx-5000-ada-32gb"),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtx-pro-4500-32gb"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx-pro-5000-48gb"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "rtx-pro-6000-max-q-96gb",
        ),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie-16gb"),
        ("Tesla P100-SXM2-16GB", "p100-sxm-16gb"),
        ("Tesla P40", "p40-24gb"),
        ("AMD Instinct MI350X", "mi350x-288gb"),
        ("AMD Instinct MI300A", "mi300a-128gb"),
        ("AMD Instinct MI100", "mi100-32gb"),
    ],
)
def test_a_driver_s_name_is_its_device(driver_name, device):
    assert load_hardware(driver_name).name == device


def test_professional_cards_multiply_at_four_times_their_fp32_rate():
    """As NVIDIA's whitepapers of Ada and of RTX Blackwell have it: 512 products and sums of fp16 a
    multiprocessor and clock, where 128 cores have one of fp32 each."""
    for name in hardware_names():
        device = load_hardware(name)
        is_card = name.startswith("rtx-pro-") or "-ada-" in name
        if device.generation in ("ada", "blackwell") and is_card:
            assert device.flops_per_s["bf16"] == pytest.approx(
                4.0 * device.flops_per_s["fp32"], rel=0.01
            ), name
            clock_hz = device.flops_per_s["fp32"] / (256 * device.num_multiprocessors)
            assert 1.5e9 < clock_hz < 2.7e9, name


def test_gpus_before_ampere_have_no_bf16():
    for name in hardware_names():
        device = load_hardware(name)
        is_older = device.generation in ("pascal", "volta", "turing")
        assert device.has_bf16 != is_older, name


def test_a_gpu_without_its_multiprocessors_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nkind = "gpu"\nmemory_bytes = 48e9\nmemory_bytes_per_s = 864e9\n'
        "[flops_per_s]\nbf16 = 362e12\n[link]\nbytes_per_s = 32e9\n"
    )
    with pytest.raises(ConfigError, match="num_multiprocessors"):
        load_hardware(tmp_path / "mine.toml")


def test_an_unmeasured_device_borrows_curves_with_a_wider_error():
    donor, borrower = load_hardware("a100-sxm-80gb"), load_hardware("a100-pcie-40gb")
    assert donor.is_measured
    assert not borrower.is_measured
    assert borrower.gemm.flops_efficiency == donor.gemm.flops_efficiency
    assert borrower.gemm.fit.borrowed_from == "a100-sxm-80gb"
    assert borrower.gemm.fit.relative_error > donor.gemm.fit.relative_error


def test_a_device_on_pcie_does_not_borrow_the_all_reduce_of_one_on_nvlink():
    assert load_hardware("a100-pcie-40gb").allreduce is None
    assert load_hardware("a100-sxm-40gb").allreduce is not None


def test_a_dtype_without_a_rate_computes_in_a_wider_one():
    a100, l4 = load_hardware("a100"), load_hardware("l4")
    assert a100.compute_rate("fp8") == a100.flops_per_s["bf16"]
    assert l4.compute_rate("fp8") == l4.flops_per_s["fp8"]
    assert local_profile().compute_rate("bf16") == 1.5e11
    assert bytes_per_element("int4") == 0.5
    with pytest.raises(ConfigError, match="unknown dtype"):
        a100.compute_rate("fp7")


def test_a_saved_profile_reads_back_equal_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "sub" / "local.toml"
    save_hardware(local_profile(), path)
    assert load_hardware(path) == local_profile()
    changed = msgspec.structs.replace(local_profile(), price_per_hour_usd=1.25)
    save_hardware(changed, path)
    assert load_hardware(path) == changed
    assert [file.name for file in path.parent.iterdir()] == ["local.toml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes = ", "memory_byts = ", "memory_byts"),
        (
            "memory_bytes_per_s = 15000000000.0",
            'memory_bytes_per_s = "fast"',
            "memory_bytes_per_s",
        ),
        (
            "memory_bytes_per_s = 15000000000.0",
            "memory_bytes_per_s = nan",
            "memory_bytes_per_s",
        ),
        (
            "memory_bytes_per_s = 15000000000.0",
            "memory_bytes_per_s = -1.0",
            "memory_bytes_per_s",
        ),
        ("memory_bytes_per_s = 15000000000.0", "", "memory_bytes_per_s"),
        ('topology = "shared-memory"', 'topology = "rope"', "link.topology"),
        ("fp32 = ", "fp33 = ", "fp33"),
        ("gemv_efficiency = 0.2", "gemv_efficiency = inf", "gemv_efficiency"),
        ("num_multiprocessors = 2", "num_multiprocessors = 0", "num_multiprocessors"),
        ("[link]", "[link", "not valid TOML"),
    ],
)
def test_a_bad_value_names_the_file_and_the_key(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    save_hardware(local_profile(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_hardware(path)
    assert "mine.toml" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_changed_is_read_anew(tmp_path):
    """Of the same name and length, written at once: hardware, model, engine and acceptance."""
    from magicdec.perfmodel.acceptance import (
        constant_profile,
        load_profile,
        save_profile,
    )

    device, engine, law = (
        tmp_path / "device.toml",
        tmp_path / "engine.toml",
        tmp_path / "law.json",
    )
    model = tmp_path / "model" / "config.json"
    model.parent.mkdir()
    config = json.loads((MODELS_DIRECTORY / "llama-3.1-8b.json").read_text())
    found = []
    for layers, memory_bytes, factor, rate in (
        (32, 1e10, 1.5, 0.5),
        (16, 2e10, 2.5, 0.7),
    ):
        model.write_text(json.dumps(config | {"num_hidden_layers": layers}))
        save_hardware(
            msgspec.structs.replace(local_profile(), memory_bytes=memory_bytes), device
        )
        save_engine(
            load_engine("ours").with_constants({"kernels.gemm_factor": factor}), engine
        )
        save_profile(constant_profile(rate), law)
        rates = load_profile(law).conditional_rates(
            budget=np.array([512]), context=4096, gamma_max=1
        )
        models = load_model_spec(str(model)), load_model_spec(str(model.parent))
        profiles = (
            load_hardware(device).memory_bytes,
            load_engine(engine).kernels.gemm_factor,
        )
        found.append((*profiles, round(float(np.ravel(rates)[0]), 2)))
        assert [each.num_hidden_layers for each in models] == [layers, layers]
    assert found == [(1e10, 1.5, 0.5), (2e10, 2.5, 0.7)]


@pytest.mark.parametrize(
    ("name", "named"),
    [("h100-sxn-80gb", "h100-sxm-80gb"), ("nowhere.toml", r"nowhere\.toml")],
)
def test_an_unknown_device_names_the_nearest_and_a_missing_file_is_named(name, named):
    with pytest.raises(ConfigError, match=named):
        load_hardware(name)
