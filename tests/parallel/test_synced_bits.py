"""BatchNorm over a whole step has the same bits whoever computes which micro-batch."""

from dataclasses import replace

import pytest
import synced_models
import toys
import worlds
import zoo
from toys import Case

BRANCHED = Case(4, model=synced_models.Branched, sync_batchnorm=True)
CASES = {
    "sgd": BRANCHED,
    "eight micro-batches, clipped, averaged": replace(
        BRANCHED, microbatches=8, samples=(17, 12, 7, 3), clip=0.1, ema=True
    ),
    "bf16": replace(BRANCHED, precision="bf16", optimizer="adamw"),
    "bf16-compute": replace(BRANCHED, precision="bf16-compute", clip=0.5),
    "fp16, skipping": replace(BRANCHED, precision="fp16", initial_scale=2.0**20),
    "not finite, skipped": replace(BRANCHED, poisoned=1, skip_nonfinite=True),
    "channels last": replace(BRANCHED, channels_last=True, samples=(12, 12, 9)),
    "frozen in part": replace(BRANCHED, freeze=("stem.*", "act.*", "norms.1.weight")),
    "resnet18": replace(zoo.case("resnet18", clip=0.5), sync_batchnorm=True),
    "efficientnet_b0": replace(zoo.case("efficientnet_b0", optimizer="lamb"), sync_batchnorm=True),
}
PLACED = [
    ("ddp", 2, ()),
    ("zero1", 3, ()),
    ("ddp", 4, ()),
    ("zero2", 4, ()),
    ("zero3", 4, ()),
    ("hsdp", 4, (("replicate", 2),)),
]


@pytest.mark.worlds
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    [alone] = worlds.run(1, toys.whole_trace, case, timeout=60.0)
    for strategy, size, options in PLACED:
        if size > case.microbatches or (strategy not in ("ddp", "zero1") and size < case.microbatches):
            continue
        placed = replace(case, strategy=strategy, options=options)
        for trace in worlds.run(size, toys.whole_trace, placed, timeout=60.0):
            assert [key for key in alone if trace[key] != alone[key]] == [], (strategy, size)
