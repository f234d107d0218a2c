"""The TPU kernel run by Pallas's interpreter: slow, on any machine, for tests and for looking into it."""

from functools import partial

from pallas_kernels.grouped_matmul import tpu

grouped_matmul = partial(tpu.grouped_matmul, interpret=True)
