#include "models/decode_row/row_decoder.h"
#include "models/device/no_cuda.h"

namespace ferry::models {
std::unique_ptr<RowDecoder> RowDecoder::make(const TransformerConfig&,
                                             const ParallelState&,
                                             Alignment,
                                             const Parameters&) {
  return nullptr;
}
bool RowDecoder::takes(const DecodedRow&) const {
  return false;
}
ResidualStream RowDecoder::forward(const at::Tensor&,
                                   const RotaryAngles&,
                                   const DecodedRow&) const {
  no_cuda();
}

}  // namespace ferry::models
