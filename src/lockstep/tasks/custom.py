"""Custom tasks and metrics.

A custom task is wrapped in a Task, which adds defaults for missing methods, and reports errors with the line in the
user's code. Custom metrics can be added to any task. A recipe lists them by import path. A custom metric is a function
of outputs and batch that returns sums by name. The reported value is the total sum divided by the total weight.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.common.importing import import_callable
from lockstep.common.reserved_metrics import RESERVED_IN_TRAINING, find_reserved_name
from lockstep.common.user_code import UserCode
from lockstep.core.batch import Batch, Inputs, get_batch_size, get_tensors, map_tensors
from lockstep.core.several_losses import (
    Loss,
    Weight,
    add_losses,
    add_total,
    check_same_names,
    check_weights,
    compute_loss_means,
    is_reserved,
    make_loss_sums,
)
from lockstep.errors import UsageError
from lockstep.tasks.base import LOSS, MetricValues, Monitor, Task, TaskReport
from lockstep.tasks.batches import split_batch
from lockstep.tasks.custom_loss import is_mean

Metric = Callable[[Any, Batch], Mapping[str, Any]]
Metrics = Mapping[str, Metric]  # maps import paths to metrics

_DOCS_HINT: Final = "see docs/extend.md"
_MEMBERS: Final = (
    *("counts_samples", "unit", "fractions", "monitor"),
    *("inputs", "weight", "loss", "sums", "figures", "details", "report", "check"),
)


@final
class CustomTask:
    """Wraps a custom `task`, which only needs a method `loss`. `name` is the name of the task for error messages.

    Missing members have these defaults:
    - `inputs`: The batch without its targets (tasks/batches.py).
    - `weight`: The number of samples.
    - `sums`, `figures`: Empty, so that only the loss is reported.
    - `monitor`: The loss.

    The values of `metrics` are reported in addition to the metrics of the task.
    """

    def __init__(self, name: str, task: Any, metrics: Metrics | None = None) -> None:
        self._name = name
        self._metrics = metrics or {}
        self._members: dict[str, Any] = {}
        for member in _MEMBERS:
            with self._user_code(member):
                self._members[member] = getattr(task, member, None)
        if not callable(self._members["loss"]):
            raise UsageError(f"{name}: has no method loss; add loss(self, outputs, batch), which returns a sum")
        self.counts_samples = bool(self._get_member("counts_samples", self._members["weight"] is None))
        self.unit = str(self._get_member("unit", "samples" if self.counts_samples else "weight"))
        fractions = self._get_member("fractions", ())
        self.fractions = (fractions,) if isinstance(fractions, str) else tuple(map(str, fractions))
        self.monitor = self._parse_monitor(self._get_member("monitor", LOSS))

    def inputs(self, batch: Batch) -> Inputs:
        """See Task."""
        if self._members["inputs"] is None:
            return split_batch(batch).inputs
        result = self._call_member("inputs", batch)
        if isinstance(result, Tensor):
            return (result,)
        if isinstance(result, Mapping | tuple):
            return result
        raise UsageError(
            f"{self._name}: inputs returned {type(result).__name__}; return the arguments of the model's forward as a "
            f"tuple, or as a mapping by name"
        )

    def weight(self, batch: Batch) -> Weight:
        """See Task."""
        if self._members["weight"] is None:
            return get_batch_size(batch)
        weight = self._call_member("weight", batch)
        if isinstance(weight, Mapping):
            weights = check_weights(f"{self._name}: weight", weight)
            return {name: self._validate_weight(value, f" for {name}") for name, value in weights.items()}
        return self._validate_weight(weight, "")

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """See Task."""
        loss = self._call_member("loss", outputs, batch)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in get_tensors(outputs))
        if isinstance(loss, Mapping):
            return {str(name): self._check_loss(value, f" for {name}", needs_gradient) for name, value in loss.items()}
        return self._check_loss(loss, "", needs_gradient)

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return self._call_for_tensors("sums", outputs, batch) | compute_metric_sums(self._metrics, outputs, batch)

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """See Task."""
        results = self._call_for_mapping("figures", sums)
        reserved_name = find_reserved_name(map(str, results), RESERVED_IN_TRAINING) or next(
            filter(is_reserved, map(str, results)), None
        )
        if reserved_name is not None:
            raise UsageError(
                f"{self._name}: figures returned {reserved_name}, a name that Lockstep uses for steps or evaluations; "
                f"choose a different name"
            )
        with self._user_code("figures"):
            figures = {str(name): float(value) for name, value in results.items()}
        return figures | compute_metric_values(self._metrics, sums, figures)

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """See Task."""
        return self._call_for_tensors("details", outputs, batch)

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """See Task."""
        return dict(self._call_for_mapping("report", sums))

    def _validate_weight(self, weight: Any, loss_suffix: str) -> int:
        """Validate the weight of a batch, and return it as an integer.

        If there are several losses, `loss_suffix` names the loss in the error message.
        """
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_floating_point():
            weight = int(weight)
        if isinstance(weight, bool) or not isinstance(weight, int) or weight < 0:
            raise UsageError(
                f"{self._name}: weight returned {str(weight)[:60]} of type {type(weight).__name__}{loss_suffix}; "
                "return an integer of at least 0, such as the number of tokens that count"
            )
        return weight

    def _check_loss(self, loss: Any, loss_suffix: str, needs_gradient: bool) -> Tensor:
        """Validate and return the loss.

        Raises UsageError if it isn't a 0-dim float tensor, or if `needs_gradient` is True and it doesn't require a
        gradient.
        """
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            description = (
                f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise UsageError(
                f"{self._name}: loss returned {description}{loss_suffix}; return the sum over the batch as a 0-dim "
                "float tensor"
            )
        if needs_gradient and not loss.requires_grad:
            raise UsageError(
                f"{self._name}: the loss{loss_suffix} has no gradient; compute it from the outputs with torch "
                "functions only, without detach() or item()"
            )
        return loss

    def check(self, outputs: Any, batch: Batch) -> None:
        """See Task. Also raises UsageError if the task fails for the batch, or if its loss is a mean.

        If `outputs` are on the meta device, the task is tested with arbitrary values instead.
        """
        if self._members["check"] is not None:
            self._call_member("check", outputs, batch)
        check_metrics(self._metrics, outputs, batch)
        values = map_tensors(_copy_with_values, outputs)
        samples = get_batch_size(batch)
        if samples > 1:
            self._check_sum(values, batch, samples)
        loss = self.loss(map_tensors(lambda tensor: tensor.requires_grad_(tensor.is_floating_point()), values), batch)
        weight = self.weight(batch)
        check_same_names(loss, weight, self._name)
        if not add_losses(loss).isfinite():
            return  # arbitrary outputs may be invalid, such as in a logarithm; the first step checks actual outputs
        losses = {name: value.detach().double() for name, value in make_loss_sums(loss, weight).items()}
        counts = {**add_total(losses), "samples": torch.tensor(samples)}
        sums = {**self.sums(values, batch), **self.details(values, batch)}
        if (reserved_name := next(filter(is_reserved, sums), None)) is not None:
            raise UsageError(
                f"{self._name}: sums or details returned {reserved_name}, a name that Lockstep uses for several "
                f"losses; choose a different name"
            )
        figures = {**compute_loss_means(counts), **self.figures({**counts, **sums})}
        with self._user_code("report"):
            json.dumps(self.report({**counts, **sums}))
        if self.monitor.name not in (*figures, LOSS.name):
            raise UsageError(
                f"{self._name}: monitor is {self.monitor.name}, but figures returned {', '.join(figures) or 'none'}; "
                f"set monitor to one of these metrics, or to loss"
            )

    def _check_sum(self, outputs: Any, batch: Batch, num_samples: int) -> None:
        """Raise UsageError if the loss is a mean, that is, if two identical samples have the same loss as one."""

        def select(rows: list[int], values: Any) -> Any:
            return map_tensors(
                lambda tensor: tensor[rows] if tensor.ndim and len(tensor) == num_samples else tensor, values
            )

        with torch.no_grad():
            pair_loss = self.loss(select([0, 0], outputs), select([0, 0], batch))
            single_loss = self.loss(select([0], outputs), select([0], batch))
        weights = self.weight(select([0, 0], batch)), self.weight(select([0], batch))
        check_same_names(pair_loss, weights[0], self._name)
        if isinstance(pair_loss, Mapping) and isinstance(single_loss, Mapping):
            for name, loss in pair_loss.items():
                weight_pair = tuple(weight[name] for weight in weights if isinstance(weight, Mapping))
                self._check_loss_is_sum(loss, single_loss[name], weight_pair, f" for {name}")
        elif isinstance(pair_loss, Tensor) and isinstance(single_loss, Tensor):
            self._check_loss_is_sum(pair_loss, single_loss, weights, "")

    def _check_loss_is_sum(
        self, pair_loss: Tensor, single_loss: Tensor, weights: tuple[Any, ...], loss_suffix: str
    ) -> None:
        if weights[0] != weights[1] and is_mean(single_loss, pair_loss):
            raise UsageError(
                f"{self._name}: loss returned {pair_loss.item():.6g}{loss_suffix} for two identical samples and "
                f"{single_loss.item():.6g} for one, so it is a mean; return the sum (reduction='sum'), and let weight "
                f"return the divisor"
            )

    def _parse_monitor(self, value: Any) -> Monitor:
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str):
            return Monitor(value[0], bool(value[1]))
        raise UsageError(
            f'{self._name}: monitor is {value!r}; set a metric, and whether higher is better, such as ("loss", False)'
        )

    def _call_for_tensors(self, member_name: str, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        results = self._call_for_mapping(member_name, outputs, batch)
        invalid = next((name for name, value in results.items() if not isinstance(value, Tensor)), None)
        if invalid is not None:
            raise UsageError(
                f"{self._name}: {member_name} returned {invalid} of type {type(results[invalid]).__name__}; return "
                "tensors, which are summed over batches"
            )
        return {str(name): value.detach() for name, value in results.items()}

    def _call_for_mapping(self, member_name: str, *arguments: Any) -> Mapping[str, Any]:
        if self._members[member_name] is None:
            return {}
        result = self._call_member(member_name, *arguments)
        if not isinstance(result, Mapping):
            raise UsageError(f"{self._name}: {member_name} returned {type(result).__name__}; return a mapping by name")
        return result

    def _call_member(self, member_name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] = self._members[member_name]
        with self._user_code(member_name):
            return function(*arguments)

    def _get_member(self, member_name: str, default: Any) -> Any:
        return default if self._members[member_name] is None else self._members[member_name]

    def _user_code(self, member: str) -> UserCode:
        return UserCode(f"{self._name}: {member}")


def add_metrics(task: Task, paths: Sequence[str]) -> Task:
    """Return a task that also reports the metrics at the import paths. Raises UsageError if one isn't a function."""
    return CustomTask("task", task, find_metrics(paths)) if paths else task


