// Head dims up to 64, in a file of their own so that they compile beside the others.
#include "cuda/prefill_sm80.cuh"

namespace flashq::cuda {

template PrefillPlan plan_prefill_sm80<64>(const Attention16Params&);
template Status launch_prefill_sm80<64>(const PrefillArguments&, const Device&, const Launch&);

}  // namespace flashq::cuda
