"""What nvidia-smi printed on real hosts, with the elements that are read; identifiers are replaced.

Cut down from recordings that people published: a Tesla T4 of a cloud (driver 515), an A100 cut by MIG (535), an RTX
A5000 (590; its processes are those of another recording), and the topologies of hosts with H100s (three of its cards)
and RTX 3090s.
"""

from pathlib import Path


def _recorded(name: str) -> str:
    return (Path(__file__).parent / "fixtures/nvidia-smi" / name).read_text(encoding="utf-8")


T4_515 = _recorded("t4-515.xml")
A100_535 = _recorded("a100-535.xml")
A5000_590 = _recorded("a5000-590.xml")
H100S = _recorded("topology-h100s.txt")
RTX3090S = _recorded("topology-rtx3090s.txt")
