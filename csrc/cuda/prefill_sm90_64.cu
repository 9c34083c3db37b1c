// prefill_sm90's kernels for head_dim up to 64.
#include "cuda/prefill_sm90/launch.cuh"

namespace flashq::cuda::sm90 {

template Status launch_prefill<64>(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda::sm90
