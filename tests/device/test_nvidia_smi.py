"""What nvidia-smi printed is read, whatever the driver calls it, and what matters of it is a warning."""

from dataclasses import replace

import pytest
import smi_outputs

from lockstep.device.nvidia_smi import Card, is_older, links, parse, sysfs_address, warnings

GOOD = replace(
    parse(smi_outputs.T4_515).cards[0],
    persistence=True,
    link_width=16,
    name="NVIDIA H100 80GB HBM3",
    bus="0000:1b:00.0",
)


def test_an_old_driver_is_read() -> None:
    driver = parse(smi_outputs.T4_515)
    assert (driver.version, driver.cuda) == ("515.105.01", "11.7")
    assert driver.cards == (
        Card(
            name="Tesla T4",
            uuid="GPU-00000000-0000-0000-0000-000000000001",
            bus="0000:00:1e.0",
            memory_mib=15360,
            used_mib=1032,
            persistence=False,
            mig=False,
            slices=0,
            mode="Default",
            ecc=True,
            uncorrected=0,
            uncorrected_ever=0,
            repair=(),
            slowed=(),
            clock_mhz=585,
            clock_max_mhz=1590,
            temperature_c=40,
            power_w=26.78,
            power_limit_w=70.0,
            power_default_w=70.0,
            link_gen=3,
            link_gen_max=3,
            link_width=8,
            link_width_max=16,
            users=(),
        ),
    )


def test_a_card_cut_by_mig_is_read() -> None:
    [card] = parse(smi_outputs.A100_535).cards
    assert (card.mig, card.slices, card.power_w, card.power_limit_w) == (True, 4, 67.03, 500.0)


def test_a_new_driver_is_read() -> None:
    """Idle, with clocks and the generation of PCIe lowered to save power: that is no warning. Xorg computes nothing."""
    [card] = parse(smi_outputs.A5000_590).cards
    assert (card.slowed, card.link_gen, card.link_gen_max, card.ecc) == ((), 1, 4, False)
    assert (card.power_w, card.power_limit_w) == (6.52, 230.0)
    assert card.users == ("pid 2921 VLLM::Worker_TP0 22422 MiB",)
    assert warnings([card]) == ["card 0 (0000:81:00.0): in use by pid 2921 VLLM::Worker_TP0 22422 MiB"]


@pytest.mark.parametrize(
    ("found", "replaced", "field", "value"),
    [
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>3<", "uncorrected", 3),
        (
            "<sram_uncorrectable>0</sram_uncorrectable>",
            "<double_bit><total>2</total></double_bit>",
            "uncorrected",
            2,
        ),
        ("_sw_thermal_slowdown>Not Active", "_sw_thermal_slowdown>Active", "slowed", ("sw thermal slowdown",)),
        ("<pending_retirement>No", "<pending_retirement>Yes", "repair", ("pages to be retired at the next reset",)),
        ("<compute_mode>Default", "<compute_mode>Prohibited", "mode", "Prohibited"),
        ("<used>1032 MiB", "<used>[N/A]", "used_mib", None),
        ("<persistence_mode>Disabled", "<persistence_mode>N/A", "persistence", None),
    ],
)
def test_each_is_read_from_its_place(found, replaced, field, value) -> None:
    assert found in smi_outputs.T4_515
    [card] = parse(smi_outputs.T4_515.replace(found, replaced)).cards
    assert getattr(card, field) == value


def test_nothing_but_xml_is_refused() -> None:
    with pytest.raises(ValueError, match="no XML"):
        parse("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_an_address_as_sysfs_has_it() -> None:
    assert sysfs_address("00000000:9D:00.0") == "0000:9d:00.0"


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"uncorrected": 2}, "2 uncorrected errors of its memory; do not train on it before it was tested"),
        ({"uncorrected_ever": 1}, "1 uncorrected errors of its memory in its life, none since the last start"),
        ({"repair": ("a row that could not be remapped",)}, "a row that could not be remapped; reset the card, and "),
        ({"mode": "Prohibited"}, "compute mode Prohibited"),
        (
            {"mode": "Exclusive_Process", "users": ("pid 7 python",)},
            "compute mode Exclusive_Process, and taken by pid 7",
        ),
        ({"users": ("pid 7 python", "pid 8 x")}, "in use by pid 7 python, pid 8 x"),
        ({"slowed": ("sw power cap", "hw slowdown")}, "its clocks are held down now: sw power cap, hw slowdown"),
        ({"mig": True, "slices": 7}, "MIG, 7 slices"),
        ({"link_width": 4}, "PCIe x4 of x16; "),
        ({"power_limit_w": 60.0}, "power limit 60 W, its default is 70 W"),
        ({"persistence": False}, "persistence mode is off"),
    ],
)
def test_what_is_wrong_with_a_card(change, warning) -> None:
    [text] = warnings([replace(GOOD, **change)])
    assert text.startswith(f"card 0 (0000:1b:00.0): {warning}")


def test_a_good_card_and_one_that_says_nothing_of_itself() -> None:
    assert warnings([GOOD, GOOD]) == []
    assert warnings([replace(GOOD, link_width=None, power_limit_w=None, persistence=None, ecc=None)]) == []


def test_cards_of_two_kinds() -> None:
    [text] = warnings([GOOD, replace(GOOD, name="NVIDIA A100"), GOOD])
    assert text.startswith("cards of several kinds: 2 NVIDIA H100 80GB HBM3, 1 NVIDIA A100; ")


def test_links_between_cards_and_not_to_the_network() -> None:
    assert links(smi_outputs.H100S, 3) == [["X", "NV18", "NV18"], ["NV18", "X", "NV18"], ["NV18", "NV18", "X"]]
    assert links(smi_outputs.RTX3090S, 2) == [["X", "NV4"], ["NV4", "X"]]


@pytest.mark.parametrize("text", ["", "no topology", smi_outputs.RTX3090S])
def test_links_that_are_not_there(text) -> None:
    assert links(text, 3) == []


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("12.4", "13.2", True),
        ("13.0", "13.2", False),
        ("13.2", "12.8", False),
        ("", "13.2", False),
        ("Not Found", "13", False),
    ],
)
def test_a_driver_runs_all_of_its_first_number(version, than, older) -> None:
    assert is_older(version, than) == older
