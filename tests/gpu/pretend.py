"""A GPU that is not there: tensors that say they are on cuda:0, and compute, in the memory of the CPU.

    with pretend.gpu() as gpu:
        ...                      # torch.cuda is there; operations that mix devices raise, as on a GPU
        with gpu.no_waits():
            ...                  # raises Waited, at the line, where the host would wait for the device
        print(gpu.waits)         # Counter: (what, the line in the package or a library that it calls) -> how often
        with gpu.launching() as launches:
            ...                  # launches: Counter of the operations that start a kernel or a copy

Autocast casts, random numbers come from a generator of the device, and inputs that are not pinned or copies that block
count as waits. Not there: streams, kernels' own rounding, torch.compile, NCCL, and the memory of the device.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
from collections import Counter
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten


def _words(text):
    return frozenset(text.split())


_PLACES = (
    "/vitmods/", "/torchvision/models", "/torchvision/ops", "/timm/", "/torch/amp/", "gpu_check.py", "/tests/",
)  # fmt: skip
# What reads a number of the device, or has outputs whose shape depends on numbers.
_READS = _words(
    """
    _local_scalar_dense item is_nonzero equal nonzero masked_select _unique _unique2 unique_dim unique_consecutive
    bincount repeat_interleave allclose _linalg_check_errors histc _pdist_forward
    """
)
_RANDOM = _words(
    """
    bernoulli bernoulli_ rand rand_like randn randn_like randint randint_like randperm uniform_ normal normal_
    random_ exponential_ cauchy_ geometric_ log_normal_ multinomial native_dropout poisson binomial
    rrelu_with_noise
    """
)
# Operations on one tensor with a number in another, which may be on the CPU; all others want one device.
_TAKES_NUMBERS = {
    "fill_",
    "index_put_",
    "_index_put_impl_",
    "index_put",
    "masked_fill",
    "masked_fill_",
    "copy_",
    "where",
}
_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_NO_KERNEL = _words("empty empty_like empty_strided new_empty new_empty_strided _unsafe_view is_same_size")
_PRODUCTS = _words(
    """
    mm addmm bmm baddbmm addbmm convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    """
)


class Waited(RuntimeError):
    """The host waited for the device where it may not."""


class Device:
    """What happens on the pretend GPU."""

    def __init__(self):
        self.waits, self.strict, self.warns = Counter(), False, False
        self.launches, self.multiplies = Counter(), True
        self.random = torch.Generator().manual_seed(0)

    @contextlib.contextmanager
    def no_waits(self):
        """Inside it a wait raises."""
        before, self.strict = self.strict, True
        try:
            yield
        finally:
            self.strict = before

    @contextlib.contextmanager
    def counting(self):
        """Gives a Counter of the waits inside."""
        before, self.waits = self.waits, Counter()
        try:
            yield self.waits
        finally:
            self.waits = before + self.waits

    @contextlib.contextmanager
    def launching(self):
        """Gives a Counter of the operations inside that start a kernel or a copy. Their products are 0: only their
        number is asked for."""
        before, is_whole = self.launches, self.multiplies
        self.launches, self.multiplies = Counter(), False
        try:
            yield self.launches
        finally:
            self.launches, self.multiplies = before + self.launches, is_whole

    def wait(self, what):
        where = _place()
        self.waits[what, where] += 1
        if self.strict:
            raise Waited(f"{what} waits for the device: {where}")
        if self.warns:
            place, _, line = where.partition(":")
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, place, int(line or 0))


class RealDevice:
    """The same questions of a GPU that is there, answered by PyTorch's warnings of waits."""

    @contextlib.contextmanager
    def counting(self):
        waits = Counter()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.update(
            ("a wait", warning.filename.rpartition("site-packages/")[2])
            for warning in caught
            if "synchronizing CUDA operation" in str(warning.message)
        )


_device = Device()
_calls = threading.local()


