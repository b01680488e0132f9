"""The two operations that dgcompile replaces by kernels, one folder each, and what they share.

In each folder ``reference.py`` is the meaning of the operation in plain numpy, which everything else is measured
against; ``kernel.py`` the kernels in the Triton language; ``launch.py`` how they are launched, as data; ``plugin.py``
the node of an engine; ``torch_op.py`` and ``torch_call.py`` the operation in torch.

From a plan to a GPU: ``launch.Launch`` (one kernel call) -> ``build_kernels`` (cubins in a folder, by Triton, without a
GPU) -> ``library.KernelLibrary`` (that folder, opened and checked) -> ``cuda_launch`` (launches on a stream);
``adapter`` makes plugins of it for TensorRT and TensorRT-RTX. Only the modules named for them import Triton, torch and
CUDA.
"""
