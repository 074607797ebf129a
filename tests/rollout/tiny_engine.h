// A tiny dense model on the host, with random weights, for tests of what runs it.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::rollout {

class TinyEngineTest : public testing::Test {
 protected:
  static constexpr std::int64_t kVocabulary = 50;

  // A second thread takes longer to wake than to compute with tiny tensors.
  static void SetUpTestSuite() { at::set_num_threads(1); }

  TinyEngineTest() { support::fill_parameters(model_, 1); }

  models::TransformerConfig config_ =
      support::tiny_config({.head_dim = 16, .hidden = 64, .ffn = 96, .vocab = kVocabulary});
  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
  models::GPTModel model_{config_,
                          mesh_,
                          models::stage_chunks(config_, {}, 0)[0],
                          {.alignment = models::Alignment::kBitwise}};
};

}  // namespace ferry::rollout
