"""Models: an encoder of 12 numbers to 16, blocks that are connected in one of many ways, and a head of 3 classes."""

from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Final

from grammar.blocks import BLOCKS, Block
from grammar.verdict import Verdict


@dataclass(frozen=True)
class Encoder:
    """The lines that make it, and the expression of its output from `x`."""

    init: str
    output: str


@dataclass(frozen=True)
class Topology:
    """The way in which blocks are connected: `forward` makes `z` of `z`, and `{0}` stands for the first block.

    A topology with an `auxiliary` expression returns a second output.
    """

    blocks: int  # the fewest that it connects
    forward: str
    init: str = ""
    verdict: Verdict = Verdict.RIGHT
    auxiliary: str = ""
    splits_samples: bool = False  # a block may be given a single one
    replays: bool = False  # calls blocks in a checkpoint
    all_blocks: bool = False  # whether `forward` goes through self.blocks, which then is a list


ENCODERS: Final[dict[str, Encoder]] = {
    "linear encoder": Encoder("self.encoder = nn.Linear(12, 16)", "self.encoder(x)"),
    "convolutional encoder": Encoder(
        "self.encoder = nn.Conv1d(1, 4, 3, stride=3)", "self.encoder(x.unsqueeze(1)).relu().flatten(1)"
    ),
    "embedding encoder": Encoder(
        "self.encoder = nn.Embedding(16, 16, padding_idx=0)",
        "self.encoder((x.abs() * 6).long().clamp(max=15)).mean(1)",
    ),
    "parallel encoders": Encoder(
        "self.left = nn.Linear(6, 8)\nself.right = nn.Linear(6, 8)",
        "torch.cat([self.left(x[:, :6]), self.right(x[:, 6:])], 1)",
    ),
    "encoder with batch norm": Encoder(
        "self.encoder = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))",
        "self.encoder(x)",
    ),
    "frozen encoder": Encoder("self.encoder = nn.Linear(12, 16).requires_grad_(False)", "self.encoder(x).tanh()"),
    "encoder of raw parameters": Encoder(
        "self.weight = nn.Parameter(torch.randn(12, 16) * 0.3)\nself.bias = nn.Parameter(torch.zeros(16))",
        "torch.addmm(self.bias, x, self.weight)",
    ),
}

_ALL: Final = "for block in self.blocks:\n    z = block(z)"

