// The scale of YaRN's attention, for the angles and for the scores of latent attention.
#pragma once

#include <cmath>

namespace ferry::models {

// get_mscale() of transformers' modeling_rope_utils.py, _yarn_get_mscale() of Megatron-Core's
// yarn_rotary_pos_embedding.py. Angles are multiplied by the quotient of two of these, of mscale
// and of mscale_all_dim.
inline double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace ferry::models
