"""A GPU that is not there: CPU tensors with a label that says on which device they would be.

    with fake_gpu():
        x = torch.ones(3, device="cuda")  # or .to("cuda"); x.device is cuda:0
        x + torch.ones(3)  # raises, as on a machine with a GPU; so does x.numpy()

All is computed on the CPU, autograd included. The label belongs to the memory, so views share it.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
COPIES = ("copy_", "_copy_from")  # may go from one device to the other
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # by indices of the CPU, too


class Labels:
    def __init__(self):
        self.memory = {}  # kept alive, so that no address comes twice

    def __contains__(self, tensor):
        return tensor.untyped_storage()._cdata in self.memory

    def put(self, tensor):
        self.memory.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor


class Operations(TorchDispatchMode):
    """Below autograd: results are where the arguments are, and these are in one place."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = any(x in self.labels for x in tensors) and name not in COPIES
        if here:
            judged = [args[0]] if name in INDEXING else [x for x in tensors if x.dim()]
            if any(x not in self.labels for x in judged):
                raise RuntimeError(f"{func}: tensors on two devices")
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, self.labels.put, out) if here else out


class Functions(TorchFunctionMode):
    """What Python code says and asks about devices."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func == torch.Tensor.device.__get__ and tensor in self.labels:
            return GPU
        if func == torch.Tensor.is_cuda.__get__:
            return tensor in self.labels
        if name == "numpy" and tensor in self.labels:
            raise RuntimeError("numpy() of a tensor on the GPU")
        if name in ("to", "cpu") and tensor is not None:
            return self.move(tensor, *args[1:], **({"device": "cpu"} if name == "cpu" else kwargs))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            out = func(*args, **kwargs | {"device": "cpu"})
            return tree_map_only(torch.Tensor, self.labels.put, out)
        return func(*args, **kwargs)

    def move(self, tensor, *args, device=None, dtype=None, **_):
        for x in args:
            dtype = x if isinstance(x, torch.dtype) else dtype
            device = x if isinstance(x, (str, torch.device)) else device
        out = tensor if dtype is None else torch.Tensor.to(tensor, dtype)
        if device is None or (torch.device(device).type == "cuda") == (out in self.labels):
            return out
        if torch.device(device).type == "cuda":
            return self.labels.put(out.clone())
        with _disable_current_modes():
            return out.clone()


@contextmanager
def fake_gpu():
    labels = Labels()
    with Functions(labels), Operations(labels):
        yield