def find_metrics(paths: Sequence[str]) -> dict[str, Metric]:
    """Import the metrics at the import paths. Raises UsageError if one isn't a function."""
    return {path: import_callable(path, "metric", f"a function ({_DOCS_HINT})") for path in paths}


def compute_metric_sums(metrics: Metrics, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the sums of all metrics by name, with the import path as prefix, as in `my.metrics:absolute/error`."""
    return {
        f"{path}/{name}": value
        for path, metric in metrics.items()
        for name, value in _call_metric(path, metric, outputs, batch).items()
    }


def compute_metric_values(metrics: Metrics, sums: Mapping[str, Tensor], task_metrics: MetricValues) -> MetricValues:
    """Divide each sum by the total weight, or by the number of samples if the task has several losses.

    `task_metrics` contains the metrics of the task itself. Raises UsageError if two metrics have the same name.
    """
    weight = max(int(sums.get("weight", sums.get("samples", 1))), 1)
    metric_values: MetricValues = {}
    for key, value in sums.items():
        path, _, name = key.rpartition("/")
        if path not in metrics:
            continue
        if name in task_metrics or name in metric_values or name == "loss":
            raise UsageError(f"metric {path}: a metric {name} already exists; choose another name ({_DOCS_HINT})")
        metric_values[name] = float(value) / weight
    return metric_values


def check_metrics(metrics: Metrics, outputs: Any, batch: Batch) -> None:
    """Raise UsageError if the values of a metric for two samples don't add up to its value for a batch of both samples.

    If a metric were a mean, the weight of a sample would depend on the batch size. If `outputs` are on the meta device,
    metrics are tested with arbitrary values instead. A batch with fewer than two samples isn't checked.
    """
    if get_batch_size(batch) < 2:
        return
    outputs = map_tensors(_copy_with_values, outputs)
    pair_sums, first_sums, second_sums = (
        compute_metric_sums(metrics, *(map_tensors(itemgetter(rows), structure) for structure in (outputs, batch)))
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )
    nan = torch.tensor(torch.nan)
    for key, value in pair_sums.items():
        total = first_sums.get(key, nan).double() + second_sums.get(key, nan).double()
        if not torch.allclose(value.double(), total, rtol=1e-3, atol=1e-5, equal_nan=True):
            path, _, name = key.rpartition("/")
            raise UsageError(
                f"metric {path}: {name} is {float(value):.6g} for two samples, but adds up to {float(total):.6g} "
                f"over the single samples; return a sum over the samples, not a mean ({_DOCS_HINT})"
            )


def _call_metric(import_path: str, metric: Metric, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    with UserCode(f"metric {import_path}"):
        result = metric(outputs, batch)
        if not isinstance(result, Mapping):
            raise UsageError(
                f"metric {import_path}: returned {type(result).__name__}; return a mapping of names to sums"
            )
        # Metrics need no gradients.
        sums = {str(name): torch.as_tensor(value).detach() for name, value in result.items()}
    if (reserved_name := find_reserved_name(sums, RESERVED_IN_TRAINING)) is not None:
        raise UsageError(
            f"metric {import_path}: {reserved_name} is a name that Lockstep uses for evaluations; choose a different "
            f"name ({_DOCS_HINT})"
        )
    for name, value in sums.items():
        if "/" in name:
            raise UsageError(f"metric {import_path}: name {name!r} contains '/'; choose a name without it")
        if value.ndim or value.is_complex():
            raise UsageError(
                f"metric {import_path}: {name} has shape {tuple(value.shape)} and {value.dtype}; return real 0-dim sums"
            )
    return sums


def _copy_with_values(tensor: Tensor) -> Tensor:
    """Return a detached copy of a tensor.

    If the tensor is on the meta device, the copy is on the CPU and has arbitrary values: distinct floats from 0.1 to
    0.9, or zeros if the dtype isn't floating-point.
    """
    if tensor.device.type != "meta":
        return tensor.detach().clone()
    count = max(tensor.numel(), 1)
    if tensor.is_floating_point():
        return torch.linspace(0.1, 0.9, count)[: tensor.numel()].reshape(tensor.shape).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
