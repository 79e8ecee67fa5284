"""The kernels. Nothing here imports torch, or anything of the package outside this folder."""
