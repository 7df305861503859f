"""Features of a training loop: each adds lines of its own to some places of a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from grammar.verdict import Verdict

# Where lines may be added, in the order of the program; the last four stand in arguments of calls.
PLACES: Final = (
    "imports",
    "definitions",
    "data",
    "model",  # after the model was built
    "placed",
    "step",  # at the head of a step
    "inputs",  # within a micro-batch, before the model is called
    "loss",  # adds to `loss`
    "backward",  # after step.backward
    "gradients",  # after the last micro-batch
    "updated",
    "report",  # after the line of the step
    "end",  # after what the loop evaluates, counts and saves
    "join arguments",
    "place arguments",
    "steps arguments",
    "update arguments",
)


@dataclass(frozen=True)
class Feature:
    """Lines by place. A program has at most one feature of each `slot`."""

    lines: Mapping[str, str] = field(default_factory=dict)
    slot: str = ""
    verdict: Verdict = Verdict.RIGHT
    call: str = ""  # replaces `model(x)`
    loss: str = ""  # replaces the loss of the outputs `out` and the targets `y`
    handed: str = ""  # replaces `loss` in step.backward
    optimizer: str = ""  # replaces the line of the optimizer
    dataset: str = ""  # replaces the line of the dataset
    needs_auxiliary: bool = False  # only for a model of two outputs
    refuses_auxiliary: bool = False  # only for a model of one
    adds_up: bool = False  # only for a loss that is a sum
    splits_samples: bool = False  # the model may be called with a single one
    needs_block: str = ""  # only for a model with this block

    def __post_init__(self) -> None:
        assert set(self.lines) <= set(PLACES), self.lines


_DRAWS: Final = {
    "torch": ("", "float(torch.rand(()))"),
    "numpy": ("import numpy as np", "float(np.random.rand())"),
    "random": ("import random", "random.random()"),
}


def _draws() -> dict[str, Feature]:
    """Return draws of random numbers by each generator in each place."""
    features = {}
    for generator, (line, draw) in _DRAWS.items():
        imports = {"imports": line} if line else {}

        def add(
            name: str,
            lines: dict[str, str],
            verdict: Verdict = Verdict.RIGHT,
            slot: str = "",
            generator: str = generator,
        ) -> None:
            features[f"{generator} {name}"] = Feature(lines, slot or f"draw {name}", verdict)

        add("drawn in a micro-batch", {**imports, "inputs": f"x = x + 0.1 * {draw}"})
        add("drawn before the model", {**imports, "data": f"shift = {draw}", "inputs": "x = x + 0.1 * shift"})
        add("drawn after run.place", {**imports, "placed": f"offset = {draw}", "inputs": "x = x + 0.1 * offset"})
        add("drawn at the head of a step", {**imports, "step": f"scale = 0.5 + {draw}", "inputs": "x = x * scale"})
        add("drawn after a backward and unused", {**imports, "backward": f"unused = {draw}"})
        add(
            "drawn after a backward for the next micro-batch",
            {**imports, "step": "past = 0.0", "inputs": "x = x + 0.1 * past", "backward": f"past = {draw}"},
            Verdict.STATE,
        )
        add(
            "drawn between the micro-batches and the update",
            {**imports, "gradients": f"rate = 0.1 + 0.1 * {draw}", "update arguments": "lr=rate"},
            slot="rate",
        )
        add("drawn after the update", {**imports, "end": f"if {draw} < 0.4:\n    run.save()"})
        add(
            "drawn after the update for the next step",
            {
                **imports,
                "placed": "later = 0.0",
                "inputs": "x = x + 0.1 * later",
                "updated": f"later = {draw}",
            },
            Verdict.RESUME,
        )
        add(
            "drawn after the update and kept in run.state",
            {
                **imports,
                "inputs": 'x = x + 0.1 * run.state.get("later", 0.0)',
                "updated": f'run.state["later"] = {draw}',
            },
        )
    return features


_AUGMENTED: Final = """
class Augmented(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return {item}, self.targets[number]
"""


def _dataset(item: str, imports: str = "", verdict: Verdict = Verdict.RIGHT) -> Feature:
    lines = {"definitions": _AUGMENTED.replace("{item}", item)} | ({"imports": imports} if imports else {})
    return Feature(lines, "dataset", verdict, dataset="dataset = Augmented(inputs, targets)")


def _optimizer(text: str, verdict: Verdict = Verdict.RIGHT, **lines: str) -> Feature:
    return Feature(lines, "optimizer", verdict, optimizer=f"optimizer = {text}")


def _scheduler(text: str, step: str = "scheduler.step()", each_epoch: bool = False) -> Feature:
    after = f"if step.every(epochs=1):\n    {step}" if each_epoch else step
    return Feature(
        {
            "imports": "from torch.optim import lr_scheduler",
            "model": f"scheduler = lr_scheduler.{text}",
            "place arguments": "scheduler=scheduler",
            "updated": after,
        },
        "rate",
    )


_MODEL: Final = "torch.optim.{}(model.parameters(), {})"
_GROUPS: Final = (
    '[{{"params": [p for p in model.parameters() if p.ndim > 1]{}}}, '
    '{{"params": [p for p in model.parameters() if p.ndim <= 1]{}}}]'
)
_UNDECAYED: Final = _GROUPS.format("", ', "weight_decay": 0.0')
_RATED: Final = _GROUPS.format(', "lr": 0.02', "")
_COPY: Final = "from copy import deepcopy"

OPTIMIZERS: Final[dict[str, Feature]] = {
    "sgd": _optimizer(_MODEL.format("SGD", "lr=0.1")),
    "sgd with momentum": _optimizer(_MODEL.format("SGD", "lr=0.05, momentum=0.9")),
    "sgd with nesterov": _optimizer(_MODEL.format("SGD", "lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3")),
    "sgd with dampening": _optimizer(_MODEL.format("SGD", "lr=0.1, momentum=0.8, dampening=0.3")),
    "adam": _optimizer(_MODEL.format("Adam", "lr=1e-2")),
    "adam with amsgrad": _optimizer(_MODEL.format("Adam", "lr=1e-2, amsgrad=True, betas=(0.8, 0.95)")),
    "fused adam": _optimizer(_MODEL.format("Adam", "lr=1e-2, fused=True")),
    "adafactor": _optimizer(_MODEL.format("Adafactor", "lr=1e-2")),
    "adam in a loop": _optimizer(_MODEL.format("Adam", "lr=1e-2, foreach=False")),
    "adamw": _optimizer(_MODEL.format("AdamW", "lr=1e-2, weight_decay=0.1")),
    "adagrad": _optimizer(_MODEL.format("Adagrad", "lr=5e-2")),
    "rmsprop": _optimizer(_MODEL.format("RMSprop", "lr=5e-3, centered=True, momentum=0.5")),
    "nadam": _optimizer(_MODEL.format("NAdam", "lr=1e-2")),
    "radam": _optimizer(_MODEL.format("RAdam", "lr=1e-2")),
    "adamax": _optimizer(_MODEL.format("Adamax", "lr=1e-2")),
    "adadelta": _optimizer(_MODEL.format("Adadelta", "lr=1.0")),
    "asgd": _optimizer(_MODEL.format("ASGD", "lr=5e-2")),
    "rprop": _optimizer(_MODEL.format("Rprop", "lr=1e-3")),
    "adamw without decay of biases": _optimizer(f"torch.optim.AdamW({_UNDECAYED}, lr=1e-2)"),
    "sgd with a rate for each group": _optimizer(f"torch.optim.SGD({_RATED}, lr=0.1, momentum=0.5)"),
    "sgd of the trained parameters alone": _optimizer(
        "torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)"
    ),
    "sgd that maximizes": _optimizer(_MODEL.format("SGD", "lr=0.01, maximize=True")),
    "lbfgs": _optimizer(_MODEL.format("LBFGS", "lr=0.1"), Verdict.WRONG),
    "optimizer of one's own": _optimizer(
        "Signed(model.parameters(), lr=1e-2)",
        definitions="""
class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].lerp_(p.grad, 1 - group["beta"])
                p.add_(state["average"].sign(), alpha=-group["lr"])
