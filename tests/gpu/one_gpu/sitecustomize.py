"""Makes NCCL and ncclcomm take ranks on one GPU for ranks on GPUs of their own; put on PYTHONPATH by tests/gpu.

NCCL refuses two ranks of a host on one GPU, and takes ranks with another NCCL_HOSTID for ranks of another host: they
talk over sockets, through the same calls, kernels and queues. Time slices of the GPU make it slow, never wrong.
"""

from __future__ import annotations

import os

rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
if rank:
    from ncclcomm.devices.cuda import CudaBackend

    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    real_uuid = CudaBackend.uuid
    CudaBackend.uuid = lambda self, device: f"{real_uuid(self, device)}-of-rank-{rank}"  # type: ignore[method-assign]
