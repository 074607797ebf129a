"""Lets real megatron-core run without a GPU: device="cuda" becomes the CPU, and modules with its parameter names and extra
state replace transformer_engine. Only the code of megatron-core, the peer, runs on them.
"""
import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from unittest.mock import MagicMock


def install_cpu_patches():
    """Let megatron-core code that says device='cuda' run on CPU, as it stands: torch.compile() would call a C++ compiler, a minute for a model."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported
    import numpy, torch
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = True
    from torch.overrides import TorchFunctionMode
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod      # megatron-core <= 0.14 with numpy 2

    cpu = torch.device("cpu")

    def fix(x):
        if isinstance(x, str) and x.startswith("cuda"):
            return cpu
        if isinstance(x, torch.device) and x.type == "cuda":
            return cpu
        return x

    class Cuda2Cpu(TorchFunctionMode):
        def __torch_function__(self, func, types_, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if getattr(func, "__name__", "") == "cuda" and args and isinstance(args[0], torch.Tensor):
                return args[0]
            if "device" in kwargs:
                kwargs["device"] = fix(kwargs["device"])
            if getattr(func, "__name__", "") == "to":
                args = tuple(fix(a) for a in args)
            if getattr(func, "__name__", "") == "type" and len(args) > 1 and isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch.")) + args[2:]
            return func(*args, **kwargs)

    Cuda2Cpu().__enter__()

    class _Ev:
        def __init__(self, *a, **k): pass
        def record(self, *a, **k): pass
        def wait(self, *a, **k): pass
        def synchronize(self, *a, **k): pass
        def query(self): return True
        def wait_stream(self, *a, **k): pass
        def wait_event(self, *a, **k): pass
        def record_event(self, *a, **k): return _Ev()
        cuda_stream = 0

    c = torch.cuda
    c.synchronize = lambda *a, **k: None
    c.current_device = lambda: cpu
    c.set_device = lambda *a, **k: None
    c.current_stream = lambda *a, **k: _Ev()
    c.default_stream = lambda *a, **k: _Ev()
    c.Stream = _Ev
    c.Event = _Ev
    c.stream = lambda *a, **k: contextlib.nullcontext()
    c.device_count = lambda: 1
    c.empty_cache = lambda: None
    c.get_rng_state = lambda *a, **k: torch.arange(16, dtype=torch.uint8)
    c.set_rng_state = lambda *a, **k: None
    c.manual_seed = lambda *a, **k: None
    c.memory_allocated = lambda *a, **k: 0
    c.max_memory_allocated = lambda *a, **k: 0
    c.memory_reserved = lambda *a, **k: 0
    c.get_device_capability = lambda *a, **k: (9, 0)
    c.get_device_properties = lambda *a, **k: types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=1 << 30)
    for n, d in (("FloatTensor", torch.float32), ("HalfTensor", torch.float16), ("BFloat16Tensor", torch.bfloat16),
                 ("LongTensor", torch.int64), ("IntTensor", torch.int32), ("DoubleTensor", torch.float64)):
        setattr(c, n, (lambda dt: (lambda *a: torch.tensor(*a, dtype=dt) if a and isinstance(a[0], (list, tuple))
                                   else torch.empty(*a, dtype=dt)))(d))


def patch_dist():
    import torch, torch.distributed as dist
    a2a = dist.all_to_all_single
    lst = lambda x: x.tolist() if torch.is_tensor(x) else x
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        return a2a(output, input, lst(output_split_sizes), lst(input_split_sizes), group=group, async_op=async_op)
    dist.all_to_all_single = all_to_all_single


def install_te_stub(version="2.6.0"):
    """A CPU stand-in for transformer_engine with the parameter names / extra-state behaviour of TE >= 2.1:
    every module has `_extra_state` = empty uint8 tensor; LayerNormLinear owns layer_norm_weight (+bias);
    GroupedLinear owns weight0..N-1. Only so that megatron-core's own TE wrappers (the real code under test) run."""
    import importlib.machinery
    import torch
    import torch.nn.functional as F
    from torch import nn
    import torch.distributed as dist

    def mod(name):
        m = types.ModuleType(name)
        m.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        m.__path__ = []
        sys.modules[name] = m
        if "." in name:
            p, c = name.rsplit(".", 1)
            setattr(sys.modules[p], c, m)
        return m

    class Base(nn.Module):
        def get_extra_state(self): return torch.empty(0, dtype=torch.uint8)
        def set_extra_state(self, s): pass
        def init_fp8_metadata(self, *a, **k): pass
        def set_tensor_parallel_group(self, g): pass
        def backward_dw(self): pass
        fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        fp8 = False
        fp8_calibration = False

    def _norm(x, w, b, kind, eps, zc):
        xf = x.float()
        w = w.float() + (1.0 if zc else 0.0)
        if kind == "RMSNorm":
            y = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * w
        else:
            y = F.layer_norm(xf, (x.shape[-1],), w, b.float(), eps)
        return y.to(x.dtype)

    class _NormMod(Base):
        kind = "RMSNorm"
        def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, zero_centered_gamma=False,
                     hidden_size=None, device=None, dtype=None, params_dtype=None, **kw):
            super().__init__()
            n = normalized_shape or hidden_size
            n = n if isinstance(n, int) else n[-1]
            self.eps, self.zc = eps, zero_centered_gamma
            dt = params_dtype or dtype
            self.weight = nn.Parameter(torch.full((n,), 0.0 if zero_centered_gamma else 1.0, dtype=dt))
            if self.kind == "LayerNorm":
                self.bias = nn.Parameter(torch.zeros(n, dtype=dt))
            if sequence_parallel is not None:
                for p in self.parameters():
                    p.sequence_parallel = sequence_parallel
        def forward(self, x): return _norm(x, self.weight, getattr(self, "bias", None), self.kind, self.eps, self.zc)

    class RMSNorm(_NormMod): kind = "RMSNorm"
    class LayerNorm(_NormMod): kind = "LayerNorm"

    class Linear(Base):
        def __init__(self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
                     tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True,
                     return_bias=False, params_dtype=None, parallel_mode=None, device="cpu", **kw):
            super().__init__()
            self.parallel_mode, self.return_bias, self.use_bias = parallel_mode, return_bias, bias
            self.tp_group, self.tp_size = tp_group, tp_size
            o = out_features // tp_size if parallel_mode == "column" else out_features
            i = in_features // tp_size if parallel_mode == "row" else in_features
            self.in_features, self.out_features = i, o
            self._pre_params(in_features, params_dtype)
            self.weight = nn.Parameter(torch.zeros(o, i, dtype=params_dtype))
            if parallel_mode:
                self.weight.tensor_model_parallel = True
                self.weight.partition_dim = 0 if parallel_mode == "column" else 1
                self.weight.partition_stride = 1
            if bias:
                self.bias = nn.Parameter(torch.zeros(o, dtype=params_dtype))
            else:
                self.bias = torch.Tensor()
        def _pre_params(self, n, dt): pass
        def _pre(self, x): return x
        def forward(self, x, is_first_microbatch=None):
            x = self._pre(x)
            y = F.linear(x, self.weight)
            if self.parallel_mode == "row" and self.tp_size > 1:
                y = y.contiguous(); dist.all_reduce(y, group=self.tp_group)
            if self.use_bias and not self.return_bias:
                y = y + self.bias
            if getattr(self, "return_layernorm_output", False):
                return (y, self.bias, x) if self.return_bias else (y, x)
            return (y, self.bias) if self.return_bias else y

    class LayerNormLinear(Linear):
        def __init__(self, in_features, out_features, eps=1e-5, normalization="LayerNorm", zero_centered_gamma=False,
                     return_layernorm_output=False, **kw):
            self._a = (eps, normalization, zero_centered_gamma)
            super().__init__(in_features, out_features, **kw)
            self.return_layernorm_output = return_layernorm_output
        def __setattr__(self, k, v):
            if k == "_a": object.__setattr__(self, k, v)
            else: super().__setattr__(k, v)
        def _pre_params(self, n, dt):
            self.eps, self.normalization, self.zero_centered_gamma = self._a
            self.layer_norm_weight = nn.Parameter(torch.full((n,), 0.0 if self.zero_centered_gamma else 1.0, dtype=dt))
            self.layer_norm_bias = None
            if self.normalization == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.zeros(n, dtype=dt))
        def _pre(self, x):
            return _norm(x, self.layer_norm_weight, self.layer_norm_bias, self.normalization, self.eps,
                         self.zero_centered_gamma)

    class GroupedLinear(Base):
        def __init__(self, num_gemms, in_features, out_features, params_dtype=None, bias=True, return_bias=False,
                     parallel_mode=None, tp_size=1, **kw):
            super().__init__()
            self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
            o = out_features // tp_size if parallel_mode == "column" else out_features
            i = in_features // tp_size if parallel_mode == "row" else in_features
            self.in_features, self.out_features = i, o
            for g in range(num_gemms):
                self.register_parameter(f"weight{g}", nn.Parameter(torch.zeros(o, i, dtype=params_dtype)))
                if bias:
                    self.register_parameter(f"bias{g}", nn.Parameter(torch.zeros(o, dtype=params_dtype)))
        def forward(self, x, m_splits, is_first_microbatch=None):
            m = m_splits.tolist() if torch.is_tensor(m_splits) else list(m_splits)
            biases = [getattr(self, f"bias{g}") for g in range(self.num_gemms)] if self.use_bias else [None] * self.num_gemms
            ys = [F.linear(t, getattr(self, f"weight{g}"), None if self.return_bias else biases[g])
                  for g, t in enumerate(torch.split(x, m))]
            y = torch.cat(ys)
            return (y, biases if self.use_bias else None) if self.return_bias else y

    class DotProductAttention(Base):
        def __init__(self, num_attention_heads=None, kv_channels=None, softmax_scale=None, num_gqa_groups=None, softmax_type="vanilla",
                     window_size=None, tp_size=1, **kw):
            super().__init__()
            self.softmax_scale, self.window = softmax_scale, window_size
            self.softmax_offset = None
            if softmax_type == "learnable":
                self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        def forward(self, q, k, v, attention_mask=None, **kw):  # [s, b, h, d]
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            r = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
            near = self.near(q.shape[2])
            if self.softmax_offset is not None:
                o = self.with_sinks(q, k, v, near)
            elif near is None:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            else:
                o = F.scaled_dot_product_attention(q, k, v, near, scale=self.softmax_scale)
            return o.permute(2, 0, 1, 3).reshape(o.shape[2], o.shape[0], -1)
        def near(self, n):  # [n, n]: what each token sees; None where it is all that comes before it
            if self.softmax_offset is None and (self.window is None or self.window[0] < 0):
                return None
            near = torch.ones(n, n, dtype=torch.bool).tril()
            if self.window is not None and self.window[0] >= 0:
                near &= ~torch.ones(n, n, dtype=torch.bool).tril(-self.window[0] - 1)
            return near
        def with_sinks(self, q, k, v, near):  # one more score for each row, whose value is nothing
            scores = q @ k.transpose(-1, -2) * (self.softmax_scale or q.shape[-1] ** -0.5)
            sink = self.softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores.masked_fill(~near, float("-inf")), sink], -1)
            return scores.softmax(-1)[..., :-1] @ v

    def l2norm(x, eps=1e-6):  # of flash-linear-attention, without which megatron-core has no delta net; its kernels are not called
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
    for name in ("fla", "fla.modules", "fla.modules.convolution", "fla.modules.l2norm", "fla.ops", "fla.ops.gated_delta_rule"):
        mod(name)
    sys.modules["fla.modules.convolution"].causal_conv1d = sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = None
    sys.modules["fla.modules.l2norm"].l2norm = l2norm

    te = mod("transformer_engine"); te.__version__ = version
    tp = mod("transformer_engine.pytorch")
    for k in (RMSNorm, LayerNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention):
        k.__module__ = "transformer_engine.pytorch"
        setattr(tp, k.__name__, k)
    tp.ops = mod("transformer_engine.pytorch.ops")
    for n in ("Sequential", "FusibleOperation", "MakeExtraOutput", "BasicLinear", "Bias", "SwiGLU", "GroupedLinear", "GELU",
              "GEGLU", "ReLU", "ReGLU", "SiLU", "RMSNorm", "LayerNorm"):
        setattr(tp.ops, n, type(n, (nn.Module,), {}))
    f8 = mod("transformer_engine.pytorch.fp8")
    f8.FP8GlobalStateManager = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    f8.fp8_autocast = f8.fp8_model_init = lambda *a, **k: contextlib.nullcontext()
    d = mod("transformer_engine.pytorch.distributed")
    d.CudaRNGStatesTracker = type("CudaRNGStatesTracker", (), {"reset": lambda s: None})
    d.checkpoint = lambda f, *a, **k: f(*a)
    d.activation_recompute_forward = lambda *a, **k: contextlib.nullcontext()
    d.is_fp8_activation_recompute_enabled = d.in_fp8_activation_recompute_phase = lambda: False
    ft = mod("transformer_engine.pytorch.float8_tensor"); ft.Float8Tensor = type("Float8Tensor", (torch.Tensor,), {})
    tt = mod("transformer_engine.pytorch.tensor"); tt.QuantizedTensor = type("QuantizedTensor", (torch.Tensor,), {})
    mod("transformer_engine.common")
    r = mod("transformer_engine.common.recipe")
    for n in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling",
              "Recipe"):
        setattr(r, n, type(n, (), {"__init__": lambda s, *a, **k: None}))
    r.Format = types.SimpleNamespace(E4M3=0, HYBRID=1)
    o = mod("transformer_engine.pytorch.optimizers")   # FusedAdam keeps `step` in the param group, like TE and Apex

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **k):
            super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay))
        @torch.no_grad()
        def step(self, closure=None, grad_scaler=None):
            for g in self.param_groups:
                g["step"] = g.get("step", 0) + 1
                for q in g["params"]:
                    if q.grad is None: continue
                    st = self.state[q]
                    if not st:
                        st["exp_avg"], st["exp_avg_sq"] = (torch.zeros_like(q.data, dtype=torch.float32) for _ in range(2))
                    gr = q.grad.float()
                    st["exp_avg"].mul_(0.9).add_(gr, alpha=0.1)
                    st["exp_avg_sq"].mul_(0.999).addcmul_(gr, gr, value=0.001)
                    q.data.add_(st["exp_avg"] / (st["exp_avg_sq"].sqrt() + 1e-8), alpha=-g["lr"])
    o.FusedAdam, o.FusedSGD = FusedAdam, torch.optim.SGD
    tp.Fp8Padding = tp.Fp8Unpadding = type("Fp8Padding", (nn.Module,), {"__init__": lambda s, *a, **k: nn.Module.__init__(s)})


