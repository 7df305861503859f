"""Blocks of a model: each maps 16 numbers of a sample to 16 numbers, in one of the ways that people write."""

from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Final

from grammar.verdict import Verdict


@dataclass(frozen=True)
class Block:
    """A class of module. `before` are definitions that it needs at the top of the program, `imports` its imports."""

    init: str
    forward: str
    verdict: Verdict = Verdict.RIGHT
    before: str = ""
    imports: tuple[str, ...] = ()
    methods: str = ""
    bases: str = field(default="nn.Module")

    def source(self, name: str) -> str:
        """Return the definition of the class."""
        body = indent(dedent(self.init).strip("\n"), " " * 8)
        forward = indent(dedent(self.forward).strip("\n"), " " * 8)
        methods = "\n" + indent(dedent(self.methods).strip("\n"), " " * 4) + "\n" if self.methods else ""
        text = f"class {name}({self.bases}):\n    def __init__(self):\n        super().__init__()\n{body}\n{methods}"
        return f"{text}\n    def forward(self, x):\n{forward}\n"


_LAYER = "self.layer = nn.Linear(16, 16)"
_CHECKPOINT = ("from torch.utils.checkpoint import checkpoint",)
_REVERSAL = """
class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * gradient
"""
_MASK = """
@lru_cache
def mask(size):
    return torch.ones(size, size).tril().bool()
"""

