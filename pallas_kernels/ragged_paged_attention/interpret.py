"""The TPU kernels run by Pallas's interpreter: slow, on any machine, for tests and for looking into them."""

from functools import partial

from pallas_kernels.ragged_paged_attention import tpu

KV_HEAD_AXIS = tpu.KV_HEAD_AXIS
make_pool = tpu.make_pool
unpack_pages, pack_pages = tpu.unpack_pages, tpu.pack_pages
ragged_paged_attention = partial(tpu.ragged_paged_attention, interpret=True)
