"""DriverError: what the GPU driver refused, for which kernel and device, and what to do about it."""

from __future__ import annotations

_ADVICE = {
    2: "the device is out of memory: free some, or lower the memory that PyTorch keeps (torch.cuda.empty_cache())",
    3: "a GPU cannot be used in a process forked after its parent had used it: start workers with the 'spawn' or "
    "'forkserver' method of multiprocessing, or use the GPU only after the fork",
    100: "no GPU is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES (rocm-smi and HIP_VISIBLE_DEVICES)",
    101: "the device does not exist: look at CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)",
    200: "the machine code is not valid for this driver: run `python -m flashattn verify`; if it is intact, the driver "
    "is older than the compiler that made it, and a newer driver is needed",
    201: "no context of this device is current: make the call under torch.cuda.device(tensor.device)",
    209: "the machine code was built for another GPU: look at `python -m flashattn doctor`",
    218: "the driver cannot read the code: it is older than the compiler that made it, and a newer driver is needed",
    222: "the code is newer than the driver: a newer driver is needed, or code made by an older Triton",
    400: "the stream or the kernel belongs to another device: make the call under torch.cuda.device(tensor.device) "
    "with a stream of that device",
    700: "this kernel or an earlier one touched memory that is not its own, and the process cannot use the GPU any "
    "more: run again with CUDA_LAUNCH_BLOCKING=1 (or under compute-sanitizer) to see which",
    701: "the kernel wants more registers, threads or shared memory than the device has: its tiles are too large here",
    716: "a kernel read an address that is not aligned: a pointer or stride breaks the promise it was compiled with",
    719: "a kernel stopped with an error, and the process cannot use the GPU any more: run again with "
    "CUDA_LAUNCH_BLOCKING=1 (or under compute-sanitizer) to see which",
    720: "a cooperative launch must fit the device at once: use a smaller grid",
    900: "a CUDA graph is being captured, and this call is not allowed then: call the function once before the capture",
    901: "the capture of a CUDA graph was broken by an earlier error: end the capture and start it again",
    906: "a CUDA graph is being captured, and the default stream may not be used then: launch on the capturing stream",
    912: "the device cannot run a cluster of this size",
}


class DriverError(RuntimeError):
    """A call that the GPU driver refused.

    code: the driver's number, or None where the driver was not asked. name: such as "CUDA_ERROR_ILLEGAL_ADDRESS".
    label: the kernel's variant, or None. device: the ordinal, or None.
    """

    def __init__(self, text: str, *, code: int | None = None, name: str = "", label=None, device: int | None = None):
        super().__init__(text)
        self.code = code
        self.name = name
        self.label = label
        self.device = device


def refused(what: str, code: int, name: str, text: str, *, label=None, device: int | None = None) -> DriverError:
    """The error for `code`. `what` says what was tried, with kernel and device: "cannot load attn_fwd[...] on ..."."""
    advice = _ADVICE.get(code)
    sentence = f"{what}: {name} ({code}), {text}" + (f"; {advice}" if advice else "")
    return DriverError(sentence, code=code, name=name, label=label, device=device)