""",
    ),
    "optimizer that counts in itself": _optimizer(
        "Warming(model.parameters(), lr=1e-2)",
        Verdict.WRONG,
        definitions="""
class Warming(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * min(1.0, self.count / 4))
""",
    ),
    "optimizer that draws": _optimizer(
        "Noisy(model.parameters(), lr=1e-2)",
        Verdict.WRONG,
        definitions="""
class Noisy(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-group["lr"])
""",
    ),
}

_PAIRS: Final = "order = torch.randperm(len(x))\n"
_LR: Final = "update arguments"

FEATURES: Final[dict[str, Feature]] = {
    # The update.
    "clipping": Feature({_LR: "clip=1.0"}, "clip"),
    "tight clipping": Feature({_LR: "clip=0.05"}, "clip"),
    "rate by samples": Feature({_LR: "lr=0.1 * (1 - step.samples_seen / 100)"}, "rate"),
    "warm-up and cosine": Feature(
        {
            "imports": "import math",
            _LR: "lr=0.1 * min(step.number / 3, 0.5 + 0.5 * math.cos(math.pi * step.samples_seen / 100))",
        },
        "rate",
    ),
    "rate of zero": Feature({_LR: "lr=0.1 if step.number % 3 else 0.0"}, "rate"),
    "step scheduler": _scheduler("StepLR(optimizer, 2, 0.5)"),
    "cosine scheduler": _scheduler("CosineAnnealingLR(optimizer, 6)"),
    "one-cycle scheduler": _scheduler("OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)"),
    "exponential scheduler": _scheduler("ExponentialLR(optimizer, 0.7)", each_epoch=True),
    "lambda scheduler": _scheduler("LambdaLR(optimizer, lambda count: 1 / (1 + count))"),
    "scheduler with warm restarts": _scheduler("CosineAnnealingWarmRestarts(optimizer, 2)"),
    "two schedulers in sequence": _scheduler(
        "SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), "
        "lr_scheduler.StepLR(optimizer, 1, 0.8)], [2])"
    ),
    "plateau scheduler": _scheduler("ReduceLROnPlateau(optimizer, patience=0)", "scheduler.step(step.loss)"),
    "cyclic scheduler": _scheduler("CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False)"),
    "decay by step": Feature(
        {
            "step": "for group in optimizer.param_groups:\n"
            '    group["weight_decay"] = 0.01 + 0.1 * step.samples_seen / 88'
        },
        "groups",
    ),
    "group that rests at first": Feature(
        {
            "step": 'optimizer.param_groups[0]["lr_scale"] = 0.0 if step.number < 3 else 1.0',
        },
        "rate",  # a scheduler sets the rates of all groups
    ),
    "averaged weights": Feature({"place arguments": "ema=0.8"}, "average"),
    "average by hand": Feature(
        {
            "imports": _COPY,
            "model": "average = deepcopy(model).requires_grad_(False)",
            "updated": "with torch.no_grad():\n"
            "    for a, p in zip(average.parameters(), model.parameters()):\n"
            '        a.lerp_(p.full_tensor() if hasattr(p, "full_tensor") else p, 0.1)',
        },
        "average",
    ),
    "two updates of a step": Feature({}, "passes"),
    # The loss.
    "label smoothing": Feature(
        loss='loss = F.cross_entropy(out, y, reduction="sum", label_smoothing=0.1)', slot="targets"
    ),
    "squared error": Feature(loss='loss = F.mse_loss(out, F.one_hot(y, 3).float(), reduction="sum")', slot="targets"),
    "weighted classes": Feature(
        {"data": "classes = torch.tensor([1.0, 2.0, 0.5])"},
        loss='loss = F.cross_entropy(out, y, weight=classes, reduction="sum")',
        slot="targets",
    ),
    "focal loss": Feature(
        loss='losses = F.cross_entropy(out, y, reduction="none")\nloss = ((1 - (-losses).exp()) ** 2 * losses).sum()',
        slot="targets",
    ),
    "mean times samples": Feature(loss="loss = F.cross_entropy(out, y) * len(y)", slot="targets"),
    "masked samples": Feature(
        {"steps arguments": "weight=lambda batch: int((batch[1] > 0).sum()) + 1"},
        loss='loss = F.cross_entropy(out, y, reduction="sum", ignore_index=0)',
        slot="targets",
        adds_up=True,  # a micro-batch may have none that counts, and no mean
    ),
    "losses by name": Feature(
        {
            "steps arguments": 'weight=lambda batch: {"every": len(batch[1]), "few": int((batch[1] == 0).sum())}',
            "loss": 'few = 0.3 * F.cross_entropy(out, y.masked_fill(y != 0, -100), reduction="sum")',
        },
        slot="targets",
        handed='{"every": loss, "few": few}',  # a micro-batch may have no few: their mean is then nan
    ),
    "mean whatever its name": Feature(loss="loss = F.cross_entropy(out, y)", slot="targets", verdict=Verdict.WRONG),
    "mixup": Feature(
        {"inputs": _PAIRS + "lam = float(torch.rand(()))\nx = lam * x + (1 - lam) * x[order]"},
        loss='loss = lam * F.cross_entropy(out, y, reduction="sum")\n'
        'loss = loss + (1 - lam) * F.cross_entropy(out, y[order], reduction="sum")',
        slot="targets",
    ),
    "mixup by numpy": Feature(
        {
            "imports": "import numpy as np",
            "inputs": _PAIRS + "lam = float(np.random.beta(0.4, 0.4))\nx = lam * x + (1 - lam) * x[order]",
        },
        loss='loss = lam * F.cross_entropy(out, y, reduction="sum")\n'
        'loss = loss + (1 - lam) * F.cross_entropy(out, y[order], reduction="sum")',
        slot="targets",
    ),
    "cutmix": Feature(
        {
            "imports": "import random",
            "inputs": _PAIRS
            + "cut = random.randrange(13)\nx = torch.cat([x[:, :cut], x[order, cut:]], 1)\nlam = cut / 12",
        },
        loss='loss = lam * F.cross_entropy(out, y, reduction="sum")\n'
        'loss = loss + (1 - lam) * F.cross_entropy(out, y[order], reduction="sum")',
        slot="targets",
    ),
    "contrastive loss": Feature(
        loss="z = F.normalize(out, dim=1)\nloss = F.cross_entropy(z @ z.t() / 0.5, torch.arange(len(z)), "
        'reduction="sum")',
        slot="targets",
    ),
    "auxiliary loss": Feature(
        {"loss": 'loss = loss + 0.4 * F.cross_entropy(auxiliary, y, reduction="sum")'},
        "auxiliary",
        needs_auxiliary=True,
    ),
    "factor that changes with the epoch": Feature(
        {"loss": "loss = loss * (1.0 if step.epoch == 0 else 0.5)"}, "factor"
    ),
    "factor that changes with the step": Feature({"loss": "loss = loss * (1 - 0.05 * step.number)"}, "factor"),
    "penalty on outputs": Feature({"loss": "loss = loss + 1e-2 * out.square().sum()"}, "penalty"),
    "penalty on weights": Feature(
        {"loss": "loss = loss + len(y) * 1e-3 * sum(p.square().sum() for p in model.parameters())"},
        "penalty",
        Verdict.ROWS,
    ),
    "penalty on the gradient of the inputs": Feature(
        {
            "inputs": "x = x.detach().clone().requires_grad_()",
            "loss": "(slope,) = torch.autograd.grad(loss, x, create_graph=True)\n"
            "loss = loss + 0.1 * slope.square().sum()",
        },
        "penalty",
        Verdict.ROWS,
    ),
    "adversarial inputs": Feature(
        {
            "inputs": "probe = x.detach().clone().requires_grad_()\n"
            'probed = F.cross_entropy(logits(model(probe)), y, reduction="sum")\n'
            "x = x + 0.05 * torch.autograd.grad(probed, probe)[0].sign()"
        },
        "penalty",
        Verdict.ROWS,
    ),
    "inputs that want gradients": Feature({"inputs": "x = x.detach().clone().requires_grad_()"}, "want"),
    # More than one call of the model.
    "consistency of two calls": Feature(
        {"loss": 'again = logits(model(x + 0.1))\nloss = loss + 0.1 * F.mse_loss(again, out, reduction="sum")'},
        "calls",
    ),
    "two views in one call": Feature(
        {
            "inputs": "x = torch.cat([x, x.flip(1)])\ny = torch.cat([y, y])",
        },
        "targets",
    ),
    "pass without gradients first": Feature(
        {
            "inputs": "with torch.no_grad():\n    soft = logits(model(x)).softmax(1)",
            "loss": "loss = loss + 0.1 * (soft * -out.log_softmax(1)).sum()",
        },
        "calls",
    ),
    "pass without gradients after": Feature(
        {
            "loss": "with torch.no_grad():\n    soft = logits(model(x * 0.9)).softmax(1)\n"
            "loss = loss + 0.1 * (soft * -out.log_softmax(1)).sum()",
        },
        "calls",
    ),
    "pass in evaluation mode first": Feature(
        {
            "inputs": "model.eval()\nwith torch.no_grad():\n    soft = logits(model(x)).softmax(1)\nmodel.train()",
            "loss": "loss = loss + 0.1 * (soft * -out.log_softmax(1)).sum()",
        },
        "calls",
    ),
    "second call for some micro-batches": Feature(
        {"loss": "if float(x[0, 0]) > 0:\n    loss = loss + 0.1 * logits(model(-x)).square().sum()"},
        "calls",
        Verdict.ROWS,
    ),
    "second call at random": Feature(
        {"loss": "if torch.rand(()) < 0.5:\n    loss = loss + 0.1 * logits(model(-x)).square().sum()"},
        "calls",
        Verdict.ROWS,
    ),
    "checkpoint around the model": Feature(
        {"imports": "from torch.utils.checkpoint import checkpoint"},
        "call",
        call="checkpoint(model, x, use_reentrant=False)",
    ),
    "call by keyword": Feature({}, "call", call="model(x=x)"),
    "part of the model alone": Feature(
        {"loss": "loss = loss + 1e-2 * model.head(x[:, :1].expand(-1, 16)).square().sum()"}, "part", Verdict.ROWS
    ),
    # What stands beside the model.
    "teacher": Feature(
        {
            "model": "torch.manual_seed(7)\n"
            "teacher = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)",
            "loss": "with torch.no_grad():\n    soft = teacher(x).softmax(1)\n"
            "loss = loss + 0.5 * (soft * -out.log_softmax(1)).sum()",
        },
        "teacher",
    ),
    "teacher that is a copy": Feature(
        {
            "imports": _COPY,
            "model": "teacher = deepcopy(model).eval().requires_grad_(False)",
            "loss": "with torch.no_grad():\n    soft = logits(teacher(x)).softmax(1)\n"
            "loss = loss + 0.5 * (soft * -out.log_softmax(1)).sum()",
        },
        "teacher",
    ),
    "teacher that follows": Feature(
        {
            "imports": _COPY,
            "model": "teacher = deepcopy(model).eval().requires_grad_(False)",
            "loss": "with torch.no_grad():\n    soft = logits(teacher(x)).softmax(1)\n"
            "loss = loss + 0.5 * (soft * -out.log_softmax(1)).sum()",
            "updated": "with torch.no_grad():\n"
            "    for t, p in zip(teacher.parameters(), model.parameters()):\n"
            '        t.lerp_(p.full_tensor() if hasattr(p, "full_tensor") else p, 0.1)',
        },
        "teacher",
        Verdict.RESUME,
    ),
    "copy of the placed model": Feature(
        {"imports": _COPY, "placed": "copy = deepcopy(model).eval()"}, "teacher", Verdict.ROWS
    ),
    "queue of outputs": Feature(
        {
            "placed": "queue = torch.zeros(8, 3)",
            "loss": "loss = loss + 0.1 * (out @ queue.t()).square().sum()\n"
            "queue = torch.cat([queue, out.detach().float()])[-8:]",
        },
        "queue",
        Verdict.STATE,
    ),
    "center of outputs": Feature(
        {
            "placed": "center = torch.zeros(3)",
            "loss": "loss = loss + 0.1 * (out - center).square().sum()\n"
            "center = 0.9 * center + 0.1 * out.detach().float().mean(0)",
        },
        "queue",
        Verdict.STATE,
    ),
    "numbers added up": Feature(
        {
            "loss": "step.sum(correct=(out.argmax(1) == y).sum(), error=loss.detach())",
            "report": 'print("step", step.number, "sums", int(step.sums["correct"]), float(step.sums["error"]).hex())',
        },
        "sums",
    ),
    "count of micro-batches": Feature(
        {"placed": "count = 0", "inputs": "count += 1\nx = x * (1 + 0.01 * count)"}, "count", Verdict.STATE
    ),
    "count of steps": Feature(
        {"placed": "count = 0", "step": "count += 1", "inputs": "x = x * (1 + 0.01 * count)"}, "count", Verdict.RESUME
    ),
    "count of steps in run.state": Feature(
        {
            "step": 'run.state["count"] = run.state.get("count", 0) + 1',
            "inputs": 'x = x * (1 + 0.01 * run.state["count"])',
        },
        "count",
    ),
    "generator of one's own in a micro-batch": Feature(
        {
            "placed": "generator = torch.Generator().manual_seed(1)",
            "inputs": "x = x + 0.1 * torch.randn(x.shape, generator=generator)",
        },
        "generator",
        Verdict.STATE,
    ),
    "generator of one's own in a step": Feature(
        {
            "placed": "generator = torch.Generator().manual_seed(1)",
            "step": "jitter = float(torch.rand((), generator=generator))",
            "inputs": "x = x + 0.1 * jitter",
        },
        "generator",
        Verdict.RESUME,
    ),
    "generator seeded by the step": Feature(
        {
            "step": "jitter = float(torch.rand((), generator=torch.Generator().manual_seed(step.number)))",
            "inputs": "x = x + 0.1 * jitter",
        },
        "generator",
    ),
    "rank in the loss": Feature({"loss": "loss = loss * (1 + 0.1 * run.rank)"}, "rank", Verdict.STATE),
    # Modes.
    "head in evaluation mode": Feature({"step": "model.head.eval()"}, "modes"),
    "evaluation mode from step 3": Feature({"step": "if step.number == 3:\n    model.eval()"}, "modes"),
    "evaluation mode in odd steps": Feature({"step": "model.train(step.number % 2 == 0)"}, "modes"),
    "gradients off at the end of a step": Feature(
        {"updated": "with torch.no_grad():\n    shown = sum(float(p.detach().sum()) for p in model.parameters())"},
        "look",
    ),
    "a look at gradients": Feature(
        {"gradients": "shown = [p.grad.norm() for p in model.parameters() if p.grad is not None]"}, "look"
    ),
    # The data.
    "noise drawn by torch in the dataset": _dataset("self.inputs[number] + 0.1 * torch.randn(12)"),
    "noise drawn by numpy in the dataset": _dataset(
        "self.inputs[number] + 0.1 * float(np.random.rand())", "import numpy as np"
    ),
    "flips drawn by random in the dataset": _dataset(
        "self.inputs[number] if random.random() < 0.5 else self.inputs[number].flip(0)", "import random"
    ),
    "dataset of a list": Feature(dataset="dataset = list(zip(inputs, targets))", slot="dataset"),
    "collate function": Feature(
        {
            "definitions": "def collate(items):\n"
            "    xs, ys = zip(*items)\n    return torch.stack(xs) * 2, torch.stack(ys)\n",
            "steps arguments": "collate=collate",
        },
        "collate",
    ),
    "drop last": Feature({"steps arguments": "drop_last=True"}, "last"),
    "weights of samples": Feature(
        {"steps arguments": "weight=lambda batch: int(batch[1].sum()) + 1"},
        "targets",
        loss='loss = (y * F.cross_entropy(out, y, reduction="none")).sum()',
        adds_up=True,
    ),
    "two batches of a micro-batch": Feature(
        {},
        "call",
        Verdict.ROWS,  # not equally many in each micro-batch
        call="torch.cat([model(part) for part in x.split(2)])",
        refuses_auxiliary=True,
        splits_samples=True,
    ),
    "tensor slices": Feature(
        {"place arguments": 'chunks=2, plan={"*.wide": "colwise", "*.narrow": "rowwise"}'}, "slices", needs_block="mlp"
    ),
    "data on which the rank decides": Feature(
        {"data": "inputs, targets = inputs[run.rank :: run.size], targets[run.rank :: run.size]"},
        "shard",
        Verdict.WRONG,
    ),
    "seed on which the rank decides": Feature({"data": "torch.manual_seed(run.rank)"}, "shard", Verdict.WRONG),
    # Evaluation, state and saves.
    "evaluation": Feature(
        {
            "report": "if step.every(epochs=1):\n"
            "    right = run.sum((logits(model(x)).argmax(1) == y).sum() for x, y in run.each(dataset))\n"
            '    print("step", step.number, "right", int(right))'
        },
        "evaluation",
    ),
    "evaluation of a loss": Feature(
        {
            "report": "if step.every(steps=2):\n"
            '    error = run.sum(F.cross_entropy(logits(model(x)), y, reduction="sum")'
            " for x, y in run.each(dataset, batch=7))\n"
            '    print("step", step.number, "error", float(error).hex())\n    run.log(error=error)'
        },
        "evaluation",
    ),
    "evaluation that draws": Feature(
        {
            "report": "if step.every(epochs=1):\n"
            "    error = run.sum(logits(model(x + torch.randn_like(x))).float().square().sum()"
            " for x, y in run.each(dataset))\n"
            '    print("step", step.number, "error", float(error).hex())'
        },
        "evaluation",
    ),
    "early stopping": Feature(
        {
            "placed": 'if run.state.get("worse") == 3:\n    print("weights", run.fingerprint())\n    return',
            "report": "if step.every(steps=1):\n"
            "    error = float(step.loss)\n"
            '    best = min(error, run.state.get("best", error))\n'
            '    run.state.update(best=best, worse=0 if error == best else run.state.get("worse", 0) + 1)\n'
            '    if run.state["worse"] == 3:\n        run.save()\n        break',
        },
        "state",
    ),
    "state of nested values": Feature(
        {"updated": 'run.state.setdefault("losses", []).append(float(step.loss))'}, "state"
    ),
    "save at step 2": Feature({"report": "if step.number == 2:\n    run.save()"}, "save"),
    "save after each step": Feature({"report": "run.save()"}, "save"),
    "save at random": Feature(
        {"imports": "import random", "report": "if random.random() < 0.5:\n    run.save()"}, "save"
    ),
    "state changed after a save": Feature(
        {
            "inputs": 'x = x + 0.1 * run.state.get("late", 0)',
            "end": 'if step.number % 2:\n    run.save()\nrun.state["late"] = step.number % 3',
        },
        "save",
        Verdict.WRONG,
    ),
    "save by rank 0 alone": Feature(
        {"report": "if run.rank == 0 and step.number == 2:\n    run.save()"}, "save", Verdict.WRONG
    ),
    "print by rank 0 alone": Feature({"report": 'if run.rank == 0:\n    print("this is rank 0")'}, "log"),
    "log": Feature({"report": "run.log(twice=2 * step.loss)"}, "log"),
    "frozen parameters in the optimizer": Feature({}, "frozen"),
    # What a loop must not do.
    "backward of one's own": Feature({"loss": "loss.backward(retain_graph=True)"}, "wrong", Verdict.WRONG),
    "gradients scaled": Feature(
        {"gradients": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"},
        "wrong",
        Verdict.WRONG,
    ),
    "gradients clipped by torch": Feature(
        {"gradients": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"}, "wrong", Verdict.WRONG
    ),
    "weights clamped after the update": Feature(
        {"updated": "with torch.no_grad():\n    for p in model.parameters():\n        p.clamp_(-0.5, 0.5)"},
        "wrong",
        Verdict.WRONG,
    ),
    "head frozen later": Feature(
        {"step": "if step.number == 3:\n    model.head.weight.requires_grad_(False)"}, "wrong", Verdict.WRONG
    ),
    "head frozen and back": Feature(
        {
            "loss": "model.head.requires_grad_(False)\nloss = loss + 0.1 * logits(model(x)).square().sum()\n"
            "model.head.requires_grad_(True)"
        },
        "calls",
        Verdict.ROWS,
    ),
    "optimizer stepped": Feature({"updated": "optimizer.step()"}, "wrong", Verdict.WRONG),
    "rate written into groups": Feature(
        {"step": 'for group in optimizer.param_groups:\n    group["lr"] = 0.1 / step.number'}, "wrong", Verdict.WRONG
    ),
    "head replaced": Feature(
        {"updated": "if step.number == 2:\n    model.head = nn.Linear(16, 3)"}, "wrong", Verdict.WRONG
    ),
    "exchange of one's own": Feature(
        {
            "imports": "import torch.distributed as dist",
            "backward": "if dist.is_initialized():\n    dist.all_reduce(torch.ones(1))",
        },
        "wrong",
        Verdict.WRONG,
    ),
    "exchange between steps": Feature(
        {
            "imports": "import torch.distributed as dist",
            "updated": "if dist.is_initialized():\n    dist.barrier()",
        },
        "exchange",
    ),
    "dropout switched by a rank": Feature({"step": "if run.rank == 0:\n    model.eval()"}, "wrong", Verdict.WRONG),
    # Before its backward: a rank may have no micro-batch after it, and has lost none then.
    "step left early": Feature({"inputs": "if step.number == 3:\n    break"}, "wrong", Verdict.WRONG),
    "autocast around the loop": Feature(
        {"placed": 'torch.autocast("cpu", torch.bfloat16).__enter__()'}, "autocast", Verdict.WRONG
    ),
    "hook on a gradient of the placed model": Feature(
        {"placed": "model.head.weight.register_hook(lambda gradient: gradient * 0.5)"}, "hook", Verdict.WRONG
    ),
    "hook on a forward of the placed model": Feature(
        {"placed": "model.register_forward_hook(lambda module, args, output: None)"}, "hook"
    ),
    "hook on the optimizer": Feature(
        {"placed": "optimizer.register_step_pre_hook(lambda *args: None)"}, "hook", Verdict.WRONG
    ),
    # Precision.
    "bf16": Feature({"join arguments": 'precision="bf16"'}, "precision"),
    "bf16-compute": Feature({"join arguments": 'precision="bf16-compute"'}, "precision"),
    "fp16": Feature({"join arguments": 'precision="fp16"'}, "precision"),
    "audits": Feature({"join arguments": 'placement={"audit_every": 2}'}, "placement"),
    "recomputation": Feature({"join arguments": 'placement={"recompute": "full"}'}, "placement"),
    **_draws(),
}