def install_mamba_stub():
    """A CPU stand-in for mamba_ssm, without which megatron-core has no Mamba layers: the recurrence of
    mamba_ssm/ops/triton/ssd_combined.py step by step, its gate and its norm of groups."""
    import torch
    import torch.nn.functional as F

    class RMSNorm(torch.nn.Module):
        def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
            super().__init__()
            self.eps, self.group_size = eps, group_size or hidden_size
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        def forward(self, x):
            groups = x.float().unflatten(-1, (-1, self.group_size))
            groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
            return (groups.flatten(-2) * self.weight.float()).to(x.dtype)

    def split_conv1d_scan(zxbcdt, conv_weight, conv_bias, dt_bias, A, D, chunk_size=None, activation="silu", headdim=None, ngroups=1, **_):
        heads, length, inner = A.shape[0], zxbcdt.shape[1], A.shape[0] * headdim
        z, xbc, dt = zxbcdt.split([inner, conv_weight.shape[0], heads], -1)
        xbc = F.conv1d(xbc.transpose(1, 2), conv_weight[:, None], conv_bias, padding=conv_weight.shape[1] - 1, groups=conv_weight.shape[0])
        x, b, c = F.silu(xbc[..., :length]).transpose(1, 2).split([inner, *2 * [(conv_weight.shape[0] - inner) // 2]], -1)
        x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt + dt_bias)
        b, c = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
        state, out = 0, []
        for t in range(length):
            state = state * torch.exp(dt[:, t] * A)[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(out, 1).flatten(-2) * F.silu(z)

    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.layernorm_gated", "mamba_ssm.ops.triton.ssd_combined"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["mamba_ssm.ops.triton.layernorm_gated"].RMSNorm = RMSNorm
    kernels = sys.modules["mamba_ssm.ops.triton.ssd_combined"]
    kernels.mamba_chunk_scan_combined, kernels.mamba_split_conv1d_scan_combined = None, split_conv1d_scan


ABSENT = ("modelopt", "wandb", "mlflow", "comet_ml", "qwen_vl_utils", "timm", "open_clip", "flashinfer", "fast_hadamard_transform", "datasets",
          "diffusers", "mistral_common", "nemo_run")  # Megatron-Bridge imports them


class _Empty(types.ModuleType):
    """A module that has every name: classes are empty torch modules, the rest modules like it."""

    def __getattr__(self, name):
        import torch
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name) if name[0].islower() else type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made

    def __call__(self, *_, **__):
        return None


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, others):
        self.others = ("transformer_engine", "transformer_engine_torch", *others)

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT + self.others or name.startswith(tuple(other for other in self.others if "." in other)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name) if spec.name.split(".")[0] in ABSENT else _Empty(spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__, module.__file__ = [], spec, spec.name, "2.9.0", "x"
        return module

    def exec_module(self, module):
        pass


def install_empty_modules(*others):
    """Let Megatron-Bridge be imported: modules that it does not need here are empty, those of `others`, too, and so is Transformer Engine 2.9 where
    install_te_stub has not replaced it."""
    sys.meta_path.insert(0, _EmptyModules(others))
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.9.0" if name.startswith("transformer") and "engine" in name else version(name)
