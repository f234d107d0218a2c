"""The TPU kernels run by Pallas's interpreter: slow, on any machine, for tests and for looking into them."""

from functools import partial

from pallas_kernels.ragged_paged_attention import tpu

make_pool = tpu.make_pool
copy_pages = tpu.copy_pages
ragged_paged_attention = partial(tpu.ragged_paged_attention, interpret=True)