def _place():
    """The innermost line of the package, or of a library that it calls."""
    frame = sys._getframe(1)
    if torch._C._current_graph_task_id() != -1 and "backward" not in frame.f_back.f_code.co_name:
        return "a derivative"
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _PLACES) and not name.endswith("gpu/pretend.py"):
            return f"{name.rpartition('/site-packages/')[2].rpartition('/src/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class CudaTensor(torch.Tensor):
    """A tensor on the pretend GPU. C++ knows it by its dispatch keys; `held` has the numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = CUDA, True, False

    @staticmethod
    def __new__(cls, held):
        tensor = torch.Tensor._make_subclass(cls, held, False, device_for_backend_keys=CUDA)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})

    def __repr__(self, **_):
        return f"CudaTensor({self.held!r})"

    def __reduce_ex__(self, protocol):
        return self.detach().held.__reduce_ex__(protocol)  # a checkpoint is read to the CPU

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone()
            is_parameter = getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copied) if is_parameter else copied
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    def get_device(self):
        return 0

    def tolist(self):
        _device.wait("tolist")
        return self.detach().held.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_, **__):
        return self.numpy()

    def pin_memory(self):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")


def _on_gpu(x):
    return isinstance(x, CudaTensor)


def _mixed(name, tensors):
    shapes = [tuple(x.shape) for x in tensors]
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name}: "
        f"{shapes} on the CPU, at {_place()})"
    )


def _run(operation, args, kwargs):
    """One operation of ATen: on the pretend GPU if one of its tensors is there, or it is asked to make one there."""
    name = operation.overloadpacket.__name__
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there, here = [x for x in tensors if _on_gpu(x)], [x for x in tensors if not _on_gpu(x)]
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked).type
    # C++ is told "cpu": what its compositions and derivatives make for tensors of the GPU belongs there.
    is_copy_back = there and asked == "cpu" and getattr(_calls, "copies_back", False)
    on_gpu = asked == "cuda" or (not is_copy_back and (bool(there) or (asked == "cpu" and not here and _inside())))
    if not on_gpu and not there:
        return operation(*args, **kwargs)
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    kwargs = {key: value for key, value in kwargs.items() if not (key == "pin_memory" and value)}
    if name == "_to_copy":
        if not kwargs.pop("non_blocking", False) and (is_copy_back or here):
            _device.wait("copy to the CPU" if is_copy_back else "copy to the device that blocks")
        elif is_copy_back:
            _device.wait("copy to the CPU")  # its numbers are there only later
    elif name == "copy_":
        target, source = args[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if _on_gpu(target) != _on_gpu(source) and (blocks or not _on_gpu(target)):
            _device.wait("copy to the device that blocks" if _on_gpu(target) else "copy to the CPU")
    elif name in _INDEXED:
        _index(name, args)
    elif here and there:
        numbers = torch.Tag.pointwise in operation.tags or name in _TAKES_NUMBERS
        if wrong := [x for x in here if x.dim() or not numbers]:
            raise _mixed(name, wrong)
    if name in _READS:
        _device.wait("a number that is read" if name == "_local_scalar_dense" else name)
    if not operation.is_view and name not in _NO_KERNEL:
        _device.launches[name] += 1
    outputs = _compute(operation, name, *tree_map_only(CudaTensor, lambda x: x.held, (args, kwargs)))
    for tensor in there:
        if tensor.held.shape != torch.Tensor.size(tensor):
            raise NotImplementedError(f"the pretend GPU cannot change a shape in place ({name})")
    known = {id(x.held): x for x in there} | {id(x): x for x in here}
    return tree_map_only(torch.Tensor, lambda x: known.get(id(x), CudaTensor(x) if on_gpu else x), outputs)


def _index(name, args):
    """Masks have shapes that depend on numbers; indices on the CPU are copied first."""
    for index in args[1]:
        if index is None:
            continue
        if not _on_gpu(args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if index.dtype in (torch.bool, torch.uint8):
            _device.wait("an index by a mask")
        if not _on_gpu(index):
            _device.wait("an index on the CPU")
    values = args[2] if len(args) > 2 else args[0]
    if _on_gpu(args[0]) != _on_gpu(values) and values.dim():
        raise _mixed(name, [values])


def _compute(operation, name, args, kwargs):
    if name in _PRODUCTS and not _device.multiplies:
        shapes = operation(*tree_map_only(torch.Tensor, lambda x: x.to("meta"), args), **kwargs)
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device=CPU), shapes)
    if name in _RANDOM:
        if (generator := kwargs.get("generator")) is not None:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        before = torch.get_rng_state()
        torch.set_rng_state(_device.random.get_state())
        try:
            return operation(*args, **kwargs)
        finally:
            _device.random.set_state(torch.get_rng_state())
            torch.set_rng_state(before)
    if name == "_fused_rms_norm":  # a kernel that CPUs have not
        x, shape, gain, eps = args
        wide, over = x.float(), list(range(x.dim() - len(shape), x.dim()))
        rstd = (wide.square().mean(over, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
        y = wide * rstd
        return (y if gain is None else y * gain).to(x.dtype), rstd
    if name == "_fused_rms_norm_backward":
        grad, x, shape, rstd, gain, wanted = args
        over, y = list(range(x.dim() - len(shape), x.dim())), x.float() * rstd
        scaled = grad.float() if gain is None else grad.float() * gain
        grad_x = rstd * (scaled - y * (scaled * y).mean(over, keepdim=True)) if wanted[0] else None
        grad_gain = (
            (grad.float() * y).sum(list(range(x.dim() - len(shape)))) if gain is not None and wanted[1] else None
        )
        return tuple(g if g is None else g.to(x.dtype) for g in (grad_x, grad_gain))
    return operation(*args, **kwargs)


def _inside():
    """Whether what C++ makes now is for tensors of the GPU: the call from Python has one, or it is a derivative."""
    call = getattr(_calls, "call", None)
    return torch._C._current_graph_task_id() != -1 if call is None else call


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if has_kernel(operation.name(), "CompositeImplicitAutograd") and not has_kernel(operation.name(), "CUDA"):
            with self:  # in inference mode nothing else takes it apart
                parts = operation.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        return _run(operation, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Calls from Python: those that C++ would not make, as it believes that the tensor is on the CPU already."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: _numbered(value) for key, value in (kwargs or {}).items()}
        if function is not torch.device:
            args = tuple(map(_numbered, args))
        before = getattr(_calls, "call", None)
        asked = kwargs.get("device")
        try:
            if function in (torch.tensor, torch.as_tensor) and _is(asked, "cuda"):
                if _on_gpu(args[0]):
                    return args[0]
                return torch.Tensor.to(function(*args, **{**kwargs, "device": None}), CUDA)
            if function is torch.Tensor.cuda:
                function, args, kwargs = torch.Tensor.to, (args[0], CUDA), {}
            if function is torch.Tensor.cpu:
                function, args, kwargs = torch.Tensor.to, (args[0], CPU), {}
            if function is torch.Tensor.to and _on_gpu(args[0]):
                return self._move(args[0], *args[1:], **kwargs)
            is_told = _is(asked, "cpu")  # by the user: there it is
            flat = [
                x
                for value in (*args, *kwargs.values())
                for x in (value if isinstance(value, list | tuple) else [value])
            ]
            _calls.call = any(map(_on_gpu, flat)) and not is_told
            return function(*args, **kwargs)
        finally:
            _calls.call = before

    @staticmethod
    def _move(tensor, *args, copy=False, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        back = device is not None and device.type == "cpu"
        if not (back or copy or (dtype is not None and dtype != tensor.dtype)):
            return tensor
        _calls.copies_back = back
        try:
            where = {"device": CPU, "non_blocking": non_blocking} if back else {}
            return aten._to_copy.default(tensor, dtype=dtype, memory_format=layout, **where)
        finally:
            _calls.copies_back = False


def _flat(values):
    for value in values:
        yield from _flat(value) if isinstance(value, list | tuple) else (value,)


def _is(device, kind):
    return device is not None and torch.device(device).type == kind


def _numbered(value):
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return CUDA
    return CUDA if isinstance(value, str) and value in ("cuda", "cuda:0") else value


class Event:
    def __init__(self, *_, **__):
        self.at = None

    def record(self, *_):
        self.at = time.perf_counter()

    def synchronize(self):
        _device.wait("synchronize")

    def query(self):
        return True

    def wait(self, *_):
        pass

    def elapsed_time(self, other):
        return max((other.at - self.at) * 1e3, 1e-6)


# The lists of CUDA's autocast (torch.amp's documentation); what else has a kernel of it computes in float32.
_HALF = _words(
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
    linalg_multi_dot scaled_dot_product_attention
    """
)
_TYPED = _words(
    """
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum
    """
)
_WIDEST = _words(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
_OTHERS = _words(
    """
    _cudnn_rnn rnn_relu_cell rnn_tanh_cell lstm_cell gru_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell
    cudnn_convolution cudnn_convolution_transpose _scaled_dot_product_flash_attention norm
    """
)


@contextlib.contextmanager
def _autocast():
    """PyTorch's own kernels ask C++ whether a tensor is on a GPU: these ask Python."""
    key, library = "AutocastCUDA", torch.library.Library("aten", "IMPL")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    ]

    def cast(value, dtype):
        if isinstance(value, list | tuple):
            return type(value)(cast(inner, dtype) for inner in value)
        is_cast = _on_gpu(value) and value.is_floating_point() and value.dtype not in (torch.float64, dtype)
        return value.to(dtype) if is_cast else value

    def kernel(packet, operation):
        def compute(*args, **kwargs):
            floats = {x.dtype for x in tree_leaves((args, kwargs)) if _on_gpu(x) and x.is_floating_point()}
            half, dtype = floats & {torch.float16, torch.bfloat16}, None
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                if packet in _HALF:
                    dtype = torch.get_autocast_dtype("cuda")
                elif packet in _TYPED:
                    typed = any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))
                    kwargs = {**kwargs, "dtype": torch.float32} if half and not typed else kwargs
                elif packet == "binary_cross_entropy" and half:
                    raise RuntimeError("binary_cross_entropy is unsafe to autocast: use it with logits")
                elif packet not in _WIDEST or len(floats) > 1:
                    dtype = torch.float32
                if dtype is not None:
                    args, kwargs = cast(args, dtype), {name: cast(value, dtype) for name, value in kwargs.items()}
                return operation(*args, **kwargs)

        return compute

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that kernels are replaced
        for name in names:
            packet, _, overload = name.partition(".")
            if packet not in _OTHERS:
                library.impl(name, kernel(packet, getattr(getattr(aten, packet), overload or "default")), key)
    try:
        yield
    finally:
        library._destroy()


