// The changes of a message since it was last sent, if they are smaller than the message: weights of
// bf16 change in a few percent of their elements at a step of reinforcement learning.
//
// Format, for words of 16 bits in blocks of 256: the number of changed words of each block (2 bytes
// each); the place of each changed word in its block (1 byte each, padded to an even number); the
// new values (2 bytes each). Changes of 2 % of the words take 3.4 % of the message.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// `now` and `before` are contiguous bytes of one even length. Returns an undefined tensor if the
// changes take at least as many bytes as `now`, one of length 0 if there are none. Needs up to four
// times the memory of `now` while it runs, besides the result. Waits for the device.
at::Tensor encode_changes(const at::Tensor& now, const at::Tensor& before);

// Turns `before` into `now`, given the changes that were encoded from both.
void apply_changes(const at::Tensor& changes, at::Tensor& before);

}  // namespace ferry::models