TOPOLOGIES: Final[dict[str, Topology]] = {
    "one block": Topology(1, "z = {0}(z)"),
    "chain": Topology(2, "z = {1}({0}(z))"),
    "list": Topology(2, _ALL, all_blocks=True),
    "sequential": Topology(2, "z = self.blocks(z)", all_blocks=True),
    "two branches": Topology(2, "z = {0}(z) + {1}(z)"),
    "three branches": Topology(3, "z = {0}(z) + ({1}(z) - {2}(z))"),
    "two branches that are multiplied": Topology(2, "z = {0}(z) * {1}(z).sigmoid()"),
    "branches in a list": Topology(2, "z = torch.stack([block(z) for block in self.blocks]).mean(0)", all_blocks=True),
    "weighted branches": Topology(
        2,
        "weights = self.mixture.softmax(0)\nz = sum(w * block(z) for w, block in zip(weights, self.blocks))",
        init="self.mixture = nn.Parameter(torch.zeros({count}))",
        all_blocks=True,
    ),
    "residual around a block": Topology(1, "z = z + {0}(z)"),
    "residual around a block, last": Topology(1, "z = {0}(z) + z"),
    "residual around two blocks": Topology(2, "z = z + {1}({0}(z))"),
    "residuals around each block": Topology(2, "for block in self.blocks:\n    z = z + block(z)", all_blocks=True),
    "block called twice": Topology(1, "z = {0}({0}(z))"),
    "block called on two inputs": Topology(1, "z = {0}(z) + {0}(-z)"),
    "recurrence over blocks": Topology(
        2, "for _ in range(2):\n    for block in self.blocks:\n        z = block(z).tanh()", all_blocks=True
    ),
    "shared block": Topology(2, "z = {1}({0}(z)) + self.again(z)", init="self.again = {0}"),
    "u-net": Topology(3, "first = {0}(z)\nsecond = {1}(first)\nz = {2}(second + first) + z"),
    "u-net with a concatenation": Topology(
        2,
        "down = {0}(z)\nup = {1}(down)\nz = self.join(torch.cat([down, up], 1))",
        init="self.join = nn.Linear(32, 16)",
    ),
    "dense": Topology(
        2,
        "kept = [z]\nfor block, reduce in zip(self.blocks, self.reduce):\n"
        "    kept.append(block(reduce(torch.cat(kept, 1))))\nz = sum(kept)",
        init="self.reduce = nn.ModuleList(nn.Linear(16 * (n + 1), 16) for n in range({count}))",
        all_blocks=True,
    ),
    "auxiliary head": Topology(
        2, "first = {0}(z)\nz = {1}(first)", init="self.auxiliary = nn.Linear(16, 3)", auxiliary="self.auxiliary(first)"
    ),
    "auxiliary head on a branch": Topology(
        2, "side = {1}(z)\nz = {0}(z)", init="self.auxiliary = nn.Linear(16, 3)", auxiliary="self.auxiliary(side)"
    ),
    "deep supervision": Topology(
        2,
        "outputs = []\nfor block in self.blocks:\n    z = block(z)\n    outputs.append(self.head(z))",
        auxiliary="torch.stack(outputs).mean(0)",
        all_blocks=True,
    ),
    "encoder and decoder": Topology(
        2,
        "memory = {0}(z)\nz = {1}(self.cross(z.view(-1, 2, 8), memory.view(-1, 2, 8), memory.view(-1, 2, 8))[0]"
        ".flatten(1)) + memory",
        init="self.cross = nn.MultiheadAttention(8, 2, batch_first=True)",
    ),
    "blocks of a dict": Topology(2, "z = {0}(z)\nz = {1}(z) + z"),
    "block chosen by a sample": Topology(2, "z = {0}(z) if z[0, 0] > 0 else {1}(z)"),
    "experts of a list": Topology(
        2,
        "chosen = self.router(z).argmax(1)\nout = z.clone()\nfor number, block in enumerate(self.blocks):\n"
        "    rows = (chosen == number).nonzero().flatten()\n    if len(rows):\n"
        "        out = out.index_add(0, rows, block(z[rows]))\nz = out",
        init="self.router = nn.Linear(16, {count}).requires_grad_(False)",
        splits_samples=True,
        all_blocks=True,
    ),
    "stochastic depth": Topology(
        2,
        "for block in self.blocks:\n    if not self.training or torch.rand(()) < 0.7:\n        z = block(z)",
        all_blocks=True,
    ),
    "stochastic depth by random": Topology(
        2,
        "for block in self.blocks:\n    if not self.training or random.random() < 0.7:\n        z = z + block(z)",
        all_blocks=True,
    ),
    "blocks in random order": Topology(
        2, "for number in torch.randperm({count}).tolist():\n    z = self.blocks[number](z)", all_blocks=True
    ),
    "block without gradients": Topology(2, "with torch.no_grad():\n    z = {0}(z)\nz = {1}(z)"),
    "block with a detached input": Topology(2, "z = {0}(z) + {1}(z.detach())"),
    "block that nobody calls": Topology(2, "z = {0}(z)"),
    "block that evaluation calls": Topology(2, "z = {0}(z) if self.training else {1}({0}(z))"),
    "one block for each half": Topology(2, "z = torch.cat([{0}(z)[:, :8], {1}(z.flip(1))[:, 8:]], 1)"),
    "block in a checkpoint": Topology(1, "z = z + checkpoint({0}, z, use_reentrant=False)", replays=True),
    "block in a reentrant checkpoint": Topology(
        1, "z = z + checkpoint({0}, z, use_reentrant=True)", verdict=Verdict.ROWS, replays=True
    ),
    "two blocks in a checkpoint": Topology(
        2, "z = checkpoint(lambda h: {0}(h) + {1}(h), z, use_reentrant=False)", replays=True
    ),
    "weights of a block in another": Topology(
        1,
        "z = self.others[0]({0}(z)) + F.linear(z, self.others[1].weight)",
        init="self.others = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])",
        verdict=Verdict.ROWS,
    ),
    "blocks that share a weight": Topology(
        1,
        "z = self.others[1]({0}(self.others[0](z)).tanh())",
        init="self.others = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])\n"
        "self.others[1].weight = self.others[0].weight",
    ),
    "blocks that are a list of one": Topology(
        1,
        "z = self.others[1]({0}(self.others[0](z)).tanh())",
        init="shared = nn.Linear(16, 16)\nself.others = nn.ModuleList([shared, shared])",
    ),
}
CONTAINERS: Final = ("list", "attributes", "dict", "sequential")


