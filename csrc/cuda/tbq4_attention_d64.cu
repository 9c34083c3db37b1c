#include "cuda/tbq4_attention/instances.cuh"

namespace flashq::cuda {

template Status launch_code_attention<64>(const CodeLaunch&, const CodeParams&, const Launch&);

}  // namespace flashq::cuda
