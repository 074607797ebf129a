// Files of hf_reference.py, written by hand.
#include "converter/alignment/reference.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/safetensors_file.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace reference_test {

using support::fails;
using support::stored_tensor;
using support::StoredTensor;

class ReferenceTest : public testing::Test {
 protected:
  Reference read(const std::vector<StoredTensor>& tensors, const std::string& metadata = "") {
    support::write_safetensors(dir_ / "reference.safetensors", tensors, metadata);
    return read_reference(dir_ / "reference.safetensors");
  }
  testing::AssertionResult refuses(const std::vector<StoredTensor>& tensors, const char* why) {
    return fails(ErrorKind::kCorrupt, {"reference.safetensors", why}, [&] { read(tensors); });
  }
  static StoredTensor tokens(int sequence, const std::vector<std::int64_t>& ids) {
    return stored_tensor(fmt::format("tokens.{}", sequence), {std::ssize(ids)}, ids, "I64");
  }
  static StoredTensor rows(const std::string& name, std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(2 * count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    return stored_tensor(name, {count, 2}, values);
  }

  support::TempDir dir_;
};

TEST_F(ReferenceTest, HasTheTensorsOfEachSequence) {
  const auto reference =
      read({tokens(1, {9}), rows("logits.1", 1), tokens(0, {3, 4, 5}), rows("logits.0", 3),
            rows("hidden.0.embedding", 3), rows("hidden.0.decoder.layers.1.mlp", 3),
            rows("predicted.0.mtp.layers.0", 3), rows("logitsome", 1)},
           R"("regime": "{\"torch\": \"2.11.0\"}")");
  EXPECT_EQ(reference.regime, R"({"torch": "2.11.0"})");
  ASSERT_EQ(reference.sequences.size(), 2U);
  const auto& first = reference.sequences[0];
  EXPECT_TRUE(at::equal(first.tokens, at::tensor({3, 4, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(first.logits, at::tensor({0.F, 1.F, 2.F, 3.F, 4.F, 5.F}).view({3, 2})));
  EXPECT_EQ(first.hidden.size(), 2U);
  EXPECT_TRUE(first.hidden.contains("embedding"));
  EXPECT_TRUE(first.hidden.contains("decoder.layers.1.mlp"));
  EXPECT_TRUE(first.predicted.contains("mtp.layers.0"));
  EXPECT_TRUE(reference.sequences[1].hidden.empty());
  EXPECT_TRUE(reference.others.contains("logitsome"));
}

TEST_F(ReferenceTest, KeepsTheBytesOfBf16) {
  const std::vector<std::uint16_t> bits{0x3f80, 0xc000};
  const auto reference = read({tokens(0, {7}), stored_tensor("logits.0", {1, 2}, bits, "BF16")});
  EXPECT_EQ(reference.sequences[0].logits.scalar_type(), at::kBFloat16);
  EXPECT_EQ(reference.sequences[0].logits[0][1].item<float>(), -2.F);
}

TEST_F(ReferenceTest, IsNoneWithoutSequences) {
  EXPECT_TRUE(refuses({rows("weight", 2)}, "holds no tokens.0 and logits.0"));
  EXPECT_TRUE(refuses({rows("logits.x", 2)}, "holds no tokens.0 and logits.0"));
}

TEST_F(ReferenceTest, HasLogitsForEachToken) {
  EXPECT_TRUE(refuses({tokens(0, {1, 2}), rows("logits.0", 3)},
                      "tokens.0 and logits.0 are not of one length"));
  EXPECT_TRUE(refuses({tokens(0, {1, 2})}, "tokens.0 and logits.0"));
  EXPECT_TRUE(refuses({tokens(1, {1}), rows("logits.1", 1)}, "tokens.0 and logits.0"));
  EXPECT_TRUE(refuses({rows("tokens.0", 1), rows("logits.0", 1)}, "tokens.0 and logits.0"));
}

TEST_F(ReferenceTest, HasModulesForEachToken) {
  EXPECT_TRUE(refuses({tokens(0, {1}), rows("logits.0", 1), rows("hidden.0.embedding", 2)},
                      "embedding of sequence 0 is not of the length of its tokens"));
  EXPECT_TRUE(refuses({tokens(0, {1}), rows("logits.0", 1), rows("predicted.0.mtp.layers.0", 2)},
                      "mtp.layers.0 of sequence 0"));
}

TEST_F(ReferenceTest, NamesAFileThatIsNotThere) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"none.safetensors"},
                    [&] { read_reference(dir_ / "none.safetensors"); }));
}

}  // namespace reference_test
}  // namespace ferry::converter