@dataclass(frozen=True)
class Model:
    """A model by the names of its parts."""

    encoder: str
    topology: str
    blocks: tuple[str, ...]
    container: str

    @property
    def has_auxiliary(self) -> bool:
        """Whether the model returns a second output."""
        return bool(TOPOLOGIES[self.topology].auxiliary)

    @property
    def productions(self) -> tuple[str, ...]:
        """Return the names of all its parts."""
        return (self.encoder, self.topology, *dict.fromkeys(self.blocks))

    @property
    def imports(self) -> set[str]:
        """Return the import statements that its parts need."""
        found = {line for name in self.blocks for line in BLOCKS[name].imports}
        text = self.source()
        if "checkpoint(" in text:
            found.add("from torch.utils.checkpoint import checkpoint")
        if "random.random" in text:
            found.add("import random")
        return found

    def source(self) -> str:
        """Return the definitions of the model and of what it needs."""
        kinds: dict[str, Block] = {name: BLOCKS[name] for name in self.blocks}
        before = dict.fromkeys(dedent(block.before).strip("\n") for block in kinds.values() if block.before)
        classes = [block.source(class_name(name)) for name, block in kinds.items()]
        return "\n\n".join([*(f"{text}\n" for text in before), *classes, self._net()])

    def _net(self) -> str:
        topology, encoder = TOPOLOGIES[self.topology], ENCODERS[self.encoder]
        made = [f"{class_name(name)}()" for name in self.blocks]
        container = self.container
        if topology.all_blocks:
            container = "sequential" if self.container == "sequential" or self.topology == "sequential" else "list"
        match container:
            case "list":
                lines = [f"self.blocks = nn.ModuleList([{', '.join(made)}])"]
            case "sequential":
                lines = [f"self.blocks = nn.Sequential({', '.join(made)})"]
            case "dict":
                items = ", ".join(f'"block{number}": {text}' for number, text in enumerate(made))
                lines = [f"self.blocks = nn.ModuleDict({{{items}}})"]
            case _:
                lines = [f"self.block{number} = {text}" for number, text in enumerate(made)]
        names = [
            {"dict": f'self.blocks["block{number}"]', "attributes": f"self.block{number}"}.get(
                container, f"self.blocks[{number}]"
            )
            for number in range(len(made))
        ]

        def fill(text: str) -> str:
            for number, name in enumerate(names):
                text = text.replace(f"{{{number}}}", name)
            return text.replace("{count}", str(len(names)))

        init = [encoder.init, *lines, "self.head = nn.Linear(16, 3)", fill(topology.init)]
        result = f"return self.head(z), {topology.auxiliary}" if topology.auxiliary else "return self.head(z)"
        forward = [f"z = {encoder.output}", fill(topology.forward), result]
        body, steps = ("\n".join(filter(None, part)) for part in (init, forward))
        return (
            f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{indent(body, ' ' * 8)}\n\n"
            f"    def forward(self, x):\n{indent(steps, ' ' * 8)}\n"
        )


def class_name(block: str) -> str:
    """Return the name of the class of a kind of block."""
    words = "".join(letter if letter.isalnum() else " " for letter in block.replace("'", "")).split()
    return "".join(word.capitalize() for word in words) + "Block"
