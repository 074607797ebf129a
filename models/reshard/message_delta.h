// What changed in a message since it was last sent, where that is less than the message: weights of
// bf16 change in a few percent of their elements at a step of reinforcement learning.
//
// Words of 16 bits, in blocks of 256: the number of changed words of each block (2 bytes), the
// place of each in its block (1 byte; one more to an even number), its new value (2 bytes). With 2
// % of the words changed, 3.4 % of the message.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// now, before: contiguous bytes of one length, which is even. Undefined if the changes take as much
// as `now` or more, of length 0 if there are none. Beside its result takes up to four times as much
// memory as `now` for a while; waits for the device.
at::Tensor encode_changes(const at::Tensor& now, const at::Tensor& before);

// Turns the `before` that the changes were encoded from into the `now`.
void apply_changes(const at::Tensor& changes, at::Tensor& before);

}  // namespace ferry::models