def _replacements(gpus, capability, memory):
    cuda, accelerator = torch.cuda, torch.accelerator
    properties = SimpleNamespace(
        name="NVIDIA Pretend", total_memory=memory, major=capability[0], minor=capability[1], uuid="pretend",
        multi_processor_count=132, L2_cache_size=50 << 20, warp_size=32,
    )  # fmt: skip

    def seed(number):
        _device.random.manual_seed(int(number) % 2**63)

    def synchronize(*_):
        _device.wait("synchronize")

    def debug_mode(mode):
        _device.strict, _device.warns = mode == "error", mode == "warn"

    def pinned(tensor, *_, **__):
        if 0 in tensor.stride():  # into a copy with the same strides
            raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
        return tensor.clone()

    for name, value in {
        "is_available": lambda: True, "device_count": lambda: gpus, "current_device": lambda: 0, "init": lambda: None,
        "set_device": lambda _: None, "get_device_name": lambda _=None: properties.name, "_lazy_init": lambda: None,
        "get_device_capability": lambda _=None: capability, "get_device_properties": lambda _=None: properties,
        "mem_get_info": lambda _=None: (memory, memory), "memory_allocated": lambda _=None: 1 << 20,
        "max_memory_allocated": lambda _=None: 2 << 20, "reset_peak_memory_stats": lambda _=None: None,
        "empty_cache": lambda: None, "synchronize": synchronize, "set_sync_debug_mode": debug_mode,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "get_rng_state": lambda _="cuda": _device.random.get_state(), "manual_seed": seed, "manual_seed_all": seed,
        "set_rng_state": lambda state, _="cuda": _device.random.set_state(state), "Event": Event,
        "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False,
    }.items():  # fmt: skip
        yield cuda, name, value
    for name, value in {
        "current_accelerator": lambda check_available=False: torch.device("cuda"), "is_available": lambda: True,
        "device_count": lambda: gpus, "synchronize": synchronize, "current_device_index": lambda: 0,
        "current_stream": lambda *_: SimpleNamespace(is_capturing=lambda: False),
    }.items():  # fmt: skip
        yield accelerator, name, value
    run = threading.Thread.run

    def inside(thread):
        with _Calls(), _Operations():  # which are each thread's own
            run(thread)

    yield threading.Thread, "run", inside
    yield torch, "Event", Event
    yield torch.Tensor, "pin_memory", pinned
    yield cuda.amp.common, "amp_definitely_not_available", lambda: False
    # Fast forms know exact types, and optimizers too; this one stands for a plain tensor.
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    from vitmods.fast import known
    from vitmods.ops import context

    for module in (context, known):
        yield module, "PLAIN", (*context.PLAIN, CudaTensor)
    for module in (_foreach_utils, optimizer):
        if hasattr(module, "_foreach_supported_types"):
            yield module, "_foreach_supported_types", [*module._foreach_supported_types, CudaTensor]
    group = optimizer._group_tensors_by_device_and_dtype

    def grouped(*given):  # by C++, which believes that they are on the CPU
        return {
            (CUDA if _on_gpu(value[0][0][0]) else device, dtype): value
            for (device, dtype), value in group(*given).items()
        }

    yield optimizer, "_group_tensors_by_device_and_dtype", grouped


@contextlib.contextmanager
def gpu(gpus=1, capability=(9, 0), memory=80 << 30):
    """Inside it there are so many GPUs; gives what happens on the first. With VITMODS_REAL_GPU=1 the real ones."""
    if os.environ.get("VITMODS_REAL_GPU") == "1":
        yield RealDevice()
        return
    _device.__init__()
    old = [
        (where, name, getattr(where, name), setattr(where, name, value))
        for where, name, value in list(_replacements(gpus, capability, memory))
    ]
    future, swaps = torch.__future__, torch.__future__.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        with _autocast(), _Calls(), _Operations():
            yield _device
    finally:
        future.set_swap_module_params_on_conversion(swaps)
        for where, name, value, _ in reversed(old):
            setattr(where, name, value)
