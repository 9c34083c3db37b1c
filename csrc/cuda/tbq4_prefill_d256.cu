// The kernels of tbq4_attention for many rows, head dim 256.
#include "cuda/tbq4_prefill/kernel.cuh"

namespace flashq::cuda::tbq4_sm90 {

template void launch_prefill<256>(const Params&, unsigned blocks, const Device&, const Launch&);

}  // namespace flashq::cuda::tbq4_sm90
