// Turns queries of many tokens, for tbq4_rope_append.
#pragma once
#include "backend.h"
#include "cuda/launch.h"

namespace flashq::cuda {

// p.q, of many tokens, into p.q_out, and nothing else; all rows can be read and turn in vectors of 16 bytes.
// launch_status() tells how it went.
void launch_turn(const Tbq4RopeAppendParams& p, const Device& device, const Launch& launch);

}  // namespace flashq::cuda
