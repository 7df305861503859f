"""Creates the data loader of a custom training loop."""

from functools import partial

from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.order import Steps
from lockstep.core.sample_order import SampleOrder
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.items import MapStyleSplit
from lockstep.data.loader import Loader
from lockstep.data.step_weight import BatchWeighting
from lockstep.loop.distributed_model import PlacedModel
from lockstep.strategies.base import replica_devices


def make_loader(
    placed: PlacedModel,
    items: MapStyleSplit,
    steps: Steps,
    microbatches: int = 1,
    *,
    weigher: BatchWeighting | None = None,
    audits: AuditSchedule | None = None,
    order: SampleOrder | None = None,
) -> Loader:
    """Return this rank's data loader for `items`, which splits each step into `microbatches` micro-batches."""
    world, settings = placed.world, placed.settings
    return Loader(
        DataSet(items, items),
        steps,
        microbatches,
        NoTransforms(),
        world.device,
        settings.seed,
        placed.strategy.mesh(world.size).get_data_rank(world.rank),
        settings.placement.workers,
        None if audits is None else partial(audits.get_assignment, world.rank),
        weigher,
        order and order.get_epoch_order,
        replica_devices(placed.strategy, world.on_gpu),
    )
