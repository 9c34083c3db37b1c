#include "cuda/decode/instances.cuh"

namespace flashq::cuda {

Status launch_decode_fp16(const DecodeLaunch& how, const DecodeParams& p, const Launch& launch) {
  return launch_decode<Float16>(how, p, launch);
}

}  // namespace flashq::cuda
