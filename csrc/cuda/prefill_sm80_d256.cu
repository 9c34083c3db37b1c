// Head dims up to 256, in a file of their own so that they compile beside the others.
#include "cuda/prefill_sm80.cuh"

template flashq::Status flashq::cuda::launch_prefill_sm80<256>(const PrefillArguments&, const Device&, cudaStream_t);