# The simplest first: a failing program shrinks toward it.
BLOCKS: Final[dict[str, Block]] = {
    "linear": Block(_LAYER, "return self.layer(x)"),
    "mlp": Block(
        "self.wide = nn.Linear(16, 24)\nself.narrow = nn.Linear(24, 16)",
        "return self.narrow(F.relu(self.wide(x)))",
    ),
    "residual": Block(_LAYER, "return x + self.layer(x).tanh()"),
    "residual last": Block(_LAYER, "return self.layer(x).tanh() + x"),
    "residual in place": Block(_LAYER, "h = self.layer(x)\nh += x\nreturn h.tanh()"),
    "residual outside of a norm": Block(
        "self.norm = nn.LayerNorm(16)\nself.layer = nn.Linear(16, 16)", "return self.norm(x + F.gelu(self.layer(x)))"
    ),
    "residual inside of a norm": Block(
        "self.norm = nn.LayerNorm(16)\nself.layer = nn.Linear(16, 16)", "return x + F.gelu(self.layer(self.norm(x)))"
    ),
    "two residuals": Block(
        "self.first = nn.Linear(16, 16)\nself.second = nn.Linear(16, 16)",
        "x = x + self.first(x).tanh()\nreturn x + self.second(x).tanh()",
    ),
    "residual with a projection": Block(
        "self.layer = nn.Linear(16, 16)\nself.short = nn.Linear(16, 16, bias=False)",
        "return F.relu(self.layer(x)) + self.short(x)",
    ),
    "reads its input three times": Block(
        "self.layer = nn.Linear(16, 16)\nself.gate = nn.Linear(16, 16)",
        "gate = self.gate(x).sigmoid()\nreturn gate * self.layer(x).tanh() + (1 - gate) * x",
    ),
    "parallel branches": Block(
        "self.branches = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))",
        "return torch.cat([branch(x).tanh() for branch in self.branches], 1)",
    ),
    "layer called twice": Block(_LAYER, "return self.layer(F.relu(self.layer(x)))"),
    "shared layer": Block(
        "self.layer = nn.Linear(16, 16)\nself.same = self.layer", "return self.same(self.layer(x).tanh())"
    ),
    "tied weights": Block(
        "self.weight = nn.Parameter(torch.randn(16, 8) * 0.3)",
        "return F.linear(F.linear(x, self.weight.t()).tanh(), self.weight)",
    ),
    "tied layers": Block(
        "self.layer = nn.Linear(16, 16)\nself.other = nn.Linear(16, 16)\nself.other.weight = self.layer.weight",
        "return self.other(self.layer(x).tanh())",
    ),
    "attention": Block(
        "self.attention = nn.MultiheadAttention(8, 2, batch_first=True)",
        "h = x.view(-1, 2, 8)\nreturn x + self.attention(h, h, h, need_weights=False)[0].flatten(1)",
    ),
    "attention whose key is its query": Block(
        "self.key = nn.Linear(8, 8)\nself.value = nn.Linear(8, 8)",
        """
        h = x.view(-1, 2, 8)
        key = self.key(h)
        return F.scaled_dot_product_attention(key, key, self.value(h)).flatten(1)
        """,
    ),
    "causal attention with a cached mask": Block(
        "self.qkv = nn.Linear(4, 12)",
        """
        query, key, value = self.qkv(x.view(-1, 4, 4)).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask(4)).flatten(1)
        """,
        before=_MASK,
        imports=("from functools import lru_cache",),
    ),
    "cross attention": Block(
        "self.query = nn.Parameter(torch.randn(2, 8))\nself.attention = nn.MultiheadAttention(8, 2, batch_first=True)",
        """
        h = x.view(-1, 2, 8)
        query = self.query.expand(len(x), 2, 8)
        return self.attention(query, h, h, need_weights=False)[0].flatten(1)
        """,
    ),
    "transformer layer": Block(
        "self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)",
        "return self.layer(x.view(-1, 2, 8)).flatten(1)",
    ),
    "transformer with one input": Block(
        "self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)",
        "h = x.view(-1, 2, 8)\nreturn self.net(h, h).flatten(1)",
    ),
    "lstm": Block("self.lstm = nn.LSTM(4, 4, batch_first=True)", "return self.lstm(x.view(-1, 4, 4))[0].flatten(1)"),
    "gru": Block(
        "self.gru = nn.GRU(4, 2, batch_first=True, bidirectional=True)",
        "return self.gru(x.view(-1, 4, 4))[0].flatten(1)",
    ),
    "rnn cell by hand": Block(
        "self.cell = nn.GRUCell(4, 16)",
        """
        h = x
        for part in x.chunk(4, 1):
            h = self.cell(part, h)
        return h
        """,
    ),
    "batch norm": Block(
        "self.layer = nn.Linear(16, 16)\nself.norm = nn.BatchNorm1d(16)", "return F.relu(self.norm(self.layer(x)))"
    ),
    "group norm": Block("self.norm = nn.GroupNorm(4, 16)", "return F.silu(self.norm(x))"),
    "layer norm": Block("self.norm = nn.LayerNorm(16)", "return self.norm(x)"),
    "rms norm": Block("self.norm = nn.RMSNorm(16)", "return self.norm(x)"),
    "instance norm": Block(
        "self.norm = nn.InstanceNorm1d(4, affine=True)", "return self.norm(x.view(-1, 4, 4)).flatten(1)"
    ),
    "instance norm with statistics": Block(
        "self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)",
        "return self.norm(x.view(-1, 4, 4)).flatten(1)",
        Verdict.WRONG,
    ),
    "dropout": Block(
        "self.layer = nn.Linear(16, 16)\nself.dropout = nn.Dropout(0.2)", "return self.dropout(self.layer(x).relu())"
    ),
    "functional dropout": Block(_LAYER, "return F.dropout(self.layer(x), 0.2, self.training)"),
    "dropout in place": Block(_LAYER, "return F.dropout(self.layer(x), 0.2, self.training, inplace=True)"),
    "random relu": Block("self.layer = nn.Linear(16, 16)\nself.act = nn.RReLU()", "return self.act(self.layer(x))"),
    "noise": Block(
        _LAYER, "h = self.layer(x)\nif self.training:\n    h = h + 0.1 * torch.randn_like(h)\nreturn h.tanh()"
    ),
    "convolution": Block(
        "self.conv = nn.Conv1d(4, 4, 3, padding=1)", "return F.relu(self.conv(x.view(-1, 4, 4))).flatten(1)"
    ),
    "convolution in two dimensions": Block(
        "self.conv = nn.Conv2d(1, 4, 3, padding=1)\nself.norm = nn.BatchNorm2d(4)",
        "return F.max_pool2d(F.relu_(self.norm(self.conv(x.view(-1, 1, 4, 4)))), 2).flatten(1)",
    ),
    "depthwise convolution": Block(
        "self.depth = nn.Conv2d(4, 4, 2, padding='same', groups=4)\nself.point = nn.Conv2d(4, 4, 1)",
        "h = x.view(-1, 4, 2, 2)\nreturn (h + self.point(F.hardswish(self.depth(h)))).flatten(1)",
    ),
    "transposed convolution": Block(
        "self.down = nn.Conv1d(1, 4, 4, stride=4)\nself.up = nn.ConvTranspose1d(4, 1, 4, stride=4)",
        "return self.up(self.down(x.unsqueeze(1)).relu()).squeeze(1)",
    ),
    "channels last": Block(
        "self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)",
        "h = x.view(-1, 4, 2, 2).to(memory_format=torch.channels_last)\nreturn self.conv(h).relu().flatten(1)",
        Verdict.ROWS,
    ),
    "mixture of experts, masked": Block(
        "self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))\nself.router = nn.Linear(16, 3)",
        """
        weights, chosen = self.router(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            out[rows] = expert(x[rows])
        return out * weights.unsqueeze(1)
        """,
    ),
    "mixture of experts, called if chosen": Block(
        "self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))\nself.router = nn.Linear(16, 4)",
        """
        weights, chosen = self.router(x).softmax(1).topk(2)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place].unsqueeze(1))
        return out
        """,
    ),
    "skipped at random": Block(
        _LAYER, "if self.training and torch.rand(()) < 0.5:\n    return x\nreturn x + self.layer(x).tanh()"
    ),
    "weight norm": Block(
        "self.layer = weight_norm(nn.Linear(16, 16))",
        "return self.layer(x).tanh()",
        imports=("from torch.nn.utils.parametrizations import weight_norm",),
    ),
    "spectral norm": Block(
        "self.layer = spectral_norm(nn.Linear(16, 16))",
        "return self.layer(x).tanh()",
        Verdict.WRONG,
        imports=("from torch.nn.utils.parametrizations import spectral_norm",),
    ),
    "orthogonal": Block(
        "self.layer = orthogonal(nn.Linear(16, 16))",
        "return self.layer(x)",
        imports=("from torch.nn.utils.parametrizations import orthogonal",),
    ),
    "parametrization": Block(
        'self.layer = nn.Linear(16, 16)\nparametrize.register_parametrization(self.layer, "weight", Symmetric())',
        "return self.layer(x)",
        before="""
class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()
""",
        imports=("from torch.nn.utils import parametrize",),
    ),
    "buffer": Block(
        'self.layer = nn.Linear(16, 16)\nself.register_buffer("scale", torch.linspace(0.5, 1.5, 16))',
        "return self.layer(x) * self.scale",
    ),
    "counter in a buffer": Block(
        'self.layer = nn.Linear(16, 16)\nself.register_buffer("calls", torch.zeros(()))',
        "if self.training:\n    self.calls += 1\nreturn self.layer(x) / (1 + 0.01 * self.calls)",
        Verdict.WRONG,
    ),
    "running mean by hand": Block(
        'self.layer = nn.Linear(16, 16)\nself.register_buffer("mean", torch.zeros(16))',
        """
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.mean)
        """,
        Verdict.WRONG,
    ),
    "counter in the module": Block(
        "self.layer = nn.Linear(16, 16)\nself.calls = 0",
        "self.calls += 1\nreturn self.layer(x) * (1 + 0.01 * (self.calls % 5))",
        Verdict.STATE,
    ),
    "float64": Block(
        "self.layer = nn.Linear(16, 16, dtype=torch.float64)", "return self.layer(x.double()).tanh().to(x.dtype)"
    ),
    "float64 beside float32": Block(
        "self.layer = nn.Linear(16, 16)\nself.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))",
        "return (self.layer(x) * self.scale).to(x.dtype)",
        Verdict.ROWS,
    ),
    "half in float32": Block(_LAYER, "return F.linear(x.bfloat16(), self.layer.weight.bfloat16()).to(x.dtype).tanh()"),
    "transposed parameter": Block(
        "self.weight = nn.Parameter(torch.randn(16, 16).t() * 0.3)",
        "return F.linear(x, self.weight).tanh()",
        Verdict.ROWS,
    ),
    "transposed parameter of another shape": Block(
        "self.weight = nn.Parameter(torch.randn(24, 16).t().div(4))",
        "return ((x @ self.weight).relu() @ self.weight.t())",
        Verdict.ROWS,
    ),
    "expanded parameter": Block(
        "self.weight = nn.Parameter(torch.randn(16, 1) * 0.3)", "return x * self.weight.expand(16, 16).sum(1)"
    ),
    "parameter of three dims": Block(
        "self.weight = nn.Parameter(torch.randn(4, 4, 4) * 0.5)",
        'return torch.einsum("bhi,hij->bhj", x.view(-1, 4, 4), self.weight).flatten(1)',
    ),
    "scalar parameter": Block(
        "self.layer = nn.Linear(16, 16)\nself.scale = nn.Parameter(torch.tensor(1.0))",
        "return self.layer(x) * self.scale",
        Verdict.ROWS,
    ),
    "parameter of one number": Block(
        "self.layer = nn.Linear(16, 16)\nself.scale = nn.Parameter(torch.ones(1))", "return self.layer(x) * self.scale"
    ),
    "unused parameter": Block(
        "self.layer = nn.Linear(16, 16)\nself.unused = nn.Linear(16, 16)", "return self.layer(x).tanh()"
    ),
    "parameter that is used by some samples": Block(
        "self.layer = nn.Linear(16, 16)\nself.other = nn.Linear(16, 16)",
        "return self.layer(x) if x[0, 0] > 0 else self.other(x)",
    ),
    "frozen layer": Block(
        "self.frozen = nn.Linear(16, 16).requires_grad_(False)\nself.layer = nn.Linear(16, 16)",
        "return self.layer(self.frozen(x).tanh())",
    ),
    "frozen bias": Block(
        "self.layer = nn.Linear(16, 16)\nself.layer.bias.requires_grad_(False)", "return self.layer(x).tanh()"
    ),
    "frozen part that stays in evaluation mode": Block(
        "self.frozen = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).requires_grad_(False).eval()\n"
        "self.layer = nn.Linear(16, 16)",
        "return self.layer(self.frozen(x))",
        methods="def train(self, mode=True):\n    super().train(mode)\n    self.frozen.eval()\n    return self",
    ),
    "part without gradients": Block(
        "self.first = nn.Linear(16, 16)\nself.layer = nn.Linear(16, 16)",
        "with torch.no_grad():\n    gate = self.first(x).sigmoid()\nreturn self.layer(x) * gate",
    ),
    "detached branch": Block(_LAYER, "return self.layer(x).tanh() + 0.5 * self.layer(x.detach())"),
    "checkpoint": Block(
        "self.layer = nn.Linear(16, 16)",
        "return x + checkpoint(self.part, x, use_reentrant=False)",
        methods="def part(self, x):\n    return F.dropout(self.layer(x).tanh(), 0.1, self.training)",
        imports=_CHECKPOINT,
    ),
    "reentrant checkpoint": Block(
        "self.layer = nn.Linear(16, 16)",
        "return x + checkpoint(self.part, x, use_reentrant=True)",
        methods="def part(self, x):\n    return self.layer(x).tanh()",
        imports=_CHECKPOINT,
    ),
    "forward hooks": Block(
        """
        self.layer = nn.Linear(16, 16)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        self.layer.register_forward_hook(lambda module, args, output: output.tanh())
        """,
        "return self.layer(x)",
    ),
    "hook on the gradient of a module": Block(
        """
        self.layer = nn.Linear(16, 16)
        self.layer.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else g * 0.5 for g in inputs)
        )
        """,
        "return self.layer(x)",
    ),
    "hook on the gradient of an activation": Block(
        _LAYER,
        "h = self.layer(x)\nif h.requires_grad:\n    h.register_hook(lambda gradient: gradient * 0.5)\nreturn h",
    ),
    "hook on the gradient of a parameter": Block(
        "self.layer = nn.Linear(16, 16)\nself.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))",
        "return self.layer(x)",
        Verdict.WRONG,
    ),
    "hook on the accumulation of a gradient": Block(
        """
        self.layer = nn.Linear(16, 16)
        self.node = self.layer.weight.view_as(self.layer.weight).grad_fn.next_functions[0][0]
        self.node.register_prehook(lambda gradients: (gradients[0].clamp(-0.1, 0.1),))
        """,
        "return self.layer(x)",
        Verdict.WRONG,
    ),
    "hook after the accumulation of a gradient": Block(
        """
        self.layer = nn.Linear(16, 16)
        self.layer.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-0.1, 0.1))
        """,
        "return self.layer(x)",
        Verdict.WRONG,
    ),
    "in place": Block(_LAYER, "h = self.layer(x)\nh.mul_(0.5).add_(0.1)\nh[:, 0] = 0\nreturn F.relu_(h)"),
    "writes its input": Block(_LAYER, "h = x * 1\nh += 1\nreturn self.layer(h.sigmoid_())"),
    "module dict": Block(
        'self.ways = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})',
        "for name in sorted(self.ways):\n    x = self.ways[name](x).tanh()\nreturn x",
    ),
    "parameter list": Block(
        "self.scales = nn.ParameterList(torch.full((16,), 1 + 0.1 * number) for number in range(3))",
        "for scale in self.scales:\n    x = (x * scale).tanh()\nreturn x",
    ),
    "functional call": Block(
        "self.layer = nn.Linear(16, 16)",
        """
        weights = {name: parameter * 0.5 for name, parameter in self.layer.named_parameters()}
        return functional_call(self.layer, weights, (x,))
        """,
        Verdict.ROWS,
        imports=("from torch.func import functional_call",),
    ),
    "function of one's own": Block(_LAYER, "return self.layer(Reversal.apply(x)) + x", before=_REVERSAL, imports=()),
    "per-sample map": Block(_LAYER, "return torch.vmap(lambda row: self.layer(row).tanh())(x)", Verdict.ROWS),
    "jacobian of a function": Block(
        _LAYER, "return self.layer(torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x))"
    ),
    "embedding": Block(
        "self.table = nn.Embedding(12, 16, padding_idx=0)",
        "return x + self.table((x[:, :4].detach().abs() * 4).long().clamp(max=11)).mean(1)",
    ),
    "embedding with a largest norm": Block(
        "self.table = nn.Embedding(12, 16, max_norm=1.0)",
        "return x + self.table((x[:, :4].detach().abs() * 4).long().clamp(max=11)).mean(1)",
        Verdict.WRONG,
    ),
    "embedding bag": Block(
        'self.table = nn.EmbeddingBag(12, 16, mode="sum")',
        "return x + self.table((x[:, :4].detach().abs() * 4).long().clamp(max=11))",
    ),
    "weight clamped in the forward": Block(
        _LAYER,
        "with torch.no_grad():\n    self.layer.weight.clamp_(-0.3, 0.3)\nreturn self.layer(x)",
        Verdict.WRONG,
    ),
    "prelu": Block(
        "self.layer = nn.Linear(16, 16)\nself.act = nn.PReLU(16, init=0.1)", "return self.act(self.layer(x))"
    ),
    "bilinear": Block("self.layer = nn.Bilinear(16, 16, 16)", "return self.layer(x, x.tanh())"),
    "low rank": Block(
        """
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 16) * 0.3)
        self.up = nn.Parameter(torch.zeros(16, 2))
        """,
        "return self.base(x) + x @ self.down.t() @ self.up.t()",
    ),
    "fourier": Block(_LAYER, "return self.layer(torch.cat([torch.fft.rfft(x).abs()[:, :8]] * 2, 1))"),
    "sorted": Block(_LAYER, "return self.layer(x.sort(1).values).cumsum(1) * 0.1"),
    "straight through": Block(_LAYER, "h = self.layer(x)\nreturn h + (h.sign() - h).detach()"),
    "gumbel softmax": Block(_LAYER, "return x * F.gumbel_softmax(self.layer(x), hard=self.training)"),
    "squeeze and excitation": Block(
        "self.down = nn.Linear(16, 4)\nself.up = nn.Linear(4, 16)",
        "return x * self.up(F.relu(self.down(x))).sigmoid()",
    ),
    "nested blocks": Block(
        "self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.GELU()))",
        "return x + self.inner(x)",
    ),
    "identity": Block("", "return x"),
}
