// prefill_sm90's kernels for head_dim up to 128.
#include "cuda/prefill_sm90/launch.cuh"

namespace flashq::cuda::sm90 {

template Status launch_prefill<128>(const Attention16Params&, const Device&, const Launch&);

}  // namespace flashq::cuda::sm90
