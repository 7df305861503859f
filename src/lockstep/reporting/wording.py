"""Formats events as lines and tables of plain text."""

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, final

from lockstep.common.hashing import RANDOM_SEED, SEED_VARIABLE
from lockstep.common.text import format_bytes, format_count, format_step_time, printable_line
from lockstep.core import epochs
from lockstep.core.devices import GLOO_NOTE
from lockstep.core.order import get_subrange
from lockstep.training.events import Done, Evaluated, Logged, Saved, Skipped, Started, Stepped, Stopped

Row = tuple[str, str]
_DETECTION_PROBABILITY: Final = 0.95  # confidence level of the upper bound on the fault rate
_FP32_BYTES: Final = 4
_SHOWN_DATA_SHARE: Final = 0.05  # minimum fraction of the step time at which the data time is shown
_MAX_FIXED_LOSS: Final = 1e6  # larger losses are shown without a fixed number of decimals
_MAX_LISTED_MICROBATCHES: Final = 4  # number of micro-batches that are listed for each replica
_NOTHING_SAVED: Final = "nothing is saved"
_RANDOM_HASH_SEED: Final = (
    "hash seed random: sets of strings change their order at each start; "
    f"set {SEED_VARIABLE}=0 if your code depends on it"
)


def format_start_lines(event: Started, rate_rule: str) -> list[str]:
    """Return the lines that are printed at the start of a run. `rate_rule` explains the learning rate."""
    backend = f", backend {event.backend}" if event.backend else ""
    gloo_note = f"; {GLOO_NOTE}" if event.backend == "gloo" else ""
    sample_counts = [(event.train_samples, "training sample")]
    # The number of validation samples is unknown in a custom training loop.
    sample_counts += [(event.validation_samples, "validation sample")] if event.validation_samples or event.task else []
    lines = [
        *([event.task] if event.task else []),
        f"{format_count(event.parameters, 'parameter')} ({format_bytes(_FP32_BYTES * event.parameters)} in fp32), "
        + ", ".join(format_count(number, of) for number, of in sample_counts),
        f"{format_count(event.steps, 'step')} in {epochs.format_epochs(event.epochs)} of {event.steps_per_epoch:,}, "
        f"batch {event.batch:,} in {format_count(event.microbatches, 'micro-batch')}",
        f"{format_count(event.processes, 'process')}, strategy {event.strategy}, device {event.device}{backend}",
        *([_describe_replicas(event)] if event.replicas else []),
        *(f"ranks {', '.join(map(str, ranks))} share one device{gloo_note}" for ranks in event.sharing),
        *([_describe_flops(event)] if event.task or event.flops_per_sample else []),
        *([rate_rule] if rate_rule else []),
        # With several ranks, a separate warning reports differing hash seeds. A resumed run warns if its hash seed has
        # changed.
        *(
            [_RANDOM_HASH_SEED]
            if event.hash_seed == RANDOM_SEED and event.processes == 1 and event.resumed_from is None
            else []
        ),
    ]
    if event.resumed_from is not None:
        at = f"after step {event.step:,} from {printable_line(event.resumed_from)}"
        lines.append(f"resuming {at}" if event.step < event.steps else f"complete {at}: nothing is left to train")
    if event.again:
        verb = "is" if event.again == 1 else "are"
        lines.append(f"{format_count(event.again, 'step')} in the log after this checkpoint {verb} recomputed")
    return lines


def _describe_replicas(event: Started) -> str:
    """Describe which micro-batches of a step each replica processes."""
    shares = []
    for replica, device in enumerate(event.replicas):
        indices = range(replica, event.microbatches, len(event.replicas))
        samples = sum(len(get_subrange(event.batch, event.microbatches, index)) for index in indices)
        numbers = [str(index + 1) for index in indices]
        listed = ", ".join(numbers[:_MAX_LISTED_MICROBATCHES] + ["..."] * (len(numbers) > _MAX_LISTED_MICROBATCHES))
        noun = "micro-batch" if len(numbers) == 1 else "micro-batches"
        share = f"{noun} {listed} ({format_count(samples, 'sample')})" if numbers else "no micro-batch"
        shares.append(f"{device} with {share}")
    return f"{format_count(len(shares), 'replica')}: {', '.join(shares)}; gradients are added on {event.device}"


