import torch, reflib
from torch import nn
model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU())
x = torch.randn(64, 256)
fast = torch.compile(model, backend="reflib")
print("compiled, as eager:", torch.allclose(fast(x), model(x), atol=1e-5))
e = reflib.explain(model.eval(), x, target="sm_90")
print("for an H100:", *[kernel.name for kernel in e.kernels], sep="\n  ")
path = reflib.aot_compile(model, (x,), archs=["cpu", "sm_80", "sm_90"])
print("loaded:", torch.allclose(reflib.load(path)(x), fast(x), atol=1e-5))
