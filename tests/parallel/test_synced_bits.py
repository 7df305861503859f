"""BatchNorm over a whole step has the same bits whoever computes which micro-batch."""

from dataclasses import replace
from itertools import product

import pytest
import synced_models
import zoo
from pairs import BEYOND, pairs
from same_bits import Placed, assert_same_bits
from toys import Case

pytestmark = pytest.mark.slow("several ranks")

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
REAL = ("resnet18", "efficientnet_b0")  # which take the most time
EIGHT = "eight micro-batches, clipped, averaged"
FEWER = [("ddp", 2, ()), ("zero1", 3, ())]  # ranks than micro-batches
AS_MANY = [("ddp", 4, ()), ("zero2", 4, ()), ("zero3", 4, ()), ("hsdp", 4, (("replicate", 2),))]


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "placed"),
    [
        *pairs([*CASES], FEWER),
        *pairs([name for name in CASES if name not in (EIGHT, *REAL)], AS_MANY),
        *(pytest.param(*each, marks=BEYOND) for each in product(REAL, AS_MANY)),
        (EIGHT, AS_MANY[0]),
    ],
)
def test_the_bits_are_those_of_one_process(name: str, placed: Placed) -> None:
    assert_same_bits(CASES[name], placed)
