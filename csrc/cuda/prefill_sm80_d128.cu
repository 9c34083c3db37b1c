// Head dims up to 128, in a file of their own so that they compile beside the others.
#include "cuda/prefill_sm80.cuh"

namespace flashq::cuda {

template PrefillPlan plan_prefill_sm80<128>(const Attention16Params&);
template Status launch_prefill_sm80<128>(const PrefillArguments&, const Device&, const Launch&);

}  // namespace flashq::cuda
