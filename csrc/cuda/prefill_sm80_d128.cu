// Head dims up to 128, in a file of their own so that they compile beside the others.
#include "cuda/prefill_sm80.cuh"

template flashq::Status flashq::cuda::launch_prefill_sm80<128>(const PrefillArguments&, const Device&, cudaStream_t);