def format_position(event: Stepped, run: Started) -> str:
    """Return the epoch and step as text."""
    # Round up, so that the last step of an epoch still belongs to this epoch.
    epoch = -(-event.step // run.steps_per_epoch)
    return f"epoch {epoch}/{math.ceil(run.epochs)}  step {event.step}/{run.steps}"


@final
class RunningMeans:
    """Running means of the loss and the metrics over the steps of an epoch."""

    def __init__(self) -> None:
        self._epoch, self._steps = -1, 0
        self._sums: dict[str, float] = {}

    def add(self, event: Stepped) -> dict[str, float]:
        """Add a step. Return the means over the epoch so far, or an empty dict after its first step."""
        if event.epoch != self._epoch:
            self._epoch, self._steps, self._sums = event.epoch, 0, {}
        self._steps += 1
        for name, value in {"loss": event.loss, **event.figures}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return {name: total / self._steps for name, total in self._sums.items()} if self._steps > 1 else {}


def format_step_metrics(
    event: Stepped, run: Started, last_evaluation: str = "", means: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Return the metrics of a step as a line of text.

    `last_evaluation` is text with the metrics of the latest evaluation, shown after the metrics of the task. `means`
    are shown in parentheses.
    """
    own, evaluated = (
        format_task_metrics(event.figures, run.fractions, means),
        f"evaluated {last_evaluation}" if last_evaluation else "",
    )
    mean = f" ({format_loss(means['loss'])})" if "loss" in means else ""
    words = [f"loss {format_loss(event.loss)}{mean}", own, evaluated, f"lr {event.lr:.4g}", format_speed(event, run)]
    if event.samples_per_s > 0:
        step_s = run.batch / event.samples_per_s  # the time for a full batch
        words.append(f"{format_step_time(step_s)}/step")
        if event.data_s >= _SHOWN_DATA_SHARE * step_s:
            words.append(f"data {format_step_time(event.data_s)}")
    if event.flops_per_s is not None:
        words.append(f"{format_flops(event.flops_per_s)}/s")
    if event.mfu is not None:
        words.append(f"MFU {100 * event.mfu:.1f} %")
    if event.loss_scale is not None:
        words.append(f"loss scale {event.loss_scale:g}")
    if event.skipped_steps:
        words.append(f"{format_count(event.skipped_steps, 'step')} skipped")
    return "  ".join(word for word in words if word)


def format_speed(event: Stepped, run: Started) -> str:
    """Return the training speed as text, in the unit of the task, or in samples per second if the task has none."""
    if event.weight_per_s is not None and run.unit != "samples":
        return f"{event.weight_per_s:,.0f} {run.unit}/s"
    return f"{event.samples_per_s:,.0f} samples/s"


def format_task_metrics(
    metrics: dict[str, float], fractions: Collection[str], means: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Return the metrics of a task as text, with means in parentheses. Fractions are shown as percentages."""
    brackets = {name: f" ({format_value(mean, name in fractions)})" for name, mean in means.items()}
    words = (
        f"{name} {format_value(value, name in fractions)}{brackets.get(name, '')}" for name, value in metrics.items()
    )
    return "  ".join(words)


def format_value(value: float, is_fraction: bool) -> str:
    """Return a metric as text. Fractions are shown as percentages."""
    return format_percentage(value) if is_fraction else f"{value:.4g}"


def format_metric(name: str, value: float, is_fraction: bool) -> str:
    """Return the value of a curve as text. All losses have the same number of decimals."""
    return format_loss(value) if name == "loss" or name.startswith("loss/") else format_value(value, is_fraction)


def format_loss(value: float) -> str:
    """Return a loss as text."""
    return f"{value:.4f}" if abs(value) < _MAX_FIXED_LOSS else f"{value:.4g}"


def format_log_line(event: Logged) -> str:
    """Return a line with the metrics that a custom training loop logged."""
    return f"step {event.step}  {format_task_metrics(event.figures, ())}"


def format_evaluation_line(event: Evaluated) -> str:
    """Return a line with the result of an evaluation and the number of samples it used."""
    weights = "" if event.weights == "model" else f"  {event.weights} weights"
    metrics = "  ".join(
        word
        for word in (format_task_metrics(event.figures, event.fractions), f"loss {format_loss(event.loss)}")
        if word
    )
    return f"evaluated {event.evaluated} of {event.of}  {metrics}{weights}"


def format_skip_lines(event: Skipped) -> list[str]:
    """Return a line for each skipped file."""
    return [f"skipped {printable_line(file)}: cannot be read" for file in event.files]


def format_save_line(event: Saved) -> str:
    """Return a line with the path of a checkpoint and the first characters of the hash of its weights."""
    best = "  best so far" if event.best else ""
    return f"saved {printable_line(event.path)}  sha256 {event.weights_sha256[:12]}…{best}"


def format_stop_line(event: Stopped, run_dir: str | None, is_recipe: bool = True) -> str:
    """Return a line that explains why the run stopped early and how to resume it.

    Set `is_recipe` to False for a custom training loop, which is resumed by running the same script again.
    """
    again = (
        f"to resume, run the same command with run.dir={run_dir}"
        if is_recipe
        else f"to resume in {run_dir}, run the same script"
    )
    return (
        f"stopped by {event.reason} after step {event.step:,}; {printable_line(again) if run_dir else _NOTHING_SAVED}"
    )


def make_summary(event: Done, run: Started, run_dir: str | None) -> list[Row]:
    """Return the rows of the summary that is printed at the end of a run. The last row suggests further commands."""
    rows = [("steps", f"{event.step:,}"), ("samples", f"{event.samples:,}")]
    for name, last in event.figures.items():
        is_fraction = name in run.fractions
        best = f", best {format_value(event.best[name], is_fraction)}" if name in event.best else ""
        rows.append((name, f"{format_value(last, is_fraction)}{best}"))
    rows += [("time", format_duration(event.seconds))] if event.step > run.step else []
    if event.seconds > 0 and event.step > run.step:
        rate = (event.samples - run.samples) / event.seconds
        rows.append(("samples/s", f"{rate:,.0f}, including evaluations and saves"))
    skipped = {"skipped steps": event.skipped_steps, "skipped samples": event.skipped_samples}
    rows += [(name, f"{count:,}") for name, count in skipped.items() if count]
    rows += [("audited steps", f"{event.audited:,}{_describe_fault_rate(event.audited)}")] if event.audited else []
    rows += [("predicted", _compare_prediction(event))] if event.predicted else []
    if run_dir is None:
        return [*rows, ("run folder", f"none: {_NOTHING_SAVED}")]
    folder = printable_line(shlex.quote(run_dir))
    commands = [f"lockstep report {folder}", *([f"lockstep predict {folder} ..."] if run.task else [])]
    return [*rows, ("run folder", printable_line(run_dir)), ("next", ", ".join(commands))]


def _compare_prediction(event: Done) -> str:
    predicted, measured = (
        (format_step_time(each["step_s"]), format_bytes(each["peak_bytes"]))
        for each in (event.predicted, event.measured)
    )
    return f"{predicted[0]} a step, {predicted[1]}; was {', '.join(measured)}"


def _describe_fault_rate(audited: int) -> str:
    """Return text about the upper bound on the fault rate, given that no audit has found a fault.

    The bound is the rule of three (Hanley and Lippman-Hand, JAMA 249, 1983).
    """
    num_steps = int(audited / -math.log(1 - _DETECTION_PROBABILITY))
    return (
        f"; a fault in 1 of {num_steps:,} steps would have shown, with {_DETECTION_PROBABILITY:.0%} probability"
        if num_steps > 1
        else ""
    )


def align_columns(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with two columns."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def format_hash_line(weights_sha256: str) -> str:
    """Return the line with the SHA-256 of the weights. Scripts parse this line to compare runs."""
    return f"weights sha256 {weights_sha256}"


def format_percentage(fraction: float) -> str:
    """Return a fraction as a percentage with two decimals."""
    return f"{100 * fraction:.2f} %"


def format_duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, or as m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_fraction(number: int | None, total: int | None) -> str:
    """Return text such as `3/10`, or `3` if the total is unknown. Returns an empty string if `number` is None."""
    return "" if number is None else f"{number:,}" if total is None else f"{number:,}/{total:,}"


def _describe_flops(event: Started) -> str:
    """Return a line with the FLOP per sample and the peak FLOP/s of the devices, or the reason why they are unknown."""
    if event.flops_per_sample is None:
        return "no FLOP count: the model does not run on torch's meta device; this does not affect training"
    cost = f"{format_flops(event.flops_per_sample)} for each sample, forward and backward"
    if event.peak_flops_per_s is not None:
        return f"{cost}; peak of the devices {format_flops(event.peak_flops_per_s)}/s"
    if event.device.startswith("cuda"):
        return f"{cost}; the peak of this device is not known, so there is no MFU"
    return cost


def format_flops(number: float) -> str:
    """Return a number of floating-point operations as text, such as `1.5 TFLOP`."""
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return f"{number / 1e3:.4g} kFLOP"
